"""tests/PROMISES.md: every promise names tests that exist, and a figure."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = next(folder for folder in Path(__file__).parents if folder.name == "tests")
PAGE = TESTS / "PROMISES.md"
ROWS = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if re.match(r"\| (?!promise)\w|\| `", line)]
NAMES = {
    node.name
    for file in TESTS.rglob("test_*.py")
    for node in ast.parse(file.read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef)
}


@pytest.mark.parametrize("row", ROWS)
def test_a_promise_has_a_test_and_a_figure(row):
    promise, tests, figure = (cell.strip() for cell in row.strip("|").split(" | "))
    assert promise
    assert figure
    named = re.findall(r"`(test_\w+)`", tests)
    assert re.sub(r"`test_\w+`(, )?", "", tests) == ""
    assert named
    assert [name for name in named if name not in NAMES] == []


def test_the_page_holds_promises():
    assert len(ROWS) > 40
