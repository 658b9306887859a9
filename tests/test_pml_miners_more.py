"""Miners of PML that draw, keep statistics, or are subclassed: against pytorch-metric-learning 2.9."""

from __future__ import annotations

import pytest
import pytorch_metric_learning as theirs
import torch
from pytorch_metric_learning import miners as their_miners
from test_pml_miners import ROWS, SIZES, batch, listed

import nearfar.pml as ours

STATS = [row for row in ROWS if row[0] != "MultiSimilarityMiner"]


@pytest.mark.parametrize("row", STATS, ids=lambda row: row[0])
@pytest.mark.parametrize("sizes", SIZES[:3], ids=str)
def test_the_same_statistics(row, sizes):
    name, settings = row
    embeddings, labels = batch(7, sizes)
    mine, other = (getattr(m.miners, name)(collect_stats=True, **settings(m)) for m in (ours, theirs))
    assert set(mine._record_these) == set(other._record_these if hasattr(other, "_record_these") else [])
    assert set(mine._record_these_stats) == set(other._record_these_stats)
    mine(embeddings, labels)
    other(embeddings, labels)
    for stat in other._record_these_stats:
        # PML adds 1e-6 to every difference of two rows where it compares them one by one, as the angles do
        close = 1e-4 if "angle" in stat else 1e-9
        assert getattr(mine, stat) == pytest.approx(getattr(other, stat), abs=close), stat
    assert any(getattr(mine, stat) for stat in other._record_these_stats)
    mine.reset_stats()
    assert not any(getattr(mine, stat) for stat in other._record_these_stats)


def test_statistics_are_kept_only_where_asked_for(monkeypatch):
    assert ours.miners.PairMarginMiner()._record_these_stats == []
    miner = ours.miners.PairMarginMiner()
    miner(*batch(1))
    assert miner.pos_pair_dist == 0
    assert miner.num_pos_pairs > 0
    monkeypatch.setattr("pytorch_metric_learning.utils.common_functions.COLLECT_STATS", True)
    miner = ours.miners.PairMarginMiner()
    miner(*batch(1))
    assert miner.pos_pair_dist > 0


