"""`Sharded`: a network whose weights, gradients and moments are split over the processes (FSDP2).

Between two uses a process holds 1/world of every weight. torch's `fully_shard` gathers a block's weights before it
computes and scatters their gradients after it. accelerate calls the same function, but on GPUs alone; called here it is
the same on CPUs, where the tests are.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

from nearfar._utils.checks import RECENT
from nearfar._utils.files import remove_files
from nearfar.train.folder import SHARD_FILES

__all__ = ["Sharded"]

CONTAINERS = (nn.ModuleList, nn.Sequential)


class Sharded:
    """A network in shards, and a whole copy of it for evaluation.

    With one process nothing is split, but checkpoints have the same form, so that a run may go on with another number.

    Args:
        model: the network; it is split in place.
        machine: the `accelerate.Accelerator`, or `Alone`.

    Attributes:
        model: the network to train.
        whole: a copy with the weights of the last `gather`: what is scored and kept as the best.
    """

    def __init__(self, model: nn.Module, machine: Any) -> None:
        self.whole, self._machine = copy.deepcopy(model), machine
        if machine.num_processes > 1:
            if machine.device.type == "cpu" and not RECENT:
                raise ValueError("train: training.shard on CPUs needs PyTorch 2.11 or newer; leave it out, or upgrade.")
            _split(model, init_device_mesh(machine.device.type, (machine.num_processes,)))
        # without DDP, which would copy the weights to every process
        self.model: nn.Module = machine.prepare_model(model, evaluation_mode=True).train()

    def gather(self) -> None:
        """Collect the present weights in `whole`; all processes call it together."""
        options = StateDictOptions(full_state_dict=True)
        self.whole.load_state_dict(get_model_state_dict(self.model, options=options))

    def save(self, folder: Path, step: int, loss: nn.Module, optimizer: Any, anchors: list[Any]) -> str:
        """Write weights and moments, each process its own; return the name of their folder, new for each step."""
        place = folder / f"shards-{step}"
        if self._machine.is_main_process:
            remove_files(place, *SHARD_FILES)  # of a process that was killed before `last.pt` named them
        self._machine.wait_for_everyone()
        with _alone_or_not():
            dcp.save(self._state(loss, optimizer, anchors), checkpoint_id=place)  # type: ignore[attr-defined]
        return place.name

    def load(self, folder: Path, name: str, loss: nn.Module, optimizer: Any, anchors: list[Any]) -> None:
        """Read what any number of processes wrote; the name must be one that `save` gives."""
        if not re.fullmatch(r"shards-\d+", name):
            raise ValueError(f"its shards are said to be in {name[:40]!r}")
        place = folder / name
        both = nn.ModuleDict({"model": self.model, "loss": loss})
        state = self._state(loss, optimizer, anchors)
        with _alone_or_not():
            dcp.load(state, checkpoint_id=place)  # type: ignore[attr-defined]
        set_state_dict(both, optimizer, model_state_dict=state["weights"], optim_state_dict=state["optimizer"])
        for mine, (_, read) in zip(anchors, sorted(state["anchors"].items()), strict=True):
            mine.copy_(read)

    def _state(self, loss: nn.Module, optimizer: Any, anchors: list[Any]) -> dict[str, Any]:
        weights, moments = get_state_dict(nn.ModuleDict({"model": self.model, "loss": loss}), optimizer)
        return {
            "weights": weights,
            "optimizer": moments,
            "anchors": {f"{place:06}": anchor for place, anchor in enumerate(anchors)},
        }


@contextmanager
def _alone_or_not() -> Iterator[None]:
    """Without torch's warning that one process reads and writes alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is .*unavailable or uninitialized")
        yield


def _split(model: nn.Module, mesh: Any) -> None:
    """Shard every block, then what is left."""
    from torch.distributed.fsdp import fully_shard

    for block in _blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The entries of the outermost lists of layers: what a network computes one after the other."""
    for child in module.children():
        inside = isinstance(module, CONTAINERS)
        if isinstance(child, CONTAINERS) or not inside:
            yield from _blocks(child)
        elif any(True for _ in child.parameters()):
            yield child
