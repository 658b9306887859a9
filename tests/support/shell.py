"""Commands as a user types them, in a folder of their own, and small models in every kind of file."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from needs import need
from typer.testing import CliRunner

import nearfar as nf
from nearfar.cli.main import app

TRUST = "--trust-model"
SCRIPT = Path(sys.executable).parent / "nearfar"
COMMAND = [str(SCRIPT)] if SCRIPT.exists() else [sys.executable, "-m", "nearfar"]
"""The command, also where the package is only on Python's path."""


def run(folder: Path, *words: object, code: int = 0) -> str:
    """What the command prints; on an error its one sentence."""
    with contextlib.chdir(folder):
        shown = CliRunner().invoke(app, list(map(str, words)), env={"COLUMNS": "160"}, catch_exceptions=False)
    return checked(shown.exit_code, shown.stdout, shown.stdout + shown.stderr if code else shown.stderr, code)


def alone(folder: Path, *words: object, code: int = 0) -> str:
    """The same in a process of its own, as a user runs it: what libraries write past Python's streams shows, too."""
    wide = {"PATH": "/usr/bin:/bin", "COLUMNS": "160", "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    wide |= {key: os.environ[key] for key in ("PYTHONPATH",) if key in os.environ}
    told = {"cwd": folder, "capture_output": True, "encoding": "utf-8", "env": wide, "timeout": 300}
    shown = subprocess.run([*COMMAND, *map(str, words)], **told)
    return checked(shown.returncode, shown.stdout, shown.stderr, code)


PROGRESS = re.compile(r".+: ([\d,]+ of [\d,]+|[\dhmins ]+ so far)(, .+)?\n")
"""The plain lines that tell of long work; how many there are, the machine decides."""


def checked(came: int, stdout: str, stderr: str, code: int) -> str:
    stderr = PROGRESS.sub("", stderr)
    assert came == code, stdout + stderr
    if code:
        assert "Traceback" not in stderr
        assert len(stderr.strip().splitlines()) == 1, stderr
        return stderr.strip()
    assert not stderr, stderr
    return stdout


class Flat(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(width, 6)

    def forward(self, x):
        return self.linear(x.flatten(1))


def saved(model, example, path):
    """The same model as ONNX, torch.export or TorchScript."""
    if path.suffix == ".onnx":
        need("onnxscript")
        nf.evaluation.export_onnx(model, example, path)
    elif path.suffix == ".pt2":
        shapes = ({0: torch.export.Dim("batch")},)
        torch.export.save(torch.export.export(model.eval(), (example,), dynamic_shapes=shapes), path)
    else:
        torch.jit.save(torch.jit.trace(model, example), str(path))
