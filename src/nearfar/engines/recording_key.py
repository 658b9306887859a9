"""What a recording depends on besides the tensors of a call: all plain attributes of the loss and its parts."""

from abc import ABC
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from itertools import chain
from operator import is_
from typing import Any, Generic, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from nearfar._utils.shortcuts import HOOKS, Part, hooked

__all__ = ["Settings", "settings"]

BASES = frozenset({object, ABC, Generic, Protocol, nn.Module})
KNOWN: WeakKeyDictionary[type[Any], bool] = WeakKeyDictionary()
"""Classes, and whether they and all their bases are nearfar's."""
CHANGING = frozenset({"training", "_warned", "_deferred", "_replays", "_cached", "_maker", "_version"})
"""Attributes of a loss that do not affect its value."""
LISTS = frozenset({tuple, list})
PLAIN = frozenset({bool, int, float, str, type(None)})
INNER = frozenset(nn.Module().__dict__)
"""Attributes that every module has: parameters, buffers, submodules and hooks, which are handled elsewhere."""


def settings(loss: Any, parts: Sequence[Part | None], device: torch.device) -> tuple[Any, ...] | None:
    """Everything that a recording of this loss depends on, besides the tensors of a call.

    None if it cannot be recorded: a custom class, a hook, an attribute that may change unnoticed, or a parameter that
    is sharded, otherwise special, or on another device.
    """
    kept, seen = loss._replays, loss._replays.seen
    if seen is None or not seen.holds(parts):
        seen = kept.seen = Settings(loss, tuple(parts))
    if not seen.complete or any(x.device != device for x in seen.learned):
        return None
    return kept.number(tuple(seen.plain)), *((x.data_ptr(), x.dtype, x.shape, x.requires_grad) for x in seen.tensors)


@dataclass(eq=False)
class Settings:
    """The plain attributes of a loss and of its parts, and where they were read, so that a change is noticed."""

    loss: InitVar[nn.Module]
    parts: tuple[Part | None, ...]
    plain: list[Any] = field(default_factory=list)  # classes and attributes
    read: list[dict[str, Any]] = field(default_factory=list)  # dictionaries of attributes, parameters, modules, hooks

    def __post_init__(self, loss: nn.Module) -> None:
        self.read += [vars(x) for x in self.parts if hasattr(x, "__dict__")]
        self.read += [held for attributes in self.read for name, held in attributes.items() if name in HOOKS]
        self.learned = list(loss.parameters())
        self.tensors = [*self.learned, *loss.buffers()]
        # all that a loss computes follows from its settings, except for hooks
        self.complete = not any(x is not None and (not _ours(type(x)) or hooked(x)) for x in self.parts)
        self.complete = self.complete and all(_ours(type(one)) and self._add(one) for one in loss.modules())
        self.complete = self.complete and all(type(x) is nn.Parameter for x in self.learned)
        self.values = list(chain.from_iterable(map(dict.values, self.read)))
        if list in map(type, self.values):  # may change in place
            self.values.append(None)

    def holds(self, parts: Sequence[Part | None]) -> bool:
        """Whether the parts, and all objects in the dictionaries, are still the same ones."""
        values = list(chain.from_iterable(map(dict.values, self.read)))
        same = len(values) == len(self.values) and all(map(is_, values, self.values))
        return same and len(parts) == len(self.parts) and all(map(is_, parts, self.parts))

    def _add(self, one: Any) -> bool:
        """Add the class and attributes of an object and of its parts; False if one is not plain."""
        module, held = isinstance(one, nn.Module), getattr(one, "__dict__", {})
        self.plain.append(type(one))
        self.read.append(held)
        for name, value in held.items():
            if module and name in INNER:
                self.read += [value] if isinstance(value, dict) else []
                if name in HOOKS and value:
                    return False
            elif name not in CHANGING and not all(map(self._add_value, value if type(value) in LISTS else (value,))):
                return False
        return True

    def _add_value(self, value: Any) -> bool:
        if isinstance(value, nn.Module | nn.Parameter):  # handled elsewhere
            return True
        if type(value) not in PLAIN:
            if _ours(type(value)):
                return self._add(value)
            if isinstance(value, Tensor) or type(value).__hash__ is None:  # a tensor may be part of another graph
                return False
        self.plain.append(value)
        return True


def _ours(kind: Any) -> bool:
    found = KNOWN.get(kind)
    if found is None:
        found = KNOWN[kind] = all(base in BASES or base.__module__.startswith("nearfar.") for base in kind.__mro__)
    return found
