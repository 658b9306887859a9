"""Streams: solve groups chunk by chunk, so that their members are never in memory all at once.

    stream = over.stream(groups, like)
    wanted = True
    while wanted:                              one or more sweeps over all chunks, as the set needs
        for l, w in chunks:
            stream.add(l, w)
        wanted = stream.turn()
    p = stream.weights(l, w)                   elementwise: any chunk, in any order

With several processes (`ranks`), each adds its own chunks, and `turn` merges the results, so that all have the same.

Chunks are l [g, c] with a measure w [g, c]: c members of each of g groups. Sums are accumulated in float64: a float32
running sum over 16 million pairs loses five digits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from nearfar._utils.process_group import ProcessGroup
from nearfar._utils.tensors import hidden, over, total, weighted
from nearfar.sets.base import Dual, Stream, Support, UncertaintySet

__all__ = ["DualStream", "HeldStream", "MeanStream", "WorstStream", "both"]


class MeanStream(Stream):
    """Stream of `Mean`: running Σ w and Σ wl."""

    def _start(self) -> None:
        self._sum = self._full(0.0, wide=True)

    def _add(self, l: Tensor, w: Tensor, tag: Tensor | None) -> None:
        self._sum += weighted(l, w).sum(dim=1, dtype=torch.float64)

    def _merge(self, ranks: ProcessGroup) -> None:
        self._sum = ranks.sum(self._sum)

    def value(self) -> Tensor:  # noqa: D102
        return self._narrow(over(self._sum, self.size))

    def _weights(self, l: Tensor, w: Tensor) -> Tensor:
        return over(w.to(l.dtype), self.size.to(l.dtype)[:, None])


class WorstStream(Stream):
    """Stream of `Worst`: running maximum, and the measure of the members tied at it."""

    def _start(self) -> None:
        self._top = self._full(-torch.inf)
        self._ties = self._full(0.0, wide=True)

    def _add(self, l: Tensor, w: Tensor, tag: Tensor | None) -> None:
        top = torch.maximum(self._top, hidden(l, w).amax(dim=1))
        here = total(w * (l == top[:, None]), self._ties)
        self._ties = torch.where(top > self._top, 0.0, self._ties) + here
        self._top = top

    def _merge(self, ranks: ProcessGroup) -> None:
        top = ranks.largest(self._top)
        self._ties = ranks.sum(torch.where(self._top == top, self._ties, 0.0))
        self._top = top

    def value(self) -> Tensor:  # noqa: D102
        return self._narrow(self._top)

    def _weights(self, l: Tensor, w: Tensor) -> Tensor:
        return over(w * (l == self._top[:, None]).to(l.dtype), self._ties.to(l.dtype)[:, None])


class HeldStream(Stream):
    """Stream with the weights of another stream and the value Σ p*l, p* held constant.

    Args:
        inner: the stream that determines the weights.
        height: transformation of the losses before `inner` receives them; None for the losses themselves.
    """

    constant = True

    def __init__(self, inner: Stream, height: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__(inner.over, len(inner.size), inner.like, inner._orders, inner._cap)
        self.inner = inner
        self.size = inner.size
        self._height = height

    def _start(self) -> None:
        self.inner._start()

    def _add(self, l: Tensor, w: Tensor, tag: Tensor | None) -> None:
        self.inner._add(l if self._height is None else self._height(l), w, tag)

    def _merge(self, ranks: ProcessGroup) -> None:
        self.inner.ranks = ranks
        self.inner._merge(ranks)

    def _turn(self) -> bool:
        self.inner.sweep = self.sweep
        return self.inner._turn()

    def support(self) -> Support | None:  # noqa: D102
        return self.inner.support()

    def value(self) -> Tensor:  # noqa: D102
        return self.inner.value()

    def _weights(self, l: Tensor, w: Tensor) -> Tensor:
        return self.inner._weights(l if self._height is None else self._height(l), w)


class DualStream(Stream):
    """Base class of streams that compute the set's dual variables, from which the set's `_weights` follow."""

    dual: Dual = ()

    def value(self) -> Tensor:  # noqa: D102
        return self._narrow(self.dual[0])

    def _weights(self, l: Tensor, w: Tensor) -> Tensor:
        return self.over._weights(l, w, self.dual)


def both(outer: UncertaintySet, inner: UncertaintySet) -> UncertaintySet:
    """Copy of `inner` with the `zero` and `zero_member` options of its wrapper `outer` merged in."""
    zero: Literal["keep", "drop"] = "drop" if "drop" in (outer.zero, inner.zero) else "keep"
    return replace(inner, zero=zero, zero_member=outer.zero_member or inner.zero_member)
