"""`CoSENT`: a loss of scored pairs of rows, which are compared with one another."""

from typing import Any

import torch
from torch import Tensor

from nearfar._utils.settings import Positive
from nearfar._utils.tensors import check_reference_rows, widen
from nearfar.losses.explanation import Explanation
from nearfar.losses.robust import Call, Loss
from nearfar.similarity import Cosine, Similarity

__all__ = ["CoSENT"]


def takes_scores(loss: Any) -> bool:
    """Whether a loss, or the one that it wraps, is called with the scores of pairs."""
    inner = getattr(loss, "loss", None)
    return bool(getattr(loss, "scored", False)) or (inner is not None and takes_scores(inner))


class CoSENT(Loss):
    """CoSENT: pairs with a higher score must be more similar than pairs with a lower one.

        log(1 + Σ over pairs i, j with label_i > label_j of  e^{(s_j - s_i)/τ})

    Su 2022.

    It is called with the two sides of the n pairs, and their scores, which may be of any scale:
    loss(rows, scores, ref_emb=others).

    Algebra: Linear(1/τ) x KL(1) with the zero member x one group of all pairs of pairs, on cosine. It needs no matrix:
    sorted by label, the sum over j runs over a prefix.

    Args:
        temperature: τ.
        similarity: s; `Cosine` by default.

    Relations: with `similarity` dot or cosine, sentence-transformers' CoSENTLoss with `scale` = 1/τ.

    >>> import torch, nearfar as nf
    >>> rows, others = torch.eye(3), torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    >>> f"{nf.losses.CoSENT(temperature=0.5)(rows, torch.tensor([0.9, 0.1, 0.2]), ref_emb=others):.3f}"
    '1.189'
    """

    scored = True

    temperature: Positive = 0.05
    similarity: Similarity | None = None

    def _remake(self) -> None:
        if self.similarity is None:
            self._store("similarity", Cosine())

    def _value(self, call: Call) -> Tensor:
        labels, (x, y) = self._check(call), widen(call.embeddings, call.ref_emb)
        similarity = self.similarity
        assert similarity is not None  # noqa: S101 - `_remake`
        x, y = similarity.prepared(x, y)
        dot, norms = (x * y).sum(dim=1), ((z * z).sum(dim=1) for z in (x, y))
        labels, order = labels.sort()
        scores = similarity.finish(dot, *norms)[order] / self.temperature
        below = torch.cat([scores.new_full((1,), -torch.inf), torch.logcumsumexp(scores, dim=0)])
        # the pairs with a lower label are those before the first with an equal one
        terms = below[torch.searchsorted(labels, labels)] - scores
        return torch.logsumexp(torch.cat([scores.new_zeros(1), terms]), dim=0)

    def _explanation(self, call: Call) -> Explanation:
        raise NotImplementedError(f"{self.owner}: there is no explanation of pairs of pairs; explain another loss.")

    def _check(self, call: Call) -> Tensor:
        """The scores of the pairs [n]."""
        labels, n = call.labels, len(call.embeddings)
        if call.ref_emb is None or len(call.ref_emb) != n:
            raise ValueError(f"{self.owner}: ref_emb must be the other side of the {n} pairs, one row for each.")
        check_reference_rows(self.owner, call.embeddings, call.ref_emb)
        if not isinstance(labels, Tensor) or labels.shape != (n,) or any(x is not None for x in (call.indices, call.ids)):
            raise ValueError(f"{self.owner}: labels must be the scores of the pairs, a tensor [{n}], and nothing else.")
        return labels.to(call.embeddings.device).double() if labels.is_floating_point() else labels.long()
