"""The notebooks of examples/ run from top to bottom on little data, and are kept without what depends on a machine."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path

import matplotlib
import nbformat
import pytest
from packaging.version import Version

import nearfar

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from notebooks import FOLDER, cleared, executed  # noqa: E402

SMALL = {
    "first_model": {"STEPS": 2, "PICTURES": 200},
    "from_pml": {"SIZES": (16, 32), "REPEATS": 1},
    "text": {"STEPS": 3, "FILE": None},
    "worst_case": {"CLASSES": 8, "DRAWS": 50},
}
PATHS = sorted(FOLDER.glob("*.ipynb"))
books = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
# folders of some machine, and addresses of objects
MACHINE = re.compile(r"/(home|root|Users|tmp|work|var|usr|opt|mnt)/|[A-Z]:\\|0x[0-9a-f]{6,}|\.venv|site-packages")


def read(path: Path):
    return nbformat.read(path, as_version=4)


def drawn(book) -> list[str]:
    return [
        output.data["image/png"]
        for cell in book.cells
        for output in cell.get("outputs", ())
        if "image/png" in output.get("data", {})
    ]


def test_every_notebook_has_small_numbers():
    assert {path.stem for path in PATHS} == set(SMALL)


@pytest.mark.skipif(
    Version(matplotlib.__version__) < Version("3.9"), reason="IPython shows figures of older matplotlib a cell late"
)
@books
def test_the_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(nearfar.__file__).parents[1]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.delenv("MPLBACKEND", raising=False)  # else nothing is drawn inline
    kept = len(drawn(read(path)))
    book = executed(read(path), tmp_path, SMALL[path.stem])  # a cell that fails is an error
    measured = sum("measured" in cell.metadata.get("tags", ()) for cell in book.cells)
    assert len(drawn(book)) == kept + measured
    wrong = [output.text for cell in book.cells for output in cell.get("outputs", ()) if output.get("name") == "stderr"]
    assert wrong == []  # no warnings either
    assert len(drawn(cleared(book))) == kept
    assert all(output.output_type == "display_data" for cell in book.cells for output in cell.get("outputs", ()))


@books
def test_the_notebook_is_kept_without_what_depends_on_the_machine(path):
    book = read(path)
    nbformat.validate(book)
    for cell in book.cells:
        assert not MACHINE.search(cell.source)
        assert set(cell.metadata) <= {"tags"}
        if cell.cell_type == "code":
            assert cell.execution_count is None
            for output in cell.outputs:
                assert (output.output_type, list(output.data)) == ("display_data", ["image/png"])
    assert set(book.metadata) == {"kernelspec", "language_info"}
    assert drawn(book)
    assert path.stat().st_size < 150_000


@books
def test_the_notebook_reads_well(path):
    """It begins with a title, has one cell of parameters, and short cells with a sentence before each."""
    cells = read(path).cells
    assert cells[0].source.startswith("# ")
    assert sum("parameters" in cell.metadata.get("tags", ()) for cell in cells) == 1
    for before, cell in itertools.pairwise(cells):
        assert len(cell.source.splitlines()) <= 25, cell.source
        assert max(map(len, cell.source.splitlines())) <= 125, cell.source
        if cell.cell_type == "code":
            assert before.cell_type == "markdown", cell.source
            assert before.source[-1] in ".:?)`", before.source


def test_the_guard_itself():
    for text in ("/home/me/x", r"C:\x", "<Generator at 0x7ff52111d630>"):
        assert MACHINE.search(text)
    assert not MACHINE.search("a / b, values/weights, 0x1F")
