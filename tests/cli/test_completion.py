"""The version of the command line, and shell completion."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

import nearfar as nf
from nearfar.cli.commands.completion import values_of
from nearfar.cli.main import app


def ask(words: str, place: int, how: str = "complete_bash") -> list[str]:
    """What bash is offered for the word at a place."""
    told = {"_NEARFAR_COMPLETE": how, "COMP_WORDS": words, "COMP_CWORD": str(place)}
    shown = CliRunner().invoke(app, [], prog_name="nearfar", env=told)
    assert shown.exit_code == 0, shown.stderr
    return shown.stdout.split()


def test_the_version_is_that_of_the_package():
    shown = CliRunner().invoke(app, ["--version"])
    assert (shown.exit_code, shown.stdout) == (0, f"nearfar {nf.__version__}\n")


@pytest.mark.parametrize(
    ("words", "place", "offered"),
    [
        ("nearfar tr", 1, ["train"]),
        ("nearfar train --loss.name Multi", 3, ["MultiSimilarity"]),
        ("nearfar train c.yaml --training.steps 5 --loss Multi", 6, ["MultiSimilarity"]),
        ("nearfar train c.yaml --batches Rep", 4, ["Representatives"]),
        ("nearfar train --run r --loss.pair.name Log", 5, ["Logistic"]),
        ("nearfar config --optimizer.name ada", 3, ["adam", "adamw"]),
        ("nearfar train --data.name om", 3, ["omniglot"]),
        ("nearfar train --data.outside t", 3, ["true"]),
        ("nearfar train --training.steps 5", 3, []),
        ("nearfar train c", 2, []),
        ("nearfar bench --loss SupC", 3, ["SupCon"]),
        ("nearfar reproduce iso", 2, ["isometry"]),
    ],
)
def test_completion(words, place, offered):
    assert ask(words, place) == offered


def test_every_loss_is_offered():
    assert set(nf.losses.__all__) <= set(values_of("loss.name"))


def test_the_script_for_bash():
    shown = CliRunner().invoke(app, [], prog_name="nearfar", env={"_NEARFAR_COMPLETE": "source_bash"})
    assert shown.exit_code == 0
    assert "complete -o default" in shown.stdout
    assert "_NEARFAR_COMPLETE=complete_bash" in shown.stdout
    options = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "160"}).stdout
    assert "--install-completion" in options
    assert "--show-completion" in options
