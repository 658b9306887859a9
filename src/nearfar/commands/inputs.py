"""What `nearfar embed` and `export` take: a model of a run or a file; samples from glyphs, an .npz, or images."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from nearfar.evaluation.export import first_cause, quiet

if TYPE_CHECKING:
    from nearfar.data.pictures import Pictures
    from nearfar.data.samples import Transform

PICTURES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
_ONNX_TYPES = {
    "tensor(float)": torch.float32,
    "tensor(float16)": torch.float16,
    "tensor(double)": torch.float64,
    "tensor(uint8)": torch.uint8,
    "tensor(int64)": torch.int64,
}


@dataclass(frozen=True, eq=False)
class Samples:
    """What is to be embedded, and a digest that tells it from other samples.

    Attributes:
        data: samples as a model without a transform takes them.
        raw: the same as data sets give them: pictures, or tensors as they are stored.
        y: classes [n], or None.
        name: one word a sample, or None.
        images: thumbnails [n, h, w] or [n, h, w, 3], or None.
        digest: equal for equal samples.
    """

    data: Any
    raw: Any
    y: np.ndarray | None
    name: tuple[str, ...] | None
    images: Tensor | None
    digest: str

    def ready(self, transform: Transform | None) -> Any:
        """What goes into a model."""
        return self.data if transform is None else Transformed(self.raw, transform)


class Transformed:
    """Raw samples through a transform without chance."""

    def __init__(self, raw: Any, transform: Transform) -> None:
        self.raw, self.transform = raw, transform

    def __len__(self) -> int:
        return len(self.raw)

    def __getitem__(self, row: int) -> Tensor:
        return self.transform(self.raw[row], np.random.default_rng(0))


@dataclass(frozen=True, eq=False)
class Model:
    """What turns a batch [b, ...] into vectors [b, d].

    Attributes:
        run: takes a batch, gives vectors.
        digest: tells the model from others.
        module: the same as a module, for export; None where there is none (ONNX, TorchScript).
        example: a batch that fits, or None where the file holds none.
        transform: of a run: what turns a raw sample into the network's input; None where samples go in as they are.
    """

    run: Callable[[Tensor], Any]
    digest: str
    module: nn.Module | None = None
    example: Tensor | None = None
    transform: Transform | None = None


def load_model(path: Path) -> Model:
    """The model of a run folder, an .onnx file, a TorchScript file (.pt) or a torch.export file (.pt2)."""
    if path.is_dir():
        return _run(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no model {path}; name a run folder or an .onnx, .pt or .pt2 file.")
    if path.suffix not in READERS:
        raise ValueError(f"{path} must end in .onnx, .pt (TorchScript) or .pt2 (torch.export).")
    return READERS[path.suffix](path, hashlib.sha256(path.read_bytes()).hexdigest())


def _run(folder: Path) -> Model:
    """The network of a run with its best weights, and the transform that its samples go through."""
    from nearfar.train import open_run

    run, best = open_run(folder), folder / "checkpoints" / "best.pt"
    digest = hashlib.sha256((folder / "config.yaml").read_bytes() + best.read_bytes()).hexdigest()
    example = torch.rand(2, *run.shape)
    return Model(_careful(folder, run.model), digest, run.model, example, run.transform)


def _exported(path: Path, digest: str) -> Model:
    with _reading(path, "torch.export"):
        program = torch.export.load(path)
        module: Any = program.module()
    module.train = module.eval = lambda mode=True: module  # the mode is fixed; torch would raise where it is asked for
    inputs: Any = program.example_inputs  # (positional, by name), or None
    example: Any = inputs[0] if inputs else ()
    fits = example[0] if len(example) == 1 and isinstance(example[0], Tensor) else None
    return Model(_careful(path, lambda batch: module(batch)), digest, module, fits)


def _script(path: Path, digest: str) -> Model:
    with _reading(path, "TorchScript"):
        module = torch.jit.load(str(path), map_location="cpu").eval()  # type: ignore[no-untyped-call]
    return Model(_careful(path, lambda batch: module(batch)), digest)


def _onnx(path: Path, digest: str) -> Model:
    try:
        import onnxruntime
    except ImportError:
        raise ImportError('reading .onnx needs onnxruntime; run pip install "nearfar[onnx]".') from None
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    with _reading(path, "ONNX"):
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    feed, out = session.get_inputs()[0], session.get_outputs()[0].name
    kind = _ONNX_TYPES.get(feed.type, torch.float32)
    return Model(
        _careful(path, lambda batch: session.run([out], {feed.name: batch.to(kind).numpy()})[0]),
        digest,
    )


READERS: dict[str, Callable[[Path, str], Model]] = {
    ".onnx": _onnx,
    ".pt": _script,
    ".pth": _script,
    ".ts": _script,
    ".pt2": _exported,
}


@contextmanager
def _reading(path: Path, kind: str) -> Iterator[None]:
    """Turn whatever a runtime says of a file it cannot read into one sentence; they share no error."""
    try:
        with quiet():
            yield
    except Exception as error:
        raise ValueError(
            f"{path} is not a file of {kind} that can be run here ({type(error).__name__}); plain state dicts hold no "
            "model, so export one with export_onnx or torch.export.save."
        ) from None


def _careful(path: Path, run: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """The model, with one sentence for a batch that does not fit; the runtimes share no error."""

    def careful(batch: Tensor) -> Any:
        try:
            return run(batch)
        except Exception as error:
            raise ValueError(
                f"{path} cannot take a batch of shape {list(batch.shape)} ({first_cause(error)}); "
                "look at the shape of the samples."
            ) from None

    return careful


def read_samples(source: str, *, size: int, imagenet: bool, thumbnails: int) -> Samples:
    """Samples from "glyphs:train", "glyphs:test", an .npz file with x, or a folder with a subfolder a class."""
    if source.startswith("glyphs"):
        return _glyphs(source)
    path = Path(source)
    if path.is_dir():
        return _folder(path, size, imagenet, thumbnails)
    if path.suffix == ".npz":
        return _npz(path)
    raise ValueError(f'DATA must be "glyphs:train", "glyphs:test", an .npz file or a folder of images, not {source!r}.')


def _glyphs(source: str) -> Samples:
    from nearfar.data import glyphs

    if source not in ("glyphs:train", "glyphs:test"):
        raise ValueError(f'the embedded data are "glyphs:train" and "glyphs:test", not {source!r}.')
    data = glyphs()
    split = data.train if source == "glyphs:train" else data.test
    names = zip(split.labels.tolist(), split.faces.tolist(), strict=True)
    return Samples(
        data=split.images[:, None].float() / 255,
        raw=split.images,
        y=split.labels.numpy(),
        name=tuple(f"{split.names[label]} / {data.faces[face]}" for label, face in names),
        images=split.images,
        digest=hashlib.sha256(split.images.numpy().tobytes()).hexdigest(),
    )


def _npz(path: Path) -> Samples:
    from nearfar._files import read_arrays

    arrays = read_arrays("embed", path)
    if "x" not in arrays:
        raise ValueError(f"{path} must hold the key x, the samples [n, ...], but holds {', '.join(arrays)}.")
    x = arrays["x"]
    for key in ("y", "name"):
        if key in arrays and len(arrays[key]) != len(x):
            raise ValueError(f"{path}: {key} must have one entry per sample, but {len(arrays[key])} for {len(x)} came.")
    name = tuple(str(word) for word in arrays["name"]) if "name" in arrays else None
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Samples(torch.from_numpy(x.astype(np.float32)), torch.from_numpy(x), arrays.get("y"), name, None, digest)


class Fitted:
    """Pictures as [3, size, size] in 0..1, the short side scaled, the middle cut out."""

    def __init__(self, pictures: Pictures, size: int, imagenet: bool) -> None:
        self.pictures, self.size, self.imagenet = pictures, size, imagenet

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, row: int) -> Tensor:
        x = torch.from_numpy(square(self.pictures[row], self.size)).permute(2, 0, 1).float() / 255
        if self.imagenet:
            mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
            x = (x - mean[:, None, None]) / std[:, None, None]
        return x


def square(picture: Any, size: int) -> np.ndarray:
    """uint8 [size, size, 3]: the middle of a picture."""
    from PIL import Image, ImageOps

    return np.array(ImageOps.fit(picture, (size, size), Image.Resampling.BICUBIC), dtype=np.uint8)


def _folder(folder: Path, size: int, imagenet: bool, thumbnails: int) -> Samples:
    """A subfolder a class, in the order of their names."""
    from nearfar.data.pictures import Pictures

    files = [
        file
        for home in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
        for file in sorted(home.rglob("*"))
        if file.suffix.lower() in PICTURES
    ]
    if not files:
        raise ValueError(f"{folder} holds no images in subfolders; a class is a subfolder with its images.")
    names = tuple(file.relative_to(folder).as_posix() for file in files)
    y = np.unique([name.split("/")[0] for name in names], return_inverse=True)[1].astype(np.int64)
    pictures = Pictures(files, y, names)
    about = f"{size} {imagenet} " + " ".join(f"{n}:{f.stat().st_size}" for n, f in zip(names, files, strict=True))
    images = None
    if thumbnails:
        images = torch.from_numpy(np.stack([square(pictures[row], thumbnails) for row in range(len(pictures))]))
    digest = hashlib.sha256(about.encode()).hexdigest()
    return Samples(Fitted(pictures, size, imagenet), pictures, y, names, images, digest)
