"""Every command on a page of the documents exists, with every option that it is given."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

import pytest
import typer

from nearfar.cli.main import app
from nearfar.runs._sections import Config

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SECTIONS = {field.name for field in dataclasses.fields(Config)}
COMMANDS = typer.main.get_command(app).commands
TOP = {option for each in typer.main.get_command(app).params for option in each.opts}


def commands(text: str) -> list[str]:
    """The commands in indented blocks, those that go on behind a backslash included."""
    found = re.findall(r"^ {4}(?:.*-m )?(nearfar (?:\\\n|[^\n])*)", text, flags=re.MULTILINE)
    return [re.sub(r"\s+#.*|\\\n", " ", line) for line in found if not re.match(r"nearfar \w+: ", line)]


def unknown(line: str) -> list[str]:
    """The command if there is none of this name, else those of its options that it does not have."""
    words = shlex.split(line)[1:]
    if words[0].startswith("-"):
        return [word for word in words if word.startswith("-") and word not in TOP]
    if words[0] not in COMMANDS:
        return words[:1]
    options = {option for each in COMMANDS[words[0]].params for option in each.opts}
    given = {word.partition("=")[0] for word in words[1:] if re.match(r"--?[a-z]", word)}
    return sorted(word for word in given - options if word.removeprefix("--").partition(".")[0] not in SECTIONS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_and_their_options_exist(page):
    for line in commands(page.read_text(encoding="utf-8")):
        assert unknown(line) == [], line


def test_the_check_can_fail():
    first = "    nearfar trian mine.yaml\n    nearfar train a.yaml \\\n"
    text = first + "        --processses 2 --loss.k 8B  # two\n    pip install ."
    assert [unknown(line) for line in commands(text)] == [["trian"], ["--processses"]]
    assert unknown("nearfar --versoin") == ["--versoin"]
    assert sum(len(commands(page.read_text(encoding="utf-8"))) for page in PAGES) > 50
