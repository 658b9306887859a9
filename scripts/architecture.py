"""The rooms of the package and who imports whom: read from the sources, drawn as docs/images/architecture.svg.

    python scripts/architecture.py            draw the picture anew
    python scripts/architecture.py --call     the files that one dense call of MultiSimilarity runs through

`tests/project/test_architecture.py` holds the sources against `LAYERS`, and the picture against the sources.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "nearfar"
PICTURE = ROOT / "docs" / "images" / "architecture.svg"

# Read from the bottom up: a room imports only from layers before its own, or from rooms to its left.
LAYERS = (
    ("_utils",),
    ("similarity", "pairs", "relations"),
    ("sets",),
    ("links", "miners", "groups"),
    ("engines",),
    ("losses", "distributed"),
    ("data", "evaluation", "batches", "geometry", "models", "integrations"),
    ("runs", "linear", "pml"),
    ("doctor", "report", "inspection", "serve", "plot", "bench", "train", "studies", "tune"),
    ("cli", "__main__"),
)
WORDS = {
    "_utils": "checks, files, sums over measures",
    "similarity": "how near two rows are",
    "pairs": "what a pair costs",
    "relations": "which pairs are positive",
    "sets": "which weights a worst case may choose",
    "links": "join two values",
    "miners": "which pairs enter",
    "groups": "which pairs share weights",
    "engines": "dense and tiled computation of the same numbers",
    "losses": "RobustLoss and its recipes",
    "distributed": "processes, memory, chunks",
    "data": "samples",
    "evaluation": "scores, search",
    "batches": "samplers",
    "geometry": "separation, collapse",
    "models": "networks",
    "integrations": "other trainers",
    "runs": "configuration, journal",
    "linear": "linear maps",
    "pml": "PML's names",
    "doctor": "names a collapse",
    "report": "one page",
    "inspection": "copies, wrong labels",
    "serve": "answers",
    "plot": "pictures",
    "train": "the loop",
    "studies": "the papers",
    "tune": "search of keys",
    "bench": "time, memory",
    "cli": "nearfar COMMAND",
    "__main__": "",
}


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("nearfar", *path.relative_to(PACKAGE).with_suffix("").parts)
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imported(name: str, path: Path, known: Mapping[str, Path]) -> set[str]:
    """The modules of the package that one of them imports: at its top, inside functions, and by `import_module`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "nearfar":
            for alias in node.names:
                deeper = f"{node.module}.{alias.name}"
                found.add(deeper if deeper in known else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "nearfar"}
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "import_module" and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant) and first.value in known:
                found.add(str(first.value))
    return found - {name}


@functools.cache
def graph() -> dict[str, set[str]]:
    """Module -> the modules it imports; the front door `nearfar` itself is left out."""
    known = modules()
    return {name: imported(name, path, known) - {"nearfar"} for name, path in known.items() if name != "nearfar"}


def room(module: str) -> str:
    """The first name below the package."""
    return module.split(".")[1]


def rooms() -> dict[str, set[str]]:
    """Room -> the rooms it imports from."""
    found: dict[str, set[str]] = {}
    for name, others in graph().items():
        found.setdefault(room(name), set()).update(room(other) for other in others)
    return {name: others - {name} for name, others in found.items()}


