"""The losses of the papers and other common ones on photographs, each tuned with the same budget and tested once.

python benchmarks/quality/photographs.py --path CUB --path-flowers FLOWERS --jobs 14 --seconds 560 --folder out
    runs what is missing in the folder; call it again to continue
python benchmarks/quality/photographs.py --from out/photographs-cub.json out/photographs-flowers.json [--papers ...]
    writes results/photographs-DATA.json and photographs_study.md, the figures, benchmarks/RESULTS-photographs.md and
    the table in docs/guides/which-loss.md

Every method is tuned on held-out training classes: three learning rates at the parameter's default, then its three
other values at the best rate, six runs each. The choice is written to a ledger, and the chosen configuration is trained
with several seeds on all training classes. Only these runs read test classes.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import photographs_statistics as statistics
from ledger import Ledger
from photographs_methods import BASE, CLAIMS, METHODS, QUICK
from photographs_tables import draw, tables, write_report

from nearfar._utils.checks import check_choice
from nearfar._utils.files import write_text
from nearfar._utils.tables import as_json
from nearfar.studies import grid
from nearfar.studies._training import TrainingStudy, open_study, order_by_seed, summarize
from nearfar.studies.grid import Line, Trial, Workers
from nearfar.train._progress import NotFiniteError

ROOT = Path(__file__).parents[2]
STEPS, QUICK_STEPS = 200, 6
CLASSES, SAMPLES = 16, 5
HELD_OUT = 0.2  # of the training classes; with a tenth of 100 classes the choice would be noise
CLUSTERED = 10_000
RECALLS = (1, 2, 4, 8)
SCORES = (*(f"recall@{k}" for k in RECALLS), "map_at_r", "nmi", "f1")
JUDGE = "map_at_r"  # R@1 hardly differs among the few held-out classes: about 88 on CUB with every loss
PARTS = ("tuning", "test")
SMALL: Mapping[str, Mapping[str, Any]] = {
    "model": {"name": "small", "embedding_dim": 32, "freeze_norms": False},
    "data": {"size": 32},
}
"""The network of a smoke test."""


def reproduce(
    folder: str | Path,
    *,
    data: str = "cub",
    path: str | Path | None = None,
    path_flowers: str | Path | None = None,
    seeds: int = 5,
    steps: int | None = None,
    jobs: int = 1,
    quick: bool = False,
    seconds: float | None = None,
    precision: str | None = None,
    weights: str | Path | None = None,
    methods: Sequence[str] | None = None,
    parts: Sequence[str] = PARTS,
) -> dict[str, Any]:
    """Run what is missing in `folder`, draw the figures, and write the results.

    The order: all tuning, then the first seed of all methods on all data sets, then the second, and so on.

    Args:
        folder: the folder for photographs.jsonl (every run), photographs-DATA.json, photographs-DATA-chosen.json (the
            ledger) and photographs-DATA.png.
        data: cub, folder, or any other data set of pictures at `path`.
        path: path of that data; None: skip it.
        path_flowers: path of Oxford Flowers-102; None: skip it.
        seeds: runs of each chosen configuration.
        steps: steps of each run, while tuning too; None: 200.
        jobs: number of processes.
        quick: a smoke test: a small network at 32 pixels, three methods, six steps, two rates, two values.
        seconds: begin no run after this time; missing results stay empty, and the next call continues.
        precision: float32, bf16, fp16 or float64; None: bf16 on a GPU, else float32.
        weights: a file of weights for the network's trunk; None: the published ones.
        methods: some of `METHODS`; None: all.
        parts: "tuning" and "test", or one of them.

    Returns:
        Data set -> the content of photographs-DATA.json.
    """
    names = tuple(methods or (QUICK if quick else METHODS))
    for name in names:
        check_choice("photographs", "methods", name, tuple(METHODS))
    for part in parts:
        check_choice("photographs", "parts", part, PARTS)
    places = {data: path, "flowers": path_flowers} if data != "flowers" else {data: path or path_flowers}
    places = {name: place for name, place in places.items() if place is not None}
    if not places:
        raise ValueError(f"photographs: no path of {data} or flowers came; give the folder of one of them.")
    how: dict[str, Any] = {"seeds": seeds, "quick": quick, "seconds": seconds, "precision": precision}
    how |= {"weights": weights, "changes": SMALL if quick else None}
    end = None if seconds is None else time.monotonic() + seconds
    with ExitStack() as stack:
        workers = stack.enter_context(Workers(jobs))
        studies = []
        for name, place in places.items():
            study = stack.enter_context(open_study("photographs", folder, data=name, path=place, jobs=workers, **how))
            ledger = Ledger(study.folder / f"photographs-{name}-chosen.json")
            studies.append(Tuning(study, ledger, names, steps or (QUICK_STEPS if quick else STEPS)))
        return _run(studies, Path(folder), workers, end, parts)


@dataclass(frozen=True, eq=False)
class Tuning:
    """Tuning and tests on one data set."""

    study: TrainingStudy
    ledger: Ledger
    methods: tuple[str, ...]
    steps: int

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rates to choose from."""
        return self.study.settings.rates[1:] if self.study.quick else self.study.settings.rates

    @property
    def classes(self) -> int:
        """Classes in a batch: as many as are left while some are held out."""
        return min(CLASSES, self.study.classes - max(1, round(HELD_OUT * self.study.classes)))

    def trial(self, name: str, rate: float, value: float, *, seed: int | None = None) -> Trial:
        """A test run with a seed; without a seed, a run of the tuning, which is scored on held-out training classes."""
        tuned, batches = METHODS[name], self.study.per_class(self.classes * SAMPLES, SAMPLES)
        method = tuned.at(value, batch=self.classes * SAMPLES, steps=self.steps)
        config = self.study.config(
            method, batches, steps=self.steps, rate=rate, seed=seed or 0, loss_lr_mult=tuned.loss_lr_mult
        )
        if seed is None:
            return Trial(config, ks=(1,), held_out=HELD_OUT)
        return Trial(config, ks=RECALLS, clustering=CLUSTERED)

    def by_rate(self, name: str) -> dict[float, Trial]:
        """The first round: every learning rate, at the default of the method's parameter."""
        return {rate: self.trial(name, rate, METHODS[name].default) for rate in self.rates}

    def by_value(self, name: str, rate: float) -> dict[float, Trial]:
        """The second round: every value at one rate; the default was run in the first."""
        tuned = METHODS[name]
        others = [value for value in tuned.values if value != tuned.default]
        return {
            value: self.trial(name, rate, value)
            for value in (tuned.default, *others[: 1 if self.study.quick else None])
        }

    def best(self, known: Mapping[str, Line], trials: Mapping[float, Trial]) -> float | None:
        """The value with the best score, the first of equal ones; None until every value was tried, or if all failed.

        A run whose loss became infinite counts as tried. One that failed in another way, such as for lack of memory,
        says nothing about its value: the next call repeats it, and chooses then.
        """
        lines = [known.get(trial.key, {"error": "missing"}) for trial in trials.values()]
        if any(line["error"] and not line["error"].startswith(NotFiniteError.__name__) for line in lines):
            return None
        scores = {value: known[trial.key]["scores"].get(JUDGE, math.nan) for value, trial in trials.items()}
        ended = {value: score for value, score in scores.items() if math.isfinite(score)}  # failed runs have no score
        return max(ended, key=lambda value: ended[value]) if ended else None

    def second_round(self, known: Mapping[str, Line]) -> list[Trial]:
        """The runs of the second round, of methods whose first is complete."""
        rates = {name: self.best(known, self.by_rate(name)) for name in self.methods if name not in self.ledger}
        return order_by_seed(
            list(self.by_value(name, rate).values()) for name, rate in rates.items() if rate is not None
        )

    def choice(self, name: str, known: Mapping[str, Line]) -> dict[str, Any] | None:
        """The chosen rate and value with the scores on held-out classes; from the ledger, if it has the method."""
        if name in self.ledger:
            return {key: value for key, value in self.ledger[name].items() if key != "config"}
        rate = self.best(known, by_rate := self.by_rate(name))
        by_value = {} if rate is None else self.by_value(name, rate)
        value = self.best(known, by_value) if by_value else None
        if rate is None or value is None:
            return None
        tried = {f"lr {each:g}": trial for each, trial in by_rate.items()}
        tried |= {METHODS[name].label(each): trial for each, trial in by_value.items() if each != METHODS[name].default}
        held_out = {words: known[trial.key]["scores"].get(JUDGE) for words, trial in tried.items()}
        return {"rate": rate, "value": value, "score": JUDGE, "held_out": held_out, "budget": len(tried)}

    def tests(self, known: Mapping[str, Line]) -> dict[str, list[Trial]]:
        """The test runs of each tuned method; its choice is written to the ledger before they are returned."""
        found = {}
        for name in self.methods:
            chosen = self.choice(name, known)
            if chosen is not None:
                seeds = range(self.study.seeds)
                found[name] = [self.trial(name, chosen["rate"], chosen["value"], seed=seed) for seed in seeds]
                self.ledger.fix(name, found[name][0].config, chosen)
        return found


