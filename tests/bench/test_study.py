"""`nearfar bench`: what it times, how it reports failures, what it writes. No test depends on durations."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
import torch
from needs import need
from typer.testing import CliRunner

import nearfar as nf
from nearfar.bench import (
    PEER,
    SUBJECTS,
    Cell,
    Limits,
    Patience,
    Peak,
    Plan,
    Row,
    Task,
    exponent,
    growth,
    measure,
    peak,
    report,
    write,
)
from nearfar.bench import (
    _memory as memory,
)
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
from nearfar.bench._study import Subject
from nearfar.cli.main import app

FAST = Patience(rounds=1, seconds=1.0)
PAIRS = [name for name, subject in SUBJECTS.items() if subject.peer is not None]


def small(**more):
    return Plan(**{"losses": ("SupCon",), "sizes": (32,), "width": 8, "patience": FAST, **more})


def row(rows=1024, limit=0.002, **cells):
    return Row("SupCon", rows, 128, 1, limit, 9, cells)


@pytest.fixture
def no_processes(monkeypatch):
    """Peaks are told, not measured: PML fails for memory from 64 rows on."""

    def told(task, limits):
        fails = task.engine == PEER and task.rows >= 64
        return Peak(failed="memory") if fails else Peak(1.5, 0.001)

    monkeypatch.setattr(study, "peak", told)


# What is timed


def test_every_loss_and_miner_is_a_subject():
    made = [subject.make(32, 8, "dense") for subject in SUBJECTS.values()]
    assert {type(loss).__name__ for loss in made} == set(nf.losses.__all__)
    miners = {type(getattr(loss, "miner", None)).__name__ for loss in made}
    assert {"MultiSimilarity", "Hard", "SemiHard", "BalancedHard", "DistanceWeighted"} <= miners


SAME = [name for name in PAIRS if name not in ("Margin", "Angular", "miner DistanceWeighted")]


@pytest.mark.parametrize("name", SAME)
def test_ours_and_theirs_are_the_same_loss(name):
    need("pytorch_metric_learning")
    e, y = subjects.batch(48, 8)
    ours = SUBJECTS[name].make(48, 8, "auto")
    theirs = subjects.peer_step(SUBJECTS[name], 48, 8)
    with torch.no_grad():
        if hasattr(theirs, "proxies"):
            theirs.proxies.copy_(ours.proxies)
        for name in ("W", "fc"):
            if hasattr(theirs, name):
                getattr(theirs, name).copy_(ours.proxies.reshape(-1, 8).T)
    torch.testing.assert_close(ours(e, y), theirs(e, y), rtol=2e-4, atol=1e-5)


def test_the_batch_has_four_of_a_class_and_is_always_the_same():
    e, y = subjects.batch(64, 8)
    assert torch.equal(torch.bincount(y), torch.full((16,), 4))
    assert torch.equal(e, subjects.batch(64, 8)[0])
    assert e.requires_grad
    assert int(subjects.batch(10, 8)[1].max()) == 1  # proxies are made for rows // 4 classes


# How it is timed


def test_contestants_take_turns(monkeypatch):
    seen = []
    monkeypatch.setattr(timing, "products", lambda e: seen.append("limit"))
    monkeypatch.setattr(timing, "SMALL", 0)

    def step(name):
        return lambda e, y: seen.append(name) or e.sum()

    found = timing.time_in_turns({"a": step("a"), "b": step("b")}, *subjects.batch(16, 4), Patience(2, 60))
    assert seen == ["limit", "a", "b", "limit", "b", "a", "limit", "a", "b"]
    assert found.rounds == 2  # the first of three is thrown away
    assert set(found.seconds) == {"limit", "a", "b"}


def test_a_round_longer_than_patience_stands_alone():
    found = timing.time_in_turns({"a": lambda e, y: e.sum()}, *subjects.batch(16, 4), Patience(9, 0.0))
    assert found.rounds == 1


def test_the_median_is_taken_after_the_first_round(monkeypatch):
    ticks = iter([100.0, 1.0, 3.0, 2.0])  # the first is a warm-up

    def rounds(steps, e, y, clock, failed):
        yield "limit", next(ticks)

    monkeypatch.setattr(timing, "_round", rounds)
    found = timing.time_in_turns({}, *subjects.batch(16, 4), Patience(3, 60))
    assert found == timing.Timed({"limit": 2.0}, 3)


@pytest.mark.parametrize("rows", [40, 64])
def test_the_limit_in_strips_is_the_limit(rows, monkeypatch):
    e = subjects.batch(rows, 4)[0].detach()
    shapes = []
    monkeypatch.setattr(timing, "WHOLE", {"cpu": 40})
    real = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: shapes.append(a.shape) or real(a, b))
    timing.products(e)
    assert sum(shape[0] for shape in shapes) == 2 * rows
    assert (max(shape[0] for shape in shapes) == rows) == (rows <= 40)


def test_clock_and_threads():
    assert timing.clock_of("cpu", 1) is time.process_time
    assert timing.clock_of("cpu", 2) is time.perf_counter
    before = torch.get_num_threads()
    with timing.threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


# Memory, in processes of their own


def hungry(n, d, engine):
    """A loss that wants 64 MB once there are more rows than in the step that warms up."""

    class Hungry(torch.nn.Module):
        def forward(self, e, y):
            wanted = torch.ones(2**24 if len(e) > memory.WARM_ROWS else 4)
            return (e * 0).sum() + wanted.sum()

    return Hungry()


def stuck(n, d, engine):
    """A loss that never ends, except when it warms up."""

    class Stuck(torch.nn.Module):
        def forward(self, e, y):
            while len(e) > memory.WARM_ROWS:
                time.sleep(0.01)
            return e.sum()

    return Stuck()


def broken(n, d, engine):
    class Broken(torch.nn.Module):
        def forward(self, e, y):
            raise ValueError("no such luck\nand more")

    return Broken()


def killed(n, d, engine):
    class Killed(torch.nn.Module):
        def forward(self, e, y):
            sys.exit(9)

    return Killed()


@pytest.fixture
def by_fork(monkeypatch):
    """Children that know what a test has put among the subjects; otherwise each is told by a server of its own."""
    import multiprocessing

    real = multiprocessing.get_context("fork")
    monkeypatch.setattr(memory.multiprocessing, "get_context", lambda kind: _Fork(real))
    for make in (hungry, stuck, broken, killed):
        monkeypatch.setitem(SUBJECTS, make.__name__, Subject(make.__name__, make))


class _Fork:
    def __init__(self, real):
        self.Process, self.Pipe = real.Process, real.Pipe

    def set_forkserver_preload(self, names):
        assert "nearfar.bench._memory" in names


forks = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # PyTorch's threads rest meanwhile
needs_linux = pytest.mark.skipif(
    sys.platform != "linux" or torch.cuda.is_available(),
    reason="limits of memory are Linux's here, and autograd refuses to work in the fork of a process that has a GPU",
)


@forks
@needs_linux
def test_memory_of_a_step_is_seen(by_fork):
    found = peak(Task("hungry", "auto", 128, 4), Limits(1024, 30))
    assert not found.failed
    assert 60 < found.megabytes < 90  # 64 MB of floats, and little else


@forks
@needs_linux
def test_failures_are_named(by_fork):
    assert peak(Task("hungry", "auto", 128, 4), Limits(32, 30)) == Peak(failed="memory")
    assert peak(Task("stuck", "auto", 128, 4), Limits(32, 0.2)) == Peak(failed="time")
    assert peak(Task("broken", "auto", 128, 4), Limits(32, 30)) == Peak(failed="ValueError: no such luck")
    assert peak(Task("killed", "auto", 128, 4), Limits(32, 30)) == Peak(failed="memory")


def test_a_fresh_process_measures_a_loss():
    found = peak(Task("SupCon", "auto", 128, 8), Limits(1024, 60))
    assert not found.failed
    assert found.megabytes is not None
    assert found.seconds > 0


# The study


def test_ratios_and_failures(no_processes):
    need("pytorch_metric_learning")
    rows = list(measure(small(sizes=(128, 32, 64))))
    assert [each.rows for each in rows] == [32, 64, 128]
    assert list(rows[0].cells) == ["auto", PEER]
    assert rows[0].over(PEER, "auto") == rows[0].cells[PEER].seconds / rows[0].cells["auto"].seconds
    assert rows[0].x_limit("auto") == rows[0].cells["auto"].seconds / rows[0].limit
    assert rows[1].cells[PEER] == Cell(failed="memory")
    assert rows[2].cells[PEER] == Cell(failed="memory at 64")  # and is not asked again
    assert rows[2].over(PEER, "auto") is None
    assert rows[2].x_limit(PEER) is None
    assert rows[2].cells["auto"].seconds > 0


def test_a_long_step_is_not_taken_again(monkeypatch):
    monkeypatch.setattr(study, "peak", lambda task, limits: Peak(7.0, 100.0))
    monkeypatch.setattr(study, "time_in_turns", lambda steps, *more: timing.Timed({"limit": 2.0, **dict(steps)}, 1))
    (found,) = measure(small(peers=False))
    assert found.cells["auto"] == Cell(100.0, 7.0)
    assert found.x_limit("auto") == 50


def test_several_engines(no_processes):
    (found,) = measure(small(engines=("dense", "tiled"), peers=False))
    assert list(found.cells) == ["dense", "tiled"]
    assert found.over("tiled", "dense") > 0


def test_losses_without_a_peer_stand_alone(no_processes):
    (found,) = measure(small(losses=("DroKL",)))
    assert list(found.cells) == ["auto"]


def test_without_the_peer_library(no_processes, monkeypatch):
    monkeypatch.setattr(study, "peer_version", lambda: None)
    (found,) = measure(small())
    assert list(found.cells) == ["auto"]
    assert "not installed: its columns are empty" in report([found], small())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"losses": ("SupCom",)}, "did you mean 'SupCon'"),
        ({"sizes": ()}, "sizes must be numbers of rows"),
        ({"sizes": (128, 4)}, "each at least 8"),
        ({"width": 0}, "width must be at least 1"),
        ({"threads": 0}, "threads must be at least 1"),
        ({"engines": ("fast",)}, "engine must be"),
        ({"device": "tpu"}, "device must be"),
    ],
)
def test_bad_plans(options, said):
    with pytest.raises(ValueError, match=r"^bench: ") as caught:
        small(**options)
    assert said in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here, so that asking for it is no mistake")
def test_no_gpu_here():
    with pytest.raises(ValueError, match="PyTorch sees no GPU here"):
        small(device="cuda")


def test_exponents_are_of_large_sizes():
    square = [(n, (n / 1024) ** 2) for n in (4096, 8192, 16384)]
    assert exponent([(128, 1e9), (1024, 1e9), *square]) == pytest.approx(2.0)
    assert exponent([(128, 1e9), *((n, n**1.5) for n in (256, 512, 1024))]) == pytest.approx(1.5)  # the three largest
    assert exponent([(256, 1.0), (512, None), (1024, 4.0)]) is None
    rows = [row(n, auto=Cell(n**2 * 1e-9, n * 0.01)) for n in (1024, 2048, 4096)]
    assert growth(rows, "auto")["SupCon"] == pytest.approx({"time": 2.0, "memory": 1.0})
    assert growth(rows, "tiled")["SupCon"] == {"time": None, "memory": None}


# Files


ROWS = [
    row(128, 0.0001, auto=Cell(0.002, 1.0), PML=Cell(0.003, 2.0)),
    row(1024, auto=Cell(0.005, 17.2), PML=Cell(0.015, 96.0)),
    row(4096, 0.04, auto=Cell(0.06, 30.0), PML=Cell(None, None, "memory")),
]


def test_rows_come_back_from_json():
    for each in ROWS:
        told = json.loads(json.dumps(each.to_dict()))
        assert Row.from_dict(told) == each
        assert told["cells"]["auto"]["x_limit"] == each.x_limit("auto")


def test_three_files_are_written(tmp_path):
    plan = small(sizes=(128, 1024, 4096))
    files = write(tmp_path / "new", ROWS, plan)
    assert [file.name for file in files] == ["bench.json", "bench.md", "bench.png"]
    assert sorted(file.name for file in (tmp_path / "new").iterdir()) == sorted(file.name for file in files)
    told = json.loads(files[0].read_text(encoding="utf-8"))
    assert [each["rows"] for each in told["results"]] == [128, 1024, 4096]
    assert told["versions"]["torch"] == torch.__version__
    assert told["exponents"]["auto"]["SupCon"]["time"] > 0
    text = files[1].read_text(encoding="utf-8")
    assert "| SupCon | 1,024 | 5.0 | 2.5 | 3.0 | 17 | 96 |" in text
    assert "| SupCon | 4,096 | 60.0 | 1.5 | memory | 30 | memory |" in text
    assert files[2].read_bytes().startswith(b"\x89PNG")


def test_a_file_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    files = write(tmp_path, ROWS, small())
    before = {file: file.read_bytes() for file in files}
    from matplotlib.figure import Figure

    def half(self, name, **options):
        name.write_bytes(b"\x89PNG")
        raise OSError("disk full")

    monkeypatch.setattr(Figure, "savefig", half)
    with pytest.raises(OSError, match="disk full"):
        write(tmp_path, ROWS, small())
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_the_picture_marks_failures(tmp_path, monkeypatch):
    seen = {}
    from matplotlib.figure import Figure

    monkeypatch.setattr(Figure, "savefig", lambda self, name, **options: seen.update(figure=self) or name.touch())
    write(tmp_path, ROWS, small())
    time_of, memory_of = seen["figure"].axes
    for ax in (time_of, memory_of):
        assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
        crosses = [line for line in ax.lines if line.get_marker() == "x"]
        assert [float(line.get_xdata()[0]) for line in crosses] == [4096]
        assert [text.get_text() for text in ax.texts] == ["memory"]


def test_lines_for_the_terminal():
    told = [pages.line(each, "auto") for each in ROWS]
    assert "PML 3.0 x as long" in told[1]
    assert "PML: memory" in told[2]
    assert pages.line(row(tiled=Cell(0.005, 17.2)), "tiled").startswith("SupCon, tiled ")
    assert "failed: time" in pages.line(row(auto=Cell(failed="time")), "auto")


# The command


def test_the_command(tmp_path):
    """With real processes, at a tiny size."""
    need("pytorch_metric_learning")
    asked = ["bench", "--loss", "SupCon", "--sizes", "32", "--width", "8", "--quick", "--out", str(tmp_path / "b")]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    assert "SupCon" in done.output
    assert "x as long" in done.output
    assert (tmp_path / "b" / "bench.png").is_file()
    (found,) = json.loads((tmp_path / "b" / "bench.json").read_text(encoding="utf-8"))["results"]
    assert found["cells"]["auto"]["megabytes"] is not None
    assert found["cells"]["auto"]["launches"] > 10
    assert found["cells"][PEER]["failed"] == ""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--loss", "Nothing"], "nearfar bench: loss must be"),
        (["--sizes", "12,x"], "nearfar bench: --sizes must be whole numbers"),
        (["--sizes", "2"], "nearfar bench: sizes must be numbers of rows"),
        (["--device", "tpu"], "nearfar bench: device must be"),
    ],
)
def test_bad_options_are_one_sentence(tmp_path, options, said):
    done = CliRunner().invoke(app, ["bench", *options, "--out", str(tmp_path / "b")])
    assert done.exit_code == 1
    assert str(done.exception).startswith(said)
    assert "\n" not in str(done.exception)
    assert not (tmp_path / "b").exists()


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "b").write_text("a file", encoding="utf-8")
    done = CliRunner().invoke(app, ["bench", "--loss", "SupCon", "--out", str(tmp_path / "b")])
    assert done.exit_code == 1
    assert str(done.exception).startswith("nearfar bench: File exists")


def test_it_says_so_where_the_peer_is_missing(tmp_path, monkeypatch, no_processes):
    monkeypatch.setattr(study, "peer_version", lambda: None)
    asked = ["bench", "--loss", "SupCon", "--sizes", "32", "--width", "8", "--quick", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, asked)
    assert "is not installed" in done.output
    assert "is not installed" in (tmp_path / "bench.md").read_text(encoding="utf-8")


def test_the_peer_is_not_imported_to_know_its_version():
    script = "import sys, nearfar.bench as b; print(b.study.peer_version(), 'pytorch_metric_learning' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, encoding="utf-8", check=True).stdout
    assert shown.split() == [study.peer_version() or "None", "False"]
