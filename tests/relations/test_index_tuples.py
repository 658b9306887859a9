"""Index tuples as lists: the values and gradients of the dense engine, without its n x m matrices."""

from __future__ import annotations

import pytest
import torch
from table import ROWS, random_batch, tensors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import nearfar as nf
from nearfar._utils.shortcuts import swift
from nearfar.engines import auto, lists
from nearfar.groups import _groupings as groupings
from nearfar.links import Add
from nearfar.losses import robust
from nearfar.miners import present
from nearfar.relations.index_tuples import indexed, listed_pairs

L = nf.losses
TAKING = [row for row in ROWS if not row.composed]
CLOSE = {"atol": 1e-10, "rtol": 1e-10}
WAYS = {"rows": 0, "matrix": 10**9}
"""What a pair costs by itself: nothing, or too much."""
rows = pytest.mark.parametrize("row", TAKING, ids=lambda row: row.id)


def drawn(draw, count, anchors, columns):
    """Anchors and columns at random, none with itself: of that distance the dense engine knows half the digits."""
    a = torch.randint(0, anchors, (count,), generator=draw)
    return a, (a + torch.randint(1, columns, (count,), generator=draw)) % columns


def pairs(seed=0, columns=10):
    """Pairs of ten rows, some several times, one of them as positive and as negative; some anchors have none."""
    draw = torch.Generator().manual_seed(seed)
    (a1, p), (a2, n) = drawn(draw, 14, 8, columns), drawn(draw, 17, 9, columns)
    positive = torch.cat([a1, a1[:4], a2[:1]]), torch.cat([p, p[:4], n[:1]])
    return (*positive, torch.cat([a2, a2[:5]]), torch.cat([n, n[:5]]))


def triplets(seed=0, columns=10, count=45):
    draw = torch.Generator().manual_seed(seed)
    a, p = drawn(draw, count, 9, columns)
    n = torch.randint(0, columns, (count,), generator=draw)
    good = (n != a) & (n != p)
    return a[good], p[good], n[good]


def taken(loss, engine, *arguments, **more):
    """Value and gradients of rows, references and parameters by an engine."""
    loss.engine, leaves = engine, []
    given = []
    for x in (*arguments, *more.values()):
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            x = x.detach().clone().requires_grad_()
            leaves.append(x)
        given.append(x)
    value = loss(*given[: len(arguments)], **dict(zip(more, given[len(arguments) :], strict=True)))
    leaves += [x for x in loss.parameters() if x.requires_grad]
    found = torch.autograd.grad(value.sum(), leaves, allow_unused=True) if value.requires_grad else [None] * len(leaves)
    return value.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True))


def choose(way, monkeypatch):
    monkeypatch.setattr(lists, "DEAR", WAYS[way])
    monkeypatch.setattr(lists, "CHUNK", 20)
    for name in ("MOST", "SMALL"):
        monkeypatch.setattr(lists, name, 0)


@pytest.fixture
def served(monkeypatch):
    """How many calls were evaluated as lists."""
    calls = []

    def counting(*arguments, **more):
        calls.append(arguments)
        return lists.listed_value(*arguments, **more)

    monkeypatch.setattr(auto, "listed_value", counting)
    return calls


def same(loss, served, *arguments, **more):
    before = len(served)
    wanted = taken(loss, "dense", *arguments, **more)
    assert len(served) == before
    for engine in ("auto", "tiled"):
        found = taken(loss, engine, *arguments, **more)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, **CLOSE)
    return len(served) - before


CALLS = {
    "pairs": lambda e, y: (e, y, pairs()),
    "other pairs": lambda e, y: (e, y, pairs(3)),
    "int32": lambda e, y: (e, y, tuple(x.int() for x in pairs(1))),
    "triplets": lambda e, y: (e, y, triplets()),
    "no labels": lambda e, y: (e, None, pairs(2)),
    "no pairs": lambda e, y: (e, y, tuple(torch.zeros(4, 0, dtype=torch.int64))),
    "no triplets": lambda e, y: (e, y, tuple(torch.zeros(3, 0, dtype=torch.int64))),
    "no negative pairs": lambda e, y: (e, y, (*pairs()[:2], *torch.zeros(2, 0, dtype=torch.int64))),
    "reference": lambda e, y: (e, y, pairs(4, 7), e[:7] + 0.1, y[:7]),
    "reference, triplets": lambda e, y: (e, y, triplets(5, 7), e[:7] + 0.1, y[:7]),
    "reference, no labels": lambda e, y: (e, None, pairs(4, 7), e[:7] + 0.1),
    "relation": lambda e, y: (e, nf.Relation.from_labels(y, ignore=1, weights=torch.rand(10, dtype=e.dtype)), pairs(6)),
}


def engines(loss, way, name):
    """How many of the engines take lists.

    "auto" scores long lists of triplets by the dense engine, as it is faster. Learned numbers other than thresholds are
    computed by the dense engine.
    """
    if not swift(loss.product.parts):
        return 0
    dense = way == "matrix" and "triplets" in name and name != "no triplets" and loss.product.groups.takes_triplets
    return 2 - dense


