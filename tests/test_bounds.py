"""The oldest releases that pyproject.toml allows are those that `make lowest` installs and runs the tests on."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
# Run on a GPU machine; the index offers this release for a CPU with gigabytes of CUDA beside it, so that `make lowest`
# installs the pinned one in its place.
ELSEWHERE = {"torch": Version("2.11")}


def requirements() -> list[Requirement]:
    """All that pyproject.toml asks for, but for its own extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    return [each for some in lists for each in map(Requirement, some) if each.name != project["name"]]


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
    for each in requirements():
        (only,) = each.specifier  # one bound each, and none without
        assert only.operator in (">=", "==")
        bounds[canonicalize_name(each.name)] = Version(only.version)
    assert bounds == pins("constraints-lowest.txt") | ELSEWHERE


def test_what_make_test_installs_is_allowed():
    """And pinned to the last package: a release of tomorrow must not decide whether the tests of today pass."""
    installed = pins("constraints.txt")
    for each in requirements():
        assert installed[canonicalize_name(each.name)] in each.specifier
