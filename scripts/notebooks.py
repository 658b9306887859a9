"""Run the notebooks of examples/ and keep their pictures: numbers and tables are cleared, they depend on the machine.

So do pictures of time: those of cells that are tagged "measured" are cleared too.

    python scripts/notebooks.py                  all of them
    python scripts/notebooks.py first_model      one

`tests/project/test_notebooks.py` runs them with small numbers in their cell of parameters.
"""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[1] / "examples"
COLORS = 64
"""Of a picture: plots have few, and a notebook in a repository should be small."""


def executed(book: Any, folder: Path, parameters: Mapping[str, object] | None = None) -> Any:
    """Run every cell in a kernel of its own, in `folder`; parameters take the place of the cell that is tagged so."""
    for cell in book.cells:
        if parameters is not None and "parameters" in cell.metadata.get("tags", ()):
            cell.source = "\n".join(f"{name} = {value!r}" for name, value in parameters.items())
    client = NotebookClient(book, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    client.execute()
    return book


def cleared(book: Any) -> Any:
    """Without counters, times and outputs, but for pictures of what any machine would draw."""
    for cell in book.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.execution_count = None
            drawn = [output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", {})]
            drawn = [] if "measured" in cell.metadata.get("tags", ()) else drawn
            cell.outputs = [nbformat.v4.new_output("display_data", {"image/png": smaller(each)}) for each in drawn]
    book.metadata = {"kernelspec": book.metadata.kernelspec, "language_info": {"name": "python"}}
    return book


def smaller(picture: str) -> str:
    """A PNG in base64 with fewer colors."""
    from PIL import Image

    buffer = io.BytesIO()
    drawn = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")
    drawn.quantize(COLORS, dither=Image.Dither.NONE).save(buffer, format="PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def main() -> None:
    """Run the notebooks that were named, or all, and write them back."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        if sys.argv[1:] and path.stem not in sys.argv[1:]:
            continue
        book = executed(nbformat.read(path, as_version=4), FOLDER)
        path.write_text(nbformat.writes(cleared(book), indent=1) + "\n", encoding="utf-8")
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
