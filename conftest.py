"""Settings of pytest for the whole project.

- Files whose packages are not installed are skipped with the reason (tests/support/needs.py).
- Only tests marked `gpu` see a GPU; it is hidden from all others, whose results then do not depend on the machine.
- Garbage collection ignores objects that exist before the first test.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import pytest
from needs import lacking
from torch.utils._triton import has_triton

collect_ignore = ["tests/support"]
if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore += ["tests/interpreted"]  # other tests run these files, each in its own process
if importlib.util.find_spec("triton") is None:
    collect_ignore += [f"src/nearfar/engines/_kernels{name}.py" for name in ("", "_pairs", "_top", "_triplets")]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Switch garbage collection off while tests are imported, then exclude them from it: all of them stay alive."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


class SkippedFile(pytest.File):
    """A file that is skipped because it imports a package that is not installed."""

    def collect(self) -> Iterable[pytest.Item]:
        """Skip the file and name the package."""
        pytest.skip(lacking(self.path) or "", allow_module_level=True)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> Generator[None, Any, Any]:
    """Skip files that import a missing package instead of failing."""
    found = yield
    return [SkippedFile.from_parent(parent, path=file_path)] if found and lacking(file_path) else found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Hide GPUs from tests without the marker `gpu`, from their fixtures, and from the processes that they start."""
    with pytest.MonkeyPatch.context() as patch:
        needs_gpu = item.get_closest_marker("gpu") is not None
        if needs_gpu:
            _forget_device()
        else:
            patch.setattr("torch.cuda.is_available", lambda: False)
            patch.setattr("torch.cuda.device_count", lambda: 0)
            patch.setenv("CUDA_VISIBLE_DEVICES", "")
        found = yield
        if needs_gpu:
            _forget_device()
        return found


def _forget_device() -> None:
    """Reset what accelerate and torch's compiler keep of the device of their first use."""
    has_triton.cache_clear()
    if (accelerate := sys.modules.get("accelerate.state")) is not None:
        accelerate.AcceleratorState._reset_state(reset_partial_state=True)
