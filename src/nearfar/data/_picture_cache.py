"""Pictures that are decoded once, and then read from one file, from memory, or from the device."""

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

from nearfar._utils.checks import check_choice, usable_cores
from nearfar._utils.progress import Progress
from nearfar.data._cache import default_folder
from nearfar.data._device_samples import DeviceSamples, Ragged
from nearfar.data._pictures import Member, Pictures, Places, no_readable_image, others_of_class
from nearfar.data._pixel_file import PixelFile, Pixels
from nearfar.data._samples import DataSet, Samples, Transform, genuine

Cache = Literal["none", "disk", "memory", "device"]


class CachedPictures:
    """Pictures that are decoded and resized once; `samples[i]` is a PIL image, equal to the resized original.

    They are decoded at the first access, so that a split that is never read costs nothing. What the result of `resize`
    depends on is in the text `key`, which is part of the file's name. `cache` is "disk", which maps the file, "memory",
    which reads it whole, or "device": as "disk" until `hold` copies it to a device.
    """

    def __init__(
        self,
        base: Samples,
        resize: Callable[[Image.Image], Image.Image],
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
        return self[int(self.substitutes()[index])] if picture is None else picture

    def genuine(self, index: int) -> Image.Image | None:
        """The picture itself, never a substitute; None if it cannot be read and is skipped."""
        pixels = self.file[index]
        return None if pixels is None else Image.fromarray(pixels)

    @property
    def file(self) -> PixelFile:
        """The decoded pictures; the first access decodes them, or finds the file of an earlier run."""
        if self._file is None:
            self._file = self._build()
            if self.cache == "memory":
                self._file.read_all()
        return self._file

    @property
    def corrupt(self) -> set[int]:
        """Indices of the pictures that cannot be read."""
        return set(np.flatnonzero(self.file.sizes[:, 0] == 0).tolist())

    def substitutes(self) -> np.ndarray:
        """For each sample its own index or, if it cannot be read, that of the next readable one of its class."""
        rows = np.arange(len(self))
        for index in sorted(self.corrupt):
            order = others_of_class(self.labels, index)
            readable = order[self.file.sizes[order, 0] > 0]
            if not len(readable):
                raise no_readable_image(self.classes[self.labels[index]], self.names[index])
            rows[index] = readable[0]
        return rows

    def over(self, other: Callable[[Samples], Samples]) -> Samples:
        """These samples, unchanged, because they are decoded already."""
        return self

    def hold(self, device: torch.device) -> DeviceSamples | None:
        """The pictures on a device; None if they would take more than half of its free memory."""
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
            rows = self.substitutes()
            x = Ragged(pixels, start, height, width)
            self._held[str(device)] = DeviceSamples(x, rows, file.sizes[:, 0] > 0, file.sizes[rows])
        return self._held[str(device)]

    def _build(self) -> PixelFile:
        try:
            with contextlib.suppress(FileNotFoundError, ValueError):
                return PixelFile(self.path)
            with Progress("decoding pictures", len(self), console=self.console) as bar:
                return PixelFile.build(self.path, len(self), self._decode, workers=usable_cores(), watch=bar)
        except OSError as error:
            raise OSError(
                f"data: the cache {self.path} cannot be written ({error.strerror or error}); make room, name another "
                "folder with data.cache_folder, or set data.cache: none."
            ) from error

    def _decode(self, index: int) -> Pixels | None:
        picture = genuine(self.base, index)
        return None if picture is None else np.asarray(self.resize(picture.convert("RGB")))

    def __getstate__(self) -> dict[str, Any]:
        # a worker process that was not forked must map the file again
        return {**self.__dict__, "_file": None, "_held": {}, "console": None}


def _digest(base: Samples, key: str) -> str:
    """The name of a file: a digest of paths, sizes and times of the pictures, and of their stored form."""
    found = hashlib.blake2b(f"1 {key}".encode(), digest_size=16)
    paths: Sequence[Any] = base.paths if isinstance(base, Pictures) else []
    if isinstance(paths, Places):
        found.update(paths.fingerprint.encode())
        return found.hexdigest()
    stats: dict[Path, os.stat_result] = {}
    for path in paths:
        file = path.archive if isinstance(path, Member) else path
        if file not in stats:
            with contextlib.suppress(OSError):  # decoding reports or skips a missing file
                stats[file] = os.stat(file)
        at, about = getattr(path, "offset", 0), stats.get(file)
        words = f"{os.path.realpath(file)} {at}" + (f" {about.st_size} {about.st_mtime_ns}" if about else "")
        found.update(words.encode("utf-8", "surrogateescape") + b"\0")
    return found.hexdigest()


def cache_pictures(
    samples: Samples, transform: Transform, cache: Cache, *, folder: Path | None = None, console: Console | None = None
) -> Samples:
    """Decode pictures once, stored as `transform` needs them; samples in memory are returned unchanged.

    A part of a data set, or one with other labels, shares the file of the whole.
    """
    over = getattr(samples, "over", None)
    if over is not None:
        found: Samples = over(lambda base: cache_pictures(base, transform, cache, folder=folder, console=console))
        return found
    if cache == "none" or not isinstance(samples, Pictures):
        return samples
    resize = getattr(transform, "resize", lambda picture: picture)
    key = str(getattr(transform, "storage", "as it is"))
    form = (key, cache, folder)
    if form not in samples.cached:
        samples.cached[form] = CachedPictures(samples, resize, key, cache=cache, folder=folder, console=console)
    known: Samples = samples.cached[form]
    return known


def cache_data(
    data: DataSet, transform: Transform, cache: Cache, *, folder: Path | None = None, console: Console | None = None
) -> DataSet:
    """Apply `cache_pictures` to every split of a data set."""

    def change(side: Samples) -> Samples:
        return cache_pictures(side, transform, cache, folder=folder, console=console)

    gallery = None if data.gallery is None else change(data.gallery)
    return replace(data, train=change(data.train), test=change(data.test), gallery=gallery)
