"""Inputs of `evaluate`, `compare`, `verification` and `diagnose`, and every score by its name."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracles import retrieval as oracle

import nearfar as nf
from nearfar._utils.arrays import labels_of, rows_of
from nearfar.doctor import diagnose
from nearfar.evaluation import Vectors, verification

torch.set_num_threads(1)
RNG = np.random.default_rng(5)
N, M = 24, 17
X, G = RNG.standard_normal((N, 4)), RNG.standard_normal((M, 4))
Y, Z = RNG.integers(0, 5, N), RNG.integers(0, 5, M)
HOT, REF_HOT = RNG.random((N, 6)) < 0.25, RNG.random((M, 6)) < 0.25
TIED = RNG.integers(0, 2, (N, 3)) * 2.0 - 1

# -------------------------------------------------------------------------------------------- ways to hand in


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (X, Y),
        (X.tolist(), Y.tolist()),
        (tuple(map(tuple, X)), tuple(Y.tolist())),
        (X.astype(">f8"), Y.astype(">i4")),
        (X.astype(np.longdouble), Y.astype(np.uint64)),
        (np.asfortranarray(X), Y.astype(np.int8)),
        (X[::-1][::-1], Y[::-1][::-1]),
        (torch.from_numpy(X), torch.from_numpy(Y).to(torch.uint16)),
        (list(torch.from_numpy(X)), list(torch.from_numpy(Y))),
        (torch.from_numpy(X), Y),
        (X, nf.Relation.from_labels(torch.from_numpy(Y))),
    ],
)
def test_every_way_gives_the_same(x, y):
    wanted = nf.evaluate(torch.from_numpy(X), torch.from_numpy(Y), ks=(1, 3), clustering=True)
    found = nf.evaluate(x, y, ks=(1, 3), clustering=True)
    assert found.to_dict() == wanted.to_dict()
    assert found.intervals


def test_arrays_that_may_not_be_written():
    x, y = X.copy(), Y.copy()
    x.flags.writeable = y.flags.writeable = False
    assert nf.evaluate(x, y, ks=(1,), resamples=0).queries  # torch would warn, which is an error here


def test_vectors_bring_their_labels():
    held, gallery = Vectors(X, Y), Vectors(G, Z)
    x, g = (torch.from_numpy(a).float() for a in (X, G))
    assert nf.evaluate(held).to_dict() == nf.evaluate(x, Y).to_dict()
    assert nf.evaluate(held, Y[::-1].copy()).to_dict() == nf.evaluate(x, Y[::-1].copy()).to_dict()
    wanted = nf.evaluate(x, Y, ref_emb=g, ref_labels=Z)
    assert nf.evaluate(held, ref_emb=gallery).to_dict() == wanted.to_dict()
    assert nf.evaluate(x, nf.Relation.from_labels(*map(torch.from_numpy, (Y, Z))), ref_emb=g).to_dict() == (
        wanted.to_dict()
    )
    assert verification(held).auc == verification(x, Y).auc
    assert diagnose(held).to_dict() == diagnose(x, torch.from_numpy(Y)).to_dict()
    assert diagnose(X.tolist(), Y.tolist()).to_dict() == diagnose(torch.from_numpy(X), torch.from_numpy(Y)).to_dict()
    with pytest.raises(ValueError, match="labels are needed"):
        nf.evaluate(Vectors(X))
    with pytest.raises(ValueError, match="the queries and the gallery come from networks with different weights"):
        nf.evaluate(Vectors(X, Y, fingerprint="aa"), ref_emb=Vectors(G, Z, fingerprint="bb"))
    with pytest.raises(ValueError, match="only one of them came"):
        nf.evaluate(held, ref_emb=Vectors(G))


def test_compare_takes_vectors():
    worse = Vectors(X * [1, 0, 0, 0], Y)
    by_hand = nf.compare(nf.evaluate(Vectors(X, Y), ks=(1,)), nf.evaluate(worse, ks=(1,)))
    assert nf.compare(Vectors(X, Y), worse) == by_hand
    names = [f"{i}" for i in range(N)]
    with pytest.raises(ValueError, match="their names differ"):
        nf.compare(Vectors(X, Y, names), Vectors(X, Y, names[::-1]))
    with pytest.raises(TypeError, match="a and b must be evaluations or Vectors, but ndarray came"):
        nf.compare(X, X)


# --------------------------------------------------------------------------------------------------- relations


def by_oracle(S, positive, counts, ties):
    rows = [oracle.related(S, positive, counts, i, ties) for i in range(len(S))]
    kept = [row for row in rows if row[0]]
    return rows, kept


@pytest.mark.parametrize("similarity", ["cosine", "dot", "euclidean"])
@pytest.mark.parametrize("ties", ["place", "favorable"])
@pytest.mark.parametrize("kind", ["multi-label", "multi-label gallery", "matrix", "ignored pairs", "tied", "ids"])
def test_relations_equal_the_oracle(kind, ties, similarity):
    x, g = (TIED if kind == "tied" else X), (G if "gallery" in kind or kind == "ids" else None)
    itself = ~np.eye(N, dtype=bool)
    hot, positive = torch.from_numpy(HOT), oracle.shared_label(HOT, HOT)
    if kind in ("multi-label", "tied"):
        relation, counts = nf.Relation.from_multilabel(hot), itself
    elif kind == "multi-label gallery":
        positive, counts = oracle.shared_label(HOT, REF_HOT), np.ones((N, M), dtype=bool)
        relation = nf.Relation.from_multilabel(hot, torch.from_numpy(REF_HOT))
    elif kind == "ids":  # the gallery holds some of the queries themselves
        positive, who = Y[:, None] == Z[None, :], RNG.permutation(N)[:M]
        counts = np.arange(N)[:, None] != who[None, :]
        ids = {"ids": torch.arange(N), "ref_ids": torch.from_numpy(who)}
        relation = nf.Relation.from_labels(torch.from_numpy(Y), torch.from_numpy(Z), **ids)
    else:
        positive, known = RNG.random((N, N)) < 0.15, RNG.random((N, N)) < (0.7 if kind == "ignored pairs" else 2)
        positive[3] = False  # a lone query
        relation = nf.Relation.from_matrix(torch.from_numpy(positive), torch.from_numpy(known))
        counts = known & itself
    S = oracle.scores(x.tolist(), (x if g is None else g).tolist(), similarity)
    rows, kept = by_oracle(S, positive, counts, ties)
    found = nf.evaluate(x, relation, ref_emb=g, ks=(1, 2, 5), ties=ties, similarity=similarity, resamples=0)
    assert found.per_query.relevant.tolist() == [row[0] for row in rows]
    assert (found.queries, found.lone, found.classes) == (len(kept), len(rows) - len(kept), 0)
    for k in (1, 2, 5):
        assert found.recall[k] == pytest.approx(np.mean([row[1] <= k for row in kept]))
    assert found.mrr == pytest.approx(np.mean([1 / row[1] for row in kept]))
    assert found.r_precision == pytest.approx(np.mean([row[2] for row in kept]))
    assert found.map_at_r == pytest.approx(np.mean([row[3] for row in kept]))


def test_strips_of_a_relation_change_nothing(monkeypatch):
    from nearfar.evaluation import _retrieval as retrieval

    relation = nf.Relation.from_multilabel(torch.from_numpy(HOT))
    told = []
    wanted = nf.evaluate(X, relation).to_dict()
    monkeypatch.setattr(retrieval, "TILE", 5 * N)
    assert nf.evaluate(X, relation, watch=lambda *words: told.append(words)).to_dict() == wanted
    assert told[-1] == ("ranking references of queries", N, N)
    assert len(told) == 5


def test_one_hot_rows_are_labels():
    hot = torch.nn.functional.one_hot(torch.from_numpy(Y))
    ours, plain = nf.evaluate(X, nf.Relation.from_multilabel(hot)), nf.evaluate(X, Y, unit="query")
    assert ours.scores() == pytest.approx(plain.scores())
    assert ours.unit == "query"
    assert ours.per_class == ()
    assert repr(ours).startswith(f"{ours.queries} queries; 95% intervals over queries")
    assert "recall@1" in nf.compare(ours, ours).score
    with pytest.raises(ValueError, match="not of the same queries"):
        nf.compare(ours, nf.evaluate(X, nf.Relation.from_multilabel(torch.from_numpy(HOT))))


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda r: nf.evaluate(X, r, clustering=True), r"clustering \(nmi, ami, f1\): labels are needed"),
        (lambda r: nf.evaluate(X, r, unit="class"), 'unit="class" needs labels, but a relation came'),
        (lambda r: nf.compare(nf.evaluate(X, r), nf.evaluate(X, r), unit="class"), 'compare: unit="class" needs'),
        (lambda r: verification(X, r), "verification: labels are needed, but Relation"),
        (lambda r: diagnose(X, r), "diagnose: labels are needed, but Relation"),
        (lambda r: nf.evaluate(X[:9], r), "must be of 9 x 9 rows among themselves"),
        (lambda r: nf.evaluate(X, r, ref_emb=G), "24 x 17 rows against a gallery"),
        (lambda r: nf.evaluate(X, Y, ref_emb=X, ref_labels=r), "pass a relation of queries and gallery as labels"),
        (lambda r: nf.evaluate(X, r, ties="kind"), "ties must be one of"),
        (lambda r: nf.evaluate(X, r, similarity="near"), "similarity must be one of"),
        (lambda r: nf.evaluate(np.where(X[3, 0] == X, np.nan, X), r), r"must be finite.*rows 3"),
    ],
)
def test_relations_where_they_mean_nothing(call, told):
    with pytest.raises((ValueError, TypeError), match=told):
        call(nf.Relation.from_multilabel(torch.from_numpy(HOT)))


def test_weights_and_representatives_rank_nothing():
    y = torch.from_numpy(Y)
    for told, given in (
        ("pair weights", {"weights": torch.rand(N)}),
        ("representatives", {"representatives": torch.arange(N) < 5}),
    ):
        with pytest.raises(ValueError, match=f"{told} have no meaning for a ranking"):
            nf.evaluate(X, nf.Relation.from_labels(y, **given))
    nobody = nf.Relation.from_matrix(torch.zeros(N, N, dtype=torch.bool))
    with pytest.raises(ValueError, match="no query has a right answer"):
        nf.evaluate(X, nobody)


# ------------------------------------------------------------------------------------------ kinds of numbers

KINDS = {
    "truth values": X > 0,
    "complex numbers": X + 1j,
    "words": X.astype(str),
    "bytes": X.astype("S8"),
    "records": np.zeros((N, 4), dtype=[("a", "f4")]),
    "dates": np.zeros((N, 4), dtype="M8[D]"),
    "spans of time": np.zeros((N, 4), dtype="m8[s]"),
}
CALLS = {"evaluate": nf.evaluate, "verification": verification, "diagnose": diagnose}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("owner", CALLS)
def test_rows_of_every_kind(owner, kind):
    with pytest.raises(TypeError, match=rf"^{owner}: embeddings must hold real numbers \[n, d\], but came as {kind}"):
        CALLS[owner](KINDS[kind], Y)
    with pytest.raises(TypeError, match=rf"^{owner}: labels must be integers \[n\], but came as {kind}"):
        CALLS[owner](X, KINDS[kind][:, 0])


@pytest.mark.parametrize("owner", CALLS)
def test_other_labels_and_rows(owner):
    call = CALLS[owner]
    with pytest.raises(TypeError, match=rf"^{owner}: labels must be integers \[n\], but came as fractions \(float64\)"):
        call(X, Y + 0.5)
    with pytest.raises(TypeError, match=rf"^{owner}: labels must be integers, but came as torch.float32"):
        call(torch.from_numpy(X), torch.rand(N))
    with pytest.raises(TypeError, match=rf"^{owner}: embeddings must hold real numbers, but came as torch.complex64"):
        call(torch.zeros(N, 4, dtype=torch.complex64), torch.from_numpy(Y))
    with pytest.raises(TypeError, match=rf"^{owner}: embeddings must be floating point, but came as torch.int64"):
        call(torch.zeros(N, 4, dtype=torch.int64), torch.from_numpy(Y))
    for odd in ([[1.0, 2.0], [3.0]], {"a": 1}, None, [object()] * N, np.array([None] * N)):
        with pytest.raises(TypeError, match=rf"^{owner}: embeddings must be real numbers \[n, d\], a tensor, an array"):
            call(odd, Y)
    with pytest.raises(ValueError, match=rf"^{owner}: labels must be integers below 2\^63"):
        call(X, np.full(N, 2**63, dtype=np.uint64))
    with pytest.raises(ValueError, match=rf"^{owner}: labels must have one entry per row"):
        call(X, Y[:-1])
    with pytest.raises(ValueError, match=rf"^{owner}: labels must have shape \[{N}\]"):
        call(X, HOT.astype(int))


def test_integers_are_vectors_too():
    assert rows_of("f", "x", [[1, 2], [3, 4]]).dtype == torch.float32
    assert rows_of("f", "x", np.arange(4, dtype=np.uint16).reshape(2, 2)).tolist() == [[0, 1], [2, 3]]
    assert labels_of("f", "y", np.array([3, 2**40], dtype=np.uint64)).tolist() == [3, 2**40]
