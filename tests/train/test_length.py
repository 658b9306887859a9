"""`training.steps: auto`: the rule that chooses a length, and a run that finds its own, resumes, and says why."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from needs import need
from processes import HERE, ended, start
from runs import config, journal, tiny, weights

from nearfar.report._journal import read_journal
from nearfar.train import _length as length
from nearfar.train import dry_run, fit, load
from nearfar.train._length import EARLIEST, LATEST, WORTH, Choice, Look, choose, is_look

STEPS = [step for step in range(LATEST + 1) if is_look(step)]
SHORT = {"PLAIN": 90, "EARLIEST": 90}
"""A shorter search for these tests."""
CHANGES = {
    "batches": {"name": "MPerClass", "classes": 8, "samples": 3},
    "training": {"steps": "auto", "evaluate_every": 40, "checkpoint_every": 40, "explain_every": 0},
}


def follow(curve, usual, classes=20, noise=0.0, seed=0):
    """The choice of a search whose classes follow a curve of the step, each with its own level and its own noise."""
    random = np.random.default_rng(seed)
    levels = random.normal(0, 0.1, classes)
    looks = []
    for step in STEPS:
        scores = curve(step) + levels + random.normal(0, noise, classes)
        looks.append(Look(step, float(scores.mean()), (10,) * classes, tuple(scores)))
        if found := choose(looks, usual):
            return found
    raise AssertionError("the search did not end")


def peak(best, width=1.0):
    """A curve of log(step) with its top at a step."""
    return lambda step: 0.6 - 0.05 * np.log((step + 5) / best) ** 2 / width


@pytest.mark.parametrize("best", [60, 120, 480, 1920, 7680])
def test_lengths_a_hundred_times_apart_are_told_apart(best):
    found = follow(peak(best), usual=600, noise=0.003)
    assert 0.7 <= found.best / best <= 1.5
    assert found.steps == round(length.STRETCH * found.best)
    last = found.curve[-1][0]
    assert last <= max(EARLIEST, 600 / length.STRETCH * 1.5, 3 * found.best)  # the search costs little more


def test_few_noisy_classes_leave_the_usual_length():
    """Of curves that nobody can tell apart the highest look is an accident."""
    flat = [follow(lambda step: 0.5, usual=600, classes=10, noise=0.05, seed=seed) for seed in range(20)]
    assert (
        np.median([found.steps for found in flat]) == 640
    )  # 480 steps of search are the look nearest to 600 / STRETCH
    told = [follow(peak(60), usual=600, classes=10, noise=0.05, seed=seed).steps for seed in range(20)]
    assert np.median(told) <= 240


def test_a_rise_within_doubt_is_no_reason_to_go_on():
    first = np.linspace(0.3, 0.7, 10)

    def end(gains):
        scores = (first, first + gains)
        looks = [Look(step, float(x.mean()), (10,) * 10, tuple(x)) for step, x in zip((0, 480), scores, strict=True)]
        return choose(looks, usual=600)

    assert end(np.full(10, 0.05)) is None
    assert end(0.05 + 0.3 * np.tile([1, -1], 5)) is not None


def test_a_rise_that_is_worth_less_than_twice_the_steps_ends_the_search():
    slow, fast = (lambda step, w=w: 0.3 + w * WORTH * np.log2(step + 60) for w in (0.8, 1.5))
    assert follow(slow, usual=600, noise=0.0005).curve[-1][0] < 1000
    assert follow(fast, usual=600, noise=0.0005).curve[-1][0] == LATEST


def test_a_dip_at_the_beginning_does_not_end_the_search():
    def dip(step):
        return 0.3 - 0.05 * (0 < step <= 90) + 0.04 * np.log2(1 + step / 60)

    assert follow(dip, usual=600, noise=0.002).curve[-1][0] >= 400


@pytest.fixture
def short(monkeypatch):
    for name, value in SHORT.items():
        monkeypatch.setattr(length, name, value)


def many():
    return tiny(classes=60)


def settings(**changes):
    return config(**{**CHANGES, **changes})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that found its length."""
    folder = tmp_path_factory.mktemp("auto") / "run"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SHORT.items():
            patch.setattr(length, name, value)
        result = fit(settings(), folder, data=many())
    assert result.finished
    return folder


def test_the_run_is_the_one_with_that_number_of_steps_on_all_classes(whole, tmp_path):
    found = Choice.read(whole)
    assert found is not None
    assert found.held_out == 15
    kept = load(whole / "config.yaml")
    assert (kept.training.steps, kept.data.validation) == (found.steps, 0.0)
    given = settings(training={**CHANGES["training"], "steps": found.steps}, data={"validation": 0.0})
    assert kept.optimizer.schedule == "stable"
    given = replace(given, optimizer=kept.optimizer)
    fit(given, tmp_path / "given", data=many())
    assert all(torch.equal(a, weights(tmp_path / "given")[name]) for name, a in weights(whole).items())
    first, *rest = journal(whole)
    assert first["length"]["steps"] == found.steps
    assert first["length"]["why"] == found.why
    assert rest == journal(tmp_path / "given")


def test_the_report_shows_the_curve_and_the_choice(whole):
    panel = read_journal(whole / "journal.jsonl").panels[0]
    found = Choice.read(whole)
    assert panel.title == "Search for the length"
    assert f"chosen: {found.best} steps, {found.steps} in training" in panel.unit
    assert [point[0] for point in panel.series[0].points] == [row[0] for row in found.curve]


