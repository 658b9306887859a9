"""Number of operations in a step: kernel launches on a GPU, calls of PyTorch's operators on a CPU."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nearfar.bench._subjects import Step, backward

LAUNCH = ("LaunchKernel", "GraphLaunch")
"""Parts of the names of CUDA functions that start kernels, in the runtime, the driver and graphs."""
NO_KERNEL = ("Mem", "##", "ProfilerStep", "Torch-Compiled")
"""Prefixes of device events that are copies or marks, and no kernels."""


def launches(step: Step, e: Tensor, y: Tensor) -> int:
    """The number of kernels that one step starts on a GPU (a CUDA graph counts once), or of operators on a CPU."""
    backward(step, e, y)  # one-time setup does not count
    e.grad = torch.zeros_like(e)
    try:
        return _kernels(step, e, y) if e.device.type == "cuda" else _operators(step, e, y)
    finally:
        e.grad = None


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that reach the device, below autograd."""

    count: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _operators(step: Step, e: Tensor, y: Tensor) -> int:
    counter = _Counter()  # type: ignore[no-untyped-call]
    with counter:
        backward(step, e, y)
    return counter.count


def _kernels(step: Step, e: Tensor, y: Tensor) -> int:
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    # without `acc_events` torch 2.11 warns, although there is only one cycle
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
        backward(step, e, y)
        torch.cuda.synchronize()
    events = list(profiler.events() or ())
    host = [each.name for each in events if each.device_type.name == "CPU"]
    return kernels_of(host, [each.name for each in events if each.device_type.name != "CPU"])


def kernels_of(host: Iterable[str], device: Iterable[str]) -> int:
    """The number of launches, from the names of a profile's events on the host and on the device.

    Launches that the profiler missed on the host are counted by their kernels on the device. A graph is one launch of
    many kernels.

    >>> kernels_of(["aten::mm", "cudaLaunchKernel", "cudaMemcpyAsync"], ["gemm", "Memcpy HtoD", "epilogue"])
    2
    >>> kernels_of(["cudaGraphLaunch"], ["gemm", "softmax", "gemm"])
    1
    """
    host = list(host)
    started = sum(any(word in name for word in LAUNCH) for name in host)
    if any("GraphLaunch" in name for name in host):
        return started
    return max(started, sum(not name.startswith(NO_KERNEL) for name in device))
