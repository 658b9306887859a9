"""nearfar.pml.miners and samplers against pytorch-metric-learning 2.9: the same tuples, the same contract."""

from __future__ import annotations

import inspect
import itertools
from collections import Counter

import numpy as np
import pytest
import pytorch_metric_learning as theirs
import torch
from pytorch_metric_learning import distances, miners, samplers  # noqa: F401 - loads them
from torch.utils.data import DataLoader

import nearfar.pml as ours

SIZES = ((4, 3, 2, 1), (2, 5, 1, 2, 3), (9, 8, 7, 1, 6), (3,), (1, 1, 1))


def batch(seed, sizes=SIZES[0], width=5):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.cat([torch.full((size,), name) for name, size in enumerate(sizes)])
    labels = labels[torch.randperm(len(labels), generator=generator)]
    pull = torch.randn(len(sizes), width, dtype=torch.float64, generator=generator)[labels]
    return torch.randn(len(labels), width, dtype=torch.float64, generator=generator) + pull, labels


def cosine(m, **more):
    return {"distance": m.distances.CosineSimilarity(), **more}


def squared(m, **more):
    return {"distance": m.distances.LpDistance(power=2, normalize_embeddings=False), **more}


def easy_hard(positive, negative, **more):
    def settings(m):
        return {"pos_strategy": positive, "neg_strategy": negative, **more}

    return settings


WORDS = ("hard", "semihard", "easy", "all")
LEGAL = [
    pair for pair in itertools.product(WORDS, WORDS) if "semihard" not in pair or not set(pair) <= {"semihard", "all"}
]
ROWS = (
    ("MultiSimilarityMiner", lambda m: {}),
    ("MultiSimilarityMiner", lambda m: {"epsilon": 0.5}),
    ("MultiSimilarityMiner", lambda m: squared(m, epsilon=0.3)),
    ("BatchHardMiner", lambda m: {}),
    ("BatchHardMiner", cosine),
    ("BatchHardMiner", lambda m: {"allowed_pos_range": (0.2, 1.1), "allowed_neg_range": (0.5, 1.5)}),
    ("TripletMarginMiner", lambda m: {}),
    *(("TripletMarginMiner", lambda m, word=word: {"type_of_triplets": word}) for word in ("hard", "semihard", "easy")),
    ("TripletMarginMiner", lambda m: cosine(m, margin=0.3, type_of_triplets="semihard")),
    ("PairMarginMiner", lambda m: {}),
    ("PairMarginMiner", lambda m: {"pos_margin": 0.9, "neg_margin": 1.2}),
    ("PairMarginMiner", lambda m: cosine(m, pos_margin=0.7, neg_margin=0.1)),
    ("BatchEasyHardMiner", lambda m: {}),
    *(("BatchEasyHardMiner", easy_hard(*pair)) for pair in LEGAL),
    ("BatchEasyHardMiner", lambda m: cosine(m, pos_strategy="semihard", neg_strategy="hard")),
    ("BatchEasyHardMiner", easy_hard("hard", "semihard", allowed_pos_range=(0.1, 0.9), allowed_neg_range=(0.3, 1.4))),
    ("BatchEasyHardMiner", lambda m: cosine(m, allowed_neg_range=(-0.5, 0.6))),
    ("AngularMiner", lambda m: {}),
    ("AngularMiner", lambda m: {"angle": 35}),
)
rows = pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])


def listed(indices):
    """A tuple as counted rows, so that order does not matter but repetition does."""
    if len(indices) == 3:
        return Counter(zip(*(part.tolist() for part in indices), strict=True))
    a1, p, a2, n = (part.tolist() for part in indices)
    return Counter(zip(a1, p, strict=True)), Counter(zip(a2, n, strict=True))


