"""Photographs: the losses of the papers and today's usual ones, each tuned with the same budget and tested once.

`reproduce(folder, path=..., path_flowers=...)` tunes every method on training classes that are held out (three learning
rates at the parameter's default, then its three other values at the best rate: six runs each), writes the choice into a
ledger, and trains the chosen configuration with several seeds on all training classes. Test classes are read by these
runs alone, and the ledger refuses another configuration of a method that it holds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearfar._utils.checks import check_choice
from nearfar._utils.files import write_text
from nearfar.studies import _photographs_statistics as statistics
from nearfar.studies import grid
from nearfar.studies._desk import Desk, as_json, cell, in_rounds, open_desk
from nearfar.studies._photographs_ledger import Ledger
from nearfar.studies._photographs_methods import BASE, CLAIMS, METHODS, QUICK
from nearfar.studies._photographs_pages import draw, markdown, ranked
from nearfar.studies.grid import Line, Trial, Workers
from nearfar.train.progress import NotFiniteError

__all__ = ["draw", "markdown", "ranked", "reproduce"]

STEPS, QUICK_STEPS = 200, 6
CLASSES, SAMPLES = 16, 5
HELD_OUT = 0.2  # of the training classes; a tenth of a hundred would choose by noise
CLUSTERED = 10_000
RECALLS = (1, 2, 4, 8)
SCORES = (*(f"recall@{k}" for k in RECALLS), "map_at_r", "nmi", "f1")
JUDGE = "map_at_r"  # R@1 is nearly full among the few classes that are held out: 88 of 100 on CUB, from every loss
PARTS = ("tuning", "test")
SMALL: Mapping[str, Mapping[str, Any]] = {
    "model": {"name": "small", "embedding_dim": 32, "freeze_norms": False},
    "data": {"size": 32},
}
"""The network of a quick check."""


def reproduce(
    folder: str | Path,
    *,
    data: str = "cub",
    path: str | Path | None = None,
    path_flowers: str | Path | None = None,
    seeds: int = 5,
    steps: int | None = None,
    jobs: int | Workers = 1,
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
        path: path of that data; None leaves it out.
        path_flowers: path of Oxford Flowers-102; None leaves it out.
        seeds: runs of each chosen configuration.
        steps: steps of each run, while tuning too; None: 200.
        jobs: number of processes, or `Workers` that are running already.
        quick: a smoke test: a small network at 32 pixels, three methods, six steps, two rates, two values.
        seconds: begin no run after this time; what is missing stays empty, and the next call continues.
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
        raise ValueError(f"photographs: no path of {data} or flowers came; name the folder of one of them.")
    how: dict[str, Any] = {"seeds": seeds, "quick": quick, "seconds": seconds, "precision": precision}
    how |= {"weights": weights, "changes": SMALL if quick else None}
    end = None if seconds is None else time.monotonic() + seconds
    with ExitStack() as stack:
        workers = stack.enter_context(nullcontext(jobs) if isinstance(jobs, Workers) else Workers(jobs))
        studies = []
        for name, place in places.items():
            desk = stack.enter_context(open_desk("photographs", folder, data=name, path=place, jobs=workers, **how))
            ledger = Ledger(desk.folder / f"photographs-{name}-chosen.json")
            studies.append(_Study(desk, ledger, names, steps or (QUICK_STEPS if quick else STEPS)))
        return _run(studies, Path(folder), workers, end, parts)


@dataclass(frozen=True, eq=False)
class _Study:
    """The plan on one data set."""

    desk: Desk
    ledger: Ledger
    methods: tuple[str, ...]
    steps: int

    @property
    def score(self) -> str:
        """What methods are judged by."""
        return JUDGE

    @property
    def rates(self) -> tuple[float, ...]:
        return self.desk.scene.rates[1:] if self.desk.quick else self.desk.scene.rates

    @property
    def classes(self) -> int:
        """Classes in a batch: as many as are left while some are held out."""
        return min(CLASSES, self.desk.classes - max(1, round(HELD_OUT * self.desk.classes)))

    def trial(self, name: str, rate: float, value: float, *, seed: int | None = None) -> Trial:
        """A test run with a seed; without one a run of the tuning, whose test classes are held-out training classes."""
        tuned, batches = METHODS[name], self.desk.per_class(self.classes * SAMPLES, SAMPLES)
        method = tuned.at(value, batch=self.classes * SAMPLES, steps=self.steps)
        config = self.desk.config(
            method, batches, steps=self.steps, rate=rate, seed=seed or 0, loss_lr_mult=tuned.loss_lr_mult
        )
        if seed is None:
            return Trial(config, ks=(1,), held_out=HELD_OUT)
        return Trial(config, ks=RECALLS, clustering=CLUSTERED)

    def by_rate(self, name: str) -> dict[float, Trial]:
        """The first round: every learning rate, at the default of the method's parameter."""
        return {rate: self.trial(name, rate, METHODS[name].default) for rate in self.rates}

    def by_value(self, name: str, rate: float) -> dict[float, Trial]:
        """The second round: every value at one rate; that of the default was run in the first."""
        tuned = METHODS[name]
        others = [value for value in tuned.values if value != tuned.default]
        return {
            value: self.trial(name, rate, value) for value in (tuned.default, *others[: 1 if self.desk.quick else None])
        }

    def best(self, known: Mapping[str, Line], trials: Mapping[float, Trial]) -> float | None:
        """The first of the best; None until each was tried, or if none ended well.

        A run whose loss became infinite was tried. One that failed in another way, for want of memory perhaps, says
        nothing of its value: the next call runs it again, and chooses then.
        """
        lines = [known.get(trial.key, {"error": "missing"}) for trial in trials.values()]
        if any(line["error"] and not line["error"].startswith(NotFiniteError.__name__) for line in lines):
            return None
        scores = {value: known[trial.key]["scores"].get(self.score, math.nan) for value, trial in trials.items()}
        ended = {value: score for value, score in scores.items() if math.isfinite(score)}  # a failed run has none
        return max(ended, key=lambda value: ended[value]) if ended else None

    def second_round(self, known: Mapping[str, Line]) -> list[Trial]:
        """The runs of the second round, of methods whose first is complete."""
        rates = {name: self.best(known, self.by_rate(name)) for name in self.methods if name not in self.ledger}
        return in_rounds(list(self.by_value(name, rate).values()) for name, rate in rates.items() if rate is not None)

    def choice(self, name: str, known: Mapping[str, Line]) -> dict[str, Any] | None:
        """The chosen rate and value with the scores on held-out classes; the ledger's, if it knows the method."""
        if name in self.ledger:
            return {key: value for key, value in self.ledger[name].items() if key != "config"}
        rate = self.best(known, by_rate := self.by_rate(name))
        by_value = {} if rate is None else self.by_value(name, rate)
        value = self.best(known, by_value) if by_value else None
        if rate is None or value is None:
            return None
        tried = {f"lr {each:g}": trial for each, trial in by_rate.items()}
        tried |= {METHODS[name].shown(each): trial for each, trial in by_value.items() if each != METHODS[name].default}
        held_out = {words: known[trial.key]["scores"].get(self.score) for words, trial in tried.items()}
        return {"rate": rate, "value": value, "score": self.score, "held_out": held_out, "budget": len(tried)}

    def tests(self, known: Mapping[str, Line]) -> dict[str, list[Trial]]:
        """The test runs of each method that has been tuned; its choice is in the ledger before they are returned."""
        found = {}
        for name in self.methods:
            chosen = self.choice(name, known)
            if chosen is not None:
                seeds = range(self.desk.seeds)
                found[name] = [self.trial(name, chosen["rate"], chosen["value"], seed=seed) for seed in seeds]
                self.ledger.fix(name, found[name][0].config, chosen)
        return found


