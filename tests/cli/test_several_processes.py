"""Commands on several ranks write what one process writes; a rank that dies is restarted and nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import together
from ranks_commands import shown
from runs import tiny
from shell import Flat, run, saved
from torch.distributed.run import get_args_parser

from nearfar.cli.commands.training import OPTIONS
from nearfar.evaluation import Vectors, embed
from nearfar.evaluation._chunks import Chunks
from nearfar.evaluation._embed import embed_chunks, read_chunks
from nearfar.train import fit, load

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's own exporters


@pytest.fixture
def home(tmp_path):
    """A model, samples for it, and vectors of two networks."""
    random = np.random.default_rng(0)
    y = np.arange(90) // 6
    x = random.normal(size=(15, 7))[y] + 0.8 * random.normal(size=(90, 7))
    np.savez(tmp_path / "x.npz", x=x.astype(np.float32), y=y)
    saved(Flat(7), torch.randn(2, 7), tmp_path / "m.pt")
    Vectors(x, y).save(tmp_path / "v.npz")
    Vectors(x + 0.5 * random.normal(size=x.shape), y).save(tmp_path / "w.npz")
    return tmp_path


def test_commands_of_two_ranks_write_what_one_process_writes(home, tmp_path, monkeypatch):
    monkeypatch.setenv("RANKS_HOME", str(home))
    first, second = together("ranks_commands", "everything", 2, tmp_path)
    alone = shown(home, "one")
    assert first == {key: text.replace("one.", "two.").replace("one-", "two-") for key, text in alone.items()}
    assert set(second.values()) == {""}
    for name in ("{}.json", "{}.html", "{}.npz", "{}-folder.json"):
        one, two = (home / name.format(which) for which in ("one", "two"))
        assert one.read_bytes().replace(b"one.vectors", b"two.vectors") == two.read_bytes()
    for name in ("mined", "embedded"):
        one, two = (
            {path.name: path.read_bytes() for path in sorted((home / f"{which}-{name}").iterdir()) if path.is_file()}
            for which in ("one", "two")
        )
        assert list(one) == ["chunk-000000.npz", "plan.json"]
        assert one == two
    assert not list(home.glob(".*.parts"))
    assert torch.equal(Vectors.load(home / "two.vectors").x, Vectors.load(home / "one.npz").x)


def test_a_share_is_embedded_once_and_only_what_is_missing_again(tmp_path):
    data, calls = torch.randn(100, 3), []

    def model(batch):
        calls.append(len(batch))
        return batch.double()

    options = {"batch_size": 1, "resume": tmp_path / "parts", "progress": False}  # chunks of 16
    whole = embed(model, data, batch_size=1, progress=False)
    calls.clear()
    for part in embed_chunks(model, data, rank=1, world=3, **options):
        assert len(part["x"]) == 16
        break  # killed after its first chunk
    for rank in range(3):
        list(embed_chunks(model, data, rank=rank, world=3, **options))
    assert sum(calls) == 100
    assert np.array_equal(
        np.concatenate([part["x"] for part in read_chunks(tmp_path / "parts", 100, 1)]), whole.numpy()
    )
    list(embed_chunks(model, data, rank=0, world=2, **options))  # another number of ranks takes them up, too
    assert sum(calls) == 100
    Chunks("embed", tmp_path / "parts").mark_done(1, 2, "a launch")
    (tmp_path / "parts" / ".chunk-000003.npz.4711-0a1b2c3d.part").touch()  # of a rank that was killed as it wrote
    Chunks("embed", tmp_path / "parts").clear()
    assert not (tmp_path / "parts").exists()


def test_the_first_rank_waits_for_those_of_this_launch(tmp_path):
    store, looks = Chunks("embed", tmp_path), []
    store.mark_done(1, 2, "an earlier one")

    def told(seconds):
        looks.append(seconds)
        store.mark_done(1, 2, "this")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", told)
        store.wait_for(range(1, 2), 2, "this")
    assert len(looks) == 1


def test_what_processes_and_launchers_do_not_go_with(home, monkeypatch):
    assert "--restarts needs --processes" in run(home, "train", "--restarts", 1, code=1)
    assert "uses one process" in run(home, "train", "--dry-run", "--processes", 2, code=1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "(WORLD_SIZE is set); leave one of them out" in run(home, "evaluate", "v.npz", "--processes", 2, code=1)
    assert "but the RANK of this one is None; unset WORLD_SIZE" in run(home, "evaluate", "v.npz", code=1)


@pytest.mark.parametrize("option", [*OPTIONS, "--loss.k"])
def test_torchrun_leaves_our_options_to_us(option):
    """But for --run, which it takes for its own --run-path: the folder has a second name, and `--` helps."""
    words = ["nearfar", "train", option, "x"]
    if option not in ("--run", "--help"):
        assert get_args_parser().parse_args(["--nproc_per_node", "2", "-m", *words]).training_script_args == words[1:]
    assert get_args_parser().parse_args(["-m", "--", *words]).training_script_args == words[1:]


CONFIG = """
data: {{name: vectors, path: {path}}}
model: {{name: linear, embedding_dim: 4}}
loss: {{name: SupCon}}
batches: {{name: MPerClass, classes: 4, samples: 4}}
training: {{steps: 200, evaluate_every: 100, checkpoint_every: 10, diagnose_every: 0, explain_every: 0}}
"""


def lines(folder: Path) -> list[dict]:
    path = folder / "journal.jsonl"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the ranks by /proc")
def test_a_rank_that_is_killed_goes_on_by_itself(tmp_path):
    data = tiny()
    x, y = torch.cat([data.train.x, data.test.x]).numpy(), np.r_[data.train.labels, data.test.labels + 12]
    np.savez(tmp_path / "points.npz", x=x, y=y)
    (tmp_path / "config.yaml").write_text(CONFIG.format(path=tmp_path / "points.npz"), encoding="utf-8")
    told = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **os.environ}
    words = ["-m", "nearfar", "train", "config.yaml", "--processes", "2", "--restarts", "1"]
    started = subprocess.Popen(
        [sys.executable, *words], cwd=tmp_path, env=told, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    while started.poll() is None and not any(line["step"] > 25 for f in tmp_path.glob("runs/*") for line in lines(f)):
        time.sleep(0.01)
    os.kill(last_child(started.pid), signal.SIGKILL)
    out, err = started.communicate(timeout=200)
    assert started.returncode == 0, err
    (run_folder,) = tmp_path.glob("runs/*")
    (again,) = (line["restart"] for line in lines(run_folder) if "restart" in line)
    assert again["count"] == 1
    assert again["after"] % 10 == 0
    assert f"restart 1: a process died, and 2 go on after step {again['after']}" in out.decode()
    assert [line["step"] for line in lines(run_folder) if "loss" in line] == list(range(1, 201))
    fit(load(tmp_path / "config.yaml"), tmp_path / "one")
    one, two = ([line["loss"] for line in lines(f) if "loss" in line] for f in (tmp_path / "one", run_folder))
    assert two == pytest.approx(one, rel=1e-3)


def last_child(parent: int) -> int:
    """The youngest process that another one has started."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text(encoding="utf-8").split()
    return int(children[-1])