@rows
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_same_tuples(row, sizes):
    name, settings = row
    embeddings, labels = batch(1, sizes)
    mine, other = (getattr(m.miners, name)(**settings(m)) for m in (ours, theirs))
    got, want = mine(embeddings, labels), other(embeddings, labels)
    assert len(got) == len(want)
    assert all(part.dtype == torch.int64 for part in got)
    assert listed(got) == listed(want)
    if len(got) == 3:
        assert mine.num_triplets == other.num_triplets == len(got[0])
    else:
        assert (mine.num_pos_pairs, mine.num_neg_pairs) == (other.num_pos_pairs, other.num_neg_pairs)


@rows
def test_same_tuples_with_a_reference(row):
    name, settings = row
    embeddings, labels = batch(2)
    ref_emb, ref_labels = batch(3, SIZES[1])
    mine, other = (getattr(m.miners, name)(**settings(m)) for m in (ours, theirs))
    want = listed(other(embeddings, labels, ref_emb, ref_labels))
    assert listed(mine(embeddings, labels, ref_emb, ref_labels)) == want
    # who is the same sample is never told by the identity of the tensor
    ref_emb = batch(4)[0]
    want = listed(other(embeddings, labels, ref_emb, labels.clone()))
    assert listed(mine(embeddings, labels, ref_emb, labels.clone())) == want
    assert listed(mine(embeddings, labels, ref_emb, labels)) == want


@rows
def test_ids_leave_a_sample_alone(row):
    name, settings = row
    embeddings, labels = batch(5)
    miner, ids = getattr(ours.miners, name)(**settings(ours)), torch.arange(10)
    given = miner(embeddings, labels, embeddings.clone(), labels.clone(), ids=ids, ref_ids=ids)
    assert listed(given) == listed(miner(embeddings, labels))


@rows
def test_every_kind_finds_something(row):
    name, settings = row
    found = getattr(ours.miners, name)(**settings(ours))(*batch(1, SIZES[2]))
    assert all(len(part) for part in found)


