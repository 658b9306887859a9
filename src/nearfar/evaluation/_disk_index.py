"""`DiskIndex`: an index in a folder, memory-mapped, for vectors that need not fit into memory."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearfar.evaluation._calibration import Calibration
from nearfar.evaluation._codes import code_width
from nearfar.evaluation._disk_files import ABOUT, Names, digest_of_file, read_record
from nearfar.evaluation._exact_search import TILE, Neighbors, strips
from nearfar.evaluation._faiss import Kind, Plan, check_settings, open_parts, prepare
from nearfar.evaluation._fingerprint import check_fingerprint
from nearfar.evaluation._index import Index, SearchIndex
from nearfar.evaluation._vectors import name_classes

DISK_KINDS: tuple[Kind, ...] = ("exact", "int8", "bits", "ivf", "ivfpq", "hnsw")
SMALL = 1 << 26
"""Files up to this size are compared with their digest on every opening; of larger ones only the size is checked."""
FEW, WIDE = 64, 1 << 30
"""Up to 64 queries are compared with 65,536 rows at once: three times as fast for a single query."""
ROWS, LABELS, THUMBNAILS, NAMES, ENDS = "vectors.npy", "labels.npy", "thumbnails.npy", "names.txt", "names.npy"
CODES = "codes.npy"
NETWORKS = ("network.safetensors", "network.onnx")


class DiskIndex(SearchIndex):
    """An index in a folder, opened for searching: its files are memory-mapped, so that opening costs next to nothing.

    `build_index` makes one. Searching from several threads at once is safe.

    Args:
        folder: the folder of the index.
        verify: compare every file with its digest; otherwise only those up to 64 MiB, and of larger ones the size.

    Attributes:
        recall: the measurement against exact search at build time: k, queries, recall, and [effort, recall] for
            each effort that was tried; it determined the effort of the index.
    """

    def __init__(self, folder: str | os.PathLike[str], *, verify: bool = False) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise FileNotFoundError(f"Index: there is no folder {folder}; make an index with `nearfar index`.")
        record = read_record(self.folder / ABOUT)
        if record is None:
            raise ValueError(
                f"Index: the folder {folder} holds no finished index; make one with `nearfar index`, or run the "
                "command that was interrupted again."
            )
        try:
            self._read(record, verify)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            reason = str(error) if isinstance(error, ValueError | OSError) else f"{ABOUT} is not an index record"
            raise ValueError(f"Index: {folder} is damaged ({reason}); make it again with `nearfar index`.") from None

    @classmethod
    def from_record(cls, folder: Path, record: dict[str, Any]) -> DiskIndex:
        """Open the files of a folder whose record is not written yet."""
        index = cls.__new__(cls)
        index.folder = folder
        index._read(record, verify=False)
        return index

    def _read(self, record: dict[str, Any], verify: bool) -> None:
        self.plan = plan = Plan(**record["plan"])
        check_settings("Index", plan.kind, plan.similarity, DISK_KINDS)
        files = record["files"]
        _check_files(self.folder, files, verify)
        fingerprint, classes = record["fingerprint"], record["classes"]
        self.fingerprint = None if fingerprint is None else check_fingerprint("Index", str(fingerprint))
        self.preprocessing, self.recall, self.effort = record["preprocessing"], record["recall"], int(record["effort"])
        if record.get("calibration") is not None:
            self.calibration = Calibration.from_dict(record["calibration"])
        self.classes = None if classes is None else tuple(map(str, classes))
        self.network = next((self.folder / name for name in NETWORKS if name in files), None)
        self.name = Names(self.folder / NAMES, self.folder / ENDS) if NAMES in files else None
        self.y, self.thumbnails, self._rows = (
            _map(self.folder / name, plan.rows) if name in files else None for name in (LABELS, THUMBNAILS, ROWS)
        )
        self._class_names = {}
        if self.y is not None and self.classes is not None:
            self._class_names = name_classes(np.unique(self.y).tolist(), self.classes)
        if self.name is not None and len(self.name) != plan.rows:
            raise ValueError(f"{len(self.name):,} names for {plan.rows:,} rows")
        if (plan.kind == "exact" or plan.rerank > 0) != (self._rows is not None):
            raise ValueError(f"its files do not fit the kind {plan.kind!r}")
        if plan.coded:
            self._parts = [_map(self.folder / CODES, plan.rows)]
            if self._parts[0].shape[1] != code_width(plan):
                raise ValueError(
                    f"{CODES} has rows of {self._parts[0].shape[1]} bytes, and {code_width(plan)} belong there"
                )
        elif plan.by_faiss:
            self._parts = open_parts(plan, self.folder)

    def _search_exact(self, queries: Tensor, k: int) -> Neighbors:
        """Search the mapped rows, without the pass of `neighbors` over all of them that checks for NaN."""
        x, rows = prepare(queries, self.similarity), torch.from_numpy(self._rows)
        tile = TILE if len(x) > FEW else WIDE
        found = list(strips(x, rows, k=k, similarity="dot" if self.plan.inner else "euclidean", tile=tile))
        scores = torch.cat([strip.scores for _, strip in found])
        scores = scores.clamp_max(1) if self.similarity == "cosine" else scores
        return Neighbors(scores, torch.cat([strip.places for _, strip in found]))


def open_index(path: str | os.PathLike[str]) -> Index | DiskIndex:
    """Open an index: the file that `Index.save` wrote, or the folder of a `DiskIndex`."""
    return DiskIndex(path) if Path(path).is_dir() else Index.load(path)


def _map(path: Path, rows: int) -> np.ndarray:
    # copy on write: torch refuses read-only memory, and nothing is written
    array: np.ndarray = np.load(path, mmap_mode="c", allow_pickle=False)
    if len(array) != rows:
        raise ValueError(f"{path.name} holds {len(array):,} rows of {rows:,}")
    return array


def _check_files(folder: Path, files: dict[str, dict[str, Any]], verify: bool) -> None:
    """Compare files with the sizes and digests that were recorded when they were written."""
    for name, noted in files.items():
        if not re.fullmatch(r"[a-z0-9-]+\.[a-z]+", name):
            raise ValueError(f"it lists a file {name[:40]!r}")
        path = folder / name
        size = path.stat().st_size if path.is_file() else 0
        if size != noted["bytes"]:
            raise ValueError(f"{name} has {size:,} bytes, but {noted['bytes']:,} were written")
        if (verify or size <= SMALL) and digest_of_file(path) != noted["digest"]:
            raise ValueError(f"{name} has changed since it was written")
