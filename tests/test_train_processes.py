"""Two real processes (gloo on loopback) train as one: coherent batches, one journal, a stop that all agree on."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from runs import DATA, config, journal, tiny

from nearfar.train import fit

HERE = Path(__file__).parent
SCRIPT = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from runs import DATA, config
from nearfar.train import fit
settings, folder, data = json.loads(sys.argv[2]), Path(sys.argv[3]), DATA[sys.argv[4]]
seen = []
look = lambda moment: seen.append(moment.indices.tolist())
fit(config(**settings), folder, data=data(), callbacks=[look])
folder.with_name(f"{folder.name}-{os.environ['RANK']}.json").write_text(json.dumps(seen))
"""


def launch(settings: dict, folder: Path, world: int = 2, data: str = "tiny") -> list[list[list[int]]]:
    """Train in `world` processes; gives each rank's batches."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
    }
    words = [sys.executable, "-c", SCRIPT, str(HERE), json.dumps(settings), str(folder), data]
    ranks = [
        subprocess.Popen(words, env={**environment, "RANK": str(r), "LOCAL_RANK": str(r)}, stderr=subprocess.PIPE)
        for r in range(world)
    ]
    errors = [process.communicate(timeout=200)[1].decode() for process in ranks]
    assert [process.returncode for process in ranks] == [0] * world, errors
    return [json.loads(folder.with_name(f"{folder.name}-{r}.json").read_text()) for r in range(world)]


PROFS = {
    "batches": {"name": "Representatives", "batch_size": 8, "samples": 2, "rho": 2},
    "loss": {"name": "Contrastive"},
    "optimiser": {"proximal": 0.1},
}


GLYPHS = {"model": {"name": "small", "width": 4}}


@pytest.mark.parametrize(
    ("settings", "data"), [(GLYPHS, "letters"), (PROFS, "tiny")], ids=["PerClass, glyphs", "Representatives"]
)
def test_ranks_draw_the_batches_of_one_process(tmp_path, settings, data):
    alone: list[list[int]] = []
    look = [lambda moment: alone.append(moment.indices.tolist())]
    fit(config(**settings), tmp_path / "one", data=DATA[data](), callbacks=look)
    first, second = launch(settings, tmp_path / "two", data=data)
    assert [a + b for a, b in zip(first, second, strict=True)] == alone
    assert [line["step"] for line in journal(tmp_path / "two") if "loss" in line] == list(range(1, 21))


def test_hard_classes_agree_on_all_ranks(tmp_path):
    hard = {**PROFS, "batches": {**PROFS["batches"], "hard_classes": True}}
    first, second = launch(hard, tmp_path / "two")
    state = torch.load(tmp_path / "two/checkpoints/last.pt", weights_only=True)
    assert state["step"] == 20
    labels = tiny().train.labels  # the held-out classes come off first, so compare through the rows themselves
    assert len(labels) > max(max(map(max, first)), max(map(max, second)))
    for mine, theirs in zip(first, second, strict=True):
        assert not set(mine) & set(theirs)  # a batch holds a class once, so ranks share no row


def test_a_run_of_two_ranks_goes_on_with_one(tmp_path):
    launch({"training": {"steps": 10}}, tmp_path / "run")
    alone: list[list[int]] = []
    fit(config(), tmp_path / "run", data=tiny(), resume=True, callbacks=[lambda m: alone.append(m.indices.tolist())])
    whole: list[list[int]] = []
    fit(config(), tmp_path / "one", data=tiny(), callbacks=[lambda m: whole.append(m.indices.tolist())])
    assert alone == whole[10:]
