"""One recipe on CUB: `configs/cub_lite0.yaml` over several seeds on a GPU: R@1 on unseen classes, images/s, idle share.

python benchmarks/quality/recipe.py --path FOLDER [--weights FILE] [--seeds 3] [--steps 1000]
python benchmarks/quality/recipe.py --from photographs.json     the table alone

The study of all losses on photographs is photographs.py beside it.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from pathlib import Path

import numpy as np
import torch

import nearfar as nf
from nearfar._utils.files import write_text
from nearfar.bench.utilization import Utilization
from nearfar.data import open_data
from nearfar.runs.config import to_tree
from nearfar.runs.journal import read
from nearfar.train import fit, load
from nearfar.train.scores import score
from nearfar.train.suited import Input, open_model

ROOT = Path(__file__).parents[2]


def one(config_flags: list[tuple[str, str]], seed: int, data: object) -> dict[str, object]:
    config = load(ROOT / "configs" / "cub_lite0.yaml", [*config_flags, ("training.seed", str(seed))])
    with tempfile.TemporaryDirectory() as folder, Utilization() as watch:
        found = fit(config, Path(folder) / "run", data=data)
        lines = [line for line in read(Path(folder) / "run" / "journal.jsonl") if "loss" in line]
    batch = config.batches.options["classes"] * config.batches.options["samples"]
    gaps = np.diff([line["time"] for line in lines[10:]])
    return {
        "seed": seed,
        "recall": {str(k): share for k, share in found.test.recall.items()},
        "map_at_r": found.test.map_at_r,
        "best_step": found.best_step,
        "images_per_second": float(batch / np.median(gaps)),
        "images_per_second_whole": float(batch * len(lines) / lines[-1]["time"]),
        "idle": watch.idle_between(),
        "config": to_tree(config),
    }


def train(words: argparse.Namespace, more: list[str]) -> dict[str, object]:
    """Frozen features, then a run for each seed."""
    flags = [("training.steps", str(words.steps))]
    flags += [("model.weights", words.weights)] if words.weights else []
    flags += [(name.removeprefix("--"), value) for name, value in zip(more[::2], more[1::2], strict=True)]
    data = open_data("cub", words.path)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = load(ROOT / "configs" / "cub_lite0.yaml", flags)
    model, _, plain = open_model(config, Input.of(config, data))
    model.head = torch.nn.Identity()
    frozen, _ = score(model.to(device), data.test, plain, ks=(1,), device=device, workers=config.data.workers)
    rows = [one(flags, seed, data) for seed in range(words.seeds)]
    about = {
        "torch": torch.__version__,
        "nearfar": nf.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }
    sizes = np.unique(data.train.labels, return_counts=True)[1]
    return {
        "frozen": frozen.recall[1],
        "mean": float(np.mean([row["recall"]["1"] for row in rows])),
        "training": {"classes": len(sizes), "samples": int(sizes.sum())},
        "runs": rows,
        "versions": about,
    }


def page(found: dict[str, object]) -> str:
    """The table of photographs.md."""
    rows, versions = found["runs"], found["versions"]
    config = rows[0]["config"]
    steps, rate, share = config["training"]["steps"], config["optimizer"]["lr"], config["data"]["validation"]
    table = [
        f"# CUB-200-2011, classes 101-200, EfficientNet-Lite0, {steps} steps of DRO-TopK (binomial)",
        "",
        f"Frozen features: R@1 {100 * found['frozen']:.1f}. Trained: {100 * found['mean']:.1f} on average over "
        f"{len(rows)} seeds, at rate {rate:g}, {share:.0%} of the training classes held out. "
        f"{versions['device']}, torch {versions['torch']}, python {versions['python']}.",
        "",
        "| seed | R@1 | R@2 | R@4 | R@8 | MAP@R | images/s (median) | images/s (with evaluations) | GPU idle |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        shares = " | ".join(f"{100 * row['recall'][k]:.1f}" for k in ("1", "2", "4", "8"))
        idle = "-" if row["idle"] is None else f"{100 * row['idle']:.0f}%"
        table.append(
            f"| {row['seed']} | {shares} | {100 * row['map_at_r']:.1f} | {row['images_per_second']:.0f} | "
            f"{row['images_per_second_whole']:.0f} | {idle} |"
        )
    return "\n".join(table) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", help="the folder of CUB-200-2011")
    parser.add_argument("--weights")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--folder", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--from", dest="made", type=Path, help="a JSON file: write its table, run nothing")
    words, more = parser.parse_known_args()
    if words.made is None and words.path is None:
        parser.error("--path or --from is needed")
    found = train(words, more) if words.made is None else json.loads(words.made.read_text(encoding="utf-8"))
    write_text(words.folder / "photographs.json", json.dumps(found, indent=1) + "\n")
    write_text(words.folder / "photographs.md", page(found))
    print(page(found))


if __name__ == "__main__":
    main()
