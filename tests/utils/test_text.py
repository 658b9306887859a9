"""Text output and input: terminals of any encoding, hostile names, files in UTF-8."""

from __future__ import annotations

import ast
import functools
import io
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from rich.progress import Progress, TextColumn
from rich.table import Table
from rich.text import Text

import nearfar as nf
from nearfar._utils.console import Terminal, guard_streams, say, visible
from nearfar.cli.commands.command import one_sentence
from nearfar.evaluation import Index, Vectors

ROOT = Path(__file__).parents[2]
SOURCE = Path(nf.__file__).parent
FILES = sorted(path for folder in ("src", "tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py"))
EVIL = "\x1b]0;owned\x07\x1b[2J[/a][bold]\r\u202egnp.exe\udcff é ≤"
SHOWN = r"\x1b]0;owned\x07\x1b[2J[/a][bold]\x0d\u202egnp.exe\udcff é ≤"
IN_ASCII = r"\x1b]0;owned\x07\x1b[2J[/a][bold]\x0d\u202egnp.exe\udcff \xe9 \u2264"
IN_BYTES = [b"[/a]", rb"b\x1b[2J", b"[bold]", rb"\xe9"]


def terminal(encoding: str) -> tuple[Terminal, io.BytesIO]:
    """A console over a strict stream that takes itself for a terminal without colors."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, errors="strict", write_through=True)
    return Terminal(file=stream, width=300, force_terminal=True, color_system=None), raw


@pytest.mark.parametrize(("encoding", "shown"), [("utf-8", SHOWN), ("ascii", IN_ASCII)], ids=["utf-8", "ascii"])
@pytest.mark.parametrize("how", ["words", "text", "cell", "title", "bar", "status"])
def test_nothing_is_obeyed_and_no_character_fails(how, encoding, shown):
    console, raw = terminal(encoding)
    if how == "bar":
        with Progress(TextColumn("{task.description}", markup=False), console=console, auto_refresh=False) as bar:
            bar.add_task(EVIL, total=1)
    elif how == "status":
        with console.status(Text(EVIL), spinner="line"):
            pass
    else:
        table = Table(title=EVIL if how == "title" else None)
        table.add_column("name", overflow="fold")
        table.add_row(EVIL)
        console.print({"words": EVIL, "text": Text(EVIL)}.get(how, table))
    written = raw.getvalue().decode(encoding)
    if how in ("text", "bar", "status"):  # rich's own Text drops bells and carriage returns
        shown = shown.replace(r"\x07", "").replace(r"\x0d", "")
    assert shown in written or how == "bar"  # which is cut to its column
    for order in ("\x1b]", "\x1b[2J", "\x07", "\u202e"):
        assert order not in written


def test_tables_stay_straight():
    console, raw = terminal("ascii")
    table = Table()
    table.add_column("name", overflow="fold")
    table.add_row("é\x1b")
    table.add_row("plain words of some length")
    console.print(table)
    assert len({len(line) for line in raw.getvalue().decode("ascii").splitlines()}) == 1


def test_what_is_printable_stays_as_it_is():
    for text in ("Größe ≤ ½\n\tzwei", "🐦 \u200d", r"C:\birds", ""):
        assert visible(text) == text
    assert visible(visible(EVIL)) == visible(EVIL)


def test_plain_lines_and_errors(capsys):
    say(EVIL)
    say("no end", end="", error=True)
    assert capsys.readouterr() == (SHOWN + "\n", "no end")
    with pytest.raises(SystemExit) as stopped, one_sentence("embed"):
        raise FileNotFoundError(2, "No such file or directory", "a\x1b[2J.npz")
    assert str(stopped.value) == r"nearfar embed: No such file or directory: a\x1b[2J.npz"


def test_warnings_of_a_command_are_not_obeyed(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    guard_streams()
    said = warnings.formatwarning(UserWarning("a\x1b[2J"), UserWarning, "f.py", 1)
    assert said.splitlines()[0].endswith(r"UserWarning: a\x1b[2J")


SEVERAL = """
import json, sys
from nearfar.cli.main import main
for words in json.loads(sys.argv[1]):
    sys.argv = ["nearfar", *words]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
    print("\\f", flush=True)
