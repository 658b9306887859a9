"""Faults of indexing and serving, on purpose: processes killed with kill -9 at random moments.

    python tests/support/faults_index.py                        # twenty kills of each, about two minutes on two cores
    python tests/support/faults_index.py --kills 3 --seed 7     # fewer, from another seed

A build that was killed is started again, at times killed again, and must end with the bytes of one that was left alone.
A server that is killed while clients ask must have given right answers or none, must leave the index as it was, and a
new one must answer the same. Processes are forks of this one, which has imported everything already.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before NumPy is loaded: a pool of threads does not survive a fork

import argparse
import http.client
import json
import random
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import faiss
import torch

from nearfar.cli.main import app
from nearfar.evaluation import Vectors, build_index

KINDS = ("ivfpq", "hnsw", "ivf", "exact", "bits")
ROWS = {"ivfpq": 20_000, "hnsw": 3_000, "ivf": 40_000, "exact": 60_000, "bits": 60_000}
CLIENTS = 4
Contents = dict[str, bytes]


def vectors(kind: str) -> Vectors:
    """The same for every build of a kind."""
    rows, generator = ROWS[kind], torch.Generator().manual_seed(0)
    centers = torch.randn(100, 32, generator=generator)
    x = centers[torch.randint(100, (rows,), generator=generator)] + 0.4 * torch.randn(rows, 32, generator=generator)
    return Vectors(x, name=[f"article {row}" for row in range(rows)], fingerprint="aa/bb")


def build(kind: str, folder: Path) -> None:
    build_index(folder, vectors(kind), kind=kind, chunk=ROWS[kind] // 12)


def child(act: Callable[[], None], out: int | None = None) -> int:
    """A process of its own that runs `act`, with standard output where `out` leads."""
    pid = os.fork()
    if pid:
        return pid
    code = 0
    try:
        if out is not None:
            os.dup2(out, 1)
        act()
    except BaseException as error:
        print(f"  {type(error).__name__}: {error}", flush=True)
        code = 4
    os._exit(code)


def ended(pid: int) -> int:
    """How a child ended: its exit code, or minus its signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def contents(folder: Path) -> Contents:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def killed_builds(home: Path, kills: int, chance: random.Random) -> None:
    """Kill builds of every kind, again and again, and compare what they end with."""
    whole: dict[str, tuple[Contents, float]] = {}
    done = finished = 0
    while done < kills:
        kind = KINDS[done % len(KINDS)]
        if kind not in whole:
            start = time.monotonic()
            assert ended(child(lambda kind=kind: build(kind, home / kind))) == 0
            whole[kind] = contents(home / kind), time.monotonic() - start
        wanted, seconds = whole[kind]
        folder = home / f"killed-{done}"
        for _ in range(chance.choice((1, 1, 2, 3))):
            pid = child(lambda kind=kind, folder=folder: build(kind, folder))
            time.sleep(chance.uniform(0.05, 1.0) * seconds)
            os.kill(pid, signal.SIGKILL)
            died = ended(pid) == -signal.SIGKILL
            done += died
            finished += not died
        assert ended(child(lambda kind=kind, folder=folder: build(kind, folder))) == 0, folder
        assert contents(folder) == wanted, f"{kind}: a killed build ended with other bytes"
        shutil.rmtree(folder)
    print(f"{done} builds killed ({finished} had ended before): every one went on and ended with the same bytes")


def server(index: Path) -> tuple[int, int]:
    """A server of an index in a child; its process and its port."""
    reading, writing = os.pipe()
    words = ["serve", str(index), "--port", "0", "--seconds", "120"]
    pid = child(lambda: app(words, standalone_mode=False), writing)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as said:
        for line in said:
            if found := re.search(r"at http://127\.0\.0\.1:(\d+) ", line):
                return pid, int(found[1])
    raise AssertionError("the server did not start")


def answer(port: int, vector: list[float]) -> bytes | None:
    """The whole answer to one search; None if it did not come, or not as a whole."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        body = json.dumps({"vector": vector}).encode()
        connection.request("POST", "/search?k=10", body, {"Content-Type": "application/json"})
        found = connection.getresponse()
        content = found.read()
        assert found.status == 200, content
        return content
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def killed_servers(home: Path, kills: int, chance: random.Random) -> None:
    """Kill servers under load, and compare what they answered and what they left."""
    index = home / "ivfpq"
    if not index.exists():
        assert ended(child(lambda: build("ivfpq", index))) == 0
    before, asked = contents(index), vectors("ivfpq").x[:64].tolist()
    pid, port = server(index)
    wanted = [answer(port, vector) for vector in asked]
    os.kill(pid, signal.SIGKILL)
    ended(pid)
    assert None not in wanted
    right = cut = 0
    for _ in range(kills):
        pid, port = server(index)
        stop, found = threading.Event(), []

        def ask(first: int, port: int = port, stop: threading.Event = stop, found: list = found) -> None:
            number = first
            while not stop.is_set():
                found.append((number % 64, answer(port, asked[number % 64])))
                number += 1

        clients = [threading.Thread(target=ask, args=(16 * first,)) for first in range(CLIENTS)]
        for client in clients:
            client.start()
        time.sleep(chance.uniform(0.0, 1.0))
        os.kill(pid, signal.SIGKILL)
        assert ended(pid) == -signal.SIGKILL
        stop.set()
        for client in clients:
            client.join()
        assert all(given in (None, wanted[number]) for number, given in found), "a wrong answer"
        right += sum(given is not None for _, given in found)
        cut += sum(given is None for _, given in found)
        assert contents(index) == before, "a killed server changed its index"
    print(f"{kills} servers killed: {right:,} right answers, {cut:,} that were cut off, no wrong one, index unchanged")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    chance = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as home:
        killed_builds(Path(home), args.kills, chance)
        killed_servers(Path(home), args.kills, chance)
    print(f"nothing was lost (seed {args.seed})")


if __name__ == "__main__":
    main()
