"""`MPerClass`: epochs are complete, classes even, states exact, and ranks draw disjoint parts."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from samplers import labels_of, saved
from torch.utils.data import DataLoader, TensorDataset

from nearfar.batches import MPerClass
from nearfar.batches import _m_per_class as m_per_class
from nearfar.batches._sampler import class_rounds


@st.composite
def cases(draw):
    sizes = draw(st.lists(st.integers(1, 9), min_size=2, max_size=9))
    return sizes, draw(st.integers(2, len(sizes))), draw(st.integers(1, 4)), draw(st.integers(0, 99))


@pytest.fixture(params=["at once", "in rounds"])
def planned(request, monkeypatch):
    """Epochs planned at once, and round by round as long ones are."""
    if request.param == "in rounds":
        monkeypatch.setattr(m_per_class, "MOST", 0)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_an_epoch_visits_everything_and_classes_evenly(planned, case):
    sizes, classes, samples, seed = case
    y = labels_of(sizes, seed)
    sampler = MPerClass(y, classes=classes, samples=samples, seed=seed)
    for _ in range(2):
        batches = list(sampler)
        assert len(batches) == len(sampler)
        assert {row for batch in batches for row in batch} == set(range(len(y)))
        turns = Counter()
        for batch in batches:
            groups = np.array(batch).reshape(classes, samples)
            names = y[groups]
            assert (names == names[:, :1]).all()
            assert len(set(names[:, 0])) == classes
            turns.update(names[:, 0].tolist())
            for name, group in zip(names[:, 0], groups, strict=True):
                assert len(set(group.tolist())) == min(samples, (y == name).sum())
        rounds = max(-(-size // samples) for size in sizes)
        # every class R times; the last batch is filled with one turn more of some
        assert set(turns.values()) <= {rounds, rounds + 1}
        assert len(turns) == len(sizes)
        assert sum(turns.values()) - rounds * len(sizes) < classes


def test_small_classes_repeat_in_turn():
    y = np.array([0] * 2 + [1] * 7)
    for batch in MPerClass(y, classes=2, samples=5):
        counts = Counter(row for row in batch if y[row] == 0)
        assert sorted(counts.values()) == [2, 3]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 20), st.integers(0, 9))
def test_rounds_of_classes(classes, width, count, seed):
    width = min(width, classes)
    rows = class_rounds(np.random.default_rng(seed), classes, width, count)
    assert rows.shape == (count, width)
    assert all(len(set(row.tolist())) == width for row in rows)
    flat = rows.reshape(-1)
    for begin in range(0, len(flat), classes):
        part = flat[begin : begin + classes]
        assert len(set(part.tolist())) == len(part)


@pytest.mark.parametrize("sizes", [(1, 1, 40), (2, 3, 5, 90), (7, 7, 7, 7), (1, 2, 4, 8, 16, 32, 64)])
def test_an_epoch_draws_what_the_plain_loop_draws(sizes):
    """One pass over the classes after the other: a saved state means the same batches in every release."""
    y = np.random.default_rng(1).permutation(np.repeat(np.arange(len(sizes)), sizes))
    sampler = MPerClass(y, classes=2, samples=3, seed=5)
    random, wide, length = np.random.default_rng([5, 0]), 3, len(sampler)
    groups = [-(-size // wide) for size in sizes]
    members = [np.flatnonzero(y == label) for label in range(len(sizes))]
    drawn = class_rounds(random, len(sizes), 2, length).reshape(-1)
    turns = [place // len(sizes) for place in range(len(drawn))]
    passes = [turn // groups[label] for turn, label in zip(turns, drawn, strict=True)]
    wanted: dict[int, list[int]] = {}
    for number in range(max(passes) + 1):
        again = [label for label in range(len(sizes)) if max(groups) // groups[label] >= number]
        keys = random.random(sum(sizes[label] for label in again))
        order, at = {}, 0
        for label in again:
            order[label] = members[label][np.argsort(keys[at : at + sizes[label]], kind="stable")]
            at += sizes[label]
        for place in [place for place, each in enumerate(passes) if each == number]:
            label = int(drawn[place])
            first = turns[place] % groups[label] * wide
            wanted[place] = [int(order[label][(first + i) % sizes[label]]) for i in range(wide)]
    assert [row for batch in sampler for row in batch] == [row for place in sorted(wanted) for row in wanted[place]]


def test_epochs_differ_and_the_seed_decides():
    y = labels_of([4, 5, 6, 3])
    make = lambda seed: MPerClass(y, classes=2, samples=2, seed=seed)  # noqa: E731
    sampler = make(1)
    first, second = list(sampler), list(sampler)
    assert first != second
    assert sampler.epoch == 2
    again = make(1)
    assert (list(again), list(again)) == (first, second)
    assert list(make(2)) != first


@pytest.mark.parametrize("world", [2, 3, 5])
def test_the_parts_of_the_ranks_are_the_batch(world):
    y = labels_of([4, 5, 6, 3])
    whole = MPerClass(y, classes=3, samples=2, seed=4)
    parts = [MPerClass(y, classes=3, samples=2, seed=4, rank=rank, world=world) for rank in range(world)]
    for _ in range(2):
        for batch, *shares in zip(whole, *parts, strict=True):
            assert [row for share in shares for row in share] == batch
            sizes = [len(share) for share in shares]
            assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("stop", [0, 1, 3, 7, 8, 11])
def test_a_state_in_the_middle_of_an_epoch(stop):
    y = labels_of([4, 5, 6, 3])
    reference = MPerClass(y, classes=2, samples=2, seed=3)
    expected = [batch for _ in range(4) for batch in reference]
    sampler = MPerClass(y, classes=2, samples=2, seed=3)
    stream = (batch for _ in range(4) for batch in sampler)
    used = [next(stream) for _ in range(stop)]
    state = saved(sampler.state_dict())
    resumed = MPerClass(y, classes=2, samples=2, seed=3)
    resumed.load_state_dict(state)
    assert used + [batch for _ in range(4) for batch in resumed][: len(expected) - stop] == expected
    # with two ranks what one has saved goes on all the same
    pair = [MPerClass(y, classes=2, samples=2, seed=3, rank=rank, world=2) for rank in range(2)]
    for part in pair:
        part.load_state_dict(state)
    assert [a + b for a, b in zip(*pair, strict=True)] == expected[stop : (stop // len(reference) + 1) * len(reference)]


def test_a_loader_that_runs_ahead():
    """Workers fetch before batches are used: the state told by the number used is the right one."""
    y = labels_of([4, 5, 6, 3])
    data = TensorDataset(torch.arange(len(y)))
    expected = list(MPerClass(y, classes=2, samples=2))
    sampler = MPerClass(y, classes=2, samples=2)
    loader = iter(DataLoader(data, batch_sampler=sampler, num_workers=1, prefetch_factor=2))
    used = [next(loader)[0].tolist() for _ in range(2)]
    assert sampler.step > 2
    resumed = MPerClass(y, classes=2, samples=2)
    resumed.load_state_dict(sampler.state_dict(step=2))
    rest = [rows[0].tolist() for rows in DataLoader(data, batch_sampler=resumed)]
    assert used + rest == expected
    del loader


def test_states_that_do_not_fit():
    y = labels_of([4, 5, 6, 3])
    state = MPerClass(y, classes=2, samples=2).state_dict()
    for other in (
        MPerClass(y, classes=2, samples=3),
        MPerClass(y, classes=2, samples=2, seed=1),
        MPerClass(y[::-1].copy(), classes=2, samples=2),
    ):
        with pytest.raises(ValueError, match="the state belongs to other labels or settings"):
            other.load_state_dict(state)
    with pytest.raises(ValueError, match="the state must be one of MPerClass, but came from 'Representatives'"):
        other.load_state_dict({"sampler": "Representatives"})
    with pytest.raises(ValueError, match="step must be a whole number from 0 to 0, but came as 3"):
        MPerClass(y, classes=2, samples=2).state_dict(step=3)


@pytest.mark.parametrize("labels", [torch.tensor([5, 5, 9, 9]), [5, 5, 9, 9], np.array([5, 5, 9, 9], dtype=np.int16)])
def test_labels_of_any_kind(labels):
    assert sorted(next(iter(MPerClass(labels, classes=2, samples=2)))) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("labels", "arguments", "message"),
    [
        ([], {}, "at least two classes, but 0 labels of 0 came"),
        ([4, 4, 4], {}, "at least two classes, but 3 labels of 1 came"),
        ([0.5, 1.5], {}, "one whole number a sample, but came as float64"),
        ([[0, 1], [1, 0]], {}, r"one whole number a sample, but came as int64 \[2, 2\]"),
        ([0, 1], {"classes": 3}, "classes must be from 2 to the 2 classes of the labels, but came as 3"),
        ([0, 1], {"classes": 1}, "classes must be from 2"),
        ([0, 1], {"samples": 0}, "samples must be a whole number above zero"),
        ([0, 1], {"rank": 2, "world": 2}, "rank must be a whole number from 0 to 1, but came as 2"),
        ([0, 1], {"seed": -1}, "seed must be a whole number from 0"),
        ([0, 1], {"samples": 1, "world": 3}, "a row for each rank, but 2 rows came for world=3"),
    ],
)
def test_bad_arguments(labels, arguments, message):
    with pytest.raises(ValueError, match=message):
        MPerClass(labels, **({"classes": 2, "samples": 2} | arguments))


@settings(max_examples=40, deadline=None)
@given(cases(), st.lists(st.integers(0, 40), min_size=1, max_size=8))
def test_rounds_give_any_batch_at_any_time(case, steps):
    """Forward, backward, into another epoch: as when they come one after the other."""
    sizes, classes, samples, seed = case
    y = labels_of(sizes, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(m_per_class, "MOST", 0)
        one, other = (MPerClass(y, classes=classes, samples=samples, seed=seed) for _ in range(2))
        batches = [one._global(step).tolist() for step in range(41)]
        for step in steps:
            assert other._global(step).tolist() == batches[step]


def test_a_long_tail_of_a_million_takes_no_gigabytes():
    sizes = np.full(50_000, 18)
    sizes[:10] = 10_000
    sampler = MPerClass(np.repeat(np.arange(50_000), sizes), classes=32, samples=4)
    assert len(sampler) * sampler.batch_size > 2**28
    sampler.step = 3_000  # into the second round
    tracemalloc.start()
    batches = [batch for _, batch in zip(range(50), sampler, strict=False)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * 2**20
    assert {len(set(batch)) for batch in batches} == {128}


def test_rounds_shuffle_samples_evenly():
    """Every sample of a class comes first equally often over epochs, to four standard errors."""
    y, firsts = np.repeat([0, 1], [6, 4]), Counter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(m_per_class, "MOST", 0)
        sampler = MPerClass(y, classes=2, samples=2)
        for _ in range(1200):
            batch = next(iter(sampler))
            firsts[next(row for row in batch if y[row] == 0)] += 1
            sampler.step = (sampler.step // len(sampler) + 1) * len(sampler)
    assert len(firsts) == 6
    assert all(abs(count - 200) < 4 * (1200 * 5 / 36) ** 0.5 for count in firsts.values())
