"""Indices to search: `SearchIndex`, which both storages share, and `Index`, held in memory and saved in one file.

Search is exact by default. `kind="ivf"` and `kind="hnsw"` use faiss and are approximate; `measured_recall` reports the
share of exact neighbors that they find.
"""

from __future__ import annotations

import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

from nearfar._utils.files import check_seal, read_arrays, write_arrays
from nearfar._utils.tensors import check_embeddings
from nearfar.evaluation import _faiss as approximate
from nearfar.evaluation._calibration import Calibration
from nearfar.evaluation._codes import search_codes
from nearfar.evaluation._disk_files import Names
from nearfar.evaluation._exact_search import Neighbors
from nearfar.evaluation._faiss import REMEDY, Kind, Plan
from nearfar.evaluation._fingerprint import check_same_network
from nearfar.evaluation._neighbors import neighbors
from nearfar.evaluation._ranking_keys import Metric
from nearfar.evaluation._vectors import Vectors

KINDS: tuple[Kind, ...] = ("exact", "ivf", "hnsw")
SEED = 1234  # seed of faiss's k-means for an index in memory, faiss's default


class SearchIndex(ABC):
    """An index for nearest-neighbor search: `Index` in memory and one file, or `DiskIndex` in a folder.

    Attributes:
        plan: its kind, similarity, size and settings.
        effort: cells that a query looks into, candidates of a graph, or candidates per result of codes.
        fingerprint: the network of the vectors, or None if it is not known.
        name: the name of each row, or None.
        y: the class of each row, or None.
        thumbnails: a small picture of each row, or None.
        preprocessing: how pictures enter the network, in plain values, or None.
        network: the file of the network, or None if the index holds none.
        calibration: how near a neighbor must be, or None.
    """

    plan: Plan
    effort: int
    fingerprint: str | None
    name: Sequence[str] | Names | None
    y: Any
    thumbnails: Any
    preprocessing: dict[str, Any] | None = None
    network: Path | None = None
    calibration: Calibration | None = None
    _class_names: dict[int, str]
    _parts: Sequence[Any] = ()
    _rows: np.ndarray | None = None

    def __len__(self) -> int:
        return self.plan.rows

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} vectors of width {self.width}, {self.similarity}, {self.kind})"

    @property
    def kind(self) -> Kind:
        """Its kind: exact, int8, bits, ivf, ivfpq or hnsw."""
        return self.plan.kind

    @property
    def similarity(self) -> Metric:
        """Its similarity: cosine, dot or euclidean."""
        return self.plan.similarity

    @property
    def width(self) -> int:
        """The width of its vectors."""
        return self.plan.width

    def search(self, queries: Tensor | Vectors, k: int = 10, *, effort: int | None = None) -> Neighbors:
        """The k nearest rows of each query [n, d]; see `neighbors`.

        Args:
            queries: [n, d], or `Vectors`, which must come from the same network if both are known.
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
        if self.kind == "exact":
            return self._search_exact(x, k)
        x = approximate.prepare(x, self.similarity)
        effort = effort or self.effort
        if self.plan.coded:
            found = search_codes(self.plan, self._parts[0], x, min(len(self), k * effort))
        else:
            many = min(len(self), k * max(1, self.plan.rerank))
            found = approximate.search_parts(self.plan, self._parts, x.numpy(), many, effort)
        if self._rows is not None:
            found = approximate.rank_again(self.plan, self._rows, x, found, k)
        # rounding may take a cosine beyond 1
        return Neighbors(found.scores.clamp_max(1), found.places) if self.similarity == "cosine" else found

    @abstractmethod
    def _search_exact(self, queries: Tensor, k: int) -> Neighbors:
        """Search without faiss."""

    def names(self, found: Neighbors) -> list[list[str]]:
        """The names of the neighbors found, or their row numbers if the vectors have no names."""
        name = self.name
        return [
            ["-" if place < 0 else str(place) if name is None else name[place] for place in row]
            for row in found.places.tolist()
        ]

    def knows(self, score: float) -> bool | None:
        """Whether a nearest neighbor with this score is above the calibrated threshold; None without a calibration."""
        return None if self.calibration is None else score > self.calibration.usable

    def label(self, row: int) -> str | None:
        """The name or number of a row's class; None if the vectors have none."""
        if self.y is None:
            return None
        return self._class_names.get(int(self.y[row]), str(int(self.y[row])))


