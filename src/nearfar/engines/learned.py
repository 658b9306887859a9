"""Move learned parameters out of a product, because operators take the numbers of the wide side as constants.

If a number of the negative pairs, or of all pairs, is learned, the same loss is written with other factors, and plain
autograd around the engine:

    scale       l = f(c·s)           rows are multiplied by √c, or by c for distances
    threshold   l = f(s + b)         the learned `offset` of a `PairForm`
    gamma       F_γ(l) = γ·F₁(l/γ)   losses are divided by γ, and the value is multiplied by it

The few positive pairs are computed by autograd and carry all other parameters. A loss that cannot be rewritten is
computed in strips or dense.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from nearfar._utils.settings import Number
from nearfar._utils.shortcuts import swift, tensors, touched
from nearfar.engines.plan import SCOPES
from nearfar.groups._groupings import Product
from nearfar.pairs import PairForm, PairLoss
from nearfar.similarity import Dot, NegEuclidean, NegSquaredEuclidean, Similarity

__all__ = ["Lifted", "lift"]

PLAIN: dict[str | None, Similarity] = {  # the similarity of prepared rows, by its form
    "dot": Dot(),
    "squared": NegSquaredEuclidean(normalize=False),
    "distance": NegEuclidean(normalize=False),
}


@dataclass(frozen=True, eq=False)
class Lifted:
    """A product without learned parameters on its wide side."""

    product: Product  # the factors
    stretch: Tensor | None  # factor of the prepared rows; None for 1
    times: Tensor | None  # factor of the value; None for 1

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
        own = {name: _alias(x) for name, x in tensors(of).items() if x is not None}
        twin = object.__new__(type(of))
        twin.__dict__.update(of.__dict__, _parameters={}, **own)
        self.of, self.scale, self.gamma = (twin,), _alias(scale), _alias(gamma)  # a tuple, so that it is no submodule
        held = {f"of_{name}": x for name, x in own.items()}
        self.__dict__.update(held, learns=frozenset({"scale", "gamma", *held}))  # where engines look for parameters

    def forward(self, s: Tensor, sign: int) -> Tensor:
        found: Tensor = self.of[0](s / self.scale, sign) / self.gamma
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
    sets = [over if gamma is None else over.per(gamma) for over in (product.over_positive, product.over_negative)]
    form = product.negative.form(-1)
    found = None if form is None else _lift_form(form, gamma)
    if found is None or sets[0] is None or sets[1] is None or any(map(tensors, sets)):
        return None
    wide, scale = found
    kind, stretch, similarity = product.similarity.form, None, product.similarity
    if isinstance(scale, Tensor):
        stretch, similarity = scale if kind == "distance" else scale.sqrt(), PLAIN[kind]
    new = replace(
        product,
        similarity=similarity,
        positive=Carried(product.positive, 1.0 if stretch is None else scale, 1.0 if gamma is None else gamma),
        negative=Formed(wide),
        over_positive=sets[0],
        over_negative=sets[1],
    )
    return Lifted(new, stretch, gamma)


def _known(product: Product) -> bool:
    """Whether the loss is of known parts except for its numbers, and no part compares scores with a number."""
    groups, miner, rule = product.groups, product.miner, getattr(product.groups, "rule", None)
    plain = swift((product.similarity, groups, product.link)) and touched(product.parts) is None
    formed = product.similarity.form is not None and product.positive.swift and product.negative.swift
    free = (miner is None or (miner.swift and miner.ordinal)) and (rule is None or rule.keep is None)
    return plain and formed and free and groups.scope in SCOPES


def _lift_form(form: PairForm, gamma: Tensor | None) -> tuple[PairForm, Number] | None:
    """The form divided by γ, and the learned factor that scores are multiplied by (else 1); or None."""
    numbers: Any = form
    a, b, outside, power = numbers.a, numbers.b, numbers.scale, numbers.power
    b = b if form.offset is None else b + form.by_offset * form.offset
    outside = outside if gamma is None else outside / gamma
    if form.shape == "pace" or isinstance(power, Tensor) or not (isinstance(a, Tensor) or a > 0):
        return None
    if form.shape != "softplus":  # move the outer factor inside
        inside = outside if form.shape == "line" or power == 1 else outside ** (1 / power)
        a, b, outside = inside * a, inside * b, 1.0
    elif isinstance(outside, Tensor):
        return None
    learnt = isinstance(b, Tensor)
    plain = {"a": 1.0 if isinstance(a, Tensor) else a, "b": 0.0 if learnt else b, "scale": outside}
    return replace(form, **plain, offset=_alias(b) if learnt else None, by_offset=float(learnt)), a
