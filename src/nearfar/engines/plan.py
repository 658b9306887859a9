"""`Plan`: how a loss is computed; made once for its factors, and again when one of them changes.

    fold      scores -> pair losses -> one number per row for its many pairs (negative, or all)
    finish    plain autograd on [n] and [n, P]: the few positive pairs, set, link, reduction
    weigh     backward from that number: weight x slope of each pair -> gradients of the rows

A loss that can be folded runs on the operators (operators.py), others in strips by their plain definition
(generic.py), or dense if strips do not support them. Parts describe what they support; no code here tests their type.
"""

from dataclasses import dataclass
from typing import Any

import torch

from nearfar._utils.shortcuts import learned_tensors, nested, swift, touched
from nearfar.groups._groupings import Product
from nearfar.groups._triplets import difference
from nearfar.miners import Miner, Window
from nearfar.sets.base import Fold

__all__ = ["Plan", "make_plan", "plain_parts", "window_of"]

MOST = 2**20  # largest K of the hardest pairs for the kernels
SCOPES = ("batch", "sign", "balanced", "anchor", "anchor_sign", "triplets", "positive")


@dataclass(frozen=True)
class Plan:
    """How a loss is computed; `str` shows it in symbols.

    Args:
        product: the factors of the loss.
        refused: the part that rules out the operators, and why; None if they support the loss.
        refused_kernels: why the GPU kernels of the operators do not support it; None if they do.
        refused_strips: why strips do not support it either, so that it is always dense; None if they do.
    """

    product: Product
    refused: str | None
    refused_kernels: str | None
    refused_strips: str | None

    def __str__(self) -> str:
        way = "operators: tiles of the product are reduced where they are made"
        if self.refused is not None:
            way = f"strips of rows by the plain definitions, because {self.refused}"
        if self.refused is not None and self.refused_strips is not None:
            way = f"dense at every size, because {self.refused_strips}"
        lines = [*_describe(self.product), f"way       {way}"]
        if self.refused_kernels is not None and self.refused is None:
            lines.append(f"on a GPU  PyTorch, because {self.refused_kernels}")
        return "\n".join(f"  {line}" for line in lines)


def plain_parts(product: Product, *, any_similarity: bool = False) -> bool:
    """Whether all parts allow shortcuts, and none was modified on its instance; the similarity may be excepted."""
    parts = product.parts[1:] if any_similarity else product.parts
    return swift(parts) and touched(parts) is None


def make_plan(product: Product) -> Plan:
    """Make the plan of a product."""
    refused = _refuse(product)
    return Plan(product, refused, refused or _refuse_kernels(product), _refuse_strips(product))


def window_of(miner: Miner | None) -> Window | None:
    """The window of scores that a miner keeps for a single pair; None if it has none, or if there is no miner."""
    one = torch.ones(1, 1)
    return None if miner is None else miner.window(one, one > 0, one[0])


def _refuse(product: Product) -> str | None:
    """The part that rules out the operators, and why; None if they support the loss."""
    for part in product.parts:
        if part is not None and not swift((part,)):
            return f"{_name(part)} allows no shortcut"
    groups, miner, fold = product.groups, product.miner, product.over_wide.fold()
    triplets = groups.scope in ("positive", "triplets")
    if product.similarity.form is None:
        return f"{_name(product.similarity)} has no form"
    if groups.scope not in SCOPES:
        return f"{_name(groups)} is no built-in grouping"
    if miner is not None and miner.log_odds(torch.ones(1, 1), 3) is not None:
        wide = triplets or product.wants_columns
        return f"{_name(miner)} draws pairs, which these groups do not take" if wide else None
    if any(x.draws for x in (product.over_positive, product.over_negative)):
        return "a set draws members"
    if product.negative.form(-1) is None:
        return f"{_name(product.negative)} has no form"
    if miner is not None and (product.everyone or groups.scope == "triplets" or window_of(miner) is None):
        return f"{_name(miner)} keeps no interval of scores, or its interval is not asked for"
    if fold is None:
        return f"{_name(product.over_wide)} has no fold"
    return _refuse_fold(product, fold) or (_refuse_triplets(product, fold) if triplets else None)


