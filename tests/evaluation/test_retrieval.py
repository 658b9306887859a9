"""Per-query results against loops: ties by both rules, lone queries, galleries, ranks beyond the list."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
import torch
from oracles import retrieval as oracle
from retrieval_cases import PROBLEMS, judged, problem

module = importlib.import_module("nearfar.evaluation._retrieval")
retrieve = module.retrieve
torch.set_num_threads(1)


@pytest.mark.parametrize("kind", PROBLEMS)
@pytest.mark.parametrize("similarity", ["cosine", "dot", "euclidean"])
@pytest.mark.parametrize("ties", ["place", "favorable"])
@pytest.mark.parametrize("deepest", [1, 64])
def test_every_query_equals_the_oracle(monkeypatch, kind, similarity, ties, deepest):
    monkeypatch.setattr(module, "DEEPEST", deepest)  # 1: ranks beyond the list are counted
    x, y, g, z = problem(kind)
    found = retrieve(x, y, g, z, similarity=similarity, ties=ties)
    S, y, names, itself = judged(x, y, g, z, similarity)
    right = [oracle.relevant(y, names, i, itself) for i in range(len(y))]
    assert found.relevant.tolist() == [len(r) for r in right]
    assert found.lone.tolist() == [not r for r in right]
    for i in oracle.counted(S, y, names, itself):
        assert int(found.rank[i]) == oracle.rank(S, y, names, i, itself, ties)
        assert float(found.r_precision[i]) == pytest.approx(oracle.r_precision_of(S, y, names, i, itself))
        assert float(found.ap_at_r[i]) == pytest.approx(oracle.ap_at_r_of(S, y, names, i, itself))
    if kind == "lone":
        assert found.lone[:5].all()


def test_ranks_beyond_the_list_are_counted_to_the_end():
    """One right answer among 3,000, the farthest of all."""
    x = torch.cat([torch.tensor([[1.0, 0.0]]), torch.stack([torch.ones(3000), torch.linspace(0, 1, 3000)], dim=1)])
    y = torch.cat([torch.zeros(1), torch.arange(1, 3000), torch.zeros(1)]).long()
    for ties in ("place", "favorable"):
        found = retrieve(x, y, similarity="euclidean", ties=ties)
        assert int(found.rank[0]) == 3000


def test_memory_stays_that_of_a_tile_where_most_answers_lie_deep():
    """10,000 queries of which nearly none finds its one right answer: every rank is counted over all rows."""
    script = (
        "import resource, torch; from nearfar.evaluation._retrieval import retrieve; torch.set_num_threads(1);"
        "x, y = torch.randn(10_000, 16), torch.arange(10_000) // 2; retrieve(x[:1000], y[:1000]);"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; retrieve(x, y);"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, encoding="utf-8", check=True).stdout
    assert int(shown) < 130_000  # kB


def test_a_tie_beyond_the_list_goes_by_place():
    """All scores equal: the first right answer stands where its place says."""
    n = 300
    y = torch.arange(n) // 2
    y[[10, 250]] = 1000
    found = retrieve(torch.ones(n, 2), y)
    assert int(found.rank[10]) == 250  # 0..9 and 11..249 stand before it
    assert int(found.rank[250]) == 11
    assert int(retrieve(torch.ones(n, 2), y, ties="favorable").rank[10]) == 1


def test_hand_worked_average_precision():
    """Right answers at ranks 1, 3 and 4 of R = 3: precisions 1, 2/3 count, the fourth lies beyond R."""
    gallery = torch.tensor([[9.0], [8.0], [7.0], [6.0]])
    found = retrieve(torch.tensor([[1.0]]), torch.tensor([5]), gallery, torch.tensor([5, 1, 5, 5]), similarity="dot")
    assert int(found.relevant) == 3
    assert float(found.r_precision) == pytest.approx(2 / 3)
    assert float(found.ap_at_r) == pytest.approx((1 + 2 / 3) / 3)


def test_empty_sides():
    empty = retrieve(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long))
    assert len(empty.rank) == 0
    alone = retrieve(torch.ones(1, 3), torch.zeros(1, dtype=torch.long))
    assert alone.lone.tolist() == [True]
    bare = retrieve(torch.ones(2, 3), torch.zeros(2, dtype=torch.long), torch.zeros(0, 3), torch.zeros(0).long())
    assert bare.lone.all()


def test_watch_is_told():
    told = []
    retrieve(torch.randn(50, 3), torch.arange(50) // 2, watch=lambda *words: told.append(words))
    assert told[0] == ("searching neighbors of queries", 50, 50)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ref_emb": torch.eye(3)}, "belong together"),
        ({"ref_emb": torch.ones(2, 2), "ref_labels": torch.tensor([0, 1])}, "3 wide"),
        ({"ties": "favourable"}, "did you mean 'favorable'"),
        ({"labels": torch.tensor([0, 1])}, "one entry per row"),
        ({"labels": torch.tensor([0.0, 1.0, 2.0])}, "integers"),
    ],
)
def test_errors(given, words):
    with pytest.raises((ValueError, TypeError)) as error:
        retrieve(**{"embeddings": torch.eye(3), "labels": torch.tensor([0, 0, 1]), **given})
    assert words in str(error.value)
