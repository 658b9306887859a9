"""Small tar shards in WebDataset's form, written by the webdataset package itself."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import webdataset
from PIL import Image


def png(value: int, side: int = 8) -> bytes:
    """A red picture."""
    stream = io.BytesIO()
    Image.new("RGB", (side, side), (value, 0, 0)).save(stream, "PNG")
    return stream.getvalue()


def write(path: Path, samples: Iterable[Mapping[str, Any]]) -> Path:
    """Write a shard of samples: mappings from suffixes to bytes, text or trees, with their key."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with webdataset.TarWriter(str(path), encoder=False) as sink:
        for sample in samples:
            sink.write({name: _bytes(value) if name != "__key__" else value for name, value in sample.items()})
    return path


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def birds(folder: Path, *, shards: int = 3, each: int = 8, classes: int = 6, name: str = "s-{:03d}.tar") -> str:
    """Shards whose sample i shows the value i and is of class i % classes; returns the pattern of their names."""
    for shard in range(shards):
        numbers = range(shard * each, (shard + 1) * each)
        write(
            folder / name.format(shard), ({"__key__": f"{i:06d}", "png": png(i), "cls": i % classes} for i in numbers)
        )
    return str(folder / f"s-{{000..{shards - 1:03d}}}.tar")