def _refuse_fold(product: Product, fold: Fold) -> str | None:
    """Why the wide side of each row cannot be folded, or None."""
    scope, wide, name = product.groups.scope, product.over_wide, _name(product.over_wide)
    if fold.kind in ("top", "moments"):
        if product.groups.per_anchor or product.miner is not None or scope == "triplets":
            return f"{name} is folded over the batch, without a miner"
        if wide.zero_member or product.over_positive.fold() is None:
            return f"{name} has a zero member, or the positive pairs have no fold"
        if fold.fraction and "drop" in (wide.zero, product.over_positive.zero):
            return f"{name} takes a fraction of the pairs with a loss, which are not counted"
    if fold.held and (scope != "anchor_sign" or wide.zero_member or fold.kind != "exp"):
        return f"{name} holds its weights constant"
    if product.wants_columns and scope == "anchor_sign" and (fold.kind == "max" or product.miner is not None):
        return f"{_name(product.link)} reads columns, of which no maximum is kept, nor any after mining"
    return None


def _refuse_triplets(product: Product, fold: Fold) -> str | None:
    """The reason why triplets, or values of positive pairs, cannot be folded; None if they can."""
    rule: Any = getattr(product.groups, "rule", None)
    form, over, name = product.negative.form(-1), product.over_negative, _name(product.groups)
    assert form is not None  # noqa: S101 - checked by the caller
    every = rule.keep is None and not over.zero_member
    if product.groups.scope == "positive":
        angles = rule.angle is not None and rule.keep is None and not rule.balanced and product.miner is None
        line = product.similarity.form == "dot" and form.shape == "line" and form.offset is None
        folds = fold.kind == "exp" and not fold.held and over.zero != "drop"
        return None if angles and line and folds else f"{name} gives values that are no angles"
    if rule.compare is not difference or (rule.keep is not None and rule.band is None):
        return f"{name} compares or selects triplets by a function of its own"
    if rule.balanced:
        return None if fold.kind == "sum" and every else f"{name} is balanced, which only a mean is"
    if fold.kind == "max":
        rises = form.shape != "pace" and form.a > 0 and form.scale > 0
        return None if rises and every and over.zero == "keep" else f"{name} has no largest score"
    return None if fold.kind == "sum" else f"{name} does not average triplets"


def _refuse_kernels(product: Product) -> str | None:
    """Why the GPU kernels do not support a loss that the operators support, or None."""
    fold, rule, window = product.over_wide.fold(), getattr(product.groups, "rule", None), window_of(product.miner)
    if product.draws:
        return "pairs are drawn"
    if fold is None or fold.base or fold.fraction or fold.most > MOST:
        return f"{_name(product.over_wide)} counts members or sums powers"
    if window is not None and (window.closed or window.most is not None):
        return f"{_name(product.miner)} keeps no open interval of scores"
    if product.groups.scope == "triplets" and (fold.kind != "sum" or (rule is not None and rule.balanced)):
        return "triplets are ranked"
    return None


def _refuse_strips(product: Product) -> str | None:
    """Why a loss cannot be computed in strips by its plain definitions, or None."""
    groups, link = product.groups, product.link
    if product.remembers:
        return "Remembered keeps dual variables of samples, which only the dense engine gives to a set"
    for part in (*nested(groups), link):
        if part is not None and not getattr(part, "strips", part.swift):
            return f"{_name(part)} does not say (strips = True) that it may be met strip by strip"
    if product.wants_columns and groups.scope != "anchor_sign" and not groups.swift:
        return f"{_name(groups)} has no columns to give to {_name(link)}"
    for over in () if groups.per_anchor else (product.over_positive, product.over_negative):
        if learned_tensors((over,)):
            return f"{_name(over)} has a number that is learned, and groups that reach over the batch"
        if over.draws:
            return f"{_name(over)} draws members at random, and groups reach over the batch"
    return None


