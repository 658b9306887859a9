"""`Representatives`: projections replayed, cycles complete, states exact, hard classes as by brute force."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samplers import labels_of, saved

from nearfar.batches import HardClasses, Proximal, Representatives

SIZES = [4, 2, 5, 3, 1, 3]


def stars_of(batch, y, sampler):
    """Class -> representative of a batch of one rank."""
    first = np.array(batch)[sampler.mask.numpy()]
    assert len(set(y[first])) == len(first) == sampler.classes
    return {int(y[row]): int(row) for row in first}


@pytest.mark.parametrize(
    ("classes", "steps"), [(11318, 1062), (98, 10), (100, 10), (3997, 375)], ids=["SOP", "Cars", "CUB", "In-Shop"]
)
def test_steps_of_a_projection(classes, steps):
    """M = ceil(6 · 2 · L / 128); a share p above one is clipped, so that M is never below rho."""
    y = np.repeat(np.arange(classes), 2)
    sampler = Representatives(y, batch_size=128, samples=2, rho=6)
    assert sampler.steps_per_projection == len(sampler) == steps
    few = Representatives(np.repeat(np.arange(10), 4), batch_size=128)
    assert len(few) == 6
    assert few.batch_size == 20


@pytest.mark.parametrize("order", ["representatives", "classes"])
@pytest.mark.parametrize("samples", [2, 3])
def test_three_projections_replayed(samples, order):
    """The same representatives for exactly M steps, others beside them, anchor weights replaced at each projection."""
    y = labels_of(SIZES)
    sampler = Representatives(y, batch_size=3 * samples, samples=samples, rho=2, seed=5, order=order)
    theta = torch.nn.Parameter(torch.zeros(2))
    proximal = Proximal([theta], weight=0.5)
    steps, step, seen = sampler.steps_per_projection, 0, []
    for projection in range(3):
        assert sampler.is_new_projection()
        assert sampler.projection == projection
        proximal.anchor()
        here: dict[int, int] = {}
        count = 0
        for batch in sampler:
            assert sampler.projection_of(step) == projection
            assert sampler.is_new_projection(step) == (count == 0)
            stars = stars_of(batch, y, sampler)
            assert all(here.setdefault(name, row) == row for name, row in stars.items())
            check_others(batch, y, sampler, stars)
            theta.grad = torch.zeros(2)
            proximal.add_gradient()
            assert torch.equal(theta.grad, torch.full((2,), 0.5 * count))  # λ(θ - θₖ), θ one step further each time
            with torch.no_grad():
                theta += 1
            step, count = step + 1, count + 1
        assert count == steps
        assert set(here) == set(y.tolist())  # rho ≥ 1: every class came
        assert sorted(here.values()) == sorted(sampler.representatives_of(projection).tolist())
        seen.append(here)
    assert seen[0] != seen[1] != seen[2]


def check_others(batch, y, sampler, stars):
    others = np.array(batch)[~sampler.mask.numpy()]
    for name, star in stars.items():
        mine = others[y[others] == name]
        size = int((y == name).sum())
        assert len(mine) == sampler.samples - 1
        if size == 1:
            assert set(mine.tolist()) == {star}
        else:
            assert star not in mine
            assert len(set(mine.tolist())) == min(size - 1, sampler.samples - 1)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 7), min_size=2, max_size=8), st.integers(0, 99))
def test_every_sample_serves_once_a_cycle(sizes, seed):
    y = labels_of(sizes, seed)
    sampler = Representatives(y, batch_size=4, seed=seed)
    names = np.unique(y)
    served = np.stack([sampler.representatives_of(k).numpy() for k in range(3 * max(sizes))])
    for column, name in enumerate(names):
        members = np.flatnonzero(y == name).tolist()
        for begin in range(0, len(served) - len(members) + 1, len(members)):
            assert sorted(served[begin : begin + len(members), column].tolist()) == members


def test_cycles_are_shuffled_anew():
    sampler = Representatives(np.repeat(np.arange(2), 12), batch_size=4, seed=1)
    served = [sampler.representatives_of(k).tolist() for k in range(24)]
    assert served[:12] != served[12:]


def test_the_representatives_drawn_are_those_told():
    y = labels_of(SIZES)
    sampler = Representatives(y, batch_size=6, rho=1, seed=2)
    for projection in range(13):
        told = sampler.representatives_of(projection).tolist()
        for batch in sampler:
            assert set(stars_of(batch, y, sampler).values()) <= set(told)


def test_one_step_is_the_batch_rule_of_n_pair():
    """M = 1: two samples of B/2 different classes, both fresh at every step."""
    y = labels_of([6] * 7)
    sampler = Representatives(y, batch_size=8, steps=1, seed=3)
    assert len(sampler) == 1
    previous: dict[int, int] = {}
    fresh = 0
    for _ in range(30):
        (batch,) = sampler
        rows = np.array(batch)
        assert len(set(batch)) == 8
        assert (y[rows[:4]] == y[rows[4:]]).all()
        assert len(set(y[rows[:4]])) == 4
        stars = stars_of(batch, y, sampler)
        common = stars.keys() & previous.keys()
        fresh += sum(stars[name] != previous[name] for name in common)
        previous = stars
    assert fresh > 30


@pytest.mark.parametrize("stop", [0, 1, 4, 5, 13, 14])
def test_resumed_in_the_middle_of_a_projection(stop):
    y = labels_of(SIZES)
    make = lambda **more: Representatives(y, batch_size=6, rho=2.5, seed=7, **more)  # noqa: E731
    whole = make()
    assert len(whole) == 5
    expected = [batch for _ in range(4) for batch in whole]
    sampler = make()
    stream = (batch for _ in range(4) for batch in sampler)
    used = [next(stream) for _ in range(stop)]
    state = saved(sampler.state_dict())
    ahead = [next(stream) for _ in range(2)]
    assert sampler.state_dict(step=stop) == state  # two batches ahead, the state of those used is still at hand
    resumed = make()
    resumed.load_state_dict(state)
    rest = [batch for _ in range(4) for batch in resumed]
    assert (used + rest)[:20] == expected
    assert rest[:2] == ahead
    pair = [make(rank=rank, world=2) for rank in range(2)]
    for part in pair:
        part.load_state_dict(state)
    assert [a + b for a, b in zip(*pair, strict=True)] == rest[: 5 - stop % 5]


@pytest.mark.parametrize("order", ["representatives", "classes"])
@pytest.mark.parametrize("world", [2, 4, 5])
def test_the_parts_of_the_ranks_are_the_batch(world, order):
    y = labels_of(SIZES)
    make = lambda **more: Representatives(y, batch_size=9, samples=3, rho=2, order=order, **more)  # noqa: E731
    whole, parts = make(), [make(rank=rank, world=world) for rank in range(world)]
    assert torch.equal(torch.cat([part.mask for part in parts]), whole.mask)
    for _ in range(3):
        for batch, *shares in zip(whole, *parts, strict=True):
            assert [row for share in shares for row in share] == batch


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 7}, "batch_size must be a multiple of samples = 2 with two classes or more, but came as 7"),
        ({"batch_size": 2}, "two classes or more, but came as 2"),
        ({"samples": 1}, "samples must be at least 2"),
        ({"rho": 0}, "rho must be a number above zero"),
        ({"steps": 0}, "steps must be a whole number above zero"),
        ({"steps": "converge"}, "did you mean 'converged'"),
        ({"order": "class"}, "did you mean 'classes'"),
        (
            {"hard_classes": HardClasses(3)},
            "hard_classes must be a table of the 6 classes of the labels, but came with 3",
        ),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        Representatives(labels_of(SIZES), **({"batch_size": 4} | arguments))


# ---------------------------------------------------------------- hard negative classes


def filled(classes=12, missing=(), **options):
    table = HardClasses(classes, **options)
    keep = torch.tensor([c for c in range(classes) if c not in missing])
    torch.manual_seed(classes)
    table.update(keep, torch.randn(len(keep), 5))
    return table


def brute_force(table, seed, count, without=()):
    """The nearest rows by a loop."""
    distance = {}
    for c in range(table.classes):
        if c != seed and c not in without and bool(table.valid[c]):
            distance[c] = sum((a - b) ** 2 for a, b in zip(*table.embeddings[[seed, c]].double().tolist(), strict=True))
    return sorted(distance, key=distance.get)[:count]


@pytest.mark.parametrize("seed", range(12))
def test_nearest_classes_are_those_of_brute_force(seed):
    table = filled(missing=(4, 7))
    expected = [] if seed in (4, 7) else brute_force(table, seed, 5)
    assert table.nearest(seed, 5).tolist() == expected
    taken = np.zeros(12, dtype=bool)
    taken[[1, 2, 3]] = True
    expected = [] if seed in (4, 7) else brute_force(table, seed, 5, (1, 2, 3))
    assert table.nearest(seed, 5, taken).tolist() == expected
    if seed not in (4, 7):
        assert table.nearest(seed, 50).tolist() == brute_force(table, seed, 50)


def test_nearest_classes_of_a_large_table():
    """Rows of unequal length, some of them close together: a short list must not lose any."""
    torch.manual_seed(3)
    rows = torch.randn(500, 6) * torch.rand(500, 1) * 3
    rows[100:140] = rows[7] + 1e-4 * torch.randn(40, 6)
    table = HardClasses(500)
    table.update(torch.arange(500), rows)
    for seed in (0, 7, 120, 499):
        assert table.nearest(seed, 10).tolist() == brute_force(table, seed, 10)
    again = HardClasses(500)
    again.load_state_dict(table.state_dict())
    assert again.nearest(7, 60).tolist() == brute_force(table, 7, 60)


def test_a_state_is_a_copy():
    table = filled()
    state = table.state_dict()
    rows = state["embeddings"].clone()
    table.update(torch.tensor([3]), torch.full((1, 5), 7.0))
    assert torch.equal(state["embeddings"], rows)
    again = HardClasses(12)
    again.load_state_dict(state)
    again.update(torch.tensor([3]), torch.full((1, 5), 7.0))
    assert torch.equal(state["embeddings"], rows)
    with pytest.raises(ValueError, match="the state must be of 5 classes, but has 12"):
        HardClasses(5).load_state_dict(state)


def test_the_choice_is_a_seed_and_its_neighbors():
    table = filled()
    used = np.ones(12, dtype=np.int64)
    used[[3, 8]] = 0
    seeds = set()
    for draw in range(40):
        chosen = table.choose(np.random.default_rng(draw), used, 5).tolist()
        seeds.add(chosen[0])
        assert chosen[1:] == brute_force(table, chosen[0], 4)
    assert seeds == {3, 8}  # uniformly from the least used ones


def test_several_seeds_and_a_random_share():
    table = filled(seeds=2)
    chosen = table.choose(np.random.default_rng(0), np.zeros(12, dtype=np.int64), 6).tolist()
    assert chosen[1:3] == brute_force(table, chosen[0], 2)
    assert chosen[4:] == brute_force(table, chosen[3], 2, chosen[:3])
    table = filled(mix=0.5)
    tails = set()
    for draw in range(60):
        chosen = table.choose(np.random.default_rng(draw), np.zeros(12, dtype=np.int64), 6).tolist()
        assert len(set(chosen)) == 6
        assert chosen[1:3] == brute_force(table, chosen[0], 2)
        tails.update(chosen[3:])
    assert tails == set(range(12))


def test_empty_rows_are_filled_at_random():
    empty = HardClasses(6)
    assert sorted(empty.choose(np.random.default_rng(0), np.zeros(6, dtype=np.int64), 6).tolist()) == list(range(6))
    table = filled(missing=range(3, 12))
    used = np.ones(12, dtype=np.int64)
    used[0] = 0
    drawn = set()
    for draw in range(60):
        chosen = table.choose(np.random.default_rng(draw), used, 5).tolist()
        assert chosen[:3] == [0, *brute_force(table, 0, 2)]
        assert len(set(chosen)) == 5
        drawn.update(chosen[3:])
    assert drawn == set(range(3, 12))


def test_rows_are_renewed_kept_or_dropped():
    table = HardClasses(3)
    table.update(torch.tensor([0, 2, 0]), torch.tensor([[1.0], [2.0], [3.0]], requires_grad=True))
    assert table.embeddings.tolist() == [[3.0], [0.0], [2.0]]
    assert not table.embeddings.requires_grad
    assert table.valid.tolist() == [True, False, True]
    table.new_projection()
    assert table.valid.tolist() == [True, False, True]
    dropping = HardClasses(3, stale="drop")
    dropping.update(torch.tensor([1]), torch.ones(1, 1))
    dropping.new_projection()
    assert not dropping.valid.any()
    with pytest.raises(ValueError, match="embeddings must stay 1 wide, but came 2 wide"):
        table.update(torch.tensor([0]), torch.ones(1, 2))
    with pytest.raises(ValueError, match="each row needs a class, but 2 came for 1"):
        table.update(torch.tensor([0, 1]), torch.ones(1, 1))


def network(rows, step):
    """Embeddings that move with training."""
    return torch.stack([torch.sin(rows * 1.7 + 0.1 * step), torch.cos(rows * 0.9), torch.sin(rows * 0.3)], dim=1)


def trained(sampler, y, rounds, step=0):
    """Batches of some projections, the table refreshed after each."""
    found = []
    for _ in range(rounds):
        for batch in sampler:
            rows = torch.tensor(batch)[sampler.mask]
            sampler.update(torch.tensor(y)[rows], network(rows, step))
            found.append(batch)
            step += 1
    return found


@pytest.mark.parametrize("stop", [1, 4, 7])
def test_hard_classes_resume_with_their_table(stop):
    y = labels_of([3] * 12)
    make = lambda: Representatives(y, batch_size=8, rho=1.5, seed=1, hard_classes=HardClasses(12, mix=0.25))  # noqa: E731
    expected = trained(make(), y, 3)
    assert len(make()) == 5
    sampler = make()
    stream, used = (batch for _ in range(3) for batch in sampler), []
    for step in range(stop):
        used.append(next(stream))
        rows = torch.tensor(used[-1])[sampler.mask]
        sampler.update(torch.tensor(y)[rows], network(rows, step))
    state = saved(sampler.state_dict(step=stop))
    next(stream)
    sampler.update(torch.tensor(y[:1]), torch.full((1, 3), 9.0))  # what happens later does not reach the state
    resumed = make()
    resumed.load_state_dict(state)
    assert (used + trained(resumed, y, 3, stop))[:15] == expected
    with pytest.raises(ValueError, match=f"all {stop + 1} yielded batches have been used"):
        sampler.state_dict(step=stop)


def test_hard_classes_are_near_in_a_batch():
    """Once the table is full, a batch holds the neighbors of its first class."""
    y = labels_of([3] * 12)
    sampler = Representatives(y, batch_size=8, rho=3, hard_classes=True)
    trained(sampler, y, 2)
    table = sampler.hard_classes
    assert table.valid.all()
    names = np.unique(y)
    batch = next(iter(sampler))
    chosen = np.searchsorted(names, y[np.array(batch)[:4]]).tolist()
    assert chosen[1:] == brute_force(table, chosen[0], 3)


def test_update_wants_known_labels_and_is_idle_without_a_table():
    y = labels_of([3] * 4)
    hard = Representatives(y, batch_size=4, hard_classes=True)
    with pytest.raises(ValueError, match="update got label 99, which no sample has"):
        hard.update(torch.tensor([99]), torch.ones(1, 2))
    Representatives(y, batch_size=4).update(torch.tensor([99]), torch.ones(1, 2))


# ---------------------------------------------------------------- projections until the violation stops falling


def reported(sampler, values, rounds):
    """Batches of some parts of M steps, each step's violation reported after it; the first steps of projections."""
    found, starts = [], []
    for _ in range(rounds):
        for batch in sampler:
            step = sampler.step - 1
            if sampler.is_new_projection(step):
                starts.append(step)
            found.append(batch)
            sampler.report(values[step])
    return found, starts


