"""The rows of `nearfar recommend` (src/nearfar/cli/recommend.json) from the results that lie beside this folder.

python benchmarks/quality/rows.py     profs (plain, PROFS, PROFS + HNCM), robustness (right labels), demo, photographs
"""

from __future__ import annotations

import json
from pathlib import Path

from nearfar._utils.files import write_text
from nearfar.studies import grid
from nearfar.studies._training import spread

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def read(name):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def row(data, training, config, recalls, source):
    """One row: what was trained, and R@1 (shares, one a seed) with its 95% t-interval, within [0, 1]."""
    found, batches, optimizer = spread(recalls), config["batches"], config["optimizer"]
    half = found["half"] or 0.0
    return {
        "data": data,
        "classes": training["classes"],
        "per_class": round(training["samples"] / training["classes"]),
        "batch": batches["batch_size"] if "batch_size" in batches else batches["classes"] * batches["samples"],
        "loss": config["loss"],
        "batches": batches,
        "recall": round(found["mean"], 4),
        "low": round(max(0.0, found["mean"] - half), 4),
        "high": round(min(1.0, found["mean"] + half), 4),
        "seeds": len(recalls),
        "source": (RESULTS / source).relative_to(ROOT).as_posix(),
        "optimizer": {"proximal": optimizer["proximal"]} if optimizer["proximal"] else {},
        "model": {} if config["model"]["normalize"] else {"normalize": False},
        "steps": config["training"]["steps"],
    }


def of_study(name, source, columns):
    """The rows of a study's table: the cells of these columns (all where None), each from its own runs."""
    found = read(name)
    runs = {line["key"]: line for line in found["runs"]}
    for cells in found["table"].values():
        for column, cell in cells.items():
            lines = [runs[key] for key in cell["keys"] if key in runs and runs[key]["error"] is None]
            if lines and (columns is None or column in columns):
                recalls = [line["scores"]["recall@1"] for line in lines]
                yield row(found["data"], found["training"], lines[0]["config"], recalls, source)


def of_photographs(data):
    """The test runs of the study's methods on one data set."""
    found = read(f"photographs-{data}")
    runs = {line["key"]: line for line in found["runs"]}
    for method in found["methods"].values():
        lines = [runs[key] for key in method["scores"]["keys"] if key in runs]
        recalls = [line["scores"]["recall@1"] for line in lines]
        yield row(data, found["training"], lines[0]["config"], recalls, "photographs_study.md")


def of_recipe():
    """The recipe for photographs, tested on CUB."""
    lines = list(grid.lines(RESULTS / "recipe-test.jsonl").values())
    recalls = [line["scores"]["recall@1"] for line in lines]
    yield row("cub", read("photographs-cub")["training"], lines[0]["config"], recalls, "recipe.md")


def of_demo():
    """The demo's recipe, tested on scripts never seen."""
    found = read("demo")["test"]
    runs = found["runs"]
    training = read("noise-glyphs")["training"]
    yield row("glyphs", training, found["config"], [run["recall"]["1"] / 100 for run in runs], "demo.md")


def rows():
    return [
        *of_study("profs-glyphs", "profs.md", None),
        *of_study("profs-omniglot", "profs.md", None),
        *of_study("noise-glyphs", "robustness.md", ("0",)),
        *of_demo(),
        *of_photographs("cub"),
        *of_photographs("flowers"),
        *of_recipe(),
    ]


def main():
    found = rows()
    text = ",\n".join(" " + json.dumps(each) for each in found)
    write_text(ROOT / "src" / "nearfar" / "cli" / "recommend.json", f"[\n{text}\n]\n")
    print(f"{len(found)} rows")


if __name__ == "__main__":
    main()
