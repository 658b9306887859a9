"""Faster calls of the network in training: recorded kernels that are replayed, and torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Replayed", "faster"]

WARM = 3
"""Passes before the recording, in which libraries choose their kernels."""


class Replayed(nn.Module):
    """A network whose forward and backward pass are recorded at the first batch and then replayed.

    A GPU spends less time on the kernels of a small batch than Python needs to start them; a recording (a CUDA graph)
    starts them all at once. Batches of another shape than the first, and calls without gradients, take the plain way.

    Args:
        model: the network; its parameters are used in place, so that optimizers and checkpoints see no difference.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._replay: Callable[[Tensor], Tensor] | None = None
        self._shape: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        """The embeddings [b, d]."""
        if self._replay is None and torch.is_grad_enabled() and self.training:
            self._replay, self._shape = self._recorded(x), tuple(x.shape)
        if self._replay is None or tuple(x.shape) != self._shape or not torch.is_grad_enabled() or not self.training:
            out: Tensor = self.model(x)
            return out
        return self._replay(x)

    def _recorded(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        """Record a pass; what the trial passes did to running statistics and random numbers is undone."""
        kept = [buffer.clone() for buffer in self.model.buffers()]
        random = torch.cuda.get_rng_state(x.device)
        shell = _Shell(self.model).train()
        found: Any = torch.cuda.make_graphed_callables(shell, (x.clone(),), num_warmup_iters=WARM)
        with torch.no_grad():
            for buffer, before in zip(self.model.buffers(), kept, strict=True):
                buffer.copy_(before)
        torch.cuda.set_rng_state(random, x.device)
        return lambda x: found(x).clone()  # the recording writes to the same place again


class _Shell(nn.Module):
    """Lends its forward to the recording, which replaces it: the network keeps its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x)
        return out


def faster(model: nn.Module, how: str, device: torch.device, processes: int = 1) -> nn.Module:
    """The network to call in training, by `training.compile` of a configuration.

    Args:
        model: as accelerate prepared it.
        how: "none"; "graphs" records the kernels (see `Replayed`), on a GPU; "inductor" lets torch.compile make new
            kernels, which takes about a minute, and records those on a GPU.
        device: where it runs.
        processes: of the run.

    Raises:
        ValueError: graphs with several processes, whose gradients meet during the backward pass.
    """
    if how == "none" or (how == "graphs" and device.type != "cuda"):
        return model
    if how == "graphs":
        if processes > 1:
            raise ValueError(
                f"train: training.compile graphs needs one process, but there are {processes}; set none or inductor."
            )
        return Replayed(model)
    mode = "reduce-overhead" if device.type == "cuda" and processes == 1 else None
    compiled: Any = torch.compile(model, mode=mode, dynamic=False)
    found: nn.Module = _Copied(compiled)
    return found


class _Copied(nn.Module):
    """Copies what a compiled network returns: its next call may write to the same place."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        if self.model.training:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        out: Tensor = self.model(x)
        return out.clone()
