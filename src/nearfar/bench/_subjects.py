"""The subjects of the benchmark: every loss and every miner, with its counterpart in pytorch-metric-learning (PML).

Where both have a loss, the settings make them compute the same value, as nearly as possible: margin, angular and proxy
losses differ in what they average over or in their initialization. Losses that PML lacks have no counterpart. A miner
is timed inside a loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from nearfar import losses as L
from nearfar import miners
from nearfar._utils.checks import nearest
from nearfar.similarity import Dot

Step = Callable[[Tensor, Tensor], Tensor]
Make = Callable[[int, int, Any], torch.nn.Module]
"""Makes a loss from rows, width and engine."""
Peer = Callable[[int, int, Any, Any], Step]
"""Makes PML's loss from rows, width, and PML's modules of losses and of miners."""

PEER = "PML"
"""The name of pytorch-metric-learning in tables, used like the name of an engine."""
EACH = 4
"""Rows per class in the batches."""
PRECISIONS = {
    "float32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "float64": torch.float64,
}
"""Precisions of embeddings; "tf32" is float32 whose products may use TF32."""
DRAWN_ON_CPU = 2**24
"""Up to this size embeddings are drawn on the CPU, so that they are the same on every device."""


@dataclass(frozen=True)
class Subject:
    """One loss, or one miner inside a loss.

    Attributes:
        name: its name on the command line and in tables.
        make: makes our loss.
        peer: makes PML's, or None if it has none.
        usual: whether it is timed by default.
    """

    name: str
    make: Make
    peer: Peer | None = None
    usual: bool = False


def _mined(loss: Any, miner: Any) -> Step:
    """PML's loss with PML's miner."""
    return lambda e, y: loss(e, y, miner(e, y))


def _pair(name: str, make: Make, peer: Peer | None = None, usual: bool = False) -> tuple[str, Subject]:
    return name, Subject(name, make, peer, usual)


def _classes(rows: int) -> int:
    return max(1, rows // EACH)


def _with_defaults(loss: type[torch.nn.Module]) -> Make:
    """A function that makes a loss with its defaults, given the number of classes if it has a vector for each class."""
    classes = "classes" in signature(loss).parameters
    return lambda rows, width, engine: loss(*((_classes(rows), width) if classes else ()), engine=engine)


SUBJECTS: dict[str, Subject] = dict(
    (
        _pair("Contrastive", lambda n, d, e: L.Contrastive(power=1, reduction="nonzero", engine=e),
              lambda n, d, p, m: p.ContrastiveLoss(), True),
        _pair("Margin", lambda n, d, e: L.Margin(reduction="nonzero", engine=e), lambda n, d, p, m: p.MarginLoss()),
        _pair("BinomialDeviance", lambda n, d, e: L.BinomialDeviance(engine=e)),
        _pair("DroWorst", lambda n, d, e: L.DroWorst(engine=e)),
        _pair("DroTopK", lambda n, d, e: L.DroTopK(k=2 * n, engine=e), usual=True),
        _pair("DroTopK fraction", lambda n, d, e: L.DroTopK(fraction=0.01, engine=e)),
        _pair("DroTopKPN", lambda n, d, e: L.DroTopKPN(k=2 * n, engine=e)),
        _pair("DroTrimmed", lambda n, d, e: L.DroTrimmed(top=n // 2, k=2 * n, engine=e)),
        _pair("DroTrimmedPN", lambda n, d, e: L.DroTrimmedPN(wrong=0.2, k=2 * n, engine=e)),
        _pair("DroKL", lambda n, d, e: L.DroKL(engine=e), usual=True),
        _pair("DroKLGrouped", lambda n, d, e: L.DroKLGrouped(engine=e)),
        _pair("DroChiSquare", lambda n, d, e: L.DroChiSquare(rho=1.0, engine=e)),
        _pair("MultiSimilarity", lambda n, d, e: L.MultiSimilarity(miner=None, engine=e),
              lambda n, d, p, m: p.MultiSimilarityLoss()),
        _pair("MultiSimilarity + miner", lambda n, d, e: L.MultiSimilarity(engine=e),
              lambda n, d, p, m: _mined(p.MultiSimilarityLoss(), m.MultiSimilarityMiner()), True),
        _pair("SupCon", lambda n, d, e: L.SupCon(engine=e), lambda n, d, p, m: p.SupConLoss(), True),
        _pair("NTXent", lambda n, d, e: L.NTXent(engine=e), lambda n, d, p, m: p.NTXentLoss(), True),
        _pair("NPair", lambda n, d, e: L.NPair(l2=0.0, similarity=Dot(normalize=True), engine=e),
              lambda n, d, p, m: p.NPairsLoss()),
        _pair("Circle", lambda n, d, e: L.Circle(engine=e), lambda n, d, p, m: p.CircleLoss()),
        _pair("LiftedStructure", lambda n, d, e: L.LiftedStructure(engine=e),
              lambda n, d, p, m: p.LiftedStructureLoss(), True),
        _pair("GeneralizedLifted", lambda n, d, e: L.GeneralizedLifted(engine=e),
              lambda n, d, p, m: p.GeneralizedLiftedStructureLoss()),
        _pair("HAP2S", lambda n, d, e: L.HAP2S(engine=e)),
        _pair("HAP2S polynomial", lambda n, d, e: L.HAP2S(weights="polynomial", engine=e)),
        _pair("Triplet all", lambda n, d, e: L.Triplet(reduction="nonzero", engine=e),
              lambda n, d, p, m: p.TripletMarginLoss(), True),
        _pair("Triplet smooth", lambda n, d, e: L.Triplet(smooth=0.1, engine=e)),
        _pair("Triplet semihard", lambda n, d, e: L.Triplet(mining="semihard", reduction="nonzero", engine=e),
              lambda n, d, p, m: _mined(p.TripletMarginLoss(), m.TripletMarginMiner(0.05, "semihard"))),
        _pair("Triplet hard", lambda n, d, e: L.Triplet(margin=0.2, mining="hard", reduction="nonzero", engine=e),
              lambda n, d, p, m: _mined(p.TripletMarginLoss(margin=0.2), m.BatchHardMiner()), True),
        _pair("Triplet hardest", lambda n, d, e: L.Triplet(margin=0.2, mining="hardest", engine=e)),
        _pair("Triplet balanced", lambda n, d, e: L.Triplet(margin=0.2, mining="balanced", engine=e)),
        _pair("Angular", lambda n, d, e: L.Angular(engine=e), lambda n, d, p, m: p.AngularLoss()),
        _pair("ProxyNCA", lambda n, d, e: L.ProxyNCA(_classes(n), d, engine=e),
              lambda n, d, p, m: p.ProxyNCALoss(_classes(n), d, softmax_scale=1.0)),
        _pair("ProxyAnchor", lambda n, d, e: L.ProxyAnchor(_classes(n), d, engine=e),
              lambda n, d, p, m: p.ProxyAnchorLoss(_classes(n), d)),
        _pair("ArcFace", lambda n, d, e: L.ArcFace(_classes(n), d, engine=e),
              lambda n, d, p, m: p.ArcFaceLoss(_classes(n), d, margin=math.degrees(0.5))),
        _pair("CosFace", lambda n, d, e: L.CosFace(_classes(n), d, engine=e),
              lambda n, d, p, m: p.CosFaceLoss(_classes(n), d)),
        _pair("NormalizedSoftmax", lambda n, d, e: L.NormalizedSoftmax(_classes(n), d, engine=e),
              lambda n, d, p, m: p.NormalizedSoftmaxLoss(_classes(n), d)),
        _pair("SubCenterArcFace", lambda n, d, e: L.SubCenterArcFace(_classes(n), d, engine=e),
              lambda n, d, p, m: p.SubCenterArcFaceLoss(num_classes=_classes(n), embedding_size=d,
                                                        margin=math.degrees(0.5))),
        _pair("SoftTriple", lambda n, d, e: L.SoftTriple(_classes(n), d, engine=e),
              lambda n, d, p, m: p.SoftTripleLoss(_classes(n), d)),
        _pair("TupletMargin", lambda n, d, e: L.TupletMargin(engine=e),
              lambda n, d, p, m: p.TupletMarginLoss(margin=math.degrees(0.1))),
        _pair("NCA", lambda n, d, e: L.NCA(engine=e), lambda n, d, p, m: p.NCALoss()),
        _pair("FastAP", lambda n, d, e: L.FastAP(engine=e), lambda n, d, p, m: p.FastAPLoss()),
        _pair("SmoothAP", lambda n, d, e: L.SmoothAP(engine=e)),
        _pair("miner MultiSimilarity", lambda n, d, e: _filtered(miners.MultiSimilarity(), e),
              lambda n, d, p, m: _mined(p.ContrastiveLoss(), m.MultiSimilarityMiner())),
        _pair("miner Hard", lambda n, d, e: _filtered(miners.Hard(), e),
              lambda n, d, p, m: _mined(p.ContrastiveLoss(), m.BatchHardMiner())),
        _pair("miner SemiHard", lambda n, d, e: _filtered(miners.SemiHard(), e)),
        _pair("miner BalancedHard", lambda n, d, e: _filtered(miners.BalancedHard(), e)),
        _pair("miner DistanceWeighted", lambda n, d, e: L.Margin(miner=miners.DistanceWeighted(), engine=e),
              lambda n, d, p, m: _mined(p.MarginLoss(), m.DistanceWeightedMiner())),
    )
)  # fmt: skip
"""All subjects by name, in the order of tables."""
_named = {name.split()[0] for name in SUBJECTS}
# a loss that is not listed above is timed with its defaults
SUBJECTS |= {name: Subject(name, _with_defaults(getattr(L, name))) for name in L.__all__ if name not in _named}


def _filtered(miner: miners.Miner, engine: Any) -> torch.nn.Module:
    return L.Contrastive(power=1, reduction="nonzero", miner=miner, engine=engine)


def choose_subjects(names: Iterable[str]) -> list[Subject]:
    """The subjects of these names; the usual ones without names."""
    wanted = list(dict.fromkeys(names))
    for name in wanted:
        if name not in SUBJECTS:
            raise ValueError(f"bench: loss must be the name of a loss or miner, but came as {name!r}; "
                             f"{nearest(name, SUBJECTS)}")  # fmt: skip
    return [SUBJECTS[name] for name in wanted] or [each for each in SUBJECTS.values() if each.usual]


def batch(rows: int, width: int, device: str = "cpu", precision: str = "float32") -> tuple[Tensor, Tensor]:
    """Random embeddings [rows, width] that require a gradient, and shuffled labels [rows], four per class."""
    generator = torch.Generator().manual_seed(0)
    labels = (torch.arange(rows) // EACH)[torch.randperm(rows, generator=generator)].clamp(max=_classes(rows) - 1)
    if rows * width > DRAWN_ON_CPU:
        generator = torch.Generator(device).manual_seed(0)
    e = torch.randn(rows, width, generator=generator, device=generator.device)
    return e.to(device, PRECISIONS[precision]).requires_grad_(), labels.to(device)


@contextmanager
def matmul(precision: str) -> Iterator[None]:
    """Within the block, allow TF32 products of float32 only for the precision "tf32"."""
    setting = torch.backends.cuda.matmul
    before, setting.allow_tf32 = setting.allow_tf32, precision == "tf32"
    try:
        yield
    finally:
        setting.allow_tf32 = before


def peer_step(subject: Subject, rows: int, width: int, device: str = "cpu") -> Step:
    """PML's counterpart; ImportError if PML is not installed."""
    peers: Any = import_module("pytorch_metric_learning.losses")
    miners: Any = import_module("pytorch_metric_learning.miners")
    if subject.peer is None:
        raise ValueError(f"bench: pytorch-metric-learning has no {subject.name}.")
    step = subject.peer(rows, width, peers, miners)
    return step.to(device) if isinstance(step, torch.nn.Module) else step


def our_step(subject: Subject, rows: int, width: int, engine: str, device: str = "cpu") -> Step:
    """Our loss with an engine; "compiled" is dense under `torch.compile`."""
    compiled = engine == "compiled"
    loss = subject.make(rows, width, "dense" if compiled else engine).to(device)
    return torch.compile(loss, dynamic=False) if compiled else loss


def backward(step: Step, e: Tensor, y: Tensor) -> None:
    """One step: the value of the loss, and its gradient with respect to the embeddings."""
    step(e, y).sum().backward()  # type: ignore[no-untyped-call]
