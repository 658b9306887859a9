"""`Index`: a set of vectors to search, saved in one file.

Exact by default. `kind="ivf"` and `kind="hnsw"` use faiss and are approximate; `measured_recall` says how much is
lost.
"""

from __future__ import annotations

import functools
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from nearfar._utils.checks import check_choice
from nearfar._utils.files import check_seal, read_arrays, write_arrays
from nearfar._utils.tensors import check_embeddings
from nearfar.evaluation.exact_search import Neighbors
from nearfar.evaluation.faiss_backend import faiss
from nearfar.evaluation.fingerprint import check_same_network
from nearfar.evaluation.neighbors import neighbors
from nearfar.evaluation.ranking_keys import METRICS, Metric
from nearfar.evaluation.vectors import Vectors
from nearfar.similarity import unit

__all__ = ["Index", "Kind"]

Kind = Literal["exact", "ivf", "hnsw"]
KINDS: tuple[Kind, ...] = ("exact", "ivf", "hnsw")


class Index:
    """An index for nearest-neighbor search, exact or approximate.

    Args:
        vectors: [m, d], or `Vectors`, whose names and labels are kept.
        similarity: "cosine", "dot" or "euclidean".
        kind: "exact" (nothing to build); "ivf" (inverted lists: rows are sorted into cells, a few of which are
            searched) or "hnsw" (a graph, for "cosine" and "euclidean" only), both by faiss, with the extra `faiss`.
        cells: of ivf: how many cells; None for about 4 √m.
        probes: of ivf: how many cells are searched per query; None for a sixteenth of them.
        links: of hnsw: links per row.
        effort: of hnsw: candidates kept per query.

    >>> index = Index(Vectors([[1.0, 0.0], [0.0, 1.0]], name=["east", "north"]))
    >>> index.names(index.search(torch.tensor([[0.2, 0.9]]), k=1))
    [['north']]
    """

    def __init__(
        self,
        vectors: Tensor | Vectors,
        similarity: Metric = "cosine",
        kind: Kind = "exact",
        *,
        cells: int | None = None,
        probes: int | None = None,
        links: int = 32,
        effort: int = 64,
    ) -> None:
        check_choice("Index", "similarity", similarity, METRICS)
        check_choice("Index", "kind", kind, KINDS)
        if kind == "hnsw" and similarity == "dot":
            raise ValueError(
                "Index: kind='hnsw' needs similarity='cosine' or 'euclidean', since its graph asks for a distance."
            )
        self.vectors = vectors if isinstance(vectors, Vectors) else Vectors(vectors)
        if not len(self.vectors):
            raise ValueError("Index: vectors must hold at least one row, but none came.")
        self.similarity: Metric = similarity
        self.kind: Kind = kind
        self._faiss: Any = None
        if kind == "ivf":
            self._faiss = self._ivf(cells, probes)
        elif kind == "hnsw":
            self._faiss = self._hnsw(links, effort)

    def __len__(self) -> int:
        return len(self.vectors)

    @property
    def inner(self) -> bool:
        """Whether rows are compared by inner products (for the cosine, of unit rows)."""
        return self.similarity != "euclidean"

    @property
    def width(self) -> int:
        """The width of its vectors."""
        return self.vectors.x.shape[1]

    @property
    def fingerprint(self) -> str | None:
        """The network of the vectors, or None if it is not known."""
        return self.vectors.fingerprint

    def label(self, row: int) -> str | None:
        """The name or number of a row's class; None if the vectors have none."""
        if self.vectors.y is None:
            return None
        number = int(self.vectors.y[row])
        return self._class_names.get(number, str(number))

    @functools.cached_property
    def _class_names(self) -> dict[int, str]:
        return self.vectors.class_names()

    def __repr__(self) -> str:
        return f"Index({len(self)} vectors of width {self.vectors.x.shape[1]}, {self.similarity}, {self.kind})"

    def search(self, queries: Tensor | Vectors, k: int = 10) -> Neighbors:
        """The k nearest rows of each query [n, d]; see `neighbors`.

        An approximate index may find fewer: missing entries have place -1 and score -inf.
        """
        x = queries.x if isinstance(queries, Vectors) else queries
        if isinstance(queries, Vectors):
            sides = ("the index", self.vectors.fingerprint), ("the queries", queries.fingerprint)
            check_same_network("Index", *sides)
        check_embeddings("Index", "queries", x)
        if x.shape[1] != self.vectors.x.shape[1]:
            raise ValueError(
                f"Index: queries must be {self.vectors.x.shape[1]} wide like the vectors, but are {x.shape[1]} wide."
            )
        if not isinstance(k, int) or not 1 <= k <= len(self):
            raise ValueError(f"Index: k must lie in 1..{len(self)}, the number of vectors, but came as {k!r}.")
        if self._faiss is None:
            return neighbors(x, self.vectors.x, k=k, similarity=self.similarity)
        found, listed = self._faiss.search(self._ready(x), k)
        if listed.max(initial=-1) >= len(self):
            raise ValueError(f"Index: faiss found row {listed.max()} of {len(self)}; make the index again.")
        scores, places = torch.from_numpy(found), torch.from_numpy(listed)
        if self.similarity == "euclidean":
            scores = -scores.clamp_min(0).sqrt()
        return Neighbors(scores.masked_fill(places < 0, -torch.inf), places)

    def names(self, found: Neighbors) -> list[list[str]]:
        """The names of the neighbors found, or their row numbers if the vectors have no names."""
        name = self.vectors.name
        return [
            ["-" if place < 0 else str(place) if name is None else name[place] for place in row]
            for row in found.places.tolist()
        ]

    def measured_recall(self, queries: Tensor | Vectors, k: int = 10) -> float:
        """Measure the share of the k exact neighbors of each query that this index finds."""
        if self._faiss is None:
            return 1.0
        x = queries.x if isinstance(queries, Vectors) else queries
        exact = neighbors(x, self.vectors.x, k=k, similarity=self.similarity).places
        found = self.search(x, k).places
        return float(np.mean([len(set(a) & set(b)) / k for a, b in zip(exact.tolist(), found.tolist(), strict=True)]))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the index to one file, completely or not at all, and return its path."""
        about = json.dumps({"similarity": self.similarity, "kind": self.kind})
        arrays = {"about": np.array(about), **replace(self.vectors, images=None).to_arrays()}
        if self._faiss is not None:
            arrays["faiss"] = faiss("").serialize_index(self._faiss)
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
        index = cls.__new__(cls)
        index.vectors = Vectors.from_arrays(arrays, place)
        index.similarity, index.kind = _described(str(arrays["about"]), place)
        index._faiss = None
        if not len(index.vectors) or ("faiss" in arrays) != (index.kind != "exact"):
            raise _wrong(place, f"a kind {index.kind!r} of {len(index.vectors)} vectors does not fit what it holds")
        if index.kind != "exact":
            index._faiss = _restored(arrays["faiss"], index, place)
        return index

    def _ready(self, x: Tensor) -> np.ndarray:
        x = x.detach().float().cpu()
        return np.ascontiguousarray((unit(x) if self.similarity == "cosine" else x).numpy())

    def _ivf(self, cells: int | None, probes: int | None) -> Any:
        module = faiss(_REBUILD)
        rows, width = self.vectors.x.shape
        # faiss wants 39 rows a cell to place its centers well, and says so on the error stream
        cells = max(1, min(rows, cells or min(round(4 * math.sqrt(rows)), rows // 39)))
        coarse = module.IndexFlatIP(width) if self.inner else module.IndexFlatL2(width)
        metric = module.METRIC_INNER_PRODUCT if self.inner else module.METRIC_L2
        index = module.IndexIVFFlat(coarse, width, cells, metric)
        index.cp.min_points_per_centroid = 1
        index.cp.max_points_per_centroid = 64  # a quarter of faiss's own: built four times sooner, as good to search
        x = self._ready(self.vectors.x)
        index.train(x)
        index.add(x)
        index.nprobe = max(1, min(cells, probes or math.ceil(cells / 16)))
        return index

    def _hnsw(self, links: int, effort: int) -> Any:
        module = faiss(_REBUILD)
        metric = module.METRIC_INNER_PRODUCT if self.inner else module.METRIC_L2
        index = module.IndexHNSWFlat(self.vectors.x.shape[1], links, metric)
        index.hnsw.efConstruction = 200
        index.hnsw.efSearch = effort
        index.add(self._ready(self.vectors.x))
        return index


_REBUILD = 'choose kind="exact"'


def _wrong(place: Path, why: str) -> ValueError:
    return ValueError(f"Index: {place} is damaged or was made by hand ({why}); make it again with `nearfar index`.")


def _described(text: str, place: Path) -> tuple[Metric, Kind]:
    """Read similarity and kind from the description in a file."""
    try:
        about = json.loads(text)
        similarity, kind = about["similarity"], about["kind"]
        check_choice("Index", "similarity", similarity, METRICS)
        check_choice("Index", "kind", kind, KINDS)
    except (ValueError, TypeError, KeyError, RecursionError):
        raise _wrong(place, f"it describes itself as {text[:60]!r}") from None
    return similarity, kind


def _restored(blob: np.ndarray, index: Index, place: Path) -> Any:
    """Read faiss's part of a file, and check that its rows, dimension and metric are those of the vectors."""
    module = faiss(_REBUILD)
    if blob.dtype != np.uint8 or blob.ndim != 1:
        raise _wrong(place, f"its faiss part is {blob.dtype} of shape {list(blob.shape)}")
    try:
        found = module.deserialize_index(blob)
    except Exception as error:  # faiss raises errors of its own, and MemoryError for an impossible size
        raise _wrong(place, f"faiss cannot read its part: {type(error).__name__}") from None
    rows, width = index.vectors.x.shape
    kind = module.IndexIVFFlat if index.kind == "ivf" else module.IndexHNSWFlat
    metric = module.METRIC_INNER_PRODUCT if index.inner else module.METRIC_L2
    if type(found) is not kind or (found.ntotal, found.d, found.metric_type) != (rows, width, metric):
        held = f"{type(found).__name__} of {found.ntotal:,} rows of width {found.d}, measure {found.metric_type}"
        raise _wrong(place, f"its faiss part is {held}, for {rows:,} vectors of width {width}, measure {metric}")
    return found
