"""Which way each loss goes on a CPU and on a GPU: asked of the engines, written into docs/guides/engines.md.

python scripts/engine_ways.py            write the table anew

`tests/test_fused.py` holds the page to it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import torch

import nearfar as nf
from nearfar.engines.fused import unfused
from nearfar.engines.tiled import lean_way
from nearfar.groups.groupings import Product
from nearfar.relations.relation import Relation

PAGE = Path(__file__).resolve().parents[1] / "docs" / "guides" / "engines.md"
HEAD = ("| loss | CPU, `tiled` | GPU, `fused` |", "|---|---|---|")
L = nf.losses
MORE = {
    "DroTopK": {"k": 5},
    "DroTopKPN": {"k": 6},
    "DroTrimmed": {"top": 2, "k": 6},
    "DroTrimmedPN": {"wrong": 0.2, "k": 6},
    "DroChiSquare": {"rho": 1.0},
}
VARIANTS = {
    'Triplet(mining="hard")': lambda: L.Triplet(mining="hard"),
    'Triplet(mining="hardest")': lambda: L.Triplet(mining="hardest"),
    'Triplet(mining="semihard")': lambda: L.Triplet(mining="semihard"),
    "DroTopK(fraction=0.1)": lambda: L.DroTopK(fraction=0.1),
    'HAP2S(weights="polynomial")': lambda: L.HAP2S(weights="polynomial"),
}


def losses() -> Iterator[tuple[str, Product, Relation]]:
    """Every public loss, and a relation of plain labels as its engine sees it."""
    labels = torch.arange(12) // 3
    relation = nf.Relation.from_labels(labels)
    for name in sorted(L.__all__):
        if "classes" in inspect.signature(getattr(L, name)).parameters:
            loss = getattr(L, name)(4, 5)
            yield name, loss.product, loss._of_classes(torch.zeros(12, 5), labels)
        elif name == "NPair":
            yield name, L.NPair().product, relation.one_a_class()
        else:
            yield name, getattr(L, name)(**MORE.get(name, {})).product, relation
    for name, make in VARIANTS.items():
        yield name, make().product, relation


def table() -> list[str]:
    """The lines of the table."""
    lines = list(HEAD)
    for name, product, relation in losses():
        why = unfused(product, relation)
        lean = "lean" if lean_way(product, relation) is not None else "general"
        lines.append(f"| `{name}` | {lean} | {'kernels' if why is None else f'tiled: {why}'} |")
    return lines


def shown(page: str) -> list[str]:
    """The lines of the table that a page holds."""
    return page[page.index(HEAD[0]) :].split("\n\n")[0].splitlines()


def main() -> None:
    """Write the table into the page."""
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(page.replace("\n".join(shown(page)), "\n".join(table())), encoding="utf-8")
    print(f"{PAGE.name} has {len(table()) - len(HEAD)} ways")


if __name__ == "__main__":
    main()
