"""Open a run folder: its configuration, its network with the best weights, its data."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from nearfar._utils.checkpoint import BEST
from nearfar._utils.checkpoint import load as load_checkpoint
from nearfar.data import DataSet, Samples
from nearfar.data._samples import Transform
from nearfar.models.saved import of_checkpoint
from nearfar.runs._config import load
from nearfar.runs._sections import Config
from nearfar.runs.changes import check_network
from nearfar.train._build import open_dataset


@dataclass(frozen=True, eq=False)
class Run:
    """A trained network, ready to compute embeddings.

    Attributes:
        folder: the run folder.
        config: its configuration.
        model: the network with its best weights, in evaluation mode.
        transform: the transform from a raw sample to the network's input.
        shape: the shape of that input.
    """

    folder: Path
    config: Config
    model: nn.Module
    transform: Transform
    shape: tuple[int, ...]

    def data(self) -> DataSet:
        """Open the data set that the network was trained and tested on."""
        return open_dataset(self.config.data)


def open_run(folder: Path | str, *, device: torch.device | str = "cpu") -> Run:
    """Open a run folder; the data need not be available.

    Raises:
        FileNotFoundError: the folder holds no configuration or no best weights.
        ValueError: the weights are damaged, or config.yaml now describes another network.
    """
    folder = Path(folder)
    if not (folder / "config.yaml").is_file():
        raise FileNotFoundError(f"run: {folder} holds no config.yaml; name the folder that `nearfar train` wrote.")
    config = load(folder / "config.yaml")
    path = folder / "checkpoints" / "best.pt"
    state = load_checkpoint(path, BEST)
    check_network(state["config"], config)
    saved = of_checkpoint(path, state)
    return Run(folder, config, saved.model.to(device), saved.transform, saved.network.inputs)


def samples_of_test(folder: Path) -> Samples | None:
    """The test samples of a run, in the order of embeddings.npz; None if the data are no longer available."""
    spec = load(folder / "config.yaml").data
    try:
        return open_dataset(spec, "skip").test
    except (OSError, ValueError):
        return None
