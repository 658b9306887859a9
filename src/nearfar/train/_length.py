"""The length of a run, found on held-out training classes: what `training.steps: auto` does before the training itself.

A search trains without the held-out classes at a constant learning rate, and scores the average of its weights on them
at steps that grow geometrically. It ends when the curve no longer rises. Then the run learns from all classes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from nearfar._utils.files import read_text, write_text
from nearfar.data import DataSet
from nearfar.data._splits import Shares, hold_out
from nearfar.evaluation._bootstrap import Interval, intervals
from nearfar.runs._parts import shape_of_batch
from nearfar.runs._sections import AUTO, Config, Part
from nearfar.train import _scores as scoring
from nearfar.train._build import default_transform
from nearfar.train._folder import CHOICE, RunFolder
from nearfar.train._processes import run_on_first_rank
from nearfar.train._state import Moment, TrainState

LOOK, LENGTH = "look", "length"  # keys of the journal: a look of the search, and the choice at step 0 of the run
SHARE = 0.2  # share of the training classes that a search holds out, unless the configuration holds out more
FEWEST_CLASSES, FEWEST_SAMPLES = 10, 50  # held-out classes and samples; the scores of fewer are mostly noise
MOST_SAMPLES = 5000  # held-out samples, so that looks stay cheap
EARLIEST = 180  # no search ends before this step, unless the usual length is shorter
LATEST = 15_360  # the last look
WORTH = 0.01  # MAP@R that twice the steps must gain for a search to go on beyond the usual length
STRETCH = 4 / 3
"""Steps of the training for each step of the search: its rate stays as in the search, and falls in a last quarter."""
DECAY = 0.99  # of the averaged weights of a search
PASSES = 8.2  # epochs of the usual length on photographs: 600 steps of 80 through the 5,864 of CUB
LEAST, MOST = 200, 20_000  # the fewest and the most steps of the usual length on photographs
PLAIN = 1000  # the usual length on other data


def usual_steps(config: Config, data: DataSet) -> int:
    """The length of a run on these data if nothing is known about it: `PASSES` on photographs, else `PLAIN`."""
    if default_transform(data) != "photographs":
        return PLAIN
    shape = shape_of_batch(config, len(data.train.classes))
    return steps_of_passes(len(data.train), math.prod(shape[name] for name in shape if name in ROWS))


ROWS = ("classes", "samples", "batch_size")


def steps_of_passes(samples: int, rows: int) -> int:
    """The number of steps that makes `PASSES` epochs, rounded and bounded.

    >>> steps_of_passes(5864, 80), steps_of_passes(60, 80)
    (600, 200)
    """
    return min(max(LEAST, round(PASSES * samples / rows / 10) * 10), MOST)


def with_usual_length(config: Config, data: DataSet) -> Config:
    """The configuration with the usual number of steps in place of auto."""
    if config.training.steps != AUTO:
        return config
    return replace(config, training=replace(config.training, steps=usual_steps(config, data)))


@dataclass(frozen=True)
class Look:
    """The held-out classes at one step of a search."""

    step: int
    map_at_r: float  # the mean over all queries
    queries: tuple[int, ...]  # the number of queries of each class
    classes: tuple[float, ...]  # MAP@R of each class

    @staticmethod
    def of(entry: Mapping[str, Any]) -> Look:
        """Read a look from a line of the journal."""
        found = entry[LOOK]
        return Look(entry["step"], found["map_at_r"], tuple(found["queries"]), tuple(found["classes"]))

    def to_entry(self) -> dict[str, Any]:
        return {LOOK: {name: value for name, value in asdict(self).items() if name != "step"}}

    def gain(self, other: Look) -> Interval:
        """The gain of another look over this one: a paired interval over classes."""
        change = np.subtract(other.classes, self.classes)[:, None]
        (found,) = intervals(change, np.arange(len(change)), counts=np.asarray(self.queries, dtype=float))
        return found


@dataclass(frozen=True)
class Choice:
    """The length that was chosen.

    Attributes:
        steps: the number of steps.
        why: the reason in a sentence.
        held_out: the number of held-out classes; 0 if there was no search.
        best: the step of the search that was chosen.
        curve: step, MAP@R of the held-out classes and its gain since the look before, with interval, at each look.
    """

    steps: int
    why: str
    held_out: int = 0
    best: int = 0
    curve: tuple[tuple[float, ...], ...] = ()

    def write(self, folder: Path) -> None:
        write_text(folder / CHOICE, json.dumps(asdict(self)) + "\n")

    @staticmethod
    def read(folder: Path) -> Choice | None:
        """Read the choice of a run; None if none has been made."""
        if not (folder / CHOICE).is_file():
            return None
        found = json.loads(read_text("train", folder / CHOICE))
        return Choice(**{**found, "curve": tuple(map(tuple, found["curve"]))})

    def apply(self, config: Config) -> Config:
        """The configuration of the training itself; after a search it learns from all classes."""
        plan = replace(config.training, steps=self.steps)
        optimizer = replace(config.optimizer, warmup=min(config.optimizer.warmup, self.steps // 4))
        if not self.held_out:
            return replace(config, training=plan, optimizer=optimizer)
        optimizer = replace(optimizer, schedule="stable" if optimizer.schedule == "cosine" else optimizer.schedule)
        data = replace(config.data, validation=0.0, validation_classes=())
        return replace(config, training=plan, optimizer=optimizer, data=data)


def read_choice(place: RunFolder) -> Choice | None:
    """Read the choice of a run that is resumed; None if none has been made."""
    if not place.resume or place.given is None:
        return None
    found = Choice.read(place.given)
    if found is None and (place.given / "checkpoints" / "last.pt").is_file():
        raise ValueError("train: training.steps auto is for a new run, but this one has a length; leave it out.")
    return found


def refusal(config: Config, data: DataSet) -> Choice | None:
    """The choice of the usual length, if the held-out classes of a search would be too few; None if they suffice."""
    held = hold_out(data.train, _share(config, data), config.data.validation_classes)[1]
    classes, samples = len(np.unique(held.labels)), len(held)
    if classes >= FEWEST_CLASSES and samples >= FEWEST_SAMPLES:
        return None
    return Choice(
        usual_steps(config, data),
        f"{classes} held-out classes with {samples} samples are too few to choose the length by (it takes "
        f"{FEWEST_CLASSES} with {FEWEST_SAMPLES}), so it is the usual one",
    )


def _share(config: Config, data: DataSet) -> float:
    """The share of the training classes that a search holds out."""
    count = len(data.train.classes)
    share = min(SHARE, max(MOST_SAMPLES / len(data.train), FEWEST_CLASSES / count))
    share = max(config.data.validation, share)
    return Shares.of(count, share).held_out / count or share


def search_config(config: Config, data: DataSet) -> Config:
    """The configuration of the search: held-out classes, a constant rate, averaged weights, and no other scores."""
    share = _share(config, data)
    plan = replace(
        config.training,
        steps=LATEST + 1,  # it ends before
        average=config.training.average or (0.0 if config.training.shard else DECAY),
        evaluate_every=LATEST + 1,
        explain_every=0,
        diagnose_every=0,
        baselines=False,
        trackers=(),
    )
    found = replace(
        config,
        data=replace(config.data, validation=share),
        optimizer=replace(config.optimizer, schedule="constant"),
        training=plan,
    )
    rest = hold_out(data.train, share, config.data.validation_classes)[0]
    learn, wanted = len(np.unique(rest.labels)), config.batches.options.get("classes")
    if config.batches.name == "MPerClass" and isinstance(wanted, int) and wanted > learn:
        return replace(found, batches=Part("MPerClass", {**config.batches.options, "classes": learn}))
    return found


def is_look(step: int) -> bool:
    """Whether a search looks at the held-out classes at this step.

    >>> [step for step in range(1000) if is_look(step)]
    [0, 60, 90, 120, 180, 240, 360, 480, 720, 960]
    """
    parts, rest = divmod(step, 30)
    return step == 0 or (rest == 0 and parts > 1 and any(parts == first << parts.bit_length() - 2 for first in (2, 3)))


class LengthSearch:
    """A callback of the training loop that looks at the held-out classes, and ends the search (`choice`).

    Args:
        usual: the usual length of a run on these data.
        stretch: steps of the training for each step of the search.
    """

    def __init__(self, usual: int, stretch: float = STRETCH) -> None:
        self.usual, self.stretch = usual, stretch
        self.looks: list[Look] = []
        self.choice: Choice | None = None

    def begin(self, state: TrainState, before: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
        """Take the first look and return its journal entry, or continue from the looks of a resumed search."""
        self.looks = [Look.of(entry) for entry in before if LOOK in entry]
        self.choice = choose(self.looks, self.usual, self.stretch)
        return None if self.looks else self._look(0, state)

    def __call__(self, moment: Moment) -> dict[str, Any] | None:
        """Take a look if one is due after this step, and return its journal entry."""
        return self._look(moment.step, moment.state) if is_look(moment.step) else None

    def _look(self, step: int, state: TrainState) -> dict[str, Any]:
        if state.sharded is not None:
            state.sharded.gather()
        held_out: Any = state.validation
        with scoring.share_evaluations(state, state.scored_model):
            found = scoring.score(state.scored_model, held_out, state.plain, ks=(1,), **state.evaluating)
        rows = sorted(found.evaluation.per_class, key=lambda row: row.label)
        score = round(found.evaluation.map_at_r, 6)
        look = Look(step, score, tuple(r.queries for r in rows), tuple(round(r.map_at_r, 6) for r in rows))
        self.looks.append(run_on_first_rank(state.machine, lambda: look))
        self.choice = choose(self.looks, self.usual, self.stretch)
        return self.looks[-1].to_entry()


def choose(looks: Sequence[Look], usual: int, stretch: float = STRETCH) -> Choice | None:
    """Choose the length by the looks of a search; None if it is to go on.

    The best look of the last half of the steps is compared with the best one before, by a paired 95% interval over the
    held-out classes. Up to the usual length the search goes on unless the curve fell beyond doubt. Beyond it the curve
    must have risen beyond doubt, and by a point of MAP@R, to be worth twice the steps. The best look is chosen, or of
    the looks in the second half of the search within one standard error of it that nearest to the usual length. The
    whole run then takes at most two and a half times as long as the training alone, unless the best look is in the
    first half.
    """
    if len(looks) < 2:
        return None
    last = looks[-1].step
    early, late = ([look for look in looks if (2 * look.step > last) == half] for half in (False, True))
    gain = _best(early).gain(_best(late))
    rises = gain.low > 0 and gain.value >= WORTH if stretch * last >= usual else gain.high >= 0
    if last < LATEST and (rises or last < min(EARLIEST, usual)):
        return None
    best = _best(looks[1:])
    near = [look for look in looks[1:] if 2 * look.step >= last and _is_tied(best.gain(look))]
    found = min((best, *near), key=lambda look: abs(math.log(stretch * look.step / usual)))
    steps = round(stretch * found.step)
    count = len(found.classes)
    why = (
        f"after {found.step:,} of {last:,} steps without {count} held-out classes their MAP@R was "
        f"{100 * found.map_at_r:.1f}, at first {100 * looks[0].map_at_r:.1f}, at the end {100 * looks[-1].map_at_r:.1f}"
    )
    if found is not best:
        why += f"; {best.step:,} steps ({100 * best.map_at_r:.1f}) cannot be told from it"
    return Choice(steps, why, count, found.step, tuple(_points(looks)))


def _best(looks: Sequence[Look]) -> Look:
    return max(looks, key=lambda look: look.map_at_r)


def _is_tied(gain: Interval) -> bool:
    """Whether a loss is less than one standard error."""
    return gain.value >= -gain.error


def _points(looks: Sequence[Look]) -> Iterable[tuple[float, ...]]:
    for before, look in zip((looks[0], *looks), looks, strict=False):
        gain = before.gain(look)
        yield look.step, look.map_at_r, *(round(value, 6) for value in (gain.value, gain.low, gain.high))
