"""The table of all losses. A new loss is one more row; every property test then runs for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from oracles import oracle_of, pairs

import nearfar as nf

L = nf.losses
CLASSES, DIM = 5, 4


def logistic(s, sign):
    return pairs.logistic(s, sign)


@dataclass(frozen=True)
class Row:
    """One loss: how to make it, and how to say the same to its oracle.

    Flags: `reference`: a reference form exists. `ordered`: the order of the rows within a class is part of the loss.
    """

    name: str
    make: Callable[[], torch.nn.Module]
    hyper: dict[str, Any] = field(default_factory=dict)
    label: str = ""
    proxies: str = ""
    centers: int = 1
    reference: bool = True
    ordered: bool = False

    @property
    def id(self) -> str:
        return f"{self.name}-{self.label}" if self.label else self.name

    @property
    def frozen(self) -> bool:
        """It holds weights constant in its gradient, as its oracle does, which then has a parameter `frozen`."""
        return "frozen" in inspect.signature(oracle_of(self.name)).parameters

    @property
    def composed(self) -> bool:
        """It chooses its own pairs: no index tuples, and no `Relation` of the batch with itself."""
        return self.ordered or bool(self.proxies)

    def loss(self) -> Any:
        """The loss in float64, its proxies (if any) fixed."""
        torch.manual_seed(7)
        module = self.make().double()
        if self.proxies:
            with torch.no_grad():
                module.proxies.copy_(torch.as_tensor(self.vectors))
        return module

    @property
    def vectors(self) -> np.ndarray:
        """The fixed proxies: [CLASSES, DIM], or several centers of each class side by side."""
        return np.concatenate([PROXIES, MORE[:, : (self.centers - 1) * DIM]], axis=1)

    def oracle(self, E: np.ndarray, y: np.ndarray, at: np.ndarray | None = None, **more: Any) -> Any:
        """The oracle's value; losses with frozen weights take them at `at`."""
        hyper = dict(self.hyper)
        if self.proxies:
            hyper[self.proxies] = np.asarray(self.vectors, dtype=np.longdouble)
        if self.frozen:
            hyper["frozen"] = E if at is None else at
        return oracle_of(self.name)(E, y, **(hyper | more))


PROXIES = np.random.default_rng(5).normal(size=(CLASSES, DIM))
MORE = np.random.default_rng(6).normal(size=(CLASSES, 2 * DIM))

