"""The classes of pytorch-metric-learning that nearfar computes: written into docs/start/from-pml.md.

python scripts/pml_names.py            write the table anew

`tests/pml/test_modules.py` compares the page with it.
"""

from __future__ import annotations

from pathlib import Path

from nearfar.pml import losses, miners

PAGE = Path(__file__).resolve().parents[1] / "docs" / "start" / "from-pml.md"
HEAD = ("| class | ours runs from (rows on a CPU): no tuple | with a tuple | with a reference |", "|---|---|---|---|")


def table() -> list[str]:
    """The lines of the table."""
    lines = list(HEAD)
    for name in losses.__all__:
        if not hasattr(getattr(losses, name), "recipe"):  # with class vectors
            lines.append(f"| `losses.{name}` | any | PML | |")
            continue
        loss = getattr(losses, name)()
        alone, listed = loss.least
        tuples = rows(listed) if loss.tuples else "PML"
        lines.append(f"| `losses.{name}` | {rows(alone)} | {tuples} | {'yes' if loss.references else 'PML'} |")
    lines += [f"| `miners.{name}` | {rows(getattr(miners, name).least)} | | yes |" for name in miners.__all__]
    return lines


def rows(least: int) -> str:
    """The number of rows from which our code runs."""
    return str(least) if least else "any"


def shown(page: str) -> list[str]:
    """The lines of the table that a page has."""
    return page[page.index(HEAD[0]) :].split("\n\n")[0].splitlines()


def main() -> None:
    """Write the table into the page."""
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(page.replace("\n".join(shown(page)), "\n".join(table())), encoding="utf-8")


if __name__ == "__main__":
    main()
