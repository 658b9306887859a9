"""The network that suits samples of a shape, where nobody names one."""

from __future__ import annotations

__all__ = ["LARGE", "network_for"]

LARGE = 64
"""Pixels a side above which a picture is a photograph: too large for `small`."""


def network_for(shape: tuple[int, ...]) -> str:
    """The default network for an input shape: a linear head for vectors, `small` for drawings, lite0 for photographs.

    >>> network_for((7,)), network_for((1, 28, 28)), network_for((3, 224, 224))
    ('linear', 'small', 'lite0')
    """
    if len(shape) == 1:
        return "linear"
    if len(shape) == 3 and max(shape[1:]) <= LARGE:
        return "small"
    if len(shape) == 3 and shape[0] == 3:
        return "lite0"
    raise ValueError(
        f"train: no network is the usual one for samples of shape {list(shape)}, which are neither vectors, nor "
        f"drawings of at most {LARGE} pixels a side, nor color photographs; name one, such as --model.name mlp."
    )
