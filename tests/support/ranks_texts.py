"""`integrations.sentence_transformers.Loss` on several ranks under DDP: each has a part of the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import nearfar as nf
from nearfar.integrations.sentence_transformers import Loss

ENDS = {1: (0, 12), 2: (0, 7, 12)}


class Model(nn.Module):
    """Stands for a SentenceTransformer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(30, 6, dtype=torch.float64)
        self.head = nn.Linear(6, 5, dtype=torch.float64)

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        mask = features["attention_mask"][:, :, None]
        features["sentence_embedding"] = self.head((self.words(features["input_ids"]) * mask).sum(dim=1))
        return features


def texts() -> list[torch.Tensor]:
    """Tokens of anchors, positives and negatives; some texts of the first rank come again on the second."""
    rng = torch.Generator().manual_seed(1)
    found = [torch.randint(1, 30, (12, 4), generator=rng) for _ in range(3)]
    found[0][9], found[1][10], found[2][11] = found[0][1], found[1][2], found[1][0]
    return found


def part(tokens: torch.Tensor, rank: int, world: int) -> dict[str, torch.Tensor]:
    """The rows of a rank; the padding differs between ranks."""
    mine = tokens[ENDS[world][rank] : ENDS[world][rank + 1]]
    padded = torch.cat([mine, torch.zeros(len(mine), rank, dtype=torch.int64)], dim=1)
    return {"input_ids": padded, "attention_mask": (padded > 0).long()}


def step(rank: int, world: int) -> dict[str, Any]:
    """Value and gradients of one batch, by several losses."""
    found = {}
    for name, mine, columns, chunk in (
        ("pairs", nf.losses.NTXent(), 2, None),
        ("triplets", nf.losses.CLIP(learn=True), 3, None),
        ("chunks", nf.losses.SigLIP(), 3, 3),
        ("scores", nf.losses.CoSENT(), 2, 3),
    ):
        model = Model()
        loss = Loss(DistributedDataParallel(model) if world > 1 else model, mine.double(), chunk=chunk)
        labels = torch.linspace(0, 1, 12)[ENDS[world][rank] : ENDS[world][rank + 1]] if name == "scores" else None
        value = loss([part(x, rank, world) for x in texts()[:columns]], labels)
        value.backward()
        found[name] = [value.detach(), *(x.grad for x in (*model.parameters(), *mine.parameters()))]
    return found