def switches(values, length):
    """The rule, from all values at once: a part of M that is not below the one before it ends its projection."""
    means = [sum(values[i : i + length]) / length for i in range(0, len(values), length)]
    starts, begun = [0], 0
    for k in range(len(means) - 1):
        if k > begun and means[k] >= means[k - 1]:
            begun = k + 1
            starts.append(begun * length)
    return starts


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.4, 2.0]))
def test_a_projection_ends_when_the_violation_stops_falling(seed, rho):
    y = labels_of(SIZES)
    sampler = Representatives(y, batch_size=4, rho=rho, steps="converged", seed=seed)
    assert len(sampler) == len(Representatives(y, batch_size=4, rho=rho))
    values = np.random.default_rng(seed).random(12 * len(sampler)).tolist()
    batches, starts = reported(sampler, values, 12)
    assert starts == switches(values, len(sampler))
    representatives = set(sampler.representatives_of(0).tolist())
    for step, batch in enumerate(batches):
        projection = sampler.projection_of(step)
        assert projection == sum(start <= step for start in starts) - 1
        representatives = set(sampler.representatives_of(projection).tolist())
        assert set(stars_of(batch, y, sampler).values()) <= representatives


def test_a_falling_violation_keeps_the_representatives():
    y = labels_of([4] * 6)
    sampler = Representatives(y, batch_size=6, rho=1, steps="converged", seed=3)
    batches, starts = reported(sampler, [1 / (1 + t) for t in range(20)], 10)
    assert starts == [0]
    assert sampler.projection == 0
    stars = [tuple(sorted(stars_of(batch, y, sampler).items())) for batch in batches]
    assert len(set(stars)) > 2  # other classes at each step, also in later parts
    level = Representatives(y, batch_size=6, rho=1, steps="converged", seed=3)
    assert reported(level, [1.0] * 20, 10)[1] == [0, 4, 8, 12, 16]


