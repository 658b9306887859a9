"""`MinedNegatives`: groups of an anchor, its class and its negatives; every sample an anchor once; states."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from samplers import labels_of, saved

from nearfar.batches import MinedNegatives


def table(y, k=6, seed=0):
    """Negatives of each sample, drawn; half of the lists end early, one is empty."""
    random = np.random.default_rng(seed)
    found = np.full((len(y), k), -1)
    for row in range(1, len(y)):
        others = random.permutation(np.flatnonzero(y != y[row]))[: k if row % 2 else 3]
        found[row, : len(others)] = others
    return torch.from_numpy(found)


@pytest.mark.parametrize("mined", [False, True])
def test_groups(mined):
    """Anchors are all samples with another of their class, once; negatives are listed; no row is twice in a batch."""
    y = labels_of([5] * 12 + [1, 2])
    sampler = MinedNegatives(y, batch_size=23, samples=3, negatives=2, seed=3)
    if mined:
        sampler.update(table(y))
    assert (sampler.batch_size, len(sampler)) == (20, 16)
    anchors, hits, places = [], 0, 0
    for batch in sampler:
        assert len(set(batch)) == 20
        for group in np.array(batch).reshape(4, 5):
            anchors.append(int(group[0]))
            own = int((y[group] == y[group[0]]).sum())
            assert own <= 3
            assert (y[group[:own]] == y[group[0]]).all()
            listed = set(table(y)[group[0]].tolist())
            hits += len(listed & set(group[own:].tolist()))
            places += min(len(listed - {-1}), 5 - own)
    several = [row for row in range(len(y)) if (y == y[row]).sum() > 1]
    assert sorted(anchors[: len(several)]) == several
    # rows that other groups of the batch hold already are left out
    assert hits > 0.7 * places if mined else hits < 0.3 * places


def test_batches_are_a_function_of_seed_step_and_table():
    y = labels_of([4] * 10)
    full = MinedNegatives(y, batch_size=12, seed=1)
    first = [*full, *full]
    again = MinedNegatives(y, batch_size=12, seed=1)
    assert [*again, *again] == first
    halves = [MinedNegatives(y, batch_size=12, seed=1, rank=rank, world=2) for rank in (0, 1)]
    for batch, left, right in zip(first, *halves, strict=False):
        assert left + right == batch
    assert next(iter(MinedNegatives(y, batch_size=12, seed=2))) != first[0]


def test_a_state_goes_on():
    y = labels_of([4] * 10)
    sampler = MinedNegatives(y, batch_size=12, seed=1)
    batches = iter(sampler)
    for _ in range(4):
        next(batches)
    sampler.update(table(y))
    state = saved(sampler.state_dict(step=4))
    rest = [next(batches) for _ in range(4)]
    again = MinedNegatives(y, batch_size=12, seed=1)
    again.load_state_dict(state)
    assert [batch for batch, _ in zip(again, rest, strict=False)] == rest
    with pytest.raises(ValueError, match="use a DataLoader with num_workers=0"):
        sampler.state_dict(step=5)
    with pytest.raises(ValueError, match="other labels or settings"):
        MinedNegatives(y, batch_size=12, negatives=3, seed=1).load_state_dict(state)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 3}, "batch_size must be from 4, a group of samples"),
        ({"batch_size": 41}, "to the 40 samples, but came as 41"),
        ({"samples": 1}, "batch_size must be from 4"),
        ({"negatives": 0}, "negatives must be a whole number"),
        ({"every": 0}, "every must be a whole number"),
        ({"labels": [1, 1]}, "labels must hold at least two classes"),
    ],
)
def test_wrong_settings(changes, message):
    with pytest.raises(ValueError, match=f"^MinedNegatives: .*{message}"):
        MinedNegatives(**{"labels": labels_of([4] * 10), "batch_size": 12, **changes})


@pytest.mark.parametrize(
    "wrong", [torch.zeros(39, 2).long(), torch.full((40, 2), 40), torch.zeros(40), torch.zeros(40, 2)]
)
def test_wrong_tables(wrong):
    with pytest.raises(ValueError, match=r"^MinedNegatives: update takes row numbers \[40, k\] below 40, but got"):
        MinedNegatives(labels_of([4] * 10), batch_size=12).update(wrong)


def test_two_small_classes_fill_a_batch():
    sampler = MinedNegatives([0, 0, 0, 0, 0, 1], batch_size=6, samples=2, negatives=1)
    assert all(sorted(batch) == list(range(6)) for batch in sampler)


def test_a_single_pair_among_samples_that_are_alone():
    sampler = MinedNegatives([0, 0, 1, 2, 3, 4], batch_size=6, samples=2, negatives=1)
    assert (sampler.batch_size, len(sampler)) == (6, 1)
    assert all(len(set(batch)) == 6 for batch in sampler)
    alone = MinedNegatives(range(8), batch_size=6, samples=2, negatives=1)
    assert {batch[0] for batch in alone} <= set(range(8))
