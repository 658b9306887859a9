"""Ours and theirs in one script: PML's trainer, testers and wrappers with our losses and miners, and the reverse."""

from __future__ import annotations

import logging

import pytest
import torch
from needs import need
from torch import nn
from torch.utils.data import TensorDataset

import nearfar.pml as ours

theirs = need("pytorch_metric_learning")
from pytorch_metric_learning import losses, miners, samplers, testers, trainers  # noqa: E402
from pytorch_metric_learning.utils import accuracy_calculator, inference  # noqa: E402

# a warning of the trainer itself
pytestmark = pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
BOTH = pytest.mark.parametrize("library", [ours, theirs], ids=["ours", "theirs"])


def data(count=48, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 6
    return TensorDataset(torch.randn(count, 5, generator=generator) + 2 * torch.eye(6)[labels][:, :5], labels)


def network():
    torch.manual_seed(1)
    return nn.Linear(5, 8), nn.Linear(8, 4)


def trained(loss, miner=None, sampler=None, steps=6):
    """The weights after some steps of PML's `MetricLossOnly`."""
    trunk, embedder = network()
    models = {"trunk": trunk, "embedder": embedder}
    logging.getLogger("PML").setLevel(logging.ERROR)
    torch.manual_seed(2)
    made = ours.trainers.MetricLossOnly(
        models,
        {f"{name}_optimizer": torch.optim.SGD(model.parameters(), lr=0.1) for name, model in models.items()},
        16,
        {"metric_loss": loss},
        data(),
        mining_funcs={} if miner is None else {"tuple_miner": miner},
        iterations_per_epoch=steps,
        sampler=sampler,
        dataloader_num_workers=0,
        data_device=torch.device("cpu"),
    )
    made.train(num_epochs=1)
    assert made.epoch == 1
    return torch.cat([p.detach().flatten() for model in models.values() for p in model.parameters()])


PAIRS = (
    ("ContrastiveLoss", None),
    ("TripletMarginLoss", "TripletMarginMiner"),
    ("MultiSimilarityLoss", "MultiSimilarityMiner"),
    ("NTXentLoss", "BatchHardMiner"),
)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0])
def test_their_trainer_learns_the_same_from_our_losses_and_miners(pair):
    name, miner = pair
    want = trained(getattr(losses, name)(), miner and getattr(miners, miner)())
    mixed = (
        (getattr(ours.losses, name)(), miner and getattr(ours.miners, miner)()),
        (getattr(ours.losses, name)(), miner and getattr(miners, miner)()),
        (getattr(losses, name)(), miner and getattr(ours.miners, miner)()),
    )
    for loss, mine in mixed[: 3 if miner else 1]:
        torch.testing.assert_close(trained(loss, mine), want, atol=1e-5, rtol=1e-5)
    assert float((want - trained(getattr(losses, name)(), steps=1)).abs().max()) > 1e-3


def test_their_trainer_takes_our_samplers():
    labels = data().tensors[1]
    trained(ours.losses.ContrastiveLoss(), sampler=ours.samplers.MPerClassSampler(labels, 4, 16, 96))


@BOTH
def test_testers_take_calculators_and_searches_of_either(library):
    calculators = {
        "ours": ours.utils.accuracy_calculator.AccuracyCalculator,
        "theirs": accuracy_calculator.AccuracyCalculator,
    }
    found = []
    for kind in calculators.values():
        for knn in (ours.utils.inference.CustomKNN, inference.CustomKNN):
            for distance in (ours.distances.LpDistance(), theirs.distances.LpDistance()):
                calculator = kind(include=("precision_at_1", "r_precision"), knn_func=knn(distance))
                tester = library.testers.GlobalEmbeddingSpaceTester(
                    dataloader_num_workers=0, accuracy_calculator=calculator, data_device=torch.device("cpu")
                )
                found.append(dict(tester.test({"val": data()}, 0, *network())["val"]))
    assert all(one == pytest.approx(found[0]) for one in found)


def test_their_other_testers_take_our_calculator():
    need("faiss")
    x, y = data().tensors
    parents = TensorDataset(x, torch.stack([y, y // 3], dim=1))
    found = []
    for kind in (ours.utils.accuracy_calculator.AccuracyCalculator, accuracy_calculator.AccuracyCalculator):
        tester = ours.testers.WithSameParentLabelTester(
            dataloader_num_workers=0,
            accuracy_calculator=kind(include=("r_precision",)),
            data_device=torch.device("cpu"),
        )
        found.append(dict(tester.test({"val": parents}, 0, nn.Identity())["val"]))
    assert found[0] == pytest.approx(found[1])
    assert testers.WithSameParentLabelTester is ours.testers.WithSameParentLabelTester


def test_their_memory_takes_our_losses_and_miners():
    x, y = data().tensors
    found = []
    for loss, miner in (
        (losses.ContrastiveLoss(), miners.MultiSimilarityMiner()),
        (ours.losses.ContrastiveLoss(), ours.miners.MultiSimilarityMiner()),
    ):
        memory = losses.CrossBatchMemory(loss, 5, memory_size=40, miner=miner)
        found.append([float(memory(x[i : i + 12], y[i : i + 12])) for i in range(0, 48, 12)])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_our_memory_takes_their_losses_and_miners():
    x, y = data().tensors
    found = []
    for library in (ours, theirs):
        for loss, miner in (
            (losses.ContrastiveLoss(), ours.miners.MultiSimilarityMiner()),
            (ours.losses.ContrastiveLoss(), miners.MultiSimilarityMiner()),
        ):
            memory = library.losses.CrossBatchMemory(loss, 5, memory_size=40, miner=miner)
            found.append([float(memory(x[i : i + 12], y[i : i + 12])) for i in range(0, 48, 12)])
    assert all(one == pytest.approx(found[0], rel=1e-5) for one in found)


def test_their_wrappers_take_our_losses():
    x, y = data().tensors
    pairs = []
    for library in (ours, theirs):
        two = losses.MultipleLosses([library.losses.ContrastiveLoss(), library.losses.NTXentLoss()], weights=[1, 0.5])
        alone = losses.SelfSupervisedLoss(library.losses.NTXentLoss())
        pairs.append((float(two(x, y)), float(alone(x, x.flip(0)))))
    assert pairs[0] == pytest.approx(pairs[1], rel=1e-5)


def test_a_sampler_of_theirs_with_a_miner_of_ours():
    need("faiss")
    made = samplers.TuplesToWeightsSampler(
        nn.Identity(), ours.miners.PairMarginMiner(), data(), dataloader_num_workers=0, data_device=torch.device("cpu")
    )
    assert len(list(made)) == 48
    assert trainers.MetricLossOnly is ours.trainers.MetricLossOnly
