"""`build_index`: make a `DiskIndex` chunk by chunk; a build that was killed can be resumed.

The folder is filled in this order: `plan.json`; whatever is trained on a sample; one part per chunk of rows, each with
digests of its rows, of the trained state and of its own bytes; the joined lists; names, classes, thumbnails and the
network; finally `about.json`. A second run keeps what still fits, makes the rest, and ends with the same bytes.
"""

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearfar._utils.checks import check_seed, check_whole
from nearfar._utils.files import atomic_write, remove_files
from nearfar._utils.lock import alone
from nearfar._utils.progress import Progress
from nearfar.evaluation import _disk_files as disk
from nearfar.evaluation import _faiss as approximate
from nearfar.evaluation._calibration import Calibration
from nearfar.evaluation._codes import code_width, encode
from nearfar.evaluation._disk_index import CODES, DISK_KINDS, ENDS, LABELS, NAMES, ROWS, THUMBNAILS, DiskIndex
from nearfar.evaluation._exact_search import Neighbors
from nearfar.evaluation._faiss import INDEX, Kind, Plan
from nearfar.evaluation._neighbors import neighbors
from nearfar.evaluation._ranking_keys import Metric
from nearfar.evaluation._vectors import Vectors

PLAN, PARTS, LOCK = "plan.json", "parts", ".lock"
K = 10
QUERIES = 500  # recall@K is measured with at most this many rows of the index as queries
CHUNK = dict.fromkeys(DISK_KINDS, 1 << 17) | {"hnsw": 1 << 19}
"""Rows per chunk; graphs are searched one by one, so they are larger."""


def build_index(
    folder: str | os.PathLike[str],
    vectors: Tensor | np.ndarray | Vectors,
    similarity: Metric = "cosine",
    kind: Kind = "ivfpq",
    *,
    cells: int | None = None,
    code_bytes: int | None = None,
    links: int = 32,
    rerank: int = 8,
    recall: float = 0.95,
    chunk: int | None = None,
    threads: int = 1,
    seed: int = 0,
    network: Path | None = None,
    preprocessing: dict[str, Any] | None = None,
    calibration: Calibration | None = None,
    progress: bool = False,
) -> DiskIndex:
    """Build an index in a folder, in the memory of one chunk and a sample, from vectors that need not fit into memory.

    After an interruption, the same call continues. On a finished index it changes the calibration
    alone, if one is passed.

    Args:
        folder: a new or empty folder, or that of an interrupted build.
        vectors: [m, d], also a memory-mapped array, or `Vectors`, whose names, classes and thumbnails are kept.
        similarity: "cosine", "dot" or "euclidean".
        kind: "exact"; "int8" or "bits" (for "cosine" only: all rows are compared by codes of a byte or a bit per
            dimension, a fourth or a 32nd of the memory); "ivf" (cells, of which a few are searched); "ivfpq" (cells,
            rows coded in a few bytes); or "hnsw" (graphs, for "cosine" and "euclidean" only). The last three need the
            extra `faiss`.
        cells: number of cells of ivf and ivfpq; None for about 4 √m.
        code_bytes: bytes per row of ivfpq, a divisor of the width; None for a quarter of the width, 64 at most.
        links: links per row of hnsw.
        rerank: candidates per result that are ranked again by the vectors themselves, which the index then holds too
            (in float16 for the cosine); of int8 and bits the most candidates, as their number is the effort. 0 keeps
            codes only.
        recall: the index gets the smallest effort of 1, 2, 4, ... whose measured recall@10 reaches this.
        chunk: rows per part; None for 131,072, or 524,288 for hnsw.
        threads: threads that build a graph of hnsw; with more than one, timing decides some links.
        seed: seed of the training sample, of the rows on which recall is measured, and of faiss's k-means.
        network: a .safetensors or .onnx file of the network that made the vectors, copied into the index.
        preprocessing: how pictures enter that network, in plain values.
        calibration: how near a neighbor must be (`nearfar.calibrate`).
        progress: show a progress bar.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as home:
    ...     index = build_index(Path(home) / "i", Vectors(torch.eye(3), name=["a", "b", "c"]), kind="exact")
    ...     index.names(index.search(torch.tensor([[0.0, 1.0, 0.1]]), k=2))
    [['b', 'c']]
    """
    found = vectors if isinstance(vectors, Vectors) else None
    x: Any = vectors if found is None else found.x
    plan = _make_plan(x, similarity, kind, cells, code_bytes, links, rerank, chunk, seed)
    check_whole("build_index", "threads", threads)
    if not 0 < recall <= 1:
        raise ValueError(f"build_index: recall must lie in (0, 1], but came as {recall!r}.")
    mark = None if found is None else found.fingerprint
    if calibration is not None:
        calibration.check_index(similarity, mark)
    about = {
        "fingerprint": mark,
        "classes": None if found is None or found.classes is None else list(found.classes),
        "preprocessing": preprocessing,
    }
    build = _Build(Path(folder), plan, x, about, threads)
    with Progress(f"indexing {plan.rows:,} vectors", plan.rows, shown=progress) as bar:
        if not build.begin(_extras(found, network), recall):
            busy = f"Index: another process is building {folder}; wait for it to end."
            with alone(build.folder / LOCK, lambda: ValueError(busy)):
                build.parts(bar)
                build.extras(found, network)
                build.finish(recall)
    if calibration is not None:
        record = disk.read_record(build.folder / disk.ABOUT) or {}
        disk.write_record(build.folder / disk.ABOUT, record | {"calibration": calibration.to_dict()})
    return DiskIndex(folder)


