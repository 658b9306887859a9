"""Where the doctor draws its lines: see docs/measured/calibration.md for where each comes from."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Thresholds"]


@dataclass(frozen=True)
class Thresholds:
    """Lines between healthy and not. Every one may be set by the caller.

    Args:
        looks: a finding in the course of a run must stand at so many looks in a row.
        lost_alarm: share of the first look's skill that is left, below which classes are lost in training.
        lost_warning: the same, a warning, where the space is narrower than `spread_alarm`.
        lost_least: skill that must be lost at least: less is the luck of 128 samples.
        skill_pinned: skill below which a loss that rests on its margin is an alarm in training.
        spread_alarm: rms distance of unit rows to their mean below which the space is one point (mean cosine .99).
        spread_warning: the same, on the way there (mean cosine .96).
        rank_alarm: effective rank below which dimensions have collapsed, where width and classes are 4 or more.
        rank_warning: the same, a warning, where width and classes are 16 or more.
        skill_alarm: (recall@1 - chance) / (1 - chance) below which classes lie on each other.
        skill_warning: the same, a warning.
        skill_kept: the same, from which a narrow cone or a loss at its margin is only a note: classes are still apart.
        point: spread within classes over total spread, below which classes are points.
        pinned: how near the loss lies to its margin, as a share of it.
        pull: share of the gradient that three rows carry.
        suspects: share of rows whose neighbors agree on another label.
        norm_ratio: longest row over the median one.
        norm: rms length above which rows that are not normalized run away.
        sizes: largest class over the median one.
        lost: share of its first recall that a run keeps, below which it has forgotten.
        learnt: skill on the training samples from which they are known by heart.
        fallen: held-out recall lost since the best, from which over-fitting is a warning.
    """

    looks: int = 1
    lost_alarm: float = 0.4
    lost_warning: float = 0.9
    lost_least: float = 0.1
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
    learnt: float = 0.95
    fallen: float = 0.05
