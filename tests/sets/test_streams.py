"""Streams of every set: chunks in any order equal the whole, merged processes equal one, and the `Fold` agrees."""

from __future__ import annotations

import math
from threading import Barrier, Thread

import numpy as np
import pytest
import torch

import nearfar as nf
from nearfar._utils.process_group import ProcessGroup
from tests.sets.test_sets import CASES, groups, padded

S = nf.sets
STREAMED = [name for name, case in CASES.items() if case.make().stream(1, torch.zeros(1)) is not None]
KINDS = ("random", "random+weighted", "tied", "tied+whole", "zero", "none-active", "far")
TYPES = {torch.float32: 2e-5, torch.float64: 1e-9}


def solve(stream, chunks):
    """Sweep over the chunks until the stream has converged; returns its value, and the weights of the chunks."""
    again = True
    while again:
        for l, w in chunks:
            stream.add(l, w)
        again = stream.turn()
    value = sum(stream.held(l, w) for l, w in chunks) if stream.constant else stream.value()
    return value, [stream.weights(l, w) for l, w in chunks]


def members(name, kind, dtype):
    losses, weights = groups(kind)
    l, measure, _ = padded([np.maximum(x, CASES[name].floor) for x in losses], weights, kind)
    return l.to(dtype), measure if measure.dtype == torch.bool else measure.to(dtype)


def test_all_sets_but_those_without_a_stream_are_tried():
    assert set(STREAMED) == set(CASES)


