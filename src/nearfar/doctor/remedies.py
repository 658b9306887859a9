"""Remedies, in words and as flags of `nearfar train`: each names the option to change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from nearfar.doctor.findings import Severity

if TYPE_CHECKING:  # the loop brings accelerate with it
    from nearfar.train import Config

Flags = tuple[tuple[str, str], ...]

SEMIHARD: Flags = (("loss.name", "Triplet"), ("loss.mining", "semihard"), ("loss.margin", "0.2"))
TOP_K: Flags = (("loss.name", "DroTopK"), ("loss.k", "160"))
SOFT: Flags = (("loss.name", "DroKL"), ("loss.gamma", "1"))
EACH_SIGN: Flags = (("loss.name", "DroTopKPN"), ("loss.k", "160"))
UNIT: Flags = (("model.normalise", "true"),)
HELD_OUT: Flags = (("data.validation", "0.1"),)
EVEN: Flags = (("batches.name", "PerClass"), ("batches.classes", "32"), ("batches.samples", "4"))
OTHER: Flags = (("loss.name", "MultiSimilarity"),)
STEADY: Flags = (("optimiser.clip", "1"), ("training.precision", "no"))

HARD = ("hard", "hardest")
FAST, STRONG, FEW_ROWS, NARROW = 1e-3, 1e-3, 32, 0.1
"""What a collapse is blamed on: a rate, a weight decay above these, rows of a batch, a margin below."""

COLLAPSE = (
    "Leave hard mining (--loss.mining semihard) with a margin above zero (--loss.margin 0.2), or let it begin soft "
    "(--loss.anneal 500); lower --optimiser.rate tenfold, and --optimiser.weight_decay where it is above 0.001."
)
CONE = (
    "Classes are still apart, so this need not be a collapse: hard mining often shrinks a space before it spreads it. "
    "If recall falls, lower --optimiser.rate tenfold or take --loss.mining semihard."
)
CLASSES = (
    "Check first that labels and rows belong together; then lower --optimiser.rate, leave hard mining "
    "(--loss.mining semihard), and put more classes into a batch (--batches.classes)."
)
DIMENSIONS = (
    "Leave hard mining (--loss.mining semihard), lower --optimiser.rate or --optimiser.weight_decay, or take a loss "
    "with many negatives an anchor (--loss.name MultiSimilarity)."
)
POINTS = (
    "The training classes are separated and nothing is left to gain on them; for unseen classes stop earlier "
    "(--training.steps) or choose the checkpoint by held-out classes (--data.validation 0.1)."
)
EASY = (
    "Make it harder: a larger --loss.margin, harder mining (--loss.mining hard), more classes in a batch "
    "(--batches.classes), or hard classes (--batches.name Representatives --batches.hard_classes true)."
)
FEW = (
    "Look at these rows: outliers or wrong labels. Spread the weight with --loss.name DroTopK --loss.k 160 or a larger "
    "--loss.gamma of DroKL."
)
SIZES = "Draw the same number of rows from each class (--batches.name PerClass --batches.samples 4)."
LONE = (
    "Draw two or more rows of a class into a batch (--batches.samples 2), and leave out classes with a single sample."
)
SIGNS = "Give each sign its own share (--loss.name DroTopKPN), or draw more rows a class (--batches.samples)."
SUSPECTS = (
    "Look at these samples; leave them out or correct them, or weigh less hard (--loss.name DroKL --loss.gamma 1)."
)
NORMS = "Normalise embeddings (--model.normalise true), lower --optimiser.rate, or set --optimiser.clip 1."
NOT_FINITE = (
    "Lower --optimiser.rate, set --optimiser.clip 1, train with --training.precision no, and look at these samples."
)


def level(worse: bool) -> Severity:
    """An alarm where it is worse, else a warning."""
    return "alarm" if worse else "warning"


def batch_of(config: Config, classes: int | None = None) -> int:
    """Rows of a batch, for so many training classes where that is known."""
    from nearfar.train.parts import CLASSES, shape_of_batch

    shape = shape_of_batch(config, classes or CLASSES)
    return int(shape["batch_size"]) if "batch_size" in shape else int(shape["classes"]) * int(shape["samples"])


def margin_of(config: Config | None) -> float | None:
    """α of a triplet loss, where the configuration names one."""
    if config is None or config.loss.name != "Triplet":
        return None
    return float(config.loss.options.get("margin", 0.05))


def slower(config: Config | None) -> Flags:
    """A tenth of the rate, where it is known."""
    return (("optimiser.rate", f"{config.optimiser.rate / 10:g}"),) if config is not None else ()


def another(config: Config | None) -> Flags:
    """Another loss, for a run that does not move; a tenth of the rate where it has that loss already."""
    return slower(config) if config is not None and config.loss.name == OTHER[0][1] else OTHER


def harder(config: Config | None) -> Flags:
    """Twice the margin of a triplet loss, or twice the classes of a batch, where they are known."""
    if config is None:
        return (("batches.classes", "64"),)
    if config.loss.name == "Triplet":
        return (("loss.margin", f"{2 * max(margin_of(config) or 0.0, NARROW):g}"),)
    if "classes" in config.batches.options:
        return (("batches.classes", str(2 * int(config.batches.options["classes"]))),)
    return ()


def against_collapse(config: Config | None, classes: int | None = None) -> Flags:
    """What to change in a run that collapsed: everything in its configuration that is known to lead there.

    Without a configuration: semi-hard mining. Where nothing is to blame: a tenth of the rate. `classes` is how many
    there are to draw from, where it is known.
    """
    if config is None:
        return SEMIHARD
    return tuple(_blamed(config, classes)) or slower(config)


def _blamed(config: Config, classes: int | None) -> Iterator[tuple[str, str]]:
    options: Any = config.loss.options
    if config.loss.name == "Triplet" and options.get("mining") in HARD:
        yield "loss.mining", "semihard"
        if options.get("anneal") is not None:
            yield "loss.anneal", "null"
    margin = margin_of(config)
    if margin is not None and margin < NARROW:
        yield "loss.margin", "0.2"
    if config.loss.name == "DroWorst":
        yield from TOP_K
    if config.optimiser.rate > FAST:
        yield from slower(config)
    if config.optimiser.weight_decay > STRONG:
        yield "optimiser.weight_decay", "0.0001"
    if batch_of(config, classes) < FEW_ROWS:
        yield "batches.name", "PerClass"
        yield "batches.classes", str(min(32, classes or 32))
        yield "batches.samples", "4"
