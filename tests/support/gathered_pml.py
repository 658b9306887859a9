"""What `nf.Distributed` of a loss of nearfar.pml must do like one process: cases of tests/support/gathered_cases.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from engine_cases import larger

import nearfar as nf
from nearfar.pml import losses, regularizers

Case = Callable[[Any], dict[str, Any]]
LOSSES: dict[str, Callable[[], Any]] = {
    **{name: getattr(losses, name) for name in losses.__all__ if hasattr(getattr(losses, name), "recipe")},
    "learned boundary": lambda: losses.MarginLoss(learn_beta=True),
    "ArcFaceLoss": lambda: _seeded(lambda: losses.ArcFaceLoss(7, WIDTH)),
    "ProxyAnchorLoss": lambda: _seeded(lambda: losses.ProxyAnchorLoss(7, WIDTH)),
    "CrossBatchMemory": lambda: losses.CrossBatchMemory(losses.ContrastiveLoss(), WIDTH, memory_size=64),
    "regularized": lambda: losses.ContrastiveLoss(embedding_regularizer=regularizers.LpRegularizer()),
}


WIDTH = larger(4)[0].shape[1]


def _seeded(make: Callable[[], Any]) -> Any:
    """A loss whose class vectors are equal on all ranks."""
    torch.manual_seed(0)
    return make()


def gathered(kind: str, *, reference: bool = False) -> Case:
    """Value and gradients of a loss over all rows; a gradient of the rows is averaged over ranks."""

    def run(share: Any) -> dict[str, Any]:
        inner = LOSSES[kind]().double()
        loss = inner if share.world == 1 else nf.Distributed(inner)
        rows, labels = _batch(share, 37, 7)
        more = tuple(x.detach() for x in _batch(share, 23, 8)) if reference else ()
        value = loss(rows, labels, None, *more)
        value.backward()
        learned = [p.grad for p in inner.parameters() if p.grad is not None]
        return {"value": value.detach(), "rows": rows.grad / share.world, "learned": learned}

    return run


def _batch(share: Any, n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    embeddings, labels = larger(n, seed=seed)
    return share(embeddings.detach()).clone().requires_grad_(), share(labels % 7)


def of_pml() -> dict[str, Case]:
    """All cases."""
    found = {f"pml/{kind}": gathered(kind) for kind in LOSSES}
    for kind in ("ContrastiveLoss", "MultiSimilarityLoss"):
        found[f"pml/{kind}/reference"] = gathered(kind, reference=True)
    return found
