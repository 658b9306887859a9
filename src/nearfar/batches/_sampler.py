"""`GlobalBatches`, the base of the samplers: rows by class, one global batch split among ranks, a state to resume.

Batch number t is a function of the seed and t alone (except with hard classes), so a state is t and a fingerprint of
the settings, and a resumed sampler continues from t. Every rank draws the whole batch and takes its own rows.
"""

import itertools
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Sampler

from nearfar._utils.arrays import int64_of
from nearfar._utils.checks import check_seed, check_whole
from nearfar._utils.keywords import Keywords

Rows = NDArray[np.int64]
State = dict[str, Any]


class Classes:
    """The rows of each class, for n labels with L different values; class number c stands for names[c]."""

    def __init__(self, owner: str, labels: Tensor | NDArray[Any] | Sequence[int]) -> None:
        given = np.asarray(labels.cpu() if isinstance(labels, Tensor) else labels)
        if given.size and (given.ndim != 1 or given.dtype.kind not in "iu"):
            raise ValueError(
                f"{owner}: labels must be one whole number a sample, but came as {given.dtype} {list(given.shape)}."
            )
        given = int64_of(owner, "labels", given).reshape(-1)
        # [L] the labels, ascending, and how many rows each class has
        self.names, numbers, self.size = np.unique(given, return_inverse=True, return_counts=True)
        if len(self.names) < 2:
            raise ValueError(
                f"{owner}: labels must hold at least two classes, but {len(given)} labels of {len(self.names)} came; "
                "a loss needs pairs of different classes."
            )
        self.rows: Rows = np.argsort(numbers, kind="stable").astype(np.int64)  # [n] row numbers, class after class
        self.start: Rows = np.cumsum(self.size) - self.size  # [L] where each class begins in `rows`
        self.of: Rows = np.repeat(np.arange(len(self.names)), self.size)  # [n] the class of each entry of `rows`
        self.mark = zlib.crc32(given.tobytes())

    def __len__(self) -> int:
        return len(self.names)


class GlobalBatches(Keywords, Sampler[list[int]], ABC):
    """Base class of the batch samplers, which yield lists of row numbers: `DataLoader(data, batch_sampler=...)`.

    One iteration is one round (an epoch, a projection), or the rest of it; the next iteration continues with the next
    round. `len()` is the number of batches in a whole round.

    **Ranks.** With `world` ranks, rank r takes rows r·B//world up to (r+1)·B//world of each global batch of B rows: the
    parts, concatenated, are the batch of a single process, and their sizes differ by at most one.

    **State.** `step` counts the batches that were yielded. A DataLoader fetches batches before they are used, so a
    training loop that has used t batches saves `state_dict(step=t)`, the state before batch number t. A state holds
    neither rank nor world, so that any number of ranks may load it.

    Attributes:
        step: the number of the next batch, from 0.
        batch_size: B, the rows of a global batch.
    """

    def __init__(self, *, batch_size: int, seed: int, rank: int, world: int) -> None:
        owner = type(self).__name__
        check_whole(owner, "world", world)
        _check_counted(owner, "rank", rank, world - 1)
        check_seed(owner, seed)
        if batch_size < world:
            raise ValueError(
                f"{owner}: a global batch must have a row for each rank, but {batch_size} rows came for world={world}."
            )
        self.batch_size = batch_size
        self.seed = int(seed)
        self.rank = int(rank)
        self.world = int(world)
        self.step = 0

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _global(self, step: int) -> Rows:
        """The rows [B] of global batch number `step`."""

    @abstractmethod
    def _settings(self) -> list[int]:
        """The settings that must agree between a saved state and this sampler."""

    @property
    def part(self) -> slice:
        """The slice of a global batch that belongs to this rank."""
        return slice(self.rank * self.batch_size // self.world, (self.rank + 1) * self.batch_size // self.world)

    def __iter__(self) -> Iterator[list[int]]:
        end = (self.step // len(self) + 1) * len(self)
        while self.step < end:
            rows: list[int] = self._global(self.step)[self.part].tolist()
            # counted before the yield: a state saved while the batch is in use is the one after it
            self.step += 1
            yield rows

    def state_dict(self, step: int | None = None) -> State:
        """The state before batch number `step` (default: after all yielded batches)."""
        owner = type(self).__name__
        wanted = self.step if step is None else step
        _check_counted(owner, "step", wanted, self.step)
        return {"sampler": owner, "step": int(wanted), "mark": self._mark()}

    def load_state_dict(self, state: State) -> None:
        """Continue with batch number state["step"]; the labels and settings must be those of the saved sampler."""
        owner = type(self).__name__
        if not isinstance(state, dict) or state.get("sampler") != owner:
            came = state.get("sampler") if isinstance(state, dict) else type(state).__name__
            raise ValueError(f"{owner}: the state must be one of {owner}, but came from {came!r}.")
        if state["mark"] != self._mark():
            raise ValueError(
                f"{owner}: the state belongs to other labels or settings; construct "
                "the sampler as it was when the state was saved."
            )
        self.step = int(state["step"])

    def _mark(self) -> int:
        return zlib.crc32(np.asarray(self._settings(), dtype=np.int64).tobytes())

    def _random(self, *numbers: int) -> np.random.Generator:
        """The random generator for these numbers and the seed."""
        return np.random.default_rng([self.seed, *numbers])


def _check_counted(owner: str, name: str, value: object, last: int) -> None:
    """Require an integer from 0 to `last`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not 0 <= int(value) <= last:
        raise ValueError(f"{owner}: {name} must be a whole number from 0 to {last}, but came as {value!r}.")


def class_rounds(random: np.random.Generator, classes: int, width: int, count: int) -> Rows:
    """Draw class numbers [count, width]: no repetition in a row, and every class once before any occurs again.

    A stream of shuffled rounds of all classes is cut into rows.
    """
    rounds = itertools.islice(shuffled_rounds(random, classes, width), -(-count * width // classes))
    return np.concatenate(list(rounds))[: count * width].reshape(count, width)


def shuffled_rounds(random: np.random.Generator, classes: int, width: int) -> Iterator[Rows]:
    """Yield all classes in random order, again and again, for a stream that is cut into rows of `width` <= `classes`.

    Where a row spans two rounds, classes of the new round that are already in the row are swapped with later ones.
    """
    before: Rows = np.empty(0, dtype=np.int64)
    for number in itertools.count():
        fresh = random.permutation(classes)
        tail = number * classes % width
        if tail:
            _avoid(random, fresh, before[classes - tail :], width - tail)
        yield fresh
        before = fresh


def _avoid(random: np.random.Generator, fresh: Rows, taken: Rows, head: int) -> None:
    """Swap members of `taken` out of the first `head` places of `fresh`."""
    clash = np.isin(fresh, taken)
    out = np.flatnonzero(clash[:head])
    free = head + np.flatnonzero(~clash[head:])
    into = random.permutation(free)[: len(out)]
    fresh[out], fresh[into] = fresh[into].copy(), fresh[out].copy()


def shuffle_within(random: np.random.Generator, classes: Rows) -> Rows:
    """A permutation [n] that shuffles the members within each class, for class numbers [n] in ascending order."""
    # stable: a key rounded up to the next whole number then still stands before the next class
    return np.argsort(classes + random.random(len(classes)), kind="stable")


def as_tensor(rows: Rows) -> Tensor:
    """Convert row numbers to an int64 tensor."""
    return torch.from_numpy(np.ascontiguousarray(rows))
