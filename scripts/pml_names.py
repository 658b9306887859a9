"""Which names of pytorch-metric-learning are ours and which are its own: written into docs/start/from-pml.md.

python scripts/pml_names.py            write the table anew

`tests/test_pml_names.py` holds the page to it.
"""

from __future__ import annotations

from pathlib import Path

from nearfar.pml._theirs import MODULES, NAMES, is_ours

PAGE = Path(__file__).resolve().parents[1] / "docs" / "start" / "from-pml.md"
HEAD = ("| module | ours | PML's own |", "|---|---|---|")


def table() -> list[str]:
    """The lines of the table."""
    lines = list(HEAD)
    for module in MODULES:
        names = NAMES[module].split() if module in NAMES else []
        ours = [f"`{name}`" for name in names if is_ours(module, name)]
        others = [f"`{name}`" for name in names if not is_ours(module, name)]
        lines.append(f"| `{module}` | {' '.join(ours)} | {' '.join(others) if names else 'all of it'} |")
    return lines


def shown(page: str) -> list[str]:
    """The lines of the table that a page holds."""
    return page[page.index(HEAD[0]) :].split("\n\n")[0].splitlines()


def main() -> None:
    """Write the table into the page."""
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(page.replace("\n".join(shown(page)), "\n".join(table())), encoding="utf-8")
    print(f"{PAGE.name} has {len(table()) - len(HEAD)} modules")


if __name__ == "__main__":
    main()
