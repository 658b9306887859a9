"""The doctor in a run: findings in the journal, each reported once, also after a resume; and remedies, applied."""

from __future__ import annotations

import re

import pytest
import torch
import typer
from rich.console import Console
from runs import config, journal, tiny, weights
from typer.testing import CliRunner

from nearfar import report
from nearfar.cli.commands import training
from nearfar.cli.commands.command import Command
from nearfar.doctor import Doctor, Finding, Thresholds, diagnose_run, prescribe
from nearfar.doctor import _remedies as remedies
from nearfar.doctor._looks import Look, judge, read_looks, take_look
from nearfar.doctor._prescription import apply_remedy
from nearfar.runs._config import apply_flags
from nearfar.train import Result, fit, parse

HARD = {"name": "Triplet", "mining": "hard", "margin": 0.2}
UNKNOWN = remedies.Patient()


def names(series, case=UNKNOWN, **limits):
    return {each.name: each.severity for each in judge(series, Thresholds(**limits), case)}


def course(*skills, spread=0.8, rank=9.0, loss=None):
    return [Look(10 * i, spread, rank, skill, skill, loss) for i, skill in enumerate(skills)]


def test_a_look():
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(64) // 4
    x = torch.eye(16)[y] + 0.01 * torch.randn(64, 16, generator=draw)
    found = take_look(3, x, y)
    assert (found.step, found.recall, found.skill) == (3, 1.0, 1.0)
    assert found.spread == pytest.approx((1 - 1 / 16) ** 0.5, abs=0.01)
    assert found.rank == pytest.approx(15.0, abs=0.1)
    assert take_look(3, x, torch.arange(64)).skill is None  # nobody has a partner
    shuffled = take_look(3, torch.randn(64, 16, generator=draw), y)
    assert abs(shuffled.skill) < 0.2


def test_a_cone_too_narrow_for_float32_has_lost_its_classes():
    """Retrieval compares cosines in float32: that classes lie apart in the eighth digit helps nobody."""
    y = torch.arange(64) // 4
    x = 1e-5 * torch.randn(16, 8, generator=torch.Generator().manual_seed(0))[y] + torch.tensor([1.0] + 7 * [0.0])
    assert take_look(1, x, y).skill < 0.5
    assert take_look(1, 1e3 * (x - x.mean(0)), y).skill == 1.0


def test_the_course_of_a_run():
    assert names(course(0.5)) == {}
    assert names(course(0.5, 0.45, 0.6)) == {}
    assert names(course(0.5, 0.6, 0.3)) == {}  # in a wide space less than half may be lost
    assert names(course(0.5, 0.6, 0.3, spread=0.01)) == {"total collapse": "warning"}
    assert names(course(0.5, 0.6, 0.1)) == {"class collapse": "alarm"}
    assert names(course(0.5, 0.1, 0.5)) == {}  # what has passed has passed
    assert names(course(0.5, 0.6, 0.1, spread=0.01)) == {"total collapse": "alarm"}
    assert names(course(0.5, 0.6, 0.7, spread=0.01)) == {"narrow cone": "note"}
    assert names(course(0.09, 0.0, 0.0)) == {}  # too little to be told from luck
    assert names(course(None, None)) == {}
    flat = [Look(0, 0.8, 9.0), Look(10, 0.8, 1.5)]
    assert names(flat) == {"dimensional collapse": "alarm"}
    assert names([Look(0, 0.8, 1.4), Look(10, 0.8, 1.1)]) == {}  # two dimensions from the beginning


def test_several_looks_in_a_row():
    once = course(0.5, 0.6, 0.1)
    assert names(once, looks=2) == {}
    assert names(course(0.5, 0.1, 0.1), looks=2) == {"class collapse": "alarm"}


