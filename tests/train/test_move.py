"""How a run opens its network: `data.move` in the transform of training, published weights where it is fresh."""

from __future__ import annotations

import pytest
from runs import config, letters

from nearfar.data.transforms import Moved, Plain
from nearfar.models import saved
from nearfar.train._build import Input, build_model

PLAIN = {"pretrained": False}


def test_it_reaches_the_training_transform_alone():
    wanted = config(data={"move": 2.5}, model={"name": "small"})
    _, augmented, plain = build_model(wanted, Input.of(wanted, letters()), letters().train)
    usual = Moved()
    assert augmented == Moved(2.5 * usual.shift, 2.5 * usual.scale, 0.0, 2.5 * usual.slant)
    assert plain == Plain()


@pytest.mark.parametrize("fresh", [True, False])
def test_published_weights_are_read_by_a_fresh_run_alone(monkeypatch, fresh):
    asked, build = [], saved.build
    monkeypatch.setattr(saved, "build", lambda name, **more: asked.append(more) or build(name, **more | PLAIN))
    wanted = config(model={"name": "small", "pretrained": True})
    build_model(wanted, Input.of(wanted, letters()), letters().train, fresh=fresh)
    assert [more["pretrained"] for more in asked] == [fresh]


def test_it_is_not_negative():
    with pytest.raises(ValueError, match=r"data\.move"):
        config(data={"move": -1.0})
