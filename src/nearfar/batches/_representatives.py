"""`Representatives`: batches of alternating projections (Can et al. 2019), with one representative per class."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearfar._utils.checks import check_choice, check_positive, check_whole
from nearfar._utils.tensors import check_tensor
from nearfar.batches._hard_classes import HardClasses
from nearfar.batches._sampler import Classes, GlobalBatches, Rows, State, as_tensor, class_rounds, shuffle_within

Order = Literal["representatives", "classes"]


class _Plan(NamedTuple):
    """M steps: their number, their projection, the queues at that projection, and the classes [M, B/I] of each step."""

    part: int
    projection: int
    queues: Rows
    choice: Rows


SHUFFLE, CHOICE, OTHERS = 1, 2, 3  # purposes of draws, each with generators of its own


class Representatives(GlobalBatches):
    """Batches of B/I classes: the representative of each class, fixed for M steps, and I-1 other samples of it.

    This is algorithm 1 of Can et al. 2019. A **projection** is M = ceil(ρ / p) steps, p = min(1, B/(I·L)) for L
    classes, so that a representative is used about ρ times. At the next projection every class takes the next sample of
    its shuffled queue: each sample is the representative once in a **cycle** of its class (as many projections as it
    has samples; then the queue is reshuffled). Within a projection all classes occur once before one occurs again. The
    others are drawn without replacement; a class with fewer than I samples repeats them, and a class of one sample
    repeats that one.

    Pass the loss `Relation.from_labels(y, representatives=sampler.mask)`: only pairs with a representative then count.
    Any loss may be used.

    **Hard negative classes** (`hard_classes`): a batch holds a seed class and the classes whose representatives are
    nearest to its own; call `update` with the representatives' embeddings after each forward pass. The choice depends
    on training, so the sampler must not run ahead of it: use `num_workers=0` in the DataLoader. All ranks must update
    with the same rows (those of the global batch), otherwise their batches differ. A state can then be saved only when
    all yielded batches have been used.

    Args:
        labels: [n] whole numbers: a tensor, an array or a list.
        batch_size: B; `samples` must divide it. With fewer than B/I classes a batch holds all of them and is smaller.
        samples: I, at least 2.
        rho: ρ.
        steps: M, instead of the rule; M = 1 is the batch rule of N-pair. "converged": a multiple of the rule's M, by
            the reported violations.
        hard_classes: True, or a `HardClasses` table with options.
        all_pairs: let every pair of a batch count in a training run: hard classes without projections (with `steps=1`).
        order: "representatives": all of them first, then the others, class after class; "classes": each class
            together, its representative first, so that ranks hold whole classes where `world` divides B/I.
        seed: determines the order of everything.
        rank: the rank of this process, which selects its part of each batch; see `GlobalBatches`.
        world: how many ranks share a batch.

    Attributes:
        steps_per_projection: M; also `len()`: an iteration is one projection (M steps of one if "converged").
        mask: [rows of this rank] boolean, true for representatives; the same for every batch.

    >>> sampler = Representatives([0, 0, 1, 1, 2, 2], batch_size=4, samples=2, rho=2)
    >>> sampler.steps_per_projection, sampler.mask.tolist()
    (3, [True, True, False, False])
    """

    def __init__(
        self,
        labels: Tensor | NDArray[Any] | Sequence[int],
        *,
        batch_size: int,
        samples: int = 2,
        rho: float = 6,
        steps: int | Literal["converged"] | None = None,
        hard_classes: bool | HardClasses = False,
        all_pairs: bool = False,
        order: Order = "representatives",
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self._classes = Classes("Representatives", labels)
        self._check(batch_size, samples, rho, steps, order)
        self.samples = int(samples)
        self.classes = min(int(batch_size) // self.samples, len(self._classes))
        super().__init__(batch_size=self.classes * self.samples, seed=seed, rank=rank, world=world)
        self.order, self.all_pairs = order, all_pairs
        # p = (B/I)/L, at most 1; the tiny slack keeps a quotient that is whole from being rounded up
        rule = math.ceil(rho * len(self._classes) / self.classes - 1e-9)
        self.converged = steps == "converged"
        self.steps_per_projection = max(1, rule) if steps is None or isinstance(steps, str) else int(steps)
        self.hard_classes = _table(hard_classes, len(self._classes))
        self._used = np.zeros(len(self._classes), dtype=np.int64)
        self._plan: _Plan | None = None
        self._switches: list[int] = []  # the first steps of projections 1, 2, ...
        self._reported = 0  # batches
        self._reports: list[float] = []  # since the last multiple of M
        self._before: float | None = None  # the mean of the M reports before, in the same projection

    def _check(self, batch_size: int, samples: int, rho: float, steps: int | str | None, order: str) -> None:
        owner = "Representatives"
        check_whole(owner, "batch_size", batch_size)
        check_whole(owner, "samples", samples)
        check_positive(owner, "rho", rho)
        check_choice(owner, "order", order, ("representatives", "classes"))
        if isinstance(steps, str):
            check_choice(owner, "steps", steps, ("converged",))
        elif steps is not None:
            check_whole(owner, "steps", steps)
        if samples < 2:
            raise ValueError(f"{owner}: samples must be at least 2, a representative and another, but is {samples}.")
        if batch_size % samples or batch_size < 2 * samples:
            raise ValueError(
                f"{owner}: batch_size must be a multiple of samples = {samples} with two classes or more, "
                f"but came as {batch_size}."
            )

    def __len__(self) -> int:
        return self.steps_per_projection

    @property
    def projection(self) -> int:
        """The number of the projection that the next batch belongs to, from 0."""
        return self.projection_of(self.step)

    def projection_of(self, step: int) -> int:
        """The number of the projection that batch number `step` belongs to; if "converged", of those up to the next."""
        if self.converged:
            return bisect_right(self._switches, step)
        return step // self.steps_per_projection

    def is_new_projection(self, step: int | None = None) -> bool:
        """Whether batch number `step` (default: the next) starts a projection, when `Proximal.anchor()` is due."""
        step = self.step if step is None else step
        return step == 0 or self.projection_of(step) != self.projection_of(step - 1)

    @property
    def mask(self) -> Tensor:
        """Boolean mask [rows of this rank]: which rows of a batch are representatives."""
        place = torch.arange(self.batch_size)
        chosen = place < self.classes if self.order == "representatives" else place % self.samples == 0
        return chosen[self.part]

    def representatives_of(self, projection: int) -> Tensor:
        """The representative of each class in a projection: row numbers [L], classes by ascending label."""
        known = self._classes
        return as_tensor(self._queues(projection)[known.start + projection % known.size])

    def update(self, labels: Tensor, embeddings: Tensor) -> None:
        """Store the embeddings [r, d] of forwarded representatives with labels [r] in the `HardClasses` table."""
        if self.hard_classes is None:
            return
        check_tensor("Representatives", "labels", labels)
        given = labels.detach().cpu().numpy()
        place = np.searchsorted(self._classes.names, given).clip(max=len(self._classes) - 1)
        strange = self._classes.names[place] != given
        if strange.any():
            raise ValueError(f"Representatives: update got label {given[strange][0]}, which no sample has.")
        self.hard_classes.update(as_tensor(place), embeddings)

    def report(self, violation: float) -> None:
        """Report how far the last batch violates the constraints; the same number on all ranks.

        After each M reports the next batch starts a new projection, unless their mean is below that of the M before.
        """
        if not self.converged:
            return
        if self._reported != self.step - 1:
            raise ValueError(
                f"Representatives: report must be called once after each batch, but {self._reported} of {self.step} "
                "batches have been reported already."
            )
        self._reported = self.step
        self._reports.append(float(violation))
        if len(self._reports) < self.steps_per_projection:
            return
        mean, self._reports = sum(self._reports) / len(self._reports), []
        falling = self._before is None or mean < self._before
        if not falling:
            self._switches.append(self.step)
        self._before = mean if falling else None

    def state_dict(self, step: int | None = None) -> State:
        state = super().state_dict(step)
        if self.hard_classes is None and not self.converged:
            return state
        if state["step"] != self.step:
            raise ValueError(
                'Representatives: with hard classes or steps="converged" a state can be saved only when all '
                f"{self.step} yielded batches have been used, but step={step} came; use a DataLoader with "
                "num_workers=0."
            )
        if self.converged:
            state |= {"switches": [*self._switches], "reports": [*self._reports], "before": self._before}
        if self.hard_classes is not None:
            state |= {"used": as_tensor(self._used.copy()), "table": self.hard_classes.state_dict()}
        return state

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        if self.converged:
            self._switches, self._reports = [*state["switches"]], [*state["reports"]]
            self._before, self._reported, self._plan = state["before"], self.step, None
        if self.hard_classes is not None:
            self._used = state["used"].cpu().numpy().copy()  # a checkpoint is read onto the device
            self.hard_classes.load_state_dict(state["table"])

    def _settings(self) -> list[int]:
        kind = 0 if self.hard_classes is None else self.hard_classes.kind
        shape = [self.classes, self.samples, self.steps_per_projection, self.order == "classes", self.seed, kind]
        return [self._classes.mark, *shape, *([-1] if self.converged else [])]

    def _global(self, step: int) -> Rows:
        part, place = divmod(step, self.steps_per_projection)
        if self.converged and self._reported != step:
            raise ValueError(
                'Representatives: steps="converged" needs report(violation) after each batch and before the next, but '
                f"batch {step} came without; use num_workers=0 in the DataLoader."
            )
        projection = self.projection_of(step)
        if self._plan is None or self._plan.part != part:
            self._plan = _Plan(part, projection, self._next_queues(projection), self._choice(part))
        queues, choice = self._plan.queues, self._plan.choice
        random = self._random(OTHERS, step)
        if self.hard_classes is None:
            drawn = choice[place]
        else:
            if self.is_new_projection(step):
                self._used[:] = 0
                self.hard_classes.new_projection()
            drawn = self.hard_classes.choose(random, self._used, self.classes)
            self._used[drawn] += 1
        return self._compose(random, queues, projection, drawn)

    def _choice(self, part: int) -> Rows:
        """The classes [M, B/I] of M steps, part number `part`; none where the `HardClasses` table chooses."""
        if self.hard_classes is not None:
            return np.empty((0, self.classes), dtype=np.int64)
        random = self._random(CHOICE, part)
        return class_rounds(random, len(self._classes), self.classes, self.steps_per_projection)

    def _next_queues(self, projection: int) -> Rows:
        """`_queues`, computed from those of the previous projection if they are cached."""
        if self._plan is None or self._plan.projection not in (projection - 1, projection):
            return self._queues(projection)
        if self._plan.projection != projection:
            self._shuffle(self._plan.queues, projection)
        return self._plan.queues

    def _queues(self, projection: int) -> Rows:
        """Row numbers [n], class after class, in the order of the queues at `projection`.

        A class of n samples is shuffled at projections 0, n, 2n, ... by the generator of that projection, so that the
        order is known for any projection without the ones before it.
        """
        order = self._classes.rows.copy()
        last = projection - projection % self._classes.size  # [L] when each class was last shuffled
        for moment in np.unique(last).tolist():  # ascending, so that later shuffles overwrite earlier ones
            self._shuffle(order, moment)
        return order

    def _shuffle(self, order: Rows, moment: int) -> None:
        """Shuffle the classes whose cycle starts at projection `moment`."""
        known = self._classes
        there = np.flatnonzero((moment % known.size == 0)[known.of])
        order[there] = known.rows[there[shuffle_within(self._random(SHUFFLE, moment), known.of[there])]]

    def _compose(self, random: np.random.Generator, queues: Rows, projection: int, drawn: Rows) -> Rows:
        start, size = self._classes.start[drawn], self._classes.size[drawn]
        here = projection % size
        step = _distinct(random, np.maximum(size - 1, 1), self.samples - 1) + 1
        first = queues[start + here]
        others = queues[start[:, None] + (here[:, None] + step) % size[:, None]]
        if self.order == "classes":
            return np.concatenate([first[:, None], others], axis=1).reshape(-1)
        return np.concatenate([first, others.reshape(-1)])


def _table(given: bool | HardClasses, classes: int) -> HardClasses | None:
    if isinstance(given, HardClasses):
        if given.classes != classes:
            raise ValueError(
                f"Representatives: hard_classes must be a table of the {classes} classes of the labels, "
                f"but came with {given.classes}."
            )
        return given
    return HardClasses(classes) if given else None


def _distinct(random: np.random.Generator, size: Rows, count: int) -> Rows:
    """Draw integers [g, count] below size [g], without repetition in a row where size ≥ count, else in turn."""
    chance = random.random((len(size), count))
    drawn = np.empty((len(size), count), dtype=np.int64)
    for i in range(count):
        # draw a rank among the remaining numbers, then move it past the numbers already drawn
        place = (chance[:, i] * np.maximum(size - i, 1)).astype(np.int64)
        before = np.sort(drawn[:, :i], axis=1)
        for j in range(i):
            place += place >= before[:, j]
        drawn[:, i] = place
    return np.take_along_axis(drawn, np.arange(count) % size[:, None], axis=1)
