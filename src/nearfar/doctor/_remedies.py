"""Remedies in words and as flags of `nearfar train`; only those that suit the run's configuration are suggested."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from nearfar.doctor._findings import Finding, Severity
from nearfar.runs._config import apply_flags, to_tree
from nearfar.runs._parts import CLASSES, LOSSES, check, make_loss, shape_of_batch
from nearfar.runs._sections import Config
from nearfar.sets.counts import multiple

Flags = tuple[tuple[str, str], ...]

SEMIHARD: Flags = (("loss.name", "Triplet"), ("loss.mining", "semihard"), ("loss.margin", "0.2"))
ANY_TO_SEMIHARD: Flags = (*SEMIHARD, ("loss.anneal", "null"))
ANNEALED: Flags = (("loss.name", "Triplet"), ("loss.mining", "hard"), ("loss.margin", "0.2"), ("loss.anneal", "500"))
FLOORED: Flags = (("loss.name", "Triplet"), ("loss.mining", "hard"), ("loss.margin", "0.2"), ("loss.floor", "0.5"))
TOP_K: Flags = (("loss.name", "DroTopK"), ("loss.k", "8B"))
SOFT: Flags = (("loss.name", "DroKL"), ("loss.gamma", "1"))
EACH_SIGN: Flags = (("loss.name", "DroTopKPN"), ("loss.k", "8B"))
UNIT: Flags = (("model.normalize", "true"),)
WEAK_DECAY: Flags = (("optimizer.weight_decay", "0.0001"),)
HELD_OUT: Flags = (("data.validation", "0.1"),)
EVEN: Flags = (("batches.name", "MPerClass"), ("batches.classes", "null"), ("batches.samples", "4"))
NEAR_CLASSES: Flags = (("batches.name", "Representatives"), ("batches.hard_classes", "true"))
OTHER: Flags = (("loss.name", "MultiSimilarity"),)
STEADY: Flags = (("optimizer.max_grad_norm", "1"), ("training.precision", "float32"))

HARD = ("hard", "hardest")
FAST, STRONG, FEW_ROWS, NARROW = 1e-3, 1e-3, 32, 0.1
"""Suspected causes of a collapse: a learning rate or weight decay above these, a batch size or margin below."""
FEWEST_CLASSES = 40  # to learn from, beside a fifth that can tell lengths apart (nearfar.train._length)
ENOUGH_K, ENOUGH_RHO = 8, 40
ENOUGH_GAMMA = {"DroKL": 0.3, "DroKLGrouped": 0.1}
"""Set sizes that sufficed on photographs (benchmarks/RESULTS-photographs.md); K and ρ are per row of a batch."""


@dataclass(frozen=True)
class Remedy:
    """One remedy in words, and as flags if flags can express it."""

    words: str
    flags: Flags = ()

    def __str__(self) -> str:
        flags = " ".join(f"--{name} {value}" for name, value in self.flags)
        return f"{self.words} ({flags})" if flags else self.words


@dataclass(frozen=True)
class Patient:
    """The facts about a run that decide which remedies fit it."""

    config: Config | None = None  # its configuration; None if unknown
    classes: int | None = None  # the number of training classes; None if unknown
    best_step: int = 1  # the step of its best weights
    steps: int = 1  # the number of steps it took
    rising: bool = True  # whether more steps may help: the last evaluation is the best, or there is none

    @property
    def margin(self) -> float | None:
        """The margin α of its triplet loss; None for any other loss."""
        return margin_of(self.config)

    @property
    def triplets(self) -> bool:
        return self.config is not None and self.config.loss.name == "Triplet"

    @property
    def hard(self) -> bool:
        """Whether it mines the hardest triplet of each anchor."""
        return self.triplets and self.config.loss.options.get("mining") == "hard"  # type: ignore[union-attr]


Maker = Callable[[Patient], Remedy | None]


def level(worse: bool) -> Severity:
    """The severity: "alarm" if `worse`, else "warning"."""
    return "alarm" if worse else "warning"


def mild(healthy: bool) -> Severity:
    """The severity: "note" if `healthy`, else "warning"."""
    return "note" if healthy else "warning"


def finding(
    name: str, severity: Severity, evidence: str, kind: str, run: Patient | None = None, *, rows: tuple[int, ...] = ()
) -> Finding:
    """Build a finding with the remedies of its kind that fit the run's configuration."""
    run = run or Patient()
    lead, makers = KINDS[kind]
    remedies = [found for make in makers if (found := make(run)) is not None and _fits(run, found.flags)]
    first = next((each.flags for each in remedies if each.flags), ())
    flags = against_collapse(run.config, run.classes) if kind in COLLAPSES else first
    words = f"{lead}: {', or '.join(map(str, remedies))}." if remedies else f"{lead}."
    return Finding(name, severity, evidence, words, rows=rows, flags=flags)


