"""Cost of PML's names: a loss of `nearfar.pml` against the same loss of `nf.losses`, interleaved in one process.

    python benchmarks/speed/bridge.py
    python benchmarks/speed/bridge.py --sizes 128 --rounds 200 --only SupConLoss
    python benchmarks/speed/bridge.py --device cuda

Each step is forward and backward. The least of many is compared; on a CPU it is processor time, which other processes
disturb less. `MarginLoss` counts a pair once per triplet, as PML does, and the native loss counts it once: its ratio
compares two different losses.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import nearfar as nf
from nearfar.pml import losses

L = nf.losses
CLASSES, WIDTH = 32, 128
PAIRS: dict[str, Callable[[], nn.Module]] = {
    "ContrastiveLoss": lambda: L.Contrastive(pos_margin=0, neg_margin=1, power=1, reduction="nonzero"),
    "TripletMarginLoss": lambda: L.Triplet(margin=0.05, swap=False, reduction="nonzero"),
    "MultiSimilarityLoss": lambda: L.MultiSimilarity(alpha=2, beta=50, threshold=0.5, miner=None),
    "LiftedStructureLoss": lambda: L.LiftedStructure(margin=1),
    "GeneralizedLiftedStructureLoss": lambda: L.GeneralizedLifted(margin=1),
    "NPairsLoss": lambda: L.NPair(l2=0, similarity=nf.similarity.Dot(normalize=True)),
    "AngularLoss": lambda: L.Angular(degrees=40),
    "NTXentLoss": lambda: L.NTXent(temperature=0.07),
    "SupConLoss": lambda: L.SupCon(temperature=0.1),
    "CircleLoss": lambda: L.Circle(margin=0.4, scale=80),
    "MarginLoss": lambda: L.Margin(margin=0.2, beta=1.2, learn=False, reduction="nonzero"),
    "ProxyNCALoss": lambda: L.ProxyNCA(CLASSES, WIDTH, scale=1),
    "ProxyAnchorLoss": lambda: L.ProxyAnchor(CLASSES, WIDTH, margin=0.1, scale=32),
    "ArcFaceLoss": lambda: L.ArcFace(CLASSES, WIDTH, margin=math.radians(28.6), scale=64),
}


def step(loss: nn.Module, rows: Tensor, labels: Tensor) -> float:
    """Milliseconds of forward and backward."""
    rows.grad = None
    clock = time.process_time if rows.device.type == "cpu" else time.perf_counter
    _wait(rows)
    start = clock()
    loss(rows, labels).backward()
    _wait(rows)
    return 1e3 * (clock() - start)


def _wait(rows: Tensor) -> None:
    if rows.device.type == "cuda":
        torch.cuda.synchronize(rows.device)


def ratio(name: str, size: int, rounds: int, device: str) -> tuple[float, float]:
    """The least milliseconds of both."""
    rows = torch.randn(size, WIDTH, device=device, requires_grad=True)
    labels = torch.arange(size, device=device) % CLASSES
    args = (CLASSES, WIDTH) if name in ("ProxyNCALoss", "ProxyAnchorLoss", "ArcFaceLoss") else ()
    pair = [getattr(losses, name)(*args).to(device), PAIRS[name]().to(device)]
    for loss in pair * 3:
        step(loss, rows, labels)
    found = [[step(loss, rows, labels) for loss in (pair if turn % 2 else pair[::-1])] for turn in range(rounds)]
    ours = min(each[0] if turn % 2 else each[1] for turn, each in enumerate(found))
    native = min(each[1] if turn % 2 else each[0] for turn, each in enumerate(found))
    return ours, native


def main() -> None:
    """Print a line per loss and size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--only", nargs="+", default=list(PAIRS))
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    torch.manual_seed(0)
    print(f"{'loss':32} {'rows':>6} {'nearfar.pml':>12} {'nf.losses':>12} {'ratio':>7}")
    for size in asked.sizes:
        for name in asked.only:
            rounds = max(6, asked.rounds * 128 // size)
            ours, native = ratio(name, size, rounds, asked.device)
            print(f"{name:32} {size:6} {ours:9.3f} ms {native:9.3f} ms {ours / native:7.2f}", flush=True)


if __name__ == "__main__":
    main()
