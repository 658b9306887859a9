"""User-defined parts in large numbers: each built-in part with each of its methods replaced in turn."""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import nearfar as nf
from nearfar import groups, links, miners, pairs, similarity
from nearfar._utils.shortcuts import Part
from nearfar.groups import _triplets as triplets
from nearfar.links import Terms
from nearfar.losses import ranking
from nearfar.miners import ScoredPairs

L, S, P, M = nf.losses, nf.sets, nf.pairs, nf.miners
Triple = triplets.Rule, triplets.AngularScore, triplets.SemiHardBand
ANGLE = triplets.Rule(triplets.AngularScore(0.4), wants_reference=True)

EXAMPLES: dict[type, Callable[[type], Any]] = {
    P.Hinge: lambda of: of(0.3, 0.4),
    P.Logistic: lambda of: of(),
    P.Sigmoid: lambda of: of(3.0, -1.0),
    P.Squared: lambda of: of(-0.9, 0.6),
    P.Linear: lambda of: of(0.3, 0.1),
    P.Identity: lambda of: of(2.0),
    P.CircleScore: lambda of: of(scale=4.0),
    P.AngularMargin: lambda of: of(scale=3.0),
    ranking.Sigmoid: lambda of: of(0.5),
    ranking.Triangle: lambda of: of(0.5),
    S.Mean: lambda of: of(),
    S.Worst: lambda of: of(),
    S.TopK: lambda of: of(5),
    S.Trimmed: lambda of: of(3, 5),
    S.KL: lambda of: of(0.3),
    S.KLBall: lambda of: of(0.3),
    S.ChiSquare: lambda of: of(0.7),
    S.DetachedWeights: lambda of: of(S.KL(0.3)),
    S.PowerWeights: lambda of: of(1.0, 3.0),
    S.CalibratedKL: lambda of: of(0.3, 20),
    similarity.Cosine: lambda of: of(),
    similarity.Dot: lambda of: of(normalize=True),
    similarity.NegEuclidean: lambda of: of(),
    similarity.NegSquaredEuclidean: lambda of: of(),
    similarity.Quantized: lambda of: of("bits"),
    links.Add: lambda of: of(),
    links.HingeLink: lambda of: of(0.4),
    links.SoftplusLink: lambda of: of(),
    links.ShareLink: lambda of: of(),
    links.PerPositive: lambda of: of(),
    links.LiftedLink: lambda of: of(),
    M.MultiSimilarity: lambda of: of(0.3),
    M.Hard: lambda of: of(),
    M.SemiHard: lambda of: of(0.6, 0.8),
    M.BalancedHard: lambda of: of(),
    M.DistanceWeighted: lambda of: of(sample=False),
    groups.Batch: lambda of: of(),
    groups.Sign: lambda of: of(),
    groups.Balanced: lambda of: of(),
    groups.Anchor: lambda of: of(),
    groups.AnchorSign: lambda of: of(),
    groups.Ranking: lambda of: of(),
    groups.Bins: lambda of: of(4),
    triplets.Positive: lambda of: of(ANGLE),
    triplets.Triplets: lambda of: of(),
    triplets.Rule: lambda of: of(),
    triplets.AngularScore: lambda of: of(0.4),
    triplets.SemiHardBand: lambda of: of(0.4),
}
"""How each part is made, of its own class or of one made of it."""
DRAWN = {S.Sampled}
"""Draws are not the same in strips as in one matrix, whoever wrote the set."""
for public in (getattr(S, name) for name in S.__all__):
    if inspect.isclass(public) and issubclass(public, Part) and public.swift and public not in DRAWN:
        EXAMPLES.setdefault(public, lambda of: of())  # a new set is found by itself


def robust(**more: Any) -> nf.RobustLoss:
    return nf.RobustLoss(**({"pair": P.Hinge(0.3, 0.4), "over": S.KL(0.3)} | more))


