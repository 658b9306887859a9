"""Images a second of training and embedding on photographs, by cache, compilation and batch; and of several runs.

python benchmarks/speed/pipeline.py --path FOLDER [--weights FILE] [--batches 80 128 256] [--together 1 8 14]
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from utilization import Utilization

from nearfar._utils.console import Terminal
from nearfar._utils.files import write_text
from nearfar.data import open_data, part
from nearfar.data._picture_cache import cache_data
from nearfar.train import fit, parse
from nearfar.train._build import Input, build_model
from nearfar.train._scores import embed_samples

ROOT = Path(__file__).parents[2]
WARM = 20
"""Steps that are not counted: kernels are chosen and recorded in them."""
APART = 10
"""Steps between two looks at the clock, for each of which the device is waited for."""


def config_of(args, cache, compiled, batch, workers):
    precision = "bf16" if torch.cuda.is_available() else "float32"
    return parse(
        {
            "data": {
                "name": args.data,
                "path": str(args.path),
                "cache": cache,
                "cache_folder": str(args.folder),
                "workers": workers,
                "validation": 0,
                "size": args.size,
            },
            "model": {
                "name": args.network,
                "embedding_dim": 512,
                "freeze_norms": args.network != "small",
                "weights": args.weights,
                "pretrained": args.weights is not None,
            },
            "loss": {"name": "MultiSimilarity"},
            "batches": {"name": "MPerClass", "classes": batch // args.samples, "samples": args.samples},
            "optimizer": {"lr": 1e-5},
            "training": {
                "steps": args.steps,
                "evaluate_every": args.steps,
                "checkpoint_every": args.steps,
                "explain_every": 0,
                "diagnose_every": 0,
                "baselines": False,
                "precision": precision,
                "compile": compiled,
            },
        }
    )


def small_test(data):
    """A data set whose test side is two classes: it is not what is measured."""
    return replace(data, test=part(data.train, np.flatnonzero(data.train.labels < 2)), gallery=None)


def times_of(args, cache, compiled, batch, workers, steps=None):
    """The time on the clock after each step, of one run."""
    config = config_of(args, cache, compiled, batch, workers)
    if steps:
        config = replace(config, training=replace(config.training, steps=steps, evaluate_every=steps))
    data, found = small_test(open_data(args.data, args.path)), []

    def note(moment):
        if moment.step % APART == 0:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            found.append((moment.step, time.time()))

    with tempfile.TemporaryDirectory() as folder:
        fit(config, Path(folder) / "run", data=data, console=Terminal(quiet=True), callbacks=[note])
    return [each for each in found if each[0] >= WARM]


def _member(args, cache, compiled, batch, workers, steps, queue):
    torch.set_num_threads(1)
    try:
        queue.put(times_of(args, cache, compiled, batch, workers, steps))
    except Exception as error:  # the others must not wait for it
        queue.put(f"{type(error).__name__}: {str(error)[:200]}")


def members(count, *settings):
    """The times of each of `count` runs in processes of their own; a run that failed is its error."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=_member, args=(*settings, queue)) for _ in range(count)]
    for process in processes:
        process.start()
    found = [queue.get(timeout=300) for _ in processes]
    for process in processes:
        process.join()
    return found


def one(args, cache, compiled, batch, workers):
    row = {"cache": cache, "compile": compiled, "batch": batch, "workers": workers}
    begin = time.monotonic()
    with Utilization() as watch:
        (found,) = members(1, args, cache, compiled, batch, workers, args.steps)
    if isinstance(found, str):
        return {**row, "error": found}
    (first, start), (last, end) = found[0], found[-1]
    rate = batch * (last - first) / (end - start)
    return {
        **row,
        "images_per_second": rate,
        "idle": watch.idle_between(start, end),
        "seconds": time.monotonic() - begin,
    }


def together(args, compiled, count, batch):
    """Images a second of `count` runs in the time when all of them train."""
    row = {"together": count, "compile": compiled, "batch": batch}
    found = members(count, args, "device", compiled, batch, 0, 4 * args.steps)
    errors = [each for each in found if isinstance(each, str)]
    if errors:
        return {**row, "error": errors[0]}
    start, end = max(each[0][1] for each in found), min(each[-1][1] for each in found)
    if end <= start:
        return {**row, "error": "the runs did not train at the same time; more steps are needed"}
    images = 0.0
    for each in found:
        steps, clock = np.transpose(each)
        images += batch * float(np.diff(np.interp([start, end], clock, steps))[0])
    return {**row, "window": end - start, "images_per_second": images / (end - start)}


def embedding(args):
    """Images a second of embedding the training side, the second time: the first chooses kernels."""
    config = config_of(args, "device", "none", 80, 0)
    data = open_data(args.data, args.path)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, _, plain = build_model(config, Input.of(config, data))
    model = model.to(device, memory_format=torch.channels_last)
    samples = cache_data(data, plain, "device", folder=args.folder).train
    rates = {}
    for precision in ("float32", "bf16"):
        for _ in range(2):
            start = time.monotonic()
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                embed_samples(model, samples, plain, device=device, hold=True)
            if device.type == "cuda":
                torch.cuda.synchronize()
            rates[precision] = len(samples) / (time.monotonic() - start)
    return {"embedding": rates}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, required=True)
    parser.add_argument("--data", default="cub")
    parser.add_argument("--weights")
    parser.add_argument("--network", default="lite0")
    parser.add_argument("--size", type=int)
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batches", type=int, nargs="*", default=[80, 128, 256])
    parser.add_argument("--compile", nargs="*", default=["none", "kernels", "graphs"])
    parser.add_argument("--caches", nargs="*", default=["device"])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--together", type=int, nargs="*", default=[])
    parser.add_argument("--folder", type=Path, default=Path("nearfar-pipeline"), help="where decoded pictures go")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "pipeline.json")
    args = parser.parse_args()
    if args.steps < WARM + APART:
        parser.error(
            f"--steps must be {WARM + APART} or more, of which the first {WARM} are not counted, not {args.steps}."
        )
    rows = []

    def keep(row):
        rows.append(row)
        print(json.dumps(row), flush=True)
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        write_text(args.out, json.dumps({"device": device, "torch": torch.__version__, "rows": rows}, indent=1) + "\n")

    keep(embedding(args))
    for cache, compiled, batch in itertools.product(args.caches, args.compile, args.batches):
        workers = args.workers if cache == "device" else 12
        keep(one(args, cache, compiled, batch // args.samples * args.samples, workers))
    for count, compiled in itertools.product(args.together, args.compile):
        keep(together(args, compiled, count, args.batches[0] // args.samples * args.samples))


if __name__ == "__main__":
    main()
