"""Search spaces: the meaning of a range, what is searched for each loss, and one sentence for each error."""

from __future__ import annotations

import re

import pytest
from runs import config

from nearfar.tune import read_space, spaces
from nearfar.tune._ranges import Choices, Range, read_range

CONFIG = config()
LR = {"low": 1e-4, "high": 1e-2, "log": True}


def test_whole_ends_mean_whole_numbers_where_the_key_takes_no_others():
    (found,) = spaces(
        CONFIG,
        {
            "model.embedding_dim": {"low": 4, "high": 64, "log": True},
            "optimizer.weight_decay": {"low": 0, "high": 1},
            "optimizer.warmup": {"low": 0, "high": 25, "step": 10},
            "loss.pair.threshold": {"low": 0, "high": 1},
            "loss.k": {"low": 2, "high": 64, "step": 1, "log": True},
            "batches.samples": {"choices": [2, 3]},
        },
    )
    assert found.ranges == {
        "model.embedding_dim": Range(4, 64, log=True, whole=True),
        "optimizer.weight_decay": Range(0.0, 1.0),
        "optimizer.warmup": Range(0, 20, step=10, whole=True),  # the last value that steps reach
        "loss.pair.threshold": Range(0.0, 1.0),
        "loss.k": Range(2, 64, log=True, step=1, whole=True),
        "batches.samples": Choices((2, 3)),
    }


def test_a_loss_brings_its_own_space():
    losses = [
        {"name": "DroTopK", "k": 8, "pair": {"name": "Hinge", "margin": {"low": 0.1, "high": 0.3}}},
        {"name": "DroTopK", "k": {"choices": [4, 8]}, "optimizer.lr": 1e-3},
        "SupCon",
        {"name": "ProxyNCA", "optimizer.loss_lr_mult": {"choices": [1, 10]}, "optimizer.lr": {"choices": [1, 2]}},
    ]
    for given in (losses, {"choices": losses}):
        found = {each.label: each for each in spaces(CONFIG, {"optimizer.lr": LR, "loss": given})}
        assert {label: set(each.ranges) for label, each in found.items()} == {
            "DroTopK": {"optimizer.lr", "loss.pair.margin"},
            "DroTopK 2": {"loss.k"},
            "SupCon": {"optimizer.lr"},
            "ProxyNCA": {"optimizer.lr", "optimizer.loss_lr_mult"},
        }
        changed = found["DroTopK"].config({"optimizer.lr": 2e-5, "loss.pair.margin": 0.2})
        assert changed.loss.options == {"k": 8, "pair": {"name": "Hinge", "margin": 0.2}}
        assert changed.optimizer.lr == 2e-5
        assert changed.training == CONFIG.training
        assert found["DroTopK 2"].base.optimizer.lr == 1e-3
        assert found["ProxyNCA"].ranges["optimizer.lr"] == Choices((1, 2))


def test_a_name_comes_before_the_options_that_it_clears():
    (found,) = spaces(CONFIG, {"batches.samples": {"choices": [2, 4]}, "batches.name": {"choices": ["MPerClass"]}})
    assert found.config({"batches.samples": 4, "batches.name": "MPerClass"}).batches.options["samples"] == 4
    (found,) = spaces(CONFIG, {"loss.pair": {"choices": ["Hinge", {"name": "Logistic", "threshold": 0.3}]}})
    assert found.config({"loss.pair": "Hinge"}).loss.options["pair"] == "Hinge"
    (found,) = spaces(CONFIG, {"loss.pair": {"choices": ["Logistic"]}, "loss.pair.threshold": {"low": 0, "high": 1}})
    inner = found.config({"loss.pair": "Logistic", "loss.pair.threshold": 0.5}).loss.options["pair"]
    assert inner == {"name": "Logistic", "threshold": 0.5}


def test_ends_of_a_range_are_edges():
    lr = read_range("optimizer.lr", LR)
    assert [lr.at_edge(value) for value in (1e-4, 1e-3, 9e-3)] == [True, False, True]
    assert not read_range("x", {"choices": [1, 2]}).at_edge(1)


