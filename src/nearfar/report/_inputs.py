"""Read the inputs of a report: vectors, labels, names, pictures, journal and configuration.

A source is a pair of arrays, `Vectors`, a `vectors.npz` (x, y and optionally name, classes, images), or a run folder
(config.yaml, journal.jsonl, embeddings.npz). The page names what a source lacks.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from nearfar._utils.arrays import in_words, labels_of, rows_of, words_of
from nearfar._utils.files import inside, read_arrays
from nearfar._utils.tensors import check_embeddings, check_labels
from nearfar.evaluation._vectors import Vectors, name_classes
from nearfar.evaluation.vectors_folder import is_folder_of_vectors, open_folder
from nearfar.report._journal import Journal, read_journal

Source = str | os.PathLike[str] | tuple[Any, Any] | Vectors
Names = Mapping[int, str] | Sequence[str]
ImageReader = Callable[[int], Any]
KEYS = ("x", "y", "name", "classes", "images")


@dataclass(frozen=True, eq=False)
class Inputs:
    """The inputs of a report."""

    x: Tensor  # [n, d] float vectors on the CPU
    y: Tensor  # [n] int64 labels
    names: tuple[str, ...]  # one name per row: a file name, or "row 17"
    classes: dict[int, str]  # label -> the name of the class
    picture: ImageReader | None  # row -> an array, a path or a PIL image; None without pictures
    journal: Journal  # the training curves, possibly none
    config: str  # the text of config.yaml, possibly empty
    title: str  # title of the page


def read_inputs(
    source: Source,
    *,
    names: Sequence[str] | None = None,
    classes: Names | None = None,
    images: Any = None,
    outside: bool = False,
    title: str | None = None,
) -> Inputs:
    """Read a source; keyword arguments take precedence over what the source contains. `outside`: see `image_reader`."""
    stored: dict[str, Any]
    journal, config = Journal((), ()), ""
    if isinstance(source, tuple):
        if len(source) != 2:
            raise ValueError(
                f"report: source must be (embeddings, labels), Vectors or a path, but came as {len(source)} parts."
            )
        stored, word = {"x": source[0], "y": source[1]}, "Embedding"
    elif isinstance(source, Vectors):
        stored = {key: getattr(source, key, None) for key in KEYS}
        word = "Embedding"
        if source.y is None:
            raise ValueError("report: these Vectors hold no y, the classes; only labeled vectors can be shown.")
    elif isinstance(source, str | os.PathLike):
        path = Path(source)
        word = path.resolve().name if path.is_dir() else path.stem
        stored = _load(_vectors(path))
        if path.is_dir() and not is_folder_of_vectors(path):
            journal, file = read_journal(path / "journal.jsonl"), path / "config.yaml"
            config = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    else:
        raise TypeError(f"report: source must be (embeddings, labels), Vectors or a path, not {type(source).__name__}.")
    x, y = rows_of("report", "x", stored["x"]).detach().cpu(), labels_of("report", "y", stored["y"]).detach().cpu()
    check_embeddings("report", "x", x)
    check_labels("report", "y", y, len(x), x.device)
    y = y.long()
    rows = _sample_names(stored.get("name") if names is None else names, len(x))
    return Inputs(
        x=x,
        y=y,
        names=rows,
        classes=_class_names(stored.get("classes") if classes is None else classes, y),
        picture=image_reader(stored.get("images") if images is None else images, rows, outside=outside),
        journal=journal,
        config=config,
        title=title or word,
    )


def _vectors(path: Path) -> Path:
    """The file of vectors: the path itself, or `embeddings.npz` in a run folder."""
    file = path / "embeddings.npz" if path.is_dir() and not is_folder_of_vectors(path) else path
    if not file.exists():
        raise FileNotFoundError(
            f"report: {file} is not there; pass a vectors.npz (x, y, name) or a run folder that holds embeddings.npz."
        )
    return file


def _load(path: Path) -> dict[str, Any]:
    arrays = open_folder(path) if is_folder_of_vectors(path) else read_arrays("report", path)
    stored: dict[str, Any] = {key: value for key, value in arrays.items() if key in KEYS}
    for key, what in (("x", "vectors [n, d]"), ("y", "integer labels [n]")):
        if key not in stored:
            raise ValueError(f"report: {path} must hold {key}, the {what}, but does not.")
    images = stored.get("images")
    if images is not None and (images.ndim not in (3, 4) or images.dtype.kind not in "bu"):
        # strings would be read as paths, which an untrusted file must not choose
        raise TypeError(f"report: images in {path} must be uint8 [n, h, w] or [n, h, w, 3], not {in_words(images)}.")
    return stored


def _sample_names(given: Any, rows: int) -> tuple[str, ...]:
    if given is None:
        return tuple(f"row {row}" for row in range(rows))
    words = _words("names", given)
    if len(words) != rows:
        raise ValueError(f"report: names must have one entry per row, but {len(words)} came for {rows} rows.")
    return words


def are_sentences(names: Sequence[str]) -> bool:
    """Whether most names are texts of several words, which the page then shows in place of classes.

    >>> are_sentences(["lost my card", "play a song"]), are_sentences(["a/1.jpg"]), are_sentences(["row 17"])
    (True, False, False)
    """
    spoken = sum(" " in name and not re.fullmatch(r"row \d+", name) for name in names)
    return 2 * spoken > len(names)


def _words(name: str, given: Any) -> tuple[str, ...]:
    """Strings from a list or an array [n]; numbers and dates are formatted."""
    if isinstance(given, np.ndarray) and (given.ndim != 1 or given.dtype.kind not in "USiuM"):
        raise TypeError(f"report: {name} must be words [n], but came as {in_words(given)}.")
    return words_of("report", name, given)


def _class_names(given: Any, y: Tensor) -> dict[int, str]:
    """Class names by label, from a mapping, a list for 0..max, or a list for the labels in ascending order."""
    labels = sorted(set(y.flatten().tolist()))
    plain = {label: f"class {label}" for label in labels}
    if given is None:
        return plain
    if isinstance(given, Mapping):
        return plain | {int(label): str(name) for label, name in given.items()}
    return name_classes(labels, _words("classes", given), "report")


def image_reader(images: Any, names: Sequence[str], *, outside: bool = False) -> ImageReader | None:
    """Build a function row -> picture from a folder, a mapping by name, an array, a list or a function.

    Names may come from an untrusted file of vectors, and the page shows the pictures they point to; so names that lead
    out of the folder are an error unless `outside` is true.
    """
    if images is None:
        return None
    if callable(images):
        picture: ImageReader = images
        return picture
    if isinstance(images, str | os.PathLike):
        folder = Path(images)
        if not folder.is_dir():
            raise FileNotFoundError(
                f"report: images must be a folder, a mapping, an array, a list or a function; {folder} is no folder."
            )
        allow = "pass --outside (outside=True)"
        return lambda row: inside("report", folder, (names[row],), outside=outside, switch=allow)[0]
    if isinstance(images, Mapping):
        return lambda row: images[names[row]]
    if len(images) != len(names):
        raise ValueError(f"report: images must have one entry per row, but {len(images)} came for {len(names)} rows.")
    return lambda row: images[row]
