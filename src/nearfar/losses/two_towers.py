"""Losses of two towers, an encoder of queries and one of documents: CLIP and SigLIP.

    loss(queries, ids, ref_emb=documents, ref_labels=ids)

Captions of one picture share its id; each is then a positive of the picture.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from nearfar._utils.settings import Number, Positive
from nearfar._utils.tensors import over
from nearfar.groups._groupings import Reduction
from nearfar.links import PerPositive
from nearfar.losses.explanation import Explanation
from nearfar.losses.factors import Factors, softmax_factors
from nearfar.losses.recipe import Recipe
from nearfar.losses.robust import Call
from nearfar.pairs import Linear, Sigmoid
from nearfar.sets import Mean

__all__ = ["CLIP", "SigLIP"]


class CLIP(Recipe):
    """CLIP: cross-entropy of each positive pair against the negatives of its query and against those of its document.

        mean over positive pairs of  ½ [ log(1 + Σ_{N_i} e^{(s_ik - s_ij)/τ}) + log(1 + Σ_{N_j} e^{(s_kj - s_ij)/τ}) ]

    Radford et al. 2021.

    Algebra: Linear(1/τ) x KL(1) x anchor_sign, two softplus per positive pair, on cosine. The link also reads the
    negatives of the column, as in `LiftedStructure`.

    Args:
        temperature: τ; its initial value if learned.
        learn: learn log τ, as the paper does; pass `loss.parameters()` to an optimizer.
        reduction: over positive pairs.

    Relations: with one positive per query it is open_clip's loss, for `logit_scale` = 1/τ. Without reference rows it is
    `NTXent`.

    >>> import torch, nearfar as nf
    >>> pictures, captions = torch.eye(3), torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    >>> ids = torch.arange(3)
    >>> f"{nf.losses.CLIP(temperature=0.5)(pictures, ids, ref_emb=captions, ref_labels=ids):.3f}"
    '0.408'
    """

    temperature: Positive = 0.07
    learn: bool = False
    reduction: Reduction = "mean"

    def _begin(self) -> None:
        # relative to the start, so that weight decay pulls to it
        self.log_scale = nn.Parameter(torch.zeros(())) if self.learn else None

    def _changed(self, name: str) -> None:
        start_again(self, name, temperature="log_scale")

    def _read_temperature(self) -> Number:
        """τ: its initial value, divided by what was learned."""
        start: Number = self.setting("temperature")
        return start if self.log_scale is None else start * torch.exp(-wide(self.log_scale))

    def factors(self) -> Factors:  # noqa: D102
        pair = Linear(scale=1 / self._read_temperature())
        return Factors(**{**softmax_factors(pair), "link": PerPositive(columns=True)})


class SigLIP(Recipe):
    """SigLIP: a logistic loss of every pair of a query and a document, with a learned scale and bias.

        (1/n) Σ over all pairs of  log(1 + e^{-z}) (positive),  log(1 + e^{z}) (negative),  z = t·s + b

    Zhai et al. 2023.

    Algebra: Sigmoid(t, b) x Mean x batch, on cosine, times the number of pairs per row. n counts the rows with pairs.

    Args:
        scale: t; its initial value if learned.
        bias: b; its initial value if learned.
        learn: learn log t and b; pass `loss.parameters()` to an optimizer.

    Relations: open_clip's loss, if ids are different; one pair per query is positive there. A caption of the same
    picture, which is a negative there, is a positive here.

    >>> import torch, nearfar as nf
    >>> pictures, captions = torch.eye(3), torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    >>> ids = torch.arange(3)
    >>> f"{nf.losses.SigLIP()(pictures, ids, ref_emb=captions, ref_labels=ids):.3f}"
    '1.473'
    """

    scale: Positive = 10.0
    bias: Number = -10.0
    learn: bool = True

    def _begin(self) -> None:
        self.log_scale, self.offset = (nn.Parameter(torch.zeros(())) if self.learn else None for _ in range(2))

    def _changed(self, name: str) -> None:
        start_again(self, name, scale="log_scale", bias="offset")

    def _read_scale(self) -> Number:
        """The scale t: its initial value, times what was learned."""
        start: Number = self.setting("scale")
        return start if self.log_scale is None else start * torch.exp(wide(self.log_scale))

    def _read_bias(self) -> Number:
        """The bias b: its initial value plus what was learned."""
        start: Number = self.setting("bias")
        return start if self.offset is None else start + wide(self.offset)

    def factors(self) -> Factors:  # noqa: D102
        return Factors(pair=Sigmoid(self._read_scale(), self._read_bias()), over=Mean())

    def _value(self, call: Call) -> Tensor:
        return super()._value(call) * self._pairs_per_row(call)

    def _explanation(self, call: Call) -> Explanation:
        found, count = super()._explanation(call), self._pairs_per_row(call)
        more: Any = {x: getattr(found, x) * count for x in ("value", "influence", "pull")}
        return replace(found, weighted_loss=found.weighted_loss * float(count), **more)

    def _pairs_per_row(self, call: Call) -> int | Tensor:
        """The mean number of pairs, or of their weights, of the rows that have any."""
        like = call.embeddings.new_zeros(
            len(call.embeddings), dtype=torch.promote_types(call.embeddings.dtype, torch.float32)
        )
        if call.indices is not None:
            sides = call.indices[0], call.indices[0 if len(call.indices) == 3 else 2]
            anchors = torch.cat(sides).to(like.device, torch.int64)
            return over(like.new_tensor(len(anchors)), like.index_fill(0, anchors, 1.0).sum())
        relation = self._relation(call)
        if relation.plain_labels() is not None:
            return relation.shape[1] - int(relation.square or relation.reference_starts_with_batch)
        pairs = torch.stack(relation.counts()).sum(dim=0).to(like.dtype)
        return over(pairs.sum(), (pairs > 0).sum())


def start_again(loss: Recipe, name: str, **learned: str) -> None:
    """Forget what was learned of a setting that was set: `learned` has the parameter of each."""
    if name == "learn":
        loss._begin()
        loss._remake()
    elif getattr(loss, learned.get(name, ""), None) is not None:
        with torch.no_grad():
            getattr(loss, learned[name]).zero_()


def wide(number: Tensor) -> Tensor:
    """A number in float64, except on Apple's GPUs, which have none; rows keep their own type."""
    return number if number.device.type == "mps" else number.double()
