"""Losses against several learned centers per class: sub-center ArcFace and SoftTriple.

The K centers of a class form one reference row, side by side; `similarity.Centers` defines how similar a row is to a
class. Everything else is the same product as in the losses with one vector per class.
"""

import math
from dataclasses import dataclass

from torch import Tensor, nn

from nearfar._utils.settings import Number, Positive, Whole
from nearfar.losses.arguments import check_relation
from nearfar.losses.factors import Factors, softmax_factors
from nearfar.losses.proxies import ClassSoftmax
from nearfar.losses.robust import Call
from nearfar.pairs import AngularMargin, Linear
from nearfar.relations.relation import Relation
from nearfar.similarity import Centers

__all__ = ["SoftTriple", "SubCenterArcFace"]


@dataclass(frozen=True, eq=False)
class AgainstCenters(Call):
    """Rows [n, d] against classes [m, centers·d]: here the reference is wider than the rows."""

    def relation(self) -> Relation:
        assert isinstance(self.labels, Relation)  # noqa: S101 - made by `Proxies`
        check_relation(self.owner, self.labels, self.embeddings, self.ref_emb, ())
        return self.labels


class _Centers(ClassSoftmax, without=("similarity",)):
    """Base class of losses with several centers per class."""

    centers: Whole
    fixed = ClassSoftmax.fixed | {"centers"}

    @property
    def vectors(self) -> Tensor:
        """The centers of each class, [classes, centers, dim]."""
        return self.proxies.reshape(len(self.proxies), -1, self.dim)

    def _inner(self, call: Call) -> Call:
        found = super()._inner(call)
        return AgainstCenters(found.owner, found.embeddings, found.labels, ref_emb=found.ref_emb, ranks=found.ranks)


class SubCenterArcFace(_Centers):
    """Sub-center ArcFace: ArcFace in which each class has several vectors, and a row meets the nearest of them.

        mean over rows of  -log( e^{c·cos(θ_iy + m)} / (e^{c·cos(θ_iy + m)} + Σ_{k≠y} e^{c·cos θ_ik}) )
        cos θ_ik = max_q cos θ_ikq over the centers q of class k

    Deng et al. 2020. Rows with wrong labels gather around a center of their own instead of pulling at the class.

    Algebra: AngularMargin x KL(1) x anchor_sign, one softplus per positive pair, rows against classes, on `Centers`.

    Args:
        classes: how many classes.
        dim: width of the embedding.
        centers: vectors of each class.
        margin: m, in radians (0.5 = 28.6 degrees).
        scale: c.
        engine: see `RobustLoss`; "fused" has no kernel for it and computes in strips.

    Relations: equals pytorch-metric-learning's for equal centers and the margin in degrees. With centers=1 it is
    `ArcFace`.

    >>> import nearfar as nf
    >>> tuple(nf.losses.SubCenterArcFace(classes=3, dim=2).vectors.shape)
    (3, 3, 2)
    """

    centers: Whole = 3
    margin: Number = 0.5
    scale: Positive = 64.0

    def factors(self) -> Factors:  # noqa: D102
        pair = AngularMargin(self.margin, self.scale)
        return softmax_factors(pair) | Factors(similarity=Centers(self.dim))


class SoftTriple(_Centers):
    """SoftTriple: softmax over classes that have several centers each, with a soft choice among them and a margin.

        mean over rows of  -log( e^{λ(S_iy - δ)} / (e^{λ(S_iy - δ)} + Σ_{other classes} e^{λ S_ik}) )
        S_ik = Σ_c softmax(cos θ_ikc/γ) · cos θ_ikc over the centers c of class k

    Qian et al. 2019, eq. 8, without its regularizer of the centers.

    Algebra: Linear(λ, margin = threshold = δ/2) x KL(1) x anchor_sign, one softplus per positive pair, rows against
    classes, on `Centers(gamma)`.

    Args:
        classes: how many classes.
        dim: width of the embedding.
        centers: vectors of each class.
        scale: λ.
        gamma: γ, the temperature of the choice among the centers of a class.
        margin: δ.
        engine: see `RobustLoss`; "fused" has no kernel for it and computes in strips.

    Relations: equals pytorch-metric-learning's default for equal centers. With centers=1 it is `CosFace`.

    >>> import nearfar as nf
    >>> tuple(nf.losses.SoftTriple(classes=3, dim=2).vectors.shape)
    (3, 10, 2)
    """

    centers: Whole = 10
    scale: Positive = 20.0
    gamma: Positive = 0.1
    margin: Number = 0.01

    def factors(self) -> Factors:  # noqa: D102
        pair = Linear(self.margin / 2, self.margin / 2, self.scale)
        return softmax_factors(pair) | Factors(similarity=Centers(self.dim, gamma=self.gamma))

    def _begin(self) -> None:
        super()._begin()
        nn.init.kaiming_uniform_(self.proxies.data.view(-1, self.dim), a=math.sqrt(5))
