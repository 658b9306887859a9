"""Exact neighbors against brute force: odd tiles, ties across the cut and across tiles, duplicates, faiss."""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys

import numpy as np
import pytest
import torch
from needs import need
from oracles import retrieval as oracle

from nearfar.evaluation import neighbors

module = importlib.import_module("nearfar.evaluation._exact_search")
top_k = importlib.import_module("nearfar.evaluation._top_k")
SIMILARITIES = ("cosine", "dot", "euclidean")
torch.set_num_threads(1)  # small tiles on a busy machine: threads would wait for each other
similarities = pytest.mark.parametrize("similarity", SIMILARITIES)


def brute(queries, references, k, similarity, ties=True):
    """Places and scores by a full stable sort of float64 scores."""
    x, y = queries.double(), (queries if references is None else references).double()
    if similarity == "cosine":
        norm = x.norm(dim=1)[:, None] * y.norm(dim=1)
        scores = torch.where(norm > 0, x @ y.T / torch.where(norm > 0, norm, 1.0), 0.0)
    elif similarity == "dot":
        scores = x @ y.T
    else:
        scores = -(x[:, None] - y[None]).square().sum(dim=2).sqrt()
    if references is None:
        scores.fill_diagonal_(-torch.inf)
    ranked = scores.sort(dim=1, descending=True, stable=True)
    return ranked.values[:, :k], ranked.indices[:, :k]


