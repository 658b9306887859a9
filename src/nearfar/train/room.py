"""What a run needs at least of memory and cores, checked before its pictures are decoded and its loss is made."""

from __future__ import annotations

import math
from typing import Any

import torch

from nearfar._utils.checks import check_workers
from nearfar._utils.memory import check_room
from nearfar.distributed.cross_batch_memory import bytes_of
from nearfar.runs.config import Config
from nearfar.runs.parts import shape_of_batch
from nearfar.train.suited import Input

__all__ = ["check_memory", "use_threads"]


def check_memory(config: Config, classes: int, inputs: Input, model: Any, machine: Any) -> None:
    """Refuse a batch or a cross-batch memory that the device cannot hold.

    Args:
        config: the configuration.
        classes: how many classes are learned from.
        inputs: the shape of a sample.
        model: the network.
        machine: the process, with its device.
    """
    shape, device = shape_of_batch(config, classes), machine.device
    sides = [shape[name] for name in ("classes", "samples", "batch_size") if name in shape]
    if all(isinstance(side, int) for side in sides):  # else the sampler has a sentence
        rows = math.prod(sides) // machine.num_processes
        what = f"batches with {rows:,} samples {list(inputs.shape)}"
        check_room("config", what, 4 * rows * math.prod(inputs.shape), device)
    size = config.training.cross_batch_memory
    what = f"training.cross_batch_memory of {size:,} rows of width {model.embedding_dim:,}"
    check_room("config", what, bytes_of(size, model.embedding_dim), device)


def use_threads(config: Config) -> None:
    """Set the number of threads, and refuse more of them, or of workers, than the machine bears."""
    threads = config.training.threads
    check_workers("config", "training.threads", threads or 1)
    check_workers("config", "data.workers", config.data.workers)
    if threads is not None:
        torch.set_num_threads(threads)
