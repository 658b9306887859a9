"""Checks of arguments: each failure is one sentence that says what was given, what is allowed and what to do.

Shapes and types are always checked: they cost nothing. Values are checked only where reading them is free (a CPU
tensor outside `torch.compile`); on a GPU a read would stall the queue, so there `Deferred` reports a step later.
"""

import difflib
import math
import os
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from typing import Any, TypeVar

import torch
from torch import Tensor

from nearfar._utils.tensors import readable

Function = TypeVar("Function", bound=Callable[..., Any])


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
    """Suggest a correction for an unknown word: the nearest allowed one, or a list of all."""
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


def check_number(owner: str, name: str, value: object, *, learned: bool = False) -> None:
    """Require a finite number; if it may be `learned`, also a tensor that holds one."""
    number = number_of(owner, name, value, "a number", learned=learned)
    if not math.isfinite(number):
        came = float(value.detach()) if isinstance(value, Tensor) else value
        raise ValueError(f"{owner}: {name} must be a number, but came as {came!r}.")


def check_positive(owner: str, name: str, value: object, *, zero: bool = False, learned: bool = False) -> None:
    """Require a finite number above zero (with `zero`: zero or above); if it may be `learned`, also such a tensor."""
    allowed = "a number zero or more" if zero else "a number above zero"
    number = number_of(owner, name, value, allowed, learned=learned)
    if not (number >= 0 if zero else number > 0) or number == math.inf:
        came = float(value.detach()) if isinstance(value, Tensor) else value
        raise ValueError(f"{owner}: {name} must be {allowed}, but came as {came!r}.")


def number_of(owner: str, name: str, value: object, allowed: str, *, learned: bool) -> float:
    """The value as a float; NaN if it is not a number, and 1 for a tensor that cannot be read without a stall."""
    if not isinstance(value, Tensor):
        return math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    if not learned:
        raise ValueError(f"{owner}: {name} must be {allowed} and cannot be learned, but came as a tensor.")
    if value.ndim or not value.is_floating_point():
        raise ValueError(
            f"{owner}: {name} must be {allowed}, or nn.Parameter(torch.tensor(...)) of one, but came as a tensor of "
            f"{value.dtype} with shape {list(value.shape)}."
        )
    return float(value.detach()) if readable(value) else 1.0


def check_whole(owner: str, name: str, value: object) -> None:
    """Require an integer above zero."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        came = "a tensor" if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"{owner}: {name} must be a whole number above zero, but came as {came}.")


def check_seed(owner: str, value: object, name: str = "seed") -> None:
    """Require a seed that all random generators accept: an integer from 0 on (NumPy) and below 2^63 (torch)."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not 0 <= int(value) < 2**63:
        raise ValueError(f"{owner}: {name} must be a whole number from 0 to 2^63 - 1, but came as {value!r}.")


def usable_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_workers(owner: str, name: str, value: int) -> None:
    """Raise an error for a number of processes or threads that would bring the machine down."""
    cores = os.cpu_count() or 1
    most = max(256, 16 * cores)
    if value > most:
        raise ValueError(f"{owner}: {name} must be at most {most:,} on {cores} cores, but came as {value:,}.")


RECENT = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 11)
"""Whether this is PyTorch 2.11 or newer, on which kernels, recordings, compiled losses and ONNX were tested."""


class DegenerateBatchWarning(UserWarning):
    """A batch had no pair or triplet to learn from; its loss is a zero that is still connected to the graph."""


def capturing() -> bool:
    """Whether a CUDA graph is being captured, in which nothing can be read from the device."""
    if torch.compiler.is_compiling():  # a compiler cannot trace this check
        return False
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def constant_when_compiled(function: Function) -> Function:
    """Let `torch.compile` treat the first result of a function as a constant, without tracing the function.

    Like `torch.compiler.assume_constant_result`, which would import the compiler and double the import time of torch.
    """
    function.__dict__["_dynamo_marked_constant"] = True
    return function


class Deferred:
    """Reads a count from a GPU without a stall: starts a copy to the host, which a later call looks at."""

    def __init__(self) -> None:
        self._aside: Tensor | None = None
        self._event: torch.cuda.Event | None = None

    def __getstate__(self) -> dict[str, None]:
        """A copy or pickle of a loss leaves out a pending transfer, because a CUDA event belongs to its process."""
        return {"_aside": None, "_event": None}

    def note(self, count: Tensor) -> None:
        """Start copying a 0-dim count to the host, unless a copy is still pending.

        During the capture of a CUDA graph the copy becomes part of the graph, if an earlier call allocated its buffer.
        """
        if capturing():
            if self._aside is not None:
                self._aside.copy_(count.detach(), non_blocking=True)
            return
        if self._event is not None:
            return
        if self._aside is None:
            with torch.inference_mode(False):  # it outlives this call
                self._aside = torch.zeros((), dtype=torch.int64).pin_memory()
        self._aside.copy_(count.detach(), non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def take(self) -> int:
        """Return the count that has arrived since the last call, or 0; always 0 during a capture."""
        if self._aside is None or capturing():
            return 0
        if self._event is not None and not self._event.query():  # type: ignore[no-untyped-call]
            return 0
        self._event, found = None, int(self._aside)
        self._aside.zero_()
        return found