@pytest.mark.parametrize("name", sorted({*ours.miners.__all__} - {"BaseMiner", "EmbeddingsAlreadyPackagedAsTriplets"}))
def test_empty_batch_and_signature(name):
    kind = getattr(ours.miners, name)
    nobody = torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)
    for found in (kind()(*nobody), kind()(torch.ones(2, 3), torch.tensor([0, 0]), *nobody)):
        assert len(found) == kind.parts
        assert all(part.shape == (0,) and part.dtype == torch.int64 for part in found)
    mine, other = (inspect.signature(getattr(m.miners, name)).parameters.values() for m in (ours, theirs))
    wanted = [(p.name, p.default) for p in other if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [(p.name, p.default) for p in mine if p.kind is p.POSITIONAL_OR_KEYWORD] == wanted


def test_batch_easy_hard_refuses_what_pml_refuses():
    for pair in set(itertools.product(WORDS, WORDS)) - set(LEGAL):
        for library in (ours, theirs):
            with pytest.raises(ValueError, match="semihard"):
                library.miners.BatchEasyHardMiner(*pair)


def drawn(miner, embeddings, labels, times):
    """How often each (anchor, positive) and (anchor, negative) comes up [n, n], and how many triplets a call has."""
    torch.manual_seed(0)
    n = len(labels)
    counts, sizes = torch.zeros(2, n, n), set()
    for _ in range(times):
        a, p, neg = miner(embeddings, labels)
        sizes.add(len(a))
        for k, other in enumerate((p, neg)):
            counts[k].index_put_((a, other), torch.ones(len(a)), accumulate=True)
    return counts, sizes


def test_distance_weighted_draws_as_pml_does():
    """Equal in distribution: counts of 800 calls of each differ by no more than chance (4.5 deviations, 400 cells)."""
    embeddings, labels = batch(6, (3, 4, 2, 1), width=4)
    mine, sizes = drawn(ours.miners.DistanceWeightedMiner(), embeddings, labels, 800)
    other, other_sizes = drawn(theirs.miners.DistanceWeightedMiner(), embeddings, labels, 800)
    assert sizes == other_sizes
    assert len(sizes) == 1
    apart = (mine - other).abs() / (mine + other).clamp_min(1).sqrt()
    assert apart.max() < 4.5
    assert torch.equal(mine > 0, other > 0)


def test_distance_weighted_follows_the_density():
    """Chances are one over the density of distances on the sphere, cut off at both ends (Wu et al. 2017)."""
    embeddings, labels = batch(7, (2, 6), width=4)
    counts, _ = drawn(ours.miners.DistanceWeightedMiner(cutoff=0.8, nonzero_loss_cutoff=1.6), embeddings, labels, 2000)
    x = (embeddings / embeddings.norm(dim=1, keepdim=True)).numpy()
    for a in range(8):
        distance = np.maximum(np.linalg.norm(x - x[a], axis=1), 0.8)
        chance = 1 / (distance**2 * np.sqrt(1 - distance**2 / 4))
        chance[(distance >= 1.6) | (labels == labels[a]).numpy()] = 0
        total = counts[1][a].sum().item()
        if not chance.sum():
            assert total == 0
            continue
        expected = total * chance / chance.sum()
        assert total > 0
        assert np.all(np.abs(counts[1][a].numpy() - expected) <= 4.5 * np.sqrt(expected) + 1e-9)


@pytest.mark.parametrize(
    "labels", [np.arange(40) % 8, torch.arange(40) % 8, [f"c{i % 8}" for i in range(40)]], ids=type
)
@pytest.mark.parametrize(("m", "batch_size", "length"), [(4, None, 100), (4, 16, 100), (3, 24, 1000), (7, 14, 99)])
def test_sampler_gives_m_of_each_class(labels, m, batch_size, length):
    torch.manual_seed(0)
    sampler = ours.samplers.MPerClassSampler(labels, m, batch_size, length)
    names = [label.item() if isinstance(label, torch.Tensor) else label for label in labels]
    indices = list(sampler)
    assert len(indices) == len(sampler) == len(theirs.samplers.MPerClassSampler(labels, m, batch_size, length))
    size = batch_size or 8 * m
    assert len(indices) % size == 0
    for start in range(0, len(indices), size):
        part = indices[start : start + size]
        counts = Counter(names[i] for i in part)
        assert set(counts.values()) == {m}
        assert len(counts) == size // m
        # m of one class stand together, and none twice where the class (of 5) has enough
        assert all(len({names[i] for i in part[k : k + m]}) == 1 for k in range(0, size, m))
        assert len(set(part)) == len(part) if m <= 5 else len(set(part)) < len(part)


def test_sampler_is_fair_and_seeded_by_torch():
    sampler = ours.samplers.MPerClassSampler(torch.arange(60) % 12, 2, batch_size=8, length_before_new_iter=24000)
    torch.manual_seed(1)
    first, second = list(sampler), list(sampler)
    assert first != second
    torch.manual_seed(1)
    np.random.default_rng()
    assert list(sampler) == first
    often = Counter(first)
    assert set(often) == set(range(60))
    assert all(abs(count - 400) < 4.5 * 20 for count in often.values())


def test_sampler_feeds_a_loader():
    labels = torch.arange(30) % 6
    sampler = ours.samplers.MPerClassSampler(labels, m=5, batch_size=10, length_before_new_iter=65)
    batches = list(DataLoader(labels, batch_size=10, sampler=sampler))
    assert [len(set(part.tolist())) for part in batches] == [2] * 6


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"m": 3, "batch_size": 10}, "m must divide batch_size"),
        ({"m": 2, "batch_size": 20}, "batch_size must be at most m x classes = 2 x 4"),
        ({"m": 2, "batch_size": 8, "length_before_new_iter": 6}, "length_before_new_iter must be at least"),
        ({"m": 0}, "m must be above zero"),
    ],
)
def test_sampler_says_what_is_wrong(settings, says):
    with pytest.raises(ValueError, match=says):
        ours.samplers.MPerClassSampler(torch.arange(12) % 4, **settings)
