"""The papers' pages: every place, test and command of the coverage table exists, and tables are those of results."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import shlex
from collections import Counter
from pathlib import Path

import pytest
import typer

import nearfar as nf
from nearfar.cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "papers"
COVERAGE = (PAGES / "coverage.md").read_text(encoding="utf-8")
STATUS = ("works", "corrected", "not possible", "beyond")


def tables(text):
    """The rows of the tables of each paper, as cells."""
    found = {}
    for part in text.split("\n## ")[1:]:
        name, _, rest = part.partition("\n")
        lines = [line for line in rest.splitlines() if line.startswith("| ")][1:]
        found[name] = [[cell.strip() for cell in re.split(r"(?<!\\) \| ", line.strip("| "))] for line in lines]
    return found


TABLES = tables(COVERAGE)
ROWS = [(paper, *row) for paper, rows in TABLES.items() for row in rows]


def status(cell):
    return next(word for word in STATUS if cell.startswith(word))


@functools.cache
def functions(path):
    return set(re.findall(r"^def (test_\w+)", (ROOT / "tests" / path).read_text(encoding="utf-8"), flags=re.MULTILINE))


def symbol(name):
    """The object of a dotted name."""
    first, *rest = name.split(".")
    found = nf if first == "nf" else importlib.import_module("nearfar")
    for word in rest:
        found = getattr(found, word, None) or importlib.import_module(f"{found.__name__}.{word}")
    return found


def check_command(words):
    """A command, its options, and its parts."""
    _, name, study, *options = shlex.split(words)
    known = typer.main.get_command(app).commands[name]
    flags = {flag for each in known.params for flag in each.opts}
    assert {word for word in options if word.startswith("--")} <= flags, words
    module = importlib.import_module(f"nearfar.studies.{study}")
    if "--parts" in options:
        assert set(options[options.index("--parts") + 1].split(",")) <= set(module.PARTS), words


def check_token(token, cell):
    """A name in backticks: a command, a test, a file, an object, or an argument of the object in the same cell."""
    if token.startswith("nearfar "):
        check_command(token)
    elif "::" in token:
        path, name = token.split("::")
        assert name in functions(path), token
    elif re.match(r"(nf|nearfar)\.", token):
        assert symbol(token) is not None
    elif re.match(r"\w+=", token):
        owner = symbol(re.search(r"`((?:nf|nearfar)\.[\w.]+)`", cell)[1])
        assert token.split("=")[0] in inspect.signature(owner).parameters, token
    elif ": " in token:
        file = ROOT / re.search(r"`([\w/]+\.yaml)`", cell)[1]
        assert token in file.read_text(encoding="utf-8"), token
    else:
        assert (ROOT / token).is_file(), token


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[1]}")
def test_every_named_place_exists(row):
    _, _, place, said, proof = row
    assert status(said)
    assert re.search("[`(]", place)
    assert "`" in proof
    for cell in (place, proof):
        for token in re.findall(r"`([^`]+)`", cell):
            check_token(token, cell)
        for target in re.findall(r"\]\(([^)#]+)", cell):
            assert (PAGES / target).is_file(), target
    if status(said) in ("not possible", "beyond"):
        assert ":" in said, "say why"


def test_the_counts_are_those_of_the_rows():
    head = [line for line in COVERAGE.split("\n## ")[0].splitlines() if line.startswith("| ")][1:]
    lines = {
        re.sub(r"\[(.*?)\].*", r"\1", cells[0]): cells
        for cells in ([c.strip() for c in line.strip("| ").split(" | ")] for line in head)
    }
    total = Counter()
    for paper, rows in TABLES.items():
        found = Counter(status(row[2]) for row in rows)
        total += found
        assert lines[paper][1:6] == [str(len(rows)), *(str(found[word]) for word in STATUS)]
    assert lines["all"][1:6] == [str(sum(total.values())), *(str(total[word]) for word in STATUS)]
    assert sum(total.values()) == 179


@pytest.mark.parametrize("page", sorted(path.name for path in PAGES.glob("*.md")))
def test_every_test_that_a_page_names_exists(page):
    text = (PAGES / page).read_text(encoding="utf-8")
    usual = re.search(r"[Tt]ests without a file are\s+in\s+\[tests/([\w/.]+)\]", text)
    for path, name in re.findall(r"`(?:([\w/]+\.py)::)?(test_\w+)`", text):
        files = [path] if path else [usual[1], "batches/test_proximal.py", "batches/test_representatives.py"]
        assert any(name in functions(file) for file in files), name


@pytest.mark.parametrize("page", ["xu-2022.md", "jaffe-2020.md"])
def test_tables_are_those_of_the_results(page, monkeypatch):
    if not (ROOT / "benchmarks" / "quality").is_dir():
        pytest.skip("benchmarks are not in a release")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "quality"))
    papers = importlib.import_module("papers")
    text = (PAGES / page).read_text(encoding="utf-8")
    assert papers.fill(text, page) == text, "run: python benchmarks/quality/papers.py --pages"
    assert papers.fill(text.replace("| N \\ n |", "| N |").replace("± .", "± 1."), page) == text


def test_measured_shares_of_the_errata_are_those_of_the_results():
    """A share of draws in a row of Jaffe's errata is the one of the same place in benchmarks/results/descent.json."""
    file = ROOT / "benchmarks" / "results" / "descent.json"
    if not file.is_file():
        pytest.skip("benchmarks are not in a release")
    import json

    text = (PAGES / "jaffe-2020.md").read_text(encoding="utf-8")
    measured = json.loads(file.read_text(encoding="utf-8"))["errata"]
    for where, key in (
        ("(23)", "violated"),
        ("(29)", "violated"),
        ("2.9", "violated"),
        ("step 1/M_g", "raised_for_small_w"),
    ):
        row = next(line for line in text.splitlines() if line.startswith(f"| {where} |"))
        assert f"{measured[where][key]:.0%}" in row, where
