"""What the wrappers of nearfar.pml must do like one process: cases of tests/gathered_cases.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from pytorch_metric_learning import losses as their_losses
from pytorch_metric_learning import miners as their_miners
from test_tiled import larger
from torch import Tensor, nn

import nearfar as nf
from nearfar.pml import distances, losses, miners, reducers, regularizers
from nearfar.pml.utils.distributed import DistributedLossWrapper, DistributedMinerWrapper

Case = Callable[[Any], dict[str, Any]]
LOSSES: dict[str, tuple[Any, Any]] = {
    "contrastive": (losses.ContrastiveLoss, None),
    "triplets of a miner": (losses.TripletMarginLoss, miners.BatchHardMiner),
    "pairs of a miner": (losses.ContrastiveLoss, miners.MultiSimilarityMiner),
    "once": (losses.MultiSimilarityLoss, miners.PairMarginMiner),
    "drawn": (losses.TripletMarginLoss, miners.DistanceWeightedMiner),
    "classes": (partial(losses.ArcFaceLoss, 7, 4), miners.BatchHardMiner),
    "their loss": (their_losses.ContrastiveLoss, miners.BatchHardMiner),
    "their miner": (losses.ContrastiveLoss, their_miners.MultiSimilarityMiner),
    "theirs alone": (their_losses.NTXentLoss, None),
}


def wrapped(share: Any, loss: nn.Module, miner: Any, *, efficient: bool) -> tuple[Any, Any]:
    if share.world == 1:
        return loss, miner
    return DistributedLossWrapper(loss, efficient=efficient), miner and DistributedMinerWrapper(miner, efficient)


def seen(share: Any, value: Tensor, rows: Tensor, loss: nn.Module) -> dict[str, Any]:
    """The value, the gradient of this rank's rows as an average over ranks has it, and of all that is learned."""
    value.backward()
    learned = [p.grad for p in loss.parameters() if p.grad is not None]
    return {"value": value.detach(), "rows": rows.grad / share.world, "learnt": learned}


def batch(share: Any, n: int = 37, seed: int = 7) -> tuple[Tensor, Tensor]:
    embeddings, labels = larger(n, seed=seed)
    return share(embeddings.detach()).clone().requires_grad_(), share(labels % 7)


def plain(kind: str, *, efficient: bool, reference: bool = False) -> Case:
    def run(share: Any) -> dict[str, Any]:
        make, miner = LOSSES[kind]
        torch.manual_seed(3)
        inner = make().double()
        loss, miner = wrapped(share, inner, miner and miner(), efficient=efficient)
        rows, labels = batch(share)
        more = tuple(x.detach() for x in batch(share, 23, 8)) if reference else ()
        torch.manual_seed(9 + share.rank)  # draws are those of the first rank
        indices = None if miner is None else miner(rows, labels, *more)
        return seen(share, loss(rows, labels, indices, *more), rows, inner)

    return run


def remembered(miner: Any = None, *, masked: bool = False) -> Case:
    """Three batches through a memory that wraps around."""

    def run(share: Any) -> dict[str, Any]:
        memory = losses.CrossBatchMemory(losses.ContrastiveLoss(), 4, memory_size=60, miner=miner and miner())
        loss, _ = wrapped(share, memory.double(), None, efficient=False)
        found: dict[str, Any] = {}
        for n in (20, 31, 24):
            rows, labels = batch(share, n, n)
            mask = (share(torch.arange(n)) % 3 > 0,) if masked else ()
            found[f"{n} rows"] = seen(share, loss(rows, labels, None, **_mask(share, mask)), rows, memory)
        return found | {"memory": memory.state_dict()}

    return run


def _mask(share: Any, mask: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return {"enqueue_mask": mask[0]} if mask else {}


def own_tuples(*, efficient: bool) -> Case:
    """Each rank mines its own rows; one process takes the tuples of all parts."""

    def run(share: Any) -> dict[str, Any]:
        rows, labels = batch(share)
        inner, miner = losses.TripletMarginLoss(), miners.BatchHardMiner()
        loss, _ = wrapped(share, inner, None, efficient=efficient)
        if share.world > 1:
            return seen(share, loss(rows, labels, miner(rows, labels)), rows, inner)
        parts = [type(share)(rank, 2).rows(len(rows)) for rank in range(2)]
        tuples = [[x + part.start for x in miner(rows[part], labels[part])] for part in parts]
        return seen(share, loss(rows, labels, tuple(map(torch.cat, zip(*tuples, strict=True)))), rows, inner)

    return run


NATIVE: dict[str, Any] = {
    "contrastive": losses.ContrastiveLoss,
    "supcon": losses.SupConLoss,
    "lifted": losses.LiftedStructureLoss,
    "n-pairs": losses.NPairsLoss,
    "classes": partial(losses.ArcFaceLoss, 7, 4),
    "proxies": partial(losses.ProxyAnchorLoss, 7, 4, weight_regularizer=regularizers.LpRegularizer()),
    "learned boundary": partial(losses.MarginLoss, learn_beta=True, nu=0.1, num_classes=7),
    "drawn triplets": partial(losses.TripletMarginLoss, triplets_per_anchor=3),
    "another reducer": partial(losses.ContrastiveLoss, reducer=reducers.ThresholdReducer(low=0.2)),
    "another distance": partial(losses.NTXentLoss, distance=distances.LpDistance(p=1)),
}


def by_nearfar(kind: str, *, reference: bool = False) -> Case:
    """`nf.Distributed` of a loss of nearfar.pml."""

    def run(share: Any) -> dict[str, Any]:
        torch.manual_seed(3)
        inner = NATIVE[kind]().double()
        loss = inner if share.world == 1 else nf.Distributed(inner)
        rows, labels = batch(share)
        more = tuple(x.detach() for x in batch(share, 23, 8)) if reference else ()
        torch.manual_seed(9 + share.rank)
        return seen(share, loss(rows, labels, None, *more), rows, inner)

    return run


def of_pml() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for kind in LOSSES:
        for efficient in (False, True):
            found[f"pml/{kind}/{efficient}"] = plain(kind, efficient=efficient)
    for kind in ("contrastive", "triplets of a miner", "pairs of a miner", "their loss"):
        found[f"pml/{kind}/reference"] = plain(kind, efficient=kind == "pairs of a miner", reference=True)
    found |= {f"pml/nf.Distributed/{kind}": by_nearfar(kind) for kind in NATIVE}
    for kind in ("contrastive", "supcon", "lifted"):
        found[f"pml/nf.Distributed/{kind}/reference"] = by_nearfar(kind, reference=True)
    found["pml/own tuples"] = own_tuples(efficient=False)
    found["pml/own tuples/efficient"] = own_tuples(efficient=True)
    found["pml/memory"] = remembered()
    found["pml/memory/mined"] = remembered(miners.MultiSimilarityMiner)
    found["pml/memory/masked"] = remembered(masked=True)
    return found
