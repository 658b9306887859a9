"""CONTRIBUTING.md followed to the letter in a copy of the sources: six edits add a loss that passes every test."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
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
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "docs/guides").mkdir(parents=True)
    shutil.copy(ROOT / "docs/guides/losses.md", folder / "docs/guides/losses.md")
    shutil.copy(ROOT / "pyproject.toml", folder / "pyproject.toml")
    return folder


def tried(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    outside = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    env = {**outside, "PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, encoding="utf-8", timeout=600, check=False)


def add_the_set(folder: Path) -> None:
    append(folder / "src/nearfar/sets/linear.py", blocks("python")[0])
    change(folder / "src/nearfar/sets/__init__.py", "import Mean, Worst", "import Contaminated, Mean, Worst")
    change(folder / "src/nearfar/sets/__init__.py", '    "Dual",\n', '    "Contaminated",\n    "Dual",\n')
    append(folder / "tests/oracles/sets.py", blocks("python")[2])
    change(folder / "tests/test_sets.py", "CASES = {\n", "CASES = {\n" + blocks("text")[1])


def test_six_edits_add_a_loss(tmp_path):
    folder = copied(tmp_path / "copy")
    add_the_set(folder)
    recipes = folder / "src/nearfar/losses/dro.py"
    change(recipes, "from nearfar.sets import KL,", "from nearfar.sets import KL, Contaminated,")
    append(recipes, blocks("python")[1])  # 1
    change(recipes, '"DroChiSquare", ', f'"DroChiSquare", "{NAME}", ')  # 2
    without = tried(folder, "tests/test_losses.py", "-k", "row_and_an_oracle or of_the_page")
    assert without.returncode == 1, without.stdout
    assert "2 failed" in without.stdout
    append(folder / "tests/oracles/losses.py", blocks("python")[3])  # 3
    change(folder / "tests/table.py", "TOLD = (\n", "TOLD = (\n" + blocks("text")[0])  # 4
    page = folder / "docs/guides/losses.md"
    change(
        page, "| `LiftedStructure` |", f"| `{NAME}` | ... | - | - | - |\n| `LiftedStructure` |"
    )  # 5; 6 is CHANGELOG.md
    done = tried(folder, "tests/test_losses.py", "tests/test_sets.py", "-k", "ontaminated or row_and_an or of_the_page")
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) >= 20


def test_the_page_counts_six():
    table = EXAMPLE[EXAMPLE.index("| | edit |") : EXAMPLE.index("Names, oracles and rows")]
    assert len(re.findall(r"^\| \d \|", table, flags=re.MULTILINE)) == 6
