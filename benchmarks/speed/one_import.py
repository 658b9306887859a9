"""What changing one import gains: pytorch-metric-learning's losses and miners beside `nearfar.pml`'s, the same script.

    python benchmarks/speed/one_import.py                      some minutes: CPU, one thread
    python benchmarks/speed/one_import.py --device cuda        the same on a GPU
    python benchmarks/speed/one_import.py --sizes 32 64        does it run at all?
    python benchmarks/speed/one_import.py --scripts "MultiSimilarityLoss + miner"    only that line

Both run `miner(e, y)`, if there is a miner, and `loss(e, y, tuples)` forward and backward in turns, on the same rows
with four of each class. Medians of CPU seconds on one thread, of the wall clock on a GPU. Larger sizes are left out
once a step of PML has taken longer than --longest, or has run out of memory.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytorch_metric_learning as theirs
import torch
from pytorch_metric_learning import losses as their_losses
from pytorch_metric_learning import miners as their_miners
from torch import Tensor

import nearfar
from nearfar._utils.files import write_text
from nearfar.bench._subjects import batch
from nearfar.bench._timing import Patience, threads, time_in_turns
from nearfar.pml import losses as our_losses
from nearfar.pml import miners as our_miners

RESULTS = Path(__file__).parents[1] / "results"
SIZES = {"cpu": (32, 64, 128, 256, 512, 1024), "cuda": (128, 256, 512, 1024, 2048)}
WIDTHS = (128, 512)
SCRIPTS = {
    "MultiSimilarityLoss": ("MultiSimilarityLoss", None),
    "MultiSimilarityLoss + miner": ("MultiSimilarityLoss", "MultiSimilarityMiner"),
    "ContrastiveLoss": ("ContrastiveLoss", None),
    "ContrastiveLoss + pair miner": ("ContrastiveLoss", "PairMarginMiner"),
    "ContrastiveLoss + hard miner": ("ContrastiveLoss", "BatchHardMiner"),
    "TripletMarginLoss": ("TripletMarginLoss", None),
    "TripletMarginLoss + triplet miner": ("TripletMarginLoss", "TripletMarginMiner"),
    "TripletMarginLoss + hard miner": ("TripletMarginLoss", "BatchHardMiner"),
    "SupConLoss": ("SupConLoss", None),
    "NTXentLoss": ("NTXentLoss", None),
    "CircleLoss": ("CircleLoss", None),
    "MarginLoss": ("MarginLoss", None),
    "GeneralizedLiftedStructureLoss": ("GeneralizedLiftedStructureLoss", None),
    "TupletMarginLoss": ("TupletMarginLoss", None),
}


def step(name: str, losses: ModuleType, miners: ModuleType, device: str) -> Callable[[Tensor, Tensor], Tensor]:
    loss_name, miner_name = SCRIPTS[name]
    loss = getattr(losses, loss_name)().to(device)
    miner = getattr(miners, miner_name)() if miner_name else None
    return lambda e, y: loss(e, y) if miner is None else loss(e, y, miner(e, y))


def measure(name: str, rows: int, width: int, device: str, patience: Patience) -> dict[str, Any]:
    """Milliseconds of both and their ratio, or the reason of a failure."""
    e, y = batch(rows, width, device)
    steps = {
        "nearfar": step(name, our_losses, our_miners, device),
        "PML": step(name, their_losses, their_miners, device),
    }
    failed: dict[str, str] = {}
    taken = time_in_turns(steps, e, y, patience, failed).seconds
    found: dict[str, Any] = {"script": name, "rows": rows, "width": width}
    if failed:
        return found | {"failed": "; ".join(f"{who}: {how}" for who, how in failed.items())}
    return found | {
        "ms": 1e3 * taken["nearfar"],
        "PML ms": 1e3 * taken["PML"],
        "ratio": taken["PML"] / taken["nearfar"],
    }


def rows_of(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    patience = Patience(given.rounds, given.seconds)
    for name in given.scripts or SCRIPTS:
        for width in given.widths:
            for rows in given.sizes or SIZES[given.device]:
                row = measure(name, rows, width, given.device, patience)
                print(line(row), flush=True)
                yield row
                if row.get("failed") or max(row["PML ms"], row["ms"]) > 1e3 * given.longest:
                    break


def line(row: dict[str, Any]) -> str:
    start = f"| {row['script']} | {row['width']} | {row['rows']:,} |"
    if row.get("failed"):
        return f"{start} {row['failed']} | | |"
    return f"{start} {row['ms']:,.2f} | {row['PML ms']:,.2f} | {row['ratio']:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--sizes", type=int, nargs="*")
    parser.add_argument("--scripts", nargs="*", choices=tuple(SCRIPTS), metavar="SCRIPT")
    parser.add_argument("--widths", type=int, nargs="*", default=WIDTHS)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a script at a size, after which no round begins")
    parser.add_argument("--longest", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--name", default="one_import", help="of the files that are written")
    given = parser.parse_args()
    file = given.out / f"{given.name}_{given.device}.json"
    found: list[dict[str, Any]] = []
    if given.scripts and file.exists():  # what was measured of other scripts stays
        held = json.loads(file.read_text(encoding="utf-8"))["results"]
        found = [row for row in held if row["script"] not in given.scripts]
    with threads(1):
        for row in rows_of(given):  # written as it goes: a run that is stopped keeps what it has
            found.append(row)
            write(given, found)


def write(given: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    versions = {
        "nearfar": nearfar.__version__,
        "torch": torch.__version__,
        "pytorch-metric-learning": theirs.__version__,
    }
    place = torch.cuda.get_device_name() if given.device == "cuda" else "CPU, one thread"
    record = {"device": place, "versions": versions, "results": rows}
    write_text(given.out / f"{given.name}_{given.device}.json", json.dumps(record, indent=1) + "\n")
    head = f"# One changed import: PML beside nearfar.pml, {place}\n\n"
    software = ", ".join(f"{name} {version}" for name, version in versions.items())
    about = f"Forward and backward with the miner, four rows a class, float32, medians; {software}.\n\n"
    table = "| script | d | rows | ms | PML ms | PML / ours |\n|---|---|---|---|---|---|\n"
    write_text(given.out / f"{given.name}_{given.device}.md", head + about + table + "\n".join(map(line, rows)) + "\n")


if __name__ == "__main__":
    main()
