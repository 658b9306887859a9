"""Samplers of nearfar.pml beside MPerClassSampler: the batches of pytorch-metric-learning 2.9 under the same seed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pytorch_metric_learning import miners as their_miners
from pytorch_metric_learning import samplers as theirs
from pytorch_metric_learning.utils import common_functions
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nearfar.pml import miners
from nearfar.pml import samplers as ours


def tree(seed):
    """Classes and super-classes of 60 samples; classes of unequal size."""
    generator = np.random.default_rng(seed)
    inner = np.sort(generator.integers(0, 12, 60))
    return np.stack([inner, inner // 3], axis=1)


def seeded(make):
    np.random.seed(3)  # noqa: NPY002 - the generator that PML draws from
    torch.manual_seed(3)
    return make()


@pytest.mark.parametrize("labels", [[0, 1, 1, 2, 2, 2, 0, 5], torch.tensor([4, 4, 1, 1, 1, 9])], ids=["list", "tensor"])
def test_the_same_fixed_triplets(labels):
    def made(library):
        sampler = library.FixedSetOfTriplets(labels, 20)
        return sampler.fixed_set_of_triplets.tolist(), [list(sampler) for _ in range(2)], len(sampler)

    found, want = (seeded(lambda library=library: made(library)) for library in (ours, theirs))
    assert found == want
    assert len(found[1][0]) == 60
    for a, p, n in found[0]:
        assert labels[a] == labels[p] != labels[n]


SETTINGS = (
    {"batch_size": 12, "samples_per_class": 3},
    {"batch_size": 12, "samples_per_class": 2, "batches_per_super_tuple": 1, "super_classes_per_batch": 3},
    {"batch_size": 20, "samples_per_class": "all"},
    {"batch_size": 8, "samples_per_class": 4, "inner_label": 1, "outer_label": 0},
)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("wrap", [np.asarray, torch.as_tensor], ids=["array", "tensor"])
def test_the_same_hierarchical_batches(settings, wrap):
    def made(library):
        sampler = library.HierarchicalSampler(wrap(tree(1)), **settings)
        return [[[int(row) for row in batch] for batch in sampler] for _ in range(2)], len(sampler)

    found, want = (seeded(lambda library=library: made(library)) for library in (ours, theirs))
    assert found == want
    assert found[0][0] != found[0][1]
    assert max(len(batch) for batch in found[0][0]) <= settings["batch_size"]
    inside = {int(row) for batch in found[0][0] for row in batch}
    assert inside <= set(range(60))


def test_a_data_loader_takes_hierarchical_batches():
    labels = torch.from_numpy(tree(2))
    sampler = ours.HierarchicalSampler(labels, batch_size=12, samples_per_class=3)
    for rows, names in DataLoader(TensorDataset(torch.arange(60), labels), batch_sampler=sampler):
        assert len(rows) <= 12
        assert len(names[:, 1].unique()) == 2


@pytest.mark.parametrize("subset", [None, 20])
@pytest.mark.parametrize("margin", [0.2, 9.0], ids=["some", "none"])
def test_the_same_weights_and_draws(subset, margin):
    data = TensorDataset(torch.randn(30, 4, generator=torch.Generator().manual_seed(0)), torch.arange(30) % 5)
    model = nn.Linear(4, 3)

    def made(library, miner):
        sampler = library.TuplesToWeightsSampler(model, miner, data, subset, dataloader_num_workers=0, batch_size=7)
        drawn = [list(sampler) for _ in range(2)]
        return drawn, sampler.weights.tolist(), len(sampler)

    settings = {"pos_margin": margin, "neg_margin": -margin if margin > 1 else 0.4}
    found = seeded(lambda: made(ours, miners.PairMarginMiner(**settings)))
    want = seeded(lambda: made(theirs, their_miners.PairMarginMiner(**settings)))
    assert found == want
    hard = seeded(lambda: made(ours, miners.BatchHardMiner()))  # in which a sample may be negative more than anchor
    assert hard == seeded(lambda: made(theirs, their_miners.BatchHardMiner()))
    assert len(found[0][0]) == (subset or 30)
    assert (len(set(found[1])) > 2) == (margin < 1)


def test_a_generator_that_a_script_has_set_is_used(monkeypatch):
    monkeypatch.setattr(common_functions, "NUMPY_RANDOM", np.random.RandomState(8))
    one = ours.FixedSetOfTriplets([0, 0, 1, 1, 2], 9).fixed_set_of_triplets
    monkeypatch.setattr(common_functions, "NUMPY_RANDOM", np.random.RandomState(8))
    assert one.tolist() == theirs.FixedSetOfTriplets([0, 0, 1, 1, 2], 9).fixed_set_of_triplets.tolist()


def test_what_cannot_be_is_told():
    labels = tree(1)
    for settings, told in (
        ({"batch_size": 7, "samples_per_class": 2}, "a multiple of super_classes_per_batch=2, but came as 7"),
        ({"batch_size": 8, "samples_per_class": 3}, "must divide 4, the share of a super-class"),
        ({"batch_size": 8, "samples_per_class": "some"}, "samples_per_class, where it is not 'all'"),
        (
            {"batch_size": 9, "samples_per_class": 1, "super_classes_per_batch": 9},
            "9 super-classes or more, but hold 4",
        ),
    ):
        with pytest.raises(ValueError, match=told):
            ours.HierarchicalSampler(labels, **settings)
    with pytest.raises(ValueError, match="two classes or more, but hold 1"):
        ours.FixedSetOfTriplets([3, 3], 2)
    with pytest.raises(ValueError, match="num_triplets must be a whole number"):
        ours.FixedSetOfTriplets([3, 4], 0)
