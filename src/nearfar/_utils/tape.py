"""Record the operators of a function on a CPU, and run them again on other tensors, without autograd.

Autograd, and the Python code around it, takes most of the time of a small batch. `trace` runs a function once and lists
the operators that it calls beneath autograd, those of a backward pass included. Later calls run what is left of the
list without

    operators whose results are not used, or equal the results of an earlier one
    operators that give back what they take: views of a whole tensor in its own shape, sums with 0, products with 1,
    two changes of sign; masks under the same mask, and expansions to the shape of another argument
    operators that depend on shapes alone, whose results are kept

A number that the function read from a tensor may have decided what it did next. A later call reads it too, and stops
if it differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Tape", "trace"]

Given = Sequence[Tensor | None]
Tape = Callable[[Given], Any]
"""Gives the results for other tensors of the same shapes and dtypes; None if a number that is read differs."""
BY_SHAPE = frozenset(
    {"zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty", "new_full"}
)
"""Operators that use the shape of a tensor, and not its values."""
WIDE = frozenset({"add", "sub", "mul", "div", "where"})
"""Operators that expand their arguments to a common shape."""
NEUTRAL = {"add": 0, "sub": 0, "mul": 1, "div": 1, "bitwise_and": 1, "bitwise_or": 0}
"""By operator: the second argument that leaves the first as it is."""
READ = "_local_scalar_dense"
"""The operator that reads a number from a tensor."""
OTHER = frozenset({"index"})
"""Operators with the name of another method of tensors."""
MASKS = (torch.bool, torch.uint8)


@dataclass(frozen=True)
class _Name:
    """Stands for a tensor among the arguments of an operator."""

    text: str


@dataclass(frozen=True, eq=False)
class _Step:
    """One operator: its arguments, with names in place of tensors, the names of its results, and a number it read."""

    call: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    found: tuple[str, ...]
    several: bool
    read: Any = None

    @property
    def name(self) -> str:
        found: str = self.call._schema.name
        return found.removeprefix("aten::")

    @property
    def uses(self) -> list[str]:
        return [x.text for x in _leaves((self.args, self.kwargs)) if isinstance(x, _Name)]

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for operators with equal results; 1, 1.0 and True are different numbers."""
        return self.call, *_change(lambda x: (type(x), x), (self.args, tuple(self.kwargs.items())))

    def renamed(self, names: dict[str, str]) -> _Step:
        """The same operator on other tensors."""
        args, kwargs = _change(
            lambda x: _Name(names.get(x.text, x.text)) if isinstance(x, _Name) else x, (self.args, self.kwargs)
        )
        return replace(self, args=args, kwargs=kwargs)


def _leaves(x: Any) -> Iterator[Any]:
    """The arguments in nested tuples, lists and the values of dictionaries."""
    if isinstance(x, tuple | list | dict):
        for each in x.values() if isinstance(x, dict) else x:
            yield from _leaves(each)
    else:
        yield x


