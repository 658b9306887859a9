"""`Doctor`: a callback of the training loop that examines a few samples regularly and warns early."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from nearfar._utils.checks import check_whole
from nearfar._utils.rng import set_states, states
from nearfar.data import View
from nearfar.doctor.course import CLASSES, Case, Sight, judged, look, seen
from nearfar.doctor.findings import Diagnosis, Finding, concluded
from nearfar.doctor.thresholds import Thresholds
from nearfar.evaluation.embed import evaluation_mode
from nearfar.runs.config import Config

__all__ = ["Doctor", "Moment", "Training"]


class Training(Protocol):
    """What the doctor needs of a run; `nearfar.train.state.TrainState` provides it."""

    @property
    def config(self) -> Config: ...  # noqa: D102
    @property
    def machine(self) -> Any: ...  # noqa: D102
    @property
    def bare_model(self) -> Any: ...  # noqa: D102
    @property
    def train(self) -> Any: ...  # noqa: D102
    @property
    def plain(self) -> Any: ...  # noqa: D102
    @property
    def loss(self) -> Any: ...  # noqa: D102
    def ids(self, indices: Tensor) -> Tensor | None: ...  # noqa: D102


class Moment(Protocol):
    """What the doctor needs of a step; `nearfar.train.Moment` provides it."""

    @property
    def step(self) -> int: ...  # noqa: D102
    @property
    def state(self) -> Training: ...  # noqa: D102
    @property
    def scalars(self) -> Mapping[str, Tensor]: ...  # noqa: D102
    @property
    def embeddings(self) -> Tensor: ...  # noqa: D102
    @property
    def labels(self) -> Tensor: ...  # noqa: D102
    @property
    def indices(self) -> Tensor: ...  # noqa: D102
    @property
    def target(self) -> Any: ...  # noqa: D102


EACH = 4
"""Samples per class, more if there are few classes."""
MOST = 2**20
"""The most triplets (rows x columns x positives of a row) of a batch whose pair weights a look computes."""


class Doctor:
    """Examine the same few training samples every n steps, write the results to the journal, report new findings.

        nearfar.train.fit(config, folder, callbacks=[Doctor(every=50)])

    `fit` adds one by itself, as `training.diagnose_every` says, unless one is passed. The first look is before the
    first step; later ones are compared with it. A look embeds `rows` samples in evaluation mode, without augmentation:
    a third of the cost of a step with a batch of that size. The cost is in docs/guides/doctor.md.

    Args:
        every: steps between two looks.
        rows: how many samples to examine, four per class.
        tell: called with each new finding as a sentence; prints to standard error by default.
        thresholds: the thresholds of the findings.
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
        self.tell = tell or _to_error_stream
        self.limits = thresholds or Thresholds()
        self.diagnosis: Diagnosis | None = None
        self.sights: list[Sight] = []
        self._probe: tuple[Tensor, Tensor] | None = None
        self._reported: dict[str, str] = {}

    def begin(self, state: Training, before: Iterable[Mapping[str, Any]] = ()) -> dict[str, Any] | None:
        """Take the first look, for the journal; or none if a resumed run continues from the looks `before`."""
        self.sights = seen(before)
        found = None if self.sights else self._look(0, state, None)
        return found and {CLASSES: len(state.train.classes), **found}

    def __call__(self, moment: Moment) -> dict[str, Any] | None:
        """Values for the journal: spread, effective rank, recall among the samples, pairs per row, the findings."""
        if moment.step % self.every or not moment.state.machine.is_main_process:
            return None
        return self._look(moment.step, moment.state, float(moment.scalars["loss"].detach()), _pairs_per_row(moment))

    def _look(
        self, step: int, state: Training, loss: float | None, pairs: float | None = None
    ) -> dict[str, Any] | None:
        if not state.machine.is_main_process:
            return None
        if self._probe is None:
            self._probe = _drawn(state, self.rows)
        x, y = self._probe
        if len(y) < 2:
            return None  # nothing that was drawn can be read
        device = state.machine.device
        with evaluation_mode(state.bare_model, device), torch.inference_mode():
            rows = state.bare_model(x.to(device, non_blocking=True)).float().cpu().clone()
        if not bool(torch.isfinite(rows).all()):
            return None  # the loop itself stops at a loss that is not finite, and says where
        self.sights.append(look(step, rows, y, loss, pairs))
        line: dict[str, Any] = self.sights[-1].line()
        self.diagnosis = concluded(
            judged(self.sights, self.limits, Case.of(state.config, len(state.train.classes))), dict(line)
        )
        for finding in self.diagnosis.findings:
            self._say(step, finding)
        found = {finding.name: finding.severity for finding in self.diagnosis.findings}
        return line | {"doctor": found} if found else line

    def _say(self, step: int, finding: Finding) -> None:
        """Report a finding once for each name and severity."""
        if self._reported.get(finding.name) != finding.severity:
            self._reported[finding.name] = finding.severity
            self.tell(f"step {step}, {finding}")


def _pairs_per_row(moment: Moment) -> float | None:
    """Pairs over which the step's loss spread its weight, for each row of this rank's batch; None in a large batch."""
    rows, state = len(moment.labels), moment.state
    positives = int(torch.unique(moment.labels, return_counts=True)[1].max()) - 1
    columns = rows + state.config.training.cross_batch_memory
    if rows * columns * max(positives, 1) > MOST:
        return None
    x, device = moment.embeddings, moment.embeddings.device
    before = states(device)  # sets and miners may draw, and a look must not change what the run draws
    x = x if x.dtype == torch.float64 else x.float()  # as the step gave it to the loss
    why = state.loss.explain(x, moment.target, ids=state.ids(moment.indices))
    set_states(before, device)
    return float(why.effective_pairs) / rows


def _drawn(state: Training, rows: int) -> tuple[Tensor, Tensor]:
    """Draw training samples, transformed for the network [n, ...], and labels [n]; fixed by the seed."""
    labels = state.train.labels
    random = np.random.default_rng(state.config.training.seed)
    order = random.permutation(len(labels))
    classes, turn = np.unique(labels), random.permutation(int(labels.max()) + 1)
    order = order[np.argsort(turn[labels[order]], kind="stable")]  # class after class, shuffled inside
    first = np.searchsorted(turn[labels[order]], turn[labels[order]])
    place = np.arange(len(order)) - first
    chosen = order[place < max(EACH, rows // len(classes))][:rows]
    x, y, _ = View(state.train, state.plain, substitutes=False).__getitems__(chosen.tolist())
    return x, y


def _to_error_stream(text: str) -> None:
    from nearfar._utils.console import say

    say(f"doctor: {text}", error=True)
