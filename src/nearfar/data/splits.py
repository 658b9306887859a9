"""Splits by class: a network is judged on classes that it has not seen."""

from __future__ import annotations

import numpy as np

from nearfar.data.samples import Labels, Samples


def class_disjoint(samples: Samples, share: float, *, seed: int) -> tuple[Labels, Labels]:
    """Indices of the rest, and of a share of the classes held out whole; each in ascending order.

    At least one class is on either side. The same labels, share and seed give the same split.

    >>> import torch
    >>> from nearfar.data import Tensors
    >>> rest, held_out = class_disjoint(Tensors(torch.eye(6), [0, 0, 1, 1, 2, 2]), 1 / 3, seed=0)
    >>> len(rest), len(held_out)
    (4, 2)
    """
    if not 0 < share < 1:
        raise ValueError(f"class_disjoint: share must lie between 0 and 1, both excluded, but came as {share!r}.")
    classes = len(samples.classes)
    if classes < 2:
        raise ValueError(
            "class_disjoint: a split by class needs two classes or more, but one came; add samples of other classes."
        )
    count = min(max(round(share * classes), 1), classes - 1)
    chosen = np.zeros(classes, dtype=np.bool_)
    chosen[np.random.default_rng(seed).permutation(classes)[:count]] = True
    held_out = chosen[samples.labels]
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)
