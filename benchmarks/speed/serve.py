"""`nearfar serve` under a fixed load on loopback: 2,000 searches, 16 at a time; times, errors, memory.

    python benchmarks/speed/serve.py                          a minute on two cores, most of it to build the index
    python benchmarks/speed/serve.py --requests 200           a few seconds of load

The index holds 100,000 x 64 vectors (ivfpq, drawn around 1,000 centers) and an untrained small network for photographs
of 64 x 64; a request is a JPEG of 320 x 240, or one in four times a vector. Client and server share the machine, so the
times include both. Memory is what the server reports in /metrics: resident bytes after the first 200 requests, and at
the end.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy is loaded; the server's searches run in threads

import argparse
import http.client
import io
import json
import platform
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from nearfar.data import transforms
from nearfar.evaluation import Vectors, build_index
from nearfar.evaluation._preprocessing import fingerprint_of
from nearfar.models.saved import Network, Saved

RESULTS = Path(__file__).parents[1] / "results"
WIDTH, WARM = 64, 200


def shop(home: Path, rows: int, kind: str) -> tuple[Path, float]:
    """An index with its network, and the seconds that building it took."""
    torch.manual_seed(0)
    shape = Network("small", WIDTH, (3, 64, 64))
    transform = transforms.get("photographs", False, (0.5,) * 3, (0.25,) * 3, size=64)
    saved = Saved(shape.make().eval(), shape, transform, ("a",))
    saved.save(home / "network.safetensors")
    centers = torch.randn(1000, WIDTH)
    x = centers[torch.randint(1000, (rows,))] + 0.6 * torch.randn(rows, WIDTH)
    names = [f"article/{row:07d}.jpg" for row in range(rows)]
    vectors = Vectors(x, name=names, fingerprint=fingerprint_of(saved.model, transform))
    start = time.perf_counter()
    build_index(home / "shop.index", vectors, kind=kind, network=home / "network.safetensors")
    return home / "shop.index", time.perf_counter() - start


def start_server(index: Path) -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-m", "nearfar", "serve", str(index), "--port", "0", "--seconds", "600"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8")
    for line in process.stdout:
        if found := re.search(r"at http://127\.0\.0\.1:(\d+) ", line):
            return process, int(found[1])
    raise SystemExit("the server did not start")


def bodies(count: int = 32) -> list[tuple[str, bytes]]:
    """Request bodies: JPEG files, and every fourth a vector."""
    generator = np.random.default_rng(0)
    found = []
    for number in range(count):
        if number % 4 == 3:
            vector = generator.normal(size=WIDTH).tolist()
            found.append(("application/json", json.dumps({"vector": vector}).encode()))
            continue
        stream = io.BytesIO()
        small = Image.fromarray(generator.integers(0, 256, (15, 20, 3), dtype=np.uint8))
        small.resize((320, 240)).save(stream, "JPEG", quality=85)
        found.append(("image/jpeg", stream.getvalue()))
    return found


def send_requests(port: int, requests: int, at_once: int) -> tuple[list[float], list[str], float]:
    """Send requests over persistent connections; return the seconds of each, the errors, and the total seconds."""
    sent, seconds, errors, turn = bodies(), [], [], iter(range(requests))
    lock = threading.Lock()

    def client() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        while True:
            with lock:
                number = next(turn, None)
            if number is None:
                break
            kind, body = sent[number % len(sent)]
            start = time.perf_counter()
            try:
                connection.request("POST", "/search?k=10", body, {"Content-Type": kind})
                answer = connection.getresponse()
                found = json.loads(answer.read())
                wrong = "" if answer.status == 200 and len(found["results"]) == 10 else str(found)
            except (OSError, ValueError, http.client.HTTPException) as error:
                wrong = f"{type(error).__name__}: {error}"
                connection.close()
            with lock:
                seconds.append(time.perf_counter() - start)
                if wrong:
                    errors.append(wrong)
        connection.close()

    threads = [threading.Thread(target=client) for _ in range(at_once)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seconds, errors, time.perf_counter() - start


def memory(port: int) -> int:
    """Resident bytes of the server, from its metrics."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    found = re.search(r"^process_resident_memory_bytes (\S+)$", text, flags=re.MULTILINE)
    return int(float(found[1])) if found else 0  # Linux alone tells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--kind", default="ivfpq", choices=["exact", "ivf", "ivfpq", "hnsw"])
    parser.add_argument("--out", type=Path, default=RESULTS / "serve_cpu.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        index, built = shop(Path(home), args.rows, args.kind)
        process, port = start_server(index)
        try:
            send_requests(port, WARM, args.at_once)
            before = memory(port)
            seconds, errors, whole = send_requests(port, args.requests, args.at_once)
            after = memory(port)
        finally:
            process.terminate()
            process.wait()
    ms = 1000 * np.array(seconds)
    report = {
        "config": {name: getattr(args, name) for name in ("requests", "at_once", "rows", "kind")} | {"width": WIDTH},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "build_s": built,
        "p50_ms": float(np.percentile(ms, 50)),
        "p99_ms": float(np.percentile(ms, 99)),
        "requests_per_s": len(ms) / whole,
        "errors": len(errors),
        "memory_before_mb": before / 1e6,
        "memory_after_mb": after / 1e6,
    }
    for wrong in errors[:3]:
        print(wrong)
    args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    args.out.with_suffix(".md").write_text(table(report), encoding="utf-8")
    print(table(report))


def table(report: dict) -> str:
    how = report["config"]
    about = (
        f"{how['requests']:,} searches, {how['at_once']} at a time, in {how['rows']:,} x {how['width']} ({how['kind']})"
    )
    head = "| p50 | p99 | searches / s | errors | server's memory before | after |\n|---|---|---|---|---|---|\n"
    times = f"| {report['p50_ms']:.0f} ms | {report['p99_ms']:.0f} ms | {report['requests_per_s']:.0f} "
    rest = f"| {report['errors']} | {report['memory_before_mb']:.0f} MB | {report['memory_after_mb']:.0f} MB |\n"
    return f"`nearfar serve` on loopback, client and server on two cores: {about}.\n\n{head}{times}{rest}"


if __name__ == "__main__":
    main()
