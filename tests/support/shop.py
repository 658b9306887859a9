"""A small image search for tests: photographs, a network, an index, and a server for it."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from shell import COMMAND

from nearfar.data import transforms
from nearfar.evaluation import _fingerprint as fingerprint
from nearfar.models.saved import Network, Saved


def photographs(home: Path, classes: int = 4, each: int = 5) -> None:
    """Noisy copies of a pattern a class, as small JPEG files."""
    generator = np.random.default_rng(0)
    for label in range(classes):
        base = generator.integers(0, 256, (6, 6, 3))
        for number in range(each):
            pixels = np.clip(base + generator.normal(0, 20, base.shape), 0, 255).astype(np.uint8)
            path = home / f"kind{label}" / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).resize((48, 40)).save(path)


def network(path: Path, seed: int = 0) -> Path:
    """An untrained network for photographs of 32 x 32."""
    torch.manual_seed(seed)
    shape = Network("small", 8, (3, 32, 32))
    transform = transforms.get("photographs", False, (0.5,) * 3, (0.25,) * 3, size=32)
    return Saved(shape.make().eval(), shape, transform, ("a", "b")).save(path)


@dataclass
class Server:
    """A process of `nearfar serve`."""

    process: subprocess.Popen[str]
    port: int

    def ask(self, method: str, path: str, body: bytes | None = None, kind: str = "", **headers: str):
        """The status, the content type and the body of an answer, read as JSON where it is JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            words = {"Content-Type": kind} if kind else {}
            connection.request(
                method, path, body, words | {key.replace("_", "-"): value for key, value in headers.items()}
            )
            answer = connection.getresponse()
            content, form = answer.read(), answer.headers.get("content-type", "")
            return answer.status, dict(answer.headers), json.loads(content) if "json" in form else content
        finally:
            connection.close()


def serve(folder: Path, *words: object) -> Server:
    """Start a server on a free port, and wait until it says its address."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
    process = subprocess.Popen(
        [*COMMAND, "serve", *map(str, words), "--port", "0"],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )
    for line in process.stdout:
        if found := re.search(r"^serving .* at http://127\.0\.0\.1:(\d+) ", line):
            return Server(process, int(found[1]))
    raise AssertionError(process.stderr.read())


def other_mark() -> str:
    """The fingerprint of no network here."""
    return "0" * fingerprint.DIGITS