@pytest.mark.parametrize("settings", [{}, {"num_bins": 7, "pos_per_bin": 3, "neg_per_bin": 2}], ids=str)
@pytest.mark.parametrize("distance", ["LpDistance", "CosineSimilarity"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_seed_draws_the_same_pairs_over_the_histogram(settings, distance, sizes):
    embeddings, labels = batch(3, sizes)
    found = []
    for m in (ours, theirs):
        torch.manual_seed(5)
        miner = m.miners.UniformHistogramMiner(distance=getattr(m.distances, distance)(), **settings)
        found.append(miner(embeddings, labels))
    for a, b in zip(*found, strict=True):
        assert a.tolist() == b.tolist()


def test_a_distance_at_the_edge_of_a_bin_belongs_to_the_upper_one():
    points, labels = torch.tensor([[0.0], [1.0], [3.0], [4.0], [8.0]]), torch.zeros(5, dtype=torch.int64)
    found = []
    for m in (ours, theirs):
        torch.manual_seed(1)
        distance = m.distances.LpDistance(normalize_embeddings=False)
        found.append(m.miners.UniformHistogramMiner(num_bins=7, pos_per_bin=4, distance=distance)(points, labels))
    for a, b in zip(*found, strict=True):
        assert a.tolist() == b.tolist()


@pytest.mark.parametrize("miner", [ours.miners.PairMarginMiner(pos_margin=-1), ours.miners.BatchHardMiner()])
def test_a_reference_is_one_even_where_it_is_the_batch(miner):
    embeddings, labels = batch(1)
    same = miner(embeddings, labels, embeddings, labels)
    assert listed(same) == listed(miner(embeddings, labels, embeddings.clone(), labels.clone()))
    assert listed(same) != listed(miner(embeddings, labels))


def test_triplets_as_the_batch_is_packed():
    x, y = torch.randn(9, 4), torch.arange(9)
    mine, other = (m.miners.EmbeddingsAlreadyPackagedAsTriplets()(x, y) for m in (ours, theirs))
    assert [part.tolist() for part in mine] == [part.tolist() for part in other]
    assert [len(part) for part in ours.miners.EmbeddingsAlreadyPackagedAsTriplets()(x[:0], y[:0])] == [0, 0, 0]
    with pytest.raises(ValueError, match="in threes, but 8 came"):
        ours.miners.EmbeddingsAlreadyPackagedAsTriplets()(x[:8], y[:8])


def both_ways(indices):
    """Pairs without their direction: (i, j) and (j, i) are equally hard, and which is taken first is open."""
    return [sorted(map(sorted, zip(a.tolist(), b.tolist(), strict=True))) for a, b in (indices[:2], indices[2:])]


@pytest.mark.parametrize("share", [0.5, 0.3, 1.0])
@pytest.mark.parametrize("distance", ["LpDistance", "CosineSimilarity"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_hdc_takes_the_hardest_share(share, distance, sizes):
    embeddings, labels = batch(2, sizes)
    mine, other = (m.miners.HDCMiner(share, distance=getattr(m.distances, distance)()) for m in (ours, theirs))
    assert both_ways(mine(embeddings, labels)) == both_ways(other(embeddings, labels))
    reference = batch(3, SIZES[1])
    want = listed(other(embeddings, labels, *reference))
    assert listed(mine(embeddings, labels, *reference)) == want


def test_hdc_goes_on_with_the_pairs_it_was_given():
    embeddings, labels = batch(2, SIZES[2])
    given = ours.miners.MultiSimilarityMiner()(embeddings, labels, *batch(3, SIZES[1]))
    mine, other = ours.miners.HDCMiner(), their_miners.HDCMiner()
    for miner in (mine, other):
        miner.set_idx_externally(given, labels)
    for _ in range(2):  # each call leaves fewer to the next
        assert listed(mine(embeddings, labels, *batch(3, SIZES[1]))) == listed(
            other(embeddings, labels, *batch(3, SIZES[1]))
        )
    assert mine.num_pos_pairs == len(mine.a1) < len(given[0]) / 3
    mine.reset_idx()
    mine(embeddings, labels)
    assert mine.num_pos_pairs > len(given[0])


def test_no_cutoff_draws_negatives_near_and_none_at_zero():
    embeddings, labels = batch(4, (3, 3, 3), width=8)
    embeddings[labels == 1] = embeddings[labels == 0]  # each row has a negative at distance 0 to it
    torch.manual_seed(0)
    a, _, n = ours.miners.DistanceWeightedMiner(cutoff=0, nonzero_loss_cutoff=3)(embeddings, labels)
    direct = ours.miners.base.normalize(embeddings)
    gaps = (direct[a] - direct[n]).norm(dim=1)
    assert len(a)
    assert float(gaps.min()) > 1e-6


def test_mine_is_the_call_without_the_count():
    embeddings, labels = batch(1, SIZES[2])
    other, names = batch(6, SIZES[1])
    for name, settings in ROWS:
        miner = getattr(ours.miners, name)(**settings(ours))
        assert listed(miner.mine(embeddings, labels, embeddings, labels)) == listed(miner(embeddings, labels))
        assert listed(miner.mine(embeddings, labels, other, names)) == listed(miner(embeddings, labels, other, names))
    assert miner.get_default_distance().is_inverted is False
    assert ours.miners.MultiSimilarityMiner().get_default_distance().is_inverted


@pytest.mark.parametrize("library", [ours, theirs], ids=["ours", "theirs"])
def test_a_miner_of_ones_own(library):
    class Nearest(library.miners.BaseMiner):
        def __init__(self, count=1, **kwargs):
            super().__init__(**kwargs)
            self.count = count
            self.add_to_recordable_attributes(list_of_names=["count"], is_stat=False)
            self.add_to_recordable_attributes(name="nearest", is_stat=True)

        def mine(self, embeddings, labels, ref_emb, ref_labels):
            mat = self.distance(embeddings, ref_emb)
            far = labels[:, None] != ref_labels[None, :]
            self.nearest = float(mat[far].min())
            a, n = torch.where(far & (mat <= mat[far].min() + 1e-9))
            return a[: self.count], a[: self.count], n[: self.count]

    class Fewer(library.miners.PairMarginMiner):
        def mine(self, embeddings, labels, ref_emb, ref_labels):
            a1, p, a2, n = super().mine(embeddings, labels, ref_emb, ref_labels)
            return a1[:1], p[:1], a2, n

    embeddings, labels = batch(1)
    miner = Nearest(count=2, collect_stats=True)
    found = miner(embeddings, labels)
    assert miner.num_triplets == len(found[0]) == 2
    assert miner._record_these == ["count"]
    assert miner.nearest > 0
    fewer, plain = Fewer(), library.miners.PairMarginMiner()
    plain(embeddings, labels)
    fewer(embeddings, labels)
    assert (fewer.num_pos_pairs, fewer.num_neg_pairs) == (1, plain.num_neg_pairs)
    fewer(embeddings, labels, embeddings, labels.clone())
    loss = ours.losses.TripletMarginLoss()
    assert torch.isfinite(loss(embeddings, labels, found))


def test_wrong_miners_of_ones_own_are_told():
    class Wrong(ours.miners.BaseMiner):
        def mine(self, embeddings, labels, ref_emb, ref_labels):
            return torch.arange(3), torch.arange(2), torch.arange(3)

    with pytest.raises(ValueError, match=r"lengths \[3, 2, 3\]"):
        Wrong()(*batch(1))
    with pytest.raises(TypeError, match="must have a method mine"):
        ours.miners.BaseMiner()(*batch(1))
    with pytest.raises(ValueError, match="filter_percentage must lie in"):
        ours.miners.HDCMiner(0)