def _make_plan(
    x: Any,
    similarity: Metric,
    kind: Kind,
    cells: int | None,
    code_bytes: int | None,
    links: int,
    rerank: int,
    chunk: int | None,
    seed: int,
) -> Plan:
    """Check the settings, and fill in those that depend on the vectors."""
    approximate.check_settings("build_index", kind, similarity, DISK_KINDS)
    check_seed("build_index", seed)
    if getattr(x, "ndim", 0) != 2 or not len(x):
        raise ValueError(f"build_index: vectors must be [m, d] with a row or more, not {list(np.shape(x))}.")
    rows, width = map(int, x.shape)
    if kind == "ivfpq" and rows < 2:
        raise ValueError("build_index: kind='ivfpq' needs two rows or more to learn codes; choose kind='exact'.")
    for name, value in (("cells", cells), ("code_bytes", code_bytes), ("links", links), ("chunk", chunk)):
        if value is not None:
            check_whole("build_index", name, value)
    code_bytes = code_bytes or approximate.default_code_bytes(width)
    if width % code_bytes:
        raise ValueError(f"build_index: code_bytes must divide the width {width}, but came as {code_bytes}.")
    if isinstance(rerank, bool) or not isinstance(rerank, int) or rerank < 0:
        raise ValueError(f"build_index: rerank must be a whole number from 0 on, but came as {rerank!r}.")
    if kind in approximate.CLASSES:
        approximate.faiss(approximate.REMEDY)
    cells = max(1, min(rows, cells or approximate.default_cells(rows)))
    return Plan(
        kind=kind,
        similarity=similarity,
        rows=rows,
        width=width,
        chunk=chunk or CHUNK[kind],
        cells=cells if kind in ("ivf", "ivfpq") else 0,
        code_bytes=code_bytes if kind == "ivfpq" else 0,
        links=links if kind == "hnsw" else 0,
        rerank=rerank if kind in ("int8", "bits", "ivfpq") else 0,
        seed=seed,
    )


