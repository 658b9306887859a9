"""Everything that calls faiss: exact neighbors by its flat index, and approximate indices.

Approximate indices are trained, built in parts, joined on disk, loaded and searched:

ivf      rows sorted into cells; a query looks into a few. On disk the lists of the cells lie in one mapped file.
ivfpq    the same, each row coded in a few bytes by a product quantizer.
hnsw     graphs of `chunk` rows each; on disk, mapped files that are searched one after the other.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from nearfar._utils.checks import check_choice
from nearfar._utils.extras import need
from nearfar._utils.files import atomic_write
from nearfar.evaluation._disk_files import silence
from nearfar.evaluation._exact_search import Neighbors, strips
from nearfar.evaluation._ranking_keys import METRICS, Metric, spaces
from nearfar.similarity import unit

Kind = Literal["exact", "int8", "bits", "ivf", "ivfpq", "hnsw"]
CLASSES = {"ivf": "IndexIVFFlat", "ivfpq": "IndexIVFPQ", "hnsw": "IndexHNSWFlat"}
INDEX, LISTS = "index.faiss", "lists.ivfdata"
REMEDY = 'choose kind="exact"'
PER_CELL = 64  # training rows per cell: a quarter of faiss's default, trained four times faster and as good to search
FEWEST = 20_000  # training rows of a product quantizer, if the data has that many


def faiss(remedy: str = 'leave backend="torch"') -> Any:
    """Import faiss, or raise an error that says how to install it or what to do without it."""
    return need("faiss", "this search", "faiss", instead=remedy)


@dataclass(frozen=True)
class Plan:
    """Everything that determines an index besides its vectors; see `build_index` for the settings."""

    kind: Kind
    similarity: Metric
    rows: int
    width: int
    chunk: int
    cells: int = 0
    code_bytes: int = 0
    links: int = 0
    rerank: int = 0
    seed: int = 0

    @property
    def inner(self) -> bool:
        """Whether rows are compared by inner products (for the cosine, of unit rows)."""
        return self.similarity != "euclidean"

    @property
    def bits(self) -> int:
        """Bits of a code of the product quantizer: 8, fewer if there are fewer rows than codes."""
        return max(1, min(8, int(math.log2(self.rows))))

    @property
    def coded(self) -> bool:
        """Whether rows are held as `nearfar.similarity.codes`."""
        return self.kind in ("int8", "bits")

    @property
    def by_faiss(self) -> bool:
        """Whether faiss is needed."""
        return self.kind in CLASSES

    @property
    def trained(self) -> bool:
        """Whether training is needed."""
        return self.kind in ("ivf", "ivfpq")

    @property
    def sample(self) -> int:
        """The number of rows to train on."""
        return min(self.rows, max(PER_CELL * self.cells, FEWEST if self.kind == "ivfpq" else 0))

    @property
    def chunks(self) -> list[slice]:
        """The rows of each part."""
        return [slice(at, min(at + self.chunk, self.rows)) for at in range(0, self.rows, self.chunk)]

    @property
    def efforts(self) -> list[int]:
        """The efforts to choose from: 1, 2, 4, ... cells, or candidates per result of codes; 16, 32, ... of a graph."""
        if self.kind == "exact":
            return []
        if self.coded:
            return [1 << step for step in range(max(1, self.rerank).bit_length())]
        if self.kind == "hnsw":
            return [16 << step for step in range(7)]
        return [*(1 << step for step in range(20) if 1 << step < self.cells), self.cells]


def check_settings(owner: str, kind: str, similarity: str, kinds: Sequence[Kind]) -> None:
    """Require a known kind and similarity that go together."""
    check_choice(owner, "similarity", similarity, METRICS)
    check_choice(owner, "kind", kind, kinds)
    if kind == "hnsw" and similarity == "dot":
        raise ValueError(f"{owner}: kind='hnsw' needs similarity='cosine' or 'euclidean': it compares distances.")
    if kind in ("int8", "bits") and similarity != "cosine":
        raise ValueError(f"{owner}: kind={kind!r} needs similarity='cosine': its codes hold directions alone.")


def default_cells(rows: int) -> int:
    """About 4 √rows cells, but no more than faiss can place well, which needs 39 rows per cell.

    >>> default_cells(10**6), default_cells(390), default_cells(5)
    (4000, 10, 1)
    """
    return max(1, min(round(4 * math.sqrt(rows)), rows // 39))


def default_code_bytes(width: int) -> int:
    """Bytes per code of a product quantizer: the largest divisor of the width up to a quarter of it and up to 64.

    >>> default_code_bytes(128), default_code_bytes(384), default_code_bytes(7)
    (32, 64, 1)
    """
    return max(part for part in range(1, min(64, max(1, width // 4)) + 1) if width % part == 0)


def prepare(x: Tensor, similarity: Metric) -> Tensor:
    """Convert rows to the form in which they are compared: float32 on the CPU, of unit length for the cosine."""
    x = x.detach().float().cpu()
    return (unit(x) if similarity == "cosine" else x).contiguous()


def new_index(plan: Plan) -> Any:
    """An empty faiss index, not yet trained."""
    module = faiss(REMEDY)
    metric = module.METRIC_INNER_PRODUCT if plan.inner else module.METRIC_L2
    if plan.kind == "hnsw":
        index = module.IndexHNSWFlat(plan.width, plan.links, metric)
        index.hnsw.efConstruction = 200
        return index
    coarse = module.IndexFlatIP(plan.width) if plan.inner else module.IndexFlatL2(plan.width)
    if plan.kind == "ivf":
        index = module.IndexIVFFlat(coarse, plan.width, plan.cells, metric)
    else:
        index = module.IndexIVFPQ(coarse, plan.width, plan.cells, plan.code_bytes, plan.bits, metric)
        index.pq.cp.min_points_per_centroid, index.pq.cp.seed = 1, plan.seed
    index.cp.min_points_per_centroid, index.cp.max_points_per_centroid = 1, PER_CELL
    index.cp.seed = plan.seed
    return index


def train(plan: Plan, sample: np.ndarray, path: Path) -> None:
    """Train cells and codes on a sample [s, d], and write the empty index."""
    index = new_index(plan)
    index.train(sample)
    _write(index, path)


def build_part(plan: Plan, trained: Path, rows: np.ndarray, first: int, path: Path, threads: int) -> None:
    """Write the part of some rows [n, d], the first of which is row `first` of the whole."""
    module = faiss(REMEDY)
    if plan.trained:
        index = module.read_index(str(trained))
        index.add_with_ids(rows, np.arange(first, first + len(rows)))
    else:
        index = new_index(plan)
        with _threads(module, threads):  # with several threads, timing decides some links
            index.add(rows)
    _write(index, path)


def _write(index: Any, path: Path) -> None:
    with atomic_write(path) as temporary:
        faiss(REMEDY).write_index(index, str(temporary))


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
    with atomic_write(folder / LISTS) as temporary, silence():
        lists = module.OnDiskInvertedLists(index.nlist, index.code_size, str(temporary))
        held = [module.read_index(str(part), module.IO_FLAG_MMAP) for part in parts]
        several = module.InvertedListsPtrVector()
        for part in held:
            several.push_back(part.invlists)
        merge_lists = getattr(lists, "merge_from_multiple", lists.merge_from)  # its name in faiss 1.8
        index.ntotal = merge_lists(several.data(), several.size())
        lists.filename = LISTS  # found beside the index, wherever the folder is moved
        index.replace_invlists(lists, False)
    _write(index, folder / INDEX)


def load_part(plan: Plan, rows: int, name: str, read: Callable[[], Any]) -> Any:
    """Call faiss's reader, and check that it gives an index of `rows` rows with the plan's kind, width and metric."""
    module = faiss(REMEDY)
    try:
        with silence():
            index = read()
    except Exception as error:  # faiss raises its own errors, and MemoryError for an impossible size
        raise ValueError(f"faiss cannot read {name}: {type(error).__name__}") from None
    metric = module.METRIC_INNER_PRODUCT if plan.inner else module.METRIC_L2
    found = type(index).__name__, index.ntotal, index.d, index.metric_type
    if found != (CLASSES[plan.kind], rows, plan.width, metric):
        held = f"{found[0]} of {found[1]:,} rows of width {found[2]}, measure {found[3]}"
        raise ValueError(f"{name} is {held}, for {rows:,} vectors of width {plan.width}, measure {metric}")
    return index


def open_parts(plan: Plan, folder: Path) -> list[Any]:
    """Open what `join` or `build_part` left in the folder, memory-mapped: one index, or the graphs in order."""
    module = faiss(REMEDY)
    flags = module.IO_FLAG_ONDISK_SAME_DIR | module.IO_FLAG_READ_ONLY
    files, sizes = [folder / INDEX], [plan.rows]
    if plan.kind == "hnsw":
        flags = getattr(module, "IO_FLAG_MMAP_IFC", 0)  # before faiss 1.11 graphs are read into memory
        files, sizes = graphs(plan, folder), [rows.stop - rows.start for rows in plan.chunks]
    return [
        load_part(plan, rows, path.name, partial(module.read_index, str(path), flags))
        for path, rows in zip(files, sizes, strict=True)
    ]


def graphs(plan: Plan, folder: Path) -> list[Path]:
    """The files of the graphs."""
    return [folder / f"graph-{number:05d}.faiss" for number in range(len(plan.chunks))]


def search_parts(plan: Plan, parts: Sequence[Any], queries: np.ndarray, k: int, effort: int) -> Neighbors:
    """The k nearest rows of each query [n, d] from `prepare`; missing entries have place -1 and score -inf."""
    module = faiss(REMEDY)
    found = []
    for index, rows in zip(parts, plan.chunks if plan.kind == "hnsw" else [slice(0, plan.rows)], strict=True):
        many = min(k, rows.stop - rows.start)
        if plan.kind == "hnsw":
            how = module.SearchParametersHNSW(efSearch=max(effort, many))
        else:
            how = module.SearchParametersIVF(nprobe=effort)
        # faiss.contrib.torch_utils, which pytorch-metric-learning imports, replaces `search` by one without `params`
        search = getattr(index, "search_numpy", index.search)
        keys, listed = search(queries, many, params=how)
        if listed.max(initial=-1) >= rows.stop - rows.start:
            raise ValueError(f"Index: faiss found row {listed.max()} of {plan.rows:,}; make the index again.")
        scores, places = torch.from_numpy(keys), torch.from_numpy(listed)
        scores = scores if plan.inner else -scores.clamp_min(0).sqrt()
        missing = places < 0
        found.append(Neighbors(scores.masked_fill(missing, -torch.inf), (places + rows.start).masked_fill(missing, -1)))
    return found[0] if len(found) == 1 else merge(found, k)


def merge(found: Sequence[Neighbors], k: int) -> Neighbors:
    """Merge lists of successive rows into the k best; of equal scores the first row wins."""
    scores, places = (torch.cat([getattr(one, field) for one in found], dim=1) for field in ("scores", "places"))
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
    return Neighbors(scores.gather(1, order), places.gather(1, order))


def rank_again(plan: Plan, rows: np.ndarray, queries: Tensor, found: Neighbors, k: int) -> Neighbors:
    """Order candidates by the scores of the vectors themselves, which codes only approximate."""
    scores, places = torch.empty(len(queries), k), torch.empty(len(queries), k, dtype=torch.long)
    for row, listed in enumerate(found.places):
        near = listed.sort().values  # of equal scores the first row wins
        x = torch.from_numpy(rows[near.clamp_min(0).numpy()]).float()
        exact = x @ queries[row] if plan.inner else -(x - queries[row]).norm(dim=1)
        order = exact.masked_fill(near < 0, -torch.inf).sort(descending=True, stable=True).indices[:k]
        scores[row], places[row] = exact[order].masked_fill(near[order] < 0, -torch.inf), near[order]
    return Neighbors(scores, places)


def faiss_neighbors(queries: Tensor, references: Tensor | None, k: int, similarity: Metric) -> Neighbors:
    """The k nearest references by faiss's flat index; see `neighbors`.

    faiss breaks ties arbitrarily and rounds differently. Rows whose order depends on that (two successive keys,
    up to the first one left out, are closer than rounding errors) are searched again, so that ties are broken by
    position.
    """
    module = faiss()
    x, y = spaces(queries, references, similarity)
    rows = prepare(x.x, similarity)
    cols = rows if references is None else prepare(y.x, similarity)
    index = module.IndexFlatL2(cols.shape[1]) if similarity == "euclidean" else module.IndexFlatIP(cols.shape[1])
    index.add(cols.numpy())
    more = min(k + 1, len(cols) - (references is None))
    found, listed = index.search(rows.numpy(), more + (references is None))
    keys, places = torch.from_numpy(found), torch.from_numpy(listed)
    if similarity == "euclidean":
        keys = -keys
    if references is None:
        keys, places = _without_itself(keys, places, torch.arange(len(places)))
    scores = keys if similarity != "euclidean" else -(-keys).clamp_min(0).sqrt()
    scores, places = scores[:, :k].to(x.side), places[:, :k].to(queries.device)
    again = _unclear(keys, rows, cols, similarity).nonzero().flatten().to(queries.device)
    if len(again):
        exact = _search_again(queries, references, again, k, similarity)
        scores[again], places[again] = exact.scores, exact.places
    return Neighbors(scores.clamp(-1, 1) if similarity == "cosine" else scores, places)


def _without_itself(keys: Tensor, places: Tensor, itself: Tensor) -> tuple[Tensor, Tensor]:
    """Drop each row itself from its list, or the last entry if duplicates pushed the row off the list."""
    own = places == itself[:, None]
    own[~own.any(dim=1), -1] = True
    keep = (~own).nonzero()[:, 1].reshape(len(places), -1)
    return keys.gather(1, keep), places.gather(1, keep)


def _unclear(keys: Tensor, rows: Tensor, cols: Tensor, similarity: Metric) -> Tensor:
    """Which rows have neighbors in their list whose keys are closer than rounding errors."""
    size, largest = torch.linalg.vector_norm(rows, dim=1), float(torch.linalg.vector_norm(cols, dim=1).max())
    scale = size * largest if similarity != "euclidean" else size.square() + largest**2
    close: Tensor = keys[:, :-1] - keys[:, 1:] <= 2e-6 * scale[:, None]
    return close.any(dim=1)


def _search_again(queries: Tensor, references: Tensor | None, chosen: Tensor, k: int, similarity: Metric) -> Neighbors:
    """Search some rows with the torch backend; without references each row drops itself from its list."""
    extra = references is None
    cols = queries if references is None else references
    found = list(strips(queries[chosen], cols, k=k + extra, similarity=similarity))
    scores = torch.cat([strip.scores for _, strip in found])
    places = torch.cat([strip.places for _, strip in found])
    return Neighbors(*(_without_itself(scores, places, chosen) if extra else (scores, places)))
