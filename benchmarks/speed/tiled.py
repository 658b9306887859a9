"""Time and peak memory of the tiled engine against dense, pytorch-metric-learning and the two-product limit.

    python benchmarks/speed/tiled.py                                  a few minutes on one core
    python benchmarks/speed/tiled.py --sizes 1024 --rounds 9 --no-memory

The limit is `(E @ E.T) @ E`: the two matrix products that no pairwise loss can do without. All contestants of a loss
take turns within a round; medians and ratios are what counts, milliseconds belong to the machine. Memory is what a
step needs at its peak, forward and backward, beyond the embeddings and their gradient; it is read on Linux only.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import nearfar as nf

RESULTS = Path(__file__).parents[1] / "results"
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
L = nf.losses

OURS: dict[str, Callable[[int, str], torch.nn.Module]] = {
    "Contrastive": lambda n, e: L.Contrastive(power=1, reduction="nonzero", engine=e),
    "Margin": lambda n, e: L.Margin(engine=e),
    "BinomialDeviance": lambda n, e: L.BinomialDeviance(engine=e),
    "DroTopK": lambda n, e: L.DroTopK(k=2 * n, engine=e),
    "DroTopKPN": lambda n, e: L.DroTopKPN(k=2 * n, engine=e),
    "DroKL": lambda n, e: L.DroKL(engine=e),
    "DroKLGrouped": lambda n, e: L.DroKLGrouped(engine=e),
    "DroChiSquare": lambda n, e: L.DroChiSquare(rho=1.0, engine=e),
    "MultiSimilarity": lambda n, e: L.MultiSimilarity(miner=None, engine=e),
    "MultiSimilarity+miner": lambda n, e: L.MultiSimilarity(engine=e),
    "SupCon": lambda n, e: L.SupCon(engine=e),
    "NTXent": lambda n, e: L.NTXent(engine=e),
    "Circle": lambda n, e: L.Circle(engine=e),
    "GeneralizedLifted": lambda n, e: L.GeneralizedLifted(engine=e),
    "HAP2S": lambda n, e: L.HAP2S(engine=e),
    "LiftedStructure": lambda n, e: L.LiftedStructure(engine=e),
    "Triplet hard": lambda n, e: L.Triplet(margin=0.2, mining="hard", reduction="nonzero", engine=e),
    "Triplet all": lambda n, e: L.Triplet(reduction="nonzero", engine=e),
    "Triplet semihard": lambda n, e: L.Triplet(mining="semihard", reduction="nonzero", engine=e),
    "Angular": lambda n, e: L.Angular(engine=e),
}
DENSE_UP_TO = {"Triplet all": 2048, "Triplet semihard": 2048, "Angular": 1024}
"""Beyond, dense needs gigabytes."""


def peers(size: int) -> dict[str, Step]:
    """What pytorch-metric-learning can do at this size, in this much time and memory."""
    from pytorch_metric_learning import losses as peer
    from pytorch_metric_learning import miners

    ms, hard = miners.MultiSimilarityMiner(), miners.BatchHardMiner()
    ms_loss, triplet = peer.MultiSimilarityLoss(), peer.TripletMarginLoss(margin=0.2)
    found: dict[str, Step] = {
        "Contrastive": peer.ContrastiveLoss(),
        "MultiSimilarity": ms_loss,
        "MultiSimilarity+miner": lambda e, y: ms_loss(e, y, ms(e, y)),
        "SupCon": peer.SupConLoss(),
        "Circle": peer.CircleLoss(),
        "GeneralizedLifted": peer.GeneralizedLiftedStructureLoss(),
        "Triplet hard": lambda e, y: triplet(e, y, hard(e, y)),
    }
    if size <= 1024:
        found["Triplet all"] = peer.TripletMarginLoss()
    if size <= 256:
        found |= {"NTXent": peer.NTXentLoss(), "LiftedStructure": peer.LiftedStructureLoss()}
    return found


def batch(size: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random rows, four to a class, in no order."""
    torch.manual_seed(0)
    labels = torch.arange(size // 4).repeat_interleave(4)[torch.randperm(size)]
    return torch.randn(size, width, requires_grad=True), labels


def seconds(step: Step, e: torch.Tensor, y: torch.Tensor) -> float:
    e.grad = None
    start = time.perf_counter()
    step(e, y).sum().backward()
    return time.perf_counter() - start


def limit(e: torch.Tensor) -> float:
    with torch.no_grad():
        start = time.perf_counter()
        (e @ e.T) @ e
        return time.perf_counter() - start


def measure(name: str, size: int, width: int, rounds: int, threads: int) -> dict[str, object]:
    """One loss at one size: medians of contestants that take turns."""
    torch.set_num_threads(threads)
    e, y = batch(size, width)
    runners: dict[str, Step] = {"tiled": OURS[name](size, "tiled"), "auto": OURS[name](size, "auto")}
    if size <= DENSE_UP_TO.get(name, 4096):
        runners["dense"] = OURS[name](size, "dense")
    if name in peers(size):
        runners["pml"] = peers(size)[name]
    times: dict[str, list[float]] = {key: [] for key in ("limit", *runners)}
    for _ in range(rounds + 1):  # the first round is thrown away
        times["limit"].append(limit(e))
        for key, step in runners.items():
            times[key].append(seconds(step, e, y))
    middle = {key: statistics.median(found[1:]) for key, found in times.items()}
    entry: dict[str, object] = {"loss": name, "B": size, "d": width, "threads": threads}
    entry["limit_ms"] = round(1e3 * middle["limit"], 2)
    for key in runners:
        entry[f"{key}_x_limit"] = round(middle[key] / middle["limit"], 2)
    for key in ("dense", "pml"):
        if key in middle:
            entry[f"{key}_over_tiled"] = round(middle[key] / middle["tiled"], 2)
    if "dense" in middle:
        entry["auto_over_dense"] = round(middle["auto"] / middle["dense"], 2)
    return entry


def peak(name: str, size: int, width: int, engine: str) -> float:
    """Megabytes that a step takes beyond what is there before it, in a process of its own."""
    script = [sys.executable, __file__, "--peak", name, str(size), str(width), engine]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    return float("nan") if done.returncode else round(float(done.stdout), 1)


def show_peak(name: str, size: str, width: str, engine: str) -> None:
    torch.set_num_threads(1)
    e, y = batch(int(size), int(width))
    OURS[name](256, engine)(*batch(256, int(width))).backward()  # what is loaded once does not count
    e.grad = torch.zeros_like(e)
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak begins anew
    before = resident("VmRSS")
    OURS[name](int(size), engine)(e, y).backward()
    print(resident("VmHWM") - before)


def resident(key: str) -> float:
    """Megabytes of this process, as Linux counts them."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) / 1024


def table(entries: list[dict[str, object]]) -> str:
    keys = {
        "loss": "loss", "B": "B", "tiled_x_limit": "tiled x limit", "dense_x_limit": "dense x limit",
        "pml_x_limit": "PML x limit", "dense_over_tiled": "dense / tiled", "pml_over_tiled": "PML / tiled",
        "auto_over_dense": "auto / dense", "tiled_mb": "tiled MB", "dense_mb": "dense MB",
    }  # fmt: skip
    lines = ["| " + " | ".join(keys.values()) + " |", "|" + "---|" * len(keys)]
    lines += ["| " + " | ".join(str(e.get(key, "-")) for key in keys) + " |" for e in entries]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--losses", nargs="+", choices=list(OURS), default=list(OURS))
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--peak", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peak:
        show_peak(*given.peak)
        return
    entries = []
    for size in given.sizes:
        for name in given.losses:
            entry = measure(name, size, given.width, given.rounds, given.threads)
            if given.memory and size == max(given.sizes):
                entry["tiled_mb"] = peak(name, size, given.width, "tiled")
                if "dense_x_limit" in entry:
                    entry["dense_mb"] = peak(name, size, given.width, "dense")
            entries.append(entry)
            print({key: value for key, value in entry.items() if key not in ("d", "threads")}, flush=True)
    versions = {"nearfar": nf.__version__, "torch": torch.__version__, "python": platform.python_version()}
    config = {key: value for key, value in vars(given).items() if key != "peak"}
    RESULTS.mkdir(exist_ok=True)
    record = {"config": config, "versions": versions, "results": entries}
    (RESULTS / "tiled_cpu.json").write_text(json.dumps(record, indent=1) + "\n")
    note = (
        f"Medians of {given.rounds}, {given.threads} thread, d = {given.width}, four rows a class, forward and "
        f"backward; {versions}. MB: peak beyond the embeddings and their gradient, each in a process of its own."
    )
    (RESULTS / "tiled_cpu.md").write_text(f"# The tiled engine, CPU\n\n{note}\n\n{table(entries)}\n")


if __name__ == "__main__":
    main()
