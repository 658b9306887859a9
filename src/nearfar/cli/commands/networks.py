"""The network of `nearfar embed` and `export`: from a run folder, or an ONNX, TorchScript or .pt2 file."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nearfar._utils.extras import need
from nearfar.cli.commands.inputs import SIZE, Assumed
from nearfar.evaluation import _fingerprint as fingerprint
from nearfar.evaluation._export import FINGERPRINT, TRANSFORM, first_cause, quiet

if TYPE_CHECKING:
    from nearfar.data._samples import Transform

_ONNX_TYPES = {
    "tensor(float)": torch.float32,
    "tensor(float16)": torch.float16,
    "tensor(double)": torch.float64,
    "tensor(uint8)": torch.uint8,
    "tensor(int64)": torch.int64,
}


@dataclass(frozen=True, eq=False)
class Model:
    """A network that maps a batch [b, ...] to vectors [b, d]."""

    run: Callable[[Tensor], Any]  # function from a batch to vectors
    digest: str  # identifies the model
    fingerprint: str  # see `nearfar.evaluation._fingerprint`; with the preprocessing only if it is known
    module: nn.Module | None = None  # the network as a module, for export; None if there is none (ONNX, TorchScript)
    example: Tensor | None = None  # an example batch, or None if the file has none
    # the transform from a raw sample to the input, if the run or the file defines it
    transform: Transform | None = None
    side: int | None = None  # pixels a side of the input pictures, if the file defines it
    pixels: bool = False  # whether it takes pictures in 0..255 as uint8

    def assumed(self, size: int | None, imagenet: bool) -> Assumed:
        """The assumed preprocessing if the model defines none; raises an error for options without effect."""
        if self.transform is not None and (size is not None or imagenet):
            raise ValueError("this model brings its own preprocessing; leave --size and --imagenet out.")
        if self.pixels and imagenet:
            raise ValueError("this model takes images in 0..255, which leaves no room for --imagenet.")
        return Assumed(size or self.side or SIZE, imagenet, self.pixels)

    def mark(self, assumed: Assumed | None) -> str | None:
        """The fingerprint of its vectors, with the assumed preprocessing if the model does not define one."""
        if self.transform is not None or assumed is None or not self.fingerprint:
            return self.fingerprint or None
        return f"{self.fingerprint.split('/')[0]}/{fingerprint.of_preprocessing(asdict(assumed))}"


def load_model(path: Path, *, trust_model: bool = False) -> Model:
    """Load a model from a run folder, an .onnx file, a TorchScript file (.pt) or a torch.export file (.pt2).

    Files of the last two kinds can run code of their author, and are only read with `trust_model`.
    """
    if path.is_dir():
        return _load_run(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no model {path}; name a run, or an .onnx, .safetensors, .pt or .pt2 file.")
    if path.suffix not in READERS:
        raise ValueError(f"{path} must end in .onnx, .safetensors, .pt (TorchScript) or .pt2 (torch.export).")
    if path.suffix in RUNS_CODE:
        _check_trust(path, trust_model)
    return READERS[path.suffix](path, hashlib.sha256(path.read_bytes()).hexdigest())


def _check_trust(path: Path, trust_model: bool) -> None:
    """Refuse a file that can run code, unless it is trusted; checks first that the file is a model at all."""
    kind, marks, harm = RUNS_CODE[path.suffix]
    try:
        with zipfile.ZipFile(path) as archive:
            held = any(name.rpartition("/")[2] in marks for name in archive.namelist())
    except (OSError, ValueError, zipfile.BadZipFile):
        held = False
    if not held:
        raise _unreadable_error(path, kind)
    if not trust_model:
        raise ValueError(
            f"{path} is a file of {kind}, {harm}; if you trust its author, pass --trust-model "
            "(an .onnx file and a run folder need no trust)."
        )


def _load_run(folder: Path) -> Model:
    """The network of a run with its best weights, and its evaluation transform."""
    from nearfar.evaluation._preprocessing import fingerprint_of
    from nearfar.train import open_run

    run, best = open_run(folder), folder / "checkpoints" / "best.pt"
    digest = hashlib.sha256((folder / "config.yaml").read_bytes() + best.read_bytes()).hexdigest()
    example = torch.rand(2, *run.shape)
    mark = fingerprint_of(run.model, run.transform)
    return Model(_guard(folder, run.model), digest, mark, run.model, example, run.transform)


def _load_exported(path: Path, digest: str) -> Model:
    with _explain_errors(path, "torch.export"):
        program = torch.export.load(path)
        module: Any = program.module()
    module.train = module.eval = lambda mode=True: module  # the mode is fixed, and torch raises an error if it is set
    inputs: Any = program.example_inputs  # (positional, by name), or None
    example: Any = inputs[0] if inputs else ()
    fits = example[0] if len(example) == 1 and isinstance(example[0], Tensor) else None
    side = None if fits is None else _side(list(fits.shape))
    mark = fingerprint.of_weights(module)
    return Model(_guard(path, lambda batch: module(batch)), digest, mark, module, fits, side=side)


def _load_script(path: Path, digest: str) -> Model:
    with _explain_errors(path, "TorchScript"):
        module = torch.jit.load(str(path), map_location="cpu").eval()  # type: ignore[no-untyped-call]
    return Model(_guard(path, lambda batch: module(batch)), digest, fingerprint.of_weights(module))


def _load_onnx(path: Path, digest: str) -> Model:
    onnxruntime = need("onnxruntime", "reading .onnx", "onnx")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    with _explain_errors(path, "ONNX"):
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        feed, out = session.get_inputs()[0], session.get_outputs()[0].name
        about = session.get_modelmeta().custom_metadata_map
    kind = _ONNX_TYPES.get(feed.type, torch.float32)
    transform = None
    if TRANSFORM in about:
        from nearfar.evaluation._preprocessing import from_text

        transform = from_text(str(path), about[TRANSFORM])
    return Model(
        _guard(path, lambda batch: session.run([out], {feed.name: _convert(batch, kind).numpy()})[0]),
        digest,
        fingerprint.check_fingerprint(str(path), about.get(FINGERPRINT) or digest[: fingerprint.DIGITS]),
        transform=transform,
        side=_side(feed.shape),
        pixels=kind == torch.uint8,
    )


def _convert(batch: Tensor, kind: torch.dtype) -> Tensor:
    """Convert a batch to the dtype of a network; values that would be truncated are an error."""
    there = batch.to(kind)
    if not kind.is_floating_point and not torch.equal(there.to(batch.dtype), batch):
        raise ValueError(f"it takes {str(kind).removeprefix('torch.')}, and these numbers are not whole or too large")
    return there


def _side(shape: list[Any]) -> int | None:
    """Pixels a side of a network with input [b, 3, side, side]."""
    if len(shape) != 4 or shape[1] != 3 or shape[2] != shape[3]:
        return None
    return shape[2] if isinstance(shape[2], int) and shape[2] > 0 else None


def _load_weights(path: Path, digest: str) -> Model:
    """A .safetensors file with the description of its network."""
    from nearfar.evaluation._preprocessing import fingerprint_of
    from nearfar.models.saved import read

    saved = read(path)
    mark, example = fingerprint_of(saved.model, saved.transform), torch.rand(2, *saved.network.inputs)
    return Model(_guard(path, saved.model), digest, mark, saved.model, example, saved.transform)


READERS: dict[str, Callable[[Path, str], Model]] = {
    ".onnx": _load_onnx,
    ".pt": _load_script,
    ".pth": _load_script,
    ".ts": _load_script,
    ".pt2": _load_exported,
    ".safetensors": _load_weights,
}
_SCRIPT = ("TorchScript", ("constants.pkl",), "whose code can write files when it is run")
RUNS_CODE = {
    ".pt": _SCRIPT,
    ".pth": _SCRIPT,
    ".ts": _SCRIPT,
    ".pt2": (
        "torch.export",
        ("archive_format", "serialized_exported_program.json"),  # the second: torch 2.6
        "which torch unpickles in part, and a pickle can run any code",
    ),
}
"""By suffix: the kind of file, archive members of which one identifies it, and the risk of reading it."""


def _unreadable_error(path: Path, kind: str, cause: str = "") -> ValueError:
    return ValueError(
        f"{path} is not a file of {kind} that can be run here{cause}; plain state dicts hold no "
        "model, so export one with export_onnx or torch.export.save."
    )


@contextmanager
def _explain_errors(path: Path, kind: str) -> Iterator[None]:
    """Turn any error of a runtime that reads a file into one sentence; runtimes share no error class."""
    try:
        with quiet():
            yield
    except Exception as error:
        raise _unreadable_error(path, kind, f" ({type(error).__name__})") from None


def _guard(path: Path, run: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """Wrap a model so that a batch that does not fit is an error of one sentence; runtimes share no error class."""

    def guarded(batch: Tensor) -> Any:
        try:
            return run(batch)
        except Exception as error:
            raise ValueError(
                f"{path} cannot take a batch of shape {list(batch.shape)} ({first_cause(error)}); "
                "look at the shape of the samples."
            ) from None

    return guarded
