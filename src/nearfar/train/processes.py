"""The processes of a run: torch.distributed, accelerate and the launcher must agree on their number."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from nearfar._utils.extras import need
from nearfar.train.alone import Alone

__all__ = ["Counts", "begin", "words"]

SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
"""Environment variables of launchers (torchrun, and the MPIs that accelerate supports) for world size and rank."""


@dataclass(frozen=True)
class Counts:
    """The number of processes and the rank of this one, according to each source; None if a source does not say.

    Attributes:
        group: torch.distributed; one process where there is no group.
        accelerate: the `Accelerator`, or `Alone`.
        environment: the launcher's variables.
    """

    group: tuple[int, int]
    accelerate: tuple[int, int]
    environment: tuple[int | None, int | None]

    @staticmethod
    def of(machine: Any) -> Counts:
        """Read the present counts."""
        there = dist.is_available() and dist.is_initialized()
        return Counts(
            (dist.get_world_size(), dist.get_rank()) if there else (1, 0),
            (machine.num_processes, machine.process_index),
            (_number(SIZES), _number(RANKS)),
        )

    @property
    def agree(self) -> bool:
        """Whether all sources that say something agree."""
        stated = (y if x is None else x for x, y in zip(self.environment, self.accelerate, strict=True))
        return self.group == self.accelerate == tuple(stated)

    def words(self) -> str:
        """The counts of each source as text."""
        size, rank = self.environment
        named = "nothing" if size is None else f"{size} (rank {'unknown' if rank is None else rank})"
        return (
            f"torch.distributed counts {self.group[0]} (rank {self.group[1]}), accelerate {self.accelerate[0]} "
            f"(rank {self.accelerate[1]}), the environment {named}"
        )


def begin(precision: str) -> Any:
    """Create the `Accelerator` of this process, and check that all sources agree on the number of processes.

    A process without a launcher is `Alone` and does without accelerate. Without a GPU accelerate is set to use the CPU:
    under torchrun it would otherwise take each process for a run of its own, while `Distributed` sees them all.

    Raises:
        RuntimeError: they do not agree, or the other processes were not found.
        ImportError: a launcher started this process, and accelerate is not installed.
    """
    _check_environment(os.environ)
    if not _has_launcher(os.environ):
        return Alone(_device(), precision)
    accelerate = need("accelerate", "train", "processes", instead="train in one process, without a launcher")
    accelerate.state.AcceleratorState._reset_state()  # a second run in one process may ask for another precision
    try:
        machine = accelerate.Accelerator(
            cpu=not _has_device(), mixed_precision="no" if precision.startswith("float") else precision
        )
    except (dist.DistError, RuntimeError) as problem:
        size, rank = _number(SIZES), _number(RANKS)
        if (size or 1) == 1:
            raise
        words = str(problem).splitlines()[0]
        raise RuntimeError(
            f"train: rank {rank} of {size} did not find the others ({words}); {_advice(size or 2)}"
        ) from problem
    _compare(Counts.of(machine))
    return machine


def words(machine: Any) -> str:
    """Describe how many processes train, and on which devices."""
    count = machine.num_processes
    return f"{count} process{'' if count == 1 else 'es'} on {machine.device.type}"


def _check_environment(variables: Mapping[str, str]) -> None:
    """Refuse environment variables that announce several processes but give this one no rank."""
    size, rank = _number(SIZES, variables), _number(RANKS, variables)
    if size is not None and size > 1 and rank is None:
        raise RuntimeError(
            f"train: the environment speaks of {size} processes (WORLD_SIZE), but this one has no RANK; unset "
            f"WORLD_SIZE to train in one process, or {_advice(size)}"
        )
    # accelerate launch gives an address only where it was asked for several processes; on a CPU it starts one all
    # the same, and gives it no rank
    if "ACCELERATE_DYNAMO_BACKEND" in variables and "MASTER_ADDR" in variables and size is None and rank is None:
        raise RuntimeError(
            "train: accelerate launch was asked for several processes (it set MASTER_ADDR) but started 1, which has "
            f"no RANK; leave --num_processes out to train in one, or {_advice(2)}"
        )
    local, devices = _number(("LOCAL_WORLD_SIZE",), variables), torch.cuda.device_count()
    on_cpu = variables.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "y", "on", "t")
    if local is not None and 0 < devices < local and not on_cpu:
        raise RuntimeError(
            f"train: {local} processes were started on a machine with {devices} GPU{'' if devices == 1 else 's'}, and "
            f"each needs its own; {_advice(devices)}"
        )


def _compare(counts: Counts) -> None:
    """Raise an error on every process of the group if the counts of one differ."""
    everyone: list[Counts] = [counts]
    if counts.group[0] > 1:
        heard: list[Any] = [None] * counts.group[0]
        dist.all_gather_object(heard, counts)
        everyone = heard
    for rank, theirs in enumerate(everyone):
        if not theirs.agree:
            raise RuntimeError(
                f"train: there is no one number of processes: on rank {rank} {theirs.words()}; "
                f"{_advice(max(theirs.group[0], theirs.accelerate[0], theirs.environment[0] or 1))}"
            )


def _advice(count: int) -> str:
    """The command that starts `count` processes, with the arguments of this one."""
    named = os.path.basename(sys.argv[0]) in ("nearfar", "__main__.py")
    what = f"-m -- nearfar {shlex.join(sys.argv[1:])}" if named else "your_script.py"
    cpu = "" if torch.cuda.is_available() or not _has_device() else "ACCELERATE_USE_CPU=true "
    return f"start several with: {cpu}torchrun --nproc_per_node {count} {what}"


def _has_launcher(variables: Mapping[str, str]) -> bool:
    """Whether this process was started by torchrun, accelerate launch or MPI, or has joined a group by itself."""
    joined = dist.is_available() and dist.is_initialized()
    return joined or any(name in SIZES or name.startswith("ACCELERATE_") for name in variables)


def _device() -> torch.device:
    """The device of a process without a launcher."""
    if not _has_device():
        return torch.device("cpu")
    return torch.device("mps" if torch.backends.mps.is_available() else "cuda" if torch.cuda.is_available() else "xpu")


def _has_device() -> bool:
    """Whether there is an accelerator besides the CPU."""
    return torch.cuda.is_available() or torch.backends.mps.is_available() or torch.xpu.is_available()


def _number(names: tuple[str, ...], variables: Mapping[str, str] = os.environ) -> int | None:
    """The first of these variables that is an integer."""
    return next((int(variables[name]) for name in names if variables.get(name, "").isdigit()), None)
