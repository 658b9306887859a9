"""benchmarks/gpu.py on a CPU: every probe runs, keeps its results, goes on where it stopped, and ends in time."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nearfar._utils.checks import RECENT
from nearfar.bench import DeviceLostError

FILE = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
pytestmark = pytest.mark.skipif(not FILE.exists(), reason="benchmarks are not in a release")


@pytest.fixture(scope="module")
def job():
    spec = importlib.util.spec_from_file_location("benchmarks_gpu", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def given(tmp_path):
    return argparse.Namespace(
        output=tmp_path, seconds=300.0, device="cpu", width=8, tiny=True, most=1, backend="eager", probes=["small"]
    )


def results(file):
    return json.loads(file.read_text(encoding="utf-8"))["results"]


def test_engines_are_held_to_dense(job, given):
    job.correctness(given)
    found = results(given.output / "correctness.json")
    assert {each["case"].split(", ")[1] for each in found} >= {"tiled"}
    assert [each["case"] for each in found if not each.get("ok")] == []


def test_a_wrong_engine_is_seen(job, given, monkeypatch):
    real = job.SUBJECTS["Contrastive"]

    def made(rows, width, engine):
        loss = real.make(rows, width, engine)
        if engine == "tiled":
            loss.register_forward_hook(lambda module, told, value: 1.01 * value)
        return loss

    monkeypatch.setitem(job.SUBJECTS, "Contrastive", SimpleNamespace(make=made, usual=True, peer=None))
    monkeypatch.setattr(job, "_subjects", lambda given: ["Contrastive", "SupCon"])
    job._reference.cache_clear()
    job.correctness(given)
    found = {each["case"]: each["ok"] for each in results(given.output / "correctness.json")}
    assert found["SupCon, tiled, float32, 24 rows"]
    assert not found["Contrastive, tiled, float32, 24 rows"]


def test_tables_are_kept_and_resumed(job, given, monkeypatch):
    given.most = 2
    job.small(given)
    first = results(given.output / "small.json")
    assert {each["precision"] for each in first} == {"float32", "bf16"}
    assert all(each["cells"]["auto"]["launches"] for each in first if each["rows"] == 16)
    monkeypatch.setattr("nearfar.bench._study._row", None)  # nothing is measured again
    job.small(given)
    assert results(given.output / "small.json") == first


def test_big_batches(job, given):
    job.big(given)
    assert {each["precision"] for each in results(given.output / "big.json")} == {"bf16", "float32", "tf32"}


def test_waits_are_counted(job, given):
    job.waits(given)
    found = results(given.output / "waits.json")
    assert {each["case"].split(", ")[1] for each in found} >= {"dense", "tiled"}
    assert not any("failed" in each for each in found)


@pytest.mark.skipif(not RECENT, reason="a loss is one graph from PyTorch 2.11 on")
def test_graphs_by_the_compiler(job, given):
    job.graphs(given)
    (found,) = results(given.output / "graphs.json")
    assert found["ok"], found


def test_graphs_by_hand(job, monkeypatch):
    """With a graph that replays what was called while it was recorded."""
    calls, real, batch, step = [], job.backward, job.batch, job.our_step

    class Graph:
        def replay(self):
            e = calls[-1][1]
            e.grad = None
            real(*calls[-1])

    @contextmanager
    def recorded(graph):
        monkeypatch.setattr(job, "backward", lambda *told: calls.append(told) or real(*told))
        yield
        monkeypatch.setattr(job, "backward", real)

    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, value in {"Stream": lambda: stream, "current_stream": lambda: stream, "stream": nullcontext,
                        "graph": recorded, "CUDAGraph": Graph, "synchronize": lambda: None}.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *told, value=value: value(*told))
    monkeypatch.setattr(job, "batch", lambda rows, width, device: batch(rows, width))
    monkeypatch.setattr(
        job, "our_step", lambda subject, rows, width, engine, device: step(subject, rows, width, engine)
    )
    found = job.captured("SupCon", "auto", 16, 8)
    assert found["ok"]
    assert found["gradient"] == 0


# Cases


def test_whatever_a_case_raises_is_its_result(job, tmp_path):
    cases = job.Cases(tmp_path / "c.json", 60)

    def fails():
        raise ValueError("no such luck\nand more")

    cases.run("one", "cpu", fails)
    cases.run("two", "cpu", lambda: {"error": float("nan"), "ms": 1.23456789})
    one, two = results(tmp_path / "c.json")
    assert one["failed"] == "ValueError: no such luck"
    assert (two["error"], two["ms"]) == ("nan", 1.2346)
    again = job.Cases(tmp_path / "c.json", 60)
    again.run("one", "cpu", None)  # is known, and not called


def test_nothing_begins_after_its_time(job, tmp_path):
    cases = job.Cases(tmp_path / "c.json", -1)
    cases.run("one", "cpu", None)
    assert not (tmp_path / "c.json").exists()


def test_a_lost_device_is_told(job, tmp_path, monkeypatch):
    def lost():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    cases = job.Cases(tmp_path / "c.json", 60)
    with pytest.raises(DeviceLostError):
        cases.run("one", "cuda", dict)
    assert results(tmp_path / "c.json")[0]["case"] == "one"


def test_a_failed_capture_asks_whether_others_still_work(job, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(job, "_records", lambda: asked.append(1))
    cases = job.Cases(tmp_path / "c.json", 60)
    cases.run("one", "cuda", dict)
    assert not asked
    cases.run("two", "cuda", lambda: {"failed": "no"})
    assert asked

    def no():
        raise RuntimeError("captures_underway")

    monkeypatch.setattr(job, "_records", no)
    with pytest.raises(DeviceLostError):
        cases.run("three", "cuda", lambda: {"failed": "no"})


# Processes


def script(tmp_path, text):
    (tmp_path / "child.py").write_text(text, encoding="utf-8")
    return str(tmp_path / "child.py")


@pytest.mark.parametrize(
    ("text", "codes"),
    [("raise SystemExit(0)", [0]), ("raise SystemExit(3)", [3, 3, 3]), ("raise SystemExit(1)", [1])],
)
def test_a_lost_device_is_tried_again(job, given, monkeypatch, text, codes):
    monkeypatch.setattr(job, "TRIES", 3)
    monkeypatch.setattr(job, "__file__", script(given.output, text))
    (told,) = job.session(given)
    assert told["exit codes"] == codes
    assert json.loads((given.output / "session.json").read_text(encoding="utf-8"))["probes"] == [told]


@pytest.mark.skipif(sys.platform == "win32", reason="groups of processes are POSIX's")
def test_a_probe_that_does_not_end_is_stopped(job, given, monkeypatch):
    given.seconds, given.probes = 2.0, ["small", "big"]
    monkeypatch.setattr(job, "__file__", script(given.output, "import time; time.sleep(600)"))
    assert [each["exit codes"] for each in job.session(given)] == [["time"], ["time"]]


def test_the_command(job, given):
    words = [str(FILE), "--output", str(given.output), "--device", "cpu", "--tiny", "--most", "1", "--width", "8",
             "--probes", "correctness", "--seconds", "200"]  # fmt: skip
    done = subprocess.run([sys.executable, *words], capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "'exit codes': [0]" in done.stdout
    assert results(given.output / "correctness.json")
