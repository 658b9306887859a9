"""k-means against scikit-learn and by hand; NMI, AMI and F1 of what it finds."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch
from oracles import retrieval as oracle
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_mutual_info_score, normalized_mutual_info_score

from nearfar.evaluation import k_means
from nearfar.evaluation._clustering import clustering_scores, nmi_ami_f1, pair_f1

module = importlib.import_module("nearfar.evaluation._k_means")
torch.set_num_threads(1)


def blobs(classes=12, each=15, width=6, noise=0.3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(classes, width, generator=generator) * 2
    y = torch.arange(classes).repeat_interleave(each)
    return centers[y] + noise * torch.randn(len(y), width, generator=generator), y


def inertia(x, centers):
    return torch.cdist(x.double(), centers.double()).amin(dim=1).square().sum().item()


@pytest.mark.parametrize("k", [2, 12, 60])
def test_from_the_same_starts_it_ends_where_sklearn_ends(k):
    """Lloyd's steps are fixed by their start; only rounding tells the two apart."""
    x, _ = blobs(noise=1.0)
    starts = module._starts(x, k, torch.Generator().manual_seed(5), "", None)
    ours = module._lloyd(x, starts.clone(), 300, "", None)
    theirs = KMeans(k, init=starts.numpy(), n_init=1, max_iter=300, tol=0, algorithm="lloyd").fit(x.numpy())
    assert ours.inertia == pytest.approx(theirs.inertia_, rel=0.01)
    if k < 60:
        assert pair_f1(ours.assignment.numpy(), theirs.labels_) == pytest.approx(1.0, abs=0.02)


def test_nearly_as_good_as_sklearn():
    """Its starts are greedy (the best of several proposals each), ours are those of the paper."""
    x, _ = blobs(noise=1.0)
    ours = np.mean([k_means(x, 12, seed=seed).inertia for seed in range(5)])
    theirs = np.mean([KMeans(12, n_init=3, random_state=seed).fit(x.numpy()).inertia_ for seed in range(5)])
    assert ours <= 1.06 * theirs


def test_the_solution_is_consistent():
    x, _ = blobs(noise=1.0)
    found = k_means(x, 9)
    for c in range(9):
        torch.testing.assert_close(found.centers[c], x[found.assignment == c].mean(dim=0), atol=1e-4, rtol=1e-4)
    assert torch.equal(found.assignment, torch.cdist(x, found.centers).argmin(dim=1))
    assert found.inertia == pytest.approx(inertia(x, found.centers), rel=1e-5)


def test_clear_clusters_are_found():
    x, y = blobs()
    assert nmi_ami_f1(k_means(x, 12).assignment, y)[0] == pytest.approx(1.0)


def test_seeded():
    x, _ = blobs(noise=2.0)
    a, b = k_means(x, 20, seed=3, restarts=1), k_means(x, 20, seed=3, restarts=1)
    assert torch.equal(a.assignment, b.assignment)
    assert a.inertia == b.inertia
    assert len({k_means(x, 20, seed=seed, restarts=1).inertia for seed in range(4)}) > 1


def test_the_best_of_the_restarts_counts():
    x, _ = blobs(noise=2.0)
    every = [run.inertia for run in module.runs(x, 20, seed=1, restarts=4)]
    assert k_means(x, 20, seed=1, restarts=4).inertia == min(every)
    assert len(set(every)) > 1


def test_starts_follow_the_law_of_k_means_plus_plus():
    """Five rows on a line, three starts: how often each set is drawn, against the sum over all orders by hand."""
    x = torch.tensor([[0.0], [1.0], [3.0], [3.5], [7.0]])
    wanted: dict[frozenset[int], float] = {}
    for a in range(5):
        first = (x[:, 0] - x[a, 0]).square().double()
        for b in range(5):
            second = torch.minimum(first, (x[:, 0] - x[b, 0]).square())
            for c in range(5):
                chance = float(1 / 5 * first[b] / first.sum() * second[c] / second.sum())
                if chance > 0:
                    wanted[frozenset({a, b, c})] = wanted.get(frozenset({a, b, c}), 0.0) + chance
    generator = torch.Generator().manual_seed(0)
    draws = 1500
    counts = dict.fromkeys(wanted, 0)
    for _ in range(draws):
        starts = module._starts(x, 3, generator, "", None)
        counts[frozenset(int((x == s).nonzero()[0, 0]) for s in starts)] += 1
    for key, chance in wanted.items():
        assert counts[key] / draws == pytest.approx(chance, abs=4 * np.sqrt(chance * (1 - chance) / draws) + 1e-3)


