"""`ProcessGroup`: the processes that share one loss call. Each computes some strips, and partial sums are added.

Every rank holds all rows and gets all results, so that a value, a dual or a gradient is the same number on every rank.
"""

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nearfar._utils.rng import set_states, states


class ProcessGroup:
    """A single process, for which every exchange is the identity; `Group` is several processes."""

    rank: int = 0
    world: int = 1

    def gather(self, x: Tensor) -> Tensor:
        """Stack `x` [...] of every rank: [world, ...]."""
        return x[None]

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks."""
        return x

    def largest(self, x: Tensor) -> Tensor:
        """The elementwise maximum over ranks; a NaN stays NaN."""
        return self.gather(x).amax(dim=0)

    def any(self, mask: Tensor) -> Tensor:
        """True where the mask is true on at least one rank."""
        return self.gather(mask.to(torch.uint8)).amax(dim=0) > 0

    def all_agree(self, answer: bool, like: Tensor) -> bool:
        """Whether `answer` is true on every rank; the same result on all of them (reads a device value)."""
        return answer

    @contextmanager
    def same_draws(self, device: torch.device) -> Iterator[None]:
        """Make all ranks draw the random numbers of the first one, within the block."""
        yield

    def copy_from(self, rank: int, x: Tensor) -> Tensor:
        """Copy the contiguous `x` of one rank into that of all others, which must have the same shape."""
        return x

    def collect(self, rank: int, x: Tensor) -> Tensor | None:
        """Stack `x` [...] of every rank on one of them: [world, ...] there, None elsewhere."""
        return x[None]

    def beat(self, device: torch.device) -> None:
        """Exchange an empty message, so that no rank waits too long for the next one."""


ALONE = ProcessGroup()


@contextmanager
def in_touch(owner: str, group: Any = None) -> Iterator[None]:
    """Turn a failed exchange of torch.distributed into one sentence that says that other ranks are gone."""
    try:
        yield
    except RuntimeError as problem:
        words = str(problem).lower()
        if not several(group) or not (isinstance(problem, dist.DistError) or "gloo" in words or "nccl" in words):
            raise  # it does not come from the communication between processes
        raise RuntimeError(
            f"{owner}: rank {dist.get_rank(group)} of {dist.get_world_size(group)} lost touch with the others, because "
            "one of them died, stopped or did not come to the same call in time; look at the other ranks' messages, "
            "then go on from the last checkpoint."
        ) from problem


def several(group: Any = None) -> bool:
    """Whether the group has more than one process."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def gather_objects(owner: str, x: Any) -> list[Any]:
    """Gather `x`, any object that can be pickled, from all processes; `[x]` if there is one."""
    return Group(owner).objects(x) if several() else [x]


def close() -> None:
    """Leave the gloo group of this process, if there is one, because its threads must end before Python does.

    A thread that releases a tensor while Python shuts down aborts the process (SIGABRT). Groups of other backends are
    left alone: destroying them waits for ranks that may be gone.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_backend() == "gloo":
        gc.collect()  # a network that is still alive holds the group
        dist.destroy_process_group()


class Group(ProcessGroup):
    """The processes of a `torch.distributed` group.

    Args:
        owner: the name in messages.
        group: the group; None for all processes.
    """

    def __init__(self, owner: str, group: Any = None) -> None:
        self.owner = owner
        self.group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)

    @property
    def wire(self) -> torch.device:
        """The device used for messages, whichever device holds the rows."""
        kinds = [pair.split(":")[0] for pair in dist.get_backend_config(self.group).split(",")]
        return torch.device("cpu" if "cpu" in kinds else kinds[0])

    def objects(self, x: Any) -> list[Any]:
        """Gather `x`, any object that can be pickled, from every rank; slow, for use outside the training step."""
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
        # a copy: x may be a view of another tensor
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
            if self.rank:  # the other ranks continue with their own numbers, because dropout must differ
                set_states(own, device)

    def copy_from(self, rank: int, x: Tensor) -> Tensor:
        with self._talk():
            dist.broadcast(x, self._global(rank), group=self.group)
        return x

    def collect(self, rank: int, x: Tensor) -> Tensor | None:
        found = [torch.empty_like(x) for _ in range(self.world)] if rank == self.rank else None
        with self._talk():
            dist.gather(x.contiguous(), found, self._global(rank), group=self.group)
        return None if found is None else torch.stack(found)

    def beat(self, device: torch.device) -> None:
        self.sum(torch.zeros(1, device=device))

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank) if self.group else rank

    def _of_first(self, state: Tensor, device: torch.device) -> Tensor:
        first = state.to(device)
        with self._talk():
            dist.broadcast(first, self._global(0), group=self.group)
        return first.to(state.device)


def cuts(rows: int, tall: int, ranks: ProcessGroup) -> list[slice]:
    """Cut rows into strips of at most `tall`; every rank gets the same number of them, in alternating order.

    The order is 0, 1, 1, 0, ..., so that all ranks have about the same work if later strips have less.
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
