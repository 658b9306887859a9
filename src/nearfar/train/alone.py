"""`Alone`: the device and the precision of a run in one process; several processes need accelerate."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Alone"]

MIXED = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Alone:
    """What the trainer asks of an `accelerate.Accelerator`, of a process that has no others.

    Args:
        device: where the run computes.
        precision: as in the configuration.

    Raises:
        ValueError: the device does not compute in this precision.
    """

    num_processes, process_index, is_main_process = 1, 0, True

    def __init__(self, device: torch.device, precision: str) -> None:
        if precision == "fp16" and device.type == "cpu":
            raise ValueError("train: training.precision fp16 needs a GPU; take float32, or bf16.")
        if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
            raise ValueError("train: training.precision bf16 needs a newer GPU; take float32, or fp16.")
        self.device, self._mixed = device, MIXED.get(precision)
        self.scaler = torch.amp.GradScaler(device.type) if precision == "fp16" else None

    def prepare_model(self, model: nn.Module, evaluation_mode: bool = False) -> nn.Module:
        """Let the network compute in mixed precision, if wanted; what it returns is in float32."""
        if self._mixed is not None:
            plain, cast = type(model).forward, torch.autocast(self.device.type, dtype=self._mixed)

            def forward(this: nn.Module, *args: Any, **options: Any) -> Tensor:
                with cast:
                    found: Tensor = plain(this, *args, **options)
                return found.float()

            model.forward = MethodType(forward, model)
        return model

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """The network itself."""
        return model

    def wait_for_everyone(self) -> None:
        """Return at once: there are no others."""
