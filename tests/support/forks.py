"""Fork processes from one that has already imported torch, which is a hundred times faster than importing it again.

A fork runs code as `python -c` does, with its own arguments, environment and folder. Tests of the start itself
(commands, launchers, imports) need a real process.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PATHS = [str(HERE), str(HERE.parent), str(HERE.parents[1])]
"""Where processes find helpers, the oracles, and tests by their full names."""
MODULES = ("torch.distributed", "torch._dynamo", "scipy.stats", "accelerate", "runs")
"""Modules that training imports; other tests use the same ones to share its nursery."""
POSSIBLE = sys.platform == "linux"
"""On other systems a process that has loaded torch cannot be forked safely."""

# Each line asks for a fork, or whether one has ended; the code of a fork runs at the end of the script, so that it ends
# as any script does.
NURSERY = """
import gc, importlib, json, os, sys
sys.path[:0] = json.loads(sys.argv[1])
for name in json.loads(sys.argv[2]):
    importlib.import_module(name)
import torch
torch.set_num_threads(1)
gc.collect()
gc.freeze()  # what all forks share: each would search and copy all of it when it ends, which takes a second
answers = os.fdopen(os.dup(1), "w")

def answer(found):
    answers.write(json.dumps(found) + "\\n")
    answers.flush()

while line := sys.stdin.readline():
    asked = json.loads(line)
    if isinstance(asked, int):
        pid, status = os.waitpid(asked, os.WNOHANG)
        answer(os.waitstatus_to_exitcode(status) if pid else None)
        continue
    pid = os.fork()
    if not pid:
        break
    answer(pid)
else:
    sys.exit()
answers.close()
for descriptor, name in enumerate((os.devnull, asked["stdout"], asked["stderr"])):
    opened = os.open(name, os.O_WRONLY if descriptor else os.O_RDONLY)
    os.dup2(opened, descriptor)
    os.close(opened)
sys.stdin = open(0, encoding="utf-8", closefd=False)
os.environ.clear()
os.environ.update(asked["env"])
os.chdir(asked["cwd"])
sys.argv = ["-c", *asked["words"]]
torch.default_generator.seed()  # as in a new process: not the numbers of another fork
code = asked["code"]
for name in ("asked", "line", "pid", "answers", "answer"):
    globals().pop(name, None)
exec(compile(code, "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
"""


class Nursery:
    """A process that has imported `modules`, and forks.

    Args:
        modules: what it imports before any fork; `PATHS` are on its path.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", NURSERY, json.dumps(PATHS), json.dumps(list(modules))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        atexit.register(self.close)

    def ask(self, words: Any) -> Any:
        """One question and its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        """End it; forks that still run go on."""
        self.process.communicate()


@cache
def nursery(*modules: str) -> Nursery:
    """Get the nursery for these modules, which all tests of this process share."""
    return Nursery(modules)


class Fork:
    """A running fork, to be waited for like a `subprocess.Popen`.

    Args:
        code: Python, as after `python -c`.
        words: its arguments.
        env: its environment.
        cwd: its folder.
        modules: what has been imported before.
    """

    def __init__(
        self, code: str, words: Sequence[str], env: Mapping[str, str], cwd: Path | None, modules: Sequence[str]
    ) -> None:
        self.of = nursery(*modules)
        self.returncode: int | None = None
        self.shown = []
        for _ in range(2):
            descriptor, name = tempfile.mkstemp(prefix="fork-")
            os.close(descriptor)
            self.shown.append(Path(name))
        asked = {"code": code, "words": list(words), "env": dict(env), "cwd": str(cwd or Path.cwd())}
        self.pid = self.of.ask(asked | dict(zip(("stdout", "stderr"), map(str, self.shown), strict=True)))

    def poll(self) -> int | None:
        """Its exit code, or None while it runs; minus the signal that ended it, if one did."""
        if self.returncode is None:
            self.returncode = self.of.ask(self.pid)
        return self.returncode

    def communicate(self, timeout: float) -> tuple[bytes, bytes]:
        """Wait for its end; what it wrote to stdout and stderr."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                os.kill(self.pid, 9)
                raise subprocess.TimeoutExpired("a fork", timeout, *(path.read_bytes() for path in self.shown))
            time.sleep(0.01)
        out, err = (path.read_bytes() for path in self.shown)
        for path in self.shown:
            path.unlink()
        return out, err


def start(
    code: str,
    *words: str,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    modules: Sequence[str] = MODULES,
) -> Fork | subprocess.Popen[bytes]:
    """Start Python code in a process of its own; `modules` may have been imported before."""
    env = os.environ if env is None else env
    if POSSIBLE:
        return Fork(code, words, env, cwd, modules)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", code, *words], env=env, cwd=cwd, **pipes)


def ran(code: str, *words: str, timeout: float = 300, **told: Any) -> subprocess.CompletedProcess[str]:
    """Start Python code as `start` does, and wait for its end."""
    running = start(code, *words, **told)
    out, err = running.communicate(timeout=timeout)
    return subprocess.CompletedProcess(list(words), int(running.returncode or 0), out.decode(), err.decode())
