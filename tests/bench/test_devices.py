"""`nearfar bench` on a device: engines offered, messages for failures, resuming, launches. Nothing is timed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from nearfar.bench import (
    PEER,
    SUBJECTS,
    Cell,
    DeviceLostError,
    Limits,
    Patience,
    Plan,
    Row,
    measure,
    offered,
)
from nearfar.bench import _launches as counting
from nearfar.bench import (
    _pages as pages,
)
from nearfar.bench import (
    _study as study,
)
from nearfar.bench import (
    _subjects as subjects,
)
from nearfar.bench import (
    _timing as timing,
)
from nearfar.bench._launches import kernels_of, launches
from nearfar.bench._study import Pace, Subject
from nearfar.cli.commands import bench as command
from nearfar.cli.main import app

FAST = Patience(rounds=1, seconds=1.0)


def small(**more):
    common = {"losses": ("SupCon",), "sizes": (32,), "width": 8, "patience": FAST, "memory": False, "peers": False}
    return Plan(**{**common, **more})


def row(rows=128, limit=0.001, loss="SupCon", precision="float32", **cells):
    return Row(loss, rows, 8, 1, limit, 1, cells, precision)


# What is tried


def test_engines_are_asked_for(monkeypatch):
    assert {"auto", "dense", "tiled"} <= set(offered("cpu"))

    def made(rows, width, engine):
        if engine == "tiled":
            raise ValueError("it cannot serve")
        return SUBJECTS["SupCon"].make(rows, width, "dense")

    monkeypatch.setitem(SUBJECTS, "MultiSimilarity", Subject("MultiSimilarity", made))
    assert "tiled" not in offered("cpu")
    assert "fused" in offered("cpu")  # whoever can be made and called is there


@pytest.mark.parametrize("precision", ["float32", "bf16", "float64"])
def test_precision_of_rows_and_of_the_limit(precision, monkeypatch):
    seen = []
    monkeypatch.setattr(timing, "products", lambda e: seen.append(e.dtype))
    (found,) = measure(small(precisions=(precision,), engines=("dense", "tiled")))
    assert found.precision == precision
    assert set(seen) == {subjects.PRECISIONS[precision]}
    assert not found.cells["tiled"].failed


def test_tf32_holds_within_its_rows_only():
    before = torch.backends.cuda.matmul.allow_tf32
    with subjects.matmul("tf32"):
        assert torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cuda.matmul.allow_tf32 == before


# Failures


def fails(when):
    """A loss that fails in the call of this number, with too little memory."""
    calls = []

    class Fails(torch.nn.Module):
        def forward(self, e, y):
            calls.append(1)
            if len(calls) == when:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
            return e.sum()

    return lambda rows, width, engine: Fails() if engine == "dense" else SUBJECTS["SupCon"].make(rows, width, engine)


@pytest.mark.parametrize("when", [1, 2])
def test_one_failure_is_a_word_in_its_cell(when, monkeypatch):
    monkeypatch.setitem(SUBJECTS, "Fails", Subject("Fails", fails(when)))
    plan = small(losses=("Fails",), engines=("tiled", "dense"), sizes=(32, 64), launches=64 if when == 1 else 0)
    first, second = measure(plan)
    assert first.cells["dense"] == Cell(failed="memory")
    assert first.cells["tiled"].seconds > 0
    assert first.limit > 0
    assert second.cells["dense"] == Cell(failed="memory at 32")  # and is not tried again


def test_an_engine_that_cannot_serve_is_a_word(monkeypatch):
    def made(rows, width, engine):
        raise ValueError("Loss: engine cannot serve this loss; use another")

    monkeypatch.setitem(SUBJECTS, "Refuses", Subject("Refuses", made))
    (found,) = measure(small(losses=("Refuses",)))
    assert found.cells["auto"].failed == "ValueError: Loss: engine cannot serve this loss; use another"
    assert "| auto | ValueError |" in pages.contest([found])


def test_a_batch_that_does_not_fit(monkeypatch):
    def none(*given):
        raise RuntimeError("not enough memory: you tried to allocate memory")

    monkeypatch.setattr(study.subjects, "batch", none)
    (found,) = measure(small(engines=("dense", "tiled")))
    assert {cell.failed for cell in found.cells.values()} == {"memory"}
    assert found.limit is None
    assert found.x_limit("dense") is None


def test_a_lost_device_ends_the_run_and_keeps_the_row(monkeypatch):
    answers = iter([True, True, False])  # before each of two contestants, and after the row
    monkeypatch.setattr(study, "_alive", lambda device: next(answers))
    run = measure(small(engines=("dense", "tiled"), sizes=(32, 64)))
    assert next(run).rows == 32
    with pytest.raises(DeviceLostError, match="use --resume"):
        next(run)


def test_kernels_are_made_before_they_are_timed(monkeypatch):
    calls = []

    def made(rows, width, engine):
        return lambda e, y: calls.append("step") or e.sum()

    monkeypatch.setitem(SUBJECTS, "Compiles", Subject("Compiles", lambda *told: torch.nn.Identity()))
    monkeypatch.setattr(study.Task, "step", lambda task: made(task.rows, task.width, task.engine))
    monkeypatch.setattr(study, "time_in_turns", lambda steps, *more: calls.append("timed") or timing.Timed({}, 0))
    monkeypatch.setattr(study, "_alive", lambda device: True)
    real = subjects.batch
    monkeypatch.setattr(subjects, "batch", lambda rows, width, *more: real(rows, width))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    list(measure(small(losses=("Compiles",), device="cuda")))
    assert calls == ["step", "timed"]


# Time


def test_what_would_take_too_long_is_not_begun():
    pace = Pace(step=1.0, total=9.0, clock=iter([0.0, 4.0, 4.0]).__next__)
    pace.note(row(1000, 0.01, auto=Cell(0.3), dense=Cell(0.2), PML=Cell(failed="memory")))
    assert pace.expected("SupCon", 2000, "float32", "auto") == pytest.approx(1.2)
    assert pace.failed("SupCon", 2000, "float32", "auto") == "time"
    assert pace.failed("SupCon", 2000, "float32", "dense") == ""
    assert pace.failed("SupCon", 2000, "bf16", "auto") == ""
    assert pace.failed("SupCon", 1000, "float32", PEER) == "memory at 1,000"
    assert pace.failed("SupCon", 999, "float32", PEER) == ""  # a smaller batch may fit
    assert pace.fits("SupCon", 2000, "float32", ("auto", "dense"))  # 4 s are gone, 5 x (.8 + .04) s are wanted
    assert not pace.fits("SupCon", 2230, "float32", ("dense",))


def test_without_time_nothing_is_measured():
    had = [row(32, 1.0, auto=Cell(1.0))]
    assert list(measure(small(seconds=10.0, sizes=(32, 64), limits=Limits(1, 100)), known=had)) == []
    assert len(list(measure(small(seconds=60.0, sizes=(32, 64), limits=Limits(1, 100)), known=had))) == 1


def test_a_limit_that_takes_too_long_leaves_the_size_out():
    (found,) = measure(small(sizes=(32, 64), limits=Limits(1, 3.0)), known=[row(32, 1.0, auto=Cell(1e-3))])
    assert found.rows == 64
    assert found.cells["auto"].failed == "time"
    assert found.limit is None


# Launches


def test_operators_are_counted_on_a_cpu():
    e, y = subjects.batch(16, 4)
    few = launches(lambda e, y: e.sum(), e, y)
    more = launches(lambda e, y: e.exp().sum(), e, y)
    assert 0 < few < more
    assert e.grad is None


def test_launches_of_a_profile():
    names = ["aten::mm", "cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx", "cudaMemcpyAsync"]
    assert kernels_of(names, ["gemm", "Memcpy DtoH"]) == 3
    assert kernels_of(names[:2], ["gemm", "Memcpy DtoH", "ours", "## mark"]) == 2  # one was not seen on the host
    assert kernels_of([*names[:2], "cudaGraphLaunch"], ["a"] * 9) == 2


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_a_profile_is_read(monkeypatch):
    """On a CPU the profiler sees no kernel, but the way to its events is the same."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    seen = []
    monkeypatch.setattr(counting, "kernels_of", lambda host, device: seen.append((list(host), list(device))) or 7)
    assert counting._kernels(lambda e, y: e.exp().sum(), *subjects.batch(16, 4)) == 7
    ((host, device),) = seen
    assert "aten::exp" in host
    assert not [name for name in device if "exp" in name]  # marks of the profiler itself are no kernels


