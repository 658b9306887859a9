"""Losses of index tuples: time and peak memory as lists (engine "auto"), as matrices ("dense"), and of PML.

    python benchmarks/speed/index_tuples.py                    a few minutes: CPU, one thread
    python benchmarks/speed/index_tuples.py --rows 256         does it run at all?

Ten positive and ten negative pairs an anchor (ten triplets for the triplet loss), four rows a class, d = 128, forward
and backward once in a new process, after a call with eight rows. Peak memory is that of the process beyond what it had
before. `one_import.py` times whole scripts with the miners of both libraries.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_metric_learning
import torch
from pytorch_metric_learning import losses as peers
from torch import Tensor

import nearfar
from nearfar import losses
from nearfar._utils.files import write_text

RESULTS = Path(__file__).parents[1] / "results"
WIDTH, EACH, PEER = 128, 10, "PML"
LOSSES: dict[str, tuple[Callable[[str], Any], Callable[[], Any]]] = {
    "MultiSimilarity": (
        lambda engine: losses.MultiSimilarity(miner=None, engine=engine),
        lambda: peers.MultiSimilarityLoss(),
    ),
    "Contrastive": (lambda engine: losses.Contrastive(engine=engine), lambda: peers.ContrastiveLoss()),
    "Triplet": (lambda engine: losses.Triplet(engine=engine), lambda: peers.TripletMarginLoss()),
    "SupCon": (lambda engine: losses.SupCon(engine=engine), lambda: peers.SupConLoss()),
    "LiftedStructure": (lambda engine: losses.LiftedStructure(engine=engine), lambda: peers.LiftedStructureLoss()),
}


def tuples(rows: int, triplets: bool) -> tuple[Tensor, ...]:
    """Pairs of each anchor with rows of its class and of other classes."""
    a = torch.arange(rows).repeat_interleave(EACH)
    p = a - a % 4 + (a + 1 + torch.randint(3, a.shape)) % 4
    n = (a + 4 + torch.randint(rows - 8, a.shape)) % rows
    return (a, p, n) if triplets else (a, p, a, n)


def once(name: str, engine: str, rows: int) -> dict[str, float]:
    """One step in this process."""
    torch.set_num_threads(1)
    ours, peer = LOSSES[name]
    loss = peer() if engine == PEER else ours(engine)
    for count in (12, rows):
        torch.manual_seed(0)
        embeddings = torch.randn(count, WIDTH, requires_grad=True)
        labels, indices = torch.arange(count) // 4, tuples(count, name == "Triplet")
        before, begin = _held(), time.process_time()
        loss(embeddings, labels, indices).backward()
        seconds = time.process_time() - begin
    return {"ms": 1e3 * seconds, "MB": _held() - before}


def _held() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def child(name: str, engine: str, rows: int) -> dict[str, Any]:
    """One step in a new process."""
    command = [sys.executable, __file__, "--one", name, engine, "--rows", str(rows)]
    found = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    row = {"loss": name, "engine": engine, "rows": rows}
    return row | (json.loads(found.stdout) if found.returncode == 0 else {"failed": "memory or error"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[1024, 8192])
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(once(*given.one, given.rows[0])))
        return
    found = [child(name, engine, n) for name in LOSSES for n in given.rows for engine in ("auto", "dense", PEER)]
    versions = {
        "nearfar": nearfar.__version__,
        "torch": torch.__version__,
        "pytorch-metric-learning": pytorch_metric_learning.__version__,
    }
    record = {"device": "CPU, one thread", "width": WIDTH, "each": EACH, "versions": versions, "results": found}
    write_text(given.out / "index_tuples_cpu.json", json.dumps(record, indent=1) + "\n")
    software = ", ".join(f"{name} {version}" for name, version in versions.items())
    head = (
        f"# Index tuples: {EACH} positive and {EACH} negative pairs an anchor, CPU, one thread, d = {WIDTH}\n\n"
        f"Forward and backward once, peak memory beyond what the process held before; {software}.\n\n"
        "| loss | rows | lists: ms | MB | dense: ms | MB | PML: ms | MB |\n|---|---|---|---|---|---|---|---|\n"
    )
    cells = {(row["loss"], row["rows"], row["engine"]): row for row in found}
    lines = [
        f"| {name} | {n:,} | {' | '.join(cell(cells[name, n, engine]) for engine in ('auto', 'dense', PEER))} |"
        for name in LOSSES
        for n in given.rows
    ]
    write_text(given.out / "index_tuples_cpu.md", head + "\n".join(lines) + "\n")
    print("\n".join(lines))


def cell(row: dict[str, Any]) -> str:
    return row["failed"] + " | " if "failed" in row else f"{row['ms']:,.0f} | {row['MB']:,.0f}"


if __name__ == "__main__":
    main()
