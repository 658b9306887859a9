"""The commands on each of several ranks, as a launcher starts them, and what each rank prints."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist
from shell import TRUST, run

COMMANDS = {
    "evaluate": ("evaluate", "v.npz", "--gallery", "v.npz", "--clustering", "--json", "{}.json"),
    "compare": ("compare", "v.npz", "w.npz"),
    "report": ("report", "v.npz", "-o", "{}.html"),
    "embed": ("embed", "m.pt", TRUST, "x.npz", "--batch-size", "2", "-o", "{}.npz"),
    "embed in a folder": ("embed", "m.pt", TRUST, "x.npz", "--batch-size", "2", "-o", "{}.vectors"),
    "mine": ("mine", "v.npz", "-k", "3", "--margin", "0.05", "-o", "{}-mined"),
    "embed and mine": ("mine", "m.pt", "x.npz", TRUST, "--batch-size", "2", "-o", "{}-embedded"),
    "evaluate a folder": ("evaluate", "{}.vectors", "-k", "1", "--json", "{}-folder.json"),
}


def shown(home: Path, name: str) -> dict[str, str]:
    """What each command prints; the next begins when the first rank has written its files."""
    found = {}
    for key, words in COMMANDS.items():
        found[key] = run(home, *(word.format(name) for word in words))
        if dist.is_initialized():
            dist.barrier()
    return found


def everything(rank: int, world: int) -> dict[str, str]:
    return shown(Path(os.environ["RANKS_HOME"]), "two")