def _change(change: Callable[[Any], Any], x: Any) -> Any:
    """Nested arguments with each leaf changed; lists become tuples."""
    if isinstance(x, dict):
        return {key: _change(change, each) for key, each in x.items()}
    return tuple(_change(change, each) for each in x) if isinstance(x, tuple | list) else change(x)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lists the operators that are called beneath autograd."""

    def __init__(self, given: Given) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[_Step] = []
        self.values: list[Tensor] = []  # kept alive, so that no other tensor gets the identity of one of them
        self.names: dict[int, str] = {}
        self.held: dict[str, Tensor] = {}
        """By name: tensors that no operator of the list made."""
        self.written: set[int] = set()
        """Memory that an operator changed."""
        for place, x in enumerate(given):
            if x is not None:
                self.held[self.name(x, f"given{place}")] = x

    def name(self, x: Tensor, name: str) -> str:
        """The name of a tensor, which gets this one if it has none."""
        self.values.append(x)
        return self.names.setdefault(id(x), name)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first operator imports the compiler, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [x for x in _leaves((args, kwargs)) if isinstance(x, Tensor)]
        if _unforeseen(func, given):
            raise RuntimeError(f"{func} gives a shape that depends on data, or draws random numbers")
        for x in given:
            if id(x) not in self.names:
                self.held[self.name(x, f"held{len(self.held)}")] = x
        if func._schema.is_mutable:
            self.written.update(map(_memory, given))
        plain, keywords = _change(lambda x: _Name(self.names[id(x)]) if isinstance(x, Tensor) else x, (args, kwargs))
        found = func(*args, **kwargs)
        several = isinstance(found, tuple | list)
        results = [x for x in (found if several else (found,)) if isinstance(x, Tensor)]
        read = None if several or results or not given else found
        if isinstance(read, float):
            raise RuntimeError(f"{func} reads a number that differs at each call")
        names = tuple(self._name_result(x, given) for x in results)
        self.steps.append(_Step(func, plain, keywords, names, several, read))
        return found

    def _name_result(self, x: Tensor, given: list[Tensor]) -> str:
        """A new name, or that of the first argument for a view of all of it."""
        view = bool(given) and _memory(given[0]) == _memory(x) and _geometry(given[0]) == _geometry(x)
        return self.name(x, self.names[id(given[0])] if view else f"x{len(self.values)}")


def _unforeseen(func: Any, given: list[Tensor]) -> bool:
    """Whether the shape or the values of a result follow neither from shapes nor from the arguments."""
    places = func is torch.ops.aten.index.Tensor and not any(x.dtype in MASKS for x in given[1:])
    shaped = torch.Tag.dynamic_output_shape in func.tags and not places
    return shaped or torch.Tag.nondeterministic_seeded in func.tags


def _memory(x: Tensor) -> int:
    found: int = x.untyped_storage()._cdata
    return found


def _shape(x: Tensor) -> tuple[Any, ...]:
    return x.dtype, x.shape, x.stride()


def _geometry(x: Tensor) -> tuple[Any, ...]:
    return *_shape(x), x.storage_offset(), x.is_conj(), x.is_neg()


def trace(body: Callable[[], Any], given: Given) -> tuple[Tape, Any]:
    """Run `body` and list its operators; returns a function that runs them on other tensors, and the results of `body`.

    Tensors that are neither given nor made by `body`, such as parameters, are used as they are at each later call.

    Args:
        body: computes tensors, or None, in nested tuples and lists.
        given: the tensors that differ from call to call, which `body` reads and does not change.
    """
    recorder = _Recorder(given)
    with recorder:
        found = body()
    if any(_memory(x) in recorder.written for x in recorder.held.values()):
        raise RuntimeError("a tensor from outside is changed")
    steps, held, same = _simplify(recorder)
    names = {each: _Name(same.get(name, name)) for each, name in recorder.names.items()}
    if any(x is not None and id(x) not in names for x in _leaves(found)):
        raise RuntimeError("a result is made by no operator")
    results = _change(lambda x: None if x is None else names[id(x)], found)
    wanted = {x.text for x in _leaves(results) if x is not None}
    if not wanted.isdisjoint(held):
        raise RuntimeError("a result is the same at each call")
    steps = _used(steps, wanted)
    for fast in (True, False):
        again = None
        run = _compile(steps, held, len(given), results, fast=fast)
        with suppress(TypeError, RuntimeError), torch.no_grad():
            again = run(given)
        if again is not None and all(map(_equal, _leaves(found), _leaves(again))):
            return run, found
    raise RuntimeError("the listed operators give other numbers")


def _equal(x: Any, y: Any) -> bool:
    return (x is None and y is None) or torch.equal(x.nan_to_num(), y.nan_to_num())


def _simplify(recorder: _Recorder) -> tuple[list[_Step], dict[str, Tensor], dict[str, str]]:
    """The operators whose results are not yet known; tensors that are not computed; other names of the same results."""
    steps: list[_Step] = []
    held, same, seen = dict(recorder.held), dict[str, str](), dict[Any, tuple[str, ...]]()
    values = {recorder.names[id(x)]: x for x in recorder.values}
    constant: set[str] = set()
    made: dict[str, _Step] = {}
    for step in recorder.steps:
        step = _narrow(step.renamed(same), made, values)
        made |= dict.fromkeys(step.found, step)
        if step.name == "detach" and list(step.found) == step.uses:
            continue
        if any(_memory(values[name]) in recorder.written for name in (*step.uses, *step.found)):
            steps.append(step)
        elif step.key in seen and (step.found or step.read is not None):
            same |= dict(zip(step.found, seen[step.key], strict=True))
        elif constant.issuperset(step.uses) or step.name in BY_SHAPE:
            seen[step.key] = step.found
            constant.update(step.found)
            held |= {name: values[name] for name in step.found}
        elif (old := _given_back(step, made, held)) and _shape(values[old]) == _shape(values[step.found[0]]):
            same[step.found[0]] = old
        elif not step.found or not set(step.found) <= set(step.uses):
            seen[step.key] = step.found
            steps.append(step)
    return steps, held, same


def _narrow(step: _Step, made: dict[str, _Step], values: dict[str, Tensor]) -> _Step:
    """The operator on tensors as they were before they were expanded, or masked alike, if its result is the same."""
    inner = made.get(step.uses[1]) if step.name == "where" and isinstance(step.args[1], _Name) else None
    if inner is not None and inner.name == "where" and inner.args[0] == step.args[0] != inner.args[1]:
        step = replace(step, args=(step.args[0], inner.args[1], *step.args[2:]))
    before = {name: made[name].args[0].text for name in step.uses if name in made and made[name].name == "expand"}
    if not before or step.name not in WIDE:
        return step
    shapes = [values[before.get(name, name)].shape for name in step.uses]
    return step.renamed(before) if _common(shapes) == values[step.found[0]].shape else step


def _common(shapes: Sequence[torch.Size]) -> tuple[int, ...]:
    """The shape that tensors of these shapes are expanded to; torch's own function first imports SymPy."""
    width = max(map(len, shapes))
    padded = [(1,) * (width - len(shape)) + tuple(shape) for shape in shapes]
    return tuple(next((size for size in sizes if size != 1), 1) for sizes in zip(*padded, strict=True))


