"""Convert what a user passes (tensors, arrays, lists) to tensors, or raise an error of one sentence.

Tensors are returned unchanged: their shapes, types and values are checked where they are used.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

KINDS = {
    "b": "truth values",
    "c": "complex numbers",
    "U": "words",
    "S": "bytes",
    "V": "records",
    "M": "dates",
    "m": "spans of time",
    "O": "objects",
    "f": "fractions",
    "i": "integers",
    "u": "integers",
}


def rows_of(owner: str, name: str, value: Any) -> Tensor:
    """Return vectors [n, d]: a tensor unchanged, an array or a list of real numbers as a floating-point tensor."""
    if isinstance(value, Tensor):
        if value.is_complex():
            raise TypeError(f"{owner}: {name} must hold real numbers, but came as {value.dtype}; take .real or .abs().")
        return value
    array = _array(owner, name, value, "real numbers [n, d]")
    if array.dtype.kind not in "fiu":
        raise TypeError(f"{owner}: {name} must hold real numbers [n, d], but came as {in_words(array)}.")
    if array.dtype.kind != "f":
        array = array.astype(np.float32)
    return tensor_of(array)


def labels_of(owner: str, name: str, value: Any, device: torch.device | None = None) -> Tensor:
    """Return labels [n]: a tensor unchanged (unsigned ones as int64), an array or a list of integers as int64."""
    if isinstance(value, Tensor):
        if value.dtype not in (torch.uint16, torch.uint32, torch.uint64):
            return value
        return torch.from_numpy(int64_of(owner, name, value.detach().cpu().numpy())).to(value.device)
    array = _array(owner, name, value, "integers [n]")
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(
            f"{owner}: {name} must be integers [n], but came as {in_words(array)}; nf.data.numbered turns any labels "
            "into integers, and nf.Relation.from_multilabel takes multi-hot rows."
        )
    return torch.from_numpy(int64_of(owner, name, array)).to(device)


def words_of(owner: str, name: str, value: Any) -> tuple[str, ...]:
    """Strings [n] from a list or an array: bytes are decoded, anything else is formatted."""
    if isinstance(value, np.ndarray) and value.ndim != 1:
        raise ValueError(f"{owner}: {name} must have shape [n], but came with shape {list(value.shape)}.")
    return tuple(word.decode(errors="replace") if isinstance(word, bytes) else str(word) for word in value)


def int64_of(owner: str, name: str, array: np.ndarray) -> NDArray[np.int64]:
    """Copy integers to int64; unsigned ones that would become negative are an error."""
    if array.dtype.kind == "u" and array.size and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{owner}: {name} must be integers below 2^63, but {array.max()} came; number the classes.")
    return array.astype(np.int64)


def in_words(array: np.ndarray) -> str:
    """Describe an array for an error message: "dates (datetime64[D]) of shape [3]"."""
    return f"{KINDS.get(array.dtype.kind, 'something else')} ({array.dtype}) of shape {list(array.shape)}"


def _array(owner: str, name: str, value: Any, wanted: str) -> np.ndarray:
    if isinstance(value, list | tuple) and value and all(isinstance(row, Tensor) for row in value):
        value = [row.detach().cpu().numpy() for row in value]
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError):  # rows of several lengths, or numbers of any length
        array = np.empty((), dtype=object)
    if array.dtype.kind == "O":
        raise TypeError(
            f"{owner}: {name} must be {wanted}, a tensor, an array or lists of one length, "
            f"but came as {type(value).__name__}."
        )
    return array


def tensor_of(array: np.ndarray) -> Tensor:
    """Convert numbers to a tensor; copy where torch cannot share the memory (other byte order, strides, read-only)."""
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    native = native.view(native.dtype.str)  # NumPy's unsigned long long is uint64 under a name that torch does not know
    whole = np.ascontiguousarray(native) if native.ndim else native
    return torch.from_numpy(whole if whole.flags.writeable else whole.copy())
