"""`Index`: vectors that are searched again and again, kept in one file.

Exact by default. `kind="ivf"` and `kind="hnsw"` go through faiss and are approximate; `measured_recall` says how
much is lost.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from nearfar._checks import check_choice, check_embeddings
from nearfar._files import read_arrays, write_arrays
from nearfar.evaluation.faiss_backend import faiss
from nearfar.evaluation.neighbours import Neighbours, neighbours
from nearfar.evaluation.spaces import METRICS, Metric
from nearfar.evaluation.vectors import Vectors
from nearfar.similarity import unit

Kind = Literal["exact", "ivf", "hnsw"]
KINDS: tuple[Kind, ...] = ("exact", "ivf", "hnsw")


class Index:
    """Vectors to search in.

    Args:
        vectors: [m, d], or `Vectors`, whose names and labels are carried along.
        similarity: "cosine", "dot" or "euclidean".
        kind: "exact" (nothing to build); "ivf" (rows sorted into cells, a few of which are searched) or "hnsw" (a
            graph, for "cosine" and "euclidean" only), both by faiss, with the extra `faiss`.
        cells: of ivf: how many cells; None for about 4 √m.
        probes: of ivf: how many cells a query looks at; None for a sixteenth of them.
        links: of hnsw: links of a row.
        effort: of hnsw: candidates a query keeps.

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

    def __repr__(self) -> str:
        return f"Index({len(self)} vectors of width {self.vectors.x.shape[1]}, {self.similarity}, {self.kind})"

    def search(self, queries: Tensor | Vectors, k: int = 10) -> Neighbours:
        """The k nearest rows of each query [n, d]; see `neighbours`.

        An approximate index may come back with fewer: then places are -1 and scores -inf.
        """
        x = queries.x if isinstance(queries, Vectors) else queries
        check_embeddings("Index", "queries", x)
        if x.shape[1] != self.vectors.x.shape[1]:
            raise ValueError(
                f"Index: queries must be {self.vectors.x.shape[1]} wide like the vectors, but are {x.shape[1]} wide."
            )
        if not isinstance(k, int) or not 1 <= k <= len(self):
            raise ValueError(f"Index: k must lie in 1..{len(self)}, the number of vectors, but came as {k!r}.")
        if self._faiss is None:
            return neighbours(x, self.vectors.x, k=k, similarity=self.similarity)
        found, listed = self._faiss.search(self._ready(x), k)
        scores, places = torch.from_numpy(found), torch.from_numpy(listed)
        if self.similarity == "euclidean":
            scores = -scores.clamp_min(0).sqrt()
        return Neighbours(scores.masked_fill(places < 0, -torch.inf), places)

    def names(self, found: Neighbours) -> list[list[str]]:
        """The names of what was found, or the row numbers where the vectors have no names."""
        name = self.vectors.name
        return [
            ["-" if place < 0 else str(place) if name is None else name[place] for place in row]
            for row in found.places.tolist()
        ]

    def measured_recall(self, queries: Tensor | Vectors, k: int = 10) -> float:
        """The share of the k exact neighbours of each query that this index finds, measured here and now."""
        if self._faiss is None:
            return 1.0
        x = queries.x if isinstance(queries, Vectors) else queries
        exact = neighbours(x, self.vectors.x, k=k, similarity=self.similarity).places
        found = self.search(x, k).places
        return float(np.mean([len(set(a) & set(b)) / k for a, b in zip(exact.tolist(), found.tolist(), strict=True)]))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the index to one file: complete, or not at all. Gives its path."""
        about = json.dumps({"similarity": self.similarity, "kind": self.kind})
        arrays = {"about": np.array(about), "x": self.vectors.x.numpy()}
        if self.vectors.y is not None:
            arrays["y"] = self.vectors.y.numpy()
        if self.vectors.name is not None:
            arrays["name"] = np.array(self.vectors.name, dtype=np.str_)
        if self._faiss is not None:
            arrays["faiss"] = faiss("").serialize_index(self._faiss)
        write_arrays(Path(path), {**arrays, "checksum": np.array(_checksum(arrays))})
        return Path(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Index:
        """Read an index that `save` wrote; a damaged file is an error."""
        place = Path(path)
        arrays = read_arrays("Index", place)
        wanted = str(arrays.pop("checksum", ""))
        if not {"about", "x"} <= arrays.keys():
            raise ValueError(f"Index: {place} is not an index; make one with `nearfar index` or Index.save.")
        if _checksum(arrays) != wanted:
            raise ValueError(f"Index: {place} does not match its checksum; it is damaged, so write it again.")
        about = json.loads(str(arrays["about"]))
        index = cls.__new__(cls)
        fields: dict[str, Any] = {key: arrays[key] for key in ("x", "y", "name") if key in arrays}
        index.vectors, index.similarity, index.kind = Vectors(**fields), about["similarity"], about["kind"]
        index._faiss = None
        if "faiss" in arrays:
            index._faiss = faiss(_REBUILD).deserialize_index(arrays["faiss"])
        return index

    def _ready(self, x: Tensor) -> np.ndarray:
        x = x.detach().float().cpu()
        return np.ascontiguousarray((unit(x) if self.similarity == "cosine" else x).numpy())

    def _ivf(self, cells: int | None, probes: int | None) -> Any:
        module = faiss(_REBUILD)
        rows, width = self.vectors.x.shape
        # faiss wants 39 rows a cell to place its centres well, and says so on the error stream
        cells = max(1, min(rows, cells or min(round(4 * math.sqrt(rows)), rows // 39)))
        inner = self.similarity != "euclidean"
        coarse = module.IndexFlatIP(width) if inner else module.IndexFlatL2(width)
        index = module.IndexIVFFlat(coarse, width, cells, module.METRIC_INNER_PRODUCT if inner else module.METRIC_L2)
        index.cp.min_points_per_centroid = 1
        index.cp.max_points_per_centroid = 64  # a quarter of faiss's own: built four times sooner, as good to search
        x = self._ready(self.vectors.x)
        index.train(x)
        index.add(x)
        index.nprobe = max(1, min(cells, probes or math.ceil(cells / 16)))
        return index

    def _hnsw(self, links: int, effort: int) -> Any:
        module = faiss(_REBUILD)
        metric = module.METRIC_INNER_PRODUCT if self.similarity == "cosine" else module.METRIC_L2
        index = module.IndexHNSWFlat(self.vectors.x.shape[1], links, metric)
        index.hnsw.efConstruction = 200
        index.hnsw.efSearch = effort
        index.add(self._ready(self.vectors.x))
        return index


_REBUILD = 'choose kind="exact"'


def _checksum(arrays: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
