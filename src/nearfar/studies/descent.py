"""Gradient descent on the triplet margin loss (Jaffe 2020): its figures, tests of its claims, and extensions.

`reproduce(folder)` draws six pictures and writes descent.json: Figure 1 (loss surface) and Figure 2 (three steps,
printed and true), the bounds 2.8-2.10 against a run, the extensions, the saddles, and the comparison with the
contrastive loss and linear SVMs. docs/papers/jaffe-2020.md discusses them.
"""

import json
from pathlib import Path
from typing import Any

from nearfar._utils.extras import need
from nearfar._utils.files import write_text
from nearfar._utils.tables import round_numbers
from nearfar.studies import _descent_figures as figures
from nearfar.studies import _descent_runs as runs
from nearfar.studies._descent_errata import errata
from nearfar.studies._descent_rivals import hyperplanes, rivals

__all__ = ["reproduce"]


def reproduce(folder: str | Path, *, quick: bool = False) -> dict[str, Any]:
    """Run the study, draw its figures, and write its results.

    Args:
        folder: the folder for descent-*.png and descent.json; created if missing.
        quick: fewer draws, steps and splits: the same figures with less data, in seconds instead of minutes.

    Returns:
        The content of descent.json.
    """
    need("sklearn", "reproduce descent", "studies")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {
        "surface": runs.surfaces(21 if quick else 61),
        "appendix": runs.appendix(),
        "bounds": runs.bounds(),
        "extensions": runs.extensions(20 if quick else 80),
        "saddles": runs.saddles(30 if quick else 160),
        "rivals": rivals(2, ("wine",), steps=10) if quick else rivals(),
        "hyperplanes": hyperplanes(2, 10) if quick else hyperplanes(),
        "errata": errata(100 if quick else 2000),
    }
    for name in ("surface", "appendix", "bounds", "extensions", "saddles", "rivals"):
        getattr(figures, name)(found[name], folder / f"descent-{name}.png")
    text = json.dumps(round_numbers(found, 7), indent=1, ensure_ascii=False, allow_nan=False)
    write_text(folder / "descent.json", text + "\n")
    return found
