"""Labels for samplers, and states that go through a file."""

from __future__ import annotations

import io

import numpy as np
import torch


def labels_of(sizes, seed=0):
    y = np.repeat(np.arange(len(sizes)) * 3 - 2, sizes)
    return np.random.default_rng(seed).permutation(y)


def saved(state):
    """Through a file that may hold nothing but plain things and tensors."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