class Index(SearchIndex):
    """An index in memory, exact or approximate, that can be saved in one file.

    Args:
        vectors: [m, d], or `Vectors`, whose names and labels are kept.
        similarity: "cosine", "dot" or "euclidean".
        kind: "exact" (nothing to build); "ivf" (inverted lists: rows are sorted into cells, a few of which are
            searched) or "hnsw" (a graph, for "cosine" and "euclidean" only), both by faiss, with the extra `faiss`.
        cells: number of cells of ivf; None for about 4 √m.
        probes: cells of ivf that are searched per query; None for a sixteenth of them.
        links: links per row of hnsw.
        effort: candidates of hnsw per query.
        calibration: how near a neighbor must be (`nearfar.calibrate`); see `knows`.

    >>> index = Index(Vectors([[1.0, 0.0], [0.0, 1.0]], name=["east", "north"]))
    >>> index.names(index.search(Vectors([[0.2, 0.9]]), k=1))
    [['north']]
    """

    def __init__(
        self,
        vectors: Tensor | Vectors,
        similarity: Metric = "cosine",
        kind: Literal["exact", "ivf", "hnsw"] = "exact",
        *,
        cells: int | None = None,
        probes: int | None = None,
        links: int = 32,
        effort: int = 64,
        calibration: Calibration | None = None,
    ) -> None:
        approximate.check_settings("Index", kind, similarity, KINDS)
        vectors = vectors if isinstance(vectors, Vectors) else Vectors(vectors)
        if not len(vectors):
            raise ValueError("Index: vectors must hold at least one row, but none came.")
        cells = max(1, min(len(vectors), cells or approximate.default_cells(len(vectors))))
        self._hold(vectors, similarity, kind, cells=cells, links=links, seed=SEED)
        if calibration is not None:
            calibration.check_index(similarity, vectors.fingerprint)
            self.calibration = calibration
        if kind == "exact":
            return
        built, x = approximate.new_index(self.plan), approximate.prepare(vectors.x, similarity).numpy()
        if kind == "ivf":
            built.train(x)
            built.nprobe = self.effort = max(1, min(cells, probes or math.ceil(cells / 16)))
        else:
            built.hnsw.efSearch = self.effort = effort
        built.add(x)
        self._parts = [built]

    def _hold(self, vectors: Vectors, similarity: Metric, kind: Kind, **settings: int) -> None:
        self.vectors, self.effort, (rows, width) = vectors, 0, vectors.x.shape
        self.plan = Plan(kind, similarity, rows, width, chunk=max(1, rows), **settings)
        self.fingerprint, self.name = vectors.fingerprint, vectors.name
        self.y, self.thumbnails, self._class_names = vectors.y, vectors.images, vectors.class_names()

    def _search_exact(self, queries: Tensor, k: int) -> Neighbors:
        return neighbors(queries, self.vectors.x, k=k, similarity=self.similarity)

    def measured_recall(self, queries: Tensor | Vectors, k: int = 10) -> float:
        """Measure the share of the k exact neighbors of each query that this index finds."""
        if self.kind == "exact":
            return 1.0
        x = queries.x if isinstance(queries, Vectors) else queries
        exact, found = self._search_exact(x, k).places, self.search(x, k).places
        return float(np.mean([len(set(a) & set(b)) / k for a, b in zip(exact.tolist(), found.tolist(), strict=True)]))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the index to one file, completely or not at all, and return its path."""
        about: dict[str, Any] = {"similarity": self.similarity, "kind": self.kind}
        if self.calibration is not None:
            about["calibration"] = self.calibration.to_dict()
        arrays = {"about": np.array(json.dumps(about)), **replace(self.vectors, images=None).to_arrays()}
        for part in self._parts:
            arrays["faiss"] = approximate.faiss().serialize_index(part)
        write_arrays(Path(path), arrays)
        return Path(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Index:
        """Read an index that `save` wrote; a damaged file is an error."""
        place = Path(path)
        arrays = read_arrays("Index", place)
        if not {"about", "x"} <= arrays.keys():
            raise ValueError(f"Index: {place} is not an index; make one with `nearfar index` or Index.save.")
        check_seal("Index", place, needed=True)
        vectors, index = Vectors.from_arrays(arrays, place), cls.__new__(cls)
        try:
            kind, similarity, calibration = _read_description(str(arrays["about"]))
            if not len(vectors) or ("faiss" in arrays) != (kind != "exact"):
                raise ValueError(f"a kind {kind!r} of {len(vectors)} vectors does not fit what it holds")
            index._hold(vectors, similarity, kind)
            index.calibration = calibration
            if kind != "exact":
                index._load_part(arrays["faiss"])
        except ValueError as error:
            raise ValueError(
                f"Index: {place} is damaged or was made by hand ({error}); make it again with `nearfar index`."
            ) from None
        return index

    def _load_part(self, blob: np.ndarray) -> None:
        if blob.dtype != np.uint8 or blob.ndim != 1:
            raise ValueError(f"its faiss part is {blob.dtype} of shape {list(blob.shape)}")
        faiss = approximate.faiss(REMEDY)
        part = approximate.load_part(self.plan, len(self), "its part", lambda: faiss.deserialize_index(blob))
        self._parts, self.effort = [part], part.nprobe if self.kind == "ivf" else part.hnsw.efSearch


def _read_description(text: str) -> tuple[Kind, Metric, Calibration | None]:
    """Read kind, similarity and calibration from the description in a file."""
    try:
        about = json.loads(text)
        kind, similarity = about["kind"], about["similarity"]
        approximate.check_settings("Index", kind, similarity, KINDS)
        calibration = Calibration.from_dict(about["calibration"]) if "calibration" in about else None
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError(f"it describes itself as {text[:60]!r}") from None
    return kind, similarity, calibration
