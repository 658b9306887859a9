"""`scripts/mutants.py`: what it changes, where it looks, and what it may not touch; `make mutants` runs it."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import mutants_draw
import mutants_tests
from mutants_draw import KINDS, mutants_of

SOURCE = '''
"""A module with 1 constant in its docstring."""
from __future__ import annotations
__all__ = ["f"]
LIMIT: int = 3

class Box:
    """A box."""
    size: float = 0.5

    def __repr__(self) -> str:
        return f"{1 + 1}"

def f(x: int, deep: bool = True) -> int:
    """Add 2 < 3."""
    if x is None:
        raise ValueError("1 < 2" + str(3))
    elif x < LIMIT and deep:
        x = -x
        print(x)
        return x + 1
    return x
'''


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.setattr(mutants_draw, "SOURCE", tmp_path)
    monkeypatch.setattr(mutants_tests, "SOURCE", tmp_path)
    path = tmp_path / "pack" / "module.py"
    path.parent.mkdir()
    path.write_text(SOURCE, encoding="utf-8")
    return path


def test_what_is_changed_and_what_is_not(module):
    found = {(mutant.kind, mutant.before, mutant.after) for mutant in mutants_of(module)}
    assert found == {
        ("constant", "3", "4"),
        ("constant", "0.5", "1.0"),
        ("constant", "True", "False"),
        ("branch", "x is None", "(not (x is None))"),
        ("drop", 'raise ValueError("1 < 2" + str(3))', "pass"),
        ("branch", "x < LIMIT and deep", "(not (x < LIMIT and deep))"),
        ("sign", "x < LIMIT and deep", "(x < LIMIT or deep)"),
        ("comparison", "x < LIMIT", "(x <= LIMIT)"),
        ("drop", "x = -x", "pass"),
        ("sign", "-x", "(x)"),
        ("drop", "print(x)", "pass"),
        ("drop", "return x + 1", "pass"),
        ("sign", "x + 1", "(x - 1)"),
        ("constant", "1", "2"),
    }


def test_each_is_python_that_differs_and_has_a_name_without_a_line(module):
    content = module.read_bytes()
    before = {mutant.name: ast.dump(ast.parse(mutant.apply(content))) for mutant in mutants_of(module)}
    assert len({*before.values(), ast.dump(ast.parse(content))}) == len(before) + 1
    module.write_bytes(b"# a line\n" * 7 + content)
    assert {mutant.name for mutant in mutants_of(module)} == {*before}


def test_the_draw_takes_every_kind_in_turn_and_the_seed_decides(module):
    first = mutants_draw.draw(["pack"], 5, 0)
    assert sorted(mutant.kind for mutant in first) == sorted(KINDS)
    assert [m.key for m in first] == [m.key for m in mutants_draw.draw(["pack"], 5, 0)]
    assert len({tuple(m.key for m in mutants_draw.draw(["pack"], 5, seed)) for seed in range(9)}) > 1


def test_a_test_is_seen_at_each_statement_that_it_reaches(module):
    """The calls stand in a copy; the same file without a mutant's line reaches none of its own."""
    mutants = mutants_of(module)
    calls = [(statement, number) for number, m in enumerate(mutants) for _, statement in mutants_tests._statements(m)]
    probed = mutants_tests._probed(module.read_bytes(), calls).decode()
    hits: list[int] = []
    space = {"__hit__": hits.append}
    exec(probed.replace("from nearfar._probe import hit as __hit__\n", ""), space)

    def reached(*words):
        hits.clear()
        result = space["f"](*words)
        return result, {mutants[number].before for number in hits}

    entry = {"True", "3", "x is None", "x < LIMIT and deep", "x < LIMIT"}
    assert reached(5) == (5, entry)
    assert reached(2) == (-1, entry | {"x = -x", "-x", "print(x)", "return x + 1", "x + 1", "1"})
    assert module.read_text(encoding="utf-8") == SOURCE
