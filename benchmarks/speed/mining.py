"""Hard negatives of 20,000 queries among 1,000,000 memory-mapped references of width 384: time, memory, and a kill.

    python benchmarks/speed/mining.py scratch/                       the full size: some minutes of one core
    python benchmarks/speed/mining.py scratch/ --rows 100000         smaller

References lie around 10,000 centers. Query i is reference i with noise, and has it as its only positive. Memory is the
peak of resident anonymous memory of the whole process, Python and torch included; pages of the mapped file are left
out, since the system takes them back when it needs them. The first call writes the vectors and ends. A run that was
interrupted continues, with the time and the peak of all its parts. With --indices, an index of int8 and one of bits are
built of the same references, and measured.
"""

from __future__ import annotations

import argparse
import json
import platform
import threading
import time
from pathlib import Path

import numpy as np
import torch
from disk_index import anonymous

import nearfar as nf
from nearfar.evaluation import Vectors, build_index, neighbors
from nearfar.evaluation.vectors_folder import write_folder

RESULTS = Path(__file__).parents[1] / "results"
WIDTH, CHUNK = 384, 1 << 14


def blocks(rows: int):
    """The references, in blocks of rows."""
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(10_000, WIDTH, generator=generator)
    for at in range(0, rows, CHUNK):
        many = min(CHUNK, rows - at)
        near = centers[torch.randint(10_000, (many,), generator=generator)]
        yield torch.nn.functional.normalize(near + torch.randn(many, WIDTH, generator=generator)).numpy()


def write(folder: Path, rows: int, queries: int) -> None:
    """The references and the queries, as folders of vectors."""
    if not (folder / "references.vectors" / "manifest.json").is_file():
        write_folder(folder / "references.vectors", blocks(rows), {"y": np.arange(rows)})
    first = np.concatenate([block for block, _ in zip(blocks(rows), range(-(-queries // CHUNK)), strict=False)])
    noise = torch.randn(queries, WIDTH, generator=torch.Generator().manual_seed(1)).numpy() * 0.03
    write_folder(folder / "queries.vectors", [first[:queries] + noise], {"y": np.arange(queries)})


def measured(act, found: dict) -> None:
    """Add the processor seconds of `act` and its peak of anonymous memory to the record."""
    ended, peak = threading.Event(), 0

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.05):
            peak = max(peak, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start, wall = time.process_time(), time.perf_counter()
    act()
    found["cpu_seconds"] = round(found.get("cpu_seconds", 0) + time.process_time() - start, 1)
    found["seconds"] = round(found.get("seconds", 0) + time.perf_counter() - wall, 1)
    ended.set()
    watcher.join()
    found["peak_mb"] = max(found.get("peak_mb", 0), round(peak / 1e6))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--queries", type=int, default=20_000)
    parser.add_argument("-k", type=int, default=50)
    parser.add_argument("--chunks", type=int, default=1000, help="chunks of queries to mine in this call")
    parser.add_argument("--indices", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    scratch, results = given.scratch, RESULTS / "mining.json"
    if not (scratch / "queries.vectors" / "manifest.json").is_file():
        write(scratch, given.rows, given.queries)
        return
    record = json.loads(results.read_text(encoding="utf-8")) if results.is_file() else {}
    key = f"{given.queries} x {given.rows} x {WIDTH}, k = {given.k}"
    found = record.setdefault(key, {"machine": platform.processor() or platform.machine(), "threads": 1})
    references, queries = Vectors.load(scratch / "references.vectors"), Vectors.load(scratch / "queries.vectors")
    if given.indices:
        index_rows(scratch, references, queries, found)
    else:
        mine_rows(scratch, references, queries, given, found)
    results.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))


def mine_rows(scratch: Path, references: Vectors, queries: Vectors, given: argparse.Namespace, found: dict) -> None:
    from nearfar.evaluation._mine import CHUNK as STEP
    from nearfar.evaluation._mine import Rule, Search

    rule = Rule(k=given.k, ranks=(1, 2 * given.k), margin=0.05)
    many, parts = -(-given.queries // STEP), []

    def act() -> None:
        search = Search(queries, None, references, None, rule, None, None)
        for number, part in search.chunks(scratch / "mined", progress=True):
            parts.append(part)
            if number + 1 >= given.chunks:
                break

    measured(act, found)
    found |= {"chunks": f"{len(parts)} of {many}", "bytes_of_references": references.x.numel() * 4}
    found["negatives_a_query"] = float(np.concatenate([(part["places"] >= 0).sum(axis=1) for part in parts]).mean())


def index_rows(scratch: Path, references: Vectors, queries: Vectors, found: dict) -> None:
    """Indices of codes: bytes that a search reads, recall at build and of the queries, time of a search."""
    asked = queries.x[:: max(1, len(queries) // 200)][:200].clone()
    exact = neighbors(asked, references.x, k=10).places.tolist()
    for kind in ("int8", "bits"):
        entry = found.setdefault(kind, {})
        measured(lambda kind=kind: build_index(scratch / f"{kind}.index", references, kind=kind), entry)
        index = nf.evaluation.open_index(scratch / f"{kind}.index")
        near = index.search(asked, 10).places.tolist()
        start = time.process_time()
        for row in asked[:5]:
            index.search(row[None], 10)
        entry["search_cpu_ms"] = round(1000 * (time.process_time() - start) / 5)
        entry["recall_of_queries"] = float(
            np.mean([len(set(a) & set(b)) / 10 for a, b in zip(near, exact, strict=True)])
        )
        entry |= {"codes_bytes": (scratch / f"{kind}.index" / "codes.npy").stat().st_size, "built": index.recall}


if __name__ == "__main__":
    main()
