"""The factors of a loss: validated, combined, and cached until a setting of the loss changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

from torch import Tensor, nn

from nearfar._utils.checks import check_choice
from nearfar._utils.shortcuts import Part, check_part, version
from nearfar.engines.plan import Plan, make_plan
from nearfar.groups import Anchor, AnchorSign, Balanced, Batch, Grouping, Positive, Product, Sign, Triplets
from nearfar.groups._groupings import REDUCTIONS, Reduction
from nearfar.links import Link, PerPositive
from nearfar.miners import Miner
from nearfar.pairs import PairLoss
from nearfar.sets import KL, Mean, UncertaintySet
from nearfar.similarity import Similarity

__all__ = ["ENGINES", "GROUPS", "CachedProduct", "Engine", "Factors", "Members", "Pairs", "Sets", "softmax_factors"]

_BUILT_IN = (Batch(), Sign(), Balanced(), Anchor(), AnchorSign(), Positive(), Triplets())
GROUPS: dict[str, Grouping] = {str(each.scope): each for each in _BUILT_IN}
PLANS = 64
"""Number of plans that a loss caches."""
ENGINES = ("auto", "dense", "tiled", "fused")
Engine = Literal["auto", "dense", "tiled", "fused"]
Members = Literal["negative", "all"]
Pairs = PairLoss | tuple[PairLoss, PairLoss]
"""A pair loss for both signs, or one for positive and one for negative pairs."""
Sets = UncertaintySet | tuple[UncertaintySet, UncertaintySet]


class Factors(TypedDict, total=False):
    """The factors of a loss; for their meaning see `RobustLoss`."""

    pair: Pairs
    over: Sets
    groups: str | Grouping
    link: Link | None
    miner: Miner | None
    reduction: Reduction
    similarity: Similarity
    members: Members


def softmax_factors(pair: Pairs) -> Factors:
    """Cross-entropy of each positive pair against its anchor's negatives: KL(1) x anchor_sign, one softplus each."""
    return Factors(pair=pair, over=(Mean(), KL(1.0, normalized=False)), groups="anchor_sign", link=PerPositive())


def product_of(owner: str, given: Factors) -> Product:
    """Validate factors and combine them into a product."""
    reduction, members = given["reduction"], given["members"]
    check_choice(owner, "reduction", reduction, REDUCTIONS)
    check_choice(owner, "members", members, ("negative", "all"))
    groups = grouping(owner, given["groups"])
    if reduction != "mean" and not groups.per_anchor:
        raise ValueError(
            f"{owner}: reduction={reduction!r} needs one group per anchor, but groups are "
            f'{type(groups).__name__}, whose value is one number; use zero="drop" on the set to leave zeros out.'
        )
    pairs = for_each_sign(owner, "pair", given["pair"], PairLoss, "nf.pairs.Hinge()")
    sets = for_each_sign(owner, "over", given["over"], UncertaintySet, "nf.sets.KL(0.1)")
    link, miner, similarity = given["link"], given["miner"], given["similarity"]
    for name, value, kind, such_as in (
        ("link", link, Link, "nf.links.HingeLink()"),
        ("miner", miner, Miner, "nf.miners.Hard()"),
        ("similarity", similarity, Similarity, "nf.similarity.Cosine()"),
    ):
        if value is not None:
            check_part(owner, name, value, kind, such_as)
    groups.check(*sets)
    return Product(similarity, *pairs, *sets, groups, link, miner, reduction, members == "all")


def grouping(owner: str, groups: str | Grouping) -> Grouping:
    """A grouping, given its name or the grouping itself."""
    if isinstance(groups, str):
        check_choice(owner, "groups", groups, GROUPS)
        groups = GROUPS[groups]
    check_part(owner, "groups", groups, Grouping, '"batch" or nf.groups.Batch()')
    return groups


