"""How a call is made: what must change none of its numbers.

The engine, where tensors lie in memory, what asks for a gradient, and under which mode of autograd.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
import torch
from thresholds_cases import table_of
from torch import Tensor

from nearfar.engines import fused_weigh, launch, thresholds

ENGINES = ("dense", "tiled", "auto", "lean")
"""Engines, and two of "auto": strips from the first pair on, and strips where a lean way is there, else dense."""
KERNELS = ("dense", "tiled", "fused", "fused auto")
"""Engines where kernels are to be had, and "auto" that takes them from the first pair on."""
SMALL = {
    (launch, "_blocks"): lambda x, kind: {"BM": 16, "BN": 16, "BK": 16},
    (launch, "STATES"): 64,
    (fused_weigh, "STRIP"): 16 * 8,
    (fused_weigh, "TALL"): 16,
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


@contextmanager
def engine(name: str) -> Iterator[str]:
    """The package's engine of that name, its thresholds moved so that small batches reach it."""
    before = thresholds.TABLE
    with ExitStack() as sizes:
        try:
            if name in ("auto", "lean"):
                thresholds.use(table_of(1, 1 if name == "auto" else 2**60))
            if name == "fused auto":
                scopes = {scope: {"fused": 1} for scope in thresholds.SCOPES}
                thresholds.use({"cpu": thresholds.Thresholds(scopes)})
            if name.startswith("fused"):
                for (module, key), value in SMALL.items():
                    sizes.enter_context(patch.object(module, key, value))
            yield {"lean": "auto", "fused auto": "auto"}.get(name, name)
        finally:
            thresholds.use(before)


@contextmanager
def mode(asks: str) -> Iterator[None]:
    """The mode of autograd that a call is made in."""
    with (
        torch.inference_mode(asks in ("inference", "inside")),
        torch.set_grad_enabled(asks not in ("no_grad", "inference", "inside")),
    ):
        yield
