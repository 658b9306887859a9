"""The search: equal budgets, held-out training classes only, nothing repeated, early stops for poor trials."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from importlib import import_module

import pytest
from needs import need
from rich.console import Console
from runs import config, tiny

import nearfar as nf
from nearfar._utils.journal import read_lines
from nearfar.runs._config import load
from nearfar.train import NotFiniteError, fit
from nearfar.tune import _trial as trial
from nearfar.tune._results import TrialLog
from nearfar.tune._trial import Job, Outcome, hold_out_test, run_trial

QUIET = Console(quiet=True)
SEARCH = import_module("nearfar.tune._search")  # the name in the package is the function
LR = {"low": 1e-4, "high": 1e-1, "log": True}
LOSSES = [{"name": "SupCon", "temperature": {"low": 0.05, "high": 0.5}}, {"name": "Margin"}]
SHORT = config(data={"validation": 0.3}, training={"steps": 4, "evaluate_every": 2, "checkpoint_every": 4})


class Untouchable:
    """Samples that nobody may look at."""

    def __getattribute__(self, name):
        raise AssertionError(f"a trial asked the test classes for {name}")


def search(folder, space=None, **how):
    need("optuna")
    options = {"folder": folder, "trials": 2, "held_out": 0.3, "console": QUIET, "data": tiny()}
    return nf.tune.search(SHORT, space or {"optimizer.lr": LR}, **{**options, **how})


@pytest.fixture
def faked(monkeypatch):
    """Trials that take no time, whose score is best at a rate of 0.01; the list of their jobs."""
    jobs = []

    def fake(job, data, stop):
        jobs.append(job)
        score = 1 / (1 + abs(math.log10(job.config.optimizer.lr) + 2))
        return Outcome("done", score, (score,), (((2, score), (4, score)),))

    monkeypatch.setattr(SEARCH, "run_trial", fake)
    return jobs


def values(result):
    return [(each.loss, each.number, dict(each.values), each.outcome.score) for each in result.trials]


def test_every_loss_has_the_same_budget_and_the_test_classes_are_never_read(tmp_path):
    data = replace(tiny(), test=Untouchable(), gallery=Untouchable())
    found = search(tmp_path, {"loss": LOSSES, "optimizer.lr": LR}, data=data)
    assert {label: len(each.trials) for label, each in found.losses.items()} == {"SupCon": 2, "Margin": 2}
    assert [(each.loss, each.number) for each in found.trials] == [
        ("SupCon", 0), ("Margin", 0), ("SupCon", 1), ("Margin", 1)
    ]  # fmt: skip
    assert all(each.outcome.state == "done" for each in found.trials)
    assert set(found.trials[0].values) == {"optimizer.lr", "loss.temperature"}
    assert set(found.trials[1].values) == {"optimizer.lr"}
    assert [step for step, _ in found.trials[0].outcome.curves[0]] == [2, 4]
    assert found.finished
    assert found.score == max(each.outcome.score for each in found.trials)


def test_the_classes_that_are_scored_are_held_out_of_training():
    data = tiny()
    mine = hold_out_test(data, 0.3)
    assert len(mine.test.classes) == 4
    assert not set(mine.test.classes) & set(mine.train.classes)
    assert set(mine.test.names) | set(mine.train.names) == set(data.train.names)
    with pytest.raises(
        ValueError, match=r"^tune: held_out 0.01 of 12 training classes is one class, .* such as 0.17\.$"
    ):
        hold_out_test(data, 0.01)


def test_what_the_search_writes(tmp_path, faked):
    found = search(tmp_path, {"loss": LOSSES, "optimizer.lr": LR}, trials=3)
    assert load(tmp_path / "best.yaml") == found.best
    assert load(tmp_path / "best-SupCon.yaml") == found.losses["SupCon"].config
    written = json.loads((tmp_path / "trials.json").read_text(encoding="utf-8"))
    assert written["best"] == found.best_loss
    assert len(written["trials"]) == 6
    assert written["losses"]["Margin"]["trials"] == {"done": 3, "pruned": 0, "diverged": 0, "failed": 0}
    best = max(found.trials, key=lambda each: each.outcome.score)
    assert found.best.optimizer.lr == best.values["optimizer.lr"]
    assert found.best.training == SHORT.training  # what trials leave out to save time is not lost
    assert repr(found).splitlines()[1].split()[:2] == [f"{100 * found.score:.1f}", f"{found.best_loss}:"]


def test_the_best_configuration_trains(tmp_path):
    search(tmp_path, trials=1)
    result = fit(load(tmp_path / "best.yaml"), tmp_path / "run", data=tiny(), console=QUIET)
    assert result.finished


def test_a_search_goes_on_where_it_stopped(tmp_path, faked):
    space = {"loss": LOSSES, "optimizer.lr": LR}
    whole = search(tmp_path / "whole", space, trials=14)
    assert len(faked) == 28
    search(tmp_path / "parts", space, trials=3)
    file = tmp_path / "parts" / "trials.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    file.write_text("".join(lines[:-1]) + lines[-1][:30], encoding="utf-8")  # killed while it wrote
    faked.clear()
    parts = search(tmp_path / "parts", space, trials=14)
    assert len(faked) == 23
    assert values(parts) == values(whole)
    faked.clear()
    assert values(search(tmp_path / "parts", space, trials=14)) == values(whole)
    assert faked == []


def test_ctrl_c_keeps_what_has_ended(tmp_path, faked, monkeypatch):
    plain = SEARCH.run_trial
    monkeypatch.setattr(SEARCH, "run_trial", lambda *job, **how: None if len(faked) == 2 else plain(*job, **how))
    found = search(tmp_path, trials=4)
    assert (found.finished, len(found.trials)) == (False, 2)
    assert load(tmp_path / "best.yaml") == found.best
    assert "stopped; the search can go on" in (tmp_path / "tune.html").read_text(encoding="utf-8")
    monkeypatch.setattr(SEARCH, "run_trial", plain)
    assert search(tmp_path, trials=4).finished
    assert len(faked) == 4


def test_a_stopped_trial_is_not_a_result():
    data = hold_out_test(tiny(), 0.3)
    assert run_trial(Job(SHORT), data, lambda: True) is None
    answers = iter([False, False, True])  # before the run, after the first step, after the second
    assert run_trial(Job(SHORT), data, lambda: next(answers)) is None


def test_the_sampler_learns(tmp_path, faked):
    found = search(tmp_path, trials=30)
    late = [each.outcome.score for each in found.trials[15:]]
    early = [each.outcome.score for each in found.trials[:10]]
    assert sum(late) / 15 > sum(early) / 10
    other = search(tmp_path / "other", trials=3, seed=1)
    assert values(other) != values(found)[:3]


def test_a_trial_that_is_behind_is_stopped_at_once():
    data = hold_out_test(tiny(), 0.3)
    far_ahead, far_behind = (((((2, score), (4, score)),),) * 5 for score in (1.1, -1.0))
    stopped = run_trial(Job(SHORT, rivals=far_ahead), data, lambda: False)
    assert (stopped.state, stopped.score, [step for step, _ in stopped.curves[0]]) == ("pruned", None, [2])
    ran = run_trial(Job(SHORT, rivals=far_behind), data, lambda: False)
    assert (ran.state, [step for step, _ in ran.curves[0]]) == ("done", [2, 4])
    few = run_trial(Job(SHORT, rivals=far_ahead[:4]), data, lambda: False)
    assert few.state == "done"


def test_rivals_are_the_trials_of_the_same_loss_once_five_have_finished(tmp_path, faked, monkeypatch):
    space = {"loss": LOSSES, "optimizer.lr": LR}
    search(tmp_path / "median", space, trials=7)
    assert [len(job.rivals) for job in faked] == [0] * 10 + [5, 5, 6, 6]
    faked.clear()
    search(tmp_path / "none", space, trials=7, prune="none")
    assert not any(job.rivals for job in faked)
    faked.clear()
    ends, plain = (
        iter([{}, {"state": "pruned", "score": None}, {"state": "failed", "score": None}, *[{}] * 6]),
        SEARCH.run_trial,
    )
    monkeypatch.setattr(SEARCH, "run_trial", lambda *job, **how: replace(plain(*job, **how), **next(ends)))
    search(tmp_path / "states", trials=9)
    assert [len(job.rivals) for job in faked] == [0] * 7 + [6, 7]  # the one that failed is none


def test_seeds_are_averaged_and_pruned_by_their_own_curves():
    data = hold_out_test(tiny(), 0.3)
    found = run_trial(Job(SHORT, seeds=2), data, lambda: False)
    alone = [
        run_trial(Job(replace(SHORT, training=replace(SHORT.training, seed=seed))), data, lambda: False)
        for seed in (0, 1)
    ]
    assert found.scores == (alone[0].score, alone[1].score)
    assert found.score == pytest.approx(sum(found.scores) / 2)
    assert found.curves == (alone[0].curves[0], alone[1].curves[0])
    low, high = ((2, -1.0),), ((2, 1.1),)
    second = run_trial(Job(SHORT, seeds=2, rivals=((low, high),) * 5), data, lambda: False)
    assert (second.state, len(second.scores)) == ("pruned", 1)


def test_the_score_can_be_map_at_r():
    data = hold_out_test(tiny(), 0.3)
    first, other = (run_trial(Job(SHORT, score=name), data, lambda: False) for name in ("recall@1", "map_at_r"))
    assert other.score < first.score
    assert other.curves != first.curves


def test_a_run_that_diverges_scores_nothing_and_is_not_tried_again(tmp_path, monkeypatch):
    tried = []

    def diverging(plan, *rest, **how):
        tried.append(plan.optimizer.lr)
        if len(tried) == 1:
            raise NotFiniteError("the loss is nan")
        return fit(plan, *rest, **how)

    monkeypatch.setattr(trial, "fit", diverging)
    found = search(tmp_path)
    assert [each.outcome.state for each in found.trials] == ["diverged", "done"]
    assert found.trials[0].outcome.score == 0
    search(tmp_path)
    assert len(tried) == 2
    tried.clear()
    with pytest.raises(
        RuntimeError, match="no trial ended with a score; the first said: NotFiniteError: the loss is nan"
    ):
        search(tmp_path / "one", trials=1)
    assert not (tmp_path / "one" / "best.yaml").exists()


def test_failures_stop_the_search_and_are_tried_again(tmp_path, monkeypatch):
    def broken(*given, **how):
        raise MemoryError("no room left")

    with monkeypatch.context() as patch:
        patch.setattr(trial, "fit", broken)
        with pytest.raises(
            RuntimeError, match="first 3 trials of DroTopK all failed, the last with MemoryError: no room"
        ):
            search(tmp_path, trials=9)
    found = search(tmp_path)
    assert [each.outcome.state for each in found.trials] == ["done", "done"]


def test_no_values_are_tried_twice(tmp_path, faked):
    found = search(tmp_path, {"model.embedding_dim": {"choices": [2, 4]}, "optimizer.warmup": {"low": 0, "high": 2}},
                   trials=20)  # fmt: skip
    assert found.finished
    tried = {(each.values["model.embedding_dim"], each.values["optimizer.warmup"]) for each in found.trials}
    assert len(tried) == len(found.trials) == 6


def test_another_search_in_the_folder_is_refused(tmp_path, faked):
    search(tmp_path)
    with pytest.raises(
        ValueError, match=r"^tune: .* holds another search: seeds was 1, and is 2 now; name another folder.$"
    ):
        search(tmp_path, seeds=2)
    (tmp_path / "trials.jsonl").write_text("mine\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"trials.jsonl is not the record of a search; name another folder\.$"):
        search(tmp_path)
    assert (tmp_path / "trials.jsonl").read_text(encoding="utf-8") == "mine\n"


@pytest.mark.skipif(sys.platform == "win32", reason="folders are not locked there")
def test_a_second_search_in_the_folder_is_refused_while_the_first_runs(tmp_path, faked):
    with (
        TrialLog(tmp_path, {}),
        pytest.raises(BlockingIOError, match=r"^tune: another search runs in .* folder\.$"),
    ):
        search(tmp_path)
    (tmp_path / "trials.jsonl").unlink()
    search(tmp_path)
    for _ in range(2):  # an error leaves no lock behind
        with pytest.raises(ValueError, match="another search: seeds was 1"):
            search(tmp_path, seeds=2)


def test_processes_side_by_side_give_what_one_gives(tmp_path):
    one = search(tmp_path / "one")
    two = search(tmp_path / "two", jobs=2)
    assert sorted(map(str, values(two))) == sorted(map(str, values(one)))
    assert len(read_lines(tmp_path / "two" / "trials.jsonl", lambda entry: True).entries) == 3


def test_trials_of_a_run_that_finds_its_length_take_the_usual_one(faked, tmp_path):
    open_length = config(data={"validation": 0.3}, training={"steps": "auto"})
    need("optuna")
    nf.tune.search(open_length, {"optimizer.lr": LR}, folder=tmp_path, trials=2, console=QUIET, data=tiny())
    assert {job.config.training.steps for job in faked} == {1000}
