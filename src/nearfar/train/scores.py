"""Score a network: embed samples in evaluation mode, then `nf.evaluate`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from nearfar._utils.checks import printable
from nearfar._utils.process_group import ProcessGroup
from nearfar._utils.progress import Watch
from nearfar.batches import violations
from nearfar.data.loading import Batch, View, collate
from nearfar.data.pictures import CorruptImageError
from nearfar.data.samples import Labels, Samples, Transform
from nearfar.evaluation import Evaluation, evaluate
from nearfar.evaluation.embed import evaluation_mode
from nearfar.evaluation.parallel import current_group

__all__ = ["Score", "chance", "score", "vectors_of", "violation"]

NOTHING: Batch = (torch.empty(0), torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long))
"""The batch of a rank that has none in the last turn."""
FIRST = 5
"""How many names of left-out samples a sentence lists."""


def vectors_of(
    model: nn.Module,
    samples: Samples,
    transform: Transform,
    *,
    device: torch.device | str = "cpu",
    workers: int = 0,
    batch_size: int = 256,
    hold: bool = False,
    watch: Watch | None = None,
) -> tuple[Tensor, Labels]:
    """Embed samples: float32 [m, d] on `device` in the order of the samples, and the samples' numbers [m].

    With `hold` the samples are held on the device, if they can be, and transformed there.

    Samples that cannot be read (if `on_corrupt` is "skip") are left out, without a substitute. The model's training
    modes are restored.

    Over ranks (`nearfar.evaluation.parallel`) batches are dealt out in turn, and after each turn everyone gets all of
    its vectors: the batches, and so the vectors, are those of one process.
    """
    device, group = torch.device(device), current_group()
    view = View(samples, transform, substitutes=False, device=device if hold else None)
    cuts = [range(i, min(i + batch_size, len(samples))) for i in range(0, len(samples), batch_size)]
    loader: DataLoader[Any] = DataLoader(
        view,
        batch_sampler=cuts[group.rank :: group.world],  # type: ignore[arg-type]
        num_workers=workers if view.held is None else 0,
        collate_fn=collate,
        generator=torch.Generator(),
    )
    parts: list[Tensor] = []
    rows: list[Tensor] = []
    with evaluation_mode(model, device), torch.inference_mode():
        batches = iter(loader)
        for turn in range(-(-len(cuts) // group.world)):
            _, _, indices = batch = next(batches, NOTHING)
            x = model(view.render(batch[0], indices, device)).float() if len(indices) else None
            for theirs, numbers in _of_all(group, x, indices.to(device)):
                parts.append(theirs)
                rows.append(numbers.cpu())
            if watch is not None:
                seen = min((turn + 1) * group.world * batch_size, len(samples))
                watch("embedding", seen, len(samples))
    if not parts:
        raise CorruptImageError(
            f"evaluate: none of the {len(samples)} samples can be read, the first is {samples.names[0]}; mend the data."
        )
    return torch.cat(parts).clone(), torch.cat(rows).numpy()


def _of_all(group: ProcessGroup, x: Tensor | None, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The vectors [t, d] and sample numbers [t] of each rank that has any, in the order of ranks."""
    if group.world == 1:
        if x is not None:
            yield x, rows
        return
    shapes = group.gather(torch.tensor([0, 0] if x is None else list(x.shape), device=rows.device))
    most, width = shapes.amax(dim=0).tolist()
    padded, numbers = torch.zeros(most, width, device=rows.device), torch.zeros(most, dtype=torch.long).to(rows.device)
    if x is not None:
        padded[: len(x)], numbers[: len(x)] = x, rows
    for theirs, places, (count, _) in zip(group.gather(padded), group.gather(numbers), shapes.tolist(), strict=True):
        if count:
            yield theirs[:count], places[:count]


@dataclass(frozen=True, eq=False)
class Score:
    """The result of `score`.

    Attributes:
        evaluation: the scores.
        x: [m, d] the vectors.
        rows: [m] the samples' numbers.
        left_out: names of the samples that cannot be read, those of the gallery included.
    """

    evaluation: Evaluation
    x: Tensor
    rows: Labels
    left_out: tuple[str, ...]

    def notice(self) -> str:
        """A sentence about the samples that were left out; empty if there are none."""
        if not self.left_out:
            return ""
        first = ", ".join(map(printable, self.left_out[:FIRST])) + (", ..." if len(self.left_out) > FIRST else "")
        count = len(self.left_out)
        return f"left out, as {count:,} sample{'s' * (count > 1)} cannot be read: {first}"


def score(
    model: nn.Module,
    samples: Samples,
    transform: Transform,
    *,
    gallery: Samples | None = None,
    ks: tuple[int, ...] = (1, 2, 4, 8),
    resamples: int = 0,
    watch: Watch | None = None,
    **options: Any,
) -> Score:
    """`evaluate` of the samples (in their gallery, if there is one), and their vectors; options are `vectors_of`'s."""
    x, rows = vectors_of(model, samples, transform, watch=watch, **options)
    y = torch.from_numpy(samples.labels[rows]).to(x.device)
    if gallery is None:
        depths = tuple(k for k in ks if k < len(x)) or (1,)
        return Score(evaluate(x, y, ks=depths, resamples=resamples, watch=watch), x, rows, _absent(samples, rows))
    reference, found = vectors_of(model, gallery, transform, watch=watch, **options)
    there = torch.from_numpy(gallery.labels[found]).to(x.device)
    depths = tuple(k for k in ks if k <= len(reference)) or (1,)
    evaluation = evaluate(x, y, ks=depths, ref_emb=reference, ref_labels=there, resamples=resamples, watch=watch)
    return Score(evaluation, x, rows, _absent(samples, rows) + _absent(gallery, found))


def chance(labels: Labels, gallery: Labels | None = None) -> float:
    """R@1 of a random order: the mean share of right rows among all others, of queries that have any.

    >>> chance(np.array([0, 0, 1, 1, 2]))
    0.25
    """
    rows, own = (labels, 1) if gallery is None else (gallery, 0)
    right = np.bincount(rows, minlength=int(labels.max()) + 1)[labels] - own
    asked = right > 0
    return float(right[asked].mean() / (len(rows) - own)) if asked.any() else 0.0


def _absent(samples: Samples, rows: Labels) -> tuple[str, ...]:
    """The names of the samples whose numbers are not in `rows`."""
    return tuple(samples.names[row] for row in np.setdiff1d(np.arange(len(samples)), rows).tolist())


def violation(x: Tensor, labels: Tensor, *, max_positive_distance: float, min_negative_distance: float) -> float:
    """The share of pairs that violate their constraint, which a projection should lower."""
    return float(
        violations(
            x, labels, max_positive_distance=max_positive_distance, min_negative_distance=min_negative_distance
        ).share
    )
