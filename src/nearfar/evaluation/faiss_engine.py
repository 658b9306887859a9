"""faiss's part of an index in a folder: what is trained, built in parts, joined on disk, and searched memory-mapped.

ivf      rows sorted into cells; a query looks into a few (`probes`). The cells' lists lie in one mapped file.
ivfpq    the same, each row coded in a few bytes by a product quantizer.
hnsw     graphs of `chunk` rows each, mapped files that are searched one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from nearfar._utils.files import atomic_write
from nearfar.evaluation.disk_files import hushed
from nearfar.evaluation.exact_search import Neighbors
from nearfar.evaluation.faiss_backend import faiss
from nearfar.evaluation.ranking_keys import Metric
from nearfar.similarity import unit

__all__ = [
    "INDEX",
    "LISTS",
    "DiskKind",
    "Plan",
    "ask",
    "best",
    "build_part",
    "default_code_bytes",
    "graphs",
    "join",
    "opened",
    "ready",
    "train",
]

DiskKind = Literal["exact", "ivf", "ivfpq", "hnsw"]
INDEX, LISTS = "index.faiss", "lists.ivfdata"
REMEDY = 'choose kind="exact"'
PER_CELL = 64
"""Training rows a cell: a quarter of faiss's own number, trained four times sooner and as good to search."""
FEWEST = 20_000
"""Training rows of a product quantizer, where there are so many."""


@dataclass(frozen=True)
class Plan:
    """What decides an index besides its vectors; see `DiskIndex.build` for the settings."""

    kind: DiskKind
    similarity: Metric
    rows: int
    width: int
    chunk: int
    cells: int
    code_bytes: int
    links: int
    rerank: int
    seed: int

    @property
    def inner(self) -> bool:
        """Whether rows are compared by inner products (for the cosine, of unit rows)."""
        return self.similarity != "euclidean"

    @property
    def bits(self) -> int:
        """Bits of a code of the product quantizer: 8, fewer where there are fewer rows than codes."""
        return max(1, min(8, int(math.log2(self.rows))))

    @property
    def trained(self) -> bool:
        """Whether there is something to train."""
        return self.kind in ("ivf", "ivfpq")

    @property
    def sample(self) -> int:
        """How many rows it is trained on."""
        return min(self.rows, max(PER_CELL * self.cells, FEWEST if self.kind == "ivfpq" else 0))

    @property
    def chunks(self) -> list[slice]:
        """The rows of each part."""
        return [slice(at, min(at + self.chunk, self.rows)) for at in range(0, self.rows, self.chunk)]

    @property
    def efforts(self) -> list[int]:
        """The efforts among which one is chosen: 1, 2, 4, ... cells, or 16, 32, ... candidates of a graph."""
        if self.kind == "exact":
            return []
        if self.kind == "hnsw":
            return [16 << step for step in range(7)]
        return [*(1 << step for step in range(20) if 1 << step < self.cells), self.cells]

    def record(self) -> dict[str, Any]:
        """The plan as plain values."""
        return asdict(self)


