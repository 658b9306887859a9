"""Kill one of several processes again and again, at random moments, and compare what comes out with an undisturbed run.

    python scripts/faults.py train     twenty kills of a rank of `nearfar train --processes 2 --restarts ...`
    python scripts/faults.py embed     twenty kills of a rank of `nearfar embed --processes 2`, run again each time
    python scripts/faults.py train --kills 3 --seed 1

A kind is a function below: it works in an empty folder, is told when to kill, and says in a line what is different.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

LONGEST = 600
"""Seconds after which something hangs."""
TRAIN = {
    "data": {"name": "vectors", "path": "points.npz"},
    "model": {"name": "mlp", "embedding_dim": 8, "hidden": 64},
    "loss": {"name": "SupCon"},
    "batches": {"name": "MPerClass", "classes": 8, "samples": 4},
    "training": {
        "steps": 3000,
        "evaluate_every": 100,
        "checkpoint_every": 50,
        "diagnose_every": 0,
        "explain_every": 0,
    },
}


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """A command of nearfar in a folder."""
    told = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-m", "nearfar", *words], cwd=folder, env=told, encoding="utf-8", **pipes)


def ranks_of(parent: int) -> list[int]:
    """The processes that a launcher has started and that still run."""
    try:
        found = Path(f"/proc/{parent}/task/{parent}/children").read_text(encoding="utf-8").split()
    except OSError:
        return []
    return [int(number) for number in found if _is_rank(int(number))]


def _is_rank(number: int) -> bool:
    try:
        return b"RANK=" in Path(f"/proc/{number}/environ").read_bytes()
    except OSError:
        return False


def kill_one(parent: int, chance: random.Random) -> bool:
    """Kill one of its ranks at once (SIGKILL); False if there is none."""
    ranks = ranks_of(parent)
    if not ranks:
        return False
    try:
        os.kill(chance.choice(ranks), signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def steps(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's journal without times, and without those about restarts."""
    path = folder / "journal.jsonl"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    return [{k: v for k, v in line.items() if k not in ("time", "crc")} for line in lines if "restart" not in line]


def content(path: Path) -> bytes:
    """The bytes of a file; none if it is not there."""
    return path.read_bytes() if path.is_file() else b""


def train(folder: Path, kills: int, chance: random.Random) -> Sequence[str]:
    """A run of two ranks, one of which is killed at random moments, goes on by itself to the same end."""
    y = np.arange(4000) % 100
    x = np.random.default_rng(0).normal(size=(100, 16))[y] + np.random.default_rng(1).normal(size=(4000, 16))
    np.savez(folder / "points.npz", x=x.astype(np.float32), y=y)
    (folder / "config.yaml").write_text(json.dumps(TRAIN), encoding="utf-8")
    words = ("train", "config.yaml", "--processes", "2")
    undisturbed, began = start(folder, *words, "--run", "whole"), time.monotonic()
    while undisturbed.poll() is None and not steps(folder / "whole"):
        time.sleep(0.1)
    first = time.monotonic() - began
    undisturbed.communicate(timeout=LONGEST)
    running, done = start(folder, *words, "--restarts", str(kills), "--run", "killed"), 0
    while running.poll() is None and done < kills:
        if chance.random() < 0.7:  # while it takes steps, evaluates or writes checkpoints; else perhaps as it starts
            there, patience = content(folder / "killed" / "journal.jsonl"), time.monotonic() + 20 * first
            while content(folder / "killed" / "journal.jsonl") == there and time.monotonic() < patience:
                time.sleep(0.05)
            time.sleep(chance.uniform(0, 3))
        else:
            time.sleep(chance.uniform(0, first))
        if kill_one(running.pid, chance):
            done += 1
            print(f"kill {done}: after step {len([line for line in steps(folder / 'killed') if 'loss' in line])}")
    errors = running.communicate(timeout=LONGEST)[1]
    found = [] if running.returncode == 0 else [f"the run ended with {running.returncode}: {errors[-400:]}"]
    if done < kills:
        found.append(f"the run ended after {done} of {kills} kills; make it longer")
    if steps(folder / "killed") != steps(folder / "whole"):
        found.append("the journals differ")
    names = ("embeddings.npz", "scores.json")
    found += [
        f"{name} differs" for name in names if content(folder / "killed" / name) != content(folder / "whole" / name)
    ]
    left = [str(path) for path in (folder / "killed").rglob("*") if path.suffix in (".part", ".lock")]
    return [*found, *(f"{name} was left" for name in left)]


def embed(folder: Path, kills: int, chance: random.Random) -> Sequence[str]:
    """Embedding by two ranks, one of which is killed at random moments, takes up what is there when it is run again."""
    import torch

    network = torch.nn.Sequential(torch.nn.Linear(64, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 32))
    torch.jit.script(network).save(str(folder / "m.pt"))
    x = np.random.default_rng(0).normal(size=(60_000, 64)).astype(np.float32)
    np.savez(folder / "x.npz", x=x, y=np.arange(len(x)) % 1000)
    words = ("embed", "m.pt", "--trust-model", "x.npz", "--batch-size", "16", "--processes", "2", "-o")
    began = time.monotonic()
    start(folder, *words, "whole.vectors").communicate(timeout=LONGEST)
    whole = time.monotonic() - began
    found, done = [], 0
    while done < kills:
        running, at = start(folder, *words, "killed.vectors"), chance.uniform(0, whole)
        time.sleep(at)
        killed = running.poll() is None and kill_one(running.pid, chance)
        errors = running.communicate(timeout=LONGEST)[1]
        done += killed
        chunks = len(list(folder.glob(".killed.vectors.*.parts/chunk-*.npz")))
        if killed:
            print(f"kill {done}: after {at:.1f} s, {chunks} chunks are there")
        elif running.returncode:
            found.append(f"ended by itself with {running.returncode}: {errors[-400:]}")
    start(folder, *words, "killed.vectors").communicate(timeout=LONGEST)
    one, two = (
        b"".join(path.read_bytes() for path in sorted((folder / name).glob("*-*.*")))
        for name in ("whole.vectors", "killed.vectors")
    )
    if one != two or not one:
        found.append("the vectors differ")
    left = [path.name for path in folder.glob(".*")]
    return [*found, *(f"{name} was left" for name in left)]


KINDS: dict[str, Callable[[Path, int, random.Random], Sequence[str]]] = {"train": train, "embed": embed}


def main() -> None:
    """Run one kind of fault, and end with 1 if anything is different."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    told = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        found = KINDS[told.kind](Path(folder), told.kills, random.Random(told.seed))
        took = time.monotonic() - began
    for line in found:
        print(f"{told.kind}: {line}")
    print(f"{told.kind}: {told.kills} kills in {took:.0f} s, {len(found)} things wrong")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
