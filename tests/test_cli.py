"""The command line, run as a user runs it: in a process of its own, in an empty folder."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import nearfar as nf

COMMAND = str(Path(sys.executable).parent / "nearfar")


def run(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    wide = {"PATH": "/usr/bin:/bin", "COLUMNS": "200", "HOME": str(folder)}
    return subprocess.run([COMMAND, *words], cwd=folder, capture_output=True, text=True, env=wide, timeout=120)


def test_losses_lists_every_loss(tmp_path):
    shown = run("losses", folder=tmp_path)
    assert shown.returncode == 0, shown.stderr
    for name in nf.losses.__all__:
        assert re.search(rf"\b{name}\b", shown.stdout), name
    assert "KL(1/α)" in shown.stdout  # the algebra of multi-similarity


def test_demo_learns_and_saves_a_picture(tmp_path):
    shown = run("demo", "--seconds", "4", folder=tmp_path)
    assert shown.returncode == 0, shown.stderr
    before, after = (
        float(re.search(rf"^R@1 {word}: ([\d.]+)$", shown.stdout, re.M)[1]) for word in ("before", "after")
    )
    assert after > before + 15
    picture = tmp_path / "nearfar-demo" / "digits.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in picture.parent.iterdir()] == ["digits.png"]


def test_demo_says_in_one_sentence_that_it_cannot_write(tmp_path):
    (tmp_path / "taken").write_text("a file, not a folder")
    shown = run("demo", "--seconds", "0.1", "--folder", "taken/here", folder=tmp_path)
    assert shown.returncode != 0
    assert "choose another --folder" in shown.stderr
    assert "Traceback" not in shown.stderr


def test_unknown_command_and_option_are_errors(tmp_path):
    assert run("trian", folder=tmp_path).returncode != 0
    shown = run("demo", "--sekonds", "1", folder=tmp_path)
    assert shown.returncode != 0
    assert "--sekonds" in shown.stderr
