"""What changing one import gains: pytorch-metric-learning's losses and miners beside `nearfar.pml`'s, the same script.

    python benchmarks/speed/one_import.py                      some minutes: CPU, one thread
    python benchmarks/speed/one_import.py --device cuda        the same on a GPU
    python benchmarks/speed/one_import.py --sizes 32 64        does it run at all?
    python benchmarks/speed/one_import.py --scripts "MultiSimilarityLoss + miner" --name one_import_tuples

Both run `miner(e, y)` where there is one and `loss(e, y, tuples)` forward and backward, on the same rows with four of a
class, in turns; medians (CPU seconds on one thread, the clock on a GPU). Larger sizes are left out once a step of PML
has taken longer than --longest, or more memory than there is.
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

import nearfar
from nearfar._utils.files import write_text
from nearfar.bench.subjects import batch
from nearfar.bench.timing import LIMIT, Patience, taking_turns, threads
from nearfar.pml import losses as our_losses
from nearfar.pml import miners as our_miners

RESULTS = Path(__file__).parents[1] / "results"
SIZES = {"cpu": (128, 512, 1024, 2048, 4096), "cuda": (128, 512, 1024, 2048, 4096, 8192)}
WIDTH = {"cpu": 128, "cuda": 512}
SCRIPTS: dict[str, Callable[[ModuleType, ModuleType], tuple[Any, Any]]] = {
    "MultiSimilarityLoss + miner": lambda losses, miners: (losses.MultiSimilarityLoss(), miners.MultiSimilarityMiner()),
    "ContrastiveLoss": lambda losses, miners: (losses.ContrastiveLoss(), None),
    "ContrastiveLoss + miner": lambda losses, miners: (losses.ContrastiveLoss(), miners.PairMarginMiner()),
    "TripletMarginLoss": lambda losses, miners: (losses.TripletMarginLoss(), None),
    "TripletMarginLoss + miner": lambda losses, miners: (losses.TripletMarginLoss(), miners.TripletMarginMiner()),
    "TripletMarginLoss + hard miner": lambda losses, miners: (losses.TripletMarginLoss(), miners.BatchHardMiner()),
    "SupConLoss": lambda losses, miners: (losses.SupConLoss(), None),
    "NTXentLoss": lambda losses, miners: (losses.NTXentLoss(), None),
    "CircleLoss": lambda losses, miners: (losses.CircleLoss(), None),
    "MarginLoss": lambda losses, miners: (losses.MarginLoss(), None),
}


def step(made: tuple[Any, Any], device: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    loss, miner = made[0].to(device), made[1]
    return lambda e, y: loss(e, y) if miner is None else loss(e, y, miner(e, y))


def measured(name: str, rows: int, device: str, patience: Patience) -> dict[str, Any]:
    """Milliseconds of both and their ratio; or the word for how one of them failed."""
    e, y = batch(rows, WIDTH[device], device)
    make = SCRIPTS[name]
    steps = {
        "nearfar": step(make(our_losses, our_miners), device),
        "PML": step(make(their_losses, their_miners), device),
    }
    found: dict[str, Any] = {"script": name, "rows": rows}
    for who in steps:  # once each: what fails alone is told from what fails together
        try:
            taking_turns({who: steps[who]}, e, y, Patience(0, 1.0))
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if device == "cuda":
                torch.cuda.empty_cache()
            word = "memory" if "memory" in str(error).lower() or "allocate" in str(error).lower() else "error"
            found["failed"] = f"{who}: {word}"
            return found
    taken = taking_turns(steps, e, y, patience).seconds
    return found | {
        "ms": 1e3 * taken["nearfar"],
        "PML ms": 1e3 * taken["PML"],
        "ratio": taken["PML"] / taken["nearfar"],
        "limit ms": 1e3 * taken[LIMIT],
    }


def rows_of(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    patience = Patience(given.rounds, 2.0)
    for name in given.scripts or SCRIPTS:
        for rows in given.sizes or SIZES[given.device]:
            row = measured(name, rows, given.device, patience)
            print(line(row), flush=True)
            yield row
            if row.get("failed") or max(row["PML ms"], row["ms"]) > 1e3 * given.longest:
                break


def line(row: dict[str, Any]) -> str:
    if row.get("failed"):
        return f"| {row['script']} | {row['rows']:,} | {row['failed']} | | | |"
    times = f"{row['ms']:,.1f} | {row['PML ms']:,.1f} | {row['ratio']:.2f} | {row['ms'] / row['limit ms']:.1f}"
    return f"| {row['script']} | {row['rows']:,} | {times} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--sizes", type=int, nargs="*")
    parser.add_argument("--scripts", nargs="*", choices=tuple(SCRIPTS), metavar="SCRIPT")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--longest", type=float, default=10.0)
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
    record = {"device": place, "width": WIDTH[given.device], "versions": versions, "results": rows}
    write_text(given.out / f"{given.name}_{given.device}.json", json.dumps(record, indent=1) + "\n")
    head = f"# One changed import: PML beside nearfar.pml, {place}, d = {WIDTH[given.device]}\n\n"
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    about = f"Forward and backward with the miner, four rows a class, float32, medians; {told}.\n\n"
    table = "| script | rows | ms | PML ms | PML / ours | x limit |\n|---|---|---|---|---|---|\n"
    write_text(given.out / f"{given.name}_{given.device}.md", head + about + table + "\n".join(map(line, rows)) + "\n")


if __name__ == "__main__":
    main()
