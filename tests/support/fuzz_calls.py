"""Options of a call that must not change its result.

These are the engine, the memory layout of tensors, which of them require gradients, and the mode of autograd.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from nearfar.engines import auto, cuda, launch
from nearfar.engines.spec import LOW

ENGINES = ("dense", "tiled", "auto", "operators", "generic")
"""Engines, and three ways to use "auto" for batches of any size: strips; operators, else dense; and strips of the
plain definitions, because operators refuse every batch."""
KERNELS = ("dense", "tiled", "fused", "fused auto")
"""Engines where kernels are available, and "auto" that uses them for batches of any size."""
SMALL = {
    (launch, "_blocks"): lambda x, kind: {"BM": 16, "BN": 16, "BK": 16},
    (cuda, "STATES"): 64,
    (cuda, "STRIP"): 16 * 8,
    (cuda, "TALL"): 16,
}
"""Sizes that cut small batches into several strips, chunks and tiles."""
LAYOUTS = ("plain", "transposed", "strided", "offset", "negated", "expanded")
ASKS = ("all", "all", "all", "rows", "references", "none", "no_grad", "inference", "inside")
"""Which tensors require gradients, or the mode of autograd; "inside": tensors are created in inference mode too."""


@dataclass(frozen=True)
class CallOptions:
    """Options of one call: its engine, the layouts of its tensors, and what requires a gradient."""

    engine: str
    rows: str = "plain"
    references: str = "plain"
    relation: str = "plain"
    asks: str = "all"

    @property
    def grad(self) -> bool:
        """Whether gradients can be compared."""
        return self.asks in ("all", "rows", "references")


def call_options(seed: int, *, kernels: bool = False) -> list[CallOptions]:
    """Options for the calls of a seed, one for each engine; the first two compare all gradients in most seeds."""
    rng = np.random.default_rng([seed, 7])

    def some(*of: str) -> str:
        return str(rng.choice(of))

    if kernels:
        return [CallOptions(engine, *(some(*LAYOUTS) for _ in range(3)), some(*ASKS)) for engine in KERNELS]
    found = [CallOptions(engine, *(some(*LAYOUTS) for _ in range(3)), some(*ASKS)) for engine in ENGINES[:2]]
    return [*found, CallOptions(some(*ENGINES[2:]), *(some(*LAYOUTS) for _ in range(3)), some(*ASKS))]


def lay_out(x: Tensor, how: str) -> Tensor:
    """Copy a tensor into another memory layout, or into a plain one if the layout does not fit its shape or values."""
    if how == "transposed" and x.ndim == 2:
        return x.T.contiguous().T
    if how in ("strided", "offset"):
        step, room = (2, 0) if how == "strided" else (1, 3)
        large = torch.zeros([step * size + room for size in x.shape], dtype=x.dtype)
        view = large[tuple(slice(room // 2, room // 2 + step * size, step) for size in x.shape)]
        return view.copy_(x)
    if how == "negated" and x.dtype in (torch.float32, torch.float64):
        # torch has no negative strides; this view has its sign turned when it is read
        return torch.complex(torch.zeros_like(x), -x).conj().imag
    if how == "expanded" and x.ndim and len(x):
        for dim in range(x.ndim):
            first = x.narrow(dim, 0, 1) if x.shape[dim] else x
            if torch.equal(first.expand_as(x), x):
                return first.clone().expand_as(x)
    return x.clone()


def everywhere(loss: Any, relation: Any, low: torch.dtype) -> Any:
    """Replace `auto._for_kernels`, so that "auto" uses kernels on a CPU too."""
    return relation.layout() if low in LOW else None


CHANGED = {
    "auto": {"LEAST": {"cpu": auto.Least(1, 1)}},
    "operators": {"LEAST": {"cpu": auto.Least(1, 2**60)}},
    "generic": {"LEAST": {"cpu": auto.Least(1, 1)}, "finish": lambda *given, **more: None},
    "fused auto": {"LEAST": {"cpu": auto.Least(1, 1)}, "_for_kernels": everywhere},
}
"""Values of `auto` that are replaced so that small batches reach an engine."""


@contextmanager
def engine(name: str) -> Iterator[str]:
    """Patch the package so that small batches reach an engine, and give the name to set on the loss."""
    changes = {(auto, key): value for key, value in CHANGED.get(name, {}).items()}
    with ExitStack() as changed:
        for (module, key), value in (changes | (SMALL if name.startswith("fused") else {})).items():
            changed.enter_context(patch.object(module, key, value))
        yield "auto" if name in CHANGED else name


@contextmanager
def mode(asks: str) -> Iterator[None]:
    """Enter the mode of autograd for a call."""
    with (
        torch.inference_mode(asks in ("inference", "inside")),
        torch.set_grad_enabled(asks not in ("no_grad", "inference", "inside")),
    ):
        yield