def _run(
    studies: Sequence[_Study], folder: Path, workers: Workers, end: float | None, parts: Sequence[str]
) -> dict[str, Any]:
    file = folder / "photographs.jsonl"

    def run(trials: Sequence[Trial]) -> dict[str, Line]:
        left = None if end is None else end - time.monotonic()
        return grid.run(trials, file, workers=workers, seconds=left)

    known = grid.lines(file)
    if "tuning" in parts:
        open_methods = [(study, name) for study in studies for name in study.methods if name not in study.ledger]
        known = run(in_rounds(list(study.by_rate(name).values()) for study, name in open_methods))
        known = run([trial for study in studies for trial in study.second_round(known)])
    tests: list[dict[str, list[Trial]]] = [{} for _ in studies]
    if "test" in parts:
        tests = [study.tests(known) for study in studies]
        known = run(in_rounds(trials for cells in tests for trials in cells.values()))
    return {study.desk.data: _written(study, known, cells, folder) for study, cells in zip(studies, tests, strict=True)}


def _written(
    study: _Study, known: Mapping[str, Line], tests: Mapping[str, list[Trial]], folder: Path
) -> dict[str, Any]:
    """Write the results of one data set, and every run with its configuration."""
    found = study.desk.about() | {
        "steps": study.steps,
        "batch": [study.classes, SAMPLES],
        "rates": list(study.rates),
        "held_out": HELD_OUT,
        "score": study.score,
        "methods": {name: _method(study, name, known, tests) for name in study.methods},
        "claims": _claims(known, tests),
    }
    runs = _lines(study, known, tests)
    found["doctor"] = statistics.record(runs, study.score)
    found["runs"] = [{"method": name, **line} for name, line in runs]
    write_text(folder / f"photographs-{study.desk.data}.json", as_json(found))
    draw(found, folder)
    return found


def _method(study: _Study, name: str, known: Mapping[str, Line], tests: Mapping[str, list[Trial]]) -> dict[str, Any]:
    chosen, trials = study.choice(name, known), tests.get(name, [])
    found: dict[str, Any] = {"chosen": chosen, "scores": cell(known, trials, SCORES)}
    found["parameter"] = None if chosen is None else METHODS[name].shown(chosen["value"])
    base = tests.get(BASE, [])
    scores = () if name == BASE else ("recall@1", "map_at_r")
    found["difference"] = {score: statistics.difference(known, base, trials, score) for score in scores}
    return found


def _claims(known: Mapping[str, Line], tests: Mapping[str, list[Trial]]) -> list[dict[str, Any]]:
    """The claims of Qi et al. 2020 about methods that are there, for R@1 as in the paper."""
    return [
        {"claim": words, "difference": statistics.difference(known, tests[worse], tests[better], "recall@1")}
        for words, better, worse in CLAIMS
        if better in tests and worse in tests
    ]


def _lines(study: _Study, known: Mapping[str, Line], tests: Mapping[str, list[Trial]]) -> list[tuple[str, Line]]:
    """Every run of this study with its method: those of the tuning first."""
    found = []
    for name in study.methods:
        trials = list(study.by_rate(name).values())
        rate = study.best(known, study.by_rate(name))
        trials += [] if rate is None else list(study.by_value(name, rate).values())
        keys = dict.fromkeys(trial.key for trial in (*trials, *tests.get(name, ())))
        found += [(name, known[key]) for key in keys if key in known]
    return found