@rows
@pytest.mark.parametrize("way", WAYS)
def test_lists_equal_dense(row, way, monkeypatch, served):
    choose(way, monkeypatch)
    e, y = tensors(*random_batch(), grad=False)
    loss = row.loss()
    for name, call in CALLS.items():
        assert same(loss, served, *call(e, y)) == engines(loss, way, name)
    names = {"ids": torch.arange(10), "ref_ids": torch.arange(5, 12)}
    assert same(loss, served, e, y, pairs(7, 7), e[:7] + 0.1, y[:7], **names) == engines(loss, way, "pairs")


SQUARED = nf.similarity.NegSquaredEuclidean()
"""Of a reference with itself, which a pair of both signs compares, the root would lose half the digits."""
FURTHER = {
    "swap": lambda: L.Triplet(margin=0.3, swap=True, similarity=SQUARED),
    "balanced": lambda: L.Triplet(margin=0.3, mining="balanced"),
    "angles of distances": lambda: nf.RobustLoss(
        pair=nf.pairs.Identity(),
        over=nf.sets.KL(0.3),
        groups=nf.groups.Positive(nf.groups.Rule(nf.groups.AngularScore(0.4), wants_reference=True)),
        similarity=SQUARED,
    ),
    "Hard": lambda: L.Contrastive(miner=nf.miners.Hard()),
    "BalancedHard": lambda: L.Contrastive(miner=nf.miners.BalancedHard()),
    "MultiSimilarity": lambda: L.MultiSimilarity(miner=nf.miners.MultiSimilarity(0.3)),
    "DistanceWeighted": lambda: L.Margin(miner=nf.miners.DistanceWeighted(sample=False)),
}


@pytest.mark.parametrize("name", FURTHER)
@pytest.mark.parametrize("way", WAYS)
def test_rules_and_miners_equal_dense(name, way, monkeypatch, served):
    choose(way, monkeypatch)
    e, y = tensors(*random_batch(), grad=False)
    loss = FURTHER[name]().double()
    for call_name, call in CALLS.items():
        assert same(loss, served, *call(e, y)) == engines(loss, way, call_name)


@rows
def test_anchors_with_few_and_with_many_pairs_equal_dense(row, monkeypatch, served):
    """One anchor has most of the pairs, so that the matrix of the lists is mostly empty."""
    monkeypatch.setattr(lists, "DEAR", 0)
    e, y = tensors(*random_batch(), grad=False)
    many, few = torch.arange(1, 10), torch.tensor([2, 5, 7, 7])
    a1, p, a2, n = pairs(8)
    indices = (
        torch.cat([a1, torch.zeros_like(many)]),
        torch.cat([p, many]),
        torch.cat([a2[:5], few]),
        torch.cat([n[:5], few + 1]),
    )
    loss = row.loss()
    for reduction in ("as it is",) if not loss.product.groups.per_anchor else groupings.REDUCTIONS:
        if reduction != "as it is":
            loss.reduction = reduction
        for given in (indices, (*indices[2:], *indices[:2]), triplets(9)):
            assert same(loss, served, e, y, given) == engines(loss, "rows", "")


@pytest.mark.parametrize("columns", [10, 7])
@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("make", [pairs, triplets])
def test_the_distinct_pairs_are_those_of_the_measures(make, once, columns):
    indices, shape = make(columns=columns), (10, columns)
    listing = listed_pairs(indices, shape, once=once)
    for entries, wanted in zip((listing.positive, listing.negative), indexed(indices, shape, once=once), strict=True):
        found = torch.zeros(shape, dtype=wanted.dtype)
        found[listing.rows, listing.cols] = entries.to(wanted.dtype)
        assert torch.equal(found, wanted)
        assert torch.equal(listing.padded(entries).sum(dim=1), wanted.sum(dim=1).to(entries.sum().dtype))
    assert torch.equal(listing.place // listing.shape[1], listing.rows)


def test_which_rows_had_pairs_is_what_the_masks_say():
    torch.manual_seed(0)
    labels, others = torch.tensor([0, 0, 1, 2, 2, 5]), torch.tensor([0, 0, 1, 2, 2, 5, 5, 7])
    names = {"ids": torch.arange(6), "ref_ids": torch.arange(3, 11)}
    of = nf.Relation.from_labels
    for relation in (
        of(labels),
        of(torch.zeros(4, dtype=torch.int64)),
        of(labels[:1]),
        of(labels, torch.tensor([3, 3])),
        of(labels, torch.tensor([0, 0])),
        of(labels, others),
        of(labels, others, reference_starts_with_batch=True),
        of(labels, others, **names),
        of(labels, ignore=0),
        of(labels, weights=torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 0.5])),
        nf.Relation.from_matrix(torch.rand(5, 5) > 0.7, torch.rand(5, 5) > 0.5),
    ):
        tile = relation.dense()
        for found, measure in zip(lists.valid_rows(relation), (tile.positive, tile.negative), strict=True):
            assert torch.equal(found, present(measure)), relation


