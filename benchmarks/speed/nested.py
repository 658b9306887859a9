"""Time of `nf.Nested` with six prefixes, as a multiple of the loss alone.

    python benchmarks/speed/nested.py            about a minute on one core

Rows of width 768 in classes of four. Calls alternate, and CPU seconds are compared: the median of the ratios of
neighboring calls of loss and gradient.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

import nearfar as nf

DIMS, WIDTH = (32, 64, 128, 256, 512, 768), 768
RESULT = Path(__file__).parents[1] / "results" / "nested_cpu.md"


def seconds(run: Callable[[], torch.Tensor]) -> float:
    start = time.process_time()
    run().backward()
    return time.process_time() - start


def ratio(rows: int, repeats: int) -> float:
    torch.manual_seed(0)
    x, labels = torch.randn(rows, WIDTH, requires_grad=True), torch.arange(rows) // 4
    loss = nf.losses.NTXent()
    nested = nf.Nested(loss, dims=DIMS)
    runs = [lambda made=made: made(x, labels) for made in (loss, nested)]
    for run in runs:
        seconds(run)
    found = [[seconds(run) for run in runs] for _ in range(repeats)]
    return median(many / one for one, many in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    lines = ["| rows | six prefixes / the loss alone |", "|---|---|"]
    lines += [f"| {rows:,} | {ratio(rows, given.repeats):.2f} |" for rows in sorted({128, given.rows})]
    text = "\n".join(lines) + "\n"
    print(text)
    RESULT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
