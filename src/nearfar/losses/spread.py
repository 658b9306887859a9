"""`SpreadFloor`: a term that keeps the rows of a batch from collapsing onto one line."""

from dataclasses import replace
from typing import Annotated

import torch
from torch import Tensor, nn

from nearfar._utils.checks import check_positive
from nearfar.losses.explanation import Explanation
from nearfar.losses.robust import Call
from nearfar.losses.wrapper import Wrapper

__all__ = ["SpreadFloor"]

LEAST = 1e-6
"""Added to the spread, so that equal rows give a finite value; float32 is no more accurate."""


class SpreadFloor(Wrapper):
    """A loss plus a barrier that grows without bound as the rows of the batch collapse onto a single line.

        loss + weight · [ log(floor / V) ]₊,    V = mean over pairs of rows of  1 - cos²  = 1 - (‖UᵀU‖² - n) / (n(n-1))

    U are the n rows, normalized. V is 0 if all rows are equal, and also if they form two opposite clusters. Clusters of
    equal size at right angles, h of them, have V = 1 - 1/h; random rows in d dimensions have 1 - 1/d; C classes as far
    apart as possible (a simplex) have 1 - 1/(C-1)². V needs no labels, so positive pairs count too: with M of n rows in
    each class they reduce V by about (M-1)/(n-1). So a floor must lie below 1 - 1/d - (M-1)/(n-1); ½ does for d ≥ 3 and
    batches of six classes or more.

    Algebra: a loss + weight · [log(floor / spread of the batch)]₊.

    At collapse, a hard-mining loss is bounded, and its gradient on two rows does not depend on their distance. This
    term is unbounded, and its gradient grows like one over the distance. Above the floor it is 0, which leaves the loss
    unchanged.

    Args:
        loss: any loss of `nf.losses`.
        floor: the smallest V without a barrier, in (0, 1); two clusters at right angles have V = ½.
        weight: factor of the barrier; below 1, training may settle at a V somewhat below the floor.

    Relations: above the floor it is `loss`, exactly, value and gradient.

    >>> import torch, nearfar as nf
    >>> rows, labels = torch.eye(6), torch.tensor([0, 0, 1, 1, 2, 2])
    >>> loss = nf.losses.Triplet(mining="hard")
    >>> bool(nf.losses.SpreadFloor(loss)(rows, labels) == loss(rows, labels))
    True
    >>> heap = torch.tensor([1.0, 0.0]) + 0.01 * rows[:, :2]
    >>> bool(nf.losses.SpreadFloor(loss)(heap, labels) > 2 + loss(heap, labels))
    True
    """

    floor: float = 0.5
    weight: Annotated[float, check_positive] = 1.0

    def _remake(self) -> None:
        super()._remake()
        check_floor("SpreadFloor", self.floor)

    @property
    def spread_floor(self) -> tuple[float, float]:
        """Floor and weight."""
        return self.floor, self.weight

    def barrier(self, embeddings: Tensor) -> Tensor:
        """The barrier weight · [log(floor / V)]₊ of rows [n, d]; 0 for fewer than two rows."""
        return barrier(embeddings, self.floor, self.weight)

    def _value(self, call: Call) -> Tensor:
        return self.loss._value(call) + self.barrier(call.embeddings)

    def _explanation(self, call: Call) -> Explanation:
        """The explanation of the wrapped loss, with the barrier included in the value."""
        found = self.loss._explanation(call)
        return replace(found, value=found.value + self.barrier(call.embeddings).detach())


def check_floor(owner: str, floor: float) -> None:
    """Require a floor between 0 and 1."""
    if not 0 < floor < 1:
        raise ValueError(f"{owner}: floor must lie between 0 and 1, but came as {floor!r}.")


def barrier(embeddings: Tensor, floor: float, weight: float = 1.0) -> Tensor:
    """Weight · [log(floor / V)]₊ of rows [n, d], in float32 at least."""
    wide = torch.promote_types(embeddings.dtype, torch.float32)
    return weight * torch.relu(torch.log(floor / (spread(embeddings.to(wide)) + LEAST)))


def spread_bound(value: Tensor, floor: float, weight: float = 1.0) -> Tensor:
    """The least V for a value F of a loss L ≥ 0 with this barrier: V ≥ κ·exp(-F/w) - 10⁻⁶."""
    return (floor * torch.exp(-value / weight) - LEAST).clamp_min(0.0)


def spread(embeddings: Tensor) -> Tensor:
    """V, the mean over pairs of rows [n, d] of 1 - cos²: 0 on one line, 1 for fewer than two rows.

    It takes n·d² multiplications and memory for d² numbers, however many rows there are.
    """
    n = len(embeddings)
    if n < 2:
        return embeddings.sum() * 0 + 1
    rows = nn.functional.normalize(embeddings, dim=1)
    # a row of length 0 has no direction and adds nothing; each row's pair with itself is subtracted
    return 1 - ((rows.T @ rows).square().sum() - rows.square().sum(dim=1).square().sum()) / (n * (n - 1))