class Stop(Exception):
    """Raised in place of a kill."""


def same(folder, other):
    assert Choice.read(folder) == Choice.read(other)
    assert journal(folder) == journal(other)
    assert journal(folder / "search") == journal(other / "search")
    assert all(torch.equal(a, weights(folder)[name]) for name, a in weights(other).items())


@pytest.mark.parametrize("at", [1, 50, 90])
def test_a_search_that_was_killed_goes_on_bit_for_bit(short, whole, tmp_path, monkeypatch, at):
    def stop(search, moment):
        if moment.step == at:
            raise Stop
        return call(search, moment)

    call = length.LengthSearch.__call__
    with monkeypatch.context() as patch:
        patch.setattr(length.LengthSearch, "__call__", stop)
        with pytest.raises(Stop):
            fit(settings(), tmp_path / "run", data=many())
    assert load(tmp_path / "run" / "config.yaml").training.steps == "auto"
    fit(load(tmp_path / "run" / "config.yaml"), tmp_path / "run", data=many(), resume=True)
    same(tmp_path / "run", whole)


@pytest.mark.parametrize("late", [False, True])
def test_a_run_that_was_killed_between_the_phases_goes_on_bit_for_bit(short, whole, tmp_path, monkeypatch, late):
    """Before the choice is written, and after."""

    def stop(choice, folder):
        if late:
            write(choice, folder)
        raise Stop

    write = Choice.write
    with monkeypatch.context() as patch:
        patch.setattr(Choice, "write", stop)
        with pytest.raises(Stop):
            fit(settings(), tmp_path / "run", data=many())
    fit(load(tmp_path / "run" / "config.yaml"), tmp_path / "run", data=many(), resume=True)
    same(tmp_path / "run", whole)


@pytest.mark.parametrize("at", [1, 60])
def test_a_training_that_was_killed_goes_on_bit_for_bit(short, whole, tmp_path, at):
    def stop(moment):
        if moment.step == at:
            raise Stop

    with pytest.raises(Stop):
        fit(settings(), tmp_path / "run", data=many(), callbacks=[stop])
    fit(load(tmp_path / "run" / "config.yaml"), tmp_path / "run", data=many(), resume=True)
    same(tmp_path / "run", whole)


SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from runs import config, tiny
from nearfar._utils.process_group import close
from nearfar.train import _length, fit
for name, value in json.loads(sys.argv[2]).items():
    setattr(_length, name, value)
try:
    fit(config(**json.loads(sys.argv[3])), Path(sys.argv[4]), data=tiny(classes=60))
finally:
    close()
"""


def test_two_processes_search_as_one(whole, tmp_path):
    need("accelerate")
    batches = {"name": "MPerClass", "classes": 8, "samples": 3}
    told = {**CHANGES, "batches": batches}
    ranks = start(SCRIPT, str(HERE), json.dumps(SHORT), json.dumps(told), str(tmp_path / "two"), world=2)
    errors = ended(ranks, 300)
    assert [process.returncode for process in ranks] == [0, 0], errors
    one, two = Choice.read(whole), Choice.read(tmp_path / "two")
    assert (one.held_out, one.curve[0][0]) == (two.held_out, two.curve[0][0])
    both = zip(one.curve, two.curve, strict=False)  # rounding may decide which of two equal looks is chosen
    assert np.allclose(*zip(*((a[1], b[1]) for a, b in both), strict=True), atol=0.02)
    assert load(tmp_path / "two" / "config.yaml").training.steps == two.steps == round(length.STRETCH * two.best)


def test_few_classes_train_for_the_usual_length_and_say_why(short, tmp_path):
    fit(settings(), tmp_path / "run", data=tiny(classes=12))
    found = Choice.read(tmp_path / "run")
    assert found.steps == 90
    assert "3 held-out classes with 18 samples are too few" in found.why
    assert journal(tmp_path / "run")[0]["length"]["why"] == found.why
    kept = load(tmp_path / "run" / "config.yaml")
    assert (kept.training.steps, kept.data.validation) == (90, 0.25)  # as without auto
    assert not (tmp_path / "run" / "search").exists()


def test_another_run_replaces_every_file_of_the_search(short, whole, tmp_path):
    fit(settings(), tmp_path / "run", data=many())
    fit(config(), tmp_path / "run", data=tiny(), overwrite=True)
    assert not (tmp_path / "run" / "search").exists()
    assert not (tmp_path / "run" / "length.json").exists()


def test_a_run_with_a_given_length_is_not_resumed_with_auto(tmp_path):
    fit(config(), tmp_path / "run", data=tiny())
    with pytest.raises(ValueError, match=r"training\.steps auto is for a new run"):
        fit(config(training={**CHANGES["training"]}), tmp_path / "run", data=tiny(), resume=True)


def test_the_paper_s_protocol_holds_no_classes_out():
    with pytest.raises(ValueError, match="give a number of steps"):
        settings(training={"steps": "auto", "protocol": "paper"})


def test_a_dry_run_measures_the_usual_length(short, tmp_path):
    lines = dry_run(settings(), data=many()).lines
    assert any(line.startswith("steps: 90 of") for line in lines)
    assert lines[-1].startswith("training.steps auto")
