"""Triton's interpreter, quicker: it looks through its whole language at each call of a function, also in a kernel.

What it computes is the same. Tests of kernels call `quicken` before any kernel runs.
"""

from __future__ import annotations

import gc
import os
from typing import Any

__all__ = ["quicken"]


def quicken() -> None:
    """Let a kernel prepare the language once, not in each function that it calls; collect garbage less often."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton import language
    from triton.runtime import interpreter

    prepare, run = interpreter._patch_lang, interpreter.GridExecutor.__call__
    if prepare.__module__ == __name__:
        return
    prepared = set[frozenset[int]]()

    def once(function: Any) -> Any:
        seen = frozenset(id(x) for x in function.__globals__.values() if x is language or x is language.core)
        if seen in prepared:
            return interpreter._LangPatchScope()
        prepared.add(seen)
        return prepare(function)

    def fresh(executor: Any, *given: Any, **more: Any) -> None:
        prepared.clear()
        run(executor, *given, **more)

    gc.freeze()  # what was imported stays
    gc.set_threshold(100_000, 20, 50)
    interpreter._patch_lang = once
    interpreter.GridExecutor.__call__ = fresh
