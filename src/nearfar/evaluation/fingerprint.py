"""Which network made these vectors: a digest of its weights and, where it is known, one of its preprocessing.

A fingerprint is "weights/preprocessing", or "weights" alone where samples came ready for the network. Vectors of two
networks must not meet in one search; what is not known is let through.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["DIGITS", "check_same_network", "checked", "of_preprocessing", "of_weights"]

DIGITS = 32
"""Hexadecimal digits of each part of a fingerprint."""


def of_weights(model: nn.Module) -> str:
    """Digest of every tensor in a module's state, whatever device or layout holds it; empty where there is none."""
    digest = hashlib.sha256()
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    for name, value in state.items():
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:DIGITS] if state else ""


def of_preprocessing(description: dict[str, Any]) -> str:
    """Digest of a description of what is done to a sample before the network reads it."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:DIGITS]


def checked(owner: str, text: str) -> str:
    """A fingerprint that a file carries, or one sentence."""
    if not re.fullmatch(r"[0-9a-f]{1,128}(/[0-9a-f]{1,128})?", text):
        raise ValueError(f"{owner}: fingerprint must be hexadecimal digits, but came as {text[:40]!r}; write it again.")
    return text


def check_same_network(owner: str, first: tuple[str, str | None], second: tuple[str, str | None]) -> None:
    """Refuse vectors of two networks; each side is what it is called, and its fingerprint or None.

    >>> check_same_network("search", ("the index", "aa/bb"), ("the queries", "aa"))
    >>> check_same_network("search", ("the index", "aa/bb"), ("the queries", "aa/cc"))
    Traceback (most recent call last):
    ValueError: search: the index and the queries come from networks with different preprocessing; embed both with one.
    """
    parts = [(print_ or "").split("/") for _, print_ in (first, second)]
    for what, a, b in zip(("weights", "preprocessing"), *parts, strict=False):
        if a and b and a != b:
            raise ValueError(
                f"{owner}: {first[0]} and {second[0]} come from networks with different {what}; embed both with one."
            )
