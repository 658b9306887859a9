"""Every constructor argument of every loss and miner: how each is made, and another value of each argument.

A loss or an argument that is new needs a line here only where no example can be found by itself.
"""

from __future__ import annotations

import inspect
from typing import Any, get_args, get_origin

import torch
from table import CLASSES, DIM, PRODUCTS

import nearfar as nf
from nearfar.losses.annealing import Anneal

L, M, P, S = nf.losses, nf.miners, nf.pairs, nf.similarity

NEEDED: dict[str, dict[str, Any]] = {
    "DroTopK": {"k": 6},
    "DroTopKPN": {"k": 6},
    "DroTrimmed": {"top": 2, "k": 6},
    "DroTrimmedPN": {"wrong": 0.2, "k": 6},
    "DroChiSquare": {"rho": 1.5},
    "HAP2S": {"margin": 0.7},
    "SmoothAP": {"temperature": 0.1},
}
"""Arguments with which a batch of a few rows shows a difference."""
MORE: dict[tuple[str, str], dict[str, Any]] = {
    ("DroTopK", "fraction"): {"k": None, "fraction": 0.1},
    ("DroTopK", "zero"): {"k": 500},
    ("DroTrimmed", "zero"): {"k": 500},
    ("DroTrimmed", "fraction"): {"k": None, "fraction": 0.1},
    ("DroTrimmed", "top_fraction"): {"top": None, "top_fraction": 0.05},
    **{(kind, "effective"): {"k": None, "effective": 2.0} for kind in ("DroTopK", "DroTopKPN", "DroTrimmed")},
    **{(kind, "effective"): {"gamma": None, "effective": 2.0} for kind in ("DroKL", "DroKLGrouped")},
    ("DroChiSquare", "effective"): {"rho": None, "effective": 2.0},
    ("Triplet", "anneal"): {"mining": "hard"},
    ("HAP2S", "power"): {"weights": "polynomial"},
    ("DroKL", "samples"): {"samples": 3},
    ("DroWorst", "miner"): {"pair": (P.Linear(scale=0.01), P.Linear())},
}
"""What else must be given where an argument is changed."""
OTHER: dict[Any, Any] = {
    ("DroTopK", "k"): "0.7B", ("DroTopK", "fraction"): 0.3, ("DroTopKPN", "k"): 9.5, ("DroKL", "samples"): 5,
    ("DroTrimmed", "top"): 4, ("DroTrimmed", "k"): "B/2", ("DroTrimmed", "fraction"): 0.3,
    ("DroTrimmed", "top_fraction"): 0.1, ("DroTrimmedPN", "k"): 9, ("DroTrimmedPN", "wrong"): 0.4,
    ("DroChiSquare", "rho"): "0.4B", ("Triplet", "anneal"): Anneal(5, 0.5), ("Angular", "degrees"): 55.0,
    ("MultiSimilarity", "miner"): 0.6, ("Triplet", "reduction"): "nonzero", ("Triplet", "mining"): "hard",
    ("SemiHard", "margin"): None, ("Circle", "reduction"): "sum", ("SupCon", "reduction"): "sum",
    ("NCA", "similarity"): S.Cosine(), ("ProxyNCA", "similarity"): S.Cosine(), ("DroWorst", "miner"): M.SemiHard(0.2),
    ("SupCon", "pair"): (P.Linear(scale=3.0), P.Identity(2.0)),
    "pair": P.Logistic(0.2, 3.0, 5.0), "similarity": S.NegSquaredEuclidean(), "miner": M.Hard(), "effective": 1.3,
    "floor": 0.999,
}  # fmt: skip
FIXED = {"classes", "dim", "centers"}


def kinds() -> list[type]:
    miners = [getattr(M, name) for name in M.__all__]
    return [
        *(getattr(L, name) for name in PRODUCTS),
        *(x for x in miners if inspect.isclass(x) and issubclass(x, M.Miner) and x is not M.Miner),
    ]


def arguments(kind: type) -> list[str]:
    return list(inspect.signature(kind).parameters)


CASES = [(kind, name) for kind in kinds() for name in arguments(kind)]
IDS = [f"{kind.__name__}-{name}" for kind, name in CASES]


def given(kind: type, name: str = "") -> dict[str, Any]:
    """Arguments to make a loss or miner with, when `name` is to be changed."""
    known = {"classes": CLASSES, "dim": DIM} if "classes" in arguments(kind) else {}
    return known | NEEDED.get(kind.__name__, {}) | MORE.get((kind.__name__, name), {})


def other(kind: type, name: str) -> Any:
    """A value of an argument that is not its default."""
    if (kind.__name__, name) in OTHER:
        return OTHER[kind.__name__, name]
    if name in OTHER:
        return OTHER[name]
    parameter = inspect.signature(kind).parameters[name]
    value = given(kind, name).get(name, parameter.default)
    hint = parameter.annotation
    if get_origin(hint) is not None and isinstance(value, str):
        return next(x for x in get_args(hint) if x not in (value, "none", "auto", "fused"))
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else 1.3 * value + 0.11


def make(kind: type, **more: Any) -> Any:
    """The loss, its learned numbers the same each time; a miner within a loss."""
    torch.manual_seed(0)
    made = kind(**more)
    if isinstance(made, M.Miner):
        return L.BinomialDeviance(miner=made)
    return made.double()


def part(loss: Any, kind: type) -> Any:
    return loss.miner if issubclass(kind, M.Miner) else loss


def batch(seed: int = 0, n: int = 18) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(n, DIM, generator=rng, dtype=torch.float64), torch.arange(n) % CLASSES


def measured(loss: Any, seed: int = 0, dtype: torch.dtype = torch.float64, call: Any = None) -> list[torch.Tensor]:
    """Value and gradients of the rows and of what is learned."""
    rows, labels = batch(seed)
    rows = rows.to(dtype).requires_grad_()
    torch.manual_seed(1)
    value = (loss if call is None else call)(rows, labels)
    wanted = [rows, *(x for x in loss.parameters() if x.requires_grad)]
    slopes = torch.autograd.grad(value.sum(), wanted, allow_unused=True, materialize_grads=True)
    return [value.detach(), *slopes]


def same(found: list[torch.Tensor], wanted: list[torch.Tensor], tolerance: float = 1e-9) -> None:
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)
