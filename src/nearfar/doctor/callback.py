"""`Doctor`: a callback of the training loop that looks at a few rows now and then, and warns early."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from nearfar._checks import check_whole
from nearfar.doctor import space
from nearfar.doctor.findings import Diagnosis, Finding, concluded
from nearfar.doctor.thresholds import Thresholds
from nearfar.geometry.collapse import sample

if TYPE_CHECKING:  # the loop brings accelerate with it
    from nearfar.train import Moment

QUICK = (space.total_collapse, space.dimensional_collapse, space.class_collapse, space.norms)


class Doctor:
    """Look at every n-th batch, write `spread` and `effective_rank` into the journal, and tell of each new finding.

        nearfar.train.fit(config, folder, callbacks=[Doctor(every=50)])

    A look takes at most `rows` rows of the batch that was just trained on, with embeddings as they were in that step.
    On a GPU it waits for the device once a look. The cost is in docs/doctor.md.

    Args:
        every: steps between two looks.
        rows: rows of the batch that are looked at.
        metric: "cosine", or "euclidean" for a network that does not normalise.
        tell: what to do with a sentence; it goes to the error stream where nothing is given.
        thresholds: where the lines are; provisional.
    """

    def __init__(
        self,
        *,
        every: int = 50,
        rows: int = 128,
        metric: str = "cosine",
        tell: Callable[[str], None] | None = None,
        thresholds: Thresholds | None = None,
    ) -> None:
        check_whole("Doctor", "every", every)
        check_whole("Doctor", "rows", rows)
        self.every, self.rows, self.metric = every, rows, metric
        self.tell = tell or _to_error_stream
        self.limits = thresholds or Thresholds()
        self.diagnosis: Diagnosis | None = None
        self._told: dict[str, str] = {}

    def __call__(self, moment: Moment) -> dict[str, Any] | None:
        """What the journal gets: spread, effective rank, recall in the batch, and the names of what was found."""
        if moment.step % self.every:
            return None
        x, y = moment.embeddings, moment.labels
        finite = torch.isfinite(x).all(dim=1)
        if not bool(finite.all()):
            return None  # the loop itself stops at a loss that is not finite, and says where
        places = sample(y, self.rows)
        chosen = places.to(x.device)
        look = space.examine(x[chosen], y[chosen], places, None, None, self.metric, self.limits, shrink=False)
        self.diagnosis = concluded((f for rule in QUICK for f in rule(look)), space.measured(look))
        for finding in self.diagnosis.findings:
            self._say(moment, finding)
        line: dict[str, Any] = {
            "spread": round(look.measures.total, 6),
            "effective_rank": round(look.measures.effective_rank, 4),
            "batch recall@1": round(look.recall, 4),
        }
        names = [finding.name for finding in self.diagnosis.findings]
        return line | {"doctor": names} if names else line

    def _say(self, moment: Moment, finding: Finding) -> None:
        """Once for each name and severity, from one process."""
        if self._told.get(finding.name) != finding.severity and moment.setting.machine.is_main_process:
            self._told[finding.name] = finding.severity
            self.tell(f"step {moment.step}, {finding}")


def _to_error_stream(text: str) -> None:
    print(f"doctor: {text}", file=sys.stderr)
