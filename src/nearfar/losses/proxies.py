"""Losses against one learned vector per class: proxy-NCA, proxy-anchor, ArcFace, CosFace, normalized softmax.

Proxies are reference rows.
"""

from abc import ABC
from dataclasses import field
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from nearfar._utils.memory import check_room
from nearfar._utils.settings import Number, Positive, Whole
from nearfar._utils.tensors import check_labels, readable, widen
from nearfar.engines import distance_rows, plain_parts
from nearfar.links import Add
from nearfar.losses.factors import Factors, softmax_factors
from nearfar.losses.recipe import Composed
from nearfar.losses.robust import Call
from nearfar.pairs import AngularMargin, Linear, are_opposite
from nearfar.relations.relation import Relation
from nearfar.sets import KL
from nearfar.similarity import NegSquaredEuclidean

__all__ = ["ArcFace", "CosFace", "NormalizedSoftmax", "ProxyAnchor", "ProxyNCA"]

FEW = 2**20
"""Largest number of logits for which a cross-entropy is computed at once."""


class Proxies(Composed, without=("miner",)):
    """One learned vector per class. Pass `loss.parameters()` to an optimizer; otherwise the proxies are not trained.

    Args:
        classes: how many proxies.
        dim: width of the embedding.

    Attributes:
        proxies: [classes, dim]; with several centers per class [classes, centers·dim], those of a class side by side.
    """

    classes: Whole = field(kw_only=False)
    dim: Whole = field(kw_only=False)
    fixed = frozenset({"classes", "dim"})

    swapped = False
    """Whether rows of the product are the proxies, and columns the batch."""

    def _begin(self) -> None:
        width = self.dim * getattr(self, "centers", 1)
        need = self.classes * width * torch.get_default_dtype().itemsize
        check_room(self.owner, f"classes={self.classes:,} of width {width:,}", need, torch.get_default_device())
        self.proxies = nn.Parameter(torch.randn(self.classes, width))

    def _inner(self, call: Call) -> Call:
        owner, embeddings = self.owner, call.embeddings
        if any(x is not None for x in (call.ref_emb, call.ref_labels, call.ids, call.ref_ids)):
            raise ValueError(
                f"{owner}: its proxies are the reference, so it takes no other; leave ref_emb and the rest out."
            )
        if embeddings.shape[1] != self.dim:
            raise ValueError(
                f"{owner}: embeddings must be as wide as the proxies ({self.dim}), but are {embeddings.shape[1]} wide."
            )
        relation = call.labels if isinstance(call.labels, Relation) else self._of_classes(embeddings, call.labels)
        if self.swapped:
            return Call(owner, self.proxies, relation, ref_emb=embeddings, ranks=call.ranks)
        return Call(owner, embeddings, relation, ref_emb=self.proxies, ranks=call.ranks)

    def _of_classes(self, embeddings: Tensor, labels: Tensor | None) -> Relation:
        owner = self.owner
        if labels is None:
            raise ValueError(f"{owner}: labels are missing; pass a 1-D integer tensor of class indices.")
        check_labels(owner, "labels", labels, len(embeddings), embeddings.device)
        count = len(self.proxies)
        if readable(labels) and not torch.equal(labels, labels.clamp(0, count - 1)):
            raise ValueError(
                f"{owner}: labels must lie in 0..{count - 1}, one per proxy, but reach from {int(labels.min())} "
                f"to {int(labels.max())}; raise `classes` or renumber them."
            )
        names = torch.arange(count, device=labels.device)
        return Relation.from_labels(names, labels) if self.swapped else Relation.from_labels(labels, names)


class ClassSoftmax(Proxies, ABC):
    """Base class of losses that are the cross-entropy of a row over one vector per class, computed directly if small.

    With the logits z_k = l(s_k, -1), and z_y = -l(s_y, +1) for the row's class, the product is log Σ e^{z_k} - z_y.
    Small batches on a CPU are computed in this form, which takes fewer steps.
    """

    def _value(self, call: Call) -> Tensor:
        product, labels = self.product, call.labels
        few = self.engine == "auto" and 0 < len(call.embeddings) * self.classes <= FEW and self.classes > 1
        if not few or not isinstance(labels, Tensor) or call.indices is not None or call.ranks is not None:
            return super()._value(call)
        long = product.similarity.shifts and not product.similarity.normalize  # their distances may be far apart
        if long or not readable(labels) or not plain_parts(product, any_similarity=True) or not self._of_all():
            return super()._value(call)
        inner = self._inner(call)
        raw, own, relation = widen(inner.embeddings, inner.ref_emb), labels.long(), cast(Relation, inner.labels)
        rows = distance_rows(product.similarity, relation, raw, product.similarity.prepared(*raw), look=True)
        scores = product.similarity.scores(*rows).to(raw[0].dtype)
        logits = product.negative(scores, -1)
        if not are_opposite(product.positive.form(+1), product.negative.form(-1)):
            logits = logits.scatter(1, own[:, None], -product.positive(scores.gather(1, own[:, None]), +1))
        return cross_entropy(logits, own)

    def _of_all(self) -> bool:
        """Whether the own class is in the denominator."""
        return True