def cycle(edges: Mapping[str, set[str]]) -> list[str]:
    """One circle of imports, or nothing."""
    done: set[str] = set()

    def search(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        for other in sorted(edges.get(node, ())):
            found = search(other, [*path, node])
            if found:
                return found
        done.add(node)
        return []

    return next((found for node in sorted(edges) if (found := search(node, []))), [])


WIDE, TALL, GAP, SIDE = 1060, 64, 34, 20


def boxes() -> Iterator[tuple[str, float, float, float]]:
    """Each room with the left edge, top and width of its box; the first layer lies at the bottom."""
    shown = [[name for name in layer if name != "__main__"] for layer in LAYERS]
    for depth, layer in enumerate(shown):
        top = SIDE + (len(shown) - 1 - depth) * (TALL + GAP)
        width = (WIDE - 2 * SIDE - GAP * (len(layer) - 1)) / len(layer)
        for place, name in enumerate(layer):
            yield name, SIDE + place * (width + GAP), top, width


def picture() -> str:
    """The SVG: a box a room, an arrow for each import that no other path implies."""
    edges, places = rooms(), {name: (left, top, width) for name, left, top, width in boxes()}
    tall = 2 * SIDE + len(LAYERS) * TALL + (len(LAYERS) - 1) * GAP
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {tall}" font-family="sans-serif">',
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#7b858f"/></marker></defs>',
        f'<rect width="{WIDE}" height="{tall}" fill="#ffffff"/>',
    ]
    for name in sorted(places):
        lines += [_arrow(places[name], places[other]) for other in sorted(_direct(name, edges) & set(places))]
    for name, (left, top, width) in places.items():
        middle = f'x="{left + width / 2:.0f}"'
        lines += [
            f'<rect x="{left:.0f}" y="{top:.0f}" width="{width:.0f}" height="{TALL}" rx="8" fill="#eef3f8" '
            'stroke="#35618e"/>',
            f'<text {middle} y="{top + 28:.0f}" text-anchor="middle" font-size="17" fill="#16324f">{name}</text>',
            f'<text {middle} y="{top + 48:.0f}" text-anchor="middle" font-size="12" fill="#455">{WORDS[name]}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _direct(name: str, edges: Mapping[str, set[str]]) -> set[str]:
    """What a room imports and reaches through no other room that it imports."""
    return {other for other in edges[name] if not any(other in _below(via, edges) for via in edges[name] - {other})}


def _below(name: str, edges: Mapping[str, set[str]]) -> set[str]:
    found = set(edges.get(name, ()))
    for other in list(found):
        found |= _below(other, edges)
    return found


def _arrow(start: tuple[float, float, float], end: tuple[float, float, float]) -> str:
    """From the foot of one box to the head of another, or from side to side in one layer."""
    (left, top, width), (other, below, wide) = start, end
    if top == below and left - other - wide <= GAP + 1:  # neighbors
        x1, x2, y = (left, other + wide, top + TALL / 2)
        return f'<path d="M{x1:.0f} {y:.0f} L{x2:.0f} {y:.0f}" stroke="#7b858f" marker-end="url(#head)"/>'
    if top == below:  # over the boxes between them
        x1, x2, y = (left + 0.35 * width, other + 0.65 * wide, top)
        bend = f"C{x1 - 20:.0f} {y - 26:.0f} {x2 + 20:.0f} {y - 26:.0f} {x2:.0f} {y:.0f}"
        return f'<path d="M{x1:.0f} {y:.0f} {bend}" fill="none" stroke="#7b858f" marker-end="url(#head)"/>'
    share = min(max((other + wide / 2 - left) / width, 0.1), 0.9)
    x1, x2 = left + share * width, other + wide * min(max((left + share * width - other) / wide, 0.1), 0.9)
    y1, y2 = top + TALL, below
    bend = f"C{x1:.0f} {y1 + 30:.0f} {x2:.0f} {y2 - 30:.0f} {x2:.0f} {y2:.0f}"
    return f'<path d="M{x1:.0f} {y1:.0f} {bend}" fill="none" stroke="#7b858f" marker-end="url(#head)"/>'


def files_of_call() -> list[str]:
    """The files of the package in which a dense call of MultiSimilarity runs a line, in the order they are entered."""
    import torch

    import nearfar as nf

    loss = nf.losses.MultiSimilarity(engine="dense")
    rows, labels = torch.randn(8, 4, requires_grad=True), torch.arange(8) // 2
    loss(rows, labels)  # what is done once is done
    found: dict[str, None] = {}

    def note(frame: object, event: str, argument: object) -> None:
        file = frame.f_code.co_filename  # type: ignore[attr-defined]
        if event == "call" and file.startswith(str(PACKAGE)):
            found[str(Path(file).relative_to(PACKAGE).as_posix())] = None

    sys.setprofile(note)
    try:
        loss(rows, labels)
    finally:
        sys.setprofile(None)
    return list(found)


def main() -> None:
    """Draw the picture, or list the files of a call."""
    if "--call" in sys.argv:
        files = files_of_call()
        print("\n".join([f"{len(files)} files", *files]))
        return
    PICTURE.write_text(picture(), encoding="utf-8")
    print(f"{PICTURE.relative_to(ROOT)} is drawn")


if __name__ == "__main__":
    main()
