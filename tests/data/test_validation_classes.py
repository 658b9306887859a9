"""Whole groups of classes as the validation classes: `data.validation_classes` and `classes_by_name`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from runs import config, tiny

from nearfar.data import Tensors, classes_by_name
from nearfar.train import fit, load
from nearfar.train._build import class_shares, split

BIRDS = ("gull, herring", "gull, ivory", "tern, arctic", "tern, little", "wren", "Gull")


def birds() -> Tensors:
    labels = np.array([5, 0, 0, 1, 2, 3, 4, 1])
    return Tensors(np.eye(8, dtype=np.float32), labels, classes=BIRDS)


def data():
    """Twelve classes to learn from: k0 ... k5 and m6 ... m11."""
    given = tiny()
    names = [f"{'k' if label < 6 else 'm'}{label}" for label in range(12)]
    return replace(given, train=Tensors(given.train.x, given.train.labels, classes=names))


def settings(*patterns, **changes):
    return config(data={"validation_classes": list(patterns)}, **changes)


@pytest.mark.parametrize(
    ("patterns", "classes"),
    [
        (["gull*"], {0, 1}),
        (["wren", "tern, ?rctic"], {2, 4}),
        (["[gG]ull*"], {0, 1, 5}),
        (["*e*", "wren"], {0, 2, 3, 4}),
    ],
)
def test_classes_are_held_out_by_their_names(patterns, classes):
    rest, held_out = classes_by_name(birds(), patterns)
    assert set(birds().labels[held_out].tolist()) == classes
    assert sorted(np.concatenate([rest, held_out]).tolist()) == list(range(8))
    assert not set(birds().labels[rest]) & classes
    assert (np.diff(rest) > 0).all()
    assert (np.diff(held_out) > 0).all()


def test_a_pattern_that_matches_no_class_is_refused():
    with pytest.raises(ValueError, match="no class matches 'ull'; class names are like 'gull, herring'"):
        classes_by_name(birds(), ["gull*", "ull"])


def test_they_take_the_place_of_the_share():
    given, wanted = data(), settings("m[67]", "k5")
    shares = class_shares(wanted, given)
    assert (shares.learn, shares.held_out) == (9, 3)
    train, validation = split(wanted, given.train, shares)
    assert validation.classes == ("k5", "m6", "m7")
    assert set(train.classes) | set(validation.classes) == set(given.train.classes)
    assert len(train.classes) == 9
    assert len(train) + len(validation) == len(given.train)


def test_the_papers_protocol_holds_out_none():
    given, wanted = data(), settings("m*", training={"protocol": "paper"})
    shares = class_shares(wanted, given)
    assert (shares.learn, shares.held_out) == (12, 0)
    assert split(wanted, given.train, shares) == (given.train, None)


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        (["m6"], r"data\.validation_classes matches one class, .*; hold out two"),
        (["*"], "12 held out, where two are needed; add classes"),
        (["k*", "m[6-9]", "m11"], "1 to learn from, where two are needed"),
        (["M*"], r"no class matches 'M\*'"),
    ],
)
def test_what_cannot_be_held_out_is_refused_before_anything_is_written(tmp_path, patterns, words):
    with pytest.raises(ValueError, match=words):
        fit(settings(*patterns), tmp_path / "run", data=data())
    assert not (tmp_path / "run").exists()


def test_the_key_is_a_list_in_a_file_and_on_the_command_line(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("data: {name: glyphs, validation_classes: ['U+1E*', 'U+02[5-9A]*']}\n", encoding="utf-8")
    assert load(file).data.validation_classes == ("U+1E*", "U+02[5-9A]*")
    assert load(file, [("data.validation_classes", "['*ARROW*']")]).data.validation_classes == ("*ARROW*",)
