"""A tiny training problem, and the comparison of two journals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from nearfar._utils.journal import read_lines
from nearfar.data import DataSet, Samples, Tensors, open_data, part
from nearfar.train import Config, parse


def tiny(seed: int = 0, classes: int = 12, each: int = 6, width: int = 8) -> DataSet:
    """Vectors around class means, twelve classes to learn from and six others to be tested on."""
    random = np.random.default_rng(seed)

    def samples(count: int) -> Tensors:
        labels = np.repeat(np.arange(count), each)
        means = random.normal(size=(count, width))
        x = means[labels] + 0.7 * random.normal(size=(len(labels), width))
        return Tensors(torch.from_numpy(x).float(), labels)

    return DataSet("tiny", samples(classes), samples(classes // 2), ks=(1, 2))


def letters(classes: int = 12) -> DataSet:
    """The first characters of glyphs, to learn from and, six of them, to be tested on."""
    data = open_data("glyphs")

    def first(samples: Samples, count: int) -> Samples:
        return part(samples, np.flatnonzero(samples.labels < count))

    return DataSet("letters", first(data.train, classes), first(data.test, classes // 2), ks=(1, 2))


DATA = {"tiny": tiny, "letters": letters}


def config(**changes: dict[str, Any]) -> Config:
    """Twenty steps of a two-layer network."""
    tree: dict[str, Any] = {
        "data": {"validation": 0.25},
        "model": {"name": "mlp", "embedding_dim": 4, "hidden": 16},
        "loss": {"name": "DroTopK", "k": 8, "pair": "Logistic"},
        "batches": {"name": "MPerClass", "classes": 4, "samples": 3},
        "optimizer": {"lr": 0.01, "warmup": 3},
        "training": {"steps": 20, "evaluate_every": 5, "checkpoint_every": 5, "explain_every": 4},
    }
    for section, values in changes.items():
        named = "name" in values
        tree[section] = dict(values) if named else {**tree[section], **values}
    return parse(tree)


def journal(folder: Path) -> list[dict[str, Any]]:
    """Every line without its time."""
    found = read_lines(folder / "journal.jsonl")
    assert not found.damaged
    assert not found.torn
    return [{key: value for key, value in line.items() if key != "time"} for line in found.entries]


def weights(folder: Path, which: str = "last") -> dict[str, torch.Tensor]:
    """The network in a checkpoint."""
    return torch.load(folder / "checkpoints" / f"{which}.pt", weights_only=True)["model"]
