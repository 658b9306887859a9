"""Losses with one number as an `nn.Parameter`, and the same losses with a plain number."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import settings_cases
import torch
from settings_cases import make

import nearfar as nf

L, P, S, K = nf.losses, nf.pairs, nf.sets, nf.links


@dataclass(frozen=True)
class Case:
    """A loss made with a number, a plain or a learned one; `start` is where it is tried."""

    id: str
    make: Callable[[Any], Any]
    start: float

    def learned(self) -> tuple[Any, torch.nn.Parameter]:
        number = torch.nn.Parameter(torch.tensor(self.start, dtype=torch.float64))
        return self.make(number).double(), number

    def plain(self, value: float | None = None) -> Any:
        return self.make(self.start if value is None else value).double()


def learnable(kind: type) -> list[str]:
    """Arguments whose annotation lets them be learned."""
    found = []
    for name, x in inspect.signature(kind).parameters.items():
        checks = [y for y in get_args(x.annotation) if isinstance(y, functools.partial)]
        if any(check.keywords.get("learned") for check in checks):
            found.append(name)
    return found


def _recipes() -> list[Case]:
    found = []
    for kind in (getattr(L, name) for name in L.__all__):
        for name in learnable(kind):
            known = settings_cases.given(kind, name)
            start = known.get(name, inspect.signature(kind).parameters[name].default)
            known = known | ({"learn": False} if "learn" in inspect.signature(kind).parameters else {})
            start = start or (0.2 if name == "smooth" else 0.13)
            found.append(
                Case(
                    f"{kind.__name__}-{name}",
                    lambda x, kind=kind, name=name, known=known: make(kind, **(known | {name: x})),
                    start,
                )
            )
    return found


PAIRS: dict[type, dict[str, float]] = {
    P.Hinge: {"margin": 0.3, "threshold": 0.4, "smooth": 0.2},
    P.Logistic: {"threshold": 0.3, "slope_positive": 2.0, "slope_negative": 5.0},
    P.Squared: {"pos_margin": -0.9, "neg_margin": 0.6, "power": 2.0},
    P.Sigmoid: {"scale": 3.0, "bias": -0.5},
    P.Linear: {"threshold": 0.3, "margin": 0.1, "scale": 1.4},
    P.Identity: {"scale": 1.4},
    P.CircleScore: {"margin": 0.4, "scale": 4.0},
    P.AngularMargin: {"margin": 0.5, "scale": 3.0},
}
WAYS: dict[str, Callable[..., Any]] = {
    "mean": lambda pair: nf.RobustLoss(pair=pair, over=S.Mean(), groups="sign"),
    "kl": lambda pair: nf.RobustLoss(pair=pair, over=S.KL(0.5)),
    "rows": lambda pair: nf.RobustLoss(pair=pair, over=S.KL(0.4), groups="anchor_sign", link=K.HingeLink(3.0)),
    "negative": lambda pair: nf.RobustLoss(pair=(P.Linear(), pair), over=S.KL(1.0), groups="anchor_sign"),
    "triplets": lambda pair: nf.RobustLoss(pair=pair, over=S.Mean(), groups="triplets"),
    "distance": lambda pair: nf.RobustLoss(
        pair=pair, over=S.KL(0.4), groups="anchor_sign", similarity=nf.similarity.NegEuclidean()
    ),
    "squared": lambda pair: nf.RobustLoss(
        pair=pair, over=S.Mean(), groups="anchor_sign", similarity=nf.similarity.NegSquaredEuclidean()
    ),
    "hard": lambda pair: nf.RobustLoss(pair=pair, over=S.Mean(), groups="anchor_sign", miner=nf.miners.Hard()),
}
BETWEEN = {(P.AngularMargin, "distance"), (P.AngularMargin, "squared")}
"""An angle is that of a cosine."""


def _parts() -> list[Case]:
    found = []
    for kind, numbers in PAIRS.items():
        for name, start in numbers.items():
            for way, loss in WAYS.items():
                if (kind, way) not in BETWEEN:
                    found.append(
                        Case(
                            f"{kind.__name__}-{name}-{way}",
                            lambda x, kind=kind, name=name, loss=loss, numbers=numbers: loss(
                                kind(**(({} if name != "smooth" else numbers) | {name: x}))
                            ),
                            start,
                        )
                    )
    for groups in ("batch", "sign", "anchor", "anchor_sign"):
        for more in ({}, {"zero": "drop"}, {"normalized": False, "zero_member": True}):
            loss = functools.partial(nf.RobustLoss, pair=P.Hinge(), groups=groups)
            found.append(
                Case(f"KL-{groups}-{'-'.join(more)}", lambda x, loss=loss, more=more: loss(over=S.KL(x, **more)), 0.3)
            )
    link = {"pair": P.Linear(), "over": S.KL(0.5), "groups": "anchor_sign"}
    found += [
        Case("HingeLink-margin", lambda x: nf.RobustLoss(**link, link=K.HingeLink(x)), 0.7),
        Case("HingeLink-smooth", lambda x: nf.RobustLoss(**link, link=K.HingeLink(0.3, x)), 0.4),
        Case("KL-of-one-sign", lambda x: nf.RobustLoss(**(link | {"over": (S.KL(0.3), S.KL(x))})), 0.4),
        Case("KL-and-mean", lambda x: nf.RobustLoss(**(link | {"over": (S.Mean(), S.KL(x))})), 0.4),
    ]
    return found


RECIPES, PARTS = _recipes(), _parts()
CASES = [*RECIPES, *PARTS]
IDS = [case.id for case in CASES]
