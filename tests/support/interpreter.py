"""Which losses have kernels; and Triton's interpreter, quicker: it looks through its whole language at each call of a
function, also in a kernel.

And it makes the type and the shape of each number anew. What it computes is the same. Tests of kernels call `quicken`
before any kernel runs.
"""

from __future__ import annotations

import gc
import math
import os
from typing import Any

from nearfar.engines import auto
from nearfar.engines.plan import make_plan, plain_parts

__all__ = ["counted", "quicken", "unfused"]


def unfused(product: Any, relation: Any) -> str | None:
    """Why the kernels do not serve a loss of this relation, or None if they do."""
    if not plain_parts(product):
        return "a part allows no shortcut"
    layout, fold = relation.layout(), product.over_wide.fold()
    if layout is None:
        return "pairs are given by a matrix"
    if layout.weights is not None and fold is not None and fold.kind == "top":
        return "K counts weights"
    return make_plan(product).refused_kernels


def quicken() -> None:
    """Let a kernel prepare the language once, not in each function that it calls; collect garbage less often.

    Types and shapes, which nothing changes, are made once.
    """
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
    _keep_types()


def _keep_types() -> None:
    """Types of blocks, shapes of tensors and types of NumPy by what they are made of, each checked once."""
    from triton.language import core
    from triton.runtime import interpreter

    make, look_up = core.block_type.__init__, interpreter._get_np_dtype
    blocks, shapes, kinds = {}, {}, {}
    scalar = (core.constexpr(1), core.tuple([]))

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        numbers = tuple(x.value if type(x) is core.constexpr else x for x in shape)
        _, known = blocks.get((id(element_ty), numbers), (None, None))
        if known is None:
            make(self, element_ty, shape)
            blocks[id(element_ty), numbers] = element_ty, dict(vars(self))  # the element stays, and with it its id
        else:
            vars(self).update(known)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        if not type.is_block():
            self.numel, self.shape = scalar
            return
        if id(type.shape) not in shapes:
            sizes = [core.constexpr(size) for size in type.shape]
            shapes[id(type.shape)] = type.shape, (core.constexpr(math.prod(type.shape)), core.tuple(sizes))
        self.numel, self.shape = shapes[id(type.shape)][1]

    def kind(dtype: Any) -> Any:
        if dtype.name not in kinds:
            kinds[dtype.name] = look_up(dtype)
        return kinds[dtype.name]

    core.block_type.__init__ = block
    core.tensor.__init__ = tensor
    interpreter._get_np_dtype = kind


def counted(monkeypatch):
    """What the kernels found, in a list that grows; strips in PyTorch are not counted."""
    plain, seen = auto.finish, []

    def heard(*given, low, **more):
        found = plain(*given, low=low, **more)
        if low is not None:
            seen.append(found)
        return found

    monkeypatch.setattr(auto, "finish", heard)
    return seen
