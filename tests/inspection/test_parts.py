"""Each score of an inspection against loops, another library, or planted cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import optimize, stats

from nearfar.evaluation import neighbors
from nearfar.inspection._classes import (
    DRAWS,
    _binomial_tail,
    _discoveries,
    _explained,
    _null,
    classes_like_two,
    pairs_like_one,
)
from nearfar.inspection._copies import MOST, _surprise, compare, find_copies
from nearfar.inspection._labels import _evidence, _fit, _wrong, doubt_labels
from nearfar.inspection._samples import SIDE
from nearfar.similarity import unit


def clouds(classes: int = 8, each: int = 30, width: int = 10, spread: float = 0.5, seed: int = 0):
    """Centered unit vectors around class means, and their labels."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(classes).repeat_interleave(each)
    x = torch.randn(classes, width, generator=generator)[y]
    x = unit(x + spread * torch.randn(len(y), width, generator=generator))
    return x, unit(x - x.mean(dim=0)), y


# ------------------------------------------------------------------------------------------- labels


def test_the_evidence_equals_loops_that_leave_each_row_out():
    x, z, y = clouds(4, 6)
    near = neighbors(x, k=5)
    sums = torch.zeros(4, z.shape[1]).index_add_(0, y, z)
    found = _evidence(torch.arange(len(y)), z, y, near.places, sums)
    for i in range(len(y)):
        for c in range(4):
            rows = [j for j in range(len(y)) if y[j] == c and j != i]
            mean = z[rows].mean(dim=0)
            assert found[0, i, c] == pytest.approx(float(z[i] @ mean / mean.norm()), abs=1e-5)
            assert found[1, i, c] == pytest.approx(math.log1p(sum(int(y[j]) == c for j in near.places[i])), abs=1e-6)


def test_the_mixture_is_the_optimum_that_scipy_finds():
    x, z, y = clouds(6, 20, spread=0.9)
    y[:12] = (y[:12] + torch.arange(12) % 5 + 1) % 6
    near, sums = neighbors(x, k=10), torch.zeros(6, z.shape[1]).index_add_(0, y, z)
    evidence = _evidence(torch.arange(len(y)), z, y, near.places, sums)
    weights, noise = _fit(evidence, y)
    e, own = evidence.numpy(), y.numpy()
    scale = 1 / e.std(axis=(1, 2), ddof=1)

    def loss(values):
        logits = np.einsum("e,etc->tc", np.exp(values[:2]) * scale, e)
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        p = (p / p.sum(axis=1, keepdims=True))[np.arange(len(own)), own]
        share = 1 / (1 + np.exp(-values[2]))
        prior = (values[0] ** 2 + values[1] ** 2 + (values[2] + 3) ** 2 / 4) / len(own)
        return prior - np.log((1 - share) * p + share * (1 - p) / 5).mean()

    best = optimize.minimize(loss, [0.0, 0.0, -3.0], method="Nelder-Mead", options={"xatol": 1e-7, "fatol": 1e-12})
    assert weights.numpy() == pytest.approx(np.exp(best.x[:2]) * scale, rel=1e-3)
    assert float(noise) == pytest.approx(1 / (1 + math.exp(-best.x[2])), rel=1e-3)


def test_the_score_is_bayes_rule():
    p, noise = torch.tensor([0.9, 0.01, 0.0], dtype=torch.float64), torch.tensor(0.1, dtype=torch.float64)
    for own, found in zip(p.tolist(), _wrong(p, noise, 5).tolist(), strict=True):
        bad = 0.1 * (1 - own) / 4
        assert found == pytest.approx(bad / (0.9 * own + bad))


@pytest.mark.parametrize("rate", [0.05, 0.2])
def test_planted_labels_are_found_and_no_others(rate):
    x, z, y = clouds(8, 40, spread=0.3)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randperm(len(y), generator=generator)[: round(rate * len(y))]
    given = y.clone()
    given[rows] = (y[rows] + torch.randint(1, 8, (len(rows),), generator=generator)) % 8
    found = doubt_labels(z, given, neighbors(x, k=20))
    assert set((found.score > 0.5).nonzero().flatten().tolist()) == set(rows.tolist())
    assert torch.equal(found.label[rows], y[rows])
    assert found.noise == pytest.approx(rate, abs=0.02)


def test_tiles_do_not_change_the_scores(monkeypatch):
    x, z, y = clouds(5, 30, spread=0.8)
    near = neighbors(x, k=10)
    whole = doubt_labels(z, y, near)
    fitted = _fit
    evidence = _evidence(torch.arange(len(y)), z, y, near.places, torch.zeros(5, 10).index_add_(0, y, z))
    monkeypatch.setattr("nearfar.inspection._labels.ENTRIES", 35)
    monkeypatch.setattr("nearfar.inspection._labels._fit", lambda part, labels: fitted(evidence, y))
    tiled = doubt_labels(z, y, near)
    assert torch.allclose(whole.score, tiled.score, atol=1e-5)
    assert torch.equal(whole.label, tiled.label)


def test_rows_alone_in_their_class_and_single_classes_are_not_doubted():
    x, z, y = clouds(3, 10)
    y[0] = 3
    assert float(doubt_labels(z, y, neighbors(x, k=5)).score[0]) == 0
    assert float(doubt_labels(z, torch.zeros_like(y), neighbors(x, k=5)).score.max()) == 0


