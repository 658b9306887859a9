"""`Anneal`: a schedule for hard mining, whose weights move from uniform to all on the hardest pair of a group."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nearfar._utils.checks import check_positive, check_whole
from nearfar.sets import KL, UncertaintySet, Worst

__all__ = ["Anneal", "Annealing", "advance"]


@dataclass(frozen=True)
class Anneal:
    """A schedule of sets: after t steps KL(γ) with γ = start·(end/start)^{t/steps}, and from t = steps on `Worst`.

    A large γ weights all pairs of a group equally (Mean), a small one only the hardest. γ is in the units of the
    similarity: distances of unit rows lie in [0, 2].

    Args:
        steps: number of steps after which the loss is plain hard mining.
        start: γ before the first step.
        end: γ that would be reached at `steps`, where `Worst` takes over.

    >>> [Anneal(10).over(t) for t in (0, 5, 10)]
    [KL(..., gamma=1.0, normalized=True), KL(..., gamma=0.1, normalized=True), Worst(...)]
    """

    steps: int
    start: float = 1.0
    end: float = 0.01

    def __post_init__(self) -> None:
        check_whole("Anneal", "steps", self.steps)
        check_positive("Anneal", "start", self.start)
        check_positive("Anneal", "end", self.end)
        if self.end > self.start:
            raise ValueError(
                f"Anneal: end must not exceed start, but came as {self.end!r} above {self.start!r}; γ falls on its way "
                "to the hardest pair."
            )

    def over(self, step: int) -> UncertaintySet:
        """The set after `step` steps."""
        if step >= self.steps:
            return Worst()
        return KL(self.start * (self.end / self.start) ** (step / self.steps))


class Annealing(nn.Module):
    """The progress of an `Anneal`; the number of steps is saved in `state_dict`."""

    def __init__(self, plan: Anneal) -> None:
        super().__init__()
        self.plan = plan
        self.done = 0

    @property
    def over(self) -> UncertaintySet:
        """The set at the present step."""
        return self.plan.over(self.done)

    def step(self) -> None:
        """Count one step."""
        self.done += 1

    def get_extra_state(self) -> Tensor:  # noqa: D102  (a tensor, as every file format of weights wants them)
        return torch.tensor(self.done)

    def set_extra_state(self, state: Tensor) -> None:  # noqa: D102
        self.done = int(state)  # a plain number, because reading it never waits for a device

    def extra_repr(self) -> str:  # noqa: D102
        return f"{self.plan}, done={self.done}"


def advance(loss: nn.Module) -> None:
    """Advance every annealing schedule inside a loss by one step; does nothing if there is none."""
    for part in loss.modules():
        if isinstance(part, Annealing):
            part.step()
