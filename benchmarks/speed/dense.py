"""Time of the dense losses against pytorch-metric-learning and the two-product limit, interleaved in one process.

    make bench                                     about two minutes on one core
    python benchmarks/speed/dense.py --sizes 128 --rounds 9

The limit is `(E @ E.T) @ E`: the two matrix products that no pairwise loss can do without. Compare ratios; milliseconds
depend on the machine. PML is skipped where it would not fit (all triplets beyond 512 rows).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytorch_metric_learning as pml
import torch
from pytorch_metric_learning import losses as peer
from pytorch_metric_learning import miners

import nearfar as nf

RESULTS = Path(__file__).parents[1] / "results"
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def contestants(size: int) -> dict[str, tuple[Step, Step | None]]:
    """Ours and theirs, by name."""
    ms, hard = miners.MultiSimilarityMiner(), miners.BatchHardMiner()
    ms_loss, triplet = peer.MultiSimilarityLoss(), peer.TripletMarginLoss(margin=0.2)
    triplets = peer.TripletMarginLoss()
    return {
        "Contrastive": (nf.losses.Contrastive(power=1, reduction="nonzero"), peer.ContrastiveLoss()),
        "MultiSimilarity": (nf.losses.MultiSimilarity(miner=None), ms_loss),
        "MultiSimilarity+miner": (nf.losses.MultiSimilarity(), lambda e, y: ms_loss(e, y, ms(e, y))),
        "SupCon": (nf.losses.SupCon(), peer.SupConLoss()),
        "Triplet hard": (
            nf.losses.Triplet(margin=0.2, mining="hard", reduction="nonzero"),
            lambda e, y: triplet(e, y, hard(e, y)),
        ),
        "Triplet all": (nf.losses.Triplet(reduction="nonzero"), triplets if size <= 512 else None),
        "GeneralizedLifted": (nf.losses.GeneralizedLifted(), peer.GeneralizedLiftedStructureLoss()),
        "NTXent": (nf.losses.NTXent(), peer.NTXentLoss() if size <= 256 else None),
        "LiftedStructure": (nf.losses.LiftedStructure(), peer.LiftedStructureLoss() if size <= 256 else None),
        "DroTopK": (nf.losses.DroTopK(k=2 * size), None),
        "DroKL": (nf.losses.DroKL(), None),
        "DroChiSquare": (nf.losses.DroChiSquare(rho=1.0), None),
    }


def milliseconds(step: Step, e: torch.Tensor, y: torch.Tensor) -> float:
    e.grad = None
    start = time.perf_counter()
    step(e, y).sum().backward()
    return 1e3 * (time.perf_counter() - start)


def limit(e: torch.Tensor, y: torch.Tensor) -> float:
    with torch.no_grad():
        start = time.perf_counter()
        (e @ e.T) @ e
        return 1e3 * (time.perf_counter() - start)


def measure(size: int, width: int, rounds: int) -> list[dict[str, object]]:
    torch.manual_seed(0)
    e = torch.randn(size, width, requires_grad=True)
    y = torch.arange(size // 4).repeat_interleave(4)
    entries = []
    for name, (ours, theirs) in contestants(size).items():
        times: dict[str, list[float]] = {"ours": [], "theirs": [], "limit": []}
        for _ in range(rounds + 1):  # interleaved, and the first round thrown away
            times["limit"].append(limit(e, y))
            times["ours"].append(milliseconds(ours, e, y))
            if theirs is not None:
                times["theirs"].append(milliseconds(theirs, e, y))
        middle = {key: statistics.median(value[1:]) for key, value in times.items() if len(value) > 1}
        entries.append(
            {
                "loss": name,
                "B": size,
                "d": width,
                "ms": round(middle["ours"], 3),
                "x_limit": round(middle["ours"] / middle["limit"], 1),
                "peer_over_ours": round(middle["theirs"] / middle["ours"], 2) if "theirs" in middle else None,
            }
        )
        print(
            "{loss:24s} B={B:<6d} {ms:9.2f} ms  {x_limit:6.1f} x limit  peer/ours {peer_over_ours}".format(
                **entries[-1]
            )
        )
    return entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    entries = [entry for size in given.sizes for entry in measure(size, given.width, given.rounds)]
    versions = {
        "nearfar": nf.__version__,
        "torch": torch.__version__,
        "pml": pml.__version__,
        "python": platform.python_version(),
    }
    RESULTS.mkdir(exist_ok=True)
    record = {"config": vars(given), "versions": versions, "results": entries}
    (RESULTS / "dense_cpu.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    lines = ["| loss | B | ms | x limit | peer / ours |", "|---|---|---|---|---|"]
    lines += [
        f"| {e['loss']} | {e['B']} | {e['ms']} | {e['x_limit']} | {e['peer_over_ours'] or '-'} |" for e in entries
    ]
    note = f"Medians of {given.rounds}, {given.threads} thread, d = {given.width}, forward and backward; {versions}.\n"
    (RESULTS / "dense_cpu.md").write_text(
        f"# Dense losses, CPU\n\n{note}\n" + "\n".join(lines) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