def _run(
    tunings: Sequence[Tuning], folder: Path, workers: Workers, end: float | None, parts: Sequence[str]
) -> dict[str, Any]:
    file = folder / "photographs.jsonl"

    def run(trials: Sequence[Trial]) -> dict[str, Line]:
        left = None if end is None else end - time.monotonic()
        return grid.run(trials, file, workers=workers, seconds=left)

    known = grid.lines(file)
    if "tuning" in parts:
        open_methods = [(tuning, name) for tuning in tunings for name in tuning.methods if name not in tuning.ledger]
        known = run(order_by_seed(list(tuning.by_rate(name).values()) for tuning, name in open_methods))
        known = run([trial for tuning in tunings for trial in tuning.second_round(known)])
    tests: list[dict[str, list[Trial]]] = [{} for _ in tunings]
    if "test" in parts:
        tests = [tuning.tests(known) for tuning in tunings]
        known = run(order_by_seed(trials for cells in tests for trials in cells.values()))
    return {
        tuning.study.data: _write(tuning, known, cells, folder) for tuning, cells in zip(tunings, tests, strict=True)
    }


def _write(tuning: Tuning, known: Mapping[str, Line], tests: Mapping[str, list[Trial]], folder: Path) -> dict[str, Any]:
    """Write the results of one data set, and every run with its configuration."""
    found = tuning.study.about() | {
        "steps": tuning.steps,
        "batch": [tuning.classes, SAMPLES],
        "rates": list(tuning.rates),
        "held_out": HELD_OUT,
        "score": JUDGE,
        "methods": {name: _method(tuning, name, known, tests) for name in tuning.methods},
        "claims": _claims(known, tests),
    }
    runs = _lines(tuning, known, tests)
    found["doctor"] = statistics.record(runs, JUDGE)
    found["runs"] = [{"method": name, **line} for name, line in runs]
    write_text(folder / f"photographs-{tuning.study.data}.json", as_json(found, "runs", 7))
    draw(found, folder)
    return found


