"""Checks of arguments: each failure is one sentence that says what was given, what is allowed and what to do.

Shapes and types are always checked: they cost nothing. Values are checked only where reading them is free (a CPU
tensor outside `torch.compile`); on a GPU a read would stall the queue, so there `Deferred` reports a step later.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from numbers import Integral, Real

import torch
from torch import Tensor

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def readable(tensor: Tensor) -> bool:
    """Whether reading the values of `tensor` is free: it is on the CPU and outside a compiled graph."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def check_embeddings(owner: str, name: str, x: Tensor, *, finite: bool = True) -> None:
    """Require a floating-point matrix [n, d]; with `finite`, finite values too where reading them is free."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{owner}: {name} must be a torch.Tensor of shape [n, d], but came as {type(x).__name__}.")
    if x.ndim != 2:
        raise ValueError(
            f"{owner}: {name} must have shape [n, d], but came with shape {list(x.shape)}; "
            "flatten or pool each sample to one vector first."
        )
    if not x.is_floating_point():
        raise TypeError(f"{owner}: {name} must be floating point, but came as {x.dtype}; call .float() on it.")
    if finite and readable(x):
        _check_finite(owner, name, x)


def _check_finite(owner: str, name: str, x: Tensor) -> None:
    if math.isfinite(float(x.detach().sum())):
        return  # no NaN or infinity vanishes in a sum; one that overflows is looked at more closely
    # in parts: a mask of everything would cost a quarter of the embeddings' own memory, and more on the way
    finite = torch.cat([torch.isfinite(rows).all(dim=1) for rows in torch.split(x.detach(), 8192)])
    if not bool(finite.all()):
        rows = torch.nonzero(~finite).flatten().tolist()
        shown = ", ".join(str(row) for row in rows[:8]) + (", ..." if len(rows) > 8 else "")
        raise ValueError(
            f"{owner}: {name} must be finite, but {len(rows)} of {len(x)} rows hold NaN or infinity (rows {shown}); "
            "look at the network or lower the learning rate."
        )


def check_labels(owner: str, name: str, labels: Tensor, rows: int, device: torch.device) -> None:
    """Require one integer label per row, on the device of the embeddings."""
    if not isinstance(labels, Tensor):
        raise TypeError(
            f"{owner}: {name} must be a 1-D integer tensor or an nf.Relation, but came as {type(labels).__name__}; "
            "wrap it with torch.as_tensor."
        )
    if labels.dtype not in INTEGERS:
        raise TypeError(
            f"{owner}: {name} must be integers, but came as {labels.dtype}; call .long() on class indices, "
            "or use nf.Relation.from_multilabel for multi-hot rows."
        )
    if labels.ndim != 1:
        raise ValueError(
            f"{owner}: {name} must have shape [{rows}], but came with shape {list(labels.shape)}; "
            "for several labels a sample use nf.Relation.from_multilabel."
        )
    if len(labels) != rows:
        raise ValueError(f"{owner}: {name} must have one entry per row, but {len(labels)} came for {rows} rows.")
    if labels.device != device:
        raise ValueError(f"{owner}: {name} is on {labels.device} but the embeddings are on {device}; move one of them.")


def printable(text: object, most: int = 200) -> str:
    r"""Escape control characters, so that a terminal shows them and does not obey them; keep `most` characters.

    >>> printable("caf\u00e9 \x1b[2J")
    'café \\x1b[2J'
    """
    words = str(text)
    words = words if len(words) <= most else words[:most] + "..."
    if words.isprintable():
        return words
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in words)


def nearest(word: str, allowed: Iterable[str]) -> str:
    """Suggest a correction for a word that is not allowed: the nearest allowed one, or all of them."""
    words = [str(x) for x in allowed]
    near = difflib.get_close_matches(word, words, n=1)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(words)}."


def check_choice(owner: str, name: str, value: object, allowed: Iterable[str]) -> None:
    """Require one of a few words; the error names the nearest one when it is misspelled."""
    words = list(allowed)
    if value in words:
        return
    near = difflib.get_close_matches(str(value), words, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise ValueError(f"{owner}: {name} must be one of {', '.join(map(repr, words))}, but came as {value!r}{hint}")


def check_positive(owner: str, name: str, value: object, *, zero: bool = False) -> None:
    """Require a finite number above zero (with `zero`: zero or above)."""
    number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    if not (number >= 0 if zero else number > 0) or number == math.inf:
        allowed = "zero or more" if zero else "above zero"
        raise ValueError(f"{owner}: {name} must be a number {allowed}, but came as {value!r}.")


def check_whole(owner: str, name: str, value: object) -> None:
    """Require an integer above zero."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{owner}: {name} must be a whole number above zero, but came as {value!r}.")


def check_tensor(owner: str, name: str, value: object) -> None:
    """Require a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{owner}: {name} must be a torch.Tensor, but came as {type(value).__name__}; wrap it with torch.as_tensor."
        )


def check_reference(owner: str, embeddings: Tensor, ref_emb: Tensor | None, ref_labels: object) -> None:
    """Require reference rows that fit the embeddings, and labels for them."""
    if (ref_emb is None) != (ref_labels is None):
        raise ValueError(f"{owner}: ref_emb and ref_labels belong together, but only one of them came.")
    if ref_emb is not None:
        check_reference_rows(owner, embeddings, ref_emb)


def check_reference_rows(owner: str, embeddings: Tensor, ref_emb: Tensor) -> None:
    """Require reference rows [m, d] of the dimension of the embeddings and on their device."""
    check_embeddings(owner, "ref_emb", ref_emb)
    if ref_emb.shape[1] != embeddings.shape[1]:
        raise ValueError(
            f"{owner}: ref_emb must be as wide as embeddings ({embeddings.shape[1]}), but is {ref_emb.shape[1]} wide."
        )
    if ref_emb.device != embeddings.device:
        raise ValueError(
            f"{owner}: ref_emb is on {ref_emb.device} but the embeddings are on {embeddings.device}; move one of them."
        )


class DegenerateBatchWarning(UserWarning):
    """A batch had no pair or triplet to learn from; its loss is a zero that is still connected to the graph."""


class Deferred:
    """A count on a GPU that is read without a stall: copied to the host now, looked at on a later call."""

    def __init__(self) -> None:
        self._aside: Tensor | None = None
        self._event: torch.cuda.Event | None = None

    def __getstate__(self) -> dict[str, None]:
        """Leave out a copy that is under way when a loss is copied or pickled: a CUDA event belongs to its process."""
        return {"_aside": None, "_event": None}

    def note(self, count: Tensor) -> None:
        """Start to copy a 0-dim count to the host, unless one is still under way or a graph is being captured."""
        if self._event is not None or torch.cuda.is_current_stream_capturing():
            return
        if self._aside is None:
            self._aside = torch.empty((), dtype=torch.int64, pin_memory=True)
        self._aside.copy_(count.detach(), non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def take(self) -> int:
        """Return the count that has arrived since the last call, or 0."""
        if self._event is None or self._aside is None or not self._event.query():  # type: ignore[no-untyped-call]
            return 0
        self._event = None
        return int(self._aside)
