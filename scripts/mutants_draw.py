"""Mutants of the sources: one small change each, found in the syntax tree and drawn with a fixed seed.

A mutant is named by its module, its function, what stands there and what comes instead; never by a line, so that the
same ones are drawn after code elsewhere has moved.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

__all__ = ["KINDS", "SOURCE", "Mutant", "Place", "draw", "mutants_of", "offsets"]

SOURCE = Path(__file__).resolve().parents[1] / "src" / "nearfar"
KINDS = ("comparison", "constant", "sign", "drop", "branch")
SHOWN = {"__repr__", "__str__", "extra_repr"}
"""Functions whose result is only read by people."""
SPOKEN = {"warn", "TypeVar", "cast", "NewType"}
"""Calls whose arguments are messages or types."""
COMPARED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
COMBINED = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
PRIVATE = re.compile(
    r"/_(?!kernels|disk_files|disk_recall|exact_search|faiss|rank_counting|ranking_keys|top_k|cache|device_samples"
    r"|glyphs|pixel_file|resample|shard_scan|tables|_)"
)
"""The underscore of modules that got it after the mutants were first drawn, and keep their names in the draw."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Place:
    """Where a node stands.

    Attributes:
        names: of the classes and functions around it.
        function: the innermost function, or None.
        owner: the innermost class, or None.
        statement: the innermost statement of the function, or None in its head.
        assigned: the name that a statement outside all functions assigns.
        kernel: whether a function around it is compiled by Triton.
    """

    names: tuple[str, ...] = ()
    function: Function | None = None
    owner: ast.ClassDef | None = None
    statement: ast.stmt | None = None
    assigned: str = ""
    kernel: bool = False

    def inside(self, **more: object) -> Place:
        """The same place, but for what is given."""
        return Place(**{**vars(self), **more})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes:
        path: of the file, below the package.
        kind: of the change.
        before: what stands there, on one line.
        after: what comes instead.
        number: among changes that are otherwise called the same.
        place: where it stands.
        start: its first byte in the file.
        end: the byte after its last.
        line: its line now, for people.
    """

    path: str
    kind: str
    before: str
    after: str
    number: int
    place: Place
    start: int
    end: int
    line: int

    @property
    def name(self) -> str:
        """Says which it is, without a line."""
        again = f" #{self.number}" if self.number else ""
        path = PRIVATE.sub("/", self.path)
        return f"{path}::{'.'.join(self.place.names)} {self.kind}: {self.before} -> {self.after}{again}"

    @property
    def key(self) -> str:
        """A short name."""
        return hashlib.sha256(self.name.encode()).hexdigest()[:12]

    @property
    def package(self) -> str:
        """The folder of the package that it is drawn for."""
        return self.path.split("/")[0]

    def apply(self, content: bytes) -> bytes:
        """The file with this change."""
        return content[: self.start] + self.after.encode() + content[self.end :]


def offsets(content: bytes) -> list[int]:
    """The first byte of each line."""
    found = [0]
    for line in content.splitlines(keepends=True):
        found.append(found[-1] + len(line))
    return found


def draw(packages: list[str], each: int, seed: int) -> list[Mutant]:
    """So many of each package, the kinds in turn, in an order that the seed and their names decide."""
    found = []
    for package in packages:
        there = [m for path in sorted((SOURCE / package).rglob("*.py")) for m in mutants_of(path)]
        there.sort(key=lambda m: hashlib.sha256(f"{seed} {m.name}".encode()).digest())
        turns = zip_longest(*([m for m in there if m.kind == kind] for kind in KINDS))
        found += [m for turn in turns for m in turn if m is not None][:each]
    return found


def mutants_of(path: Path) -> list[Mutant]:
    """All mutants of a file, in the order of its text."""
    content = path.read_bytes()
    begins, counts, found = offsets(content), dict[tuple[object, ...], int](), []
    every = list(_walk(ast.parse(content), Place()))
    branches = {id(node) for node, _, kind, _ in every if kind == "branch"}
    for node, place, kind, after in every:
        if kind != "branch" and id(node) in branches and _negated(node):
            continue  # the same as the swapped branches
        start = begins[node.lineno - 1] + node.col_offset
        end = begins[node.end_lineno - 1] + node.end_col_offset
        before = " ".join(content[start:end].decode().split())
        key = (place.names, kind, before, after)
        counts[key] = counts.get(key, -1) + 1
        relative = path.relative_to(SOURCE).as_posix()
        found.append(Mutant(relative, kind, before, after, counts[key], place, start, end, node.lineno))
    return found


Found = tuple[ast.AST, Place, str, str]


def _walk(node: ast.AST, place: Place) -> Iterator[Found]:
    """What can change in a node and below it."""
    if isinstance(node, Function):
        yield from _function(node, place)
    elif isinstance(node, ast.ClassDef):
        inner = place.inside(names=(*place.names, node.name), owner=node, statement=None)
        for child in node.body:
            yield from _walk(child, inner)
    else:
        if isinstance(node, ast.stmt):
            name = _target(node)
            if _says_nothing(node, name):
                return
            place = place.inside(statement=node) if place.function else place.inside(assigned=name)
            yield from _dropped(node, place)
        yield from _changed(node, place)
        for child in _below(node):
            yield from _walk(child, place)


def _function(node: Function, place: Place) -> Iterator[Found]:
    if node.name in SHOWN:
        return
    kernel = place.kernel or any("jit" in ast.unparse(x) for x in node.decorator_list)
    inner = place.inside(names=(*place.names, node.name), function=node, statement=None, kernel=kernel)
    for child in (*node.args.defaults, *node.args.kw_defaults, *node.body):
        if child is not None:
            yield from _walk(child, inner)


def _says_nothing(node: ast.stmt, name: str) -> bool:
    """Imports, docstrings, assertions, and what only type checkers read."""
    if isinstance(node, ast.Import | ast.ImportFrom | ast.Assert | ast.Global | ast.Nonlocal):
        return True
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return True
    return name == "__all__" or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def _target(node: ast.stmt) -> str:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return targets[0].id if isinstance(targets[0], ast.Name) else ""


def _below(node: ast.AST) -> Iterator[ast.AST]:
    """The children that are neither messages nor types."""
    if isinstance(node, ast.Raise | ast.JoinedStr):
        return
    if isinstance(node, ast.AnnAssign):
        if node.value is not None:
            yield node.value
        return
    if isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in SPOKEN:
            return
        if called in ("isinstance", "issubclass"):
            yield node.args[0]
            return
    yield from ast.iter_child_nodes(node)


def _dropped(node: ast.stmt, place: Place) -> Iterator[Found]:
    """A statement whose absence is no error of names by itself."""
    if place.function is None:
        return
    alone = isinstance(node, ast.Continue | ast.Break | ast.AugAssign | ast.Raise)
    call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await)
    early = isinstance(node, ast.Return) and node is not place.function.body[-1]
    kept = isinstance(node, ast.Assign) and all(not isinstance(x, ast.Name | ast.Tuple) for x in node.targets)
    if alone or call or early or kept or _again(node, place.function):
        yield node, place, "drop", "pass"


def _again(node: ast.stmt, function: Function) -> bool:
    """Whether a name is assigned that had a value before."""
    name = _target(node)
    if not isinstance(node, ast.Assign) or len(node.targets) != 1 or not name:
        return False
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    stored = (x for x in ast.walk(function) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store))
    earlier = any(x.id == name and x.lineno < node.lineno for x in stored)
    return earlier or any(x.arg == name for x in arguments)


def _changed(node: ast.AST, place: Place) -> Iterator[Found]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARED:
        new = copy.deepcopy(node)
        new.ops[0] = COMPARED[type(node.ops[0])]()
        yield node, place, "comparison", f"({ast.unparse(new)})"
    elif isinstance(node, ast.Constant):
        if (new_value := _other(node.value)) is not None:
            yield node, place, "constant", repr(new_value)
    elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in COMBINED and _adds(node, place):
        turned = copy.deepcopy(node)
        turned.op = COMBINED[type(node.op)]()  # type: ignore[assignment]
        yield node, place, "sign", f"({ast.unparse(turned)})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
        yield node, place, "sign", f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.If | ast.IfExp):
        yield node.test, place, "branch", f"(not ({ast.unparse(node.test)}))"


def _other(value: object) -> bool | int | float | None:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return (value * 2 or 1.0) if isinstance(value, float) else None


def _negated(node: ast.AST) -> bool:
    """Whether the change of a condition is its negation."""
    turned = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
    return isinstance(node, ast.UnaryOp) or (
        isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], turned)
    )


def _adds(node: ast.BinOp | ast.BoolOp, place: Place) -> bool:
    """Whether it computes: no text or path that is joined, and no union of types."""
    if isinstance(node, ast.BoolOp):
        return True
    if isinstance(node.op, ast.BitAnd | ast.BitOr) and place.function is None:
        return False
    joined = (ast.JoinedStr, ast.List, ast.Tuple, ast.Dict)
    sides = (node.left, node.right)
    return not any(isinstance(x, joined) or (isinstance(x, ast.Constant) and isinstance(x.value, str)) for x in sides)
