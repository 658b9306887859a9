"""The subjects of the benchmark: every loss and every miner, with its counterpart in pytorch-metric-learning (PML).

Where both have a loss, the settings make them compute the same value, as nearly as possible: margin, angular and proxy
losses differ in what they average over or in their initialization. Losses that PML lacks have no counterpart. A miner
is timed inside a loss.
"""

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
Make = Callable[[int, int, Any], torch.nn.Module]  # makes a loss from rows, width and engine
Peer = Callable[[int, int, Any, Any], Step]
"""Makes PML's loss from rows, width, and PML's modules of losses and of miners."""

PEER = "PML"  # the name of pytorch-metric-learning in tables, used like the name of an engine
EACH = 4  # rows per class in the batches
PRECISIONS = {
    "float32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "float64": torch.float64,
}
"""Precisions of embeddings; "tf32" is float32 whose products may use TF32."""
DRAWN_ON_CPU = 2**24  # up to this size embeddings are drawn on the CPU, so that they are the same on every device


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


def _classes(rows: int) -> int:
    return max(1, rows // EACH)


def _ours(loss: type[torch.nn.Module], **options: Any) -> Make:
    """A function that makes a loss, given the number of classes if it has a vector for each class."""
    classes = "classes" in signature(loss).parameters
    return lambda rows, width, engine: loss(*((_classes(rows), width) if classes else ()), engine=engine, **options)


def _theirs(name: str, miner: str = "", sized: bool = False, mined: tuple[Any, ...] = (), **options: Any) -> Peer:
    """A function that makes PML's loss, with PML's miner if one is named; `sized`: it has a vector for each class."""

    def make(rows: int, width: int, losses: Any, miners: Any) -> Step:
        sizes = {"num_classes": _classes(rows), "embedding_size": width} if sized else {}
        loss: Step = getattr(losses, name)(**sizes, **options)
        if not miner:
            return loss
        mine = getattr(miners, miner)(*mined)
        return lambda e, y: loss(e, y, mine(e, y))  # type: ignore[call-arg]

    return make


_FILTERED = {"power": 1, "reduction": "nonzero"}  # the contrastive loss in which miners are timed
_TABLE: dict[str, tuple[Any, ...]] = {
    "Contrastive": (_ours(L.Contrastive, power=1, reduction="nonzero"), _theirs("ContrastiveLoss"), True),
    "Margin": (_ours(L.Margin, reduction="nonzero"), _theirs("MarginLoss")),
    "BinomialDeviance": (_ours(L.BinomialDeviance),),
    "DroWorst": (_ours(L.DroWorst),),
    "DroTopK": (_ours(L.DroTopK, k="2B"), None, True),
    "DroTopK fraction": (_ours(L.DroTopK, fraction=0.01),),
    "DroTopKPN": (_ours(L.DroTopKPN, k="2B"),),
    "DroTrimmed": (_ours(L.DroTrimmed, top="B/2", k="2B"),),
    "DroTrimmedPN": (_ours(L.DroTrimmedPN, wrong=0.2, k="2B"),),
    "DroKL": (_ours(L.DroKL), None, True),
    "DroKLGrouped": (_ours(L.DroKLGrouped),),
    "DroChiSquare": (_ours(L.DroChiSquare, rho=1.0),),
    "MultiSimilarity": (_ours(L.MultiSimilarity, miner=None), _theirs("MultiSimilarityLoss")),
    "MultiSimilarity + miner": (_ours(L.MultiSimilarity), _theirs("MultiSimilarityLoss", "MultiSimilarityMiner"), True),
    "SupCon": (_ours(L.SupCon), _theirs("SupConLoss"), True),
    "NTXent": (_ours(L.NTXent), _theirs("NTXentLoss"), True),
    "NPair": (_ours(L.NPair, l2=0.0, similarity=Dot(normalize=True)), _theirs("NPairsLoss")),
    "Circle": (_ours(L.Circle), _theirs("CircleLoss")),
    "LiftedStructure": (_ours(L.LiftedStructure), _theirs("LiftedStructureLoss"), True),
    "GeneralizedLifted": (_ours(L.GeneralizedLifted), _theirs("GeneralizedLiftedStructureLoss")),
    "HAP2S": (_ours(L.HAP2S),),
    "HAP2S polynomial": (_ours(L.HAP2S, weights="polynomial"),),
    "Triplet all": (_ours(L.Triplet, reduction="nonzero"), _theirs("TripletMarginLoss"), True),
    "Triplet smooth": (_ours(L.Triplet, smooth=0.1),),
    "Triplet semihard": (_ours(L.Triplet, mining="semihard", reduction="nonzero"),
     _theirs("TripletMarginLoss", "TripletMarginMiner", mined=(0.05, "semihard"))),
    "Triplet hard": (_ours(L.Triplet, margin=0.2, mining="hard", reduction="nonzero"),
     _theirs("TripletMarginLoss", "BatchHardMiner", margin=0.2), True),
    "Triplet hardest": (_ours(L.Triplet, margin=0.2, mining="hardest"),),
    "Triplet balanced": (_ours(L.Triplet, margin=0.2, mining="balanced"),),
    "Angular": (_ours(L.Angular), _theirs("AngularLoss")),
    "ProxyNCA": (_ours(L.ProxyNCA), _theirs("ProxyNCALoss", sized=True, softmax_scale=1.0)),
    "ProxyAnchor": (_ours(L.ProxyAnchor), _theirs("ProxyAnchorLoss", sized=True)),
    "ArcFace": (_ours(L.ArcFace), _theirs("ArcFaceLoss", sized=True, margin=math.degrees(0.5))),
    "CosFace": (_ours(L.CosFace), _theirs("CosFaceLoss", sized=True)),
    "NormalizedSoftmax": (_ours(L.NormalizedSoftmax), _theirs("NormalizedSoftmaxLoss", sized=True)),
    "SubCenterArcFace": (_ours(L.SubCenterArcFace),
     _theirs("SubCenterArcFaceLoss", sized=True, margin=math.degrees(0.5))),
    "SoftTriple": (_ours(L.SoftTriple), _theirs("SoftTripleLoss", sized=True)),
    "TupletMargin": (_ours(L.TupletMargin), _theirs("TupletMarginLoss", margin=math.degrees(0.1))),
    "NCA": (_ours(L.NCA), _theirs("NCALoss")),
    "FastAP": (_ours(L.FastAP), _theirs("FastAPLoss")),
    "SmoothAP": (_ours(L.SmoothAP),),
    "SpreadFloor": (lambda rows, width, engine: L.SpreadFloor(L.Triplet(mining="hard", engine=engine)),),
    "Nested": (lambda rows, width, engine: L.Nested(L.NTXent(engine=engine), dims=(width // 2, width)),),
    "Ladder": (lambda rows, width, engine: L.Ladder(L.Triplet(engine=engine)),),
    "miner MultiSimilarity": (_ours(L.Contrastive, miner=miners.MultiSimilarity(), **_FILTERED),
     _theirs("ContrastiveLoss", "MultiSimilarityMiner")),
    "miner Hard": (_ours(L.Contrastive, miner=miners.Hard(), **_FILTERED),
     _theirs("ContrastiveLoss", "BatchHardMiner")),
    "miner SemiHard": (_ours(L.Contrastive, miner=miners.SemiHard(), **_FILTERED),),
    "miner BalancedHard": (_ours(L.Contrastive, miner=miners.BalancedHard(), **_FILTERED),),
    "miner DistanceWeighted": (_ours(L.Margin, miner=miners.DistanceWeighted()),
     _theirs("MarginLoss", "DistanceWeightedMiner")),
}  # fmt: skip
# a loss that is not listed is timed with its defaults
_LISTED = {name.split()[0] for name in _TABLE}
SUBJECTS = {name: Subject(name, *made) for name, made in _TABLE.items()}
SUBJECTS |= {name: Subject(name, _ours(getattr(L, name))) for name in L.__all__ if name not in _LISTED}
"""All subjects by name, in the order of tables."""


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
