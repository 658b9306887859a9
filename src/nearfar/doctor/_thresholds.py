"""The thresholds of the doctor; benchmarks/RESULTS-doctor.md says where each comes from."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Thresholds:
    """Thresholds between healthy and unhealthy; each can be set by the caller.

    Args:
        looks: consecutive looks at which a finding must hold during a run.
        lost_alarm: share of the first look's skill; below it, classes are lost in training.
        lost_warning: the same for a warning, used where the spread is below `spread_alarm`.
        lost_least: the smallest drop of skill that counts; a smaller one may be chance with 128 samples.
        few_pairs: effective pairs per row of a batch; fewer are too few if little is learned.
        gained: share of the missing skill (1 - that of the first look) that must be gained where pairs are few.
        moved: relative change of spread or effective rank since the first look; below it, a run has hardly begun.
        skill_pinned: skill below which a loss that stays at its margin is an alarm in training.
        spread_alarm: rms distance of unit rows to their mean; below it, the space is one point (mean cosine .99).
        spread_warning: the same for a warning (mean cosine .96).
        rank_alarm: effective rank; below it, dimensions have collapsed, given 4 or more dimensions and classes.
        rank_warning: the same for a warning, given 16 or more dimensions and classes.
        skill_alarm: (recall@1 - chance) / (1 - chance); below it, classes overlap.
        skill_warning: the same for a warning.
        skill_kept: skill from which a narrow cone or a loss at its margin is only a note: classes are separated.
        point: spread within classes over total spread; below it, classes are points.
        pinned: distance of the loss from its margin, as a share of the margin, up to which it is at the margin.
        pull: share of the gradient on three rows; above it, the gradient is concentrated.
        suspects: share of rows whose neighbors agree on another label; above it, a warning.
        norm_ratio: the longest row over the median one; above it, a warning.
        norm: rms norm of rows that are not normalized; above it, an alarm.
        sizes: the largest class over the median one; above it, a note.
        lost: share of the first recall; below it, a run has lost its recall.
        learned: skill on the training samples; from it on, they are memorized.
        early: share of a run; if recall has fallen since a best before that, the best came early.
        fallen: held-out recall lost since the best; above it, over-fitting is a warning. Also for MAP@R: a run that was
            too short or too long gets a warning from it on, a note below.
        rising: held-out MAP@R gained in the second half of a run that ends at its best; from it on, it was too short.
        declined: held-out MAP@R lost since the best; from it on, the run was too long.
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
    rising: float = 0.005
    declined: float = 0.01
