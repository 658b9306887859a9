"""Export a model to ONNX, and check that onnxruntime gives the same vectors as torch."""

import io
import json
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nearfar._utils.checks import RECENT, check_seed
from nearfar._utils.extras import need
from nearfar._utils.files import atomic_write
from nearfar.evaluation._embed import evaluation_mode
from nearfar.evaluation._fingerprint import of_weights

TOLERANCE = 1e-4  # largest difference allowed, as a share of the largest entry of the vectors
TRANSFORM, FINGERPRINT = "nearfar.transform", "nearfar.fingerprint"
"""Keys of the metadata: the preprocessing, and the fingerprint of the network."""


@dataclass(frozen=True)
class Exported:
    """An exported model and how well its vectors agree with torch.

    Attributes:
        path: the file.
        difference: largest difference between the two runtimes' vectors, relative to their largest entry.
        tolerance: the largest difference allowed.
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
    model: nn.Module,
    example: Tensor,
    path: str | os.PathLike[str],
    *,
    transform: Any = None,
    tolerance: float = TOLERANCE,
    seed: int = 0,
) -> Exported:
    """Write a model as ONNX with a dynamic batch dimension, if onnxruntime agrees with it on random batches.

    Args:
        model: maps a batch [b, ...] to vectors [b, d]; exported in evaluation mode, its own mode is restored.
        example: a batch [b, ...] of the right shape and type; b may be any.
        path: the file; it is written only if the check passes.
        transform: the evaluation transform from a sample to the model's input, one of `nearfar.data.transforms`. Its
            mean and standard deviation become part of the graph, which then takes pixels (uint8, 0..255) if it is for
            photographs; size and crop are stored in the metadata, where `nearfar embed` reads them.
        tolerance: see `TOLERANCE`.
        seed: seed of the random batches.

    Raises:
        ImportError: onnx, onnxruntime or onnxscript is missing, or PyTorch is too old.
        ValueError: the runtimes disagree, or the model cannot be exported.
    """
    _check_packages()
    check_seed("export_onnx", seed)
    if not isinstance(example, Tensor) or example.ndim < 1 or not len(example):
        raise ValueError("export_onnx: example must be a batch [b, ...] of one sample or more.")
    graph, example, about = _with_preprocessing(model, example, transform)
    with evaluation_mode(graph):
        trials = _trials(graph, example, seed)
        with atomic_write(Path(path)) as temporary:
            _write(graph, example, temporary)
            _describe(temporary, about)
            difference, feed, out = _compare(trials, temporary, tolerance)
    return Exported(Path(path), difference, tolerance, tuple(len(batch) for batch, _ in trials), feed, out)


def _with_preprocessing(model: nn.Module, example: Tensor, transform: Any) -> tuple[nn.Module, Tensor, dict[str, str]]:
    """The graph to write, an example batch for it, and its metadata."""
    if transform is None:
        return model, example, {FINGERPRINT: of_weights(model)}
    from nearfar.evaluation._preprocessing import Graph, beside_graph, describe, fingerprint_of

    about = {TRANSFORM: json.dumps(beside_graph(describe(transform))), FINGERPRINT: fingerprint_of(model, transform)}
    graph = Graph(model, transform)
    return graph, graph.example(example), about


def _describe(path: Path, about: Mapping[str, str]) -> None:
    """Add metadata to an ONNX file, and remove the exporter's own, which contains local paths."""
    import onnx

    model = onnx.load(path)
    for node in (*model.graph.node, *(node for function in model.functions for node in function.node)):
        del node.metadata_props[:]
    onnx.helper.set_model_props(model, dict(about))
    onnx.save(model, path)


def _check_packages() -> None:
    for name in ("onnx", "onnxruntime", "onnxscript"):
        need(name, "export_onnx", "onnx")
    if not RECENT:
        raise ImportError(f"export_onnx needs PyTorch 2.11 or newer, but this is {torch.__version__}; upgrade PyTorch.")


def _write(model: nn.Module, example: Tensor, path: Path) -> None:
    two = torch.cat([example, example])[:2]  # a batch of one would become a fixed size
    with quiet():
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
        except Exception as error:  # the exporter's own errors are many, and pages long
            raise ValueError(
                f"export_onnx: {type(model).__name__} could not be exported ({first_cause(error)}); "
                "look for Python branches on tensor values or on the batch size."
            ) from error


def first_cause(error: BaseException) -> str:
    """The first line of the message of the root cause of an error."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _trials(model: nn.Module, example: Tensor, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Random batches of other sizes than the example, each with the model's vectors."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for size in (len(example) + 3, 1):
        batch = _random_like(example, size, generator)
        try:
            with torch.no_grad():
                out = model(batch)
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            raise ValueError(
                f"export_onnx: {type(model).__name__} itself fails on a batch of {size} ({first_cause(error)}); "
                "it must take batches of any size."
            ) from error
        if not isinstance(out, Tensor) or out.ndim != 2 or len(out) != size:
            came = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(f"export_onnx: model must give vectors [{size}, d] for {size} samples, but gave {came}.")
        found.append((batch.cpu().numpy(), out.float().cpu().numpy()))
    return found


def _compare(trials: list[tuple[np.ndarray, np.ndarray]], path: Path, tolerance: float) -> tuple[float, str, str]:
    """Compare with onnxruntime: the largest difference, and the names of input and output."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    feed, out = session.get_inputs()[0].name, session.get_outputs()[0].name
    worst = 0.0
    for batch, wanted in trials:
        got = np.asarray(session.run([out], {feed: batch})[0], dtype=np.float32)
        if got.shape != wanted.shape:
            raise ValueError(f"export_onnx: onnxruntime gives {got.shape} where the model gives {wanted.shape}.")
        worst = max(worst, float(np.abs(got - wanted).max() / max(np.abs(wanted).max(), 1e-12)))
    if not worst <= tolerance:
        raise ValueError(
            f"export_onnx: onnxruntime's vectors differ by {worst:.1e} of the largest entry, more than "
            f"{tolerance:.0e}; no file was written."
        )
    return worst, feed, out


def _random_like(example: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """A random batch with the range and dtype of the example; integers are drawn from those of the example."""
    shape = (size, *example.shape[1:])
    if example.is_floating_point():
        spread = float(example.float().std()) if example.numel() > 1 else 1.0
        noise = torch.randn(shape, generator=generator) * (spread or 1.0) + float(example.float().mean())
        return noise.to(example)
    pick = torch.randint(example.numel(), shape, generator=generator)
    return example.flatten()[pick.to(example.device)]


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the exporters' output and warnings within the block; their errors are still raised."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
