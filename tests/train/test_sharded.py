"""Weights in shards (FSDP2): processes that hold parts of a network train as one process does."""

from __future__ import annotations

import pytest
import torch
from runs import DATA, config, journal

from nearfar._utils.checks import RECENT
from nearfar.runs._sections import TrainingConfig
from nearfar.train import fit
from nearfar.train._sharded import _blocks
from tests.train.test_processes import EXACT, launch

recent = pytest.mark.skipif(not RECENT, reason="shards on CPUs need PyTorch 2.11")

PLAN = {**EXACT["training"], "steps": 20, "evaluate_every": 10, "checkpoint_every": 10, "diagnose_every": 5}
MARGIN = {
    **EXACT,
    "loss": {"name": "Margin"},  # with a parameter of its own
    "optimizer": {"lr": 1e-2, "max_grad_norm": 0.5, "proximal": 0.01},
    "training": {**PLAN, "chunk": 4},
}


def sharded(settings, **more):
    return {**settings, "training": {**settings["training"], "shard": True, **more}}


def losses(folder):
    return [line["loss"] for line in journal(folder) if "loss" in line]


def best(folder):
    return torch.load(folder / "checkpoints/best.pt", weights_only=True)["model"]


def same(folder, other):
    assert losses(folder) == pytest.approx(losses(other), rel=0, abs=1e-8)
    assert len(losses(folder)) == 20
    mine, theirs = best(folder), best(other)
    for name in theirs:
        torch.testing.assert_close(mine[name], theirs[name], atol=1e-8, rtol=0)
    for key in ("validation recall@1", "spread"):
        values = [[line[key] for line in journal(each) if key in line] for each in (folder, other)]
        assert values[0]
        assert values[0] == pytest.approx(values[1], abs=1e-6)


@recent
def test_shards_are_one_process_and_go_on_with_another_number(tmp_path):
    """Twenty steps of two ranks; then ten of two, resumed by three, and ten of one, resumed by two."""
    fit(config(**MARGIN), tmp_path / "one", data=DATA["letters"]())
    launch(sharded(MARGIN), tmp_path / "two", data="letters")
    same(tmp_path / "two", tmp_path / "one")
    (shards,) = (tmp_path / "two/checkpoints").glob("shards-*")
    assert shards.name == "shards-20"
    state = torch.load(tmp_path / "two/checkpoints/last.pt", weights_only=True)
    assert state["model"] is None

    half = {**MARGIN, "training": {**MARGIN["training"], "steps": 20}}
    stopped = sharded(half, steps=10)
    launch(stopped, tmp_path / "three", data="letters")
    launch(sharded(half), tmp_path / "three", world=3, data="letters", resume=True)
    fit(config(**stopped), tmp_path / "back", data=DATA["letters"]())
    launch(sharded(half), tmp_path / "back", data="letters", resume=True)
    for name in ("three", "back"):
        assert losses(tmp_path / name) != losses(tmp_path / "one")  # the schedule of the first ten was another
    assert losses(tmp_path / "three") == pytest.approx(losses(tmp_path / "back"), rel=0, abs=1e-8)


@recent
def test_shards_that_a_killed_process_left_are_replaced(tmp_path):
    settings = {**sharded(EXACT, checkpoint_every=2, evaluate_every=4), "model": {"name": "small", "embedding_dim": 4}}
    first, whole = ({**settings, "training": {**settings["training"], "steps": steps}} for steps in (2, 4))
    fit(config(**first), tmp_path / "run", data=DATA["letters"]())
    left = tmp_path / "run/checkpoints/shards-4"
    left.mkdir()
    for name in (".metadata", "__5_0.distcp"):
        (left / name).write_bytes(b"torn")
    fit(config(**whole), tmp_path / "run", data=DATA["letters"](), resume=True)
    assert sorted(path.name for path in left.iterdir()) == [".metadata", "__0_0.distcp"]
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("shards-*")] == ["shards-4"]
    fit(config(**first), tmp_path / "run", data=DATA["letters"](), overwrite=True)
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("shards-*")] == ["shards-2"]


def test_blocks_are_the_entries_of_lists():
    inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    block = torch.nn.ModuleDict({"a": inner})
    model = torch.nn.ModuleDict({"stem": torch.nn.Linear(2, 2), "trunk": torch.nn.Sequential(block, inner)})
    assert list(_blocks(model)) == [block, inner[0]]


@pytest.mark.parametrize(
    ("key", "other"),
    [("average", {"average": 0.9}), ("compile", {"compile": "kernels"}), ("fp16", {"precision": "fp16"})],
)
def test_what_needs_whole_weights_is_refused(key, other):
    with pytest.raises(ValueError, match=f"training.shard splits the weights, which training.*{key}"):
        TrainingConfig(shard=True, **other)
