"""`auto` counts the triplets that the dense engine would hold, n x P x m, not only the pairs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from engine_cases import CLOSE, largest, measured, on

import nearfar as nf
from nearfar.engines import auto, generic, strips, tiles
from nearfar.groups._triplets import widest

L = nf.losses
LOSSES = {
    "all": lambda: L.Triplet(margin=0.3),
    "swap": lambda: L.Triplet(swap=True),
    "mined": lambda: L.Triplet(miner=nf.miners.SemiHard()),
    "angular": lambda: L.Angular(reduction="sum"),
    "one group a positive": lambda: L.Triplet(smooth=0.1, margin=0.3, reduction="nonzero"),
}


class TakenError(Exception):
    """The engine that a call came to."""


@pytest.fixture
def engines(monkeypatch):
    """Calls end where an engine would begin: 2,048 rows cost nothing."""

    def end(name):
        def spy(*args, **kwargs):
            raise TakenError(name.rpartition(".")[2])

        monkeypatch.setattr(f"nearfar.{name}", spy)

    end("engines.auto.Way.run")
    end("losses.robust.dense_pairs")


def taken(loss, labels, **told):
    with pytest.raises(TakenError) as caught:
        loss(torch.ones(len(labels), 2), nf.Relation.from_labels(labels, **told))
    return str(caught.value)


@pytest.mark.parametrize("name", LOSSES)
def test_2048_rows_of_large_classes_are_tiled(name, engines):
    assert taken(LOSSES[name](), torch.arange(2048) % 16) == "run"


def test_what_the_table_decides_is_not_counted(engines, monkeypatch):
    """A count of the positives of every row takes a tenth of the call."""

    def counted(relation):
        raise AssertionError

    monkeypatch.setattr("nearfar.groups._triplets.widest", counted)
    assert taken(L.Triplet(margin=0.3), torch.arange(2048) // 4) == "run"


@pytest.mark.parametrize("name", ["swap", "mined"])
def test_2048_rows_of_small_classes_are_dense(name, engines):
    """As before: no fast path, four rows a class, 2,048 x 3 x 2,048 triplets."""
    labels = torch.arange(2048) // 4
    assert taken(LOSSES[name](), labels) == "dense_pairs"
    assert taken(LOSSES[name](), labels, width=3) == "dense_pairs"


def test_losses_of_pairs_are_not_counted_as_triplets(engines):
    loss = nf.RobustLoss(pair=nf.pairs.Hinge(), over=nf.sets.PowerWeights(1.0, 3.0), groups="anchor_sign")
    assert not auto._too_large(loss.product, nf.Relation.from_labels(torch.zeros(2048, dtype=torch.int64)))


def test_where_values_cannot_be_read_the_width_counts_or_else_every_column():
    """As on a GPU, which the decision must not wait for: without a width the dense engine takes P = m there."""
    product = L.Triplet().product
    for n, width, wanted in (
        (2048, None, True),
        (2048, 3, False),
        (2048, 63, False),
        (2048, 64, True),
        (512, None, False),
    ):
        relation = nf.Relation.from_labels(torch.empty(n, dtype=torch.int64, device="meta"), width=width)
        assert widest(relation) == (width or n)
        assert auto._too_large(product, relation) == wanted


@pytest.mark.parametrize("told", [{}, {"ignore": 1}, {"weights": torch.linspace(0.0, 1.0, 90)}])
def test_the_widest_row_is_counted_as_the_dense_engine_does(told):
    relation = nf.Relation.from_labels(torch.arange(90) % 4 * (torch.arange(90) % 3), **told)
    assert widest(relation) == relation.width(relation.dense().positive)
    assert widest(nf.Relation.from_labels(torch.zeros(0, dtype=torch.int64))) == 0


@pytest.mark.parametrize("name", LOSSES)
def test_no_tensor_of_all_triplets_is_made(name, monkeypatch):
    """The same decision on fewer rows; a strip is as large as it may be in the cache, so the bound is above that."""
    n, classes = 96, 2
    torch.manual_seed(0)
    rows, labels = torch.randn(n, 4, dtype=torch.float64), torch.arange(n) % classes
    triplets = n * (n // classes - 1) * n
    assert largest(on(LOSSES[name](), "dense"), rows, labels) >= triplets
    monkeypatch.setattr(auto, "MOST", triplets)
    monkeypatch.setattr(tiles, "FULL", triplets // 8)
    monkeypatch.setattr(tiles, "LISTED", triplets // 8)
    monkeypatch.setattr(strips, "KEPT", triplets // 8)
    monkeypatch.setattr(generic, "DEEP", triplets // 8)
    assert largest(LOSSES[name](), rows, labels) < triplets / 4
    for a, b in zip(
        measured(LOSSES[name](), rows, labels), measured(on(LOSSES[name](), "dense"), rows, labels), strict=True
    ):
        torch.testing.assert_close(a, b, **CLOSE)


def test_more_than_half_of_a_gpus_memory_is_not_dense(monkeypatch):
    """Measured or not: 32,768 rows would take 69 GB."""
    cuda = SimpleNamespace(type="cuda")
    product = L.SupCon().product
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(total_memory=80 * 10**9))
    for rows, wanted in ((16384, False), (32768, True)):
        assert auto._too_large(product, SimpleNamespace(device=cuda, shape=(rows, rows))) == wanted