def default_code_bytes(width: int) -> int:
    """Codes of a product quantizer: the largest divisor of the width up to a quarter of it, and up to 64.

    >>> default_code_bytes(128), default_code_bytes(384), default_code_bytes(7)
    (32, 64, 1)
    """
    return max(part for part in range(1, min(64, max(1, width // 4)) + 1) if width % part == 0)


def ready(x: Tensor, similarity: Metric) -> Tensor:
    """Rows as they are compared: float32 on the CPU, of unit length for the cosine."""
    x = x.detach().float().cpu()
    return (unit(x) if similarity == "cosine" else x).contiguous()


def train(plan: Plan, sample: np.ndarray, path: Path) -> None:
    """Train cells and codes on a sample [s, d], and write the empty index."""
    module = faiss(REMEDY)
    coarse = module.IndexFlatIP(plan.width) if plan.inner else module.IndexFlatL2(plan.width)
    metric = module.METRIC_INNER_PRODUCT if plan.inner else module.METRIC_L2
    if plan.kind == "ivf":
        index = module.IndexIVFFlat(coarse, plan.width, plan.cells, metric)
    else:
        index = module.IndexIVFPQ(coarse, plan.width, plan.cells, plan.code_bytes, plan.bits, metric)
        index.pq.cp.min_points_per_centroid, index.pq.cp.seed = 1, plan.seed
    index.cp.min_points_per_centroid, index.cp.max_points_per_centroid = 1, PER_CELL
    index.cp.seed = plan.seed
    index.train(sample)
    with atomic_write(path) as temporary:
        module.write_index(index, str(temporary))


def build_part(plan: Plan, trained: Path, rows: np.ndarray, first: int, path: Path, threads: int) -> None:
    """Write the part of some rows [n, d], the first of which is row `first` of the whole."""
    module = faiss(REMEDY)
    if plan.trained:
        index = module.read_index(str(trained))
        index.add_with_ids(rows, np.arange(first, first + len(rows)))
    else:
        metric = module.METRIC_INNER_PRODUCT if plan.inner else module.METRIC_L2
        index = module.IndexHNSWFlat(plan.width, plan.links, metric)
        index.hnsw.efConstruction = 200
        with _threads(module, threads):  # the order in which several would finish decides the links
            index.add(rows)
    with atomic_write(path) as temporary:
        module.write_index(index, str(temporary))


@contextmanager
def _threads(module: Any, count: int) -> Iterator[None]:
    before = module.omp_get_max_threads()
    module.omp_set_num_threads(count)
    try:
        yield
    finally:
        module.omp_set_num_threads(before)


def join(folder: Path, trained: Path, parts: Sequence[Path]) -> None:
    """Merge the lists of all parts into one file, from disk to disk, and write the index that refers to it."""
    module = faiss(REMEDY)
    index = module.read_index(str(trained))
    with atomic_write(folder / LISTS) as temporary, hushed():
        lists = module.OnDiskInvertedLists(index.nlist, index.code_size, str(temporary))
        held = [module.read_index(str(part), module.IO_FLAG_MMAP) for part in parts]
        several = module.InvertedListsPtrVector()
        for part in held:
            several.push_back(part.invlists)
        merge = getattr(lists, "merge_from_multiple", lists.merge_from)  # its former name, in faiss 1.8
        index.ntotal = merge(several.data(), several.size())
        lists.filename = LISTS  # it is looked for beside the index, wherever that is moved
        index.replace_invlists(lists, False)
    with atomic_write(folder / INDEX) as other:
        module.write_index(index, str(other))


def opened(plan: Plan, folder: Path) -> list[Any]:
    """Open what `join` or `build_part` left in the folder, memory-mapped: one index, or the graphs in order."""
    module = faiss(REMEDY)
    flags = module.IO_FLAG_ONDISK_SAME_DIR | module.IO_FLAG_READ_ONLY
    files, sizes = [folder / INDEX], [plan.rows]
    if plan.kind == "hnsw":
        flags = getattr(module, "IO_FLAG_MMAP_IFC", 0)  # before faiss 1.11 graphs are read into memory
        files, sizes = graphs(plan, folder), [rows.stop - rows.start for rows in plan.chunks]
    metric = module.METRIC_INNER_PRODUCT if plan.inner else module.METRIC_L2
    found = []
    kinds = {"ivf": "IndexIVFFlat", "ivfpq": "IndexIVFPQ", "hnsw": "IndexHNSWFlat"}
    for path, rows in zip(files, sizes, strict=True):
        try:
            with hushed():
                index = module.read_index(str(path), flags)
        except Exception as error:  # faiss raises errors of its own, and MemoryError for an impossible size
            raise ValueError(f"faiss cannot read {path.name}: {type(error).__name__}") from None
        if type(index).__name__ != kinds[plan.kind] or (index.ntotal, index.d, index.metric_type) != (
            rows,
            plan.width,
            metric,
        ):
            raise ValueError(f"{path.name} is {type(index).__name__} of {index.ntotal:,} rows of width {index.d}")
        found.append(index)
    return found


def graphs(plan: Plan, folder: Path) -> list[Path]:
    """The files of the graphs."""
    return [folder / f"graph-{number:05d}.faiss" for number in range(len(plan.chunks))]


def ask(plan: Plan, indices: Sequence[Any], queries: np.ndarray, k: int, effort: int) -> Neighbors:
    """The k nearest rows of each query [n, d], which is `ready`; entries that are not found have place -1."""
    module = faiss(REMEDY)
    found = []
    for index, rows in zip(indices, plan.chunks if plan.kind == "hnsw" else [slice(0, plan.rows)], strict=True):
        many = min(k, rows.stop - rows.start)
        if plan.kind == "hnsw":
            how = module.SearchParametersHNSW(efSearch=max(effort, many))
        else:
            how = module.SearchParametersIVF(nprobe=effort)
        # faiss.contrib.torch_utils, which pytorch-metric-learning imports, puts a search without `params` in its place
        search = getattr(index, "search_numpy", index.search)
        keys, listed = search(queries, many, params=how)
        scores, places = torch.from_numpy(keys), torch.from_numpy(listed)
        scores = scores if plan.inner else -scores.clamp_min(0).sqrt()
        missing = places < 0
        found.append(Neighbors(scores.masked_fill(missing, -torch.inf), (places + rows.start).masked_fill(missing, -1)))
    return found[0] if len(found) == 1 else best(found, k)


def best(found: Sequence[Neighbors], k: int) -> Neighbors:
    """The k best of several lists, whose rows follow each other: of equal scores the first row wins."""
    scores, places = (torch.cat([getattr(one, field) for one in found], dim=1) for field in ("scores", "places"))
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
    return Neighbors(scores.gather(1, order), places.gather(1, order))