def test_a_loss_on_its_margin_is_seen_where_labels_tell_nothing():
    case = remedies.Patient(config(loss=HARD))
    assert names(course(0.02, 0.01, 0.02, spread=0.002, loss=0.2), case)["loss pinned at its margin"] == "alarm"
    assert "loss pinned at its margin" not in names(course(0.02, 0.01, 0.02, spread=0.002, loss=0.1), case)
    assert "loss pinned at its margin" not in names(course(0.3, 0.3, 0.4, spread=0.002, loss=0.2), case)
    assert "loss pinned at its margin" not in names(course(0.02, 0.01, 0.02, spread=0.5, loss=0.2), case)


FEW = {"name": "DroTopK", "k": "B/2"}
SHARE = {"name": "DroTopK", "fraction": 0.001}
ONE = {"mining": "hardest"}


def of_few(*skills, pairs=1.0, loss=FEW, steps=40, rank=11.0):
    """Looks ten steps apart at a run whose loss spreads its weight over so many pairs a row."""
    first, *later = skills
    looks = [Look(0, 0.8, 9.0, first, first)]
    looks += [Look(10 * i, 0.8, rank, skill, skill, pairs=pairs) for i, skill in enumerate(later, 1)]
    return names(looks, remedies.Patient(config(loss=loss, training={"steps": steps}), 9))


def test_few_pairs_are_an_illness_only_where_little_is_learned():
    ill = {"weight on too few pairs": "warning"}
    assert of_few(0.5, 0.52, 0.5, 0.52) == ill
    assert of_few(0.5, 0.6, 0.7, 0.8) == {}  # learned all the same
    assert of_few(0.5, 0.52, 0.5, 0.52, pairs=4.0) == {}
    assert of_few(0.5, 0.52, 0.5, 0.52, steps=400) == {}  # half of the run has not passed
    assert of_few(0.5, 0.52, 0.5, 0.52, rank=9.1) == {}  # the space has not moved: the rate is too low for any loss
    assert of_few(0.5, 0.52, 0.5) == {}  # two looks are luck
    assert of_few(0.95, 0.95, 0.95, 0.95) == {}  # there was nothing to learn
    assert of_few(0.5, 0.52, 0.5, 0.52, pairs=None) == {}
    assert of_few(0.5, 0.52, 0.5, 0.52, pairs=0.0) == {}  # no active pairs: another finding
    enough = (
        FEW | {"k": "8B"},
        {"name": "DroTopK"},
        {"name": "DroKL"},
        {"name": "DroKLGrouped"},
        {"name": "DroChiSquare"},
    )
    for loss in ({"name": "NPair"}, {"name": "ProxyAnchor"}, HARD, *enough):
        assert of_few(0.5, 0.52, 0.5, 0.52, loss=loss) == {}, loss  # few by design, or enough
    few = (
        {"name": "DroKL", "gamma": 0.1},
        {"name": "DroChiSquare", "rho": 5e4},
        {"name": "DroChiSquare", "rho": "400B"},
    )
    for loss in (*few, {"name": "DroWorst"}, HARD | ONE, SHARE):
        assert of_few(0.5, 0.52, 0.5, 0.52, loss=loss) == ill, loss


def test_the_journal_gives_the_looks_back():
    entries = [{"step": 0, **Look(0, 0.5, 3.0, 0.5, 0.4).to_entry()}, {"step": 10, "loss": 0.3}]
    entries.append({"step": 10, **Look(10, 0.6, 4.0, pairs=2.0).to_entry()})
    assert read_looks(entries) == [Look(0, 0.5, 3.0, 0.5, 0.4), Look(10, 0.6, 4.0, loss=0.3, pairs=2.0)]


def test_a_run_has_a_doctor(tmp_path):
    fit(config(training={"diagnose_every": 5}), tmp_path / "a", data=tiny())
    lines = [line for line in journal(tmp_path / "a") if "spread" in line]
    assert [line["step"] for line in lines] == [0, 5, 10, 15, 20]
    assert all(line["spread"] > 0.3 and line["effective_rank"] > 1 and "probe skill" in line for line in lines)
    fit(config(training={"diagnose_every": 0}), tmp_path / "b", data=tiny())
    assert not [line for line in journal(tmp_path / "b") if "spread" in line]
    looks = [line for line in journal(tmp_path / "a") if "loss" in line]
    assert looks == [line for line in journal(tmp_path / "b") if "loss" in line]  # looking changes nothing
    with pytest.raises(ValueError, match=r"training\.diagnose_every"):
        config(training={"diagnose_every": -1})


