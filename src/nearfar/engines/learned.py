"""Move learned parameters out of a product, because engines take the parameters of the wide side as constants.

Kernels and fast paths take these parameters (of negative, or all pairs) as constants. If one of them is
learned, the same loss is written with other factors, with plain autograd around the engine:

    scale       l = f(c·s)           rows are multiplied by √c, or by c for distances
    threshold   l = f(s + b)         the learned `offset` of a `PairForm`
    gamma       F_γ(l) = γ·F₁(l/γ)   losses are divided by γ, and the value is multiplied by it

The few positive pairs are computed by autograd and carry all other parameters. A loss that cannot be rewritten is
computed by autograd, in strips or dense.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from nearfar._utils.settings import Number
from nearfar._utils.shortcuts import swift, tensors, touched
from nearfar.engines.plan import SCOPES
from nearfar.groups._groupings import Product
from nearfar.pairs import PairForm, PairLoss
from nearfar.sets.base import UncertaintySet
from nearfar.similarity import Dot, NegEuclidean, NegSquaredEuclidean

__all__ = ["Lifted", "lift"]

PLAIN: dict[str, type[Dot | NegSquaredEuclidean | NegEuclidean]] = {
    "dot": Dot,
    "squared": NegSquaredEuclidean,
    "distance": NegEuclidean,
}


@dataclass(frozen=True, eq=False)
class Lifted:
    """A product without learned parameters on its wide side.

    Args:
        product: the factors.
        stretch: factor of the prepared rows; None for 1.
        times: factor of the value; None for 1.
    """

    product: Product
    stretch: Tensor | None
    times: Tensor | None

    def rows(self, rows: Tensor, cols: Tensor) -> tuple[Tensor, Tensor]:
        """Convert prepared rows and columns of the original product to those of this one."""
        if self.stretch is None:
            return rows, cols
        longer = rows * self.stretch
        return longer, longer if cols is rows else cols * self.stretch

    def value(self, value: Tensor) -> Tensor:
        """The value of the original product."""
        return value if self.times is None else (value * self.times).to(value.dtype)


class Formed(PairLoss, swift=True):
    """A pair loss of one sign, defined by its form."""

    learns = frozenset({"offset"})

    def __init__(self, form: PairForm) -> None:
        super().__init__()
        self.numbers = form
        if form.offset is not None:
            self.__dict__["offset"] = form.offset

    def forward(self, s: Tensor, sign: int) -> Tensor:
        return self.numbers.value(s)

    def form(self, sign: int) -> PairForm:
        return self.numbers


class Carried(PairLoss, swift=True):
    """A pair loss in rescaled scores and losses, l(s/c)/γ; its gradient is left to autograd."""

    def __init__(self, of: PairLoss, scale: Number, gamma: Number) -> None:
        super().__init__()
        held = {f"of_{name}": _alias(x) for name, x in tensors(of).items() if x is not None}
        held |= {"by_scale": _alias(scale), "by_gamma": _alias(gamma)}
        twin = object.__new__(type(of))
        twin.__dict__.update(
            of.__dict__, _parameters={}, **{name[3:]: x for name, x in held.items() if name[:3] == "of_"}
        )
        self.parts = twin, held["by_scale"], held["by_gamma"]
        self.__dict__.update(held, learns=frozenset(held))  # engines look here for learned parameters

    def forward(self, s: Tensor, sign: int) -> Tensor:
        of, scale, gamma = self.parts
        found: Tensor = of(s / scale, sign) / gamma
        return found


def _alias(x: Any) -> Any:
    """The same number as a separate autograd node: no number that engines differentiate in may depend on another."""
    return x.view_as(x) if isinstance(x, Tensor) else x


def lift(product: Product) -> Lifted | None:
    """The product without learned parameters on its wide side; None if it has none there, or cannot be rewritten."""
    if swift(product.parts) or not _known(product):
        return None
    gamma = tensors(product.over_wide).get("gamma")
    if gamma is not None and product.link is not None and not product.link.homogeneous:
        return None
    over_positive, over_negative = (_set_per(x, gamma) for x in (product.over_positive, product.over_negative))
    form = product.negative.form(-1)
    found = None if form is None else _lift_form(form, gamma)
    if found is None or over_positive is None or over_negative is None:
        return None
    wide, scale = found
    similarity, stretch = product.similarity, None
    if isinstance(scale, Tensor):
        kind = product.similarity.form or "dot"
        stretch, similarity = scale if kind == "distance" else scale.sqrt(), PLAIN[kind](normalize=False)
    new = replace(
        product,
        similarity=similarity,
        positive=Carried(product.positive, 1.0 if stretch is None else scale, 1.0 if gamma is None else gamma),
        negative=Formed(wide),
        over_positive=over_positive,
        over_negative=over_negative,
    )
    return Lifted(new, stretch, gamma)


def _known(product: Product) -> bool:
    """Whether the loss is of known parts except for its numbers, and no part compares scores with a number."""
    groups, miner = product.groups, product.miner
    rule = getattr(groups, "rule", None)
    plain = swift((product.similarity, groups, product.link)) and touched(product.parts) is None
    formed = product.similarity.form is not None and all(x.swift for x in (product.positive, product.negative))
    free = (miner is None or (miner.swift and miner.ordinal)) and (rule is None or rule.keep is None)
    return plain and formed and free and groups.scope in SCOPES


def _set_per(of: UncertaintySet, gamma: Tensor | None) -> UncertaintySet | None:
    """The set for losses and a value divided by γ; None if there is none, or if it has other learned parameters."""
    found = of if gamma is None else of.per(gamma)
    return None if found is None or tensors(found) else found


def _lift_form(form: PairForm, gamma: Tensor | None) -> tuple[PairForm, Number] | None:
    """The form divided by γ, and the learned factor that scores are multiplied by (else 1); or None."""
    a, b, outside, power = _numbers(form)
    outside = outside if gamma is None else outside / gamma
    if form.shape == "pace" or isinstance(power, Tensor) or not (isinstance(a, Tensor) or a > 0):
        return None
    if form.shape == "softplus":
        if isinstance(outside, Tensor):
            return None
    else:  # move the outer factor inside
        inside = outside if form.shape == "line" or power == 1 else outside ** (1 / power)
        a, b, outside = inside * a, inside * b, 1.0
    learnt, stretched = isinstance(b, Tensor), isinstance(a, Tensor)
    new = replace(
        form,
        a=1.0 if stretched else a,
        b=0.0 if learnt else b,
        scale=outside,
        offset=_alias(b) if learnt else None,
        by_offset=float(learnt),
    )
    return new, a


def _numbers(form: PairForm) -> tuple[Any, Any, Any, Any]:
    """Factor and constant of the score, factor of the loss, and power: plain or learned."""
    shift = 0.0 if form.offset is None else form.by_offset * form.offset
    return form.a, form.b + shift, form.scale, form.power
