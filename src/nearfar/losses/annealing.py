"""`Anneal`: hard mining that begins soft. The weights of a group go from even to all on the hardest, step by step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nearfar._utils.checks import check_positive, check_whole
from nearfar.sets import KL, UncertaintySet, Worst

__all__ = ["Anneal", "Annealing", "advance"]


@dataclass(frozen=True)
class Anneal:
    """The set after t steps is KL(γ) with γ = start·(end/start)^{t/steps}, and from t = steps on `Worst` itself.

    A large γ weighs all pairs of a group the same (Mean), a small one the hardest alone. γ is in the units of the
    similarity: distances of unit rows lie in [0, 2].

    Args:
        steps: after so many the loss is the plain hard one.
        start: γ before the first step.
        end: γ that would be reached at `steps`, where the maximum takes over.

    >>> [Anneal(10).over(t) for t in (0, 5, 10)]
    [KL(zero='keep', zero_member=False, gamma=1.0, normalized=True), KL(..., gamma=0.1, normalized=True), Worst(...)]
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
        """The set after so many steps."""
        if step >= self.steps:
            return Worst()
        return KL(self.start * (self.end / self.start) ** (step / self.steps))


class Annealing(nn.Module):
    """How far an `Anneal` has come; the number of steps is its state, kept in `state_dict`."""

    def __init__(self, plan: Anneal) -> None:
        super().__init__()
        self.plan = plan
        self.done = 0

    @property
    def over(self) -> UncertaintySet:
        """The set now."""
        return self.plan.over(self.done)

    def step(self) -> None:
        """One step was made."""
        self.done += 1

    def get_extra_state(self) -> Tensor:  # noqa: D102  (a tensor, as every file format of weights wants them)
        return torch.tensor(self.done)

    def set_extra_state(self, state: Tensor) -> None:  # noqa: D102
        self.done = int(state)  # a plain number: reading it never waits for a device

    def extra_repr(self) -> str:  # noqa: D102
        return f"{self.plan}, done={self.done}"


def advance(loss: nn.Module) -> None:
    """Move every annealing inside a loss on by one step; a loss without one is left as it is."""
    for part in loss.modules():
        if isinstance(part, Annealing):
            part.step()
