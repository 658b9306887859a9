"""`data.move`: how far a run moves drawings in training."""

from __future__ import annotations

import pytest
from runs import config, letters

from nearfar.data.transforms import Moved, Plain
from nearfar.train.suited import Input, open_model


def test_it_reaches_the_training_transform_alone():
    wanted = config(data={"move": 2.5}, model={"name": "small"})
    _, augmented, plain = open_model(wanted, Input.of(wanted, letters()))
    usual = Moved()
    assert augmented == Moved(2.5 * usual.shift, 2.5 * usual.scale, 0.0, 2.5 * usual.slant)
    assert plain == Plain()


def test_it_is_not_negative():
    with pytest.raises(ValueError, match=r"data\.move"):
        config(data={"move": -1.0})
