"""Index tuples as PML's losses use them: as random triplets, or as weights of samples."""

from __future__ import annotations

import torch
from torch import Tensor

from nearfar._utils.tensors import readable

Indices = tuple[Tensor, ...]
"""(anchor, positive, negative) or (anchor, positive, anchor, negative)."""


def draw_triplets(positive: Tensor, chance: Tensor, times: Tensor) -> Indices:
    """Draw triplets with replacement, with torch's global generator.

    Args:
        positive: [n, m] mask of the positives, each as likely as the others.
        chance: [n, m] probability of each negative, up to a factor per row.
        times: [n] how many triplets of each anchor; none if it has no positive, or no negative of nonzero probability.

    Returns:
        (anchor, positive, negative).
    """
    ready = positive.any(dim=1) & (chance.sum(dim=1) > 0)
    times = torch.where(ready, times, torch.zeros_like(times))
    most = int(times.max()) if len(times) else 0
    anchor, slot = torch.nonzero(torch.arange(most, device=times.device) < times[:, None], as_tuple=True)
    return anchor, _pick(positive, most)[anchor, slot], _pick(chance, most)[anchor, slot]


def _pick(weight: Tensor, count: int) -> Tensor:
    """Draw columns [n, count] from each row of weight [n, m] by inverting its cumulative sum."""
    heights = weight.to(torch.float64).cumsum(dim=1)
    spots = torch.rand(len(weight), count, dtype=torch.float64, device=weight.device) * heights[:, -1:]
    return torch.searchsorted(heights, spots, right=True).clamp(max=weight.shape[1] - 1)


def sample_weights(indices: Indices | None, like: Tensor, *, anchors_only: bool) -> Tensor | None:
    """How often each sample occurs in the tuple, relative to the largest count [n]; None (all 1) if it is empty."""
    if indices is None or not sum(len(part) for part in indices):
        return None
    if anchors_only:
        indices = indices[:1] if len(indices) == 3 else indices[::2]
    listed = torch.cat(indices).long().to(like.device)
    counts = torch.bincount(listed, minlength=len(like)).to(torch.promote_types(like.dtype, torch.float32))
    return counts / counts.max()


def check_classes(owner: str, labels: Tensor, classes: int) -> None:
    """Require labels from 0 to `classes` - 1."""
    if not readable(labels) or not len(labels):
        return
    low, high = (int(end) for end in labels.aminmax())
    if not 0 <= low <= high < classes:
        raise ValueError(
            f"{owner}: labels must lie in 0..{classes - 1}, but reach from {low} to {high}; raise num_classes or "
            "renumber them."
        )