def test_launches_are_counted_up_to_a_size():
    found = list(measure(small(sizes=(32, 64), launches=32)))
    assert found[0].cells["auto"].launches > 10
    assert found[1].cells["auto"].launches is None
    assert "launches" in pages.line(found[0], "auto")


# Files


ROWS = [
    row(128, auto=Cell(0.002, 1.0, "", 30), dense=Cell(0.003, 2.0), PML=Cell(0.004, 3.0)),
    row(128, precision="bf16", auto=Cell(0.001, 1.0), dense=Cell(failed="memory"), PML=Cell(failed="time")),
]


def test_a_line_for_each_engine():
    text = pages.contest(ROWS)
    assert "| SupCon | 128 | float32 | auto | 2.0 | 2.0 | 2.0 | 30 | 1 |" in text
    assert "| SupCon | 128 | bf16 | dense | memory | - | - | - | - |" in text
    assert "SupCon, dense, bf16" in pages.line(ROWS[1], "dense")


def test_rows_are_kept_in_order_and_come_back(tmp_path):
    plan = small(engines=("auto", "dense"), precisions=("float32", "bf16"))
    assert pages.keep(tmp_path / "bench.json", reversed(ROWS), plan) == ROWS
    assert pages.known(tmp_path / "bench.json", plan) == ROWS
    assert pages.known(tmp_path / "none.json", plan) == []


