"""The toy space of the papers, random spaces and rigid motions."""

from __future__ import annotations

import torch

TOY = torch.tensor([(0, 0), (2, 0.3), (0.8, 1.5), (1.1, 0.2), (2.6, 1.6)], dtype=torch.float64)


TOY_LABELS = torch.tensor([0, 0, 0, 1, 1])


def drawn(seed, rows=9, width=3, classes=3):
    noise = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=noise, dtype=torch.float64), torch.arange(rows) % classes


def moved(x, seed=0, scale=1.0):
    """A rigid motion (with a reflection for odd seeds) of x, scaled."""
    noise = torch.Generator().manual_seed(seed)
    width = x.shape[1]
    q, _ = torch.linalg.qr(torch.randn(width, width, generator=noise, dtype=torch.float64))
    q[:, 0] *= -1 if seed % 2 else 1
    return scale * (x.double() @ q) + 5 * torch.randn(width, generator=noise, dtype=torch.float64)
