"""Record the GPU work of a function as a CUDA graph, and leave torch unchanged if that fails."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

POOLS: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
"""For each device and stream, an empty graph that keeps the memory pool of its recordings alive. They can share it,
since they never run at the same time."""
FAILED: list[torch.cuda.CUDAGraph] = []
"""Graphs whose recording failed: torch's allocator of pinned memory still points to them."""


def record(body: Callable[[], Any], like: Tensor) -> tuple[Callable[[], None], Any]:
    """Record the GPU work of `body`; returns a function that replays it, and its results, which a replay overwrites.

    The body runs once before the recording, and that run uses up random numbers.
    """
    now = torch.cuda.current_stream(like.device)
    side = torch.cuda.Stream(like.device)  # type: ignore[no-untyped-call]
    side.wait_stream(now)
    with torch.cuda.device(like.device), torch.cuda.stream(side):
        where = like.get_device(), now.cuda_stream
        if where not in POOLS:
            POOLS[where] = _capture(lambda: torch.zeros(1, device=like.device), torch.cuda.graph_pool_handle())[0]
        body()  # libraries initialize on the first call on a stream
        graph, found = _capture(body, POOLS[where].pool())
    now.wait_stream(side)
    return graph.replay, found


def _capture(body: Callable[[], Any], pool: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        found = body()
        graph.capture_end()
    except BaseException:
        _abandon(graph, pool)
        raise
    return graph, found


def _abandon(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """End a failed capture, because torch would leave its allocator and generator in the capturing state."""
    POOLS.clear()
    with suppress(RuntimeError):
        graph.capture_end()
        return  # only Python code failed
    FAILED.append(graph)
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        torch._C._cuda_releasePool(torch.cuda.current_device(), pool)
    # a successful capture ends the generator's capturing state, so that earlier graphs can use it again
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    torch.zeros(1, device="cuda")
    graph.capture_end()
