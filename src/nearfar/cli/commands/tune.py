"""`nearfar tune`: tune keys of a configuration on held-out training classes."""

from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from nearfar._utils.console import say
from nearfar.cli.commands.command import check_apart
from nearfar.cli.commands.training import Words, read_words

OPTIONS = ("--space", "--folder", "--trials", "--jobs", "--score", "--seeds", "--held-out", "--prune", "--seed")


def tune(
    space: Annotated[Path, typer.Option(help="YAML: key -> {low, high, log}, {low, high, step} or {choices: [...]}.")],
    words: Words = None,
    folder: Annotated[Path, typer.Option(help="Output folder; a search that was stopped continues there.")] = Path(
        "nearfar-tune"
    ),
    trials: Annotated[int, typer.Option(help="Number of trials of each loss.", min=1)] = 30,
    jobs: Annotated[int, typer.Option(help="Number of concurrent trials, in processes that share the GPU.", min=1)] = 1,
    score: Annotated[str, typer.Option(help="Score to maximize: recall@1 or map_at_r.")] = "recall@1",
    seeds: Annotated[int, typer.Option(help="Number of runs of a trial, whose scores are averaged.", min=1)] = 1,
    held_out: Annotated[float, typer.Option(help="Share of the training classes that is held out and scored.")] = 0.2,
    prune: Annotated[str, typer.Option(help="median: stop trials that are behind the others; none: stop no trial.")] = (
        "median"
    ),
    seed: Annotated[int, typer.Option(help="Seed of the sampler.", min=0)] = 0,
) -> None:
    """Tune keys of a configuration with Optuna. Trials are scored only on held-out training classes."""
    from nearfar.train import load
    from nearfar.train._recipe import default_config
    from nearfar.tune import search

    config, flags = read_words(words or (), OPTIONS)
    chosen = default_config(flags)[0] if config is None else load(config, flags)
    if chosen.data.path is not None:
        check_apart({"--folder": folder}, [Path(chosen.data.path)])
    found = search(
        chosen,
        space,
        folder=folder,
        trials=trials,
        jobs=jobs,
        score=score,
        seeds=seeds,
        held_out=held_out,
        prune=cast(Literal["median", "none"], prune),
        seed=seed,
    )
    say(repr(found))
    if not found.finished:
        say(f"stopped after {len(found.trials)} trials; run the same command again to continue", error=True)
        raise SystemExit(130)
    say(f"page: {folder / 'tune.html'}")
    say(f"train the best: nearfar train {folder / 'best.yaml'}")
