"""Counts of pairs that scale with the batch: "8B" is eight pairs per row, "B/2" one per two rows."""

import math
import re
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from dataclasses import replace
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor

from nearfar._utils.checks import check_positive
from nearfar._utils.shortcuts import Part, method_names
from nearfar.sets.stream import Orders

__all__ = [
    "Count",
    "amount",
    "changed",
    "check_amount",
    "check_count",
    "check_one",
    "entries",
    "of_batch",
    "scaled",
    "unread",
]

Count = float | str
"""A number, or a multiple of the batch size B: "8B", "0.5B", "B/2", "3B/4"."""
NUMBER = r"(\d+\.?\d*|\.\d+)"
MULTIPLE = re.compile(rf"\s*{NUMBER}?\s*B\s*(?:/\s*{NUMBER})?\s*", re.ASCII)
Kind = TypeVar("Kind", bound=Part)
ROWS: ContextVar[int | None] = ContextVar("ROWS", default=None)
"""The batch size while a method replaced on an instance runs; None elsewhere."""


def multiple(count: str) -> float | None:
    """The factor of B in a count such as "8B"; None for any other text.

    >>> [multiple(x) for x in ("8B", "B/2", "0.5B", "3B/4", "B", "8b", "160")]
    [8.0, 0.5, 0.5, 0.75, 1.0, None, None]
    """
    found = MULTIPLE.fullmatch(count)
    if found is None:
        return None
    times, by = (1.0 if part is None else float(part) for part in found.groups())
    return times / by if by else None


def check_count(owner: str, name: str, count: object, *, zero: bool = False) -> None:
    """Require a finite number above zero (with `zero`: zero or above), or a multiple of the batch size such as "8B"."""
    if not isinstance(count, str):
        check_positive(owner, name, count, zero=zero)
        return
    times = multiple(count)
    if times is None or times == math.inf or not (times > 0 or zero):
        allowed = "zero or more" if zero else "above zero"
        raise ValueError(
            f'{owner}: {name} must be a number {allowed}, or a multiple of B such as "8B", "0.5B" or "B/2" (B is the '
            f"batch size), but came as {count!r}."
        )


def check_amount(owner: str, part: object, name: str, share: str, *more: str, zero: bool = False) -> None:
    """Require one of counts, or a share of the measure in (0, 1]; with `zero`, 0 is allowed and share 1 is not."""
    check_one(owner, part, name, share, *more)
    for each in (name, *more):
        if getattr(part, each) is not None:
            check_count(owner, each, getattr(part, each), zero=zero)
    fraction = getattr(part, share)
    if fraction is not None and not (0 <= fraction < 1 if zero else 0 < fraction <= 1):
        allowed = "[0, 1)" if zero else "(0, 1]"
        raise ValueError(f"{owner}: {share} must lie in {allowed}, but came as {fraction!r}.")


def check_one(owner: str, part: object, *names: str) -> None:
    """Require that exactly one of several attributes is given."""
    came = [f"{name}={getattr(part, name)!r}" for name in names]
    if sum(getattr(part, name) is not None for name in names) != 1:
        raise ValueError(
            f"{owner}: give {', '.join(names[:-1])} or {names[-1]}, exactly one of them, but "
            f"{', '.join(came[:-1])} and {came[-1]} came."
        )


def amount(
    owner: str,
    name: str,
    count: Count | None,
    share: float | None,
    size: Tensor,
    orders: Orders,
    effective: Count | None = None,
) -> Tensor:
    """Convert a count of unordered pairs, a share or `effective` entries to a measure [g], at most `size` [g]."""
    if effective is not None:
        return entries(owner, effective, size)
    if count is None:
        return size * float(share or 0)
    return torch.minimum(torch.full_like(size, unread(owner, name, count)) * orders, size)


def entries(owner: str, effective: Count, size: Tensor) -> Tensor:
    """The number of effective entries 1 / Σ pᵢ²/wᵢ that weights p shall have, at most the measure `size` [g]."""
    return torch.minimum(torch.full_like(size, unread(owner, "effective", effective)), size)


def scaled(count: Count, factor: float) -> Count:
    """Multiply a checked count by a number; a multiple of B stays one.

    >>> scaled(160, 0.5), scaled("8B", 0.5), scaled("B/2", 3)
    (80.0, '4B', '1.5B')
    """
    if not isinstance(count, str):
        return count * factor
    return f"{(multiple(count) or 0.0) * factor!r}B".replace(".0B", "B")


def of_batch(part: Kind, rows: int, *names: str) -> Kind:
    """Replace counts such as "8B", in the fields `names`, by their numbers for a batch of `rows` rows."""
    counts = {name: getattr(part, name) for name in names}
    found = {name: _times(count, rows) for name, count in counts.items() if isinstance(count, str)}
    return changed(part, rows, **found) if found else part


def _times(count: str, rows: int) -> float:
    return round((multiple(count) or 0.0) * rows, 9)  # rounded, because 0.07 · 100 is slightly more than 7


def changed(part: Kind, rows: int, **fields: Any) -> Kind:
    """Copy a part with new values of some fields, for a batch of `rows` rows.

    Methods replaced on the instance are copied: one that is bound to the part is bound to the copy, and one that
    calls the part itself, like a wrapper of its method, reads the batch size from `ROWS`.
    """
    new = replace(part, **fields)  # type: ignore[type-var]
    # torch 2.11 compiles no loop over an object's attributes, only a search for known names; none compiles ROWS
    compiling = torch.compiler.is_compiling()
    for name in method_names(type(part)) if compiling else vars(part):
        if name not in vars(part) or name in vars(new):
            continue
        value = vars(part)[name]
        if isinstance(value, MethodType) and value.__self__ is part:
            value = MethodType(value.__func__, new)
        object.__setattr__(new, name, _in_batch(rows, value) if callable(value) and not compiling else value)
    return new


def _in_batch(rows: int, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **more: Any) -> Any:
        context = copy_context()
        context.run(ROWS.set, rows)
        return context.run(method, *args, **more)

    return call


def unread(owner: str, name: str, count: Count) -> float:
    """A count as a number; raises an error for a multiple of B, because no loss has set the batch size."""
    if not isinstance(count, str):
        return count
    rows = ROWS.get()
    if rows is None:
        raise ValueError(
            f"{owner}: {name}={count!r} is a multiple of the batch size, which a loss knows and a set alone does not; "
            "give a number, or call at(rows) first."
        )
    return _times(count, rows)
