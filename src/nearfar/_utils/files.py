"""Atomic writes and safe reads: a file appears under its name only when it is complete.

Archives written here (`.npz` arrays, `.pt` checkpoints: both are zip files) end in a *seal*, a digest of every byte
before it, stored as the comment of the zip file. NumPy and torch read such a file as usual, and a single flipped bit is
noticed before anything in it is used.
"""

import ast
import hashlib
import math
import os
import secrets
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import numpy as np

from nearfar._utils.checks import printable

Arrays = Mapping[str, np.ndarray]

SEAL = b"nearfar blake2b "
DIGEST = 64  # hexadecimal digits of the digest in a seal
ROOM = 1 << 30  # bytes that any archive may unpack to; a larger one may hold up to `GROWTH` times its own size
GROWTH = 20
SMALL = 1 << 20  # bytes that a configuration or the like may have
LIMIT = "NEARFAR_UNPACK_LIMIT"  # the environment variable that raises `ROOM`, in bytes


_inputs: list[tuple[Path, os.stat_result]] = []  # files that must not be replaced, see `protect`


@contextmanager
def protect(inputs: Iterable[Path]) -> Iterator[None]:
    """Prevent this process from writing over some files, under any of their names, within the block."""
    before = list(_inputs)
    _inputs.extend((path, path.stat()) for path in inputs if path.is_file())
    try:
        yield
    finally:
        _inputs[:] = before


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary file beside `path`, renamed to `path` when the block ends and removed when it fails."""
    path = plain_target(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        yield temporary
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def plain_target(path: Path) -> Path:
    """Resolve where to write: a symbolic link stays, and the file that it points to is replaced."""
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    if target.is_symlink() or (target.exists() and not target.is_file()):
        what = "a folder" if target.is_dir() else "no plain file"
        raise FileExistsError(f"{path} is {what}, which is never replaced; name a file.")
    for source, about in _inputs if target.exists() else ():
        if os.path.samestat(target.stat(), about):
            raise FileExistsError(f"{path} is {source}, an input, which is never replaced; name another file.")
    return target


@contextmanager
def sealed(path: Path) -> Iterator[Path]:
    """`atomic_write` for a zip archive: a seal is added to what the block wrote, then the file is renamed."""
    with atomic_write(path) as temporary:
        yield temporary
        _seal(temporary)


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, completely or not at all."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_arrays(path: Path, arrays: Arrays) -> None:
    """Write an `.npz` file with a seal, completely or not at all; equal arrays give equal bytes."""
    for name, array in arrays.items():  # NumPy 2.1 added an option for this check
        if np.asarray(array).dtype.hasobject:
            raise ValueError(f"{path} cannot hold {name}, an array of objects; give numbers or text.")
    with sealed(path) as temporary, temporary.open("xb") as stream:
        np.savez(stream, **arrays)  # type: ignore[arg-type]  # a name is no option


def check_seal(owner: str, path: Path, *, needed: bool = False) -> None:
    """Compare an archive with its seal; one that another program wrote has none, and is refused if it is `needed`."""
    length = len(SEAL) + DIGEST
    with path.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - length))
        seal = stream.read()
        if seal.startswith(SEAL):
            if _digest(stream, size - length) != seal[len(SEAL) :]:
                raise ValueError(f"{owner}: {path} is damaged: its bytes have changed; write it again.")
            return
        # without a comment, an archive ends with its directory record: a required seal is missing
        stream.seek(max(0, size - 22))
        end = stream.read()
        bare = end.startswith(b"PK\x05\x06") and end.endswith(b"\0\0")
    if needed or not bare:
        raise ValueError(f"{owner}: {path} has no intact seal: it is cut short, damaged or not ours; write it again.")


def read_arrays(owner: str, path: Path) -> dict[str, np.ndarray]:
    """Read every array of an `.npz` file; nothing is unpickled, and sizes are checked before memory is allocated."""
    if not path.is_file():
        raise FileNotFoundError(f"{owner}: there is no file {path}.")
    if not _is_zip(path):
        raise ValueError(f"{owner}: {path} is not an .npz file, or was cut short; write it again with numpy.savez.")
    check_seal(owner, path)
    name = ""
    try:
        _check_sizes(owner, path)
        with np.load(path, allow_pickle=False) as archive:
            found = {}
            for name in archive.files:
                found[name] = archive[name]
    except ValueError as error:
        if str(error).startswith(f"{owner}: "):
            raise
        if "allow_pickle" not in str(error):
            raise ValueError(f"{owner}: {path} cannot be read ({first_line(error)}); write it again.") from None
        raise ValueError(
            f"{owner}: {name!r} in {path} holds pickled objects, which are never loaded; save numbers or plain strings."
        ) from None
    except (OSError, EOFError, KeyError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{owner}: {path} is damaged ({first_line(error)}); write it again.") from None
    return found


def read_text(owner: str, path: Path, most: int = SMALL) -> str:
    """Read a small text file in UTF-8; its size is checked first."""
    if not path.is_file():
        raise FileNotFoundError(f"{owner}: there is no file {path}.")
    with path.open("rb") as stream:
        found = stream.read(most + 1)
    if len(found) > most:
        raise ValueError(f"{owner}: {path} has more than {most:,} bytes, far more than such a file needs.")
    try:
        return found.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{owner}: {path} is not UTF-8 text; save it in UTF-8.") from None


def inside(owner: str, folder: Path, names: Iterable[str], *, outside: bool = False, switch: str) -> list[Path]:
    """Join each name to `folder`, and refuse names that lead out of it, since they may come from an untrusted file.

    With `outside`, such names are allowed; `switch` says in the message how a user can allow them.
    """
    home = os.path.join(os.path.realpath(folder), "")
    real: dict[str, str] = {}
    found = []
    for name in names:
        path = os.path.join(folder, name)  # strings: a benchmark lists 100,000 names
        if "\0" in name:
            raise ValueError(f"{owner}: {printable(name)!r} holds a null character, and no file is called so.")
        if not outside and not _place(path, real).startswith(home):
            raise ValueError(
                f"{owner}: {printable(name)!r} leads out of {folder}, and only files in it are read; "
                f"if you trust the names, {switch}."
            )
        found.append(Path(path))
    return found


def lies_in(path: Path, folder: Path) -> bool:
    """Whether a path, which need not exist, is a folder or lies in it; links are followed."""
    place, home = (Path(os.path.realpath(each)) for each in (path, folder))
    return home in (place, *place.parents)


def _place(path: str, real: dict[str, str]) -> str:
    """Resolve a path; the links of each folder are followed once and remembered in `real`."""
    parent, name = os.path.split(path)
    if name in ("", ".", "..") or os.path.islink(path):
        return os.path.join(os.path.realpath(path), "")
    if parent not in real:
        real[parent] = os.path.realpath(parent)
    return os.path.join(real[parent], name, "")


def _is_zip(path: Path) -> bool:
    """`zipfile.is_zipfile`, which raises an error for some damaged files."""
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:
        return False


def _seal(path: Path) -> None:
    """Write the digest of a zip archive's other bytes into its comment."""
    with path.open("r+b") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(size - 22)
        if stream.read(4) != b"PK\x05\x06":
            raise ValueError(f"{path} is no zip archive without a comment.")
        stream.seek(size - 2)
        stream.write(struct.pack("<H", len(SEAL) + DIGEST))
        digest = _digest(stream, size)
        stream.seek(size)
        stream.write(SEAL + digest)


