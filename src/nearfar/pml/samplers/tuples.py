"""PML's `TuplesToWeightsSampler`: samples that a miner finds often come often."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Sampler, Subset, WeightedRandomSampler

from nearfar.pml._tuples import sample_weights
from nearfar.pml.samplers._draws import choose
from nearfar.pml.testers import BaseTester

__all__ = ["TuplesToWeightsSampler"]


class TuplesToWeightsSampler(Sampler[int]):
    """Yield row numbers drawn by how often each sample occurs in the tuples that a miner finds in the data set.

    At the start of a pass the data set, or a random part of it, is embedded and mined as one batch. Draws follow
    `np.random.seed` (the part) and `torch.manual_seed` (the samples), as in PML.

    Args:
        model: input -> embedding.
        miner: a miner of `nearfar.pml` or PML.
        dataset: samples (input, label).
        subset_size: how many samples are embedded, and drawn, in a pass; None for all.
        tester_kwargs: see `testers.BaseTester`.

    Attributes:
        weights: [n] of the last pass; None before it.
    """

    def __init__(
        self, model: nn.Module, miner: Any, dataset: Any, subset_size: int | None = None, **tester_kwargs: Any
    ) -> None:
        self.model, self.miner, self.dataset, self.subset_size = model, miner, dataset, subset_size
        self.tester = BaseTester(**tester_kwargs)
        self.device = self.tester.data_device
        self.weights: Tensor | None = None

    def __len__(self) -> int:
        return self.subset_size or len(self.dataset)

    def __iter__(self) -> Iterator[int]:
        part, chosen = self.dataset, list(range(len(self.dataset)))
        if self.subset_size:
            chosen = choose(chosen, self.subset_size)
            part = Subset(self.dataset, chosen)
        embeddings, labels = self.tester.get_all_embeddings(part, self.model)
        counts = sample_weights(self.miner(embeddings, labels.squeeze(1)), embeddings.float(), anchors_only=False)
        self.weights = torch.zeros(len(self.dataset), device=self.device)
        self.weights[torch.tensor(chosen, device=self.device)] = (
            torch.ones(len(chosen), device=self.device) if counts is None else counts.to(self.device)
        )
        return iter(WeightedRandomSampler(self.weights, len(self), replacement=True))  # type: ignore[arg-type]