def _name(part: object) -> str:
    return type(part).__name__


FOLDS = {  # by kind of fold: the number t, and the weights
    "exp": ("γ·log mean exp(l/γ), γ = {gamma:g}", "exp((l - t)/γ)"),
    "sum": ("mean of l", "1 / number of pairs"),
    "max": ("max of l", "1 at the largest"),
    "top": ("mean of the K largest l", "1/K for the K largest"),
    "moments": ("mean of l + root of its variance", "rises linearly with l"),
    "power": ("mean of l, weighted by (1 + l/{base:g})^{raised:g}", "(1 + l/{base:g})^{raised:g}"),
}


def _describe(product: Product) -> list[str]:
    """Similarity, pair losses, miner, fold, finish and weigh in symbols."""
    similarity, wide, groups = product.similarity, product.over_wide, product.groups
    kinds = {"dot": "⟨x, y⟩", "squared": "-|x - y|²", "distance": "-|x - y|", None: _name(similarity)}
    lines = [f"score     s = {kinds[similarity.form]}{' of unit rows' if similarity.normalize else ''}"]
    lines += [f"positive  l = {_pair(product.positive, +1)}", f"negative  l = {_pair(product.negative, -1)}"]
    if product.miner is not None:
        lines.append(f"miner     {product.miner!r}")
    fold, joined = wide.fold(), groups.scope in ("batch", "anchor")
    who = "the batch" if groups.scope in ("batch", "sign", "balanced") else "each row"
    members = "all pairs" if product.everyone or joined else "the negative pairs"
    texts = [repr(wide)] if fold is None else FOLDS["power" if fold.base else fold.kind]
    folded, *weights = texts if fold is None else (text.format(**vars(fold)) for text in texts)
    lines.append(f"fold      t = {folded}, over {members} of {who}")
    link = "positive + negative value" if product.link is None else repr(product.link)
    sides = f"{wide!r} of all pairs" if joined else f"{product.over_positive!r} of positive pairs, {link}"
    lines.append(f"finish    {groups.scope or _name(groups)}: {sides}, {product.reduction}")
    if fold is not None:
        lines.append(f"weigh     p ∝ {weights[0]}, gradient Σ p·dl/ds")
    return lines


def _pair(pair: Any, sign: int) -> str:
    """A pair loss in symbols, or its repr if it has no form."""
    form = pair.form(sign)
    if form is None:
        return repr(pair)
    z = f"{_factor(form.a)}s" + _term(form.b) + ("" if form.offset is None else f" + {_factor(form.by_offset)}λ")
    power = "" if form.power == 1 else f"^{_number(form.power)}"
    shapes = {
        "line": f"({z})",
        "power": f"[{z}]₊{power}",
        "softplus": f"log(1 + exp({z}))",
        "pace": f"[{z}]₊·(s{_term(form.center, -1)})",
    }
    return _factor(form.scale) + shapes[form.shape]


def _factor(x: Any) -> str:
    """A number as a factor: nothing for 1, a minus sign for -1."""
    signs = {1: "", -1: "-"}
    return signs[x] if not isinstance(x, torch.Tensor) and x in signs else f"{_number(x)}·"


def _term(x: Any, sign: int = 1) -> str:
    """A number as a signed summand: nothing for 0."""
    if isinstance(x, torch.Tensor):
        return " + (learned)" if sign > 0 else " - (learned)"
    x = sign * x
    return "" if x == 0 else f" {'+' if x > 0 else '-'} {abs(x):g}"


def _number(x: Any) -> str:
    return "(learned)" if isinstance(x, torch.Tensor) else f"{x:g}"