# ------------------------------------------------------------------------------------------- copies


def drawing(seed: int, side: int = SIDE) -> torch.Tensor:
    """A smooth random picture."""
    rng = torch.Generator().manual_seed(seed)
    rough = torch.rand(1, 1, 7, 7, generator=rng)
    smooth = torch.nn.functional.interpolate(rough, size=(side, side), mode="bicubic", align_corners=True)
    return (255 * smooth.clamp(0, 1))[0, 0].round().byte()


def test_compare_names_how_a_copy_was_made():
    whole = drawing(0, 128)
    small = [torch.nn.functional.adaptive_avg_pool2d(x[None].float(), SIDE)[0].byte() for x in (
        whole, whole.flip(1), whole[16:112, 24:120], whole[16:112, 24:120].flip(1), drawing(1, 128)
    )]  # fmt: skip
    score, kind = compare(small[0].expand(5, -1, -1), torch.stack(small))
    assert kind[:4].tolist() == [0, 1, 2, 3]
    assert bool((score[:4] > 0.97).all())
    assert float(score[4]) < 0.9


def test_the_surprise_is_a_probability_on_evenly_spread_rows():
    """Of the nearest rows of evenly spread points, a share p has a chance below p."""
    x = torch.randn(4000, 4, generator=torch.Generator().manual_seed(0))
    x = unit(x)  # evenly on a sphere of three dimensions
    near = neighbors(x, k=20)
    rows = torch.stack([torch.arange(len(x)), near.places[:, 0]], dim=1)
    gap = (2 - 2 * near.scores[:, 0]).clamp_min(0).sqrt()
    chance = 10 ** -_surprise(near, rows, gap)
    for share in (0.5, 0.1, 0.01):
        assert float((chance < share).float().mean()) == pytest.approx(share, rel=0.35)
    assert float(_surprise(near, rows[:1], torch.zeros(1))[0]) == MOST


def test_planted_copies_of_vectors_are_found_and_no_others():
    x, *_ = clouds(20, 20, width=16, spread=1.0)
    planted = [(i, len(x) + place) for place, i in enumerate(range(0, 400, 40))]
    noise = torch.randn(10, 16, generator=torch.Generator().manual_seed(3))
    whole = unit(torch.cat([x, x[[i for i, _ in planted]] + 0.01 * noise]))
    found = find_copies(whole, neighbors(whole, k=20), None)
    assert sorted(map(tuple, found.rows[found.score > 4].tolist())) == planted
    assert len({tuple(pair) for pair in found.rows.tolist()}) == len(found.rows)
    assert bool((found.rows[:, 0] < found.rows[:, 1]).all())


def test_a_symmetric_picture_is_no_copy_of_itself():
    gray = torch.stack([torch.cat([half, half.flip(1)], dim=1) for half in (drawing(i)[:, ::2] for i in range(6))])
    x = unit(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)))
    found = find_copies(x, neighbors(x, k=5), gray)
    assert len(found.rows)
    assert bool((found.rows[:, 0] < found.rows[:, 1]).all())


# ------------------------------------------------------------------------------------------- classes


def test_the_explained_share_equals_trying_every_cut():
    values = torch.randn(5, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for row, found in zip(values.tolist(), _explained(values).tolist(), strict=True):
        ordered, whole = sorted(row), np.var(row) * 9
        best = max(1 - (np.var(ordered[:i]) * i + np.var(ordered[i:]) * (9 - i)) / whole for i in range(1, 9))
        assert found == pytest.approx(best)


def test_tail_and_discoveries_equal_scipy():
    for hits, trials, share in ((3, 10, 0.2), (10, 10, 0.5), (1, 4, 0.9)):
        assert _binomial_tail(hits, trials, share) == pytest.approx(stats.binom.sf(hits - 1, trials, share))
    assert _binomial_tail(0, 10, 0.5) == 1
    p = np.random.default_rng(0).random(50) ** 3
    assert _discoveries(p.tolist(), 0.2) == (stats.false_discovery_control(p) <= 0.2).tolist()
    assert _discoveries([], 0.05) == []


def test_one_hill_is_rarely_two_classes():
    """Over 40 classes of one Gaussian each, no class is listed; the null is that of wider, evenly spread values."""
    _, z, y = clouds(40, 60, width=8, spread=0.8)
    assert classes_like_two(z, y, cut=0.0) == []
    assert float(_null(30, 0).median()) == pytest.approx(0.75, abs=0.03)
    assert len(_null(30, 0)) == DRAWS


def test_merged_and_halved_classes_are_found_and_no_others():
    x, z, y = clouds(20, 60, width=16, spread=0.5)
    merged = y.clone()
    merged[y == 19] = 0
    found = classes_like_two(z, merged)
    assert [label for label, _, _ in found] == [0]
    sides = found[0][2]
    assert len({(int(side), int(was)) for side, was in zip(sides, y[merged == 0], strict=True)}) == 2
    halved = y.clone()
    halved[(y == 7).nonzero().flatten()[::2]] = 20
    pairs = pairs_like_one(z, halved, neighbors(x, k=20))
    assert [pair[:2] for pair in pairs] == [(7, 20)]
    assert pairs[0][2] == pytest.approx(1, abs=0.35)
