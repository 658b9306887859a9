"""`Remembered`: a set whose dual variables are kept from batch to batch, for a worst case over the data."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from nearfar._utils.checks import check_number, check_whole
from nearfar._utils.tensors import readable, total
from nearfar.sets.base import UncertaintySet
from nearfar.sets.stream import Orders
from nearfar.sets.wrapped import Wrapped

__all__ = ["DualMemory", "Remembered"]


@dataclass(frozen=True, eq=False)
class Remembered(Wrapped):
    """Another set whose dual variables are averages over batches: they belong to the data, not to one small batch.

        KL          u ← m·u + (1-m)·mean e^{l/γ},    F = γ·log u + mean e^{l/γ}·γ/u - γ,    weights e^{l/γ} / (n·u)
        TopK        t ← m·t + (1-m)·(threshold of the batch),    F = t + Σ wᵢ(lᵢ-t)₊ / K
        ChiSquare   η, s² likewise,    F = η + √(1+2ρ/n)·(mean (l-η)₊² / 2s + s/2)

    A group with n members has a biased value, E γ·log mean e^{l/γ} ≤ γ·log E e^{l/γ}; with the dual held constant the
    value is a mean over members. u is updated with the batch before it weighs it, so that weights exceed those within
    the batch at most 1/(1-m) times. The first values of a sample are averaged evenly. A sample that was not seen before
    has the value and the weights of the set alone.

    The loss keeps the dual variables (`state_dict`): one group's for groups over the batch; for groups of an anchor
    those of each sample, named by `ids=` in each call. In evaluation mode they are used and not updated. A set alone,
    outside a loss, remembers nothing, and `explain` shows weights within the batch. Only the dense engine serves it.

    SogCLR (Yuan et al. 2022) is the case of KL over an anchor's negatives. Averages lag behind a network that changes
    fast, and a dual that is nearly constant raises the variance of the gradient (docs/papers/beyond/memory.md).

    Args:
        of: `KL` with gamma, `TopK` or `ChiSquare`.
        samples: the number of samples, whose ids are 0 to samples - 1; needed for groups of an anchor.
        momentum: m in [0, 1), the share of the past in the average; 0 is the set alone.
    """

    samples: int | None = None
    momentum: float = 0.9

    remembers = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("Remembered", "momentum", self.momentum)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"Remembered: momentum must lie in [0, 1), but came as {self.momentum!r}.")
        if self.samples is not None:
            check_whole("Remembered", "samples", self.samples)
        if not self.of.keeps:
            raise ValueError(
                f"Remembered: {self.of!r} has no dual variable that can be kept; give KL(gamma), TopK or "
                "ChiSquare(rho)."
            )

    @property
    def exact_gradient(self) -> bool:  # type: ignore[override]
        """Whether the value given the dual variables has the gradient of the set."""
        return self.of.exact_gradient

    def memory(self, owner: str, by_sample: bool) -> "DualMemory":
        """An empty memory for groups of samples, or for one group."""
        if by_sample and self.samples is None:
            raise ValueError(
                f"{owner}: Remembered keeps a dual variable of each sample, so it needs samples=, their number."
            )
        return DualMemory(self.samples if by_sample and self.samples else 1, self.of.keeps)

    def bind(self, memory: "DualMemory", ids: Tensor, stores: bool) -> UncertaintySet:
        """This set in one call, with the samples of its groups."""
        return Bound(self.of, self.momentum, memory, ids, stores, zero=self.zero, zero_member=self.zero_member)

    def _value(self, l: Tensor, w: Tensor, mass: Tensor) -> Tensor:
        return self.of._value(l, w, mass)


class DualMemory(nn.Module):
    """The dual variables of samples: averages [samples, k] in float64, and how often each was updated [samples]."""

    numbers: Tensor
    seen: Tensor

    def __init__(self, samples: int, numbers: int) -> None:
        super().__init__()
        self.register_buffer("numbers", torch.zeros(samples, numbers, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(samples, dtype=torch.int64))

    def check(self, owner: str, ids: Tensor | None, rows: int) -> Tensor:
        """The ids [n] of a call, validated."""
        samples = len(self.seen)
        if ids is None:
            raise ValueError(
                f"{owner}: Remembered keeps a dual variable of each sample; pass ids=, the number of each row's "
                f"sample, from 0 to {samples - 1}."
            )
        ids = ids.to(self.seen.device).long()
        if len(ids) != rows:
            raise ValueError(f"{owner}: ids must have one entry per row, but {len(ids)} came for {rows} rows.")
        if readable(ids) and rows and not (int(ids.amin()) >= 0 and int(ids.amax()) < samples):
            raise ValueError(
                f"{owner}: ids must lie between 0 and {samples - 1}, because Remembered has samples={samples}, but "
                f"{int(ids.amin())} to {int(ids.amax())} came."
            )
        return ids

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        saved = state_dict.get(f"{prefix}seen")
        if saved is not None and len(saved) != len(self.seen):
            raise ValueError(
                f"Remembered: the checkpoint has dual variables of {len(saved)} samples, but samples={len(self.seen)}; "
                "give as many, or leave its state out."
            )
        super()._load_from_state_dict(state_dict, prefix, *rest)


@dataclass(frozen=True, eq=False)
class Bound(Wrapped):
    """A remembered set in one call: group g is the sample `ids[g]` of the memory."""

    momentum: float
    memory: DualMemory = field(repr=False)
    ids: Tensor = field(repr=False)
    stores: bool

    def value(
        self, losses: Tensor, measure: Tensor | None = None, *, orders: Orders = 1, cap: Tensor | None = None
    ) -> Tensor:
        """Value [g] given the average of the memory and this batch, which it `stores`."""
        l, w = self._members(losses, measure)
        mass = self._mass(l, w, orders, cap)
        of: Any = self.of
        plain = of._value(l, w, mass)
        with torch.no_grad():
            there, memory = total(w, l) > 0, self.memory
            old, seen = memory.numbers[self.ids], memory.seen[self.ids]
            share = (1.0 / (seen + 1).double()).clamp_min(1 - self.momentum)
            new = of._keep(plain, l, w, mass, old, share)
            new = torch.where(there[:, None], new, old)
            if self.stores:
                self._store(new, old, there)
        return torch.where(there & (share < 1), of._at(plain, l, w, mass, new.to(l.dtype)), plain)

    def _store(self, new: Tensor, old: Tensor, there: Tensor) -> None:
        """Write the average of each sample, over the rows that it has in this batch; empty groups count for nothing."""
        same = (self.ids[:, None] == self.ids[None, :]) & there
        any_there = same.any(dim=1)
        weights = same.double() / same.sum(dim=1, keepdim=True).clamp_min(1)
        mixed = self.of._blend(new[None].expand(len(new), -1, -1), weights)
        self.memory.numbers[self.ids] = torch.where(any_there[:, None], mixed, old)
        self.memory.seen[self.ids] += any_there  # rows of one sample write the same
