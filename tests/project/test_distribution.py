"""The wheel is small and complete, and runs in an environment without other packages of ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from needs import need

import nearfar as nf

need("build")
pytest.importorskip("setuptools", reason="setuptools is not installed")

ROOT = Path(__file__).parents[2]
LARGEST = 1_000_000  # bytes


def ran(*words: object, cwd: Path | None = None) -> str:
    """What a command prints, without this checkout on its path."""
    bare = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    told = {"cwd": cwd, "env": bare | {"OMP_NUM_THREADS": "1", "COLUMNS": "160"}, "timeout": 600, "check": False}
    done = subprocess.run(list(map(str, words)), capture_output=True, encoding="utf-8", **told)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that nothing which an older build left behind can slip in."""
    folder = tmp_path_factory.mktemp("dist")
    copy = folder / "sources"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    ran(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, copy)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def programs(wheel, tmp_path_factory) -> Path:
    """The programs of an environment that holds the wheel alone; what it needs is borrowed from ours."""
    folder = tmp_path_factory.mktemp("empty")
    ran(sys.executable, "-m", "venv", "--without-pip", folder)
    place = "Scripts" if os.name == "nt" else "bin"
    python = folder / place / "python"
    (home,) = ran(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").split()
    # A path file of another environment is not read, so that our own editable install stays outside.
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (Path(home) / "borrowed.pth").write_text("\n".join(sorted(borrowed)) + "\n", encoding="utf-8")
    ran(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet", wheel)
    shown = ran(python, "-c", "import nearfar; print(nearfar.__file__)", cwd=folder).strip()
    assert Path(shown).is_relative_to(home)
    return folder / place


def test_the_wheel_is_small_and_whole(wheel):
    assert wheel.stat().st_size < LARGEST
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if not name.startswith(f"nearfar-{nf.__version__}.dist-info/")}
    source = Path(nf.__file__).parent
    wanted = {
        path.relative_to(source.parent).as_posix()
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert held == wanted  # every module, and every file that they read


def test_its_description_can_be_shown(wheel):
    need("twine")
    assert "PASSED" in ran(sys.executable, "-m", "twine", "check", "--strict", wheel)


def test_its_metadata_name_the_extras(wheel):
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"nearfar-{nf.__version__}.dist-info/METADATA").decode()
    for line in ("Provides-Extra: all", "Provides-Extra: onnx", "License-Expression: Apache-2.0"):
        assert line in text.splitlines()
    needed = [line for line in text.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert not any("scikit-learn" in line for line in needed)


def test_the_command_runs_where_nothing_else_is_ours(programs, tmp_path):
    assert "demo" in ran(programs / "nearfar", "--help", cwd=tmp_path)
    assert "MultiSimilarity" in ran(programs / "nearfar", "losses", cwd=tmp_path)
    shown = ran(programs / "nearfar", "demo", "--quick", "--steps", "4", cwd=tmp_path)
    assert "R@1 after:" in shown
