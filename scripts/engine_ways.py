"""The losses whose large batches do not run on the operators everywhere, by their plans; for docs/guides/engines.md.

python scripts/engine_ways.py            write the table anew

`tests/engines/test_fused.py` holds the page to it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import nearfar as nf
from nearfar.engines import Plan, make_plan
from nearfar.engines.learned import lift
from nearfar.groups._groupings import Product

PAGE = Path(__file__).resolve().parents[1] / "docs" / "guides" / "engines.md"
HEAD = ("| loss | large batches |", "|---|---|")
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


def losses() -> Iterator[tuple[str, Product]]:
    """Every public loss as its engine sees it."""
    for name in sorted(name for name in L.__all__ if issubclass(getattr(L, name), nf.RobustLoss)):
        if "classes" in inspect.signature(getattr(L, name)).parameters:
            yield name, getattr(L, name)(4, 5).product
        else:
            yield name, getattr(L, name)(**MORE.get(name, {})).product
    for name, make in VARIANTS.items():
        yield name, make().product


def plan_of(product: Product) -> Plan:
    """The plan of a loss without the numbers that it learns by default."""
    lifted = lift(product)
    return make_plan((product if lifted is None else lifted.product).at(64))


def way(plan: Plan) -> str | None:
    """How a plan deviates from operators on every device; None where it does not."""
    if plan.refused is not None:
        return f"{'strips' if plan.refused_strips is None else 'dense'}, because {plan.refused}"
    return None if plan.refused_kernels is None else f"on a GPU in PyTorch, because {plan.refused_kernels}"


def table() -> list[str]:
    """The lines of the table."""
    found = ((name, way(plan_of(product))) for name, product in losses())
    return [*HEAD, *(f"| `{name}` | {how} |" for name, how in found if how is not None)]


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
