"""Losses of rows that an index tuple weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nearfar.pml._tuples import sample_weights
from nearfar.pml.losses.base import Call, Loss
from nearfar.pml.reducers import MultipleReducers

__all__ = ["alone", "reduced", "weighed"]


def reduced(loss: Loss, call: Call) -> Tensor:
    """The loss from its elements, without regularizers, where the recipe cannot take the index tuple."""
    wide = torch.promote_types(call.embeddings.dtype, torch.float32)
    call = replace(
        call, embeddings=call.embeddings.to(wide), ref_emb=None if call.ref_emb is None else call.ref_emb.to(wide)
    )
    (name,) = loss._sub_loss_names()
    reducer: Any = loss.reducer
    reducer = reducer.of(name) if isinstance(reducer, MultipleReducers) else reducer
    value: Tensor = reducer({name: loss._elements(call)[name]}, call.embeddings, call.labels)
    return value


def weighed(call: Call, rows: Tensor) -> Tensor:
    """Values of rows [n] times how often each occurs in the index tuple, relative to the largest count."""
    weights = sample_weights(call.indices, call.embeddings, anchors_only=False)
    return rows if weights is None else rows * weights


def alone(call: Call, *, tuples: bool = True) -> None:
    """Require a batch without a reference and, with `tuples=False`, without an index tuple."""
    if call.ref_emb is not None or call.ref_labels is not None:
        raise ValueError(f"{call.owner}: it compares the batch with itself; leave ref_emb and ref_labels out.")
    if not tuples and call.indices is not None:
        raise ValueError(f"{call.owner}: it chooses its own pairs and takes no index tuple; leave it out.")
