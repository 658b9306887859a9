"""`Part`, the base class of everything that a loss is made of, and the rules for the shortcuts that engines use.

A loss is made of parts: similarity, pair losses, sets, groups, link, miner. Each has a plain definition (`forward`,
`value`, `split`, ...), which the dense engine runs, and some have shortcuts that give the same numbers. Two rules keep
a user's subclass from being computed like the class that it inherits from:

    a shortcut is never inherited       a subclass that does not define it itself has none
    `swift` is never inherited          class Mine(Hinge, swift=True) promises what `Part.swift` says

Changes to a single object (a hook, a replaced method, a tensor in place of a number) are found by `touched` and
`swift`, which engines call every time.
"""

import inspect
from collections import OrderedDict
from collections.abc import Iterable
from functools import cache
from typing import Any, ClassVar, TypeGuard, TypeVar

from torch import Tensor, nn

from nearfar._utils.checks import constant_when_compiled
from nearfar._utils.keywords import Keywords

Kind = TypeVar("Kind")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
PLAIN = frozenset({bool, int, float, str, type(None), dict, OrderedDict, set})
"""Types of attributes that are known not to be tensors."""


class Part(Keywords):
    """Base class of the parts of a loss. The base class of each family lists the shortcuts of all its subclasses."""

    swift: ClassVar[bool] = False
    """Whether engines may use the shortcuts, pass pairs in any order and shape, and leave out absent ones."""
    shortcuts: ClassVar[tuple[str, ...]] = ()
    """Names of methods and attributes that compute the same as others, faster."""
    learns: ClassVar[frozenset[str]] = frozenset()
    """Parameters that a swift part may have; with any others the shortcuts are not used."""

    def __init_subclass__(cls, *, swift: bool = False, **more: Any) -> None:
        """Remove inherited shortcuts that the class does not define itself."""
        super().__init_subclass__(**more)
        cls.swift = swift
        first = next(kind for kind in cls.__mro__ if "shortcuts" in vars(kind))
        for name in cls.shortcuts:
            if name not in vars(cls):
                setattr(cls, name, inspect.getattr_static(first, name))

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; raises an error if a loss made this part, because the loss would lose the change."""
        maker = self.__dict__.get("_maker")
        if maker is not None and not name.startswith("_") and name != "training":
            raise AttributeError(
                f"{maker}: its {type(self).__name__} is made from its settings; set those, or give a part of your own."
            )
        if not name.startswith("_") and name != "training":
            self.__dict__["_version"] = self.__dict__.get("_version", 0) + 1
        super().__setattr__(name, value)


def version(parts: Iterable[Part | None]) -> int:
    """How often an attribute of one of the parts was set; what was derived from them at another number is stale."""
    return sum([vars(inner).get("_version", 0) for part in parts if part is not None for inner in nested(part)])


def exactly(part: object, *kinds: type[Kind]) -> TypeGuard[Kind]:
    """Whether a part's class is one of these, and not a subclass of them."""
    return type(part) in kinds


def swift(parts: Iterable[Part | None]) -> bool:
    """Whether shortcuts may be used for all parts: their classes promise it and the objects are unchanged."""
    return all(_swift(inner) for part in parts if part is not None for inner in nested(part))


def touched(parts: Iterable[Part | None]) -> str | None:
    """A change to one of the parts that only a plain call would respect (such as a hook), or None."""
    for part in parts:
        for inner in () if part is None else nested(part):
            found = _touched(inner)
            if found:
                return f"{type(inner).__name__} {found}"
    return None


def hooked_globally() -> bool:
    """Whether forward or backward hooks are registered for all modules."""
    return any(getattr(nn.modules.module, f"_global{name}") for name in HOOKS)


def hooked(part: object) -> bool:
    """Whether a module has forward or backward hooks."""
    held = getattr(part, "__dict__", {})
    return any(map(held.get, HOOKS))


def nested(part: Part) -> list[Any]:
    """A part, the parts it holds, and the modules inside it."""
    if isinstance(part, nn.Module):
        return list(part.modules()) if part._modules else [part]
    found: list[Any] = [part]
    for value in vars(part).values():
        if isinstance(value, Part):
            found += nested(value)
    return found


def _swift(part: Any) -> bool:
    if not isinstance(part, Part) or not part.swift:
        return False
    held = vars(part)  # for a module, including parameters, buffers and submodules
    return part.learns.issuperset(tensors(part)) and not held.get("_buffers") and not held.get("_modules")


def tensors(part: Any) -> dict[str, Tensor]:
    """The parameters of a part, and tensors used as its numbers, such as those passed by the loss that makes it."""
    held = getattr(part, "__dict__", {})
    plain = {name: x for name, x in held.items() if type(x) not in PLAIN and isinstance(x, Tensor)}
    inner: dict[str, Tensor] = held.get("_parameters", {})
    return plain | inner


def learned_tensors(parts: Iterable[Part | None]) -> tuple[Tensor, ...]:
    """All that the parts learn: parameters, and tensors with a graph used as numbers."""
    held = [tensors(inner) for part in parts if part is not None for inner in nested(part)]
    every = [x for found in held for x in found.values()] if any(held) else []
    return tuple({id(x): x for x in every if x is not None and x.requires_grad}.values())


def _touched(part: Any) -> str | None:
    held = getattr(part, "__dict__", {})
    patched = _methods(part.__class__).intersection(held)
    if patched:
        return f"has a {min(patched)} of this object alone"
    if hooked(part):
        return "has a hook"
    for name, value in held.items():
        number = type(value) in PLAIN or (isinstance(value, Tensor) and value.ndim == 0)  # see `learned_tensors`
        if not number and isinstance(value, Tensor | nn.Module):
            return f"holds a {type(value).__name__}, {name}, that is no parameter, buffer or module of a module"
    return None


@constant_when_compiled
def method_names(kind: Any) -> frozenset[str]:
    """The names of a class's methods; a field whose default is a function does not count."""
    return _methods(kind)


@cache
def _methods(kind: type[object]) -> frozenset[str]:
    names = frozenset(name for name in dir(kind) if callable(inspect.getattr_static(kind, name, None)))
    return names.difference(getattr(kind, "__dataclass_fields__", ()))


def check_part(owner: str, name: str, value: object, kind: type[object], such_as: str) -> None:
    """Require an instance of `kind`; the error shows how to make one (`such_as`) if a name or a class was given."""
    if isinstance(value, kind):
        return
    came = repr(value) if value is None or isinstance(value, str | int | float) else f"a {type(value).__name__}"
    if isinstance(value, type):
        came = f"the class {value.__name__}" + (", which must be called first" if issubclass(value, kind) else "")
    raise TypeError(f"{owner}: {name} must be a {kind.__name__}, such as {such_as}, but came as {came}.")
