"""The folders of tests: they mirror the packages of the source, and paths of tests that documents name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import nearfar as nf

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
PACKAGES = {path.parent.name.strip("_") for path in Path(nf.__file__).parent.glob("*/__init__.py")}
OTHERS = {"gpu", "interpreted", "oracles", "parts", "project", "properties", "support"}
"""Folders that are no package; CONTRIBUTING.md says what they hold."""
PLACES = ("docs", "scripts", "src", "tests", "benchmarks", "README.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml")
INVENTED = {"tests/gone.py", "tests/test_ways.py"}
"""Files that tests write themselves, or link to because they are missing."""


def test_every_test_is_in_the_folder_of_a_package():
    assert not [path.name for path in TESTS.glob("*.py")]
    found = {path.parent.name for path in TESTS.glob("*/*.py")}
    assert found <= PACKAGES | OTHERS
    assert not PACKAGES & OTHERS
    assert not list((TESTS / "support").glob("test_*.py"))


def test_contributing_names_the_folders_that_are_no_package():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `tests/(\w+)` \|", text, re.MULTILINE)) == OTHERS


@pytest.mark.parametrize("place", PLACES)
def test_paths_of_tests_that_are_named_exist(place):
    start = ROOT / place
    files = [start] if start.is_file() else [path for path in start.rglob("*") if path.suffix in (".md", ".py")]
    assert files
    for path in files:
        named = set(re.findall(r"\btests/[\w/]+\.py\b", path.read_text(encoding="utf-8"))) - INVENTED
        assert not [name for name in named if not (ROOT / name).is_file()], path