class ProxyNCA(ClassSoftmax):
    """Proxy-NCA: cross-entropy of each row over one learned proxy per class.

        mean over rows of  -log( e^{c·s_iy} / Σ_{all classes} e^{c·s_ik} ),  s = -|x - proxy|² of unit vectors

    Algebra: Linear(c) x KL(1) x anchor_sign, one softplus per positive pair, rows against proxies; with own=False the
    two sides are added instead.

    Args:
        classes: how many proxies.
        dim: width of the embedding.
        scale: c.
        own: keep a row's own proxy in the denominator, as pytorch-metric-learning does, which bounds the loss below by
            0. False leaves it out, as the paper does (Movshovitz-Attias et al. 2017; Can et al. 2019, section 3).

    Relations: equals pytorch-metric-learning's default for equal proxies.

    >>> import nearfar as nf
    >>> tuple(nf.losses.ProxyNCA(classes=3, dim=2).proxies.shape)
    (3, 2)
    """

    scale: Positive = 1.0
    own: bool = True
    usual = {"similarity": NegSquaredEuclidean}

    def _of_all(self) -> bool:
        return self.own

    def factors(self) -> Factors:  # noqa: D102
        factors = softmax_factors(Linear(scale=self.scale))
        return factors if self.own else {**factors, "link": Add()}


class ProxyAnchor(Proxies):
    """Proxy-Anchor: each class's learned proxy against all rows of the batch, hard rows weighted more.

        (1/|C₊|) Σ_c log(1 + Σ_{y_i=c} e^{-a(s-δ)}) + (1/|C|) Σ_c log(1 + Σ_{y_i≠c} e^{a(s+δ)}),  C₊: classes present

    Algebra: Linear(margin=δ, scale=a) x KL(1) with the zero member x anchor_sign, added with a denominator per sign;
    rows are the proxies, columns the batch, on cosine.

    Args:
        classes: how many proxies.
        dim: width of the embedding.
        margin: δ.
        scale: a.

    Relations: equals pytorch-metric-learning's default for equal proxies.

    >>> import nearfar as nf
    >>> tuple(nf.losses.ProxyAnchor(classes=3, dim=2).proxies.shape)
    (3, 2)
    """

    swapped = True

    margin: Number = 0.1
    scale: Positive = 32.0

    def factors(self) -> Factors:  # noqa: D102
        pair, over = Linear(margin=self.margin, scale=self.scale), KL(1.0, normalized=False, zero_member=True)
        return Factors(pair=pair, over=over, groups="anchor_sign", link=Add(apart=True))

    def _begin(self) -> None:
        super()._begin()
        nn.init.kaiming_normal_(self.proxies, mode="fan_out")


class ArcFace(ClassSoftmax):
    """ArcFace: softmax over classes with an angular margin on the own class.

        mean over rows of  -log( e^{c·cos(θ_iy + m)} / (e^{c·cos(θ_iy + m)} + Σ_{k≠y} e^{c·cos θ_ik}) )

    Algebra: AngularMargin x KL(1) x anchor_sign, one softplus per positive pair, rows against class vectors, on cosine.

    Args:
        classes: how many class vectors.
        dim: width of the embedding.
        margin: m, in radians (0.5 = 28.6 degrees).
        scale: c.

    Relations: equals pytorch-metric-learning's for equal class vectors and the margin in degrees. With margin=0 it is
    `NormalizedSoftmax(temperature=1/scale)`.

    >>> import nearfar as nf
    >>> tuple(nf.losses.ArcFace(classes=3, dim=2).proxies.shape)
    (3, 2)
    """

    margin: Number = 0.5
    scale: Positive = 64.0

    def factors(self) -> Factors:  # noqa: D102
        return softmax_factors(AngularMargin(self.margin, self.scale))


class CosFace(ClassSoftmax):
    """CosFace: softmax over classes with a margin on the cosine of the own class.

        mean over rows of  -log( e^{c·(cos θ_iy - m)} / (e^{c·(cos θ_iy - m)} + Σ_{k≠y} e^{c·cos θ_ik}) )

    Wang et al. 2018.

    Algebra: Linear(c, margin = threshold = m/2) x KL(1) x anchor_sign, one softplus per positive pair, rows against
    class vectors, on cosine. (The half margins add up to m for the own class and cancel for the others.)

    Args:
        classes: how many class vectors.
        dim: width of the embedding.
        margin: m.
        scale: c.

    Relations: equals pytorch-metric-learning's default for equal class vectors. With margin=0 it is
    `NormalizedSoftmax(temperature=1/scale)`.

    >>> import nearfar as nf
    >>> tuple(nf.losses.CosFace(classes=3, dim=2).proxies.shape)
    (3, 2)
    """

    margin: Number = 0.35
    scale: Positive = 64.0

    def factors(self) -> Factors:  # noqa: D102
        return softmax_factors(Linear(self.margin / 2, self.margin / 2, self.scale))


class NormalizedSoftmax(ClassSoftmax):
    """Normalized softmax: cross-entropy of the cosines between rows and one learned vector per class.

        mean over rows of  -log( e^{s_iy/τ} / Σ_{all classes} e^{s_ik/τ} )

    Zhai and Wu 2019.

    Algebra: Linear(1/τ) x KL(1) x anchor_sign, one softplus per positive pair, rows against class vectors, on cosine.

    Args:
        classes: how many class vectors.
        dim: width of the embedding.
        temperature: τ.

    Relations: equals pytorch-metric-learning's default for equal class vectors. `ArcFace` and `CosFace` with margin=0
    and scale=1/τ are the same loss; on `NegSquaredEuclidean` it is `ProxyNCA(scale=1/τ)`.

    >>> import nearfar as nf
    >>> tuple(nf.losses.NormalizedSoftmax(classes=3, dim=2).proxies.shape)
    (3, 2)
    """

    temperature: Positive = 0.05

    def factors(self) -> Factors:  # noqa: D102
        return softmax_factors(Linear(scale=1 / self.temperature))
