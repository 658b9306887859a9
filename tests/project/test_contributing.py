"""Follow CONTRIBUTING.md to the letter in a copy of the tree: five edits add a loss that passes every test it touches.

One class adds a set, which every engine and two processes compute; its shortcuts make it faster and nothing else.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from needs import lacking, need
from processes import count_passed, run_python

ROOT = next(path for path in Path(__file__).parents if (path / "pyproject.toml").is_file())
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
EXAMPLE = PAGE[PAGE.index("## Add a loss in an hour") :]
NAME = "DroContaminated"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", EXAMPLE, flags=re.DOTALL)


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{path.name} has {old!r} {text.count(old)} times"
    path.write_text(text.replace(old, new), encoding="utf-8")


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text(encoding="utf-8") + "\n\n" + text, encoding="utf-8")


def copy_tree(folder: Path) -> Path:
    for name in ("src/nearfar", "tests", "scripts"):
        shutil.copytree(ROOT / name, folder / name)  # with bytecode, which holds for all that is not changed
    for name in ("docs", "benchmarks", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for pattern in ("*.md", "*.toml", "*.yml", "*.cff", "conftest.py", "Makefile", "LICENSE", "constraints*.txt"):
        for path in ROOT.glob(pattern):
            shutil.copy(path, folder)
    return folder


def find(folder: Path, name: str, holds: str = "") -> Path:
    """The one file of the tests with this name that holds a text."""
    (found,) = (path for path in files(folder, name) if holds in path.read_text(encoding="utf-8"))
    return found


def files(folder: Path, name: str) -> list[Path]:
    """The files of the tests with this name, but for those of the interpreter, which other tests start."""
    return sorted(path for path in (folder / "tests").rglob(name) if path.parent.name != "interpreted")


def run_pytest(folder: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return run_python(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words, **more)


def add_the_set(folder: Path) -> None:
    append(folder / "src/nearfar/sets/linear.py", blocks("python")[0])
    change(folder / "src/nearfar/sets/__init__.py", "import Mean, Worst", "import Contaminated, Mean, Worst")
    change(folder / "src/nearfar/sets/__init__.py", '    "Dual",\n', '    "Contaminated",\n    "Dual",\n')
    append(folder / "tests/oracles/sets.py", blocks("python")[2])
    change(find(folder, "test_sets.py"), "CASES = {\n", "CASES = {\n" + blocks("text")[1])


SELECT = f"""
import inspect, re

EVERY_LOSS = re.compile(r"\\b(ROWS|SUBJECTS|losses\\.__all__|L\\.__all__|engine_ways)\\b")

def pytest_collection_modifyitems(items):
    items[:] = [
        item for item in items
        if "{NAME}" in item.nodeid or (hasattr(item, "function") and "[" not in item.name
                                       and EVERY_LOSS.search(inspect.getsource(item.function)))
    ]
"""
"""A plugin that selects what a new loss touches: tests with its name, and those that look at all losses at once."""


def files_of_losses(folder: Path) -> list[str]:
    """The test files that make tests from the rows of the table, or look at all losses."""
    words = re.compile(r"\b(table import|SUBJECTS|losses\.__all__|L\.__all__|engine_ways)\b")
    found = (path for path in files(folder, "test_*.py") if words.search(path.read_text(encoding="utf-8")))
    return [str(path.relative_to(folder)) for path in found]


def test_five_edits_add_a_loss_that_passes_all_it_touches(tmp_path):
    need("pytorch_metric_learning")  # for one of the tables
    pytest.importorskip("xdist")
    folder = copy_tree(tmp_path / "copy")
    add_the_set(folder)
    make_it_fast(folder)
    recipes = folder / "src/nearfar/losses/dro.py"
    change(recipes, "from nearfar.sets import KL,", "from nearfar.sets import KL, Contaminated,")
    append(recipes, blocks("python")[1])  # 1
    change(recipes, '["DroChiSquare", ', f'["DroChiSquare", "{NAME}", ')  # 2
    losses = find(folder, "test_*.py", "\ndef test_every_loss_has_a_row_and_an_oracle")
    without = run_pytest(folder, str(losses), "-k", "row_and_an_oracle or of_the_page")
    assert without.returncode == 1, without.stdout
    assert "2 failed" in without.stdout
    append(find(folder, "losses.py"), blocks("python")[3])  # 3
    change(find(folder, "table.py"), "VARIANTS = (\n", "VARIANTS = (\n" + blocks("text")[0])  # 4
    change(folder / "CHANGELOG.md", "## [Unreleased]\n", f"## [Unreleased]\n\n- `{NAME}`.\n")  # 5
    page = folder / "docs/guides/losses.md"
    if "<!-- table -->" not in page.read_text(encoding="utf-8"):  # not generated
        change(page, "| `LiftedStructure` |", f"| `{NAME}` | ... | - | - | - |\n| `LiftedStructure` |")
    for name in tables():
        written = run_python(folder, f"scripts/{name}.py")
        assert written.returncode == 0, written.stderr
    (folder / "select_tests.py").write_text(SELECT, encoding="utf-8")
    how = ("-p", "select_tests", "-p", "xdist.plugin", "-m", "not browser")  # xdist: fixtures ask for its worker
    path = os.pathsep.join((str(folder / "src"), str(folder)))
    done = run_pytest(folder, *how, *files_of_losses(folder), PYTHONPATH=path)
    assert count_passed(done) >= 100
    sets = run_pytest(folder, str(find(folder, "test_sets.py")), "-k", "ontaminated")
    assert count_passed(sets) >= 20


def tables() -> list[str]:
    """The scripts that `make tables` runs."""
    names = re.search(r"^TABLES := (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[1].split()
    return [name for name in names if (ROOT / "scripts" / f"{name}.py").is_file()]


WAYS = """
import nearfar as nf

