"""Batches for tests of `nearfar.pml`, and results of calls to compare with PML's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pytorch_metric_learning import miners as their_miners
from torch import Tensor

from nearfar.pml.losses import _classes, _pairs, _triplets
from nearfar.pml.miners import _native

LOSSES = (*_pairs.__all__, *_triplets.__all__)
CLASSES = dict.fromkeys(_classes.__all__, (6, 8))
"""Losses with class vectors, and their number and width."""
MINERS = tuple(name for name in _native.__all__ if hasattr(their_miners, name))
Outcome = list[Tensor] | type[BaseException]


def make(kind: Any, **settings: Any) -> Any:
    """An object of a class of losses or miners; class vectors are the same at each call."""
    torch.manual_seed(0)
    return kind(*next((CLASSES[base.__name__] for base in kind.__mro__ if base.__name__ in CLASSES), ()), **settings)


def batch(seed: int = 0, n: int = 24, m: int = 30, classes: int = 6) -> dict[str, Tensor]:
    """Rows in float64 and their labels, and those of a reference."""
    g = torch.Generator().manual_seed(seed)
    return {
        "rows": torch.randn(n, 8, generator=g, dtype=torch.float64),
        "labels": torch.randint(0, classes, (n,), generator=g),
        "ref": torch.randn(m, 8, generator=g, dtype=torch.float64),
        "ref_labels": torch.randint(0, classes, (m,), generator=g),
    }


def outcome(attempt: Callable[[], Any]) -> Any:
    """What a call returns, or the type of its error."""
    try:
        return attempt()
    except Exception as error:
        return type(error)


def slopes(loss: Any, given: dict[str, Tensor], indices: Any = None, *, reference: bool = False) -> Outcome:
    """Value and gradients of a loss, or the type of its error; draws begin at the same seed."""
    rows = given["rows"].detach().clone().requires_grad_()
    ref = given["ref"].detach().clone().requires_grad_()

    def run() -> list[Tensor]:
        torch.manual_seed(0)
        more = {"ref_emb": ref, "ref_labels": given["ref_labels"]} if reference else {}
        value = loss(rows, given["labels"], indices, **more)
        value.backward()
        learned = [p.grad for p in loss.parameters() if p.grad is not None]
        return [value.detach(), rows.grad, *([ref.grad] if reference else []), *learned]

    return outcome(run)


def check_same(found: Outcome, wanted: Outcome, about: Any = "", within: float = 1e-10) -> None:
    """Require two outcomes to be equal: numbers and types within a tolerance, or the same type of error."""
    if isinstance(wanted, type) or isinstance(found, type):
        assert found is wanted, (about, found, wanted)
        return
    for one, other in zip(found, wanted, strict=True):
        message = f"{about}: {one} and {other}"
        torch.testing.assert_close(one, other, rtol=within, atol=within, equal_nan=True, msg=message)


def pairs(indices: Any) -> list[list[tuple[int, ...]]]:
    """The pairs or triplets of an index tuple, sorted."""
    whole = (indices,) if len(indices) == 3 else (indices[:2], indices[2:])
    return [sorted(zip(*(x.tolist() for x in part), strict=True)) for part in whole]


def mined(name: str | None, given: dict[str, Tensor], *, reference: bool = False, library: Any = their_miners) -> Any:
    """The index tuple of a miner of PML's."""
    if name is None:
        return None
    more = (given["ref"], given["ref_labels"]) if reference else ()
    return getattr(library, name)()(given["rows"], given["labels"], *more)


__all__ = ["CLASSES", "LOSSES", "MINERS", "batch", "check_same", "make", "mined", "outcome", "pairs", "slopes"]
