"""The moving average of the weights: by its formula, scored and kept, resumed exactly."""

from __future__ import annotations

import pytest
import torch
from runs import config, journal, tiny, weights

from nearfar.train import fit, open_run

DECAY = 0.6


def settings(steps=8, decay=DECAY, **changes):
    plan = {"steps": steps, "evaluate_every": 2, "checkpoint_every": 4, "diagnose_every": 0, "explain_every": 0}
    return config(training={**plan, "average": decay}, data={"validation": 0}, **changes)


def test_the_average_is_kept_and_scored(tmp_path):
    seen = []

    def note(moment):
        seen.append({name: value.clone() for name, value in moment.state.bare_model.state_dict().items()})

    fit(settings(), tmp_path / "start", data=tiny(), callbacks=[note])
    first = _untrained(tmp_path / "untrained")
    for number, now in enumerate(seen, start=1):
        decay = min(DECAY, (1 + number) / (10 + number))
        first = {name: decay * first[name] + (1 - decay) * now[name] for name in now}
    kept = weights(tmp_path / "start", "best")
    for name, value in first.items():
        torch.testing.assert_close(kept[name], value, atol=1e-6, rtol=1e-5)
    last = weights(tmp_path / "start", "last")
    assert any(not torch.equal(kept[name], last[name]) for name in kept)
    model = open_run(tmp_path / "start").model
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())


def _untrained(folder):
    """The weights before the first step: a seed makes them, and a step at no rate to speak of leaves them."""
    fit(settings(steps=1, optimizer={"lr": 1e-30, "warmup": 0}), folder, data=tiny())
    return weights(folder)


def test_a_resumed_average_is_the_same(tmp_path):
    fit(settings(), tmp_path / "whole", data=tiny())

    # a run of eight steps that stops at four: the schedule is of eight
    def stop(moment):
        if moment.step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(settings(), tmp_path / "half", data=tiny(), callbacks=[stop])
    fit(settings(), tmp_path / "half", data=tiny(), resume=True)
    assert journal(tmp_path / "half") == journal(tmp_path / "whole")
    for which in ("last", "best"):
        one, other = weights(tmp_path / "whole", which), weights(tmp_path / "half", which)
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_decay_out_of_range_is_refused():
    with pytest.raises(ValueError, match=r"training\.average must be from 0 to below 1, but came as 1\.0"):
        settings(decay=1.0)