def test_a_set_runs_in_strips_with_a_stream_and_without():
    for over in (nf.sets.ContaminatedPlain(), nf.sets.Contaminated()):
        for groups in ("batch", "anchor"):
            assert nf.RobustLoss(pair=nf.pairs.Hinge(), over=over, groups=groups).plan.refused_strips is None
"""


def make_it_fast(folder: Path) -> None:
    sets = folder / "src/nearfar/sets/linear.py"
    change(sets, "class Contaminated(UncertaintySet):", "class Contaminated(UncertaintySet, swift=True):")
    sets.write_text(sets.read_text(encoding="utf-8") + "\n" + blocks("python")[4], encoding="utf-8")


def keep_it_plain(folder: Path) -> None:
    """The class as it was before, beside the fast one and under a name of its own."""
    append(folder / "src/nearfar/sets/linear.py", re.sub(r"\bContaminated\b", "ContaminatedPlain", blocks("python")[0]))
    change(folder / "src/nearfar/sets/__init__.py", "import Contaminated,", "import Contaminated, ContaminatedPlain,")
    change(folder / "src/nearfar/sets/__init__.py", '    "Dual",\n', '    "ContaminatedPlain",\n    "Dual",\n')


def test_one_class_adds_a_set_on_every_engine_and_on_two_ranks(tmp_path):
    """The kernels run where there is an interpreter for them; processes meet on the loopback."""
    folder = copy_tree(tmp_path / "copy")
    add_the_set(folder)
    make_it_fast(folder)
    keep_it_plain(folder)
    (folder / "tests/test_ways.py").write_text(WAYS, encoding="utf-8")
    everywhere = [str(find(folder, f"test_{name}.py")) for name in ("ways", "own_parts", "sets", "every_set")]
    for path in everywhere:
        if reason := lacking(Path(path)):
            pytest.skip(reason)
    env = {"TRITON_INTERPRET": "1", "ONLY_SETS": "Contaminated"}
    done = run_pytest(folder, "-vv", *everywhere, "-k", "Contaminated or two_ranks or runs_in_strips", **env)
    assert count_passed(done) >= 1 + 2 * 8 + 1 + 20
    assert done.stdout.count("test_every_set.py::test_the_fused_engine_equals_dense") == 2 * 4
    assert done.stdout.count("test_every_set.py::test_two_ranks") == 1
    assert done.stdout.count("test_ways.py::") == 1
    assert done.stdout.count("tests/parts/test_own_parts.py::") >= 20


def test_plugins_that_are_installed_break_nothing(tmp_path):
    """A pytest that a test starts has none of them, whatever they do."""
    (tmp_path / "breaks.py").write_text("raise SystemExit('a plugin was loaded')", encoding="utf-8")
    told = tmp_path / "breaks-1.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: breaks\nVersion: 1\n", encoding="utf-8")
    (told / "entry_points.txt").write_text("[pytest11]\nbreaks = breaks\n", encoding="utf-8")
    (tmp_path / "test_one.py").write_text("def test_one():\n    pass\n", encoding="utf-8")
    loaded = run_pytest(tmp_path, "test_one.py", PYTHONPATH=str(tmp_path), PYTEST_DISABLE_PLUGIN_AUTOLOAD="")
    assert "a plugin was loaded" in loaded.stdout + loaded.stderr
    assert count_passed(run_pytest(tmp_path, "test_one.py", PYTHONPATH=str(tmp_path))) == 1


def test_the_page_counts_five():
    table = EXAMPLE[EXAMPLE.index("| | edit |") : EXAMPLE.index("Then run `make tables`")]
    assert len(re.findall(r"^\| \d \|", table, flags=re.MULTILINE)) == 5
