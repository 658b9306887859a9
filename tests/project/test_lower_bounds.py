"""Lower bounds in pyproject.toml are the releases that `make lowest` installs and tests."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
TOOLS = ("dev", "site", "test")
"""Extras that users do not install: their bounds were not run."""


def requirements(*without: str) -> list[Requirement]:
    """All that pyproject.toml asks for, but for its own extras and those named."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [some for name, some in project["optional-dependencies"].items() if name not in without]
    return [
        each for some in [project["dependencies"], *extras] for each in map(Requirement, some) if each.name != "nearfar"
    ]


def pins(name: str) -> dict[str, Version]:
    """Package -> version of a file of constraints, each of which must be exact."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    found = {}
    for each in (Requirement(line) for line in lines if line and not line.startswith("#")):
        (only,) = each.specifier
        assert only.operator == "=="
        found[canonicalize_name(each.name)] = Version(only.version)
    return found


def test_lower_bounds_are_what_was_run():
    bounds = {}
    for each in requirements(*TOOLS):
        (only,) = each.specifier  # one bound each, and none without
        assert only.operator == ">="
        bounds[canonicalize_name(each.name)] = Version(only.version)
    installed = pins("constraints-lowest.txt")
    assert bounds == {name: installed.get(name) for name in bounds}


def test_pages_name_the_oldest_pytorch_that_was_run():
    oldest = pins("constraints-lowest.txt")["torch"]
    for name in ("README.md", "docs/start/install.md"):
        said = re.findall(r"PyTorch (\d+\.\d+) or newer", (ROOT / name).read_text(encoding="utf-8"))
        assert said == [f"{oldest.major}.{oldest.minor}"], name


def test_what_make_test_installs_is_allowed():
    """And pinned to the last package: a release of tomorrow must not decide whether the tests of today pass."""
    installed = pins("constraints.txt")
    for each in requirements():
        assert installed[canonicalize_name(each.name)] in each.specifier
