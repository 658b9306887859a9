"""A failed recording leaves torch unchanged: torch.cuda is replaced here; tests/gpu/test_recordings.py uses a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from nearfar._utils import cuda_graph


class Cuda:
    """What torch.cuda does: a capture that became invalid ends with an error, and leaves allocator and generator."""

    def __init__(self):
        self.recording = self.invalid = False  # as generators see it
        self.pools, self.uses, self.made = set(), {}, 0
        cuda = self

        class CUDAGraph:
            def capture_begin(self, pool=None, capture_error_mode=None):
                assert capture_error_mode == "thread_local"
                self.place = pool or object()
                cuda.recording = True
                cuda.pools.add(self.place)
                cuda.uses[self.place] = cuda.uses.get(self.place, 0) + 1

            def capture_end(self):
                if cuda.invalid or not cuda.recording:
                    cuda.invalid = False
                    raise RuntimeError("capture_end")
                cuda.recording = False
                cuda.pools.remove(self.place)

            def pool(self):
                return self.place

            def replay(self):
                cuda.made += 1

        stream = SimpleNamespace(cuda_stream=7, wait_stream=lambda other: None)
        self.cuda = SimpleNamespace(
            CUDAGraph=CUDAGraph,
            Stream=lambda device: stream,
            current_stream=lambda device: stream,
            device=lambda device: nullcontext(),
            stream=lambda stream: nullcontext(),
            synchronize=lambda: None,
            current_device=lambda: 0,
            graph_pool_handle=lambda: object(),
        )
        self._C = SimpleNamespace(_cuda_endAllocateToPool=self.end, _cuda_releasePool=self.release)

    def zeros(self, n, device):
        return None

    def end(self, device, pool):
        if pool not in self.pools:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.pools.remove(pool)

    def release(self, device, pool):
        self.uses[pool] -= 1


@pytest.fixture
def cuda(monkeypatch):
    found = Cuda()
    monkeypatch.setattr(cuda_graph, "torch", found)
    monkeypatch.setattr(cuda_graph, "POOLS", {})
    monkeypatch.setattr(cuda_graph, "FAILED", [])
    return found


LIKE = SimpleNamespace(device="cuda:0", get_device=lambda: 0)


@pytest.mark.parametrize("invalid", [True, False], ids=["the capture fails", "Python fails"])
@pytest.mark.parametrize("at", [1, 2], ids=["in the call of before", "in the capture"])
def test_a_recording_that_fails(cuda, at, invalid):
    start, _ = cuda_graph.record(lambda: 1, LIKE)
    calls = []

    def body():
        calls.append(1)
        if len(calls) == at:
            cuda.invalid = invalid and at == 2
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        cuda_graph.record(body, LIKE)
    assert (cuda.recording, cuda.invalid, cuda.pools) == (False, False, set())
    before = set(cuda.uses)
    again, found = cuda_graph.record(lambda: 2, LIKE)
    assert bool(set(cuda.uses) - before) == (at == 2)  # not in the pool of the one that failed
    start()
    again()
    assert (found, cuda.made) == (2, 2)
    assert len(cuda_graph.FAILED) == (invalid and at == 2)


def test_recordings_of_a_stream_share_a_pool(cuda):
    for _ in range(3):
        cuda_graph.record(lambda: 1, LIKE)
    assert list(cuda.uses.values()) == [1 + 3]
