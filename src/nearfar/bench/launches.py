"""How many operations a step asks of the device: kernel launches on a GPU, calls of PyTorch's operators on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nearfar.bench.subjects import Step, backward

__all__ = ["launches"]

LAUNCH = ("LaunchKernel", "GraphLaunch")
"""What the names of CUDA's functions that start kernels have in them: of the runtime, of the driver, and of graphs."""


def launches(step: Step, e: Tensor, y: Tensor) -> int:
    """The number of kernels that one step starts on a GPU (a CUDA graph counts once), or of operators on a CPU."""
    backward(step, e, y)  # what is set up once does not count
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
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as watched:
        backward(step, e, y)
        torch.cuda.synchronize()
    return kernels_of([each.name for each in watched.events()])


def kernels_of(names: list[str]) -> int:
    """The number of launches among the names of a profile's events.

    >>> kernels_of(["aten::mm", "cudaLaunchKernel", "cuLaunchKernelEx", "cudaMemcpyAsync", "cudaGraphLaunch"])
    3
    """
    return sum(any(word in name for word in LAUNCH) for name in names)