def grid(n, seed=0, levels=2, width=4):
    """Rows of small whole numbers of equal norm: ties everywhere, and every product exact."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.integers(0, levels, (n, width)) * 2 - 1).float()


@similarities
@pytest.mark.parametrize("tile", [1, 7, 50, 333, 2**22])
@pytest.mark.parametrize("k", [1, 4, 22])
def test_equals_brute_force(similarity, tile, k):
    torch.manual_seed(0)
    x, y = torch.randn(23, 5, dtype=torch.float64), torch.randn(31, 5, dtype=torch.float64)
    for references in (None, y):
        found = neighbors(x, references, k=k, similarity=similarity, tile=tile)
        values, places = brute(x, references, k, similarity)
        assert torch.equal(found.places, places)
        torch.testing.assert_close(found.scores, values)


@similarities
def test_equals_the_loops_of_the_oracle(similarity):
    x, y = grid(12), grid(9, seed=1)
    for references in (None, y):
        S = oracle.scores(x.tolist(), (x if references is None else y).tolist(), similarity)
        for k in (1, 5, 9):
            found = neighbors(x, references, k=k, similarity=similarity)
            assert found.places.tolist() == oracle.neighbors(S, k, references is None)


@functools.cache
def tied(n, similarity):
    """Rows with many ties, references or none, and places of the forty first: the same for every tile and k."""
    x, y = grid(n), grid(n // 2 + 30, seed=1)
    return x, [(references, brute(x, references, 40, similarity)[1]) for references in (None, y)]


@similarities
@pytest.mark.parametrize("tile", [3, 64, 500, 2500, 2**22])
@pytest.mark.parametrize("k", [1, 2, 9, 40])
def test_ties_go_to_the_earlier_place(similarity, tile, k):
    """Sixteen different rows among hundreds: nearly every cut and every tile border goes through a tie."""
    for n in (41, 300 if tile == 500 else 700) if tile > 100 else (41,):
        x, wanted = tied(n, similarity)
        for references, places in wanted:
            found = neighbors(x, references, k=k, similarity=similarity, tile=tile)
            assert torch.equal(found.places, places[:, :k])


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("tile", [2500, 10_000, 250_000])
def test_both_sides_of_a_tile(monkeypatch, k, tile):
    """Rows many enough among themselves meet each tile twice; the answer is that of the plain way."""
    calls = []
    once = module._once
    monkeypatch.setattr(module, "_once", lambda *given: calls.append(1) or once(*given))
    torch.manual_seed(k)
    for x in (torch.randn(256 * k + 31, 6, dtype=torch.float64), grid(256 * k + 31, levels=3)):
        found = neighbors(x, k=k, tile=tile, similarity="euclidean")
        assert torch.equal(found.places, brute(x, None, k, "euclidean")[1])
    assert len(calls) == 2


@pytest.mark.parametrize("rising", [True, False])
def test_data_in_the_order_of_their_scores(rising):
    """Each column better than the last (every tile replaces the lists), or worse than it (none does)."""
    x = torch.tensor([[1.0, 0.0], [2.0, 0.0]], dtype=torch.float64)
    y = torch.stack([torch.linspace(0, 1, 5000, dtype=torch.float64), torch.ones(5000, dtype=torch.float64)], dim=1)
    y = y if rising else y.flip(0)
    found = neighbors(x, y, k=6, similarity="dot", tile=200)
    assert torch.equal(found.places, brute(x, y, 6, "dot")[1])


def test_all_rows_equal():
    found = neighbors(torch.ones(9, 3), k=8)
    for i in range(9):
        assert found.places[i].tolist() == [j for j in range(9) if j != i]
    torch.testing.assert_close(found.scores, torch.ones(9, 8))


def test_duplicates_are_found_and_the_row_itself_is_not():
    torch.manual_seed(0)
    x = torch.randn(200, 16).repeat_interleave(3, dim=0)
    for tile in (1000, 2**22):
        for similarity in SIMILARITIES[::2]:
            places = neighbors(x, k=2, similarity=similarity, tile=tile).places
            for i, pair in enumerate(places.tolist()):
                assert sorted([i, *pair]) == [i // 3 * 3, i // 3 * 3 + 1, i // 3 * 3 + 2]


def test_given_references_a_row_finds_its_equal():
    x = torch.eye(5)
    assert neighbors(x, x, k=1).places.flatten().tolist() == [0, 1, 2, 3, 4]


def test_float32_and_half_agree_with_float64():
    torch.manual_seed(0)
    x = torch.randn(300, 32)
    for similarity in SIMILARITIES:
        values, places = brute(x, None, 5, similarity)
        found = neighbors(x, k=5, similarity=similarity)
        torch.testing.assert_close(found.scores, values.float(), atol=2e-5, rtol=1e-5)
        assert (found.places == places).float().mean() > 0.999
        for kind in (torch.float16, torch.bfloat16):
            exact = brute(x.to(kind), None, 5, similarity)
            found = neighbors(x.to(kind), k=5, similarity=similarity)
            assert found.scores.dtype == torch.float32
            assert (found.places == exact[1]).float().mean() > 0.999


def test_an_offset_does_not_drown_the_distances():
    """Float32 rows around (3000, 3000, ...): the products alone have no digits left for the distances."""
    torch.manual_seed(0)
    x = torch.randn(200, 8) + 3000
    values, places = brute(x, None, 3, "euclidean")
    found = neighbors(x, k=3, similarity="euclidean")
    assert (found.places == places).float().mean() > 0.99
    torch.testing.assert_close(found.scores, values.float(), atol=1e-3, rtol=1e-3)
    whole = grid(60) + 1024
    assert torch.equal(neighbors(whole, k=9, similarity="euclidean").places, brute(whole, None, 9, "euclidean")[1])


def test_cosine_of_rows_of_any_length():
    torch.manual_seed(0)
    x = torch.randn(40, 6)
    scale = torch.logspace(-30, 30, 40)[:, None]
    found, plain = neighbors(x * scale, k=4), neighbors(x, k=4)
    assert torch.equal(found.places, plain.places)
    torch.testing.assert_close(found.scores, plain.scores)


def test_a_zero_row_is_at_right_angles_to_everything():
    found = neighbors(torch.tensor([[0.0, 0.0], [1.0, 0.0], [-1.0, 0.0]]), k=2)
    assert found.places.tolist() == [[1, 2], [0, 2], [0, 1]]
    assert found.scores[0].tolist() == [0.0, 0.0]


def test_scores_of_the_cosine_never_leave_the_interval():
    torch.manual_seed(0)
    x = torch.randn(50, 33).repeat(2, 1)
    assert neighbors(x, k=99).scores.abs().max() <= 1


def test_nothing_of_autograd_is_touched():
    x = torch.randn(20, 3, requires_grad=True)
    for _, strip in module.strips(x, None, k=2, similarity="cosine", tile=40):
        assert torch.is_grad_enabled()
        assert not strip.scores.requires_grad


def test_memory_is_that_of_a_tile():
    """20,000 x 64 (5 MB) among themselves: the whole matrix would take 1.6 GB."""
    script = (
        "import resource, torch; from nearfar.evaluation import neighbors; torch.set_num_threads(1);"
        "x = torch.randn(20_000, 64); neighbors(x[:2000], k=3);"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; neighbors(x, k=3);"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, encoding="utf-8", check=True).stdout
    assert int(shown) < 100_000  # kB


@similarities
@pytest.mark.parametrize("kind", ["random", "tied", "duplicates"])
def test_faiss_gives_the_same(similarity, kind):
    need("faiss")
    torch.manual_seed(0)
    x, y = {
        "random": (torch.randn(300, 16), torch.randn(200, 16)),
        "tied": (grid(300), grid(200, seed=1)),
        "duplicates": (torch.randn(60, 16).repeat(5, 1), torch.randn(40, 16).repeat(5, 1)),
    }[kind]
    for references in (None, y):
        for k in (1, 6, 199):
            ours = neighbors(x, references, k=k, similarity=similarity)
            theirs = neighbors(x, references, k=k, similarity=similarity, backend="faiss")
            # copies of one row may round apart in the last bit, and then their order among themselves is open
            rows = {"duplicates": 60 if references is None else 40}.get(kind, len(x))
            assert torch.equal(ours.places % rows, theirs.places % rows)
            torch.testing.assert_close(ours.scores, theirs.scores, atol=1e-5, rtol=1e-5)


def test_without_faiss_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ImportError, match=r'pip install "nearfar\[faiss\]"'):
        neighbors(torch.eye(3), k=1, backend="faiss")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: neighbors(torch.eye(3), k=3), "1..2"),
        (lambda: neighbors(torch.eye(3), torch.eye(3), k=4), "1..3"),
        (lambda: neighbors(torch.eye(3), k=0), "1..2"),
        (lambda: neighbors(torch.ones(1, 2), k=1), "1..0"),
        (lambda: neighbors(torch.eye(3), torch.ones(2, 2), k=1), "3 wide"),
        (lambda: neighbors(torch.eye(3), k=1, similarity="cosin"), "did you mean 'cosine'"),
        (lambda: neighbors(torch.eye(3), k=1, backend="fais"), "did you mean 'faiss'"),
        (lambda: neighbors(torch.tensor([[1.0], [torch.nan]]), k=1), "rows 1"),
    ],
)
def test_errors_say_what_came(call, words):
    with pytest.raises((ValueError, TypeError)) as error:
        call()
    assert words in str(error.value)


def test_no_queries_give_no_rows():
    assert neighbors(torch.zeros(0, 3), torch.eye(3), k=2).places.shape == (0, 2)


def test_candidates_survive_a_ragged_last_block():
    """1,003 columns fold unevenly; the largest sits in the ragged part."""
    tile = torch.arange(2 * 1003, dtype=torch.float32).reshape(2, 1003)
    keys, places = top_k.top_k(tile, 5)
    assert places.tolist() == [[1002, 1001, 1000, 999, 998]] * 2
    assert torch.equal(keys, tile[:, [1002, 1001, 1000, 999, 998]])