@pytest.mark.parametrize(
    ("change", "said"), [({"width": 16}, "width was 8, and is 16"), ({"engines": ("dense",)}, "engines")]
)
def test_other_results_are_not_resumed(tmp_path, change, said):
    pages.keep(tmp_path / "bench.json", ROWS, small())
    with pytest.raises(ValueError, match="cannot be resumed") as caught:
        pages.known(tmp_path / "bench.json", replace(small(), **change))
    assert said in str(caught.value)


def test_broken_results_are_not_resumed(tmp_path):
    (tmp_path / "bench.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="holds no results to resume"):
        pages.known(tmp_path / "bench.json", small())


def test_the_picture_has_a_curve_for_each_precision(tmp_path, monkeypatch):
    seen = {}
    from matplotlib.figure import Figure

    monkeypatch.setattr(Figure, "savefig", lambda self, name, **options: seen.update(figure=self) or name.touch())
    rows = [replace(each, rows=size) for size in (128, 256) for each in ROWS]
    pages.write(tmp_path, [*rows, row(512, None, auto=Cell(failed="time"))], small(engines=("auto", "dense")))
    labels = {line.get_label() for line in seen["figure"].axes[0].lines}
    assert {"nearfar", "nearfar, bf16", "two products", "two products, bf16", "PML"} <= labels


# The command


ASKED = ["bench", "--loss", "SupCon", "--sizes", "32,64", "--width", "8", "--quick", "--engines", "auto,dense"]


def test_the_command_keeps_each_row_and_resumes(tmp_path, monkeypatch):
    asked = [*ASKED, "--precision", "float32,bf16", "--out", str(tmp_path)]
    real, done = study._row, []

    def stops(plan, subject, rows, *more):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(rows)
        return real(plan, subject, rows, *more)

    monkeypatch.setattr(study, "_row", stops)
    monkeypatch.setattr(study, "peak", lambda task, limits: study.Peak(1.0, 0.001))
    CliRunner().invoke(app, asked)
    told = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))["results"]
    assert [(each["rows"], each["precision"]) for each in told] == [(32, "float32"), (64, "float32"), (32, "bf16")]
    done.clear()
    again = CliRunner().invoke(app, [*asked, "--resume"])
    assert again.exit_code == 0, again.output
    assert done == [64]
    assert len(json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))["results"]) == 4
    assert "| SupCon | 64 | bf16 | dense |" in (tmp_path / "bench.md").read_text(encoding="utf-8")


def test_progress_counts_all_rows_and_names_the_one(tmp_path, monkeypatch):
    told = []

    class Bar(command.Progress):
        def to(self, done, words=""):
            told.append((self.what, done, self.total, words))

    monkeypatch.setattr(command, "Progress", Bar)
    monkeypatch.setattr(study, "peak", lambda task, limits: study.Peak(1.0, 0.001))
    CliRunner().invoke(app, [*ASKED, "--out", str(tmp_path)])
    assert [each for each in told if each[3]] == [
        ("measuring", 0, 2, "SupCon, 32 rows, float32"),
        ("measuring", 1, 2, "SupCon, 64 rows, float32"),
    ]


def test_plans_of_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("nearfar.bench.offered", lambda device: ("auto", "dense", "fused"))
    plan = command.make_plan("cuda")
    assert plan.engines == ("auto", "dense", "fused")
    assert (plan.width, plan.sizes[0], plan.sizes[-1]) == (512, 128, 2**20)
    assert plan.precisions == ("float32", "bf16")


def test_a_gpu_is_warmed_up_before_it_is_timed():
    """A loss records itself after a few calls; a step that fails is told, and not tried again."""
    calls, failed = [], {}

    def broken(e, y):
        calls.append("broken")
        raise RuntimeError("no")

    def good(e, y):
        calls.append("good")
        return e.sum()

    e, y = torch.zeros(4, 2, requires_grad=True), torch.zeros(4)
    timing._warm({"good": good, "broken": broken}, e, y, 60.0, failed)
    assert calls == ["good"] * timing.WARM + ["broken"]
    assert list(failed) == ["broken"]