VARIANTS = (
    Row("Contrastive", L.Contrastive),
    Row("Contrastive", lambda: L.Contrastive(pos_margin=0.2, power=1, reduction="nonzero"),
        {"pos_margin": 0.2, "power": 1, "reduction": "nonzero"}, "nonzero"),
    Row("Margin", L.Margin),
    Row("Margin", lambda: L.Margin(reduction="nonzero", beta=0.9, learn=False),
        {"reduction": "nonzero", "beta": 0.9}, "nonzero"),
    Row("DroTopK", lambda: L.DroTopK(k=6), {"k": 6}),
    Row("DroTopK", lambda: L.DroTopK(k=4.3, pair=nf.pairs.Logistic()), {"k": 4.3, "pair": logistic}, "logistic"),
    Row("DroTopK", lambda: L.DroTopK(fraction=0.27), {"fraction": 0.27}, "fraction"),
    Row("DroTopK", lambda: L.DroTopK(k="0.7B"), {"k": "0.7B"}, "rows"),
    Row("DroTopK", lambda: L.DroTopK(effective=1.7, zero="drop"), {"effective": 1.7, "zero": "drop"}, "effective-rows"),
    Row("DroTopKPN", lambda: L.DroTopKPN(k=6), {"k": 6}),
    Row("DroTopKPN", lambda: L.DroTopKPN(effective=0.7), {"effective": 0.7}, "effective-rows"),
    Row("DroTopKPN", lambda: L.DroTopKPN(k="B/2"), {"k": "0.5B"}, "rows"),
    Row("DroTopKPN", lambda: L.DroTopKPN(k=90), {"k": 90}, "short"),
    Row("DroTrimmed", lambda: L.DroTrimmed(top=3, k=6.3), {"top": 3, "k": 6.3}),
    Row("DroTrimmed", lambda: L.DroTrimmed(top="0.4B", fraction=0.3, pair=nf.pairs.Logistic()),
        {"top": "0.4B", "fraction": 0.3, "pair": logistic}, "rows"),
    Row("DroTrimmedPN", lambda: L.DroTrimmedPN(wrong=0.3, k=6), {"wrong": 0.3, "k": 6}),
    Row("DroKL", L.DroKL),
    Row("DroKL", lambda: L.DroKL(gamma=0.4, zero="keep", pair=nf.pairs.Logistic()),
        {"gamma": 0.4, "zero": "keep", "pair": logistic}, "keep"),
    Row("DroKLGrouped", L.DroKLGrouped),
    Row("DroKLGrouped", lambda: L.DroKLGrouped(gamma=0.3, zero="keep", reduction="sum"),
        {"gamma": 0.3, "zero": "keep", "reduction": "sum"}, "sum"),
    Row("DroChiSquare", lambda: L.DroChiSquare(rho=1.5), {"rho": 1.5}),
    Row("DroChiSquare", lambda: L.DroChiSquare(rho=200.0), {"rho": 200.0}, "beyond"),
    Row("DroChiSquare", lambda: L.DroChiSquare(effective=1.7), {"effective": 1.7}, "effective-rows"),
    Row("MultiSimilarity", lambda: L.MultiSimilarity(miner=None)),
    Row("MultiSimilarity", L.MultiSimilarity, {"epsilon": 0.1}, "miner"),
    Row("HAP2S", L.HAP2S),
    Row("HAP2S", lambda: L.HAP2S(weights="polynomial"), {"weights": "polynomial"}, "polynomial"),
    Row("Triplet", L.Triplet),
    Row("Triplet", lambda: L.Triplet(margin=0.3, reduction="nonzero"),
        {"margin": 0.3, "reduction": "nonzero"}, "nonzero"),
    Row("Triplet", lambda: L.Triplet(margin=0.1, smooth=0.2, similarity=nf.similarity.NegSquaredEuclidean()),
        {"margin": 0.1, "smooth": 0.2, "squared": True}, "smooth"),
    Row("Triplet", lambda: L.Triplet(margin=0.4, mining="semihard"), {"margin": 0.4, "mining": "semihard"}, "semihard"),
    Row("Triplet", lambda: L.Triplet(margin=0.2, mining="hard"), {"margin": 0.2, "mining": "hard"}, "hard"),
    Row("Triplet", lambda: L.Triplet(margin=0.2, mining="hardest"), {"margin": 0.2, "mining": "hardest"}, "hardest"),
    Row("NPair", L.NPair, ordered=True),
    Row("Circle", L.Circle),
    Row("ProxyNCA", lambda: L.ProxyNCA(CLASSES, DIM, scale=3.0), {"scale": 3.0}, proxies="proxies", reference=False),
    Row("ProxyNCA", lambda: L.ProxyNCA(CLASSES, DIM, own=False), {"own": False}, "paper",
        proxies="proxies", reference=False),
    Row("ProxyAnchor", lambda: L.ProxyAnchor(CLASSES, DIM), proxies="proxies", reference=False),
    Row("ArcFace", lambda: L.ArcFace(CLASSES, DIM, scale=8.0), {"scale": 8.0}, proxies="centers", reference=False),
    Row("CosFace", lambda: L.CosFace(CLASSES, DIM, scale=8.0), {"scale": 8.0}, proxies="centers", reference=False),
    Row("NormalizedSoftmax", lambda: L.NormalizedSoftmax(CLASSES, DIM), proxies="centers", reference=False),
    Row("SubCenterArcFace", lambda: L.SubCenterArcFace(CLASSES, DIM, centers=3, scale=8.0),
        {"scale": 8.0}, proxies="centers", centers=3, reference=False),
    Row("SoftTriple", lambda: L.SoftTriple(CLASSES, DIM, centers=2, margin=0.3, scale=8.0),
        {"margin": 0.3, "scale": 8.0}, proxies="centers", centers=2, reference=False),
    Row("SmoothAP", lambda: L.SmoothAP(temperature=0.1), {"temperature": 0.1}),
    Row("CLIP", lambda: L.CLIP(temperature=0.2, learn=True), {"temperature": 0.2}, "learned"),
    Row("SigLIP", lambda: L.SigLIP(scale=3.0, bias=-1.0, learn=False), {"scale": 3.0, "bias": -1.0}, "plain"),
)  # fmt: skip
PRODUCTS = [name for name in L.__all__ if issubclass(getattr(L, name), nf.RobustLoss)]
"""All losses but the one around another loss, which tests/losses/test_spread.py compares with its oracle."""
# a loss that is made without arguments has a row of its defaults without being listed
DEFAULTS = (
    Row(name, getattr(L, name)) for name in PRODUCTS if name not in {row.name for row in VARIANTS if not row.label}
)
ROWS = (*VARIANTS, *DEFAULTS)
IDS = [row.id for row in ROWS]


def some(keep: Callable[[Row], bool]) -> pytest.MarkDecorator:
    """Parametrize a test over the rows that `keep` selects."""
    chosen = [row for row in ROWS if keep(row)]
    return pytest.mark.parametrize("row", chosen, ids=[row.id for row in chosen])


def random_batch(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Ten points in general position: three classes of three, three, three and a singleton."""
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.array([0, 0, 0, 1, 1, 1, 2, 2, 2, 3]))
    return rng.normal(size=(10, DIM)), y


def easy_batch() -> tuple[np.ndarray, np.ndarray]:
    """Classes far apart, each tight: most hinges rest."""
    rng = np.random.default_rng(1)
    _, y = random_batch(1)
    return 3 * np.eye(DIM)[y] + 0.1 * rng.normal(size=(10, DIM)), y


def hard_batch() -> tuple[np.ndarray, np.ndarray]:
    """Two tight clusters that ignore the labels: nearly every hinge is active."""
    rng = np.random.default_rng(2)
    _, y = random_batch(2)
    side = np.where(np.arange(10) % 2 == 0, 1.0, -1.0)
    return side[:, None] * np.ones((10, DIM)) + 0.3 * rng.normal(size=(10, DIM)), y


def tied_batch() -> tuple[np.ndarray, np.ndarray]:
    """Points on the axes, repeated: many exactly equal scores."""
    y = np.array([0, 0, 0, 1, 1, 1, 2, 2, 2, 3])
    corner = np.array([0, 0, 1, 1, 2, 2, 0, 3, 3, 1])
    return np.eye(DIM)[corner] * 1.0, y


BATCHES = {"random": random_batch, "easy": easy_batch, "hard": hard_batch}


def tensors(E: np.ndarray, y: np.ndarray, grad: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(E, dtype=torch.float64, requires_grad=grad), torch.tensor(y)
