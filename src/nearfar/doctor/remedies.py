"""Remedies in words and as flags of `nearfar train`. None is proved to cure; each names the option to change."""

from __future__ import annotations

from nearfar.doctor.findings import Severity

Flags = tuple[tuple[str, str], ...]

SEMIHARD: Flags = (("loss.name", "Triplet"), ("loss.mining", "semihard"), ("loss.margin", "0.2"))
TOP_K: Flags = (("loss.name", "DroTopK"), ("loss.k", "160"))
UNIT: Flags = (("model.normalise", "true"),)

COLLAPSE = (
    "Leave hard mining (--loss.mining semihard) with a margin above zero (--loss.margin 0.2), or take a loss that "
    "weighs many pairs (--loss.name DroTopK --loss.k 160); lower --optimiser.rate tenfold, with --optimiser.warmup "
    "100; go on from the last checkpoint before the collapse."
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
