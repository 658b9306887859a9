"""`DiskIndex`: an index in a folder, memory-mapped, for vectors that need not fit into memory."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearfar._utils.checks import check_choice
from nearfar._utils.tensors import check_embeddings
from nearfar.evaluation.disk_files import ABOUT, Names, digest_of_file, read_record
from nearfar.evaluation.exact_search import TILE, Neighbors, strips
from nearfar.evaluation.faiss_engine import DiskKind, Plan, ask, opened, ready
from nearfar.evaluation.fingerprint import check_same_network, checked
from nearfar.evaluation.index import Index
from nearfar.evaluation.ranking_keys import METRICS, Metric
from nearfar.evaluation.vectors import Vectors

__all__ = ["DISK_KINDS", "DiskIndex", "files_of", "open_index"]

DISK_KINDS: tuple[DiskKind, ...] = ("exact", "ivf", "ivfpq", "hnsw")
SMALL = 1 << 26
"""Bytes up to which a file is compared with its digest whenever it is opened; a larger one with its size."""
FEW, WIDE = 64, 1 << 30
"""So many queries are compared with more rows at once than others: 65,536, three times as fast for a single one."""
ROWS, LABELS, THUMBNAILS, NAMES, ENDS = "vectors.npy", "labels.npy", "thumbnails.npy", "names.txt", "names.npy"
NETWORKS = ("network.safetensors", "network.onnx")


class DiskIndex:
    """An index in a folder, opened for searching: files are memory-mapped, so that opening costs next to nothing.

    `build_index` makes one. Searching from several threads at once is safe.

    Args:
        folder: where it lies.
        verify: compare every file with its digest; otherwise only those up to 64 MiB, and of larger ones the size.

    Attributes:
        plan: its kind, similarity, size and settings.
        effort: cells that a query looks into, or candidates of a graph; chosen when the index was built.
        recall: what was measured against exact search when it was built: k, queries, recall, and [effort, recall] for
            each effort that was tried.
        fingerprint: the network of the vectors (`nearfar.evaluation.fingerprint`), or None if it is not known.
        preprocessing: how pictures enter the network, in plain values, or None.
        network: the file of the network, or None if the index holds none.
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
            reason = str(error) if isinstance(error, ValueError | OSError) else f"{ABOUT} is not one of ours"
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
        check_choice("Index", "kind", plan.kind, DISK_KINDS)
        check_choice("Index", "similarity", plan.similarity, METRICS)
        _check_files(self.folder, record["files"], verify)
        mark = record["fingerprint"]
        self.fingerprint = None if mark is None else checked("Index", str(mark))
        self.preprocessing: dict[str, Any] | None = record["preprocessing"]
        self.recall: dict[str, Any] = record["recall"]
        self.effort = int(record["effort"])
        self.classes: tuple[str, ...] | None = None if record["classes"] is None else tuple(map(str, record["classes"]))
        self.network = next((self.folder / name for name in NETWORKS if name in record["files"]), None)
        held = record["files"].keys()
        self.name = Names(self.folder / NAMES, self.folder / ENDS) if NAMES in held else None
        self.y, self.thumbnails, self._rows = (
            _mapped(self.folder / name, plan.rows) if name in held else None for name in (LABELS, THUMBNAILS, ROWS)
        )
        self._class_names: dict[int, str] = {}
        if self.y is not None and self.classes is not None:
            there: list[int] = np.unique(self.y).tolist()
            numbers = there if len(there) == len(self.classes) else list(range(len(self.classes)))  # as in `Vectors`
            self._class_names = dict(zip(numbers, self.classes, strict=True))
        if self.name is not None and len(self.name) != plan.rows:
            raise ValueError(f"{len(self.name):,} names for {plan.rows:,} rows")
        if (plan.kind == "exact" or plan.rerank > 0) != (self._rows is not None):
            raise ValueError(f"a kind {plan.kind!r} does not fit what it holds")
        self._indices = [] if plan.kind == "exact" else opened(plan, self.folder)

    def __len__(self) -> int:
        return self.plan.rows

    def __repr__(self) -> str:
        plan = self.plan
        return f"DiskIndex({plan.rows} vectors of width {plan.width}, {plan.similarity}, {plan.kind})"

    @property
    def kind(self) -> DiskKind:
        """Its kind: exact, ivf, ivfpq or hnsw."""
        return self.plan.kind

    @property
    def similarity(self) -> str:
        """Its similarity: cosine, dot or euclidean."""
        return self.plan.similarity

    @property
    def width(self) -> int:
        """The width of its vectors."""
        return self.plan.width

    def search(self, queries: Tensor | Vectors, k: int = 10, *, effort: int | None = None) -> Neighbors:
        """The k nearest rows of each query [n, d].

        Args:
            queries: [n, d], or `Vectors`, which must be of the same network where both are known.
            k: how many. An approximate index may find fewer: missing entries have place -1 and score -inf.
            effort: another effort than that of the index.
        """
        x = queries.x if isinstance(queries, Vectors) else queries
        if isinstance(queries, Vectors):
            sides = ("the index", self.fingerprint), ("the queries", queries.fingerprint)
            check_same_network("Index", *sides)
        check_embeddings("Index", "queries", x)
        if x.shape[1] != self.width:
            raise ValueError(f"Index: queries must be {self.width} wide like the vectors, but are {x.shape[1]} wide.")
        if not isinstance(k, int) or not 1 <= k <= len(self):
            raise ValueError(f"Index: k must lie in 1..{len(self)}, the number of vectors, but came as {k!r}.")
        asked = ready(x, self.plan.similarity)
        if self.plan.kind == "exact" and self._rows is not None:
            rows, metric = torch.from_numpy(self._rows), self.plan.similarity
            return self._bounded(_swept(asked, rows, k, "dot" if self.plan.inner else metric))
        many = min(len(self), k * max(1, self.plan.rerank))
        found = ask(self.plan, self._indices, asked.numpy(), many, effort or self.effort)
        if int(found.places.max() if found.places.numel() else -1) >= len(self):
            raise ValueError(f"Index: faiss found a row beyond {len(self)}; make the index again.")
        return self._bounded(found if self._rows is None else self._ranked_again(asked, found, k, self._rows))

    def names(self, found: Neighbors) -> list[list[str]]:
        """The names of the neighbors found, or their row numbers if the vectors have no names."""
        name = self.name
        return [
            ["-" if place < 0 else str(place) if name is None else name[place] for place in row]
            for row in found.places.tolist()
        ]

    def label(self, row: int) -> str | None:
        """The name or number of a row's class; None if the vectors have none."""
        if self.y is None:
            return None
        return self._class_names.get(int(self.y[row]), str(int(self.y[row])))

    def _bounded(self, found: Neighbors) -> Neighbors:
        """A cosine is at most 1, however it was rounded."""
        if self.similarity != "cosine":
            return found
        return Neighbors(found.scores.clamp_max(1), found.places)

    def _ranked_again(self, queries: Tensor, found: Neighbors, k: int, rows: np.ndarray) -> Neighbors:
        """Order candidates by the scores of the vectors themselves, which codes only approximate."""
        scores, places = torch.empty(len(queries), k), torch.empty(len(queries), k, dtype=torch.long)
        for row, listed in enumerate(found.places):
            near = listed.sort().values  # of equal scores the first row wins
            x = torch.from_numpy(rows[near.clamp_min(0).numpy()]).float()
            exact = x @ queries[row] if self.plan.inner else -(x - queries[row]).norm(dim=1)
            order = exact.masked_fill(near < 0, -torch.inf).sort(descending=True, stable=True).indices[:k]
            scores[row], places[row] = exact[order].masked_fill(near[order] < 0, -torch.inf), near[order]
        return Neighbors(scores, places)