ANCHORS = {"groups": "anchor_sign"}
WAYS: dict[type, tuple[Callable[[Any], Any], ...]] = {
    pairs.PairLoss: (
        lambda x: robust(pair=x, over=S.TopK(5)),
        lambda x: robust(pair=x, groups="sign", over=S.Mean()),
        lambda x: robust(pair=x, **ANCHORS),
        lambda x: L.MultiSimilarity(pair=x),
        lambda x: L.Triplet(pair=x, margin=0.3),
        lambda x: L.LiftedStructure(pair=x),
        lambda x: L.Angular(pair=x),
    ),
    nf.sets.UncertaintySet: (
        lambda x: robust(over=x),
        lambda x: robust(over=x, **ANCHORS),
        lambda x: robust(over=(x, S.KL(0.3, normalized=False)), pair=P.Linear(), **ANCHORS),
        lambda x: robust(over=S.DetachedWeights(x), **ANCHORS),
    ),
    similarity.Similarity: (
        lambda x: L.DroTopK(k=5, similarity=x),
        lambda x: L.MultiSimilarity(similarity=x),
        lambda x: L.Triplet(similarity=x, margin=0.3),
        lambda x: L.LiftedStructure(similarity=x),
        lambda x: L.Contrastive(similarity=x, miner=M.DistanceWeighted(sample=False)),
    ),
    links.Link: (
        lambda x: robust(link=x, **ANCHORS),
        lambda x: robust(link=x, pair=P.Linear(), **ANCHORS),
    ),
    miners.Miner: (
        lambda x: L.MultiSimilarity(miner=x),
        lambda x: L.Contrastive(miner=x),
        lambda x: L.Triplet(miner=x, margin=0.3),
    ),
    groups.Grouping: (
        lambda x: robust(groups=x, over=S.TopK(5)),
        lambda x: robust(groups=x, pair=P.Identity(), over=S.TopK(5)),
    ),
    triplets.Rule: (
        lambda x: robust(groups=triplets.Triplets(x), over=S.Mean()),
        lambda x: robust(groups=triplets.Positive(x)),
    ),
    triplets.AngularScore: (lambda x: robust(groups=triplets.Positive(triplets.Rule(x, wants_reference=True)),
                                             pair=P.Identity()),),
    triplets.SemiHardBand: (lambda x: robust(groups=triplets.Triplets(triplets.Rule(keep=x)), over=S.Mean(),
                                             pair=P.Hinge(0.4, 0.0)),),
}  # fmt: skip
"""Losses that a part of each family is put into."""
SILENT = {"extra_repr", "check", "streams", "_repr_fn"}
"""Methods that have no say in a value."""


def family(kind: type) -> type:
    return next(first for first in WAYS if issubclass(kind, first))


def methods(kind: type) -> list[str]:
    """What a subclass of one's own may write anew."""
    names = {
        name
        for k in kind.__mro__
        if issubclass(k, family(kind))
        for name, x in vars(k).items()
        if isinstance(x, types.FunctionType) and (name == "__call__" or not name.startswith("__"))
    }
    return sorted(names - SILENT - set(kind.shortcuts) - set(getattr(kind, "__dataclass_fields__", ())))


def changed(found: Any) -> Any:
    """Something else of the same kind."""
    if isinstance(found, torch.Tensor):
        return 1.25 * found if found.is_floating_point() else found
    if isinstance(found, ScoredPairs):
        return found.keep(positive=found.scores < 0.8, negative=found.scores > -0.5)
    if isinstance(found, groups.Problem):
        return dataclasses.replace(found, losses=1.25 * found.losses + 0.1)
    if isinstance(found, Terms):
        return Terms(1.25 * found.values, found.measure)
    if isinstance(found, tuple):
        return tuple(changed(x) for x in found)
    if inspect.isgenerator(found):
        return (changed(x) for x in found)
    return found


def other(old: Callable[..., Any]) -> Callable[..., Any]:
    """A method that does as `old` does, and then something else."""

    def method(*args: Any, **kwargs: Any) -> Any:
        found = old(*args, **kwargs)
        if isinstance(found, torch.Tensor) and found.dtype == torch.bool:
            return torch.ones_like(found)
        return changed(found)

    return method


@dataclass(frozen=True)
class Case:
    kind: type
    name: str

    def __str__(self) -> str:
        return f"{self.kind.__name__}.{self.name}"

    def plain(self) -> Any:
        return EXAMPLES[self.kind](self.kind)

    def made(self) -> Any:
        """An object of a subclass that writes one method anew."""
        own = type(f"Own{self.kind.__name__}", (self.kind,), {self.name: other(getattr(self.kind, self.name))})
        return EXAMPLES[self.kind](own)

    def patched(self) -> Any:
        """An object of the class itself, one method of it put in place of another."""
        part = self.plain()
        object.__setattr__(part, self.name, other(getattr(part, self.name)))
        return part

    def losses(self) -> Iterator[Callable[[Any], Any]]:
        """What to put the part into; for methods that all of a family share, one will do, for helpers two."""
        ways = WAYS[family(self.kind)]
        if self.name.startswith("_") and self.name != "_value":
            ways = ways[:2]
        return iter(ways if self.name in vars(self.kind) else ways[:1])


def leaves(first: type) -> set[type]:
    """The built-in classes of a family that stand for themselves; tests/pml has those of the facade."""
    found = {first} if not inspect.isabstract(first) and first is not Part else set()
    for kind in first.__subclasses__():
        found |= leaves(kind)
    rooms = {kind: kind.__module__.split(".") for kind in found}
    return {kind for kind, room in rooms.items() if room[0] == "nearfar" and room[1] != "pml" and kind.swift}


CASES = [Case(kind, name) for kind in EXAMPLES for name in methods(kind)]