@pytest.mark.parametrize("name", STREAMED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("zero", ["keep", "drop"])
@pytest.mark.parametrize("zero_member", [False, True], ids=["", "zero_member"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_chunks_in_any_order_equal_the_whole(name, kind, zero, zero_member, dtype):
    over = CASES[name].make(zero=zero, zero_member=zero_member)
    l, w = members(name, kind, dtype)
    room = TYPES[dtype] * max(1.0, float(l.abs().max()))
    for seed, cuts in ((0, [11]), (1, [1, 4, 6]), (2, [5, 5, 1]), (3, [1] * 11)):
        order = torch.randperm(l.shape[1], generator=torch.Generator().manual_seed(seed))
        chunks = list(zip(l[:, order].split(cuts, dim=1), w[:, order].split(cuts, dim=1), strict=True))
        value, weights = solve(over.stream(len(l), l), chunks)
        torch.testing.assert_close(value, over.value(l, w), atol=room, rtol=0)
        torch.testing.assert_close(torch.cat(weights, dim=1), over.weights(l, w)[:, order], atol=room, rtol=0)


class Threads(ProcessGroup):
    """Processes as threads: each exchange waits until all have brought their tensor."""

    def __init__(self, rank, barrier, table):
        self.rank, self.world, self.barrier, self.table = rank, barrier.parties, barrier, table

    def gather(self, x):
        self.table[self.rank] = x
        self.barrier.wait()
        found = torch.stack(self.table)
        self.barrier.wait()
        return found

    def sum(self, x):
        return self.gather(x).sum(dim=0)


@pytest.mark.parametrize("name", STREAMED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("zero_member", [False, True], ids=["", "zero_member"])
def test_processes_that_merge_equal_one(name, kind, zero_member):
    """The second of three has members of no group; groups of one member have it on one process only."""
    over = CASES[name].make(zero_member=zero_member)
    l, w = members(name, kind, torch.float64)
    owner = torch.tensor([0, 2, 2, 0, 1, 0, 2, 0, 2, 2, 0])
    barrier, table, found = Barrier(3, timeout=30), [None] * 3, [None] * 3

    def work(rank):
        stream = over.stream(len(l), l)
        stream.ranks = Threads(rank, barrier, table)
        here = owner == rank
        mine = w[:, here] if rank != 1 else torch.zeros_like(w[:, here])
        value, weights = solve(stream, [(l[:, here], mine)])
        found[rank] = stream.ranks.sum(value) if stream.constant else value, weights[0], stream.taken()

    threads = [Thread(target=work, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    w = torch.where(owner == 1, torch.zeros_like(w), w)
    room = 1e-9 * max(1.0, float(l.abs().max()))
    for rank, (value, weights, taken) in enumerate(found):
        torch.testing.assert_close(value, over.value(l, w), atol=room, rtol=0)
        torch.testing.assert_close(weights, over.weights(l, w)[:, owner == rank], atol=room, rtol=0)
        torch.testing.assert_close(taken, over.taken(l, w), atol=1e-12, rtol=0)


@pytest.mark.parametrize("orders", [1, 2])
@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize(
    "over", [S.TopK(3), S.TopK(2.5), S.TopK(fraction=0.3), S.Trimmed(2, 3.5), S.Trimmed(top_fraction=0.2, k=2),
             S.Trimmed(top_fraction=0.1, fraction=0.2)],
    ids=repr,
)  # fmt: skip
def test_the_members_that_a_fold_of_the_largest_names_have_the_value_of_all(over, read, orders, monkeypatch):
    """Also on a device whose numbers are not read."""
    l = torch.rand(4, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wanted = over.value(l, orders=orders)
    if not read:
        monkeypatch.setattr("nearfar.sets.top_k.readable", lambda x: False)
    fold, size = over.fold(), torch.full((4,), 30.0, dtype=torch.float64)
    few = l.topk(math.ceil(orders * fold.most + 30 * fold.fraction), dim=1).values
    assert few.shape[1] < 30
    there = torch.ones_like(few, dtype=torch.bool)
    found = over._value(*over._members(few, there), over._limit(size, orders, None))
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)


@pytest.mark.parametrize("over", [S.TopK("2B"), S.Trimmed("B", 3), S.Trimmed(1, "B")], ids=repr)
def test_a_count_that_is_still_text_has_no_fold(over):
    assert over.fold() is None
    assert over.at(8).fold().kind == "top"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rho", [0.0, 0.4, 6.0, 1e3])
def test_chi_square_is_solved_by_moments_above_a_level_that_rises(kind, rho):
    """What an engine does that can sum over members above a level: to the value and the weights of the set."""
    over, (l, w) = S.ChiSquare(rho), members("mean", kind, torch.float64)
    for row, measure in zip(l, w.to(l.dtype), strict=True):
        if not (measure > 0).any():
            continue
        x, m = row[measure > 0], measure[measure > 0]
        level, x = x.amax(), x - x.amax()
        eta, again = torch.tensor(-torch.inf, dtype=l.dtype), True
        while again:
            a = x >= eta
            size, mean = m[a].sum(), (m[a] * x[a]).sum() / m[a].sum()
            energy = (m[a] * (x[a] - mean) ** 2).sum() if x[a].unique().numel() > 1 else torch.zeros_like(size)
            least = x[a].amin()
            value, new, slope = over.solve_moments(size, m.sum(), mean, energy, least)
            eta, again = torch.maximum(eta, new), bool(new > least)
        wanted = over.value(row[None], measure[None])[0]
        torch.testing.assert_close(level + value, wanted, atol=1e-9 * float(l.abs().max()), rtol=0)
        p = torch.where(a, m * (1 / size + slope * (x - mean)).clamp_min(0.0), 0.0)
        torch.testing.assert_close(p, over.weights(row[None], measure[None])[0, measure > 0], atol=1e-9, rtol=0)


class PlainWorst(S.Worst):
    """A set without a stream, because shortcuts are not inherited."""


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.filterwarnings("ignore::nearfar.DegenerateBatchWarning")
def test_a_set_without_a_stream_takes_one_row_and_inference_mode(rows):
    x, y = torch.randn(rows, 3, dtype=torch.float64), torch.arange(rows) // 4
    common = {"pair": nf.pairs.Hinge(), "over": PlainWorst(), "groups": "batch"}
    dense, strips = (nf.RobustLoss(**common, engine=engine) for engine in ("dense", "tiled"))
    for mode in (torch.inference_mode, torch.enable_grad):
        with mode():
            torch.testing.assert_close(strips(x, y), dense(x, y))
