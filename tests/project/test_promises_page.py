"""docs/measured/promises.md: every promise names a test that is there, and links to its file."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1]
PAGE = HERE.parent / "docs" / "measured" / "promises.md"
ROWS = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if re.match(r"\| (?!promise)\w|\| `", line)]
NAMED = re.compile(r"\[`([\w./]+)::(\w+)`\]\(\.\./\.\./tests/([\w./]+)\)")


@pytest.mark.parametrize("row", ROWS)
def test_a_promise_has_a_test_and_a_figure(row):
    promise, tests, figure = (cell.strip() for cell in row.strip("|").split(" | "))
    assert promise
    assert figure
    found = NAMED.findall(tests)
    assert len(found) == tests.count("](") >= 1
    for file, name, link in found:
        assert file == link
        tree = ast.parse((HERE / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file} has no {name}"


def test_the_page_holds_promises():
    assert len(ROWS) > 40
