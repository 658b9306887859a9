"""`Decoded`: pictures that are decoded once and then read from one file, from memory, or from the device."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from PIL import Image
from rich.console import Console

from nearfar._utils.checks import check_choice
from nearfar._utils.progress import Progress
from nearfar.data._cache import default_folder
from nearfar.data.device_samples import DeviceSamples
from nearfar.data.pictures import CorruptImageError, Member, Pictures, Places
from nearfar.data.pixel_file import PixelFile
from nearfar.data.pixel_file import Pixels as Array
from nearfar.data.samples import DataSet, Samples, Transform, genuine

__all__ = ["Cache", "Decoded", "cached", "decoded"]

Cache = Literal["none", "disk", "memory", "device"]
Resize = Callable[[Image.Image], Image.Image]


class Decoded:
    """Samples whose pictures were decoded and resized once; `samples[i]` is a PIL image, equal to the resized original.

    They are decoded at the first access, so that samples nobody asks for cost nothing.

    Args:
        base: samples that are PIL images.
        resize: how a picture is stored, such as `Photograph.resized`.
        key: what the result of `resize` depends on, as text: part of the file's name.
        cache: "disk" maps the file, "memory" reads it whole, "device" is as "disk" until `hold` copies it to a device.
        folder: where the file lies; None for the user's cache folder.
        console: where progress is printed.
    """

    def __init__(
        self,
        base: Samples,
        resize: Resize,
        key: str,
        *,
        cache: Cache = "disk",
        folder: Path | None = None,
        console: Console | None = None,
    ) -> None:
        check_choice("data", "cache", cache, get_args(Cache)[1:])
        self.base, self.resize, self.cache, self.console = base, resize, cache, console
        self.labels, self.classes, self.names = base.labels, base.classes, base.names
        self.path = (folder or default_folder() / "pictures") / f"{_digest(base, key)}.pixels"
        self._file: PixelFile | None = None
        self._held: dict[str, DeviceSamples] = {}

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Image.Image:
        picture = self.genuine(index)
        return self[int(self.stand_ins[index])] if picture is None else picture

    def genuine(self, index: int) -> Image.Image | None:
        """The picture itself, never a substitute; None if it cannot be read and is to be skipped."""
        found = self.file[index]
        return None if found is None else Image.fromarray(found)

    @property
    def file(self) -> PixelFile:
        """The decoded pictures; the first access decodes them, or finds the file of an earlier run."""
        if self._file is None:
            self._file = self._built()
            if self.cache == "memory":
                self._file.read_all()
        return self._file

    @property
    def corrupt(self) -> set[int]:
        """Indices of the pictures that cannot be read."""
        return set(np.flatnonzero(self.file.sizes[:, 0] == 0).tolist())

    @property
    def stand_ins(self) -> np.ndarray:
        """For each sample itself or, if it cannot be read, the next readable one of its class, in cyclic order."""
        rows = np.arange(len(self))
        for index in sorted(self.corrupt):
            same = np.flatnonzero(self.labels == self.labels[index])
            order = np.concatenate([same[same > index], same[same < index]])
            readable = order[self.file.sizes[order, 0] > 0]
            if not len(readable):
                raise CorruptImageError(
                    f"Pictures: no image of the class {self.classes[self.labels[index]]!r} can be read "
                    f"(one is {self.names[index]}); mend or remove the class."
                )
            rows[index] = readable[0]
        return rows

    def over(self, other: Callable[[Samples], Samples]) -> Samples:
        """Decoded samples stay as they are."""
        return self

    def hold(self, device: torch.device) -> DeviceSamples | None:
        """The pictures on a device; None if they would take more than half of what is free there."""
        if str(device) not in self._held:
            file = self.file
            if device.type == "cuda" and file.bytes > torch.cuda.mem_get_info(device)[0] // 2:
                return None
            file.check()
            pixels = torch.empty(file.bytes // 3, 3, dtype=torch.uint8, device=device)
            flat, piece = pixels.view(-1), 1 << 28
            for first in range(0, file.bytes, piece):  # in pieces, because the file need not fit into memory
                flat[first : first + piece] = torch.from_numpy(np.array(file.pixels[first : first + piece]))
            start, height, width = (
                torch.from_numpy(np.array(column)).to(device)
                for column in (file.start[:-1], file.sizes[:, 1], file.sizes[:, 0])
            )
            rows = self.stand_ins
            self._held[str(device)] = DeviceSamples(
                pixels, (start, height, width), rows, file.sizes[:, 0] > 0, file.sizes[rows]
            )
        return self._held[str(device)]

    def _built(self) -> PixelFile:
        try:
            with contextlib.suppress(FileNotFoundError, ValueError):
                return PixelFile(self.path)
            with Progress("decoding pictures", len(self), console=self.console) as bar:
                return PixelFile.build(
                    self.path, len(self), self._decode, threads=min(16, os.cpu_count() or 1), watch=bar
                )
        except OSError as error:
            raise OSError(
                f"data: the cache {self.path} cannot be written ({error.strerror or error}); make room, name another "
                "folder with data.cache_folder, or set data.cache: none."
            ) from error

    def _decode(self, index: int) -> Array | None:
        picture = genuine(self.base, index)
        return None if picture is None else np.asarray(self.resize(picture.convert("RGB")))

    def __getstate__(self) -> dict[str, Any]:
        # a worker process that is not forked maps the file itself
        return {**self.__dict__, "_file": None, "_held": {}, "console": None}


def _digest(base: Samples, key: str) -> str:
    """A name for the decoded form of samples: which files of which size and time, and how they were resized."""
    found = hashlib.blake2b(f"1 {key}".encode(), digest_size=16)
    paths: Sequence[Any] = base.paths if isinstance(base, Pictures) else []
    if isinstance(paths, Places):
        found.update(paths.fingerprint.encode())
        return found.hexdigest()
    times: dict[Path, os.stat_result] = {}
    for path in paths:
        file = path.archive if isinstance(path, Member) else path
        if file not in times:
            with contextlib.suppress(OSError):  # a file that is missing is an error, or skipped, when it is decoded
                times[file] = os.stat(file)
        at, about = getattr(path, "offset", 0), times.get(file)
        words = f"{os.path.realpath(file)} {at}" + (f" {about.st_size} {about.st_mtime_ns}" if about else "")
        found.update(words.encode("utf-8", "surrogateescape") + b"\0")
    return found.hexdigest()


def decoded(
    samples: Samples, transform: Transform, cache: Cache, *, folder: Path | None = None, console: Console | None = None
) -> Samples:
    """Samples whose pictures are decoded once, stored as `transform` wants them; samples in memory stay as they are.

    A part of a data set, or one with other labels, shares the file of the whole.
    """
    over = getattr(samples, "over", None)
    if over is not None:
        found: Samples = over(lambda base: decoded(base, transform, cache, folder=folder, console=console))
        return found
    if cache == "none" or not isinstance(samples, Pictures):
        return samples
    resize = getattr(transform, "resized", None)
    key = str(getattr(transform, "storage", "as it is"))
    known: dict[Any, Decoded] = samples.decoded
    form = (key, cache, folder)
    if form not in known:
        known[form] = Decoded(
            samples, resize or (lambda picture: picture), key, cache=cache, folder=folder, console=console
        )
    return known[form]


def cached(
    data: DataSet, transform: Transform, cache: Cache, *, folder: Path | None = None, console: Console | None = None
) -> DataSet:
    """A data set, each side of which is `decoded`."""

    def changed(side: Samples) -> Samples:
        return decoded(side, transform, cache, folder=folder, console=console)

    gallery = None if data.gallery is None else changed(data.gallery)
    return replace(data, train=changed(data.train), test=changed(data.test), gallery=gallery)
