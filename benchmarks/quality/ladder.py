"""Graded relevance in training (docs/papers/beyond/ladder.md): nested classes of CUB, graded sentence pairs of STS-B.

    python benchmarks/quality/ladder.py cub --data FOLDER
    python benchmarks/quality/ladder.py text --data FOLDER --wordllama FOLDER

FOLDER holds cub200_lite0_*.npz, cub200_full_labels.csv and text/stsb_*.csv; `--wordllama` is the unpacked wheel of
wordllama 0.4.0. Groups of CUB's classes are the last words of their names. Networks are linear heads on frozen vectors:
principal components to begin with (CUB, 128 dimensions), or the identity (STS-B). Runs are written as they end, to
benchmarks/results/ladder.json, and not repeated.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from calibration import wordllama
from scipy.stats import spearmanr
from torch.nn.functional import cosine_similarity, normalize

import nearfar as nf
from nearfar._utils.files import write_text
from nearfar._utils.tables import as_json

FILE = Path(__file__).parents[1] / "results" / "ladder.json"
L, R = nf.losses, nf.Relation
STEPS, RATES, SEEDS = 300, {"MultiSimilarity": 3e-4, "Triplet": 3e-4}, (0, 1, 2)
BASES: dict[str, Callable[[], Any]] = {
    "MultiSimilarity": L.MultiSimilarity,
    "Triplet": lambda: L.Triplet(margin=0.2, mining="hard"),
}
ARMS = {"classes": (0.0, 1.0), "ladder, .1": (0.1, 1.0), "ladder, .3": (0.3, 1.0), "ladder, 1": (1.0, 1.0),
        "groups": (1.0, 0.0)}  # fmt: skip
"""Weights of the two rungs: groups, and classes in them."""
MIXED = ", shared groups"
SCALE, EPOCHS, PAIRS, TEXT_RATES, HELD_OUT = 20.0, 5, 128, (3e-4, 1e-3, 3e-3), 749
RUNGS: dict[str, tuple[float, ...] | None] = {
    "frozen": None,
    "one rung, 3": (3,),
    "rungs 1 to 4": (1, 2, 3, 4),
    "CoSENT": None,
}


@functools.lru_cache(maxsize=2)
def birds(folder: Path, mixed: bool) -> tuple[Any, ...]:
    """Vectors and classes of both halves, the tree (the group of each class), and the components of the first half.

    The halves are classes 1 to 100 and 101 to 200, which share two groups; if `mixed`, every second class.
    """
    with open(folder / "cub200_full_labels.csv", encoding="utf-8") as lines:
        names = {int(line["class_id"]): line["class_name"].split(".")[1] for line in csv.DictReader(lines)}
    last = [names[c].split("_")[-1].lower() for c in sorted(names)]
    groups = sorted(set(last))
    parents = torch.tensor([len(last) + groups.index(word) for word in last] + [-1] * len(groups))
    halves = [np.load(folder / f"cub200_lite0_{half}.npz") for half in ("train", "test")]
    rows = [(torch.from_numpy(each["x"]).float(), torch.from_numpy(each["y"]).long() - 1) for each in halves]
    if mixed:
        x, y = (torch.cat([each[k] for each in rows]) for k in (0, 1))
        rows = [(x[y % 2 == k], y[y % 2 == k]) for k in (0, 1)]
    x = rows[0][0] - rows[0][0].mean(dim=0)
    return *rows, parents, torch.linalg.eigh(x.T @ x)[1][:, -128:].T


def draw(y: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """A batch of 32 classes of 4 rows."""
    chosen = y.unique()[torch.randperm(len(y.unique()), generator=random)[:32]]
    places = [(y == c).nonzero()[:, 0] for c in chosen]
    return torch.cat([rows[torch.randperm(len(rows), generator=random)[:4]] for rows in places])


def run_birds(folder: Path, base: str, arm: str, seed: int, rate: float | None = None) -> dict[str, float]:
    """Train a head on the training classes, and score the test classes."""
    mixed = base.endswith(MIXED)
    (x, y), (tx, ty), parents, basis = birds(folder, mixed)
    base = base.removesuffix(MIXED)
    torch.manual_seed(seed)
    head = torch.nn.Linear(x.shape[1], 128)
    with torch.no_grad():
        head.weight.copy_(basis)
        head.bias.copy_(-basis @ x.mean(dim=0))
    loss = L.Ladder(BASES[base](), rungs=(0, 1), weights=ARMS[arm])
    steps = torch.optim.Adam(head.parameters(), lr=rate or RATES[base])
    random = torch.Generator().manual_seed(seed)
    for _ in range(STEPS if arm != "frozen" else 0):
        rows = draw(y, random)
        steps.zero_grad()
        loss(head(x[rows]), R.from_tree(parents, y[rows])).backward()
        steps.step()
    with torch.no_grad():
        return score_birds(normalize(head(tx)), ty, parents)


def score_birds(x: torch.Tensor, y: torch.Tensor, parents: torch.Tensor) -> dict[str, float]:
    """R@1 of classes; R@1 of groups among rows of other classes, for groups of several; nDCG@20; H of 60 rows."""
    group, near = parents[y], x @ x.T
    near.fill_diagonal_(-2)
    classes = (y[near.argmax(dim=1)] == y).float().mean()
    other = near.masked_fill(y[:, None] == y[None, :], -2)
    several = torch.tensor([len(torch.unique(y[group == g])) > 1 for g in group.unique()])
    asked = torch.isin(group, group.unique()[several])
    groups = (group[other.argmax(dim=1)] == group)[asked].float().mean()
    queries = torch.arange(0, len(y), 20)
    order = near[queries].topk(20, dim=1)
    found = zip(queries.tolist(), order.indices.tolist(), order.values.tolist(), strict=True)
    run = {f"q{q}": {f"d{j}": s for j, s in zip(places, scores, strict=True)} for q, places, scores in found}
    grades = (group[queries, None] == group[None, :]).int() + (y[queries, None] == y[None, :]).int()
    grades[torch.arange(len(queries)), queries] = 0
    qrels = {
        f"q{q}": {f"d{j}": int(row[j]) for j in row.nonzero()[:, 0].tolist()}
        for q, row in zip(queries.tolist(), grades, strict=True)
    }
    ndcg = nf.evaluate_retrieval(run, qrels, ks=(20,), resamples=0).means["ndcg@20"]
    return {"R@1": 100 * float(classes), "R@1 of groups": 100 * float(groups), "nDCG@20": 100 * ndcg}


@functools.lru_cache(maxsize=1)
def sentences(folder: Path, words: Path) -> dict[str, tuple[torch.Tensor, ...]]:
    """First vectors, second vectors and scores of the training and of the test pairs."""
    encode, found = wordllama(words), {}
    for half in ("train", "test"):
        lines = (folder / "text" / f"stsb_{half}.csv").read_text(encoding="utf-8").splitlines()
        rows = [line.split("\t") for line in lines if line]
        sides = [normalize(encode([row[k] for row in rows])) for k in (5, 6)]
        found[half] = (*sides, torch.tensor([float(row[4]) for row in rows]))
    return found


def cosent(cosines: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """log(1 + Σ over pairs of pairs with score_i > score_j of e^{scale (cos_j - cos_i)})."""
    gaps = SCALE * (cosines[None, :] - cosines[:, None])
    gaps = gaps[scores[:, None] > scores[None, :]]
    return torch.logsumexp(torch.cat([gaps, gaps.new_zeros(1)]), dim=0)


def run_text(folder: Path, words: Path, arm: str, seed: int) -> dict[str, float]:
    """Train a square head on graded pairs; Spearman's correlation on the test pairs."""
    data = sentences(folder, words)
    if arm == "frozen":
        return {"Spearman": correlation(torch.nn.Identity(), data["test"])}
    rate = choose_rate(folder, words, arm)
    return {"Spearman": correlation(train_text(data["train"], arm, seed, rate), data["test"]), "rate": rate}