def _fits(run: Patient, flags: Flags) -> bool:
    """Whether flags give another valid configuration of the run, as far as can be checked without data."""
    config, classes = run.config, run.classes
    if not flags or config is None:
        return True
    try:
        cured = apply_flags(config, flags)
        check(cured)
        with torch.random.fork_rng(devices=[]):  # drawing proxies must not advance the generator of the run
            make_loss(cured, classes=classes or CLASSES)
    except (ValueError, TypeError):
        return False
    wanted = shape_of_batch(cured, classes or CLASSES).get("classes", 0)
    return to_tree(cured) != to_tree(config) and (classes is None or wanted <= classes)


def batch_of(config: Config, classes: int | None = None) -> int:
    """The number of rows of a batch; `classes` is the number of training classes, if known."""
    shape = shape_of_batch(config, classes or CLASSES)
    return int(shape["batch_size"]) if "batch_size" in shape else int(shape["classes"]) * int(shape["samples"])


def margin_of(config: Config | None) -> float | None:
    """The margin α of a triplet loss, if the configuration has one."""
    if config is None or config.loss.name != "Triplet":
        return None
    return float(config.loss.options.get("margin", 0.05))


def slower(config: Config) -> Flags:
    return (("optimizer.lr", f"{config.optimizer.lr / 10:g}"),)


def against_collapse(config: Config | None, classes: int | None = None) -> Flags:
    """Flags that change every setting known to cause a collapse.

    Without a configuration: semi-hard mining. If no setting is suspected: a tenth of the learning rate. `classes` is
    the number of training classes, if known.
    """
    if config is None:
        return ANY_TO_SEMIHARD
    return tuple(_suspects(config, classes)) or slower(config)


def _suspects(config: Config, classes: int | None) -> Iterator[tuple[str, str]]:
    """Yield a flag for each setting that is suspected to cause a collapse."""
    options: Any = config.loss.options
    if config.loss.name == "Triplet" and options.get("mining") in HARD:
        yield from _semihard(config)
    margin = margin_of(config)
    if margin is not None and margin < NARROW:
        yield "loss.margin", "0.2"
    if config.loss.name == "DroWorst":
        yield from TOP_K
    if config.optimizer.lr > FAST:
        yield from slower(config)
    if config.optimizer.weight_decay > STRONG:
        yield "optimizer.weight_decay", "0.0001"
    if batch_of(config, classes) < FEW_ROWS:
        yield "batches.name", "MPerClass"
        yield "batches.classes", str(min(32, classes)) if classes else "null"
        yield "batches.samples", "4"


def _semihard(config: Config) -> Iterator[tuple[str, str]]:
    yield "loss.mining", "semihard"
    if config.loss.options.get("anneal") is not None:
        yield "loss.anneal", "null"


def semihard(run: Patient) -> Remedy:
    """Semi-hard mining, and a larger margin if it is small."""
    if run.config is None:
        return Remedy("semi-hard triplets", ANY_TO_SEMIHARD)
    if not run.triplets:
        return Remedy("semi-hard triplets", SEMIHARD)
    margin: Flags = (("loss.margin", "0.2"),) if (run.margin or 0) < NARROW else ()
    return Remedy("semi-hard mining", (*_semihard(run.config), *margin))


def anneal_mining(run: Patient) -> Remedy | None:
    """Hard mining, annealed from a soft start."""
    if run.config is None:
        return Remedy("hard mining that begins soft", ANNEALED)
    return Remedy("hard mining that begins soft", (("loss.anneal", "500"),)) if run.hard else None


def floor_spread(run: Patient) -> Remedy | None:
    """Hard mining with a floor under the spread."""
    if run.config is None:
        return Remedy("a floor under the spread", FLOORED)
    return Remedy("a floor under the spread", (("loss.floor", "0.5"),)) if run.hard else None


