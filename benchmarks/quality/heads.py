"""A linear head on frozen features, trained in seconds: what sizes.py and memory.py share.

The head begins as the first principal directions of the training features; Adam; batches of 5 samples a class. A run is
kept as one line of JSON, and the next call goes on after it.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import nearfar as nf

WIDTH, SAMPLES = 64, 5
Objective = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The loss of embeddings, labels and sample numbers."""


class Features(NamedTuple):
    """Features [n, d] and labels [n]."""

    x: Tensor
    y: Tensor

    def of(self, classes: Tensor) -> Features:
        """The samples of some classes."""
        there = torch.isin(self.y, classes)
        return Features(self.x[there], self.y[there])

    def permuted(self, share: float, seed: int) -> Features:
        """A share of the samples, drawn at random, exchange their labels."""
        noise = np.random.default_rng(seed)
        chosen = noise.permutation(len(self.y))[: round(share * len(self.y))]
        y = self.y.clone()
        y[torch.from_numpy(chosen)] = self.y[torch.from_numpy(noise.permutation(chosen))]
        return Features(self.x, y)


def load(path: Path) -> tuple[Features, Features]:
    """Training and test features of FOLDER/*train.npz and *test.npz, of unit length."""
    found = []
    for side in ("train", "test"):
        (file,) = path.glob(f"*{side}.npz")
        with np.load(file) as held:
            x = torch.nn.functional.normalize(torch.from_numpy(held["x"].astype(np.float32)))
            found.append(Features(x, torch.from_numpy(held["y"].astype(np.int64))))
    return found[0], found[1]


def batches(data: Features, classes: int, seed: int) -> Iterator[Tensor]:
    """Rows of batches of `classes` classes and 5 samples each, at random; a class lacks none of its samples."""
    noise = np.random.default_rng(seed)
    groups = [np.flatnonzero(data.y.numpy() == c) for c in data.y.unique().tolist()]
    while True:
        chosen = noise.choice(len(groups), classes, replace=classes > len(groups))
        rows = [noise.choice(groups[c], SAMPLES, replace=len(groups[c]) < SAMPLES) for c in chosen]
        yield torch.from_numpy(np.concatenate(rows))


@functools.lru_cache(8)
def directions(x: Tensor) -> Tensor:
    """The first principal directions of features, [64, d]."""
    return torch.linalg.eigh(torch.cov(x.T.double())).eigenvectors[:, -WIDTH:].T.float()


def train(
    data: Features, loss: Objective, rate: float, seed: int, *, classes: int = 16, steps: int = 300
) -> torch.nn.Linear:
    """The head after `steps` steps."""
    torch.manual_seed(seed)
    head = torch.nn.Linear(data.x.shape[1], WIDTH, bias=False)
    with torch.no_grad():
        head.weight.copy_(directions(data.x))
    optimizer = torch.optim.Adam(head.parameters(), lr=rate)
    for _, rows in zip(range(steps), batches(data, classes, seed), strict=False):
        optimizer.zero_grad()
        loss(head(data.x[rows]), data.y[rows], rows).backward()
        optimizer.step()
    return head


@torch.no_grad()
def scores(head: torch.nn.Linear, data: Features) -> dict[str, float]:
    """MAP@R and R@1 of other classes, in percent."""
    found = nf.evaluate(head(data.x), data.y, ks=(1,), resamples=0)
    return {"map_at_r": 100 * found.map_at_r, "recall@1": 100 * found.recall[1]}


class Ledger:
    """Finished runs, one line of JSON each."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self.file = file
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        self.runs: dict[str, dict[str, Any]] = {line["key"]: line for line in map(json.loads, lines)}

    def run(self, key: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The result of `work`, from the file if it is there."""
        if key not in self.runs:
            start = time.monotonic()
            found = {"key": key, **work(), "seconds": round(time.monotonic() - start, 2)}
            with self.file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(found) + "\n")
            self.runs[key] = found
            print(len(self.runs), json.dumps(found), flush=True)
        return self.runs[key]
