"""The command line, run as a user runs it: in a process of its own, in an empty folder.

Some are started by their command; the others are forks, which import less often.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from forks import ran
from shell import COMMAND

import nearfar as nf
from nearfar.cli.main import app

FORKED = "import sys; from nearfar.cli.main import main; sys.argv[0] = 'nearfar'; sys.exit(main())"


def run(*words: str, folder: Path, real: bool = False) -> subprocess.CompletedProcess[str]:
    wide = {"PATH": "/usr/bin:/bin", "COLUMNS": "200", "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    wide |= {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    if not real:
        return ran(FORKED, *words, cwd=folder, env=wide)
    return subprocess.run([*COMMAND, *words], cwd=folder, capture_output=True, encoding="utf-8", env=wide, timeout=300)


def test_losses_lists_every_loss(tmp_path):
    shown = run("losses", folder=tmp_path, real=True)
    assert shown.returncode == 0, shown.stderr
    for name in nf.losses.__all__:
        assert re.search(rf"\b{name}\b", shown.stdout), name
    assert "KL(1/α)" in shown.stdout  # the algebra of multi-similarity


def test_demo_trains_tests_and_writes_a_page(tmp_path):
    """A few steps teach little; that the full demo does is measured in benchmarks/RESULTS-photographs.md.

    tests/project/test_distribution.py starts it by its command.
    """
    shown = run("demo", "--quick", "--steps", "4", folder=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "pictures read" not in shown.stdout
    assert len([line for line in shown.stdout.splitlines() if "reading pictures" in line]) <= 3
    assert "41 Greek ones to find" in shown.stdout
    last = shown.stdout.strip().splitlines()[-2:]
    assert re.fullmatch(r"R@1 before: \d+\.\d", last[0])
    assert re.fullmatch(r"R@1 after: \d+\.\d", last[1])
    folder = tmp_path / "nearfar-demo"
    assert "<html" in (folder / "report.html").read_text(encoding="utf-8")
    assert {"config.yaml", "journal.jsonl", "embeddings.npz"} <= {path.name for path in folder.iterdir()}
    assert not (
        tmp_path / ".cache" / "nearfar"
    ).exists()  # the quick demo draws a part, which is not what the cache is for


def test_demo_leaves_other_peoples_folders_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work", encoding="utf-8")
    shown = run("demo", "--steps", "1", "--folder", "mine", folder=tmp_path)
    assert shown.returncode != 0
    assert "holds no demo; choose another --folder" in shown.stderr
    assert "Traceback" not in shown.stderr
    assert (tmp_path / "mine" / "thesis.txt").read_text(encoding="utf-8") == "years of work"


def test_train_resumes_and_refuses(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(16), 5)
    np.savez(tmp_path / "v.npz", x=rng.normal(size=(16, 8))[labels] + 0.3 * rng.normal(size=(80, 8)), y=labels)
    (tmp_path / "c.yaml").write_text(
        "data: {name: vectors, path: v.npz}\nmodel: {name: linear, embedding_dim: 4}\nloss: {name: SupCon}\n"
        "batches: {classes: 4, samples: 4}\ntraining: {steps: 6, evaluate_every: 3, checkpoint_every: 3}\n",
        encoding="utf-8",
    )
    shown = run("train", "c.yaml", "--run", "r", folder=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "run: r" in shown.stdout
    longer = run("train", "--run", "r", "--resume", "--training.steps", "9", folder=tmp_path)
    assert longer.returncode == 0, longer.stderr
    steps = [
        json.loads(line)["step"] for line in (tmp_path / "r" / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert max(steps) == 9
    for words, said in (
        (("c.yaml", "--run", "r"), "already holds a run"),
        (("c.yaml", "--run", "r", "--resume"), "keeps its own configuration"),
        (("--resume",), "needs the folder of the run"),
        (("c.yaml", "--run", "n", "--loss.temprature", "1"), "did you mean 'temperature'"),
        (("c.yaml", "--run", "n", "--batches", "{classes: 4"), "write it in quotes as YAML"),
        (("c.yaml", "--run", "n", "--batchs", "{classes: 4}"), "did you mean '--batches'"),
        (("c.yaml", "--run", "n", "--resme"), "did you mean '--resume'"),
        (("c.yaml", "--run", "n", "--loss.temperature"), "has no value"),
        (("no.yaml", "--run", "n"), "there is no file no.yaml"),
    ):
        with pytest.raises(SystemExit) as caught:
            app(["train", *words], standalone_mode=False)
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "n").exists()


def test_config_prints_what_train_reads(tmp_path):
    shown = run("config", "--loss.name", "Triplet", "--loss.margin", "1e-1", folder=tmp_path)
    assert shown.returncode == 0, shown.stderr
    (tmp_path / "c.yaml").write_text(shown.stdout, encoding="utf-8")
    again = run("config", "c.yaml", folder=tmp_path)
    assert again.stdout == shown.stdout
    assert "margin: 0.1" in shown.stdout


def test_unknown_command_and_option_are_errors(tmp_path):
    for real in (True, False):
        assert run("trian", folder=tmp_path, real=real).returncode != 0
    shown = run("demo", "--stpes", "1", folder=tmp_path)
    assert shown.returncode != 0
    assert "--stpes" in shown.stderr
