"""`--processes N`: run a command in N processes by torch's elastic launcher; and the rank of a process in a launcher.

Processes find each other on loopback at a free port. Under a launcher (this one, torchrun, or any that sets WORLD_SIZE
and RANK), only the first rank prints and writes.
"""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from nearfar._utils.checks import check_workers, usable_cores
from nearfar._utils.console import say

if TYPE_CHECKING:
    from nearfar._utils.process_group import ProcessGroup

Processes = Annotated[
    int | None, typer.Option("--processes", min=1, help="Number of processes to start on this machine.")
]
Restarts = Annotated[
    int, typer.Option("--restarts", min=0, help="With --processes: how often to restart them after one died.")
]
OWN = ("--processes", "--restarts")
PATIENCE = "300"  # seconds that processes get to end after Ctrl-C, since training ends at its next checkpoint


def place(variables: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Rank and number of processes, from the launcher's variables; (0, 1) without a launcher.

    >>> place({"WORLD_SIZE": "4", "RANK": "3"}), place({})
    ((3, 4), (0, 1))
    """
    world, rank = variables.get("WORLD_SIZE", "1"), variables.get("RANK")
    if not world.isdigit() or int(world) < 2:
        return 0, 1
    if rank is None or not rank.isdigit() or int(rank) >= int(world):
        raise ValueError(
            f"the environment names {world} processes (WORLD_SIZE), but the RANK of this one is {rank}; unset "
            "WORLD_SIZE, or start them with --processes or torchrun."
        )
    return int(rank), int(world)


def is_first() -> bool:
    """Whether this process may print and write: it is alone, or the first of its launcher."""
    return place()[0] == 0


def restarts(variables: Mapping[str, str] = os.environ) -> int:
    """How often the launcher has restarted these processes after one of them died."""
    count = variables.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(count) if count.isdigit() else 0


def name_of_launch(variables: Mapping[str, str] = os.environ) -> str:
    """A text that all processes of one launch have in common, and no other launch."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    return " ".join(variables.get(name, "") for name in names)


@contextmanager
def share_evaluation(owner: str) -> Iterator[ProcessGroup]:
    """Share the evaluations within the block with the other ranks of a launcher, if there is one."""
    from nearfar._utils.process_group import ALONE

    if place()[1] == 1:
        yield ALONE
        return
    import torch.distributed as dist

    from nearfar._utils.process_group import Group
    from nearfar.evaluation.parallel import split_over

    if not dist.is_initialized():
        dist.init_process_group("gloo")  # left by `nearfar.cli.main.main`
    group = Group(owner)
    with split_over(group):
        yield group


def launch(processes: int | None, again: int = 0, more: Sequence[str] = ()) -> bool:
    """Run this command in several processes, if asked to; returns False if this process is to run it.

    After one of them died, all are restarted up to `again` times, then SystemExit is raised. Each command gets the
    words `more` besides those of this process.
    """
    if processes is None and again:
        raise ValueError("--restarts needs --processes; name both.")
    if processes is None or (processes == 1 and not again):
        return False
    check_workers("launch", "--processes", processes)
    named = next((name for name in ("TORCHELASTIC_RUN_ID", "WORLD_SIZE", "LOCAL_RANK") if name in os.environ), None)
    if named is not None:
        raise ValueError(
            f"--processes starts processes by itself, but a launcher has started this one ({named} is set); "
            "leave one of them out."
        )
    _run(processes, again, [*words_of_a_rank(sys.argv[1:]), *more])
    return True


def words_of_a_rank(words: Sequence[str]) -> list[str]:
    """The command without the options that start processes.

    >>> words_of_a_rank(["train", "x.yaml", "--processes", "2", "--run", "r", "--restarts=1"])
    ['train', 'x.yaml', '--run', 'r']
    """
    found, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        if word in OWN:
            rest = rest[1:]
        elif not word.startswith(tuple(f"{name}=" for name in OWN)):
            found.append(word)
    return found


def _run(processes: int, again: int, words: Sequence[str]) -> None:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the processes print their own errors
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // processes)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", PATIENCE)
    # a store that outlives a restart gives new processes the addresses of dead ones (torch 2.13)
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=again,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "nearfar", *words)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        how = f"was ended by signal {-failure.exitcode}" if failure.exitcode < 0 else f"ended with {failure.exitcode}"
        say(f"nearfar {words[0]}: rank {rank} of {processes} {how}; see above.", error=True)
        raise SystemExit(1) from None
    except SignalException as stop:
        raise SystemExit(128 + int(stop.sigval)) from None
