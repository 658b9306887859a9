"""A run that reads shards, stopped and resumed, is the run that reads the same pictures from a folder."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from runs import config, journal, weights
from shard_cases import write

from nearfar.train import fit
from nearfar.train._build import open_dataset

KINDS = [f"kind {number}" for number in range(8)]


@pytest.fixture
def places(tmp_path, monkeypatch) -> dict[str, Path]:
    """The same pictures in class folders and in shards that cut classes in two."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    random = np.random.default_rng(0)
    samples = []
    for kind in KINDS:
        (tmp_path / "folder" / kind).mkdir(parents=True)
        for i in range(5):
            stream = io.BytesIO()
            Image.fromarray(random.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(stream, "PNG")
            (tmp_path / "folder" / kind / f"{i}.png").write_bytes(stream.getvalue())
            samples.append({"__key__": f"{kind}/{i}", "png": stream.getvalue(), "cls": kind})
    for number in range(3):
        write(tmp_path / "shards" / f"s-{number}.tar", samples[number * 14 : (number + 1) * 14])
    return {"folder": tmp_path / "folder", "shards": tmp_path / "shards" / "s-{0..2}.tar"}


def trained(places: dict[str, Path], name: str, run: Path, steps: int = 6, **more) -> None:
    plan = config(
        data={"name": name, "path": str(places[name]), "validation": 0.5, "transform": "photographs", "size": 8},
        batches={"name": "MPerClass", "classes": 2, "samples": 2},
        training={"steps": steps, "evaluate_every": 3, "checkpoint_every": 3, "diagnose_every": 0, "explain_every": 0},
    )
    fit(plan, run, console=Console(quiet=True), **more)


def test_labels_and_inputs_are_keys(places):
    spec = config(data={"name": "shards", "path": str(places["shards"]), "labels": "txt", "inputs": "png"}).data
    with pytest.raises(ValueError, match=r"has no file .txt"):
        open_dataset(spec)
    spec = config(data={"name": "shards", "path": str(places["shards"]), "labels": "cls", "inputs": "jpg"}).data
    with pytest.raises(ValueError, match=r"has no file .jpg"):
        open_dataset(spec)


def test_a_resumed_run_from_shards_is_the_run_from_a_folder(places, tmp_path):
    trained(places, "folder", tmp_path / "one")
    trained(places, "shards", tmp_path / "two", steps=3)
    trained(places, "shards", tmp_path / "two", resume=True)
    kept = ("step", "loss", "lr", "recall@1")
    one, two = (
        [{key: line[key] for key in kept if key in line} for line in journal(tmp_path / run) if "loss" in line]
        for run in ("one", "two")
    )
    assert one == two
    assert len(one) >= 6
    for key, value in weights(tmp_path / "one").items():
        assert torch.equal(value, weights(tmp_path / "two")[key]), key
    with np.load(tmp_path / "one" / "embeddings.npz") as a, np.load(tmp_path / "two" / "embeddings.npz") as b:
        assert a["name"].tolist() == b["name"].tolist()
        assert (a["x"] == b["x"]).all()