def open_index(path: str | os.PathLike[str]) -> Index | DiskIndex:
    """Open an index: the file that `Index.save` wrote, or the folder of a `DiskIndex`."""
    return DiskIndex(path) if Path(path).is_dir() else Index.load(path)


def _swept(queries: Tensor, rows: Tensor, k: int, similarity: Metric) -> Neighbors:
    """Exact neighbors; `neighbors` would read all rows once more to see whether they are finite."""
    tile = TILE if len(queries) > FEW else WIDE
    found = [strip for _, strip in strips(queries, rows, k=k, similarity=similarity, tile=tile)]
    return Neighbors(torch.cat([strip.scores for strip in found]), torch.cat([strip.places for strip in found]))


def _mapped(path: Path, rows: int) -> np.ndarray:
    # copy on write: torch refuses to wrap what cannot be written, and nothing is
    array: np.ndarray = np.load(path, mmap_mode="c", allow_pickle=False)
    if len(array) != rows:
        raise ValueError(f"{path.name} holds {len(array):,} rows of {rows:,}")
    return array


def _check_files(folder: Path, files: dict[str, dict[str, Any]], verify: bool) -> None:
    """Compare files with the sizes and digests that were noted when they were written."""
    for name, noted in files.items():
        if not re.fullmatch(r"[a-z0-9-]+\.[a-z]+", name):
            raise ValueError(f"it lists a file {name[:40]!r}")
        path = folder / name
        size = path.stat().st_size if path.is_file() else 0
        if size != noted["bytes"]:
            raise ValueError(f"{name} has {size:,} bytes, and {noted['bytes']:,} were written")
        if (verify or size <= SMALL) and digest_of_file(path) != noted["digest"]:
            raise ValueError(f"the bytes of {name} are not those that were written")


def files_of(folder: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Sizes and digests of files, as `about.json` keeps them."""
    return {name: {"bytes": (folder / name).stat().st_size, "digest": digest_of_file(folder / name)} for name in names}
