"""`Doctor`: a training callback that examines the same few samples every n steps and reports new findings."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearfar._utils.checks import check_whole
from nearfar._utils.console import say
from nearfar._utils.rng import set_states, states
from nearfar.data import View
from nearfar.doctor._findings import Diagnosis, conclude
from nearfar.doctor._looks import CLASSES, Look, judge, read_looks, take_look
from nearfar.doctor._remedies import Patient
from nearfar.doctor._thresholds import Thresholds
from nearfar.evaluation._embed import evaluation_mode

SAMPLES_PER_CLASS = 4  # samples drawn from each class; more if there are few classes
MAX_TRIPLETS = 2**20
"""Pair weights are computed for batches of at most this many triplets (rows x columns x positives of a row)."""


class Doctor:
    """Examine the same few training samples every `every` steps, log the results, and report new findings.

        nearfar.train.fit(config, folder, callbacks=[Doctor(every=50)])

    `fit` adds one, configured by `training.diagnose_every`, unless you pass your own. The first look is taken before
    the first step, and later looks are compared with it. A look embeds `rows` samples in evaluation mode without
    augmentation, which costs about a third of a training step with a batch of that size (see docs/guides/doctor.md).

    Args:
        every: steps between two looks.
        rows: number of samples to examine, four per class.
        tell: called with each new finding as a sentence; prints to standard error by default.
        thresholds: the thresholds of the findings.

    Attributes:
        diagnosis: the diagnosis at the latest look.
        looks: all looks so far.
    """

    def __init__(
        self,
        *,
        every: int = 50,
        rows: int = 128,
        tell: Callable[[str], None] | None = None,
        thresholds: Thresholds | None = None,
    ) -> None:
        check_whole("Doctor", "every", every)
        check_whole("Doctor", "rows", rows)
        self.every, self.rows = every, rows
        self.tell = tell or (lambda words: say(f"doctor: {words}", error=True))
        self.limits = thresholds or Thresholds()
        self.diagnosis: Diagnosis | None = None
        self.looks: list[Look] = []
        self._probe: tuple[Tensor, Tensor] | None = None
        self._reported: dict[str, str] = {}

    def begin(self, state: Any, before: Iterable[Mapping[str, Any]] = ()) -> dict[str, Any] | None:
        """Take the first look and return its journal entry.

        Args:
            state: the `TrainState` of the run, as every callback of `fit` receives it.
            before: journal entries of a run that is resumed; its looks are continued, and no new look is taken.
        """
        self.looks = read_looks(before)
        found = None if self.looks else self._look(0, state, None)
        return found and {CLASSES: len(state.train.classes), **found}

    def __call__(self, moment: Any) -> dict[str, Any] | None:
        """Take a look if one is due after this step (a `nearfar.train.Moment`), and return its journal entry."""
        if moment.step % self.every or not moment.state.machine.is_main_process:
            return None
        return self._look(moment.step, moment.state, float(moment.scalars["loss"].detach()), _pairs_per_row(moment))

    def _look(self, step: int, state: Any, loss: float | None, pairs: float | None = None) -> dict[str, Any] | None:
        if not state.machine.is_main_process:
            return None
        if self._probe is None:
            self._probe = _draw_samples(state, self.rows)
        x, y = self._probe
        if len(y) < 2:
            return None  # the drawn samples cannot be read
        device = state.machine.device
        with evaluation_mode(state.bare_model, device), torch.inference_mode():
            rows = state.bare_model(x.to(device, non_blocking=True)).float().cpu().clone()
        if not bool(torch.isfinite(rows).all()):
            return None  # the loop itself stops at a loss that is not finite, and says where
        self.looks.append(take_look(step, rows, y, loss, pairs))
        line: dict[str, Any] = self.looks[-1].to_entry()
        run = Patient(state.config, len(state.train.classes))
        self.diagnosis = conclude(judge(self.looks, self.limits, run), dict(line))
        for finding in self.diagnosis.findings:
            if self._reported.get(finding.name) != finding.severity:
                self._reported[finding.name] = finding.severity
                self.tell(f"step {step}, {finding}")
        found = {finding.name: finding.severity for finding in self.diagnosis.findings}
        return line | {"doctor": found} if found else line


def _pairs_per_row(moment: Any) -> float | None:
    """Effective pairs of the step's loss, per row of this rank's batch; None if the batch is too large."""
    rows, state = len(moment.labels), moment.state
    positives = int(torch.unique(moment.labels, return_counts=True)[1].max()) - 1
    columns = rows + state.config.training.cross_batch_memory
    if rows * columns * max(positives, 1) > MAX_TRIPLETS:
        return None
    x, device = moment.embeddings, moment.embeddings.device
    before = states(device)  # sets and miners may draw; a look must not advance the generators of the run
    x = x if x.dtype == torch.float64 else x.float()  # the precision in which the step called the loss
    why = state.loss.explain(x, moment.target, ids=state.ids(moment.indices))
    set_states(before, device)
    return float(why.effective_pairs) / rows


def _draw_samples(state: Any, rows: int) -> tuple[Tensor, Tensor]:
    """Draw training samples [n, ...], transformed for the network, and their labels [n]; determined by the seed."""
    labels = state.train.labels
    random = np.random.default_rng(state.config.training.seed)
    order = random.permutation(len(labels))
    classes, turn = np.unique(labels), random.permutation(int(labels.max()) + 1)
    order = order[np.argsort(turn[labels[order]], kind="stable")]  # class after class, shuffled inside
    first = np.searchsorted(turn[labels[order]], turn[labels[order]])
    place = np.arange(len(order)) - first
    chosen = order[place < max(SAMPLES_PER_CLASS, rows // len(classes))][:rows]
    x, y, _ = View(state.train, state.plain, substitutes=False).__getitems__(chosen.tolist())
    return x, y