def _digest(stream: IO[bytes], size: int) -> bytes:
    """BLAKE2b of the first `size` bytes, in hexadecimal digits."""
    stream.seek(0)
    found = hashlib.blake2b(digest_size=DIGEST // 2)
    while size > 0:
        piece = stream.read(min(size, 1 << 20))
        if not piece:
            break
        found.update(piece)
        size -= len(piece)
    return found.hexdigest().encode()


def _check_sizes(owner: str, path: Path) -> None:
    """Refuse an archive whose arrays are not of the size that their headers claim, or grow beyond the limit."""
    limit = max(int(os.environ.get(LIMIT) or ROOM), GROWTH * path.stat().st_size)
    with zipfile.ZipFile(path) as archive:
        total = sum(member.file_size for member in archive.infolist())
        if total > limit:
            raise ValueError(
                f"{owner}: {path} would unpack to {total:,} bytes, and {limit:,} are allowed; "
                f"if you trust it, set {LIMIT}={total}."
            )
        for member in archive.infolist():
            with archive.open(member) as stream:
                claimed = _claimed_size(stream)
            if claimed is not None and claimed != member.file_size:
                raise ValueError(
                    f"{owner}: {member.filename!r} in {path} claims {claimed:,} bytes and has {member.file_size:,}; "
                    "write it again."
                )


def _claimed_size(stream: IO[bytes]) -> int | None:
    """How many bytes an `.npy` stream should have by its header; None if it holds objects or is not one."""
    if stream.read(6) != b"\x93NUMPY":
        return None
    major, _ = stream.read(2)
    width = 2 if major == 1 else 4
    (length,) = struct.unpack("<H" if major == 1 else "<I", stream.read(width))
    start = 8 + width + length
    if length > 1 << 20:
        raise ValueError(f"a header of {length:,} bytes")
    shape, dtype = _header(stream.read(length).decode("latin1" if major < 3 else "utf-8"))
    return None if dtype.hasobject else start + math.prod(shape) * dtype.itemsize


def _header(text: str) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and type from the dictionary that an `.npy` header spells out."""
    try:
        entries = ast.literal_eval(text)
        return tuple(int(n) for n in entries["shape"]), np.lib.format.descr_to_dtype(entries["descr"])
    except (SyntaxError, KeyError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(f"a header that cannot be read: {first_line(error)}") from None


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]


def remove_files(folder: Path, *patterns: str) -> None:
    """Remove the files of a folder whose names match, and the folder if it is then empty; every other file stays."""
    for pattern in patterns:
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)
    with suppress(OSError):  # missing, or not empty
        folder.rmdir()