"""


def commands(*several: tuple[str, ...], folder: Path) -> list[bytes]:
    """What each command shows where the locale is C, and Python told not to help itself with UTF-8."""
    bare = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = [sys.executable, "-c", SEVERAL, json.dumps(several)]
    done = subprocess.run(words, cwd=folder, env=os.environ | bare, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    assert b"\x1b" not in done.stderr
    return done.stdout.split(b"\f")[:-1]


def test_commands_on_an_ascii_terminal(tmp_path):
    x = np.eye(4, dtype=np.float32)
    name = ["[/a]", "b\x1b[2J", "[bold]", "é"]
    Vectors(x.repeat(2, axis=0), y=[0, 0, 1, 1, 2, 2, 3, 3], name=name * 2).save(tmp_path / "v.npz")
    (tmp_path / "v.npz").rename(tmp_path / "v[bold].npz")
    Index(Vectors.load(tmp_path / "v[bold].npz")).save(tmp_path / "i.npz")
    told = {
        ("losses",): [rb"\u03a3"],
        ("evaluate", "v[bold].npz"): [b"v[bold]"],
        ("search", "i.npz", "v[bold].npz", "-k", "2"): IN_BYTES,
    }
    for shown, wanted in zip(commands(*told, folder=tmp_path), told.values(), strict=True):
        assert b"\x1b" not in shown
        assert all(words in shown for words in wanted)


@functools.cache
def calls(path: Path) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]


def called(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def test_one_way_to_the_terminal():
    """Only `console.py` prints or makes a console."""
    for path in sorted(SOURCE.rglob("*.py")):
        if path.name != "console.py":
            names = {call.func.id for call in calls(path) if isinstance(call.func, ast.Name)}
            assert not names & {"print", "Console"}, f"{path}: use say or Terminal of nearfar._utils.console"
            assert "echo" not in {called(call) for call in calls(path)}, f"{path}: use say of nearfar._utils.console"


def names_its_encoding(call: ast.Call) -> bool:
    """False for text that is read or written in whatever encoding the machine has."""
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    if "encoding" in given:
        return True
    if called(call) in ("run", "Popen", "check_output") and "text" in given:
        return False
    if isinstance(call.func, ast.Attribute) and call.func.attr == "read_text":
        return False
    if isinstance(call.func, ast.Attribute) and call.func.attr == "write_text":
        return len(call.args) > 1  # our own `_files.write_text(path, text)` writes UTF-8
    if isinstance(call.func, ast.Name) and call.func.id == "open":
        mode = call.args[1] if len(call.args) > 1 else given.get("mode", ast.Constant("r"))
    elif called(call) == "open" and len(call.args) == 1:  # of a path: others, such as an archive, are opened with more
        mode = call.args[0]
    else:
        return True
    return not (isinstance(mode, ast.Constant) and set(str(mode.value)) <= set("rwaxt+"))


def test_text_files_name_their_encoding():
    assert len(FILES) > 250
    wrong = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in FILES
        for call in calls(path)
        if not names_its_encoding(call)
    ]
    assert not wrong, f"say encoding='utf-8': {wrong}"


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("p.read_text()", False),
        ("p.write_text('a')", False),
        ("p.write_text('a', encoding='utf-8')", True),
        ("files.write_text(p, 'a')", True),
        ("open(p)", False),
        ("open(p, 'w')", False),
        ("open(p, 'rb')", True),
        ("p.open('a')", False),
        ("p.open('xb')", True),
        ("archive.open(member)", True),
        ("subprocess.run(words, text=True)", False),
        ("subprocess.run(words, encoding='utf-8')", True),
    ],
)
def test_the_guard_itself(line, named):
    assert names_its_encoding(ast.parse(line).body[0].value) is named
