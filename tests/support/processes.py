"""Start real processes on loopback that run a function of a module with gloo, and collect their results."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import forks
import torch
from torch.distributed import TCPStore

HERE = Path(__file__).parent
START = """
import os, sys
sys.path[:0] = sys.argv[1].split(os.pathsep)
from datetime import timedelta
from importlib import import_module
import torch, torch.distributed as dist
torch.set_num_threads(1)
module, name, out, seconds = sys.argv[2:6]
dist.init_process_group("gloo", timeout=timedelta(seconds=float(seconds)))
try:
    found = getattr(import_module(module), name)(dist.get_rank(), dist.get_world_size())
    torch.save(found, f"{out}/{dist.get_rank()}.pt")
    dist.barrier()
finally:  # also when it fails, so that what is seen of it is its error, and not that gloo's threads aborted it
    dist.destroy_process_group()
"""


Process = forks.Fork | subprocess.Popen[bytes]
STORES = WeakKeyDictionary[Process, TCPStore]()
"""The store of each rank, which listens as long as one of them is referred to."""


def environment(world: int, port: int, *, gpu: bool = False) -> dict[str, str]:
    """Environment of `world` processes that form a group, without their ranks; GPUs are hidden unless `gpu`."""
    return {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
    } | ({} if gpu else {"CUDA_VISIBLE_DEVICES": ""})


def start(code: str, *words: str, world: int, gpu: bool = False) -> list[Process]:
    """Start the same code as rank 0, 1, ... of `world`, in forks unless it uses a GPU.

    As with torchrun, the store in which the ranks find each other belongs to the process that starts them. If rank 0
    opened it on a port that was free before, another process could take this port first: rank 0 would fail, and rank 1
    wait for minutes.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = environment(world, store.port, gpu=gpu)
    told = [{**shared, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(world)]
    ranks: list[Process] = []
    for env in told:
        if gpu:
            ranks.append(subprocess.Popen([sys.executable, "-c", code, *words], env=env, stderr=subprocess.PIPE))
        else:
            ranks.append(forks.start(code, *words, env=env))
        STORES[ranks[-1]] = store
    return ranks


def ended(ranks: Sequence[Process], seconds: float) -> list[str]:
    """Wait for the ranks and return what each wrote to stderr; one that is late is killed and keeps no exit code 0."""
    errors = []
    for rank in ranks:
        try:
            errors.append(rank.communicate(timeout=seconds)[1].decode())
        except subprocess.TimeoutExpired as late:
            with suppress(ProcessLookupError):
                os.kill(rank.pid, 9)
            errors.append(f"still running after {seconds:g} s\n{(late.stderr or b'').decode()}")
    return errors


def together(module: str, name: str, world: int, folder: Path, seconds: float = 60, *, gpu: bool = False) -> list[Any]:
    """Run `module.name(rank, world)` on each rank and return the results in order."""
    ranks = start(START, os.pathsep.join(forks.PATHS), module, name, str(folder), str(seconds), world=world, gpu=gpu)
    errors = ended(ranks, 400)
    codes = [process.returncode for process in ranks]
    assert codes == [0] * world, "\n".join([f"exit codes {codes}", *errors])
    return [torch.load(folder / f"{r}.pt", weights_only=False) for r in range(world)]


def plain_pytest(**more: str) -> dict[str, str]:
    """Environment for a pytest that a test starts, without options and plugins of the running one."""
    outside = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    return {**outside, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **more}


def interpreted(file: str) -> str:
    """Run a test file under Triton's interpreter in its own process, check that it passes, and return its output.

    Triton reads TRITON_INTERPRET when it is imported.
    """
    env = plain_pytest(TRITON_INTERPRET="1")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", file]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


def run_python(folder: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder that may hold its own copy of the sources."""
    env = plain_pytest(**{"PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1", **more})
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, encoding="utf-8", timeout=900, check=False)


def count_passed(found: subprocess.CompletedProcess[str]) -> int:
    """Check that a pytest succeeded, and return how many tests passed."""
    assert found.returncode == 0, found.stdout[-3000:]
    return int(re.findall(r"(\d+) passed", found.stdout)[-1])