class _Build:
    """The steps of a build; each skips what an earlier run has finished."""

    def __init__(self, folder: Path, plan: Plan, x: Any, about: dict[str, Any], threads: int) -> None:
        self.folder, self.plan, self.x, self.about, self.threads = folder, plan, x, about, threads
        self.digests: list[str] = []

    def begin(self, extras: dict[str, str], recall: float) -> bool:
        """Return True if the folder holds the finished index; else write the plan. Other contents are refused."""
        self.about |= {"plan": asdict(self.plan), "extras": extras, "target": recall}
        folder, plan = self.folder, self.folder / PLAN
        finished = disk.read_record(folder / disk.ABOUT)
        if finished is not None:
            self.digests = [disk.digest_of_rows(self.chunk(rows)) for rows in self.plan.chunks]
            if {**finished, **self.about} != finished or finished["digests"] != self.digests:
                raise ValueError(
                    f"Index: the folder {folder} holds an index of other vectors or settings; "
                    "name another folder, or delete this one."
                )
            self.clear()
            return True
        before = disk.read_record(plan)
        started = folder.is_dir() and all(path.name.startswith(f".{PLAN}.") for path in folder.iterdir())
        if before is None and os.path.lexists(folder) and not started:
            raise FileExistsError(f"Index: {folder} exists and is not an empty folder; name another one for the index.")
        if before is not None and before != self.about:
            raise ValueError(
                f"Index: the folder {folder} holds an unfinished index of other vectors or settings; go on with those, "
                "name another folder, or delete this one."
            )
        disk.write_record(plan, self.about)  # first: a folder with anything else in it and no plan is refused
        (folder / PARTS).mkdir(exist_ok=True)
        return False

    def chunk(self, rows: slice) -> np.ndarray:
        """Rows of the source in float32; a row that is not finite is an error."""
        part = self.x[rows]
        array = part.detach().cpu().float().numpy() if isinstance(part, Tensor) else part
        x = torch.from_numpy(np.array(array, dtype=np.float32))  # a copy: a mapped array may be read-only
        finite = torch.isfinite(x).all(dim=1)
        if not bool(finite.all()):
            bad = rows.start + int((~finite).nonzero()[0])
            raise ValueError(f"Index: vectors must be finite, but row {bad} holds NaN or infinity; look at it.")
        return x.numpy()

    def prepared_rows(self, rows: slice) -> np.ndarray:
        """Rows of the source in the form in which they are compared."""
        return approximate.prepare(torch.from_numpy(self.chunk(rows)), self.plan.similarity).numpy()

    def parts(self, bar: Progress) -> None:
        """Train, write the parts that are missing, and join them."""
        plan, parts = self.plan, self.folder / PARTS
        trained = self._train() if plan.trained else ""
        stored = self._open_stored()
        files = [parts / f"part-{number:05d}.faiss" for number in range(len(plan.chunks))]
        files = approximate.graphs(plan, self.folder) if plan.kind == "hnsw" else files
        made = False
        for number, (rows, path) in enumerate(zip(plan.chunks, files, strict=True)):
            x = self.chunk(rows)
            self.digests.append(disk.digest_of_rows(x))
            note = parts / f"part-{number:05d}.json"
            key = {"rows": self.digests[-1], "trained": trained}
            copies = [array[rows] for array in stored]
            if not self._is_done(note, key, path, copies):
                made = True
                (self.folder / INDEX).unlink(missing_ok=True)  # it was joined from former parts
                compared = approximate.prepare(torch.from_numpy(x), plan.similarity).numpy()
                for array in stored:
                    array[rows] = encode(plan, compared) if array.dtype.kind in "iu" else compared
                    array.flush()
                if plan.by_faiss:
                    approximate.build_part(plan, parts / INDEX, compared, rows.start, path, self.threads)
                self._note(note, key, path, copies)
            bar.advance(len(x))
        if plan.trained and (made or not (self.folder / INDEX).is_file()):
            approximate.join(self.folder, parts / INDEX, files)

    def _train(self) -> str:
        """Train on a sample, unless that is already done, and return the digest of the result."""
        plan, path = self.plan, self.folder / PARTS / INDEX
        chosen = np.sort(np.random.default_rng(plan.seed).permutation(plan.rows)[: plan.sample])
        sample = np.concatenate([self.prepared_rows(rows)[_within(chosen, rows)] for rows in plan.chunks])
        note, key = path.with_suffix(".json"), {"rows": disk.digest_of_rows(sample), "trained": ""}
        if not self._is_done(note, key, path, []):
            approximate.train(plan, sample, path)
            self._note(note, key, path, [])
        return disk.digest_of_file(path)

    def _open_stored(self) -> list[np.memmap]:
        """Open the files of the rows themselves and of their codes; the note of a part has a digest of its rows."""
        plan, files = self.plan, list[tuple[str, type[np.generic], int]]()
        if plan.kind == "exact" or plan.rerank > 0:
            half = plan.similarity == "cosine" and plan.kind != "exact"
            files.append((ROWS, np.float16 if half else np.float32, plan.width))
        if plan.coded:
            files.append((CODES, np.int8 if plan.kind == "int8" else np.uint8, code_width(plan)))
        for name, dtype, width in files:
            if not (self.folder / name).is_file():
                with atomic_write(self.folder / name) as temporary:
                    np.lib.format.open_memmap(temporary, mode="w+", dtype=dtype, shape=(plan.rows, width))
        return [np.load(self.folder / name, mmap_mode="r+", allow_pickle=False) for name, _, _ in files]

    def _is_done(self, note: Path, key: dict[str, str], path: Path, stored: Sequence[np.ndarray]) -> bool:
        noted = disk.read_record(note)
        if noted is None or {**noted, **key} != noted:
            return False
        whole = not self.plan.by_faiss or (path.is_file() and disk.digest_of_file(path) == noted["file"])
        return whole and disk.digest_of_rows(*stored) == noted["stored"]

    def _note(self, note: Path, key: dict[str, str], path: Path, stored: Sequence[np.ndarray]) -> None:
        file = disk.digest_of_file(path) if self.plan.by_faiss else ""
        disk.write_record(note, {**key, "file": file, "stored": disk.digest_of_rows(*stored)})

    def extras(self, found: Vectors | None, network: Path | None) -> None:
        """Write names, classes, thumbnails and the network."""
        if found is not None and found.name is not None:
            disk.Names.write(self.folder / NAMES, self.folder / ENDS, found.name)
        for file, value in ((LABELS, found and found.y), (THUMBNAILS, found and found.images)):
            if isinstance(value, Tensor):
                disk.write_npy(self.folder / file, value.numpy())
        if network is not None:
            with atomic_write(self.folder / f"network{network.suffix}") as temporary:
                shutil.copyfile(network, temporary)

    def finish(self, target: float) -> None:
        """Measure the recall, choose the effort, and write the record, which completes the index."""
        paths = sorted(path for path in self.folder.iterdir() if path.is_file() and path.name != PLAN)
        paths = [path for path in paths if not path.name.startswith(".")]  # the lock, and files of a killed write
        files = {path.name: {"bytes": path.stat().st_size, "digest": disk.digest_of_file(path)} for path in paths}
        record = {**self.about, "digests": self.digests, "files": files}
        index = DiskIndex.from_record(self.folder, {**record, "effort": 1, "recall": {}})
        effort, measured = choose_effort(index, self.prepared_rows, target)
        disk.write_record(self.folder / disk.ABOUT, {**record, "effort": effort, "recall": measured})
        self.clear()

    def clear(self) -> None:
        """Remove what only the build needs."""
        remove_files(self.folder / PARTS, "part-*", f"{Path(INDEX).stem}.*", ".*.part")
        for path in (self.folder / PLAN, *self.folder.glob(".*.part")):
            path.unlink(missing_ok=True)