@functools.lru_cache
def choose_rate(folder: Path, words: Path, arm: str) -> float:
    """The best rate for `HELD_OUT` training pairs drawn at random, of heads trained on the others."""
    rows = sentences(folder, words)["train"]
    order = torch.randperm(len(rows[2]), generator=torch.Generator().manual_seed(0))
    learn, held = (tuple(x[part] for x in rows) for part in (order[HELD_OUT:], order[:HELD_OUT]))
    found = {rate: correlation(train_text(learn, arm, 0, rate), held) for rate in TEXT_RATES}
    print(arm, found, flush=True)
    return max(found, key=lambda rate: found[rate])


def correlation(head: torch.nn.Module, pairs: tuple[torch.Tensor, ...]) -> float:
    """Spearman's correlation of cosines and scores, in percent."""
    with torch.no_grad():
        found = cosine_similarity(head(pairs[0]), head(pairs[1]))
    return 100 * float(spearmanr(found, pairs[2]).statistic)


def train_text(pairs: tuple[torch.Tensor, ...], arm: str, seed: int, rate: float) -> torch.nn.Module:
    """A square head, the identity to begin with, trained on graded pairs."""
    first, second, scores = pairs
    torch.manual_seed(seed)
    head = torch.nn.Linear(first.shape[1], first.shape[1], bias=False)
    torch.nn.init.eye_(head.weight)
    steps = torch.optim.Adam(head.parameters(), lr=rate)
    # log Σ e^{-s/γ} over positive pairs + log Σ e^{s/γ} over negative ones, of the whole batch
    soft = nf.sets.KL(1 / SCALE, normalized=False)
    ladder = L.Ladder(nf.RobustLoss(pair=nf.pairs.Linear(), over=soft, groups="sign"), rungs=RUNGS[arm] or (0,))
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(scores)).split(PAIRS):
            a, b, grade = head(first[rows]), head(second[rows]), scores[rows]
            if arm == "CoSENT":
                value = cosent(cosine_similarity(a, b), grade)
            else:
                known = torch.full((len(rows), len(rows)), torch.nan)
                known[range(len(rows)), range(len(rows))] = grade
                value = ladder(a, R.from_scores(known, square=False), ref_emb=b)
            steps.zero_grad()
            value.backward()
            steps.step()
    return head


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("cub", "text"))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--wordllama", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    record = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {"steps": STEPS, "runs": []}
    if given.part == "cub":
        made = [("frozen", "frozen", 0), *((base, arm, seed) for base in BASES for seed in SEEDS for arm in ARMS)]
        made += [("frozen" + MIXED, "frozen", 0), *(("MultiSimilarity" + MIXED, arm, s) for s in SEEDS for arm in ARMS)]
        ARMS["frozen"], BASES["frozen"], RATES["frozen"] = (0.0, 1.0), L.Triplet, 1e-3
    else:
        made = [("STS-B", arm, seed) for seed in SEEDS for arm in RUNGS if not (seed and arm == "frozen")]
    done = {(run["base"], run["arm"], run["seed"]) for run in record["runs"]}
    for base, arm, seed in made:
        if (base, arm, seed) in done:
            continue
        start = time.process_time()
        scores = (
            run_birds(given.data, base, arm, seed)
            if given.part == "cub"
            else run_text(given.data, given.wordllama, arm, seed)
        )
        run = {"base": base, "arm": arm, "seed": seed} | {key: round(value, 4) for key, value in scores.items()}
        record["runs"].append(run | {"seconds": round(time.process_time() - start, 1)})
        print(record["runs"][-1], flush=True)
        write_text(FILE, as_json(record, "runs", 5))


if __name__ == "__main__":
    main()
