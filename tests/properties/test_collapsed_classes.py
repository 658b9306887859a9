"""Classes that have collapsed while they are apart: Euclidean losses keep their float32 gradient, on every engine."""

from __future__ import annotations

import pytest
import torch
from collapsed import KINDS, LOSSES, L, collapsed, holds, off, slope
from processes import interpreted, together
from ways import lower_thresholds

import nearfar as nf
from nearfar._utils.checks import RECENT
from nearfar.engines import distances
from nearfar.engines.auto import INSTALLED

FEW = ["Contrastive", "Margin", "Triplet", "Triplet-semihard", "Triplet-hard", "LiftedStructure", "GeneralizedLifted"]
few = pytest.mark.parametrize("name", FEW)
engines = pytest.mark.parametrize("engine", ["dense", "tiled"])


@engines
@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_stays_that_of_float64(name, engine):
    holds(LOSSES[name], engine)


@pytest.mark.skipif(not INSTALLED, reason="Triton is not installed (it is built for Linux on x86)")
def test_the_kernels_in_the_interpreter():
    assert " passed" in interpreted("tests/interpreted/test_collapsed_classes.py")


def references(rows, labels):
    return rows[:16], labels[:16], {"ref_emb": rows[16:], "ref_labels": labels[16:]}


def memory(rows, labels):
    """References that begin with the rows, which are no positives of themselves."""
    ids = torch.arange(len(rows))
    return rows[:16], labels[:16], {"ref_emb": rows, "ref_labels": labels, "ids": ids[:16], "ref_ids": ids}


def matrix(rows, labels):
    hot = torch.nn.functional.one_hot(labels).bool()
    return rows, nf.Relation.from_multilabel(hot), {}


def weighted(rows, labels):
    weights = torch.linspace(0, 2, len(rows))
    return rows, nf.Relation.from_labels(labels, weights=weights, ignore=3), {}


@few
@engines
@pytest.mark.parametrize("arrange", [references, memory, matrix, weighted])
def test_other_relations(name, engine, arrange):
    holds(LOSSES[name], engine, arrange)


@few
@pytest.mark.parametrize("how", ["rows", "matrix"])
def test_index_tuples(name, how, monkeypatch):
    """Pairs and triplets, scored from their own rows or from the matrix product."""
    monkeypatch.setattr("nearfar.engines.lists.fits_rows", lambda *given: how == "rows")
    # each row with the next of its class, and with that of the next class
    a = torch.arange(24)
    listed = (a, a + 8, (a + 1) % 32)
    for indices in (listed, (*listed[:2], a, listed[2])):
        holds(LOSSES[name], "tiled", lambda rows, labels, indices=indices: (rows, labels, {"indices": indices}))


@few
def test_compiled_and_where_values_are_not_read(name, monkeypatch):
    """Distances then always come from float64 rows."""
    monkeypatch.setattr("nearfar.engines.dense.readable", lambda x: False)
    monkeypatch.setattr(distances, "any_near", None)
    holds(LOSSES[name], "dense")


def test_two_processes(tmp_path):
    for found in together("collapsed", "on_ranks", 2, tmp_path):
        assert max(found.values()) < 1e-5


@pytest.mark.skipif(not RECENT, reason="a loss is one graph from PyTorch 2.11 on")
def test_one_graph():
    torch._dynamo.reset()
    loss, exact = L.Contrastive(engine="dense"), L.Contrastive(engine="dense")
    rows, labels = collapsed(1e-4, 0.6)
    step = torch.compile(lambda x: loss(x, labels), fullgraph=True, backend="aot_eager")
    leaf = rows.clone().requires_grad_()
    (found,) = torch.autograd.grad(step(leaf), leaf)
    assert off(found.double(), slope(exact, rows, labels, torch.float64)) < 1e-5
    torch._dynamo.reset()


@engines
@pytest.mark.parametrize("kind", KINDS)
def test_a_class_of_one_point_and_two_classes_at_one_point(kind, engine):
    """Pairs at distance 0, positive and negative; others apart."""
    rows, labels = collapsed(1e-2, 0.6)
    rows[labels == 1] = rows[labels == 1][0]
    rows[labels == 2] = rows[labels == 1]
    for make in (L.Contrastive, lambda **more: L.Triplet(margin=0.5, **more), L.LiftedStructure):
        exact = slope(make(similarity=kind(), engine="dense"), rows, labels, torch.float64)
        found = slope(make(similarity=kind(), engine=engine), rows, labels, torch.float32)
        assert off(found, exact) < 1e-5


@engines
def test_second_derivatives_stay_those_of_float64(engine, monkeypatch):
    """Those of `auto`, which has strips for the first and the dense engine for the second."""
    monkeypatch.setattr("nearfar.engines.auto._worth", lambda *given, **more: engine == "tiled")
    lower_thresholds(monkeypatch, 1, 1)
    seconds = []
    for dtype in (torch.float64, torch.float32):
        rows, labels = collapsed(1e-3, 0.6)
        leaf = rows.to(dtype).requires_grad_()
        (first,) = torch.autograd.grad(L.Contrastive().to(dtype)(leaf, labels), leaf, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), leaf)
        seconds.append(second.double())
    assert off(seconds[1], seconds[0]) < 1e-4


def test_an_explanation_has_the_value_of_the_call():
    rows, labels = collapsed(1e-4, 0.6)
    loss = L.Triplet(margin=0.9, engine="dense")
    assert float(loss.explain(rows, labels).value) == pytest.approx(float(loss(rows, labels)), rel=1e-6)


def test_rows_apart_keep_float32():
    """What float64 costs is paid for near pairs alone; a row is no near pair of itself, in references too."""
    rows, ids = torch.randn(64, 16, generator=torch.Generator().manual_seed(0)), torch.arange(64)
    similarity, raw = nf.similarity.NegEuclidean(), (rows, None)
    square, own = nf.Relation.from_labels(ids), nf.Relation.from_labels(ids, ids, ids=ids, ref_ids=ids)
    for relation in (square, own):
        for look, dtype in ((True, torch.float32), (False, torch.float64)):
            found = distances.distance_rows(similarity, relation, raw, similarity.prepared(rows), look=look)
            assert found[0].dtype == dtype


@pytest.mark.parametrize("n", [40, 700])
@pytest.mark.parametrize("dim", [16, 200])
def test_a_near_pair_is_found_wherever_it_lies(n, dim):
    rng, ids = torch.Generator().manual_seed(n + dim), torch.arange(n)
    square, own = nf.Relation.from_labels(ids), nf.Relation.from_labels(ids, ids, ids=ids, ref_ids=ids)
    rows = torch.randn(n, dim, generator=rng)
    rows[: n // 2, ::8] = 0.0  # rows that only differ in other places than those that are looked at first
    assert not any(distances.any_near(relation, rows, rows) for relation in (square, own))
    for i, j in ((0, 1), (n - 2, n - 1), (0, n - 1), (n // 2, n // 3)):
        moved = rows.clone()
        moved[i] = moved[j] + 1e-3
        assert all(distances.any_near(relation, moved, moved) for relation in (square, own))
