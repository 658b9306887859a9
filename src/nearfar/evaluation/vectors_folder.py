"""Vectors that do not fit in memory: a folder whose x is memory-mapped.

    all.vectors/manifest.json           rows, width, type, and the digest of each part of x
    all.vectors/x-<key>.bin             the rows, one part after the other
    all.vectors/fields-<key>.npz        y, name, classes, images, as in vectors.npz

The manifest is written last and atomically: until then the folder holds its former vectors. Opening a folder compares
sizes; `verify` reads all of x and compares digests.
"""

import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearfar._utils.files import atomic_write, read_arrays, read_text, write_arrays, write_text

__all__ = [
    "DTYPES",
    "MANIFEST",
    "as_stored",
    "check_target",
    "is_folder_of_vectors",
    "open_folder",
    "verify",
    "write_folder",
]

MANIFEST = "manifest.json"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bf16": torch.bfloat16}
"""The types that vectors can be stored in."""
KIND = "nearfar vectors"
_ROWS_OR_FIELDS = r"x-[0-9a-f]{16}\.bin|fields-[0-9a-f]{16}\.npz"
OURS = re.compile(rf"{_ROWS_OR_FIELDS}|\.({_ROWS_OR_FIELDS}|manifest\.json)\.\d+-[0-9a-f]{{8}}\.part")
"""The files beside the manifest, and the temporary files of a process that was killed while writing."""


def is_folder_of_vectors(folder: Path) -> bool:
    """Whether a folder has the manifest of vectors."""
    return (folder / MANIFEST).is_file()


def check_target(folder: Path) -> None:
    """Raise an error if a path holds something other than vectors."""
    if folder.is_dir() and (
        is_folder_of_vectors(folder) or all(OURS.fullmatch(path.name) for path in folder.iterdir())
    ):
        return
    if folder.exists() or folder.is_symlink():
        raise FileExistsError(f"{folder} is there and holds no vectors, so it is not replaced; name another folder.")


def write_folder(
    folder: Path, chunks: Iterable[np.ndarray], fields: Mapping[str, np.ndarray], dtype: str = "float32"
) -> None:
    """Write chunks of rows [t, d] and the other fields of `Vectors`, in the memory of one chunk.

    Args:
        folder: the folder; vectors that it holds are replaced.
        chunks: float32, finite.
        fields: arrays other than x, named as in `Vectors.to_arrays`.
        dtype: "float32", "float16" or "bf16".
    """
    check_target(folder)
    key = secrets.token_hex(8)
    parts: list[tuple[int, str]] = []
    width = 0
    write_arrays(folder / f"fields-{key}.npz", fields)
    with atomic_write(folder / f"x-{key}.bin") as temporary, temporary.open("xb") as stream:
        for chunk in chunks:
            width = chunk.shape[1]
            stored = as_stored(torch.from_numpy(chunk), dtype)
            stream.write(stored.data)
            parts.append((len(chunk), _digest(stored)))
    about: dict[str, Any] = {
        KIND: 1,
        "key": key,
        "rows": sum(rows for rows, _ in parts),
        "width": width,
        "dtype": dtype,
    }
    about["parts"] = [{"rows": rows, "digest": digest} for rows, digest in parts]
    write_text(folder / MANIFEST, json.dumps(about, indent=1) + "\n")
    for path in folder.iterdir():
        if OURS.fullmatch(path.name) and key not in path.name:
            path.unlink(missing_ok=True)


def as_stored(x: Tensor, dtype: str) -> np.ndarray:
    """Rows in the form in which they are written: bf16, which NumPy lacks, as its bits in int16."""
    y = x.to(DTYPES[dtype])
    if not bool(torch.isfinite(y).all()):
        raise ValueError(f"embed: some vectors are too long for {dtype}; store them as float32 or bf16.")
    return (y.view(torch.int16) if dtype == "bf16" else y).contiguous().numpy()


def _digest(rows: np.ndarray) -> str:
    return hashlib.blake2b(np.ascontiguousarray(rows).data, digest_size=16).hexdigest()


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        about: dict[str, Any] = json.loads(read_text("Vectors", folder / MANIFEST, most=1 << 28))
        if about[KIND] != 1 or not re.fullmatch("[0-9a-f]{16}", about["key"]) or about["dtype"] not in DTYPES:
            raise ValueError
        if min(int(about["rows"]), int(about["width"])) < 0:
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"Vectors: {folder / MANIFEST} is damaged, or no manifest of vectors; embed again.") from None
    return about


def open_folder(folder: Path) -> dict[str, Any]:
    """The fields of the `Vectors` in a folder; x is memory-mapped.

    Raises:
        ValueError: a file is missing, damaged, or of another size than the manifest says.
    """
    about = _manifest(folder)
    path, kind = folder / f"x-{about['key']}.bin", about["dtype"]
    shape = (int(about["rows"]), int(about["width"]))
    wanted = shape[0] * shape[1] * DTYPES[kind].itemsize
    if not path.is_file() or path.stat().st_size != wanted:
        raise ValueError(f"Vectors: {path} must have {wanted:,} bytes, but does not; embed again.")
    stored = {"float32": np.float32, "float16": np.float16, "bf16": np.int16}[kind]
    # copy on write: torch needs writable memory, and nothing written reaches the file
    mapped = np.memmap(path, stored, "c", shape=shape) if wanted else np.zeros(shape, stored)
    x = torch.from_numpy(mapped)
    x = x.view(torch.bfloat16) if kind == "bf16" else x
    x.mapped = True  # type: ignore[attr-defined]  # checked when written, so that loading need not read all rows
    return {**read_arrays("Vectors", folder / f"fields-{about['key']}.npz"), "x": x}


def verify(folder: Path) -> None:
    """Read all rows, and compare the digest of each part with the manifest.

    Raises:
        ValueError: a part is damaged.
    """
    about, x = _manifest(folder), open_folder(folder)["x"]
    raw, start = (x.view(torch.int16) if about["dtype"] == "bf16" else x).numpy(), 0
    for number, part in enumerate(about["parts"]):
        if _digest(raw[start : start + part["rows"]]) != part["digest"]:
            raise ValueError(f"Vectors: part {number} of {folder} is damaged; embed again.")
        start += part["rows"]
