"""The Makefile announces what it installs outside the project, and its targets run what they should."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAKE = shutil.which("make")

pytestmark = pytest.mark.skipif(MAKE is None or os.name != "posix", reason="make is not installed here")


def browser(folder: Path, *words: str, user: int = 0, apt: int | None = 0, present: str | None = None) -> str:
    """What `make browser` says where only these programs are to be found; `apt` is the exit code of apt-get."""
    for name in ("sh", "env"):
        (folder / name).symlink_to(str(shutil.which(name)))
    programs = {"id": f"echo {user}", "apt-get": f"echo apt-get $*; exit {apt}", str(present): "true"}
    for name, text in programs.items():
        if name != "None" and not (name == "apt-get" and apt is None):
            (folder / name).write_text(f"#!{shutil.which('sh')}\n{text}\n", encoding="utf-8")
            (folder / name).chmod(0o755)
    command = [str(MAKE), "--no-print-directory", "browser", *words]
    environment = {"PATH": str(folder), "LC_ALL": "C"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, encoding="utf-8", check=True).stdout


def test_a_browser_is_announced_before_it_is_installed(tmp_path):
    first, *rest = browser(tmp_path).splitlines()
    assert "apt-get installs Chromium now, outside the project" in first
    assert rest == ["apt-get update -q", "apt-get install -y -q chromium"]


def test_a_browser_that_is_there_is_left_alone(tmp_path):
    assert browser(tmp_path, present="google-chrome") == ""


@pytest.mark.parametrize("how", [{"user": 1000}, {"apt": None}])
def test_without_root_or_apt_get_the_tests_go_on(tmp_path, how):
    said = browser(tmp_path, **how)
    assert said == "No browser is here and none is installed: the tests of the report page will be skipped.\n"


def test_an_installation_that_fails_or_is_not_wanted_stops_nothing(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert browser(tmp_path / "a", apt=100).endswith("the tests of the report page will be skipped.\n")
    assert "apt-get" not in browser(tmp_path / "b", "BROWSER=skip")


def test_ci_runs_the_test_command_and_the_doctests_on_plain_kernels():
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert "make test" in lines
    assert "ATEN_CPU_CAPABILITY=default make docs" in lines
    assert "export NEARFAR_BROWSER=required" in lines


@pytest.mark.parametrize("fails", ["", "ruff", "mypy", "python"])
def test_whatever_fails_fails_the_test_command(tmp_path, fails):
    """mypy runs beside the tests; its words come after theirs."""
    for name in ("ruff", "mypy", "python"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {name} $1 $2\nexit {int(name == fails)}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    words = [
        str(MAKE),
        "--silent",
        "test",
        "BROWSER=skip",
        f"BIN={tmp_path}",
        f"BASE={tmp_path / 'ruff'}",
        f"READY={tmp_path / 'ruff'}",
    ]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, encoding="utf-8", check=False)
    assert bool(done.returncode) == bool(fails)
    assert ("python -m pytest" in done.stdout) == (fails != "ruff")
    if fails != "ruff":
        assert done.stdout.index("python -m pytest") < done.stdout.index("mypy")


def test_the_demo_installs_the_package_alone_and_tests_the_rest(tmp_path):
    """In an empty clone; what the demo installed, tests do not install again."""
    words = [str(MAKE), "-n", f"BASE={tmp_path / 'base'}", f"READY={tmp_path / 'ready'}"]
    told = {"cwd": ROOT, "capture_output": True, "encoding": "utf-8", "check": True}

    def installs(target: str) -> list[str]:
        shown = subprocess.run([*words, target], **told).stdout
        return re.findall(r"pip install .*?(-e .*|--no-deps .*)", shown)

    demo, rest = ['-e "."'], ['-e ".[dev]"', "--no-deps timm torchvision"]
    assert installs("demo") == demo
    assert installs("lint") == [*demo, *rest]
    (tmp_path / "base").touch()
    assert installs("demo") == []
    assert installs("lint") == rest


def test_portable_tries_other_kernels_threads_and_hash_seeds():
    shown = subprocess.run(
        ["make", "-n", "portable"], cwd=ROOT, capture_output=True, encoding="utf-8", check=True
    ).stdout
    for setting in (
        "ATEN_CPU_CAPABILITY=default",
        "ATEN_CPU_CAPABILITY=avx2",
        "MKL_CBWR=COMPATIBLE",
        "OMP_NUM_THREADS=1",
        "OMP_NUM_THREADS=2",
        "PYTHONHASHSEED",
        "docs README.md src",
        "tests/losses tests/",
    ):
        assert setting in shown


def test_bytecode_is_kept_also_where_the_environment_forbids_it():
    """Without it every process that a test starts compiles all that it imports."""
    words = [str(MAKE), "--no-print-directory", "--eval", "shown: ; @echo [$$PYTHONDONTWRITEBYTECODE]", "shown"]
    told = {"env": os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}, "capture_output": True, "encoding": "utf-8"}
    assert subprocess.run(words, cwd=ROOT, check=True, **told).stdout == "[]\n"


def test_the_test_command_skips_nothing_that_it_installed():
    """And the command of machines that cannot install uses their Python, and skips."""
    told = {"cwd": ROOT, "capture_output": True, "encoding": "utf-8", "check": True}
    words = [str(MAKE), "-n", "--no-print-directory", "PYTHON=/there/python", "WORKERS=16"]
    shown = {name: subprocess.run([*words, name], **told).stdout for name in ("test", "gpu")}
    assert "NEARFAR_PACKAGES=required" in shown["test"]
    assert shown["gpu"].startswith(f"PYTHONPATH={ROOT}/src ")
    assert "/there/python -m pytest -n 16 --dist worksteal -rs" in shown["gpu"]
    assert "pip" not in shown["gpu"]
    assert "NEARFAR_PACKAGES" not in shown["gpu"]
