"""Losses of the softmax family: NT-Xent, SupCon, circle, N-pair, tuplet margin, neighborhood components."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from nearfar._utils.settings import Number, Positive, ZeroOrMore
from nearfar._utils.tensors import hidden, readable, widen
from nearfar.engines import plain_parts
from nearfar.groups._groupings import Reduction
from nearfar.links import Add, ShareLink, SoftplusLink
from nearfar.losses.explanation import Explanation
from nearfar.losses.factors import Factors, softmax_factors
from nearfar.losses.recipe import Composed, Recipe
from nearfar.losses.robust import Call
from nearfar.pairs import AngularMargin, CircleScore, Identity, Linear, are_opposite
from nearfar.relations.one_a_class import first_two
from nearfar.relations.relation import Relation
from nearfar.sets import KL, Mean
from nearfar.similarity import Dot, NegSquaredEuclidean

__all__ = ["NCA", "Circle", "NPair", "NTXent", "SupCon", "TupletMargin"]


class NTXent(Recipe):
    """NT-Xent (InfoNCE): cross-entropy of each positive against the negatives of its anchor.

        mean over positive pairs of  -log( e^{s_ij/τ} / (e^{s_ij/τ} + Σ_{N_i} e^{s_ik/τ}) )

    Algebra: Linear(1/τ) x KL(1) x anchor_sign, one softplus per positive pair, on cosine.

    Args:
        temperature: τ.
        reduction: over positive pairs.

    Relations: equals pytorch-metric-learning's default. On `Dot` with temperature=1 and one positive of each class as
    the reference it is N-pair. `SupCon` lets the other positives compete too.

    >>> import torch, nearfar as nf
    >>> embeddings = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]])
    >>> f"{nf.losses.NTXent()(embeddings, torch.tensor([0, 0, 1, 1])):.3f}"
    '3.585'
    """

    temperature: Positive = 0.07
    reduction: Reduction = "mean"

    def factors(self) -> Factors:  # noqa: D102
        return softmax_factors(Linear(scale=1 / self.temperature))


class SupCon(Recipe):
    """Supervised contrastive loss: cross-entropy over all pairs of an anchor, averaged over its positives.

        mean over anchors of  log Σ_{all k} e^{s_ik/τ} - mean_{P_i} s_ij/τ

    Khosla et al. 2020.

    Algebra: Linear(1/τ) x Mean for the positive pairs, Identity(1/τ) x KL(1) for all pairs, x anchor_sign, added, on
    cosine. The mean of logarithms needs no link of its own: the denominator is the same for all positives of an anchor.

    Args:
        temperature: τ.
        reduction: "nonzero" leaves anchors without positives out, as pytorch-metric-learning does.

    Relations: equals pytorch-metric-learning's default. With one positive per anchor it is `NTXent`.

    >>> import torch, nearfar as nf
    >>> embeddings = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]])
    >>> f"{nf.losses.SupCon()(embeddings, torch.tensor([0, 0, 1, 1])):.3f}"
    '2.533'
    """

    listed_once = True

    temperature: Positive = 0.1
    reduction: Reduction = "nonzero"

    def factors(self) -> Factors:  # noqa: D102
        pair, over = (Linear(scale=1 / self.temperature), Identity(1 / self.temperature)), KL(1.0, normalized=False)
        return Factors(pair=pair, over=(Mean(), over), groups="anchor_sign", link=Add(both=True), members="all")


class Circle(Recipe):
    """Circle loss: pairs far from their goal get larger weights.

        mean over anchors of  log(1 + Σ_{P_i} e^{l_ij} · Σ_{N_i} e^{l_ik})
        l_ij = -γ·[1 + m - s_ij]₊·(s_ij - 1 + m),  l_ik = γ·[s_ik + m]₊·(s_ik - m)

    Sun et al. 2020.

    Algebra: CircleScore x KL(1) x anchor_sign, joined by softplus, on cosine. The pacing factors are held constant, so
    the gradient is not that of the value (`exact_gradient` is False).

    Args:
        margin: m, the relaxation.
        scale: γ.
        reduction: "nonzero": mean over anchors above zero, as pytorch-metric-learning does.

    Relations: equals pytorch-metric-learning's default.

    >>> import torch, nearfar as nf
    >>> embeddings = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]])
    >>> f"{nf.losses.Circle()(embeddings, torch.tensor([0, 0, 1, 1])):.3f}"
    '53.147'
    """

    listed_once = True

    margin: Number = 0.4
    scale: Positive = 80.0
    reduction: Reduction = "nonzero"

    def factors(self) -> Factors:  # noqa: D102
        pair = CircleScore(self.margin, self.scale)
        return Factors(pair=pair, over=KL(1.0, normalized=False), groups="anchor_sign", link=SoftplusLink())


class NCA(Recipe):
    """Neighborhood components: the logarithm of the chance that a stochastic neighbor has the anchor's own label.

        mean over anchors of  -log( Σ_{P_i} e^{c·s_ij} / Σ_{all k} e^{c·s_ik} ),  s = -|x - y|² of unit rows

    Goldberger et al. 2004, who maximize the chance itself; the logarithm is its KL form.

    Algebra: Identity(c) x KL(1) x anchor_sign, joined by `ShareLink`. The two log-sum-exps are subtracted, so one near
    positive is enough for a small loss; `SupCon` asks all positives of an anchor to be near.

    Args:
        scale: c.
        reduction: over anchors with positives.

    Relations: equals pytorch-metric-learning's default. With one positive an anchor it is
    `NTXent(temperature=1/scale)`; with proxies as the reference it is `ProxyNCA`.

    >>> import torch, nearfar as nf
    >>> embeddings = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]])
    >>> f"{nf.losses.NCA()(embeddings, torch.tensor([0, 0, 1, 1])):.3f}"
    '0.886'
    """

    scale: Positive = 1.0
    reduction: Reduction = "mean"
    usual = {"similarity": NegSquaredEuclidean}

    def factors(self) -> Factors:  # noqa: D102
        pair = Identity(self.scale)
        return Factors(pair=pair, over=KL(1.0, normalized=False), groups="anchor_sign", link=ShareLink())


class TupletMargin(Recipe):
    """Tuplet margin: each positive against all negatives of its anchor, with an angle of slack for the positive.

        mean over positive pairs of  log(1 + Σ_{N_i} e^{c·(cos θ_ik - cos(θ_ij - m))})

    Yu and Tao 2019.

    Algebra: AngularMargin(-m, c) x KL(1) x anchor_sign, one softplus per positive pair, on cosine.

    Args:
        margin: m, in radians (0.1 = 5.73 degrees): pairs of one class need not come closer than that.
        scale: c.
        reduction: over positive pairs.

    Relations: equals pytorch-metric-learning's for the margin in degrees. With margin=0 it is
    `NTXent(temperature=1/scale)`.

    >>> import torch, nearfar as nf
    >>> embeddings = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]])
    >>> f"{nf.losses.TupletMargin()(embeddings, torch.tensor([0, 0, 1, 1])):.2f}"
    '13.17'
    """

    margin: ZeroOrMore = 0.1
    scale: Positive = 64.0
    reduction: Reduction = "mean"

    def factors(self) -> Factors:  # noqa: D102
        return softmax_factors(AngularMargin(-self.margin, self.scale))


class NPair(Composed):
    """N-pair loss: one anchor and one positive per class, cross-entropy against the positives of the other classes.

        mean over classes of  log(1 + Σ_{c'≠c} e^{⟨a_c, p_c'⟩ - ⟨a_c, p_c⟩}) + λ·mean |x|²

    Sohn 2016; Can et al. 2019.

    Algebra: Linear x KL(1) x anchor_sign, one softplus per positive pair, on the raw dot product, over the rectangle of
    one anchor (the class's first row) against one positive (its second) per class. If the relation marks
    representatives, these are the positives, and every other row is an anchor.

    Args:
        l2: λ, the weight of the mean squared norm of the rows, which keeps raw products bounded.

    Relations: with l2=0 and `Dot(normalize=True)` it is pytorch-metric-learning's default.
    `NTXent(similarity=Dot(), temperature=1)` uses every pair.

    >>> import torch, nearfar as nf
    >>> embeddings = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]])
    >>> f"{nf.losses.NPair()(embeddings, torch.tensor([0, 0, 1, 1])):.2f}"
    '0.70'
    """

    l2: ZeroOrMore = 0.02
    usual = {"similarity": Dot}
    anchors = "others"

    def factors(self) -> Factors:  # noqa: D102
        return softmax_factors(Linear())

    def _value(self, call: Call) -> Tensor:
        value = self._cross_entropy(call)
        return super()._value(call) if value is None else value

    def _explanation(self, call: Call) -> Explanation:
        found, value = super()._explanation(call), self._cross_entropy(call)
        return found if value is None else replace(found, value=value.detach())

    def _cross_entropy(self, call: Call) -> Tensor | None:
        """The value of a small batch on a CPU by a cross-entropy, in half the steps; None for any other batch."""
        product, given = self.product, (call.indices, call.ref_emb, call.ref_labels, call.ids, call.ref_ids, call.ranks)
        labels, similarity = call.labels, product.similarity
        if not isinstance(labels, Tensor) or any(x is not None for x in given) or not self._is_small(call):
            return None
        if (
            not readable(labels)
            or similarity.shifts
            or product.miner is not None
            or not plain_parts(product, any_similarity=True)
        ):
            return None
        if not are_opposite(product.positive.form(+1), product.negative.form(-1)) or not len(call.embeddings):
            return None
        call.relation()  # checks the labels
        chosen, target = first_two(labels)
        if int(chosen.sum()) < 2:  # no negative pair
            return None
        (x, _) = widen(call.embeddings, None)
        logits = product.negative(similarity.scores(*similarity.prepared(x)), -1)
        value, extra = cross_entropy(hidden(logits, chosen, torch.finfo(logits.dtype).min), target), self._extra(x)
        return value if extra is None else value + extra

    def _inner(self, call: Call) -> Call:
        labels = call.labels
        if isinstance(labels, Relation) and labels.anchors is not None:
            return call
        relation = call.relation().one_a_class()
        return replace(call, labels=relation, ref_labels=None, ids=None, ref_ids=None)

    def _extra(self, embeddings: Tensor) -> Tensor | None:
        if (not isinstance(self.l2, Tensor) and not self.l2) or not len(embeddings):
            return None
        x = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
        return self.l2 * (x * x).sum(dim=1).mean()
