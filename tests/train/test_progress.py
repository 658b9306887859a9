"""The progress that a run shows: what it prepares, an estimate of its time, and a rate of training steps alone."""

from __future__ import annotations

import functools
import io

import numpy as np
import pytest
import torch
from runs import config, journal, tiny, weights

from nearfar._utils.console import Terminal
from nearfar._utils.progress import Progress
from nearfar.data import DataSet, Tensors
from nearfar.train import _loop as loop
from nearfar.train import _progress as progress
from nearfar.train import _scores as scores
from nearfar.train import fit
from nearfar.train._build import Input, is_slow
from nearfar.train._state import take_step


def test_the_rate_is_that_of_training_steps_alone(tmp_path, monkeypatch):
    """Baselines take an hour here, the first step ten minutes, all others ten seconds."""
    now, shown, measured = [0.0], io.StringIO(), scores.measure_baselines
    for module in (loop, progress):
        monkeypatch.setattr(module, "Progress", functools.partial(Progress, clock=lambda: now[0]))

    def slow(state, watch):
        def half(what, done, total):
            now[0] += 1800
            watch(what, done, total)

        return measured(state, half)

    def step(state, number, batch):
        now[0] += 600 if number == 1 else 10
        return take_step(state, number, batch)

    monkeypatch.setattr(scores, "measure_baselines", slow)
    monkeypatch.setattr(loop, "take_step", step)
    plan = {"steps": 4, "evaluate_every": 4, "checkpoint_every": 4, "diagnose_every": 0, "explain_every": 0}
    fit(config(training=plan), tmp_path / "run", data=tiny(), console=Terminal(file=shown, width=200))
    lines = shown.getvalue().splitlines()
    prepared = [line for line in lines if line.startswith("untrained network, ")]
    assert prepared[0].startswith("untrained network, embedding: 36 of 36")
    steps = [line for line in lines if line.startswith("training: ")]
    assert lines.index(prepared[-1]) < lines.index(steps[0])
    assert ["left" in line for line in steps] == [False, True, True, True]
    assert all(", 10.0 s each, " in line for line in steps[1:])


def drawings() -> DataSet:
    labels = np.repeat(np.arange(8), 6)
    random = torch.Generator().manual_seed(0)
    samples = Tensors(torch.randint(0, 256, (48, 132, 132), generator=random, dtype=torch.uint8), labels)
    return DataSet("drawings", samples, samples)


@pytest.mark.parametrize(
    ("shape", "device", "slow"),
    [((3, 224, 224), "cpu", True), ((3, 224, 224), "cuda", False), ((3, 32, 32), "cpu", False), ((300,), "cpu", False)],
)
def test_photographs_are_slow_on_a_cpu(shape, device, slow):
    assert is_slow(Input("none", shape, config().data), torch.device(device)) == slow


def test_on_a_cpu_a_long_run_on_photographs_says_how_long_it_will_take(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "MIN_STEPS_TIMED", 4)
    plan = {"data": {"transform": "none", "validation": 0.0}, "model": {"name": "small", "embedding_dim": 4}}
    said = {}
    for steps in (3, 4):
        shown = io.StringIO()
        settings = config(**plan, training={"steps": steps, "evaluate_every": steps})
        fit(settings, tmp_path / str(steps), data=drawings(), console=Terminal(file=shown, width=200))
        said[steps] = shown.getvalue()
    assert "time on this CPU" not in said[3]
    before, _, after = said[4].partition("time on this CPU: about ")
    assert " for 4 steps of " in after.splitlines()[0]
    assert "R@1 on the test classes" not in before
    monkeypatch.setattr(loop, "MIN_STEPS_TIMED", 5)
    fit(settings, tmp_path / "unmeasured", data=drawings())
    assert journal(tmp_path / "4") == journal(tmp_path / "unmeasured")
    first, second = weights(tmp_path / "4"), weights(tmp_path / "unmeasured")
    assert all(torch.equal(first[key], second[key]) for key in first)
