"""`ProcessGroup`: the processes that share one loss call. Each sweeps some of the strips; what they found is added up.

Every rank holds all rows and gets all results, so that a value, a dual or a gradient is the same number everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nearfar._utils.rng import set_states, states


class ProcessGroup:
    """One process alone: nothing to add up. `Group` is several."""

    rank: int = 0
    world: int = 1

    def gather(self, x: Tensor) -> Tensor:
        """X [...] of every rank, [world, ...]."""
        return x[None]

    def sum(self, x: Tensor) -> Tensor:
        """Σ over ranks."""
        return x

    def largest(self, x: Tensor) -> Tensor:
        """The largest of all ranks, elementwise; a NaN shows."""
        return self.gather(x).amax(dim=0)

    def any(self, mask: Tensor) -> Tensor:
        """True where it is so on some rank."""
        return self.gather(mask.to(torch.uint8)).amax(dim=0) > 0

    def all_agree(self, answer: bool, like: Tensor) -> bool:
        """Whether every rank says yes; all hear the same (a read)."""
        return answer

    @contextmanager
    def same_draws(self, device: torch.device) -> Iterator[None]:
        """All ranks draw what the first one would."""
        yield


ALONE = ProcessGroup()


@contextmanager
def in_touch(owner: str, group: Any = None) -> Iterator[None]:
    """Say in one sentence that other ranks are gone, where torch.distributed says so in words of its own.

    Args:
        owner: whom the message names.
        group: the group; None for all processes.
    """
    try:
        yield
    except RuntimeError as problem:
        if not several(group) or not _of_the_wire(problem):
            raise
        raise RuntimeError(
            f"{owner}: rank {dist.get_rank(group)} of {dist.get_world_size(group)} lost touch with the others, because "
            "one of them died, stopped or did not come to the same call in time; look at the other ranks' messages, "
            "then go on from the last checkpoint."
        ) from problem


def _of_the_wire(problem: RuntimeError) -> bool:
    """Whether an error comes from the exchange between processes."""
    words = str(problem).lower()
    return isinstance(problem, dist.DistError) or "gloo" in words or "nccl" in words


def several(group: Any = None) -> bool:
    """Whether other processes take part."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


class Group(ProcessGroup):
    """The processes of a `torch.distributed` group.

    Args:
        owner: whom messages name.
        group: the group; None for all processes.
    """

    def __init__(self, owner: str, group: Any = None) -> None:
        self.owner = owner
        self.group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)

    @property
    def wire(self) -> torch.device:
        """Where a message must lie that all ranks can exchange, wherever their rows are."""
        kinds = [pair.split(":")[0] for pair in dist.get_backend_config(self.group).split(",")]
        return torch.device("cpu" if "cpu" in kinds else kinds[0])

    def objects(self, x: Any) -> list[Any]:
        """X of every rank, any object that can be pickled; slow, for what is said once."""
        found: list[Any] = [None] * self.world
        with self._talk():
            dist.all_gather_object(found, x, group=self.group)
        return found

    def _talk(self) -> AbstractContextManager[None]:
        return in_touch(self.owner, self.group)

    def gather(self, x: Tensor) -> Tensor:
        found = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.world)]
        with self._talk():
            dist.all_gather(found, x.detach().contiguous(), group=self.group)
        return torch.stack(found)

    def sum(self, x: Tensor) -> Tensor:
        # a copy: what is asked for may be a part of something else
        total = x.detach().clone(memory_format=torch.contiguous_format)
        with self._talk():
            dist.all_reduce(total, group=self.group)
        return total

    def all_agree(self, answer: bool, like: Tensor) -> bool:
        no = torch.tensor(0 if answer else 1, device=like.device)
        return not bool(self.sum(no))

    @contextmanager
    def same_draws(self, device: torch.device) -> Iterator[None]:
        own = states(device)
        there = None if own[1] is None else self._of_first(own[1], device)
        set_states((self._of_first(own[0], device), there), device)
        try:
            yield
        finally:
            if self.rank:  # the others go on with their own numbers: dropout must differ
                set_states(own, device)

    def _of_first(self, state: Tensor, device: torch.device) -> Tensor:
        first = state.to(device)
        with self._talk():
            dist.broadcast(first, dist.get_global_rank(self.group, 0) if self.group else 0, group=self.group)
        return first.to(state.device)


def cuts(rows: int, tall: int, ranks: ProcessGroup) -> list[slice]:
    """Strips of at most `tall` of the rows; with several ranks as many for each, in turns there and back.

    There and back: where a strip's work shrinks with its place, each rank still gets as much as the others.
    """
    if ranks.world == 1:
        return [slice(i, min(i + tall, rows)) for i in range(0, rows, tall)]
    count = ranks.world * -(-rows // (tall * ranks.world))
    count = min(count, rows - rows % ranks.world)
    mine = (i for i in range(count) if _owner(i, ranks.world) == ranks.rank)
    return [slice(rows * i // count, rows * (i + 1) // count) for i in mine]


def _owner(strip: int, world: int) -> int:
    turn, place = divmod(strip, world)
    return place if turn % 2 == 0 else world - 1 - place