LISTED = [row for row in TAKING if row.label in ("", "hard") and swift(row.make().product.parts)]


class Largest(TorchDispatchMode):
    """Notes the number of entries of the largest tensor that is made."""

    entries = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        sizes = [x.untyped_storage().nbytes() // x.element_size() for x in tree_leaves(found) if torch.is_tensor(x)]
        self.entries = max(self.entries, *sizes, 0) if sizes else self.entries
        return found


@pytest.mark.parametrize("row", LISTED, ids=lambda row: row.id)
@pytest.mark.parametrize("labeled", [True, False])
def test_no_matrix_of_all_pairs_is_made(row, labeled):
    n, each = 600, 4
    draw = torch.Generator().manual_seed(0)
    embeddings, labels = torch.randn(n, 4, generator=draw), torch.arange(n) // 5
    anchors = torch.arange(n).repeat_interleave(each)
    p, q = ((anchors + 1 + torch.randint(n - 1, (n * each,), generator=draw)) % n for _ in range(2))
    for indices in ((anchors, p, anchors, q), (anchors, p, q)):
        largest = Largest()
        x = embeddings.clone().requires_grad_()
        with largest:
            row.make()(x, labels if labeled else None, indices).backward()
        assert largest.entries < n * n // 4, row.id


def test_parts_of_ones_own_get_the_dense_way(served, monkeypatch):
    monkeypatch.setattr(lists, "DEAR", 0)

    class Larger(Add):
        def forward(self, sides):
            return super().forward(type(sides)(**(vars(sides) | {"positive": 2 * sides.positive})))

    class Whole(Larger, swift=True):
        pass

    class Said(Larger, swift=True):
        strips = True

    class First(nf.sets.Mean):
        def _value(self, l, w, mass):
            return l[:, 0]

    class Asked(nf.groups.AnchorSign):
        pass

    e, y = tensors(*random_batch(), grad=False)
    indices = tuple(x[:12] for x in pairs())

    def loss(**more):
        return nf.RobustLoss(**({"pair": nf.pairs.Hinge(), "over": nf.sets.KL(0.3), "groups": "anchor_sign"} | more))

    hooked = loss()
    hooked.pair_positive.register_forward_hook(lambda *_: None)
    own = (
        loss(link=Larger()),
        loss(link=Whole()),
        loss(over=First()),
        loss(groups=Asked()),
        L.DroKL(samples=5),
        hooked,
    )
    for one in own:
        one(e, y, indices)
        assert not served, one
    assert same(loss(link=Said()), served, e, y, indices) == 2
    assert same(loss(), served, e, y, indices) == 2


def test_compiled_calls_stay_dense(served, monkeypatch):
    monkeypatch.setattr(lists, "DEAR", 0)
    e, y = tensors(*random_batch(), grad=False)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    L.Contrastive()(e, y, tuple(x[:9] for x in pairs()))
    assert not served


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["Triplet", "SupCon", "DroKL"])
def test_second_derivatives_equal_dense(name, way, monkeypatch, served):
    choose(way, monkeypatch)
    e, y = tensors(*random_batch())
    found = []
    for engine in ("dense", "auto"):
        loss = getattr(L, name)(engine=engine, similarity=nf.similarity.NegSquaredEuclidean())
        (slope,) = torch.autograd.grad(loss(e, y, triplets()), e, create_graph=True)
        found += torch.autograd.grad((slope**2).sum(), e)
    torch.testing.assert_close(found[1], found[0], **CLOSE)


@pytest.mark.parametrize("similarity", [nf.similarity.Cosine(), nf.similarity.NegEuclidean()])
def test_a_nan_of_a_listed_row_shows(similarity):
    e, y = tensors(*random_batch(), grad=False)
    e[3] = torch.nan
    for indices, broken in (((0, 3, 0, 4), True), ((3, 1, 0, 4), True), ((0, 1, 2, 3), True), ((0, 1, 2, 4), False)):
        tensor = tuple(torch.tensor([x]) for x in indices)
        for loss in (L.Contrastive(similarity=similarity), L.MultiSimilarity(similarity=similarity)):
            for engine in ("dense", "tiled"):
                loss.engine = engine
                value = loss._value(robust.Call("Contrastive", e, y, tensor))
                assert bool(value.isnan()) == broken, (indices, loss, engine)


def test_labels_may_be_any_integers():
    """As vectors, labels are counted by their ranks."""
    torch.manual_seed(0)
    e, y, indices = (
        torch.randn(300, 8),
        torch.arange(300) // 2,
        (torch.tensor([0]), torch.tensor([1]), *torch.tensor([[0], [5]])),
    )
    found = [nf.losses.MultiSimilarity()(e, labels, indices) for labels in (y, y * 1000, y - 70)]
    assert found[0] == found[1] == found[2] > 0
