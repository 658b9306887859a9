"""How good the network is now: embed samples in evaluation mode, then `nf.evaluate`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from nearfar.batches import violations
from nearfar.data.samples import Samples, Transform, View, collate
from nearfar.evaluation import Evaluation, evaluate
from nearfar.evaluation.embed import evaluating


def vectors_of(
    model: nn.Module,
    samples: Samples,
    transform: Transform,
    *,
    device: torch.device | str = "cpu",
    workers: int = 0,
    batch_size: int = 256,
) -> Tensor:
    """float32 [n, d] on `device`, in the order of the samples; the model's modes are put back."""
    loader: DataLoader[Any] = DataLoader(
        View(samples, transform),
        batch_size=batch_size,
        num_workers=workers,
        collate_fn=collate,
        generator=torch.Generator(),
    )
    parts = []
    with evaluating(model, torch.device(device)), torch.inference_mode():
        for x, _, _ in loader:
            parts.append(model(x.to(device, non_blocking=True)).float())
    return torch.cat(parts).clone()


def score(
    model: nn.Module,
    samples: Samples,
    transform: Transform,
    *,
    gallery: Samples | None = None,
    ks: tuple[int, ...] = (1, 2, 4, 8),
    resamples: int = 0,
    **options: Any,
) -> tuple[Evaluation, Tensor]:
    """`evaluate` of the samples (in their gallery, if there is one), and their vectors; options are `vectors_of`'s."""
    x = vectors_of(model, samples, transform, **options)
    y = torch.from_numpy(samples.labels).to(x.device)
    if gallery is None:
        depths = tuple(k for k in ks if k < len(x)) or (1,)
        return evaluate(x, y, ks=depths, resamples=resamples), x
    reference = vectors_of(model, gallery, transform, **options)
    there = torch.from_numpy(gallery.labels).to(x.device)
    depths = tuple(k for k in ks if k <= len(reference)) or (1,)
    return evaluate(x, y, ks=depths, ref_emb=reference, ref_labels=there, resamples=resamples), x


def violation(x: Tensor, labels: Tensor, *, near: float, far: float) -> float:
    """The share of pairs outside their constraint: what a projection should lower."""
    return float(violations(x, labels, near=near, far=far).share)
