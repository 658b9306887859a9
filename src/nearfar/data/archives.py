"""Pictures inside tar archives: found by their offset, so that any worker can read any of them; nothing is unpacked."""

from __future__ import annotations

import tarfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from nearfar._utils.checks import printable
from nearfar.data.pictures import Member

__all__ = ["in_archives"]


def in_archives(owner: str, path: Path, pattern: str, names: Iterable[str]) -> list[Member]:
    """The files of these names inside the archives of a folder that match a pattern, in the order of the names.

    Raises:
        FileNotFoundError: an archive does not hold a name that was listed.
        ValueError: an archive cannot be read, or a name in it leads out of it.
    """
    members: dict[str, Member] = {}
    for archive in sorted(path.glob(pattern)):
        members |= _members(owner, archive)
    listed = list(names)
    missing = [name for name in listed if name not in members]
    if missing:
        raise FileNotFoundError(
            f"{owner}: {len(missing)} of {len(listed)} images are in none of the archives {path / pattern}, the first "
            f"is {printable(missing[0])}; put all archives into the folder."
        )
    return [members[name] for name in listed]


def _members(owner: str, archive: Path) -> dict[str, Member]:
    """The regular files of a tar archive by name; names that lead out of it are refused."""
    found = {}
    try:
        with tarfile.open(archive, "r:") as shard:
            for entry in shard:
                if ".." in PurePosixPath(entry.name).parts or entry.name.startswith("/"):
                    raise ValueError(f"{owner}: {printable(entry.name)!r} leads out of the archive {archive}; mend it.")
                if entry.isreg() and not entry.issparse():
                    found[entry.name] = Member(archive, entry.offset_data, entry.size, entry.name)
    except (tarfile.TarError, EOFError, OverflowError) as error:
        raise ValueError(
            f"{owner}: {archive} cannot be read as a tar archive ({printable(error)}); copy it again."
        ) from None
    return found