def _method(tuning: Tuning, name: str, known: Mapping[str, Line], tests: Mapping[str, list[Trial]]) -> dict[str, Any]:
    chosen, trials = tuning.choice(name, known), tests.get(name, [])
    found: dict[str, Any] = {"chosen": chosen, "scores": summarize(known, trials, SCORES)}
    found["parameter"] = None if chosen is None else METHODS[name].label(chosen["value"])
    base = tests.get(BASE, [])
    scores = () if name == BASE else ("recall@1", "map_at_r")
    found["difference"] = {score: statistics.difference(known, base, trials, score) for score in scores}
    return found


def _claims(known: Mapping[str, Line], tests: Mapping[str, list[Trial]]) -> list[dict[str, Any]]:
    """The claims of Qi et al. 2020 about the methods that were tested, for R@1 as in the paper."""
    return [
        {"claim": words, "difference": statistics.difference(known, tests[worse], tests[better], "recall@1")}
        for words, better, worse in CLAIMS
        if better in tests and worse in tests
    ]


def _lines(tuning: Tuning, known: Mapping[str, Line], tests: Mapping[str, list[Trial]]) -> list[tuple[str, Line]]:
    """Every run with its method: those of the tuning first."""
    found = []
    for name in tuning.methods:
        trials = list(tuning.by_rate(name).values())
        rate = tuning.best(known, tuning.by_rate(name))
        trials += [] if rate is None else list(tuning.by_value(name, rate).values())
        keys = dict.fromkeys(trial.key for trial in (*trials, *tests.get(name, ())))
        found += [(name, known[key]) for key in keys if key in known]
    return found


def train(args: argparse.Namespace) -> None:
    """Run the study, and write its tables beside the runs."""
    keys = ("data", "path", "path_flowers", "seeds", "steps", "jobs", "quick", "seconds", "precision", "weights")
    keys += ("methods", "parts")
    found = reproduce(args.folder, **{key: getattr(args, key) for key in keys})
    for name, each in found.items():
        write_text(args.folder / f"photographs-{name}.md", tables(each))
        tested = sum(not line["held_out"] for line in each["runs"])
        failed = sum(line["error"] is not None for line in each["runs"])
        print(f"{name}: {len(each['runs'])} runs, {tested} of them tests, {failed} failed", flush=True)


def main() -> None:
    """Run the study, or write the reports from its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cub", help="cub, folder, or other pictures at --path")
    parser.add_argument("--path", type=Path)
    parser.add_argument("--path-flowers", type=Path)
    parser.add_argument("--weights", type=Path, help="a file of weights of EfficientNet-Lite0")
    parser.add_argument("--folder", type=Path, default=Path("nearfar-photographs"), help="runs, numbers and figures")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, help="begin no run after this time; call again to continue")
    parser.add_argument("--precision", choices=("float32", "bf16", "fp16", "float64"))
    parser.add_argument("--methods", nargs="+", choices=tuple(METHODS), metavar="METHOD", help="; ".join(METHODS))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--from", dest="made", type=Path, nargs="+", help="JSON files: write the reports, run nothing")
    parser.add_argument(
        "--papers", type=Path, nargs="+", default=[], help="dro-DATA.json, profs-DATA.json: their claims"
    )
    parser.add_argument("--images", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--page", type=Path, default=ROOT / "benchmarks" / "RESULTS-photographs.md")
    parser.add_argument("--which", type=Path, default=ROOT / "docs" / "guides" / "which-loss.md")
    args = parser.parse_args()
    if not args.made:
        train(args)
        return
    studies, papers = (
        [json.loads(file.read_text(encoding="utf-8")) for file in files] for files in (args.made, args.papers)
    )
    write_report(studies, papers, images=args.images, results=args.results, page=args.page, which=args.which)


if __name__ == "__main__":
    main()
