"""`nearfar bench --calibrate`: thresholds from times that are told, not measured."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

import nearfar as nf
from nearfar.bench import SUBJECTS, Cell, Plan, Row, Subject, calibration
from nearfar.bench.calibration import LOSSES, calibrated, cut, representatives, scopes_of, served, table_text
from nearfar.cli.commands import bench as command
from nearfar.engines import thresholds
from nearfar.engines.thresholds import GENERAL, SCOPES, Thresholds, parse

SIZES = (128, 256, 512, 1024)


def rows(loss, dense, tiled, fused=None):
    """A row a size; None is a failure."""
    found = []
    for place, size in enumerate(SIZES):
        told = {"dense": dense[place], "tiled": tiled[place]} | ({} if fused is None else {"fused": fused[place]})
        cells = {who: Cell(failed="memory") if each is None else Cell(each) for who, each in told.items()}
        found.append(Row(loss, size, 8, 1, 1.0, 1, cells))
    return found


PLAN = Plan(width=8, engines=("dense", "tiled"))
NONE: dict[str, Thresholds] = {}


def test_the_losses_stand_for_every_scope():
    assert {scopes_of(name)[0] for name in LOSSES} == set(SCOPES) - {GENERAL}
    there = [name for name in SUBJECTS if scopes_of(name)[0] == GENERAL]
    assert representatives() == (*LOSSES, *there[:2])


@pytest.fixture
def general(monkeypatch):
    """A loss of the batch without a fast path: a part of one's own promises none."""

    class Mine(nf.pairs.Hinge):
        pass

    made = Subject("Mine", lambda n, d, engine: nf.RobustLoss(pair=Mine(), over=nf.sets.KL(0.1), engine=engine))
    monkeypatch.setitem(SUBJECTS, "Mine", made)


def test_the_size_from_which_an_engine_is_best():
    fit = calibrated(rows("SupCon", (1, 2, 8, 32), (2, 3, 4, 8)), PLAN, NONE)
    assert fit.thresholds.scopes["row"] == {"tiled": 512**2}
    assert fit.worst["row"][0] == 1.0


def test_losses_of_a_scope_share_the_least_harm():
    one = rows("SupCon", (1, 2, 8, 32), (2, 3, 4, 8))  # tiled from 512
    other = rows("MultiSimilarity", (1, 1, 1.1, 9), (9, 9, 9, 8))  # tiled from 1,024: at 512 it is 8 times as slow
    fit = calibrated([*one, *other], PLAN, NONE)
    assert fit.thresholds.scopes["row"]["tiled"] == 1024**2
    assert fit.worst["row"] == (2.0, "SupCon", 512)


def test_a_tie_is_dense_and_a_failure_takes_for_ever():
    assert cut(rows("SupCon", (1, 1, 1, 1), (1, 1, 1, 0.99)), "tiled", ["dense"] * 4) is None
    assert cut(rows("SupCon", (1, 1, None, None), (9, 9, 9, 9)), "tiled", ["dense"] * 4) == 512
    assert cut(rows("SupCon", (None,) * 4, (None,) * 4), "tiled", ["dense"] * 4) is None


def test_what_is_never_best_is_taken_beyond():
    """A larger batch might not fit into memory otherwise; what the table had is kept if it is larger still."""
    slow = rows("SupCon", (1, 1, 1, 1), (9, 9, 9, 9))
    assert calibrated(slow, PLAN, NONE).thresholds.pairs("row", "tiled") == 2048**2
    known = {"cpu": Thresholds({"row": {"tiled": 2**30}})}
    assert calibrated(slow, PLAN, known).thresholds.pairs("row", "tiled") == 2**30


@pytest.fixture
def fused(monkeypatch):
    """A fused engine that has a kernel for every loss but those that are named here."""
    without: set[str] = set()
    monkeypatch.setattr(calibration, "served", lambda name, engine: engine != "fused" or name not in without)
    return without


