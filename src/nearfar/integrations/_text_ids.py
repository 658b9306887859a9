"""Which texts of a batch are equal, by their tokens, and which anchors therefore share their positives."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def hash_texts(features: Mapping[str, Any]) -> Tensor:
    """A number of 64 bits for each text [n], equal for equal tokens.

    Args:
        features: `input_ids` [n, t], and `attention_mask` [n, t] if they are padded; or, of a static encoder,
            `input_ids` of all texts one after the other and `offsets` [n], where the order of tokens does not count.
    """
    tokens = features.get("input_ids")
    if not isinstance(tokens, Tensor):
        raise ValueError(
            f"Loss: columns without input_ids ({', '.join(features)}) cannot be compared; pass duplicates=False."
        )
    offsets = features.get("offsets")
    if tokens.ndim == 1 and isinstance(offsets, Tensor):
        text = torch.searchsorted(offsets, torch.arange(len(tokens), device=tokens.device), right=True) - 1
        return torch.zeros_like(offsets).index_add_(0, text, _mix(tokens))
    mask = features.get("attention_mask")
    mask = torch.ones_like(tokens) if mask is None else mask.to(tokens.dtype)
    place = mask.cumsum(dim=1)  # wherever the padding is
    return (_mix(tokens + (place << 32)) * mask).sum(dim=1)


def _mix(x: Tensor) -> Tensor:
    """Scatter numbers over 64 bits (splitmix64); sums and products wrap around."""
    x = x.long() * -7046029254386353131
    x = (x ^ (x >> 30)) * -4658895280553007687
    x = (x ^ (x >> 27)) * -7723592293110705685
    return x ^ (x >> 31)


def group_texts(anchors: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
    """Labels of n anchors, and of the documents [k, n] of each, the positives first; equal for what belongs together.

    Anchors that share a text, or a positive, share their label, also over several steps. A negative has the label of
    anchors of which it is a positive elsewhere, or else one of its own.
    """
    texts, places = torch.unique(documents, return_inverse=True)
    asked, who = torch.unique(anchors, return_inverse=True)
    label = torch.arange(len(texts), device=texts.device)
    while True:
        mine = label[places[0]]
        least = torch.full_like(asked, len(texts)).scatter_reduce(0, who, mine, "amin")
        lower = label.scatter_reduce(0, places[0], least[who], "amin")
        if torch.equal(lower, label):
            return lower[places[0]], lower[places]
        label = lower
