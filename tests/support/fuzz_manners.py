"""How a call is made: what must change none of its numbers.

The engine, where tensors lie in memory, what asks for a gradient, and under which mode of autograd.
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

from nearfar.engines import auto, cuda
from nearfar.engines.spec import LOW

ENGINES = ("dense", "tiled", "auto", "operators", "generic")
"""Engines, and three of "auto" from the first pair on: all strips; operators, else dense; operators that refuse every
batch, so that strips of the plain definitions serve."""
KERNELS = ("dense", "tiled", "fused", "fused auto")
"""Engines where kernels are to be had, and "auto" that takes them from the first pair on."""
SMALL = {
    (cuda, "_blocks"): lambda x, kind: {"BM": 16, "BN": 16, "BK": 16},
    (cuda, "STATES"): 64,
    (cuda, "STRIP"): 16 * 8,
    (cuda, "TALL"): 16,
}
"""Sizes with which small batches are several tiles a chunk, several chunks a row, several strips."""
LAYOUTS = ("plain", "transposed", "strided", "offset", "negated", "expanded")
ASKS = ("all", "all", "all", "rows", "references", "none", "no_grad", "inference", "inside")
"""What asks for a gradient; "inside": the tensors were made in inference mode too."""


@dataclass(frozen=True)
class Manner:
    """One way to make a call."""

    engine: str
    rows: str = "plain"
    references: str = "plain"
    told: str = "plain"
    asks: str = "all"

    @property
    def grad(self) -> bool:
        """Whether there is a gradient to look at."""
        return self.asks in ("all", "rows", "references")


def manners(seed: int, *, kernels: bool = False) -> list[Manner]:
    """The ways in which a seed's call is made, one an engine; the first two see every gradient in most seeds."""
    rng = np.random.default_rng([seed, 7])

    def some(*of: str) -> str:
        return str(rng.choice(of))

    if kernels:
        return [Manner(engine, *(some(*LAYOUTS) for _ in range(3)), some(*ASKS)) for engine in KERNELS]
    found = [Manner(engine, *(some(*LAYOUTS) for _ in range(3)), some(*ASKS)) for engine in ENGINES[:2]]
    return [*found, Manner(some(*ENGINES[2:]), *(some(*LAYOUTS) for _ in range(3)), some(*ASKS))]


def laid(x: Tensor, how: str) -> Tensor:
    """The same numbers, put into memory in another way (as they are, where that way does not suit them)."""
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


def everywhere(loss: Any, relation: Any, product: Any, low: torch.dtype) -> Any:
    """In place of `auto._for_kernels`: kernels for "auto" on a CPU too."""
    return relation.layout() if low in LOW else None


CHANGED = {
    "auto": {"LEAST": {"cpu": auto.Least(1, 1)}},
    "operators": {"LEAST": {"cpu": auto.Least(1, 2**60)}},
    "generic": {"LEAST": {"cpu": auto.Least(1, 1)}, "finish": lambda *given, **more: None},
    "fused auto": {"LEAST": {"cpu": auto.Least(1, 1)}, "_for_kernels": everywhere},
}
"""What is changed of the module that chooses, so that small batches reach an engine."""


@contextmanager
def engine(name: str) -> Iterator[str]:
    """The package's engine of that name, its thresholds moved so that small batches reach it."""
    changes = {(auto, key): value for key, value in CHANGED.get(name, {}).items()}
    with ExitStack() as changed:
        for (module, key), value in (changes | (SMALL if name.startswith("fused") else {})).items():
            changed.enter_context(patch.object(module, key, value))
        yield "auto" if name in CHANGED else name


@contextmanager
def mode(asks: str) -> Iterator[None]:
    """The mode of autograd that a call is made in."""
    with (
        torch.inference_mode(asks in ("inference", "inside")),
        torch.set_grad_enabled(asks not in ("no_grad", "inference", "inside")),
    ):
        yield