def test_its_own_doctor_is_left_out_where_one_is_handed_in(tmp_path):
    told = []
    doctor = Doctor(every=10, rows=16, tell=told.append)
    fit(config(), tmp_path / "a", data=tiny(), callbacks=[doctor])
    assert [line["step"] for line in journal(tmp_path / "a") if "spread" in line] == [0, 10, 20]
    assert [look.step for look in doctor.looks] == [0, 10, 20]


def spoil(step):
    """A callback that makes the network forget: from `step` on every sample has nearly the same embedding."""

    def now(moment):
        if moment.step >= step:
            with torch.no_grad():
                for parameter in moment.state.bare_model.head.parameters():
                    parameter.zero_() if parameter.ndim > 1 else parameter.fill_(1.0)

    return now


@pytest.fixture(scope="module")
def ill(tmp_path_factory):
    """A run of hard mining at a high rate that collapses."""
    folder, told = tmp_path_factory.mktemp("ill") / "run", []
    settings = config(loss=HARD, optimizer={"lr": 0.02}, training={"diagnose_every": 0, "steps": 30})
    doctor = Doctor(every=2, tell=told.append)
    fit(settings, folder, data=tiny(), callbacks=[spoil(8), doctor])
    return folder, told, doctor


def test_a_collapse_is_told_once_and_kept(ill):
    folder, told, doctor = ill
    assert [re.match(r"step (\d+), alarm: total collapse\.", text) is not None for text in told].count(True) == 1
    found = {line["step"]: line["doctor"] for line in journal(folder) if "doctor" in line}
    assert found[8]["total collapse"] == "alarm"
    assert found[30]["total collapse"] == "alarm"
    assert not doctor.diagnosis.healthy
    assert not diagnose_run(folder).healthy


def test_the_end_of_a_run_says_what_was_found(tmp_path, capsys):
    settings = config(loss=HARD, training={"diagnose_every": 4})
    fit(settings, tmp_path / "a", data=tiny(), callbacks=[spoil(8)], console=Console(width=200))
    shown = capsys.readouterr().out
    assert re.search(r"doctor: step \d+, alarm: total collapse\.", shown)
    assert "doctor: Not healthy" in shown
    assert f"--apply-remedy {tmp_path / 'a'}" in shown.replace("\n", "")


def test_a_resumed_run_is_judged_as_if_it_had_never_stopped(tmp_path):
    settings, data = config(training={"diagnose_every": 2}), tiny()

    def die(moment):
        if moment.step == 13:
            raise RuntimeError("the lights went out")

    fit(settings, tmp_path / "whole", data=data)
    with pytest.raises(RuntimeError, match="lights"):
        fit(settings, tmp_path / "cut", data=data, callbacks=[die])
    fit(settings, tmp_path / "cut", data=data, resume=True)
    assert journal(tmp_path / "cut") == journal(tmp_path / "whole")
    first, second = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_findings_are_on_the_page(ill):
    folder, _, _ = ill
    page = report.build(folder, queries=4, points=20)
    assert "total collapse" in page
    assert 'class="finding bad"' in page


def command():
    app = typer.Typer()
    app.command(cls=Command, context_settings=training.KEYS)(training.train)
    return app


def train(*words):
    return CliRunner().invoke(command(), [str(word) for word in words])


def test_a_remedy_is_a_change_of_configuration(ill):
    remedy = prescribe(ill[0])
    assert remedy.finding.severity == "alarm"
    assert remedy.config.loss.options["mining"] == "semihard"
    assert remedy.config.optimizer.lr == pytest.approx(0.002)
    assert "loss.mining: hard -> semihard" in remedy.changes
    assert "batches.classes: 4 -> 9" in remedy.changes  # as many as there are
    assert "optimizer.lr: 0.02 -> 0.002" in remedy.changes
    assert "Changed: loss.mining: hard -> semihard" in remedy.text()


