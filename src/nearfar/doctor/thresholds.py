"""The thresholds of the doctor; benchmarks/RESULTS-doctor.md says where each comes from."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Thresholds"]


@dataclass(frozen=True)
class Thresholds:
    """Thresholds between healthy and unhealthy; each may be set by the caller.

    Args:
        looks: a finding during a run must hold at this many looks in a row.
        lost_alarm: share of the first look's skill that is left, below which classes are lost in training.
        lost_warning: the same, a warning, where the space is narrower than `spread_alarm`.
        lost_least: the least loss of skill that counts: less may be chance with 128 samples.
        few_pairs: effective pairs for each row of a batch, below which they are too few if little is learned.
        gained: share of what the first look's skill lacks to 1 that must be gained in training where pairs are few.
        moved: relative change of spread or effective rank since the first look, below which a run has hardly begun.
        skill_pinned: skill below which a loss that stays at its margin is an alarm in training.
        spread_alarm: rms distance of unit rows to their mean below which the space is one point (mean cosine .99).
        spread_warning: the same, on the way there (mean cosine .96).
        rank_alarm: effective rank below which dimensions have collapsed, with 4 or more dimensions and classes.
        rank_warning: the same, a warning, with 16 or more dimensions and classes.
        skill_alarm: (recall@1 - chance) / (1 - chance) below which classes overlap.
        skill_warning: the same, a warning.
        skill_kept: the same, from which a narrow cone or a loss at its margin is only a note: classes are separated.
        point: spread within classes over total spread, below which classes are points.
        pinned: how near the loss is to its margin, as a share of the margin.
        pull: share of the gradient that three rows carry.
        suspects: share of rows whose neighbors agree on another label.
        norm_ratio: longest row over the median one.
        norm: rms norm above which rows that are not normalized are too long.
        sizes: largest class over the median one.
        lost: share of the first recall that is left, below which a run has forgotten.
        learned: skill on the training samples from which they are memorized.
        early: share of a run; where recall fell after a best before that, the best came early.
        fallen: held-out recall lost since the best, from which over-fitting is a warning.
    """

    looks: int = 1
    lost_alarm: float = 0.4
    lost_warning: float = 0.9
    lost_least: float = 0.1
    few_pairs: float = 1.75
    gained: float = 0.3
    moved: float = 0.2
    skill_pinned: float = 0.1
    spread_alarm: float = 0.1
    spread_warning: float = 0.2
    rank_alarm: float = 2.0
    rank_warning: float = 4.0
    skill_alarm: float = 0.05
    skill_warning: float = 0.15
    skill_kept: float = 0.5
    point: float = 0.01
    pinned: float = 0.05
    pull: float = 0.5
    suspects: float = 0.05
    norm_ratio: float = 20.0
    norm: float = 1e4
    sizes: float = 20.0
    lost: float = 0.5
    learned: float = 0.95
    early: float = 0.25
    fallen: float = 0.05