def _within(chosen: np.ndarray, rows: slice) -> np.ndarray:
    """The positions, within a chunk of rows, of the chosen rows that lie in it."""
    first, last = np.searchsorted(chosen, [rows.start, rows.stop])
    within: np.ndarray = chosen[first:last] - rows.start
    return within


def _extras(found: Vectors | None, network: Path | None) -> dict[str, str]:
    """Digests of everything in the index other than the vectors."""
    extras = {} if network is None else {f"network{network.suffix}": disk.digest_of_file(network)}
    if found is not None and found.name is not None:
        names = "\0".join(found.name).encode("utf-8", "replace")
        extras[NAMES] = disk.digest_of_rows(np.frombuffer(names, dtype=np.uint8))
    for name, value in ((LABELS, found and found.y), (THUMBNAILS, found and found.images)):
        if isinstance(value, Tensor):
            extras[name] = disk.digest_of_rows(value.numpy())
    return extras


def choose_effort(index: DiskIndex, rows: Callable[[slice], np.ndarray], target: float) -> tuple[int, dict[str, Any]]:
    """Choose the smallest effort that reaches a recall; `rows` maps a chunk to its rows, in the form that is compared.

    Returns the effort, and the measurements: k, queries, recall, and [effort, recall] for each effort tried.
    """
    plan = index.plan
    k = min(K, plan.rows - 1)
    if not plan.efforts or not k:
        return 0 if not plan.efforts else plan.efforts[-1], {"k": k, "queries": 0, "recall": 1.0, "curve": []}
    chosen = np.sort(np.random.default_rng(plan.seed + 1).permutation(plan.rows)[:QUERIES])
    queries, wanted = _exact(plan, rows, chosen, k)
    curve: list[list[float]] = []
    for effort in plan.efforts:
        found = _without_itself(index.search(queries, k + 1, effort=effort).places, chosen)
        hits = [len(a & b) / k for a, b in zip(wanted, (set(row[:k]) for row in found), strict=True)]
        curve.append([effort, round(float(np.mean(hits)), 4)])
        if curve[-1][1] >= target:
            break
    tried, recall = curve[-1]
    return int(tried), {"k": k, "queries": len(chosen), "recall": recall, "curve": curve}


def _exact(
    plan: Plan, rows: Callable[[slice], np.ndarray], chosen: np.ndarray, k: int
) -> tuple[Tensor, list[set[int]]]:
    """The chosen rows, and the k nearest other rows of each by exact search, with one chunk in memory at a time."""
    queries = torch.from_numpy(np.concatenate([rows(part)[_within(chosen, part)] for part in plan.chunks]))
    found: list[Neighbors] = []
    for part in plan.chunks:
        x = torch.from_numpy(rows(part))
        near = neighbors(queries, x, k=min(k + 1, len(x)), similarity="dot" if plan.inner else "euclidean")
        found = [approximate.merge([*found, Neighbors(near.scores, near.places + part.start)], k + 1)]
    return queries, [set(row[:k]) for row in _without_itself(found[0].places, chosen)]


def _without_itself(places: Tensor, chosen: np.ndarray) -> list[list[int]]:
    """The rows found for each query, without the query itself and without missing entries."""
    pairs = zip(places.tolist(), chosen.tolist(), strict=True)
    return [[place for place in row if place not in (own, -1)] for row, own in pairs]
