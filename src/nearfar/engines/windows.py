"""Mining without masks: a miner's window of scores becomes a fence, 0 at the pairs kept and -inf elsewhere.

A comparison and a masked fill would take thirty times as long.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nearfar.engines.runs import Narrow, place_
from nearfar.groups.groupings import Product
from nearfar.miners import Miner, Window
from nearfar.relations.layout import Layout

__all__ = ["FAR", "fence", "half_open", "window_of", "windowed"]

FAR = 1e30
"""A score that no pair reaches."""


def window_of(miner: Miner | None) -> Window | None:
    """The window that a miner gives to one pair, which tells its kind; None if it gives none, or there is no miner."""
    one = torch.ones(1, 1)
    return None if miner is None else miner.window(one, one > 0, one[0])


def windowed(product: Product, layout: Layout) -> bool:
    """Whether the miner of a loss, if there is one, keeps pairs in a window."""
    window = window_of(product.miner)
    return product.miner is None or (window is not None and (window.most is None or layout.weights is None))


def half_open(miner: Miner | None) -> bool:
    """Whether a miner's window is all above a score: of a loss that is linear, the same window of losses."""
    window = window_of(miner)
    if window is None or window.low is None:
        return False
    return window.high is None and window.most is None and not window.closed


def fence(
    miner: Miner, scores: Tensor, near: Tensor, narrow: Narrow, measure: Tensor, out: Tensor
) -> tuple[Tensor, Window]:
    """Mine a strip: the fence around its negative pairs, and the window that the miner gave.

    Args:
        miner: a miner that gives windows.
        scores: [t, m] scores of the strip; written to and restored.
        near: [t, P] scores of the columns with each row's own label.
        narrow: these columns.
        measure: [t, P] mask or weights of the positive pairs among them.
        out: [t, m] a buffer for the fence.
    """
    place_(scores, narrow, -math.inf)
    top = scores.amax(dim=1)
    window = miner.window(near, measure, top)
    assert window is not None  # noqa: S101 - checked by `windowed`
    low = _last(scores, window.most, near.shape[1]) if window.most is not None else window.low
    low = torch.as_tensor(-FAR if low is None else low, dtype=scores.dtype, device=scores.device).expand(len(top))
    low = torch.where(top == -math.inf, FAR, low.clamp(-FAR, FAR))
    low = torch.nextafter(low, low - FAR) if window.closed else low
    torch.threshold_(torch.sub(scores, low[:, None], out=out), 0.0, -math.inf).clamp_max_(0.0)
    if window.high is not None:
        out.add_(torch.threshold_(scores.neg().add_(window.high), 0.0, -math.inf).clamp_max_(0.0))
    scores.scatter_(1, narrow.place, near)
    return out, window


def _last(scores: Tensor, most: Tensor, width: int) -> Tensor:
    """The score [t] of the last of the `most` [t] hardest negative pairs; a score that no pair reaches for none."""
    ranked = scores.topk(min(width, scores.shape[1]), dim=1).values
    last = ranked.gather(1, (most.ceil().long() - 1).clamp(0, ranked.shape[1] - 1)[:, None])[:, 0]
    return torch.where(most > 0, last, FAR)