def test_the_command_follows_the_remedy(ill, tmp_path, monkeypatch):
    trained = []

    def fit(config, folder, **options):
        trained.append((config, folder))
        return Result(folder, 7, 7, None, finished=True)

    monkeypatch.setattr("nearfar.train.fit", fit)
    out = train("--apply-remedy", ill[0], "--run", tmp_path / "new", "--training.steps", "7")
    assert out.exit_code == 0, out.output
    assert "loss.mining: hard -> semihard" in out.output
    assert "from the start" in out.output
    ((cured, folder),) = trained
    assert folder == tmp_path / "new"
    assert (cured.loss.options["mining"], cured.training.steps) == ("semihard", 7)


def test_the_cured_run_recovers(ill, tmp_path):
    fit(apply_flags(prescribe(ill[0]).config, [("training.diagnose_every", "5")]), tmp_path / "new", data=tiny())
    assert "total collapse" not in diagnose_run(tmp_path / "new")


def test_what_cannot_be_followed_is_said(ill, tmp_path):
    fit(config(training={"diagnose_every": 10, "baselines": False}), tmp_path / "well", data=tiny())
    for words, said in (
        (("--apply-remedy", tmp_path / "well"), "is healthy"),
        (("--apply-remedy", tmp_path), "holds no journal.jsonl"),
        (("--apply-remedy", ill[0], "--resume"), "leave one out"),
        (("--apply-remedy", ill[0], "other.yaml"), "leave one out"),
    ):
        out = train(*words)
        assert out.exit_code != 0
        assert said in " ".join((out.output + str(out.exception)).split())
    with pytest.raises(ValueError, match="is no change of configuration"):
        apply_remedy(Finding("odd", "alarm", "", "Look at the data."), config())
    with pytest.raises(ValueError, match="already has the remedy"):
        apply_remedy(Finding("odd", "alarm", "", "", flags=(("training.steps", "20"),)), config())
    with pytest.raises(ValueError, match="cross_batch_memory"):  # a configuration that cannot be trained
        apply_remedy(
            Finding("odd", "alarm", "", "", flags=remedies.NEAR_CLASSES), config(training={"cross_batch_memory": 40})
        )


ILL = {
    "hard": {"loss": HARD},
    "annealed": {"loss": HARD | {"anneal": 100}},
    "no margin": {"loss": {"name": "Triplet", "margin": 0.0}},
    "worst": {"loss": {"name": "DroWorst"}},
    "fast": {"optimizer": {"lr": 0.1}},
    "decayed": {"optimizer": {"lr": 1e-3, "weight_decay": 1.0}},
    "nothing to blame": {"optimizer": {"lr": 1e-3}, "batches": {"classes": 16, "samples": 4}},
    "defaults": {},
}


@pytest.mark.parametrize("what", ILL)
def test_every_collapse_has_a_remedy_that_runs(what):
    from nearfar.runs import _parts as parts

    settings = parse(ILL[what])
    flags = remedies.against_collapse(settings)
    assert flags
    cured = apply_flags(settings, flags)
    parts.check(cured)
    parts.make_loss(cured, classes=50)
    assert cured != settings


def test_blame():
    tiny_batch = parse({"batches": {"name": "MPerClass", "classes": 2, "samples": 2}, "optimizer": {"lr": 1e-4}})
    assert dict(remedies.against_collapse(tiny_batch))["batches.classes"] == "null"  # 32, or all
    assert dict(remedies.against_collapse(tiny_batch, 9))["batches.classes"] == "9"
    assert remedies.against_collapse(None) == remedies.ANY_TO_SEMIHARD
    assert dict(remedies.against_collapse(parse(ILL["annealed"])))["loss.anneal"] == "null"