@pytest.mark.parametrize(
    ("space", "words"),
    [
        ({}, "the space is empty; give it a line such as"),
        ({"optimiser.lr": LR}, "there is no optimiser.lr; did you mean 'optimizer.lr'?"),
        ({"optimizer.lrr": LR}, "there is no optimizer.lrr; did you mean 'lr'?"),
        ({"loss.kk": {"choices": [1, 2]}}, "DroTopK has no loss.kk; "),
        ({"loss": ["DroTopKK"]}, "nothing is searched for DroTopKK"),
        ({"loss": ["DroTopKK"], "optimizer.lr": LR}, "loss.name is 'DroTopKK'; did you mean 'DroTopK'"),
        ({"loss": []}, "loss is an empty list"),
        ({"loss": [{"k": 3}]}, "a loss must be a name, or a mapping with a name"),
        ({"optimizer.lr": 1e-3}, "the space of optimizer.lr came as 0.001; write {low: 1e-4"),
        ({"optimizer.lr": {"low": 1, "hihg": 2}}, "the space of optimizer.lr has no hihg; did you mean 'high'?"),
        ({"optimizer.lr": {"low": 1e-3}}, "high of optimizer.lr must be a number, but came as None"),
        ({"optimizer.lr": {"low": 2, "high": 1}}, "the range of optimizer.lr from 2 to 1 is empty"),
        ({"optimizer.lr": {"low": 1, "high": 1}}, "the range of optimizer.lr from 1 to 1 is empty"),
        ({"optimizer.lr": {"low": 0, "high": 1, "log": True}}, "with log it must begin above 0"),
        ({"optimizer.lr": {"low": 1, "high": 2, "log": "yes"}}, "log of optimizer.lr must be true or false"),
        ({"optimizer.lr": {"low": 1, "high": 2, "step": 3}}, "step of optimizer.lr must lie above 0 and within 1"),
        ({"optimizer.lr": {"low": 0.1, "high": 9, "step": 1, "log": True}}, "goes with log for whole numbers alone"),
        ({"optimizer.lr": {"low": True, "high": 2}}, "low of optimizer.lr must be a number"),
        ({"optimizer.lr": {"choices": []}}, "the choices of optimizer.lr must be a list of one value or more"),
        ({"optimizer.lr": {"choices": [1, 1]}}, "the choices of optimizer.lr hold a value twice"),
        ({"optimizer.lr": {"choices": [1], "low": 1}}, "the space of optimizer.lr has choices and low too"),
        ({"optimizer.lr": {"low": -1, "high": 1}}, "optimizer.lr must be a number above zero, but came as -1"),
        (
            {"model.pool": {"choices": ["avg", "mean"]}},
            "model.pool must be one of avg, max, both, gem, but came as 'mean'",
        ),
        ({"model.embedding_dim": {"low": 1.5, "high": 9}}, "model.embedding_dim must be a whole number"),
        ({"loss": [{"name": "SupCon", "temperature": {"low": -1, "high": 1}}]}, "temperature"),
        ({"training.seed": {"low": 0, "high": 9}}, "training.seed is not searched, since a good seed is luck"),
        ({"data.workers": {"choices": [0, 4]}}, "data.workers is not searched, since it changes no score"),
        ({"data.name": {"choices": ["glyphs"]}}, "data.name is not searched, since every trial"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(space, words):
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        spaces(CONFIG, space)
    assert "\n" not in str(error.value)


def test_a_space_is_a_file(tmp_path):
    file = tmp_path / "space.yaml"
    file.write_text("optimizer.lr: {low: 1e-4, high: 1e-2, log: true}\n", encoding="utf-8")
    assert read_space(file) == {"optimizer.lr": LR}
    with pytest.raises(FileNotFoundError, match="there is no file"):
        read_space(tmp_path / "none.yaml")
