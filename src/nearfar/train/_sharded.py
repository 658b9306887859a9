"""`Sharded`: a network whose weights, gradients and moments are split over the processes (FSDP2).

Each process holds 1/world of every weight. torch's `fully_shard` gathers the weights of a block before the block is
computed, and scatters their gradients afterwards. accelerate calls the same function, but only on GPUs; calling it here
also covers CPUs, on which it is tested.
"""

import copy
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh

from nearfar._utils.checks import RECENT
from nearfar._utils.files import remove_files
from nearfar.train._folder import SHARD_FILES

CONTAINERS = (nn.ModuleList, nn.Sequential)


class Sharded:
    """A network split in place into shards (`model`, to train), and a `whole` copy of its weights at the last `gather`.

    With one process nothing is split, but checkpoints have the same format, so a run can be resumed with any number of
    processes.
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
        """Copy the present weights to `whole`; all processes must call it."""
        options = states.StateDictOptions(full_state_dict=True)
        self.whole.load_state_dict(states.get_model_state_dict(self.model, options=options))

    def save(self, folder: Path, step: int, loss: nn.Module, optimizer: Any, anchors: list[Any]) -> str:
        """Write weights and optimizer state, each process its own part; return the name of the step's folder."""
        place = folder / f"shards-{step}"
        if self._machine.is_main_process:
            remove_files(place, *SHARD_FILES)  # left by a run that was killed before `last.pt` named them
        self._machine.wait_for_everyone()
        with _without_warning():
            dcp.save(self._state(loss, optimizer, anchors), checkpoint_id=place)  # type: ignore[attr-defined]
        return place.name

    def load(self, folder: Path, name: str, loss: nn.Module, optimizer: Any, anchors: list[Any]) -> None:
        """Read what any number of processes wrote to the folder `name`, a name that `save` returned."""
        if not re.fullmatch(r"shards-\d+", name):
            raise ValueError(f"its shards are said to be in {name[:40]!r}")
        place = folder / name
        both = nn.ModuleDict({"model": self.model, "loss": loss})
        state = self._state(loss, optimizer, anchors)
        with _without_warning():
            dcp.load(state, checkpoint_id=place)  # type: ignore[attr-defined]
        states.set_state_dict(both, optimizer, model_state_dict=state["weights"], optim_state_dict=state["optimizer"])
        for mine, (_, read) in zip(anchors, sorted(state["anchors"].items()), strict=True):
            mine.copy_(read)

    def _state(self, loss: nn.Module, optimizer: Any, anchors: list[Any]) -> dict[str, Any]:
        weights, moments = states.get_state_dict(nn.ModuleDict({"model": self.model, "loss": loss}), optimizer)
        return {
            "weights": weights,
            "optimizer": moments,
            "anchors": {f"{place:06}": anchor for place, anchor in enumerate(anchors)},
        }


@contextmanager
def _without_warning() -> Iterator[None]:
    """Suppress torch's warning that a single process reads or writes a checkpoint."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is .*unavailable or uninitialized")
        yield


def _split(model: nn.Module, mesh: Any) -> None:
    """Shard every block, then the remaining parameters."""
    from torch.distributed.fsdp import fully_shard

    for block in _blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the entries of the outermost lists of layers."""
    for child in module.children():
        inside = isinstance(module, CONTAINERS)
        if isinstance(child, CONTAINERS) or not inside:
            yield from _blocks(child)
        elif any(True for _ in child.parameters()):
            yield child
