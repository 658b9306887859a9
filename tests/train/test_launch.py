"""Every way to start several processes trains as one process would, or stops with a sentence whose command works."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from needs import need
from runs import tiny

from nearfar.cli.main import main
from nearfar.train import _processes as processes
from nearfar.train import fit, load

need("accelerate")

CONFIG = """
data: {{name: vectors, path: {path}, validation: 0}}
model: {{name: linear, embedding_dim: 4}}
loss: {{name: SupCon}}
batches: {{name: MPerClass, classes: 4, samples: 4}}
training: {{steps: 2, evaluate_every: 2, diagnose_every: 0, explain_every: 0}}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Vectors and what to do with them, in files that a command can name."""
    data = tiny()
    x, y = torch.cat([data.train.x, data.test.x]).numpy(), np.r_[data.train.labels, data.test.labels + 12]
    np.savez(tmp_path / "points.npz", x=x, y=y)
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.format(path=tmp_path / "points.npz"), encoding="utf-8")
    return path


def run(words: list[str] | str) -> subprocess.CompletedProcess[str]:
    """A command as a person types it: the launchers of this Python first, no variable of a launcher left over."""
    told = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "MASTER_"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{told['PATH']}"
    alone = {**told, "PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        words, shell=isinstance(words, str), env=alone, capture_output=True, encoding="utf-8", timeout=200
    )


def losses(folder: Path) -> list[float]:
    lines = (json.loads(line) for line in (folder / "journal.jsonl").read_text(encoding="utf-8").splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def test_accelerate_on_a_cpu_is_sent_to_torchrun_which_equals_one_process(config, tmp_path):
    """`accelerate launch --cpu --num_processes 2` starts one; the command in its sentence, typed as it stands, two."""
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    refused = run([*launch, "-m", "nearfar", "train", str(config), "--run", str(tmp_path / "two")])
    assert refused.returncode != 0
    assert "accelerate launch was asked for several processes (it set MASTER_ADDR) but started 1" in refused.stderr
    assert not (tmp_path / "two").exists()
    advised = re.search(r"start several with: (.*)", refused.stderr)
    assert advised is not None
    followed = run(advised[1])
    assert followed.returncode == 0, followed.stderr
    assert followed.stdout.count("2 processes on cpu") == 1
    fit(load(config), tmp_path / "one")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-6)


LAUNCHED = {"ACCELERATE_DYNAMO_BACKEND": "NO", "MASTER_ADDR": "127.0.0.1"}
"""What accelerate launch leaves in the environment of the one process that it starts."""


def test_two_machines(config, tmp_path):
    """Two launchers with addresses of their own meet at one of them, and train one run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
    words += ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{port}", "--rdzv_id", "two"]
    command = ["-m", "nearfar", "train", str(config), "--run-folder", str(tmp_path / "two")]
    with ThreadPoolExecutor(2) as machines:
        ended = list(machines.map(lambda at: run([*words, "--local_addr", at, *command]), ("127.0.0.1", "localhost")))
    assert [each.returncode for each in ended] == [0, 0], [each.stderr for each in ended]
    assert sorted(each.stdout.count("2 processes on cpu") for each in ended) == [0, 1]
    fit(load(config), tmp_path / "one")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-6)


@pytest.mark.parametrize(
    ("told", "devices", "words"),
    [
        ({}, 0, None),
        ({"WORLD_SIZE": "2", "RANK": "1", "LOCAL_WORLD_SIZE": "2"}, 0, None),
        ({"WORLD_SIZE": "1", "RANK": "0"}, 0, None),
        ({"MASTER_ADDR": "127.0.0.1"}, 0, None),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", **LAUNCHED}, 0, None),
        ({"WORLD_SIZE": "2"}, 0, "speaks of 2 processes .WORLD_SIZE., but this one has no RANK; unset WORLD_SIZE"),
        (LAUNCHED, 0, r"started 1, which has no RANK; leave --num_processes out"),
        ({"WORLD_SIZE": "4", "RANK": "0", "LOCAL_WORLD_SIZE": "4"}, 1, "4 processes were started .* with 1 GPU,"),
        ({"WORLD_SIZE": "4", "RANK": "0", "LOCAL_WORLD_SIZE": "2"}, 2, None),
        ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true"}, 1, None),
    ],
)  # fmt: skip
def test_what_the_environment_tells(told, devices, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    if words is None:
        processes._check_environment(told)
        return
    with pytest.raises(RuntimeError, match=words) as heard:
        processes._check_environment(told)
    assert re.search(r"torchrun --nproc_per_node \d", str(heard.value))


def test_all_who_count_must_agree():
    assert processes.have_same_count([(2, 1), (2, 1), (2, 1)])
    assert processes.have_same_count([(1, 0), (1, 0), (None, None)])
    for group, accelerate, environment in (
        ((2, 1), (1, 0), (2, 1)),
        ((1, 0), (1, 0), (2, 0)),
        ((2, 1), (2, 1), (2, 0)),
        ((2, 0), (2, 1), (2, 0)),
    ):
        assert not processes.have_same_count([group, accelerate, environment])


def test_the_command_leaves_its_group_before_it_ends(tmp_path, monkeypatch):
    """Python aborts a rank whose gloo threads are still there when another one's connection closes."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    monkeypatch.setattr(sys, "argv", ["nearfar", "--version"])
    with pytest.raises(SystemExit):
        main()
    assert not dist.is_initialized()


ROOT = Path(__file__).parents[2]
LEAVES = ("destroy_process_group(", "close()", "os._exit(")


@pytest.mark.parametrize("folder", ["tests", "benchmarks", "examples", "scripts"])
def test_whoever_makes_a_group_leaves_it(folder):
    """In the same file, with a call that comes after the one which makes it."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        made = text.rfind("dist.init_process_group(")
        if made >= 0 and path != Path(__file__):
            assert any(text.rfind(word) > made for word in LEAVES), path
