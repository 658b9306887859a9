"""Free memory, and a check that something fits into it before it is allocated."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")
GROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""Limits that a container sets: folder, limit and usage, of both versions of control groups."""


def check_room(owner: str, what: str, need: int, device: torch.device | str = "cpu") -> None:
    """Raise an error if something needs more memory than is free on a device."""
    free = free_memory(torch.device(device))
    if free is not None and need > free:
        raise ValueError(
            f"{owner}: {what} would take {size_of(need)} of memory, but {size_of(free)} are free on {device}; ask for "
            "less."
        )


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be allocated on a device; None if the system does not say, or on "meta", which has none."""
    if device.type == "meta":
        return None
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_free_on_host(), default=None)


def _free_on_host() -> Iterator[int]:
    with suppress(OSError, ValueError, IndexError):
        text = MEMINFO.read_text(encoding="ascii")
        yield 1024 * int(text.split("MemAvailable:")[1].split()[0])
    for folder, limit, usage in GROUPS:
        with suppress(OSError, ValueError):  # no group, or "max"
            used = int(Path(folder, usage).read_text(encoding="ascii"))
            cache = dict(line.split() for line in Path(folder, "memory.stat").read_text(encoding="ascii").splitlines())
            yield int(Path(folder, limit).read_text(encoding="ascii")) - used + int(cache.get("inactive_file", 0))
    with suppress(AttributeError, ValueError, OSError):
        yield os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def size_of(count: int) -> str:
    """Format a number of bytes.

    >>> size_of(3 << 30), size_of(5_000_000), size_of(900), size_of(10**15)
    ('3.0 GiB', '4.8 MiB', '0.9 KiB', '931,322.6 GiB')
    """
    for power, unit in ((30, "GiB"), (20, "MiB")):
        if count >= 2**power:
            return f"{count / 2**power:,.1f} {unit}"
    return f"{count / 2**10:.1f} KiB"
