"""Export a model to ONNX, and believe it only after onnxruntime has given the same vectors."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from nearfar.evaluation.files import whole

TOLERANCE = 1e-4
"""Largest difference allowed, as a share of the largest entry of the vectors."""


@dataclass(frozen=True)
class Exported:
    """An exported model and how well it agrees.

    Attributes:
        path: the file.
        difference: largest difference between the two runtimes' vectors, as a share of their largest entry.
        tolerance: what was allowed.
        batches: the batch sizes that were compared.
        input: name of the input.
        output: name of the output.
    """

    path: Path
    difference: float
    tolerance: float
    batches: tuple[int, ...]
    input: str
    output: str

    def __str__(self) -> str:
        sizes = " and ".join(map(str, self.batches))
        return (
            f"{self.path}: onnxruntime agrees within {self.difference:.1e} of the largest entry "
            f"(allowed {self.tolerance:.0e}) on random batches of {sizes}"
        )


def export_onnx(
    model: nn.Module, example: Tensor, path: str | os.PathLike[str], *, tolerance: float = TOLERANCE, seed: int = 0
) -> Exported:
    """Write a model as ONNX with a free batch dimension, after onnxruntime has agreed on fresh random batches.

    Args:
        model: gives vectors [b, d] for a batch [b, ...]; exported in evaluation mode, left in the mode it came in.
        example: a batch [b, ...] of the right shape and type; b may be any.
        path: the file; it appears only if the check passes.
        tolerance: see `TOLERANCE`.
        seed: of the random batches.

    Raises:
        ImportError: onnx, onnxruntime or onnxscript is missing.
        ValueError: the runtimes disagree, or the model cannot be exported.
    """
    _needed()
    if not isinstance(example, Tensor) or example.ndim < 1 or not len(example):
        raise ValueError("export_onnx: example must be a batch [b, ...] of one sample or more.")
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        with whole(Path(path)) as temporary:
            _write(model, example, temporary)
            found = _compare(model, example, temporary, tolerance, seed)
    finally:
        for part, training in modes:
            part.training = training
    return Exported(Path(path), *found)


def _needed() -> None:
    for name in ("onnx", "onnxruntime", "onnxscript"):
        try:
            __import__(name)
        except ImportError:
            raise ImportError(
                f'export_onnx needs {name}, which is not installed; run pip install "nearfar[onnx]".'
            ) from None


def _write(model: nn.Module, example: Tensor, path: Path) -> None:
    two = torch.cat([example, example])[:2]  # a batch of one would be taken for a fixed size
    with _quiet():
        try:
            torch.onnx.export(
                model,
                (two,),
                str(path),
                input_names=["input"],
                output_names=["vectors"],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                dynamo=True,
                external_data=False,
                verbose=False,
            )
        except Exception as error:  # the exporter has many errors of its own, each pages long
            reason = str(error).strip().splitlines()
            raise ValueError(
                f"export_onnx: {type(model).__name__} could not be exported ({reason[0] if reason else error!r}); "
                "look for Python branches on tensor values or on the batch size."
            ) from error


def _compare(
    model: nn.Module, example: Tensor, path: Path, tolerance: float, seed: int
) -> tuple[float, float, tuple[int, ...], str, str]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    feed, out = session.get_inputs()[0].name, session.get_outputs()[0].name
    generator = torch.Generator().manual_seed(seed)
    sizes = (len(example) + 3, 1)
    worst = 0.0
    for size in sizes:
        batch = _random_like(example, size, generator)
        with torch.no_grad():
            wanted = model(batch).float().cpu().numpy()
        got = np.asarray(session.run([out], {feed: batch.cpu().numpy()})[0], dtype=np.float32)
        if got.shape != wanted.shape:
            raise ValueError(f"export_onnx: onnxruntime gives {got.shape} where the model gives {wanted.shape}.")
        worst = max(worst, float(np.abs(got - wanted).max() / max(np.abs(wanted).max(), 1e-12)))
    if not worst <= tolerance:
        raise ValueError(
            f"export_onnx: onnxruntime's vectors differ by {worst:.1e} of the largest entry, more than "
            f"{tolerance:.0e}; no file was written."
        )
    return worst, tolerance, sizes, feed, out


def _random_like(example: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """A batch of the spread and type of the example; whole numbers are drawn from those of the example."""
    shape = (size, *example.shape[1:])
    if example.is_floating_point():
        spread = float(example.float().std()) if example.numel() > 1 else 1.0
        noise = torch.randn(shape, generator=generator) * (spread or 1.0) + float(example.float().mean())
        return noise.to(example)
    pick = torch.randint(example.numel(), shape, generator=generator)
    return example.flatten()[pick.to(example.device)]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's chatter: its warnings are about itself."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