def slow(run: Patient) -> Remedy:
    return Remedy("a tenth of the rate", slower(run.config)) if run.config else Remedy("a tenth of --optimizer.lr")


def triple_rate(run: Patient) -> Remedy:
    """Three times the learning rate, for a run that makes no progress."""
    if run.config is None:
        return Remedy("--optimizer.lr three times higher and three times lower")
    return Remedy("three times the rate, and a third of it", (("optimizer.lr", f"{3 * run.config.optimizer.lr:g}"),))


def less_decay(run: Patient) -> Remedy | None:
    weak = run.config is not None and run.config.optimizer.weight_decay <= STRONG
    return None if weak else Remedy("less weight decay", WEAK_DECAY)


def add_decay(run: Patient) -> Remedy | None:
    return None if run.config is not None and run.config.optimizer.weight_decay else Remedy("weight decay", WEAK_DECAY)


def more_classes(run: Patient) -> Remedy | None:
    """Twice the classes per batch, up to the number of training classes."""
    if run.config is None or run.classes is None:
        return Remedy("more classes in a batch, --batches.classes")
    now = shape_of_batch(run.config, run.classes).get("classes")
    if now is None:
        return None
    return Remedy("more classes in a batch", (("batches.classes", str(min(2 * int(now), run.classes))),))


def wider_margin(run: Patient) -> Remedy | None:
    if run.config is None:
        return Remedy("a larger margin, where the loss has one")
    known = inspect.signature(LOSSES[run.config.loss.name]).parameters
    if "margin" not in known:
        return None
    now = float(run.config.loss.options.get("margin", known["margin"].default))
    return Remedy("a larger margin", (("loss.margin", f"{2 * max(now, NARROW):g}"),))


def harder_mining(run: Patient) -> Remedy | None:
    return Remedy("harder mining", (("loss.mining", "hard"),)) if run.triplets else None


def more_pairs(run: Patient) -> Remedy | None:
    """A larger uncertainty set, if the loss has a small one: more pairs share the weight."""
    if run.config is None or run.config.loss.name == "DroWorst":
        return Remedy("weight on more pairs", TOP_K)
    options: Any = run.config.loss.options
    known, rows = inspect.signature(LOSSES[run.config.loss.name]).parameters, batch_of(run.config, run.classes)
    share: Flags = (("loss.fraction", "null"),) if "fraction" in options else ()
    usual = 0 if share else f"{ENOUGH_K}B"  # the default of k; with a fraction, k is replaced in any case
    gamma = ENOUGH_GAMMA.get(run.config.loss.name, 0.0)
    flags: Flags = ()
    if "k" in known and _pairs(options.get("k") or usual, rows) < ENOUGH_K * rows:
        flags = (*share, ("loss.k", f"{ENOUGH_K}B"))
    elif gamma and options.get("gamma", known["gamma"].default) < gamma:
        flags = (("loss.gamma", f"{gamma:g}"),)
    elif "rho" in known and _pairs(options.get("rho", 0.0), rows) > ENOUGH_RHO * rows:
        flags = (("loss.rho", f"{ENOUGH_RHO}B"),)
    return Remedy("weight on more pairs", flags) if flags else None


def _pairs(count: float | str, rows: int) -> float:
    """K or ρ as a number of pairs."""
    return (multiple(count) or 0.0) * rows if isinstance(count, str) else float(count)


def softer_mining(run: Patient) -> Remedy | None:
    """Semi-hard mining instead of the single hardest triplet.

    Does not replace hard mining, which gives each anchor two pairs, and fewer only if the margin separates it.
    """
    one = run.config is not None and run.config.loss.options.get("mining") == "hardest"
    return semihard(run) if run.triplets and one else None


def enlarge_set(run: Patient) -> Remedy | None:
    """The remedy that lets more pairs share the weight; None if neither a set nor mining restricts them."""
    return more_pairs(run) or softer_mining(run)


def longer(run: Patient) -> Remedy | None:
    """Twice the steps, unless the best weights came before the end of the run."""
    return Remedy("train longer", (("training.steps", str(2 * run.steps)),)) if run.rising else None


def find_length(run: Patient) -> Remedy | None:
    """The length that held-out classes choose."""
    few = run.classes is not None and run.classes < FEWEST_CLASSES
    return None if few else Remedy("the length that a run finds itself", (("training.steps", "auto"),))


