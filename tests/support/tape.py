"""A CUDA graph's manners on the CPU: operators are recorded with their tensors, and run again into the same memory.

As in a graph, what Python decided while it was recorded stays decided: settings are not read again, and tensors that
were replaced since are not seen. A read of data while it is recorded is an error.
"""

from __future__ import annotations

import sys

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from nearfar.engines import recordings as replays
from nearfar.losses import robust

READS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal")


class Tape(TorchDispatchMode):
    """Records every operator beneath autograd."""

    def __init__(self):
        super().__init__()
        self.entries = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if any(name == word or name.startswith(f"{word}_") for word in READS):
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        found = func(*args, **(kwargs or {}))
        writes = any(each.alias_info is not None and each.alias_info.is_write for each in func._schema.returns)
        held = {x.untyped_storage().data_ptr() for x in _tensors((args, kwargs))}
        # by memory, not by schema: in inference mode a cast comes as one operator, of which nobody knows if it copies
        fresh = [] if writes else [x for x in _tensors(found) if x.untyped_storage().data_ptr() not in held]
        if writes or fresh:
            self.entries.append((func, args, kwargs or {}, fresh))
        return found

    def replay(self):
        with torch.no_grad():
            for func, args, kwargs, fresh in self.entries:
                for mine, new in zip(fresh, _tensors(func(*args, **kwargs)), strict=bool(fresh)):
                    mine.copy_(new)


def _tensors(tree):
    return [x for x in tree_flatten(tree)[0] if isinstance(x, torch.Tensor)]


def tape_calls(monkeypatch):
    """Record on the CPU as on a GPU, where data cannot be read; returns the list of replays, by their tapes."""
    heard = []

    def record(body, like):
        body()  # as a GPU does
        tape = Tape()
        with tape:
            found = body()

        def start():
            heard.append(tape)
            tape.replay()

        return start, found

    monkeypatch.setattr(replays, "record", record)
    monkeypatch.setattr(replays, "TRACED", frozenset())
    for module in (replays, robust):
        monkeypatch.setattr(module, "DEVICES", frozenset({"cpu"}))
    monkeypatch.setattr(robust.RobustLoss, "_warn", lambda *given: None)  # reads on a CPU alone
    for name, module in list(sys.modules.items()):
        if name.startswith("nearfar") and hasattr(module, "readable"):
            monkeypatch.setattr(module, "readable", lambda tensor: False)
    return heard