def _given_back(step: _Step, made: dict[str, _Step], held: dict[str, Tensor]) -> str | None:
    """The name of the tensor that the operator gives back as it is, or None."""
    old = made.get(step.uses[0]) if step.name == "neg" else None
    if old is not None and old.name == "neg":
        return old.uses[0]
    return step.args[0].text if _is_neutral(step, held) else None


def _is_neutral(step: _Step, held: dict[str, Tensor]) -> bool:
    """Whether the second argument leaves the first as it is: a number, or a tensor that depends on shapes alone."""
    name = step.name
    if name not in NEUTRAL or len(step.args) != 2 or step.kwargs or not isinstance(step.args[0], _Name):
        return False
    other = step.args[1]
    if isinstance(other, _Name):
        if not other.text.startswith("x") or other.text not in held or not held[other.text].numel():
            return False
        other = bool((held[other.text] == NEUTRAL[name]).all()) and NEUTRAL[name]
    return type(other) in (int, float) and other == NEUTRAL[name]


def _used(steps: list[_Step], wanted: set[str]) -> list[_Step]:
    """The operators whose results are used, that change a tensor or that read a number."""
    kept = []
    for step in reversed(steps):
        if step.call._schema.is_mutable or step.read is not None or not wanted.isdisjoint(step.found):
            kept.append(step)
            wanted = wanted.union(step.uses)
    return kept[::-1]


def _compile(steps: list[_Step], held: dict[str, Tensor], many: int, results: Any, *, fast: bool) -> Tape:
    """A Python function of the given tensors that runs the operators, and frees each tensor after its last use.

    Args:
        steps: the operators.
        held: tensors by name, which are not computed; those that are given come from the arguments.
        many: number of the given tensors.
        results: names of the results, or None, in nested tuples.
        fast: call torch's functions instead of the operators where they exist.
    """
    known: dict[str, Any] = {name: x.detach() for name, x in held.items()}
    kept = {x.text for x in _leaves(results) if x is not None} | held.keys()
    lines, last = [], {name: place for place, step in enumerate(steps) for name in (*step.uses, *step.found)}
    for place, step in enumerate(steps):
        name = step.name
        known[f"call{place}"] = (_public(step) if fast else None) or step.call
        given = [_text(x, known) for x in step.args] + [f"{key}={_text(x, known)}" for key, x in step.kwargs.items()]
        line = f"call{place}({', '.join(given)})"
        if step.read is not None:
            line = f"{step.uses[0]}.item()" if name == READ else line
            lines.append(f"if {line} != {_text(step.read, known)}: return None")
        else:
            lines.append(f"{', '.join(step.found)}{',' if step.several else ''} = {line}")
        done = [x for x in {*step.uses, *step.found} if last[x] == place and x not in kept]
        lines += [f"del {', '.join(sorted(done))}"] if done else []
    source = f"def run(given):\n {''.join(f'given{place}, ' for place in range(many))}= given\n "
    exec(source + "\n ".join([*lines, f"return {_text(results, known)}"]), known)
    found: Tape = known["run"]
    return found


def _public(step: _Step) -> Any:
    """Torch's function of an operator's name, which takes two thirds of the time of the operator itself; or None."""
    name = step.name
    if name == "_to_copy" and step.kwargs.keys() == {"dtype"}:
        return Tensor.to
    if name.startswith("linalg_"):
        return getattr(torch.linalg, name.removeprefix("linalg_"), None)
    return None if name in OTHER else getattr(torch, name, None) or getattr(Tensor, name, None)


def _text(x: Any, known: dict[str, Any]) -> str:
    """An argument as Python text; one that has none is put among the known values."""
    if isinstance(x, _Name):
        return x.text
    if isinstance(x, list | tuple):
        return f"[{', '.join(_text(each, known) for each in x)}]"
    if type(x) in (int, bool, type(None)):
        return repr(x)
    name = f"value{len(known)}"
    known[name] = x
    return name
