"""Peak memory of a plain step and of `nf.cached_step` with sixteen times the batch, each in a new process.

    python benchmarks/speed/cached.py            about two minutes on one core

The encoder is the small network of the demo on drawings of 64 x 64 pixels, with group norms; the loss DRO-TopK over the
batch. Extra memory is the rise of the process's peak during the step, without inputs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import time
from pathlib import Path
from typing import Any

import torch

import nearfar as nf
from nearfar import models

RESULTS = Path(__file__).parents[1] / "results"


def megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def step(batch: int, chunk: int | None, out: Any) -> None:
    """Run one step in a new process and print its extra peak memory and its seconds."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    encoder = models.build("small", embedding_dim=128, inputs=(1, 64, 64))
    models.group_norms(encoder)
    x, y = torch.rand(batch, 1, 64, 64), torch.arange(batch) // 4
    loss = nf.losses.DroTopK(k=2 * batch)
    nf.cached_step(encoder, x[:8], y[:8], loss, 4)  # libraries load
    before, start = megabytes(), time.process_time()
    if chunk is None:
        loss(encoder(x), y).backward()
    else:
        nf.cached_step(encoder, x, y, loss, chunk)
    out.put({"batch": batch, "chunk": chunk, "MB": megabytes() - before, "CPU s": time.process_time() - start})


def measure(batch: int, chunk: int | None) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    child = context.Process(target=step, args=(batch, chunk, out))
    child.start()
    found: dict[str, Any] = out.get()
    child.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=512)
    given = parser.parse_args()
    rows = [
        measure(given.batch, None),
        measure(given.batch, given.batch // 4),
        measure(16 * given.batch, given.batch // 4),
    ]
    lines = ["| batch | chunk | extra MB | CPU s |", "|---|---|---|---|"]
    lines += [f"| {row['batch']:,} | {row['chunk'] or '-'} | {row['MB']:.0f} | {row['CPU s']:.1f} |" for row in rows]
    text = "\n".join(lines) + "\n"
    print(text)
    (RESULTS / "cached_cpu.md").write_text(text, encoding="utf-8")
    (RESULTS / "cached_cpu.json").write_text(
        json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
