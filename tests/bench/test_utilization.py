"""Utilization of a GPU: what nvidia-smi reports during a span of time, and None where it reports nothing."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").is_file())
if not (ROOT / "benchmarks").exists():
    pytest.skip("benchmarks are not in a release", allow_module_level=True)
sys.path.insert(0, str(ROOT / "benchmarks" / "speed"))
import utilization  # noqa: E402
from utilization import Utilization  # noqa: E402


def test_idle_share_of_a_span(monkeypatch):
    told = iter(["20\n", "60\n"])

    def run(*words, **how):
        return subprocess.CompletedProcess(words, 0, stdout=next(told, ""))

    monkeypatch.setattr(utilization.subprocess, "run", run)
    monkeypatch.setattr(utilization, "EVERY", 0.01)
    with Utilization() as watch:
        while len(watch.busy) < 2:
            time.sleep(0.01)
    (first, _), (second, _) = watch.busy
    assert watch.idle_between() == pytest.approx(0.6)
    assert watch.idle_between(second, second) == pytest.approx(0.4)
    assert watch.idle_between(0, first - 1) is None


def test_without_a_gpu_nothing_is_known(monkeypatch):
    def run(*words, **how):
        raise FileNotFoundError

    monkeypatch.setattr(utilization.subprocess, "run", run)
    monkeypatch.setattr(utilization, "EVERY", 0.01)
    with Utilization() as watch:
        time.sleep(0.05)
    assert watch.idle_between() is None
