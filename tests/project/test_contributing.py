"""CONTRIBUTING.md followed to the letter in a copy of the sources: six edits add a loss that passes every test.

And one class adds a set, which every engine and two processes compute; its shortcuts make it faster and nothing else.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from processes import count_passed, run_python

ROOT = Path(__file__).parents[2]
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


def copied(folder: Path) -> Path:
    for name in ("src/nearfar", "tests", "scripts"):
        shutil.copytree(ROOT / name, folder / name)  # with bytecode, which holds for all that is not changed
    (folder / "docs/guides").mkdir(parents=True)
    shutil.copy(ROOT / "docs/guides/losses.md", folder / "docs/guides/losses.md")
    shutil.copy(ROOT / "pyproject.toml", folder / "pyproject.toml")
    return folder


def tried(folder: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return run_python(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words, **more)


def add_the_set(folder: Path) -> None:
    append(folder / "src/nearfar/sets/linear.py", blocks("python")[0])
    change(folder / "src/nearfar/sets/__init__.py", "import Mean, Worst", "import Contaminated, Mean, Worst")
    change(folder / "src/nearfar/sets/__init__.py", '    "Dual",\n', '    "Contaminated",\n    "Dual",\n')
    append(folder / "tests/oracles/sets.py", blocks("python")[2])
    change(folder / "tests/sets/test_sets.py", "CASES = {\n", "CASES = {\n" + blocks("text")[1])


def test_six_edits_add_a_loss(tmp_path):
    folder = copied(tmp_path / "copy")
    add_the_set(folder)
    recipes = folder / "src/nearfar/losses/dro.py"
    change(recipes, "from nearfar.sets import KL,", "from nearfar.sets import KL, Contaminated,")
    append(recipes, blocks("python")[1])  # 1
    change(recipes, '"DroChiSquare", ', f'"DroChiSquare", "{NAME}", ')  # 2
    without = tried(folder, "tests/losses/test_oracle_values.py", "-k", "row_and_an_oracle or of_the_page")
    assert without.returncode == 1, without.stdout
    assert "2 failed" in without.stdout
    append(folder / "tests/oracles/losses.py", blocks("python")[3])  # 3
    change(folder / "tests/support/table.py", "TOLD = (\n", "TOLD = (\n" + blocks("text")[0])  # 4
    page = folder / "docs/guides/losses.md"
    change(
        page, "| `LiftedStructure` |", f"| `{NAME}` | ... | - | - | - |\n| `LiftedStructure` |"
    )  # 5; 6 is CHANGELOG.md
    done = tried(
        folder,
        "tests/losses/test_oracle_values.py",
        "tests/sets/test_sets.py",
        "-k",
        "ontaminated or row_and_an or of_the_page",
    )
    assert count_passed(done) >= 20


WAYS = """
import nearfar as nf
from nearfar.engines import untiled

def test_strips_of_the_batch_need_a_stream_and_those_of_an_anchor_none():
    for over, wanted in ((nf.sets.ContaminatedPlain(), [False, True]), (nf.sets.Contaminated(), [True, True])):
        losses = (nf.RobustLoss(pair=nf.pairs.Hinge(), over=over, groups=groups) for groups in ("batch", "anchor"))
        assert [untiled(loss.product) is None for loss in losses] == wanted
"""
"""Whether strips can be made: of the whole batch, of the pairs of an anchor."""


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
    folder = copied(tmp_path / "copy")
    add_the_set(folder)
    make_it_fast(folder)
    keep_it_plain(folder)
    (folder / "tests/test_ways.py").write_text(WAYS, encoding="utf-8")
    named = ("test_ways", "parts/test_own_parts", "sets/test_sets", "properties/test_every_set")
    everywhere = [f"tests/{name}.py" for name in named]
    told = {"TRITON_INTERPRET": "1", "ONLY_SETS": "Contaminated"}
    done = tried(folder, "-vv", *everywhere, "-k", "Contaminated or two_ranks or strips_of_the_batch", **told)
    assert count_passed(done) >= 1 + 2 * 8 + 1 + 20
    assert done.stdout.count("tests/properties/test_every_set.py::test_the_fused_engine_equals_dense") == 2 * 4
    assert done.stdout.count("tests/properties/test_every_set.py::test_two_ranks") == 1
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
    loaded = tried(tmp_path, "test_one.py", PYTHONPATH=str(tmp_path), PYTEST_DISABLE_PLUGIN_AUTOLOAD="")
    assert "a plugin was loaded" in loaded.stdout + loaded.stderr
    assert count_passed(tried(tmp_path, "test_one.py", PYTHONPATH=str(tmp_path))) == 1


def test_the_page_counts_six():
    table = EXAMPLE[EXAMPLE.index("| | edit |") : EXAMPLE.index("Names, oracles and rows")]
    assert len(re.findall(r"^\| \d \|", table, flags=re.MULTILINE)) == 6
