"""`nearfar calibrate`: a threshold on the score of two samples that holds on new classes."""

from pathlib import Path
from typing import Annotated, Any

import typer

from nearfar._utils.console import say
from nearfar._utils.progress import Progress
from nearfar.cli.commands.command import check_suffix, load_labeled
from nearfar.cli.commands.evaluation import Similarity, Source

__all__ = ["calibrate"]


def calibrate(
    vectors: Source,
    far: Annotated[
        float, typer.Option(help="False accept rate that is allowed, a share of the negative pairs.")
    ] = 1e-3,
    confidence: Annotated[
        float, typer.Option(help="Probability with which the guaranteed threshold keeps to it.")
    ] = 0.95,
    per: Annotated[
        str, typer.Option(help="pair: false accepts are pairs (verification). query: they are whole searches.")
    ] = "pair",
    gallery: Annotated[Path | None, typer.Option(help="Vectors to compare with, instead of the others.")] = None,
    similarity: Similarity = "cosine",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Also write the calibration to this JSON file.")
    ] = None,
) -> None:
    """Choose a threshold on the score of two samples, and one whose false accept rate holds on new classes.

    The vectors must be of classes that the network was not trained on.
    """
    from nearfar.evaluation import calibrate as choose

    if output is not None:
        check_suffix("--output", output, {".json": "a calibration"})
    asked, found_in = load_labeled(vectors), None if gallery is None else load_labeled(gallery)
    options: dict[str, Any] = {"ref_emb": found_in, "per": per, "similarity": similarity}
    with Progress(f"calibrating on {len(asked):,} vectors") as watch:
        found = choose(asked, None, far, confidence, watch=watch, **options)
    say(str(found))
    if output is not None:
        say(f"calibration: {found.save(output)}")