def stop_early(run: Patient) -> Remedy:
    """Training that ends at the step of the best weights."""
    return Remedy("a shorter run", (("training.steps", str(max(1, run.best_step))),))


def wider(run: Patient) -> Remedy:
    dim = None if run.config is None else run.config.model.embedding_dim
    if dim is None:
        return Remedy("a wider embedding, --model.embedding_dim")
    return Remedy("a wider embedding", (("model.embedding_dim", str(2 * dim)),))


def identity_head(run: Patient) -> Remedy | None:
    """A square head initialized as the identity, at a third of the rate: training starts from the input vectors."""
    words = "a head that begins as the identity"
    if run.config is None:
        return Remedy(f"{words}, --model.embedding_dim null")
    if run.config.model.embedding_dim is None:
        return None
    rate = ("optimizer.lr", f"{run.config.optimizer.lr / 3:.2g}")
    return Remedy(f"{words}, and a third of the rate", (("model.embedding_dim", "null"), rate))


def fixed(words: str, flags: Flags) -> Maker:
    """A remedy that is the same for every run."""
    return lambda run: Remedy(words, flags)


another_loss = fixed("another loss", OTHER)
spread_weight = fixed("weight on more pairs", TOP_K)
soft_weight = fixed("softer weights", SOFT)
clip = fixed("shorter gradients", (("optimizer.max_grad_norm", "1"),))
by_class = fixed("the same number of rows from each class", EVEN)
KINDS: dict[str, tuple[str, tuple[Maker, ...]]] = {
    "collapse": ("Against a collapse", (semihard, anneal_mining, floor_spread, slow, less_decay)),
    "cone": (
        "Classes are still apart, so this need not be a collapse: hard mining often shrinks a space before it spreads "
        "it. If recall falls, try",
        (slow, semihard),
    ),
    "classes": ("Check first that labels and rows belong together; then try", (slow, semihard, more_classes)),
    "dimensions": ("Try", (semihard, slow, less_decay, another_loss)),
    "points": (
        "The training classes are separated and nothing is left to gain on them; for unseen classes choose the "
        "checkpoint by held-out ones or stop earlier",
        (fixed("hold a tenth of the classes out", HELD_OUT),),
    ),
    "easy": (
        "Make it harder",
        (wider_margin, more_classes, harder_mining, fixed("batches of classes that are near", NEAR_CLASSES)),
    ),
    "few": ("Look at these rows, outliers or wrong labels; or try", (spread_weight, soft_weight)),
    "too few": (
        "A few pairs, often outliers or wrong labels, decide each step; try",
        (more_pairs, softer_mining, another_loss),
    ),
    "sizes": ("Draw evenly", (by_class,)),
    "lone": ("Leave out classes with a single sample, and draw two or more rows of a class", (by_class,)),
    "signs": ("Give each sign its own share", (fixed("the hardest of each", EACH_SIGN), by_class)),
    "suspects": ("Look at these samples; leave them out or correct them, or weigh less hard", (soft_weight,)),
    "norms": ("Try", (fixed("normalized embeddings", UNIT), slow, clip)),
    "not finite": ("Look at these samples, and try", (fixed("steady steps", STEADY), slow, clip)),
    "stalled": ("Try", (another_loss, triple_rate, slow)),
    "slow": ("Not ill, only slow", (longer,)),
    "too short": ("Train longer", (find_length, longer)),
    "too long": ("End sooner", (find_length, stop_early, slow)),
    "over-fitting": ("The weights of that step are kept in best.pt; try", (stop_early, slow, add_decay)),
    "chance": ("Check first that labels and samples belong together; then try", (slow, another_loss, longer)),
    "below untrained": ("Training took away what the network had at first; try", (slow, semihard)),
    "below input": ("The input vectors themselves serve better; begin with them", (identity_head, slow, longer)),
    "no margin": ("Set one", (fixed("a margin", (("loss.margin", "0.2"),)),)),
    "many rows": ("If it collapses", (semihard, wider)),
}
"""Kind of finding -> the beginning of its remedy's sentence, and the possible remedies, best first."""
COLLAPSES = ("collapse", "classes", "dimensions", "cone")
"""Kinds whose flags change every setting known to cause a collapse."""
