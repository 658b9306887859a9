"""`Ladder`: a loss on every rung of a graded relation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field, replace
from typing import Any

import torch
from torch import Tensor, nn

from nearfar._utils.checks import check_positive
from nearfar._utils.shortcuts import check_part
from nearfar.losses.annealing import advance
from nearfar.losses.explanation import Explanation, sum_explanations
from nearfar.losses.robust import Call, Loss
from nearfar.losses.wrapper import check_scalar

__all__ = ["Ladder"]


class Ladder(Loss):
    """A loss on every rung of a graded relation: more relevant rows must be nearer.

        Σ over rungs r of  β_r · loss( pairs with relevance > r positive, relevance ≤ r negative )

    Xu et al. 2022 mention it (Ladder Loss). With triplets, rung r compares rel(x, a) > r ≥ rel(x, b). Pairs of unknown
    relevance count on no rung. The labels of a call are a graded `Relation`: `Relation.from_tree`, `from_scores`,
    `from_pairs` or `from_multilabel`; plain labels have one rung, 0.

    Algebra: Σ β_r · loss on `relation.at(r)`.

    Args:
        loss: any loss without proxies, or one for each rung, with margins or thresholds of its own.
        rungs: r, for example (0, 1) for groups and the classes in them.
        weights: β_r, one for each rung; None for 1 each.

    Relations: with the single rung 0 it is `loss`, exactly. With triplets and zero margins its global minima are the
    separated maps of `geometry.ladder`.

    >>> import torch, nearfar as nf
    >>> groups, classes = torch.tensor([3, 3, 4, -1, -1]), torch.tensor([0, 0, 1, 1, 2, 2])  # 0 and 1 are in group 3
    >>> relation = nf.Relation.from_tree(groups, classes)
    >>> triplets = nf.losses.Triplet(margin=0.2)
    >>> rows = torch.eye(6)[:, :3] + torch.eye(6)[:, 3:]
    >>> found = nf.losses.Ladder(triplets, rungs=(0, 1), weights=(0.5, 1))(rows, relation)
    >>> bool(found == 0.5 * triplets(rows, relation.at(0)) + triplets(rows, relation.at(1)))
    True
    """

    loss: Loss | Sequence[Loss] = field(kw_only=False)
    rungs: Sequence[float] = (0,)
    weights: Sequence[float] | None = None

    def _store(self, name: str, value: object) -> None:
        several = name == "loss" and isinstance(value, list | tuple)
        super()._store(name, nn.ModuleList(value) if several else value)  # type: ignore[arg-type]

    def _remake(self) -> None:
        parts: list[Any] = list(self.loss) if isinstance(self.loss, nn.ModuleList) else [self.loss]
        for part in parts:
            check_part("Ladder", "loss", part, Loss, "nf.losses.Triplet()")
            check_scalar("Ladder", part)
        rungs, weights = (list(x) if isinstance(x, list | tuple) else [] for x in (self.rungs, self.weights or (1,)))
        if not rungs or len(parts) not in (1, len(rungs)) or (self.weights and len(weights) != len(rungs)):
            raise ValueError(
                f"Ladder: there must be one loss for all rungs or one for each, and one weight for each, but "
                f"{len(parts)} losses, rungs={self.rungs!r} and weights={self.weights!r} came."
            )
        for weight in weights:
            check_positive("Ladder", "weights", weight, zero=True)
        self.owner = parts[0].owner

    @property
    def exact_gradient(self) -> bool:
        """Whether the gradient is that of the value, for the losses of all rungs."""
        return all(part.exact_gradient for _, part, _ in self._steps())

    @property
    def spread_floor(self) -> tuple[float, float] | None:
        """None: a floor belongs around the ladder, not inside."""
        return None

    def step(self) -> None:
        """Count a training step, in case a loss inside anneals."""
        advance(self)

    def _steps(self) -> Iterator[tuple[float, Loss, float]]:
        """Each rung with its loss and weight."""
        count = len(self.rungs)
        parts: Any = self.loss if isinstance(self.loss, nn.ModuleList) else [self.loss] * count
        yield from zip(self.rungs, parts, self.weights or (1.0,) * count, strict=True)

    def _calls(self, call: Call) -> Iterator[tuple[float, Loss, Call]]:
        """The weight, the loss and the call of each rung."""
        if call.indices is not None:
            raise ValueError("Ladder: an index tuple says nothing of rungs; leave it out.")
        relation = call.relation()
        for rung, part, weight in self._steps():
            yield weight, part, replace(call, labels=relation.at(rung), ref_labels=None, ids=None, ref_ids=None)

    def _value(self, call: Call) -> Tensor:
        return torch.stack([weight * part._value(inner) for weight, part, inner in self._calls(call)]).sum()

    def _explanation(self, call: Call) -> Explanation:
        """The explanations of the rungs side by side, as if the columns stood once for each rung."""
        found = [(weight, part._explanation(inner)) for weight, part, inner in self._calls(call)]
        return sum_explanations(found, call.shape[1])
