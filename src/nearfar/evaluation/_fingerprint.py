"""A fingerprint of the network that computed vectors: a digest of its weights and, if known, of its preprocessing.

A fingerprint is "weights/preprocessing", or "weights" alone if the network was fed directly. Vectors of two networks
must not be compared in one search; unknown fingerprints are accepted.
"""

import hashlib
import json
import re
from typing import Any

import torch
from torch import Tensor, nn

DIGITS = 32  # hexadecimal digits of each part of a fingerprint


def of_weights(model: nn.Module) -> str:
    """Digest of all tensors in a module's state dict, independent of device and layout; empty if there are none."""
    digest = hashlib.sha256()
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    for name, value in state.items():
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:DIGITS] if state else ""


def of_preprocessing(description: dict[str, Any]) -> str:
    """Digest of a description of the preprocessing."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:DIGITS]


def check_fingerprint(owner: str, text: str) -> str:
    """Validate a fingerprint that was read from a file."""
    if not re.fullmatch(r"[0-9a-f]{1,128}(/[0-9a-f]{1,128})?", text):
        raise ValueError(f"{owner}: fingerprint must be hexadecimal digits, but came as {text[:40]!r}; write it again.")
    return text


def check_same_network(owner: str, first: tuple[str, str | None], second: tuple[str, str | None]) -> None:
    """Raise an error if two fingerprints are of different networks; each side is (name, fingerprint or None).

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
