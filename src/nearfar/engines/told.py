"""What a recording depends on besides the tensors of a call: all plain attributes of the loss and its parts."""

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any, Generic, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from nearfar._utils.shortcuts import HOOKS, Part, hooked

__all__ = ["Seen", "settings"]

BASES = frozenset({object, ABC, Generic, Protocol, nn.Module})
KNOWN: WeakKeyDictionary[type[Any], bool] = WeakKeyDictionary()
"""Classes, and whether they and all their bases are nearfar's."""
CHANGING = frozenset({"training", "_warned", "_deferred", "_replays", "_cached", "_maker", "_version"})
"""Attributes of a loss that do not affect its value."""


def settings(loss: Any, parts: Sequence[Part | None], device: torch.device) -> tuple[Any, ...] | None:
    """Everything that a recording of this loss depends on, besides the tensors of a call.

    None if it cannot be recorded: a custom class, a hook, an attribute that may change unnoticed, or a parameter that
    is sharded, otherwise special, or on another device.
    """
    kept, seen = loss._replays, loss._replays.seen
    if seen is None or not seen.holds(parts):
        seen = kept.seen = _look(loss, parts)
    if seen.told is None or any(x.device != device for x in seen.learned):
        return None
    return kept.number(seen.told), *((x.data_ptr(), x.dtype, x.shape, x.requires_grad) for x in seen.held)


@dataclass(frozen=True, eq=False)
class Seen:
    """The plain attributes of a loss and of its parts, and what they were read from, so that a change is noticed."""

    parts: tuple[Part | None, ...]  # the parts
    read: list[dict[str, Any]]  # the dictionaries of attributes, parameters, submodules and hooks
    values: list[Any]  # the objects in them
    learned: list[nn.Parameter]  # the parameters
    held: list[Tensor]  # the parameters and buffers
    told: tuple[Any, ...] | None  # the plain attributes; None if the loss cannot be recorded

    def holds(self, parts: Sequence[Part | None]) -> bool:
        """Whether the parts, and all objects in the dictionaries, are still the same ones."""
        values = list(chain.from_iterable(map(dict.values, self.read)))
        same = len(values) == len(self.values) and all(map(is_, values, self.values))
        return same and len(parts) == len(self.parts) and all(map(is_, parts, self.parts))


def _look(loss: nn.Module, parts: Sequence[Part | None]) -> Seen:
    told: list[Any] = []
    read: list[dict[str, Any]] = [vars(x) for x in parts if hasattr(x, "__dict__")]
    read += [held for attributes in read for name, held in attributes.items() if name in HOOKS]
    # all that a loss computes follows from its settings, except for hooks
    plain = not any(x is not None and (not _ours(type(x)) or hooked(x)) for x in parts)
    plain = plain and all(_ours(type(one)) and _told(one, told, read) for one in loss.modules())
    values = list(chain.from_iterable(map(dict.values, read)))
    if list in map(type, values):  # may change in place
        values.append(None)
    learned = list(loss.parameters())
    plain = plain and all(type(x) is nn.Parameter for x in learned)
    return Seen(tuple(parts), read, values, learned, [*learned, *loss.buffers()], tuple(told) if plain else None)


def _ours(kind: Any) -> bool:
    found = KNOWN.get(kind)
    if found is None:
        found = KNOWN[kind] = all(base in BASES or base.__module__.startswith("nearfar.") for base in kind.__mro__)
    return found


def _told(one: Any, told: list[Any], read: list[dict[str, Any]]) -> bool:
    """Append the plain attributes of an object and of its parts, and where they are; False if one is not plain."""
    told.append(type(one))
    module, held = isinstance(one, nn.Module), getattr(one, "__dict__", {})
    read.append(held)
    for name, value in held.items():
        if module and name in INNER:
            if isinstance(value, dict):
                read.append(value)
            if name in HOOKS and value:
                return False
            continue
        several = value if type(value) in LISTS else (value,)
        if name not in CHANGING and not all(_plain(x, told, read) for x in several):
            return False
    return True


def _plain(value: Any, told: list[Any], read: list[dict[str, Any]]) -> bool:
    """Append an attribute, or those of a part; False if it is not plain. Parameters are handled elsewhere."""
    if type(value) in PLAIN:
        told.append(value)
    elif _ours(type(value)) and not isinstance(value, nn.Module):
        return _told(value, told, read)
    elif not isinstance(value, nn.Module | nn.Parameter):
        if isinstance(value, Tensor) or type(value).__hash__ is None:  # a tensor may be part of another graph
            return False
        told.append(value)
    return True


LISTS = frozenset({tuple, list})
PLAIN = frozenset({bool, int, float, str, type(None)})
INNER = frozenset(nn.Module().__dict__)
"""Attributes that every module has: parameters, buffers, submodules and hooks, which are handled elsewhere."""
