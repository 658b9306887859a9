"""The processes of a run: a single one without accelerate, or several, on whose number all sources must agree."""

import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nearfar._utils.extras import need
from nearfar._utils.process_group import gather_objects

T = TypeVar("T")

MIXED = {"bf16": torch.bfloat16, "fp16": torch.float16}
SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
"""Environment variables of launchers (torchrun, and the MPIs that accelerate supports) for world size and rank."""


class SingleProcess:
    """The part of `accelerate.Accelerator` that training uses, for a run in one process, without accelerate."""

    num_processes, process_index, is_main_process = 1, 0, True

    def __init__(self, device: torch.device, precision: str) -> None:
        if precision == "fp16" and device.type == "cpu":
            raise ValueError("train: training.precision fp16 needs a GPU; take float32, or bf16.")
        if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
            raise ValueError("train: training.precision bf16 needs a newer GPU; take float32, or fp16.")
        self.device, self._mixed = device, MIXED.get(precision)
        self.scaler = torch.amp.GradScaler(device.type) if precision == "fp16" else None

    def prepare_model(self, model: nn.Module, evaluation_mode: bool = False) -> nn.Module:
        """Wrap the forward pass in autocast if the precision is mixed; the output is float32."""
        if self._mixed is not None:
            plain, cast = type(model).forward, torch.autocast(self.device.type, dtype=self._mixed)

            def forward(this: nn.Module, *args: Any, **options: Any) -> Tensor:
                with cast:
                    found: Tensor = plain(this, *args, **options)
                return found.float()

            model.forward = MethodType(forward, model)
        return model

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """Return the network: there is no wrapper."""
        return model

    def wait_for_everyone(self) -> None:
        """Return at once: there is no other process."""


def run_on_first_rank(machine: Any, act: Callable[[], T]) -> T:
    """Run `act` on the first rank and return its result on every rank; if it fails, every rank raises the error."""
    if machine.num_processes == 1:
        return act()
    found: list[Any] = [None, None]
    if machine.is_main_process:
        try:
            found = [act(), None]
        except (OSError, ValueError) as error:
            found = [None, error]
    dist.broadcast_object_list(found, src=0)
    if found[1] is not None:
        raise found[1]
    result: T = found[0]
    return result


Count = tuple[int | None, int | None]
"""A number of processes and the rank of this one; None if a source does not specify it."""


def count_processes(machine: Any) -> dict[str, Count]:
    """Count the processes by each source: torch.distributed, accelerate and the variables of the launcher."""
    has_group = dist.is_available() and dist.is_initialized()
    return {
        "torch.distributed": (dist.get_world_size(), dist.get_rank()) if has_group else (1, 0),
        "accelerate": (machine.num_processes, machine.process_index),
        "the environment": (_number(SIZES), _number(RANKS)),
    }


def have_same_count(counts: Iterable[Count]) -> bool:
    """Whether all counts have the same size and rank, apart from those that are None."""
    return all(len(set(values) - {None}) == 1 for values in zip(*counts, strict=True))


def begin(precision: str) -> Any:
    """Create the `Accelerator` of this process, and check that all sources agree on the number of processes.

    A process without a launcher gets a `SingleProcess` and does not need accelerate. Without a GPU accelerate is told
    to use the CPU: under torchrun it would otherwise treat each process as a separate run.

    Raises:
        RuntimeError: the sources do not agree, or the other processes were not found.
        ImportError: a launcher started this process, and accelerate is not installed.
    """
    _check_environment(os.environ)
    if not _has_launcher(os.environ):
        return SingleProcess(_device(), precision)
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
    _compare(count_processes(machine))
    return machine


def describe(machine: Any) -> str:
    """Print how many processes train, and on which devices."""
    count = machine.num_processes
    return f"{count} process{'' if count == 1 else 'es'} on {machine.device.type}"


def _check_environment(variables: Mapping[str, str]) -> None:
    """Refuse environment variables of several processes without a rank, or with fewer GPUs than processes."""
    size, rank = _number(SIZES, variables), _number(RANKS, variables)
    if size is not None and size > 1 and rank is None:
        raise RuntimeError(
            f"train: the environment speaks of {size} processes (WORLD_SIZE), but this one has no RANK; unset "
            f"WORLD_SIZE to train in one process, or {_advice(size)}"
        )
    # accelerate launch sets an address only if it was asked for several processes; on a CPU it then starts a single
    # one, without a rank
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


def _compare(counts: dict[str, Count]) -> None:
    """Raise an error on every process of the group if the counts of one differ."""
    for rank, theirs in enumerate(gather_objects("train", counts)):
        if not have_same_count(theirs.values()):
            words = ", ".join(
                f"{name} counts " + ("nothing" if size is None else f"{size} (rank {'unknown' if at is None else at})")
                for name, (size, at) in theirs.items()
            )
            raise RuntimeError(
                f"train: there is no one number of processes: on rank {rank} {words}; "
                f"{_advice(max(size or 1 for size, _ in theirs.values()))}"
            )


def _advice(count: int) -> str:
    """The command that starts `count` processes, with the arguments of this one."""
    named = os.path.basename(sys.argv[0]) in ("nearfar", "__main__.py")
    what = f"-m -- nearfar {shlex.join(sys.argv[1:])}" if named else "your_script.py"
    cpu = "" if torch.cuda.is_available() or not _has_device() else "ACCELERATE_USE_CPU=true "
    return f"start several with: {cpu}torchrun --nproc_per_node {count} {what}"


def _has_launcher(variables: Mapping[str, str]) -> bool:
    """Whether torchrun, accelerate launch or MPI started this process, or it has a process group."""
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
    """The value of the first of these variables that is an integer; None if there is none."""
    return next((int(variables[name]) for name in names if variables.get(name, "").isdigit()), None)
