"""The public names of the package, read from the sources, and one reference page for each room.

A name is public where a public module lists it in `__all__`. What the package, a room, or a module that a room lists
offers is shown with its docstring, once; what the files inside a room offer each other stands in a table at the end of
the room's page. `tests/project/test_site.py` compares the pages with what Python itself imports.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterator
from pathlib import Path

from architecture import modules, room

FRONT = "nearfar"


@functools.cache
def sources() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    return modules()


@functools.cache
def tree(module: str) -> ast.Module:
    """The parsed source of a module."""
    return ast.parse(sources()[module].read_text(encoding="utf-8"))


def public_modules() -> list[str]:
    """Modules without an underscore in their path, shortest path first; commands are not for import."""
    names = [name for name in sources() if not any(part.startswith("_") for part in name.split("."))]
    shown = [name for name in names if not f"{name}.".startswith("nearfar.cli.")]
    return sorted(shown, key=lambda name: (name.count("."), name))


def listed(module: str) -> list[str]:
    """What a module offers: its `__all__`, which may be a list, or added up from lists of modules below."""
    found: list[str] = []
    for node in tree(module).body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) or node.value is None:
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if ast.unparse(target) != "__all__":
            continue
        if isinstance(node.value, ast.List):
            found += ast.literal_eval(node.value)
        else:
            found += listed(f"{module}.{ast.unparse(node.value).removesuffix('.__all__')}")
    return found


def origin(module: str, name: str) -> str:
    """The dotted path at which a name of a module is defined."""
    late = [each for node in tree(module).body if isinstance(node, ast.If) for each in node.body]  # for type checkers
    for node in [*tree(module).body, *late]:
        if isinstance(node, ast.ImportFrom) and node.module in sources() and node.module != module:
            for alias in node.names:
                if (alias.asname or alias.name) == name or (alias.name == "*" and name in listed(str(node.module))):
                    return origin(str(node.module), name if alias.name == "*" else alias.name)
    return f"{module}.{name}"


def defines(module: str, name: str) -> bool:
    """Whether a module defines a name itself, and does not fetch it from another package."""
    for node in tree(module).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            return True
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if name in {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}:
                return True
    return False


def words(module: str, name: str) -> str:
    """The docstring of a class or a function, or the string below a constant."""
    body = tree(module).body
    for node, after in zip(body, [*body[1:], ast.Pass()], strict=True):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            return ast.get_docstring(node) or ""
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and ast.unparse(node).split(" ")[0].strip(":") == name:
            said = after.value if isinstance(after, ast.Expr) else None
            return str(said.value) if isinstance(said, ast.Constant) else ""
    return ""


def summary(path: str) -> str:
    """The first sentence of what is said of a name, fit for the cell of a table."""
    module, _, name = path.rpartition(".")
    first = inspect.cleandoc(words(module, name)).split("\n\n")[0]
    return " ".join(first.split()).replace("|", r"\|")


def offered() -> list[str]:
    """The rooms, the modules that a room lists as its own, and the package itself, which comes last."""
    rooms = [name for name in public_modules() if name.count(".") == 1]
    below = [f"{name}.{each}" for name in rooms for each in listed(name) if f"{name}.{each}" in sources()]
    kept = [name for name in below if origin(*name.rsplit(".", 1)) == name]
    return [*rooms, *kept, FRONT]


def entries(names: list[str], seen: set[str]) -> Iterator[tuple[str, str, str]]:
    """Each name of some modules that was not seen yet: its page, its path there, and where it is defined."""
    for module in names:
        for name in listed(module):
            path = origin(module, name)
            if path not in seen and path not in sources() and defines(*path.rsplit(".", 1)):
                seen.add(path)
                yield (FRONT if module == FRONT else room(module)), f"{module}.{name}", path


@functools.cache
def shown() -> tuple[list[tuple[str, str, str]], list[tuple[str, str, str]]]:
    """All public names: those that are offered, and those inside."""
    seen: set[str] = set()
    return list(entries(offered(), seen)), list(entries(public_modules(), seen))


def front() -> list[str]:
    """The rows of the package's own page: what `import nearfar as nf` shows."""
    places = {path: name for _, name, path in shown()[0]}
    rows = []
    for name in listed(FRONT):
        path = origin(FRONT, name)
        link, words = (f"[{places[path]}]", summary(path)) if path in places else (f"({name}.md)", about(path))
        rows.append(f"| [`{name}`]{link} | {words} |")
    return rows


def about(module: str) -> str:
    """The first paragraph of a module's docstring, fit for the cell of a table."""
    return " ".join((ast.get_docstring(tree(module)) or "").split("\n\n")[0].split()).replace("|", r"\|")


def page(name: str) -> str:
    """The Markdown of a room: a table of what it offers, each of them, and a table of what is inside."""
    module = FRONT if name == FRONT else f"{FRONT}.{name}"
    names, inner = ([(label, path) for where, label, path in part if where == name] for part in shown())
    rows = [f"| [`{label.removeprefix(f'{module}.')}`][{label}] | {summary(path)} |" for label, path in names]
    parts = [f"# {module}", ast.get_docstring(tree(module)) or "" if module in sources() else ""]
    parts += ["\n".join(["| name | |", "|---|---|", *(front() if name == FRONT else rows)])] if rows else []
    parts += [f"::: {label}" for label, _ in names]
    if inner:
        rows = [
            f'| <code id="{label}">{label.removeprefix(f"{module}.")}</code> | {summary(path)} |'
            for label, path in inner
        ]
        parts += [
            "## Inside this room",
            "What its files offer each other; [the promise of versions](../versions.md) is not about these.",
        ]
        parts += ["\n".join(["| name | |", "|---|---|", *rows])]
    return "\n\n".join(parts)


@functools.cache
def pages() -> dict[str, str]:
    """Page name -> Markdown."""
    rooms = {where for part in shown() for where, _, _ in part} - {FRONT}
    return {name: page(name) for name in (FRONT, *sorted(rooms))}