def for_each_sign(owner: str, name: str, value: Any, kind: type[Any], such_as: str) -> tuple[Any, Any]:
    """The parts for positive and negative pairs, given two parts or one for both."""
    if isinstance(value, tuple | list):
        if len(value) != 2:
            raise ValueError(f"{owner}: {name} may be two, for positive and negative pairs, but {len(value)} came.")
        for place, part in zip(("positive", "negative"), value, strict=True):
            check_part(owner, f"{name} for {place} pairs", part, kind, such_as)
        return value[0], value[1]
    check_part(owner, name, value, kind, such_as)
    return value, value


@dataclass(frozen=True, eq=False)
class CachedProduct:
    """The product of a loss for its present settings, cached until one of them changes.

    Args:
        product: the factors.
        learned: a setting, or a number that the loss made of one, is a tensor, so that each call needs a product in
            its own autograd graph.
    """

    product: Product
    learned: bool
    plans: dict[tuple[int, int], tuple[Product, Plan]] = field(default_factory=dict)
    """By version of the parts and rows: the product for such a batch, and its plan."""

    def plan(self, rows: int) -> tuple[Product, Plan]:
        """The product for a batch of `rows` rows, and its plan."""
        key = version(self.product.parts), rows
        if key not in self.plans:
            if len(self.plans) >= PLANS:
                self.plans.clear()
            product = self.product.at(rows)
            self.plans[key] = product, make_plan(product)
        return self.plans[key]

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles leave out factors that are part of an autograd graph."""
        return (type(None), ()) if self.learned else (CachedProduct, (self.product, False))

    @staticmethod
    def of(loss: Any, old: CachedProduct | None) -> CachedProduct:
        """Make the product of a loss; register parts that were given or have parameters as its submodules."""
        given = _given(loss)
        product = make_product(loss, old)
        numbers = (x for part in product.parts if part is not None for x in vars(part).values())
        found = CachedProduct(product, any(isinstance(x, Tensor) for x in (*given.values(), *numbers)))
        for name, part in (
            ("pair_positive", product.positive),
            ("pair_negative", None if product.negative is product.positive else product.negative),
            ("link", product.link),
            ("miner", product.miner),
            ("similarity", product.similarity),
        ):
            if part is not None and (id(part) in given or _own_parameters(part, given)):
                loss._modules[name] = part
            elif isinstance(loss._modules.get(name), Part):
                del loss._modules[name]
        return found


def _given(loss: Any) -> dict[int, Any]:
    """The values of a loss's settings, by identity."""
    values = [loss.setting(name) for name in type(loss).settings]
    return {id(x): x for value in values for x in (value if isinstance(value, tuple | list) else (value,))}


def make_product(loss: Any, old: CachedProduct | None) -> Product:
    """Make the product of a loss; parts that are not settings keep the parameters of those in the `old` product."""
    usual = Factors(groups="batch", link=None, miner=None, reduction="mean", members="negative")
    own: Any = {
        name: loss.setting(name) for name in ("miner", "similarity", "reduction") if name in type(loss).settings
    }
    chosen = Factors() if loss.pair is None else Factors(pair=loss.pair)
    given = _given(loss)
    product = product_of(loss.owner, usual | own | loss.factors() | chosen)
    parts: tuple[Any, ...] = product.parts
    before: tuple[Any, ...] = (None,) * len(parts) if old is None else old.product.parts
    for part, earlier in zip(parts, before, strict=True):
        if isinstance(part, nn.Module) and id(part) not in given:
            part.__dict__["_maker"] = loss.owner
            if type(earlier) is type(part) and "_maker" in earlier.__dict__:
                part.__dict__.update({name: x for name, x in earlier.__dict__.items() if "hooks" in name})
                part._parameters.update(
                    {
                        name: x
                        for name, x in _own_parameters(earlier, given).items()
                        if part._parameters.get(name) is not None
                    }
                )
    return product


def _own_parameters(part: nn.Module, given: dict[int, Any]) -> dict[str, nn.Parameter]:
    """The parameters of a part that are not settings of its loss."""
    return {name: x for name, x in part._parameters.items() if x is not None and id(x) not in given}