def test_batched_starts_follow_the_law_too():
    """The third batch draws two at once; on four far pairs a start in each pair is what D² sampling gives."""
    x = torch.tensor([[0.0, 0], [0, 0.1], [100, 0], [100, 0.1], [0, 100], [0, 100.1], [100, 100], [100, 100.1]])
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        starts = module._starts(x, 4, generator, "", None)
        assert len({tuple(row) for row in (starts / 50).round().tolist()}) == 4


def test_as_many_clusters_as_rows():
    x = torch.randn(40, 3)
    found = k_means(x, 40)
    assert sorted(found.assignment.tolist()) == list(range(40))
    assert found.inertia == pytest.approx(0, abs=1e-6)


def test_one_cluster():
    x, _ = blobs()
    found = k_means(x, 1)
    assert not found.assignment.any()
    assert found.inertia == pytest.approx(float((x - x.mean(dim=0)).square().sum()), rel=1e-4)


def test_duplicates_and_more_clusters_than_points():
    x = torch.tensor([[0.0, 1.0], [5.0, 5.0]]).repeat_interleave(6, dim=0) + 1000
    found = k_means(x, 5)
    assert found.inertia == pytest.approx(0, abs=1e-6)
    assert len(set(found.assignment[:6].tolist())) == 1
    assert len(set(found.assignment[6:].tolist())) == 1
    assert torch.isfinite(found.centers).all()


def test_an_empty_cluster_restarts_at_a_far_row():
    """Two starts on one spot: one cluster is empty at first and must not stay so."""
    x = torch.tensor([[0.0], [0.1], [0.2], [10.0], [10.1], [50.0]])
    found = module._lloyd(x, torch.tensor([[0.0], [0.0], [10.0]]), 50, "", None)
    assert found.inertia == pytest.approx(0.02 + 0.005, abs=1e-3)


def test_an_offset_does_no_harm():
    x, y = blobs()
    assert nmi_ami_f1(k_means(x + 1000, 12).assignment, y)[0] == pytest.approx(1.0)


def test_watch_is_told():
    told: list[tuple[str, int, int]] = []
    k_means(blobs()[0], 12, restarts=2, watch=lambda *words: told.append(words))
    assert ("k-means run 2 of 2: steps (at most)", 1, 50) in told
    assert ("k-means run 1 of 2: starts", 12, 12) in told


def test_pair_f1_equals_counting_pairs():
    rng = np.random.default_rng(0)
    for _ in range(20):
        found, wanted = rng.integers(0, 5, 30), rng.integers(0, 6, 30)
        assert pair_f1(found, wanted) == pytest.approx(oracle.pair_f1(found, wanted))
    assert pair_f1(np.arange(4), np.arange(4)) == 0.0
    assert pair_f1(np.zeros(200_000, dtype=int), np.zeros(200_000, dtype=int)) == 1.0


def test_nmi_and_ami_equal_counting():
    """And scikit-learn's, which counts in another way."""
    rng = np.random.default_rng(1)
    for classes in (2, 5, 9):
        found, wanted = rng.integers(0, 4, 36), rng.integers(0, classes, 36)
        nmi, ami, _ = nmi_ami_f1(torch.from_numpy(found), torch.from_numpy(wanted))
        assert nmi == pytest.approx(oracle.nmi(found.tolist(), wanted.tolist()), abs=1e-12)
        assert ami == pytest.approx(oracle.ami(found.tolist(), wanted.tolist()), abs=1e-12)
        assert nmi == pytest.approx(normalized_mutual_info_score(wanted, found), abs=1e-12)
        assert ami == pytest.approx(adjusted_mutual_info_score(wanted, found), abs=1e-12)
    same = torch.arange(12) // 3
    assert nmi_ami_f1(same, 9 - same) == pytest.approx((1.0, 1.0, 1.0))


def test_scores_are_those_of_the_best_run_and_spread_over_all():
    x, y = blobs(noise=1.5)
    found = clustering_scores(x, y, normalize=False, restarts=4)
    every = [nmi_ami_f1(run.assignment, y) for run in module.runs(x, 12, restarts=4)]
    best = min(range(4), key=lambda i: [run.inertia for run in module.runs(x, 12, restarts=4)][i])
    assert (found.nmi, found.ami, found.f1) == pytest.approx(every[best])
    assert found.spread["f1"].low == pytest.approx(min(f1 for _, _, f1 in every))
    assert found.spread["f1"].high == pytest.approx(max(f1 for _, _, f1 in every))


@pytest.mark.parametrize("k", [0, 21, -1])
def test_a_bad_k_is_an_error(k):
    with pytest.raises(ValueError, match=r"1\.\.20"):
        k_means(torch.randn(20, 2), k)


def test_bad_input_is_an_error():
    with pytest.raises(ValueError, match="rows 2"):
        k_means(torch.tensor([[0.0], [1.0], [torch.nan]]), 2)
    with pytest.raises(ValueError, match="restarts"):
        k_means(torch.randn(5, 2), 2, restarts=0)
