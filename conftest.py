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

collect_ignore = ["tests/support"]
if os.environ.get("TRITON_INTERPRET") != "1":
    # other tests run these in a process of their own
    collect_ignore += ["tests/interpreted"]
if importlib.util.find_spec("triton") is None:
    collect_ignore += [f"src/nearfar/engines/_kernels{name}.py" for name in ("", "_pairs", "_top", "_triplets")]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Search for no garbage among modules and tests, all of which stay: that would take as long as to import them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


class Lacking(pytest.File):
    """A file that cannot be imported here."""

    def collect(self) -> Iterable[pytest.Item]:
        """Nothing: it is skipped whole."""
        pytest.skip(lacking(self.path) or "", allow_module_level=True)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> Generator[None, Any, Any]:
    """Skip a file that imports a missing package, in place of an error."""
    found = yield
    return [Lacking.from_parent(parent, path=file_path)] if found and lacking(file_path) else found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Hide GPUs from a test that is not of one, from its fixtures and from the processes that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        seen = item.get_closest_marker("gpu") is not None
        if not seen:
            patch.setattr("torch.cuda.is_available", lambda: False)
            patch.setattr("torch.cuda.device_count", lambda: 0)
            patch.setenv("CUDA_VISIBLE_DEVICES", "")
        accelerate = sys.modules.get("accelerate.state")
        if seen and accelerate is not None:  # it keeps the device of its first use
            accelerate.AcceleratorState._reset_state(reset_partial_state=True)
        found = yield
        if seen and (accelerate := sys.modules.get("accelerate.state")) is not None:
            accelerate.AcceleratorState._reset_state(reset_partial_state=True)
        return found
