"""From which size `engine="auto"` leaves the dense engine: `auto.LEAST`, ranks that share the work, large triplets."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import nearfar as nf
from nearfar.engines import auto

FIRST = 512
"""Rows of the smallest square batch that the operators serve on a CPU."""
FIRST_GENERIC = 4096
"""Likewise for the generic strips."""


class Mine(nf.pairs.Hinge):
    """A part of one's own, which the operators do not know."""


LOSSES = {
    "row": nf.losses.SupCon,
    "batch": nf.losses.DroKL,
    "lifted": nf.losses.LiftedStructure,
    "triplets": nf.losses.Triplet,
}


def own():
    return nf.RobustLoss(pair=Mine(), over=nf.sets.KL(0.1))


class TakenError(Exception):
    """The engine that a call came to."""


@pytest.fixture(autouse=True)
def _engines(monkeypatch):
    """Calls end where an engine would begin, so that large batches cost nothing."""

    def end(place, name):
        def stop(*args, **kwargs):
            raise TakenError(name)

        monkeypatch.setattr(place, stop)

    end("nearfar.losses.robust.dense_pairs", "dense")
    end("nearfar.engines.auto.finish", "operators")
    end("nearfar.engines.auto.generic.evaluate", "generic")


def taken(loss, rows, classes=None):
    """The engine that a call of `auto` comes to; four rows a class where the number of classes is not given."""
    labels = torch.arange(rows) % (classes or rows // 4)
    with pytest.raises(TakenError) as caught:
        loss(torch.ones(rows, 2), labels)
    return str(caught.value)


@pytest.mark.parametrize("name", LOSSES)
def test_operators_serve_from_their_number_of_pairs_on(name):
    assert auto.LEAST["cpu"].operators == FIRST**2
    assert taken(LOSSES[name](), FIRST - 1) == "dense"
    assert taken(LOSSES[name](), FIRST) == "operators"


def test_strips_serve_parts_of_ones_own_from_their_number_of_pairs_on():
    assert auto.LEAST["cpu"].generic == FIRST_GENERIC**2
    assert taken(own(), FIRST_GENERIC - 1) == "dense"
    assert taken(own(), FIRST_GENERIC) == "generic"


@pytest.mark.parametrize("name", LOSSES)
def test_other_constants_change_what_auto_takes(name, monkeypatch):
    monkeypatch.setattr(auto, "LEAST", {"cpu": auto.Least(24**2, 24**2)})
    assert [taken(LOSSES[name](), rows) for rows in (23, 24)] == ["dense", "operators"]
    assert [taken(own(), rows) for rows in (23, 24)] == ["dense", "generic"]


def test_a_device_that_was_not_measured_is_dense(monkeypatch):
    monkeypatch.setattr(auto, "LEAST", {"cuda": auto.Least(1, 1)})
    assert taken(nf.losses.SupCon(), FIRST) == "dense"
    assert taken(own(), FIRST_GENERIC) == "dense"


def test_large_triplets_are_not_dense_on_any_device(monkeypatch):
    """2,048 x 127 x 2,048 triplets would be 2 GB; with four rows a class they are few."""
    monkeypatch.setattr(auto, "LEAST", {})
    assert taken(nf.losses.Triplet(), 2048, classes=16) == "operators"
    assert taken(nf.losses.Triplet(), 2048) == "dense"


def test_small_calls_look_at_one_number(monkeypatch):
    """Below the constant neither the layout nor the parts are looked at."""
    monkeypatch.setattr(auto, "choose", None)
    assert taken(nf.losses.SupCon(), FIRST - 1) == "dense"


def test_several_ranks_share_the_work_from_one_number_of_pairs_on(monkeypatch):
    """Measured device or not: each of them would compute the whole dense matrix."""
    monkeypatch.setattr(auto, "LEAST", {})
    product = nf.losses.SupCon().product
    for world, rows, wanted in ((2, FIRST, True), (2, FIRST - 1, False), (1, FIRST, False)):
        call = SimpleNamespace(ranks=SimpleNamespace(world=world))
        relation = nf.Relation.from_labels(torch.arange(rows))
        assert auto._worth("auto", call, relation, product) == wanted


@pytest.mark.parametrize(("name", "first"), [("row", 4096), ("batch", 4096), ("lifted", 2048), ("triplets", 512)])
def test_on_a_gpu_dear_pairs_count_more(name, first, monkeypatch):
    """The dense engine holds lifted structure in both directions, and a pair once for each positive of a triplet."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=140 * 10**9))
    product, call = LOSSES[name]().product, SimpleNamespace(ranks=None)
    for rows in (first - 1, first):
        relation = SimpleNamespace(shape=(rows, rows), device=SimpleNamespace(type="cuda"))
        assert auto._worth("auto", call, relation, product) == (rows == first)
