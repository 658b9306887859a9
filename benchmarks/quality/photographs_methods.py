"""The methods of the study on photographs: each is a loss with one parameter and four values of it to try."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from nearfar.studies._training import Method
from nearfar.studies.dro import HINGE, LIFTED

BINOMIAL = {"pair": "Logistic"}
SEMI_HARD = {"name": "BinomialDeviance", **HINGE, "miner": {"name": "SemiHard"}}  # Qi et al. 2020, 4.2.2
MANY = (0.5, 2.0, 8.0, 32.0)  # K in batches
RHO = (4.0, 40.0, 400.0, 4000.0)  # ρ in batches; at B = 80 a batch has 79 B ordered pairs
GAMMA = (0.03, 0.1, 0.3, 1.0)
MARGINS = (0.05, 0.1, 0.2, 0.4)
PROXY_RATE = 100.0  # proxies begin at random: Kim et al. 2020 give them 100 times the network's rate


@dataclass(frozen=True)
class Tuned:
    """A loss whose one parameter is tuned.

    Attributes:
        loss: as in a configuration, without the parameter.
        parameter: its name, or that of a part's, such as "miner.margin"; empty for a loss without one, whose rate alone
            is tuned.
        values: the four values that are tried; the learning rate is chosen at `default`.
        default: one of the values.
        batches: the values count batches: K = 2 is twice the batch.
        normalize: embeddings of unit length.
        loss_lr_mult: learning rate of the loss's own parameters over the network's.
        anneal: hard mining that begins soft and is plain after half of the steps.
    """

    loss: Mapping[str, Any]
    parameter: str
    values: tuple[float, ...]
    default: float
    batches: bool = False
    normalize: bool = True
    loss_lr_mult: float | None = None
    anneal: bool = False

    def at(self, value: float, *, batch: int, steps: int) -> Method:
        """The method at a value of its parameter."""
        loss = dict(self.loss)
        outer, _, name = self.parameter.rpartition(".")
        inner = loss
        if outer:
            inner = loss[outer] = dict(loss[outer])
        if name:
            inner[name] = value * batch if self.batches else value
        if self.anneal:
            loss["anneal"] = max(1, steps // 2)
        return Method(loss, self.normalize)

    def label(self, value: float) -> str:
        """The parameter and its value, for a table."""
        return f"{self.parameter} = {value:g}{'B' if self.batches else ''}" if self.parameter else "-"


def _triplet(mining: str, **more: Any) -> Tuned:
    return Tuned({"name": "Triplet", "mining": mining}, "margin", MARGINS, 0.2, **more)


def _proxies(name: str, values: tuple[float, ...], default: float, **loss: Any) -> Tuned:
    return Tuned({"name": name, **loss}, "scale", values, default, loss_lr_mult=PROXY_RATE)


def _robust(name: str, parameter: str, values: tuple[float, ...], default: float, **more: Any) -> dict[str, Tuned]:
    """With the hinge, and with the binomial deviance."""
    return {
        "hinge": Tuned({"name": name}, parameter, values, default, **more),
        "binomial": Tuned({"name": name, **BINOMIAL}, parameter, values, default, **more),
    }


def _methods() -> dict[str, Tuned]:
    usual = {
        "contrastive": Tuned({"name": "Contrastive"}, "neg_margin", (0.5, 0.75, 1.0, 1.25), 1.0),
        "margin": Tuned({"name": "Margin", "miner": "DistanceWeighted"}, "beta", (0.6, 0.9, 1.2, 1.4), 1.2),
        "triplet, semi-hard": _triplet("semihard"),
        "triplet, hard": _triplet("hard"),
        "triplet, hard, annealed": _triplet("hard", anneal=True),
        "lifted structure": Tuned({"name": "LiftedStructure"}, "margin", (0.25, 0.5, 1.0, 2.0), 1.0),
        "N-pair": Tuned({"name": "NPair"}, "l2", (0.002, 0.02, 0.06, 0.2), 0.02, normalize=False),
        "angular": Tuned({"name": "Angular"}, "degrees", (30.0, 40.0, 45.0, 50.0), 40.0),
        "multi-similarity": Tuned({"name": "MultiSimilarity"}, "threshold", (0.3, 0.5, 0.7, 1.0), 0.5),
        "Proxy-NCA": _proxies("ProxyNCA", (1.0, 3.0, 9.0, 27.0), 9.0),
        "Proxy-NCA, own proxy left out": _proxies("ProxyNCA", (1.0, 3.0, 9.0, 27.0), 9.0, own=False),
        "LS": Tuned(dict(LIFTED.loss), "", (0.0,), 0.0),
        "semi-hard pairs": Tuned(SEMI_HARD, "miner.margin", (0.1, 0.2, 0.3, 0.5), 0.2),
        "HAP2S": Tuned({"name": "HAP2S"}, "gamma", (0.1, 0.25, 0.5, 1.0), 0.5),
        "Proxy-Anchor": _proxies("ProxyAnchor", (8.0, 16.0, 32.0, 64.0), 32.0),
        "NT-Xent": Tuned({"name": "NTXent"}, "temperature", (0.03, 0.07, 0.15, 0.3), 0.07),
        "SupCon": Tuned({"name": "SupCon"}, "temperature", (0.05, 0.1, 0.2, 0.4), 0.1),
        "ArcFace": _proxies("ArcFace", (10.0, 16.0, 32.0, 64.0), 32.0),
        "circle": Tuned({"name": "Circle"}, "scale", (20.0, 40.0, 80.0, 160.0), 80.0),
    }
    robust = {
        "DRO-TopK": _robust("DroTopK", "k", MANY, 8.0, batches=True),
        "DRO-TopK-PN": _robust("DroTopKPN", "k", MANY, 8.0, batches=True),
        "DRO-KL": _robust("DroKL", "gamma", GAMMA, 0.3),
        "DRO-KL, sampled": {"hinge": Tuned({"name": "DroKL", "samples": 320}, "gamma", GAMMA, 0.3)},  # 4B pairs
        "DRO-KL-G": {"hinge": Tuned({"name": "DroKLGrouped"}, "gamma", (0.01, 0.1, 0.3, 1.0), 0.1)},
        "DRO-chi-square": _robust("DroChiSquare", "rho", RHO, 40.0, batches=True),
    }
    return usual | {f"{name}, {pair}": each for name, pairs in robust.items() for pair, each in pairs.items()}


METHODS: Mapping[str, Tuned] = MappingProxyType(_methods())
BASE = "multi-similarity"
QUICK = ("triplet, hard", BASE, "DRO-TopK, hinge")
CLAIMS = (
    # the paper's claim, the method that should be better, the one that should be worse
    ("DRO-TopK (hinge) beats MS", "DRO-TopK, hinge", BASE),
    ("DRO-TopK (binomial) beats MS", "DRO-TopK, binomial", BASE),
    ("DRO-TopK-PN (hinge) beats MS", "DRO-TopK-PN, hinge", BASE),
    ("DRO-TopK-PN (binomial) beats MS", "DRO-TopK-PN, binomial", BASE),
    ("DRO-KL (hinge) beats MS", "DRO-KL, hinge", BASE),
    ("DRO-KL (binomial) beats MS", "DRO-KL, binomial", BASE),
    ("DRO-KL-G beats MS", "DRO-KL-G, hinge", BASE),
    ("DRO-KL-G beats LS", "DRO-KL-G, hinge", "LS"),
    ("MS beats LS", BASE, "LS"),
    ("TopK-PN beats DRO-TopK (hinge)", "DRO-TopK-PN, hinge", "DRO-TopK, hinge"),
    ("TopK-PN beats semi-hard mining", "DRO-TopK-PN, hinge", "semi-hard pairs"),
    ("TopK-PN beats distance-weighted mining", "DRO-TopK-PN, hinge", "margin"),
)
"""The claims of Qi et al. 2020 about these methods: each is a paired difference that should be above zero."""
