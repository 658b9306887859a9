"""`nearfar demo`: train a small network to retrieve characters of scripts that it has never seen."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from nearfar import report
from nearfar._utils.console import Terminal
from nearfar._utils.progress import Progress
from nearfar.data import DataSet, open_data
from nearfar.data._glyphs import few_glyphs
from nearfar.data._registry import of_glyphs
from nearfar.report._maps import without_tsne
from nearfar.runs import _journal as journal
from nearfar.train import Config, Result, fit, parse
from nearfar.train._folder import is_run
from nearfar.train._scores import read_baselines

RECIPE: dict[str, dict[str, Any]] = {
    "data": {"name": "glyphs", "validation": 0.0, "move": 2.0},
    "model": {"name": "small", "embedding_dim": 128, "bn_neck": True},
    "loss": {"name": "SupCon", "temperature": 0.2},
    "batches": {"name": "MPerClass", "classes": 64, "samples": 2},
    "optimizer": {"name": "adamw", "lr": 1.2e-2, "weight_decay": 1e-4, "warmup": 50},
    "training": {"steps": 3000, "evaluate_every": 1500, "checkpoint_every": 1500},
}


QUICK = {"steps": 12, "evaluate_every": 12, "checkpoint_every": 12}
"""The same job in a few seconds: too short to learn much."""


def recipe(*, steps: int | None = None, seed: int = 0, quick: bool = False) -> Config:
    """The demo's configuration; `configs/glyphs.yaml` is the same."""
    config = parse({**RECIPE, "training": {**RECIPE["training"], **QUICK}} if quick else RECIPE)
    return replace(config, training=replace(config.training, seed=seed, steps=steps or config.training.steps))


def run(
    folder: Path,
    *,
    steps: int | None = None,
    seed: int = 0,
    quick: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
) -> Result:
    """Draw the data, train, test on unseen scripts, write the report; the last lines are R@1 before and after.

    With `quick` it takes a few steps on a few classes, to check in seconds that everything works. With `overwrite` the
    files of a run in the folder are replaced; files that no run wrote always stay.
    """
    console = console or Terminal()
    config = recipe(steps=steps, seed=seed, quick=quick)
    _check(folder, overwrite=overwrite)
    begun = time.monotonic()
    data = of_glyphs(few_glyphs()) if quick else open_data("glyphs")
    console.print(_summary(data, "Greek" if quick else "Greek, Cyrillic, Armenian and Georgian"), highlight=False)
    result = fit(config, folder, data=data, overwrite=overwrite, console=console)
    if result.test is None:
        return result
    page = folder / "report.html"
    with Progress(f"report of {folder}", console=console) as watch:
        report.write(page, folder, watch=watch)
    if without_tsne():
        console.print(without_tsne(), highlight=False)
    spent = time.monotonic() - begun
    console.print(f"run: {folder}\npage: {page}\n{spent:.0f} s in all", highlight=False)
    before = read_baselines(journal.read(folder / "journal.jsonl")) or {}
    console.print(f"R@1 before: {100 * before['untrained']:.1f}", highlight=False)
    console.print(f"R@1 after: {100 * result.test.recall[1]:.1f}", highlight=False)
    return result


def _summary(data: DataSet, scripts: str) -> str:
    return (
        f"glyphs: {len(data.train):,} pictures of {len(data.train.classes):,} Latin letters, digits and signs to learn "
        f"from; {len(data.test):,} of {len(data.test.classes)} {scripts} ones to find"
    )


def _check(folder: Path, *, overwrite: bool) -> None:
    """Refuse a folder with other files, or with a run unless `overwrite`, before any work is done."""
    if is_run(folder):
        if not overwrite:
            raise FileExistsError(f"{folder} already holds a run; --overwrite replaces it, or choose another --folder.")
    elif folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and holds no demo; choose another --folder.")