@pytest.mark.parametrize("stop", [1, 5, 10, 13, 24])
@pytest.mark.parametrize("hard", [False, True])
def test_switch_points_are_part_of_the_state(stop, hard):
    y = labels_of(SIZES)
    values = np.random.default_rng(1).random(40).tolist()
    make = lambda **more: Representatives(  # noqa: E731
        y, batch_size=6, rho=2.5, steps="converged", hard_classes=hard, seed=7, **more
    )
    expected, starts = reported(make(), values, 8)
    sampler, used = make(), []
    stream = (batch for _ in range(8) for batch in sampler)
    for step in range(stop):
        used.append(next(stream))
        sampler.report(values[step])
    state = saved(sampler.state_dict())
    resumed = make()
    resumed.load_state_dict(state)
    rest, later = reported(resumed, values, (40 - stop + 4) // 5)
    assert used + rest == expected
    assert resumed.projection_of(stop - 1) == sum(start < stop for start in starts) - 1
    assert later == [start for start in starts if start >= stop]
    pair = [make(rank=rank, world=2) for rank in range(2)]
    for part in pair:
        part.load_state_dict(state)
    halves = [reported(part, values, 1)[0] for part in pair]
    assert [a + b for a, b in zip(*halves, strict=True)] == rest[: len(halves[0])]


def test_a_state_is_saved_once_all_batches_are_reported():
    sampler = Representatives(labels_of(SIZES), batch_size=6, steps="converged")
    stream = iter(sampler)
    next(stream)
    with pytest.raises(
        ValueError, match=r"needs report\(violation\) after each batch and before the next, but batch 1"
    ):
        next(stream)
    with pytest.raises(ValueError, match="can be saved only when all 1 yielded batches"):
        sampler.state_dict(step=0)
    sampler.report(0.5)
    with pytest.raises(ValueError, match="report must be called once after each batch, but 1 of 1"):
        sampler.report(0.5)
    fixed = Representatives(labels_of(SIZES), batch_size=6)
    fixed.report(0.5)  # nothing to decide
    with pytest.raises(ValueError, match="other labels or settings"):
        fixed.load_state_dict(sampler.state_dict())
