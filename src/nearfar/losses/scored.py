"""`CoSENT`: pairs of rows are compared with one another, by their scores or by class."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from nearfar._utils.settings import Positive
from nearfar._utils.tensors import check_reference_rows, widen
from nearfar.groups import Sign
from nearfar.groups._groupings import Product
from nearfar.losses.arguments import Had
from nearfar.losses.explanation import Explanation
from nearfar.losses.factors import Factors
from nearfar.losses.recipe import Recipe
from nearfar.losses.robust import Call
from nearfar.pairs import Linear
from nearfar.relations.relation import Relation
from nearfar.sets import KL

__all__ = ["CoSENT"]


BOTH_SIGNS = Sign()
BOTH_SIGNS.needs = "both"


def takes_scores(loss: Any) -> bool:
    """Whether a loss, or the one that it wraps, can be called with the scores of pairs."""
    inner = getattr(loss, "loss", None)
    return bool(getattr(loss, "scored", False)) or (inner is not None and takes_scores(inner))


def are_scores(call: Call) -> bool:
    """Whether the labels of a call are scores of pairs of a row and a reference row."""
    return isinstance(call.labels, Tensor) and call.labels.is_floating_point() and call.ref_emb is not None


class CoSENT(Recipe, without=("miner",)):
    """CoSENT: every positive pair must be more similar than every negative pair of the batch, of any anchors.

        log(1 + Σ over positive pairs of e^{-s_ij/τ} · Σ over negative pairs of e^{s_kl/τ})

    Su 2022.

    Graded pairs come as two lists of rows with a score for each pair, of any scale: loss(rows, scores, ref_emb=others)
    with floating-point scores [n] has a term e^{(s_l - s_k)/τ} for all pairs k, l with a higher score of k. They are
    sorted, so that this takes no matrix.

    Algebra: Linear(1/τ) x KL(1) x sign; the softplus of the two values together.

    Args:
        temperature: τ.

    Relations: with scores it is sentence-transformers' CoSENTLoss, for `scale` = 1/τ. Scores of two values give the
    equation above for these pairs.

    >>> import torch, nearfar as nf
    >>> rows, others = torch.eye(3), torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    >>> f"{nf.losses.CoSENT(temperature=0.5)(rows, torch.tensor([0.9, 0.1, 0.2]), ref_emb=others):.3f}"
    '1.189'
    """

    scored = True

    temperature: Positive = 0.05

    def factors(self) -> Factors:  # noqa: D102
        return Factors(pair=Linear(scale=1 / self.temperature), over=KL(1.0, normalized=False), groups=BOTH_SIGNS)

    def _value(self, call: Call) -> Tensor:
        if isinstance(call.labels, Tensor) and are_scores(call):
            return self._of_scores(call, call.labels)
        value = super()._value(call)
        return torch.where(self._has_both(call), softplus(value, threshold=40.0), 0.0)

    def _explanation(self, call: Call) -> Explanation:
        if are_scores(call):
            raise ValueError(f"{self.owner}: scored pairs have no explanation; give classes, or a Relation.")
        found = super()._explanation(call)
        share = torch.where(self._has_both(call), torch.sigmoid(found.value), 0.0)
        more: Any = {name: getattr(found, name) * share for name in ("influence", "pull")}
        value = torch.where(self._has_both(call), softplus(found.value, threshold=40.0), 0.0)
        return replace(found, value=value, weighted_loss=found.weighted_loss * float(share), **more)

    def _warn(self, call: Call, relation: Relation, product: Product, had: Had | None) -> None:
        """Warn if the batch lacks pairs of a sign; they need not be of the same anchor."""
        found = None if had is None else Had(*(x.any().expand_as(x) for x in (had.had_positive, had.had_negative)))
        super()._warn(call, relation, product, found)

    def _has_both(self, call: Call) -> Tensor:
        """Whether the batch has positive and negative pairs; an empty sum is 0, not e^0."""
        if call.indices is not None:
            both = len(call.indices[1]) > 0 and len(call.indices[-1]) > 0
            return torch.tensor(both, device=call.embeddings.device)
        if 0 in call.shape:
            return torch.tensor(False, device=call.embeddings.device)
        relation = self._relation(call)
        labels = None if relation.reference_starts_with_batch else relation.plain_labels()
        if labels is None:
            positive, negative = relation.counts()
            return (positive > 0).any() & (negative > 0).any()
        row, col = labels
        ranked = col.sort().values
        same = (ranked[1:] == ranked[:-1]).any() if relation.square else torch.isin(row, col).any()
        return same & ((row.amin() != ranked[-1]) | (row.amax() != ranked[0]))

    def _of_scores(self, call: Call, labels: Tensor) -> Tensor:
        """The loss of pairs of a row and a reference row [n], by their scores [n]."""
        n, more = len(call.embeddings), (call.ref_labels, call.indices, call.ids, call.ref_ids)
        assert call.ref_emb is not None  # noqa: S101 - `are_scores`
        if labels.shape != (n,) or len(call.ref_emb) != n or any(x is not None for x in more):
            raise ValueError(
                f"{self.owner}: scores are those of pairs of a row and a reference row, so labels must be a tensor "
                f"[{n}], ref_emb must have {n} rows, and nothing else may be given."
            )
        check_reference_rows(self.owner, call.embeddings, call.ref_emb)
        product, (x, y) = self.product, widen(call.embeddings, call.ref_emb)
        x, y = product.similarity.prepared(x, y)
        norms = ((z * z).sum(dim=1) for z in (x, y))
        scores = product.similarity.finish((x * y).sum(dim=1), *norms)
        labels, order = labels.sort()
        positive, negative = (
            pair(scores[order], sign) for pair, sign in ((product.positive, 1), (product.negative, -1))
        )
        below = torch.cat([scores.new_full((1,), -torch.inf), torch.logcumsumexp(negative, dim=0)])
        # the pairs with a lower score are those before the first with an equal one
        terms = positive + below[torch.searchsorted(labels, labels)]
        return torch.logsumexp(torch.cat([scores.new_zeros(1), terms]), dim=0)