def test_fused_must_beat_what_is_taken_without_it(fused):
    fit = calibrated(rows("SupCon", (1, 2, 8, 32), (2, 3, 4, 8), (3, 1, 5, 6)), PLAN, NONE)
    assert fit.thresholds.scopes["row"] == {"tiled": 512**2, "fused": 256**2}  # at 512 it is 1.25 of the best
    never = calibrated(rows("SupCon", (1, 2, 8, 32), (2, 3, 4, 8), (9, 9, 9, 9)), PLAN, NONE)
    assert never.thresholds.scopes["row"] == {"tiled": 512**2}


def test_general_losses_tell_of_fused_in_their_own_scope(fused, general):
    fit = calibrated(rows("Mine", (1, 1, 1, 1), (9, 9, 9, 9), (2, 2, 0.5, 0.5)), PLAN, NONE)
    assert fit.thresholds.scopes[GENERAL] == {"tiled": 2048**2}
    assert fit.thresholds.scopes["batch"] == {"fused": 512**2}


def test_losses_without_a_kernel_say_nothing_of_fused(fused):
    fused.add("DroTopK")
    rest = rows("DroTopK", (1, 1, 1, 1), (9, 9, 9, 9), (9, 9, 9, 9))
    fit = calibrated([*rest, *rows("DroKL", (1, 1, 1, 1), (9, 9, 9, 9), (2, 0.5, 0.5, 0.5))], PLAN, NONE)
    assert fit.thresholds.scopes["batch"]["fused"] == 256**2


def test_an_engine_is_asked_whether_it_serves(monkeypatch):
    assert served("SupCon", "dense")
    monkeypatch.setattr(calibration, "find_spec", lambda name: None)
    assert not served("SupCon", "fused")
    monkeypatch.setattr(calibration, "find_spec", lambda name: True)
    asked = SimpleNamespace(fused_way=lambda product, relation: product.groups.per_anchor)
    monkeypatch.setattr(calibration, "import_module", lambda name: asked)
    assert served("SupCon", "fused")
    assert not served("DroKL", "fused")


def test_the_table_that_is_written_is_one():
    fit = calibrated(rows("SupCon", (1, 2, 8, 32), (2, 3, 4, 8)), PLAN, thresholds.TABLE)
    table = parse(table_text(fit, "cpu", thresholds.TABLE))
    assert table["cpu"].pairs("row", "tiled") == 512**2
    assert table["cpu"].pairs(GENERAL, "tiled") == thresholds.TABLE["cpu"].pairs(GENERAL, "tiled")  # was not measured
    assert "d = 8" in table["cpu"].measured
    assert table["cuda"] == thresholds.TABLE["cuda"]
    assert set(parse(table_text(fit, "xpu", thresholds.TABLE))) == {*thresholds.TABLE, "xpu"}


def test_the_file_of_the_package_is_as_the_command_writes_it():
    """A new table is then a small change of the file."""
    known = thresholds.read()
    fit = calibrated([], PLAN, known)
    told = json.loads(table_text(fit, "cuda", known))
    assert told["devices"]["cpu"]["scopes"] == {scope: dict(known["cpu"].scopes[scope]) for scope in SCOPES}


@pytest.mark.parametrize("more", [[], ["--resume"]])
def test_the_command(more, tmp_path):
    app = typer.Typer()
    app.callback()(lambda: None)
    command.register(app)
    asked = ["bench", "--calibrate", "--loss", "SupCon", "--sizes", "32,64", "--width", "8", "--quick"]
    done = CliRunner().invoke(app, [*asked, "--out", str(tmp_path), *more])
    assert done.exit_code == 0, done.output
    assert "row       tiled from" in done.output
    assert "batch     not measured" in done.output
    assert thresholds.read(tmp_path / "thresholds.json")["cpu"].measured.startswith("CPU")
    told = json.loads((tmp_path / "calibration.json").read_text(encoding="utf-8"))
    assert list(told["results"][0]["cells"])[:2] == ["dense", "tiled"]
