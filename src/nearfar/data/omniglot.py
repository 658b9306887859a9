"""Omniglot from one `.npz` file: 964 characters for training, 659 of other alphabets for the test."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from nearfar._utils.files import read_arrays
from nearfar.data.samples import DataSet, Tensors, part

__all__ = ["omniglot"]

ARRAYS = ("images", "labels", "class_names", "background")


def omniglot(path: Path) -> DataSet:
    """Read `omniglot_28.npz` (or the folder that holds it): uint8 pictures [n, 28, 28], 255 is ink.

    The file holds `images` (bits packed by `np.packbits`, a row a drawing), `labels`, `class_names` and `background`,
    which marks the training classes.
    """
    file = path / "omniglot_28.npz" if path.is_dir() else path
    arrays = read_arrays("omniglot", file)
    absent = [name for name in ARRAYS if name not in arrays]
    if absent:
        raise ValueError(f"omniglot: {file} lacks {', '.join(absent)}; it must hold {', '.join(ARRAYS)}.")
    bits = np.unpackbits(arrays["images"], axis=1)
    side = int(np.sqrt(bits.shape[1]))  # the last byte of a row may be padded
    images = bits[:, : side * side].reshape(-1, side, side) * np.uint8(255)
    classes = [str(name) for name in arrays["class_names"]]
    whole = Tensors(images, arrays["labels"].astype(np.int64), None, classes)
    background = arrays["background"].astype(np.bool_)[whole.labels]
    return DataSet("omniglot", part(whole, np.flatnonzero(background)), part(whole, np.flatnonzero(~background)))
