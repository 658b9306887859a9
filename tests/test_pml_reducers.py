"""Reducers of nearfar.pml, called and as arguments of every loss, against those of pytorch-metric-learning."""

from __future__ import annotations

import copy

import pytest
import pytorch_metric_learning as theirs
import torch
from pytorch_metric_learning import losses as _  # noqa: F401 - loads them
from pytorch_metric_learning import reducers
from test_pml import CLASSES, SIZES, TOLERANCE, WIDTH, batch

import nearfar as nf
import nearfar.pml as ours

NAMES = (
    "ContrastiveLoss", "TripletMarginLoss", "MultiSimilarityLoss", "LiftedStructureLoss",
    "GeneralizedLiftedStructureLoss", "NPairsLoss", "AngularLoss", "NTXentLoss", "SupConLoss", "CircleLoss",
    "MarginLoss", "ProxyNCALoss", "ProxyAnchorLoss", "ArcFaceLoss",
)  # fmt: skip
TRIPLETS = ("TripletMarginLoss", "MarginLoss")
PROXIES = ("ProxyNCALoss", "ProxyAnchorLoss", "ArcFaceLoss")
WEIGHTS = torch.linspace(0.5, 2.0, CLASSES)

REDUCERS = {
    "threshold": lambda m: m.reducers.ThresholdReducer(low=0.1, high=1.5),
    "high": lambda m: m.reducers.ThresholdReducer(high=0.9),
    "anchor": lambda m: m.reducers.PerAnchorReducer(m.reducers.AvgNonZeroReducer()),
    "class": lambda m: m.reducers.ClassWeightedReducer(WEIGHTS),
    "nonzero": lambda m: m.reducers.AvgNonZeroReducer(),
    "mean, counted": lambda m: m.reducers.MeanReducer(collect_stats=True),
    "sum, counted": lambda m: m.reducers.SumReducer(collect_stats=True),
    "several": lambda m: m.reducers.MultipleReducers(
        {"pos_loss": m.reducers.SumReducer(), "loss": m.reducers.ThresholdReducer(low=0.3)},
        default_reducer=m.reducers.MeanReducer(),
    ),
}


def made(library, name, reducer, **more):
    """A loss of either library with a reducer of its own; class vectors are the same in both."""
    args = (CLASSES, WIDTH) if name in PROXIES else ()
    if name == "MarginLoss":
        more = {"learn_beta": True, "nu": 0.3, "num_classes": CLASSES, **more}
    torch.manual_seed(3)
    return getattr(library.losses, name)(*args, reducer=reducer, **more).double()


def rows(name, seed=4, sizes=SIZES[1]):
    embeddings, labels = batch(seed, sizes)
    if name == "AngularLoss":  # PML leaves negatives as long as they are
        embeddings = torch.nn.functional.normalize(embeddings.detach(), dim=1).requires_grad_()
    return embeddings, labels


class Flat:
    """PML's loss with its losses as a list: some of PML's are columns [k, 1], which its reducers spread to [k, k]."""

    def __init__(self, name, reducer):
        self.loss, self.reducer = made(theirs, name, theirs.reducers.DoNothingReducer()), reducer

    def __call__(self, embeddings, labels, *more):
        parts = self.loss(embeddings, labels, *more)
        for part in parts.values():
            if isinstance(part["losses"], torch.Tensor) and part["losses"].ndim == 2:
                part["losses"] = part["losses"].flatten()
        return self.reducer(parts, embeddings, labels)


COLUMNS = (
    "MultiSimilarityLoss", "LiftedStructureLoss", "GeneralizedLiftedStructureLoss", "AngularLoss", "CircleLoss",
)  # fmt: skip


def of_pml(name, reducer):
    made_of = REDUCERS[reducer](theirs)
    flat = name in COLUMNS and reducer in ("anchor", "class")
    return Flat(name, made_of) if flat else made(theirs, name, made_of)


def agree(mine, other, embeddings, labels, *more, gradient=True, close=TOLERANCE):
    found, wanted = mine(embeddings, labels, *more), other(embeddings, labels, *more)
    assert found.item() == pytest.approx(wanted.item(), rel=close, abs=close)
    if gradient and wanted.requires_grad:
        slopes = [torch.autograd.grad(x, embeddings, retain_graph=True)[0] for x in (found, wanted)]
        torch.testing.assert_close(*slopes, rtol=1e-7, atol=close)


def close(name):
    return 1e-7 if name in ("CircleLoss", "NTXentLoss", "ProxyNCALoss", "LiftedStructureLoss") else TOLERANCE


@pytest.mark.parametrize("reducer", REDUCERS)
@pytest.mark.parametrize("name", NAMES)
def test_as_an_argument(name, reducer):
    if reducer == "anchor" and name in TRIPLETS:
        with pytest.raises(TypeError, match="PerAnchorReducer"):
            made(ours, name, REDUCERS[reducer](ours))(*rows(name))
        return
    if reducer == "class" and name == "ProxyAnchorLoss":
        pytest.skip("in PML the weights go by the labels of rows, the losses by classes")
    mine, other = made(ours, name, REDUCERS[reducer](ours)), of_pml(name, reducer)
    for tuple_of in (None, "pairs", "triplets"):
        embeddings, labels = rows(name)
        more = ()
        if tuple_of is not None:
            if name == "NPairsLoss":
                continue
            miner = theirs.miners.MultiSimilarityMiner(0.4) if tuple_of == "pairs" else theirs.miners.BatchHardMiner()
            more = (miner(embeddings, labels),)
        # the angular loss of unit rows has PML's value, and another gradient: it divides by all norms
        agree(mine, other, embeddings, labels, *more, gradient=name != "AngularLoss", close=close(name))


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name not in (*PROXIES, "NPairsLoss", "LiftedStructureLoss")]
)
@pytest.mark.parametrize("reducer", ["threshold", "mean, counted", "class"])
def test_with_a_reference(name, reducer):
    embeddings, labels = rows(name)
    reference, names = rows(name, 5, SIZES[0])
    mine, other = made(ours, name, REDUCERS[reducer](ours)), of_pml(name, reducer)
    args = (embeddings, labels, None, reference.detach(), names)
    assert mine(*args).item() == pytest.approx(other(*args).item(), rel=close(name))


@pytest.mark.parametrize("name", NAMES)
def test_a_reducer_of_pml_is_taken_for_the_same_of_ours(name):
    embeddings, labels = rows(name)
    for make in REDUCERS.values():
        mine = made(ours, name, make(theirs))
        kinds = {type(each).__module__ for each in mine.reducer.modules() if "Reducer" in type(each).__name__}
        assert kinds == {"nearfar.pml.reducers"}
    fast = made(ours, name, theirs.reducers.SumReducer())
    assert fast._factored
    assert fast(embeddings, labels).item() == made(ours, name, ours.reducers.SumReducer())(embeddings, labels).item()


@pytest.mark.parametrize("name", NAMES)
def test_what_pml_classes_say_about_themselves(name):
    regularizers = {"embedding_regularizer": ours.regularizers.LpRegularizer()}
    if name in PROXIES:
        regularizers["weight_regularizer"] = ours.regularizers.LpRegularizer()
    for more in ({}, regularizers):
        args = (CLASSES, WIDTH) if name in PROXIES else ()
        mine, other = (getattr(m.losses, name)(*args, **more) for m in (ours, theirs))
        assert mine.sub_loss_names() == other.sub_loss_names()
        for part in ("get_default_distance", "get_default_reducer"):
            found, wanted = getattr(mine, part)(), getattr(other, part)()
            assert type(found).__name__ == type(wanted).__name__
        settings = ("p", "power", "normalize_embeddings", "is_inverted")
        found, wanted = mine.get_default_distance(), other.get_default_distance()
        assert [getattr(found, k) for k in settings] == [getattr(wanted, k) for k in settings]
        assert type(mine.reducer).__name__ == type(other.reducer).__name__
        assert not mine.collect_stats
        mine.reset_stats()


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_done(name):
    """`DoNothingReducer` returns the parts: the same names, kinds, and losses as PML's."""
    embeddings, labels = rows(name)
    mine, other = (made(m, name, m.reducers.DoNothingReducer()) for m in (ours, theirs))
    found, wanted = mine(embeddings, labels), other(embeddings, labels)
    assert list(found) == list(wanted)
    for key, part in wanted.items():
        assert found[key]["reduction_type"] == part["reduction_type"]
        torch.testing.assert_close(
            torch.as_tensor(found[key]["losses"]).flatten(), torch.as_tensor(part["losses"]).flatten(),
            rtol=1e-6, atol=1e-9, check_dtype=False,
        )  # fmt: skip
        mine_at, other_at = (
            torch.stack(tuple(x)) if isinstance(x, tuple) else x for x in (found[key]["indices"], part["indices"])
        )
        assert other_at is None or torch.equal(mine_at, other_at)


@pytest.mark.parametrize("reducer", [*REDUCERS, "divisor"])
@pytest.mark.parametrize("kind", ["element", "pos_pair", "neg_pair", "triplet", "zero", "reduced"])
def test_called(reducer, kind):
    make = REDUCERS.get(reducer, lambda m: m.reducers.DivisorReducer(collect_stats=True))
    embeddings, labels = batch(3, SIZES[0])
    values = torch.rand(20, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True) * 2
    place = torch.randperm(100, generator=torch.Generator().manual_seed(2))[:20]
    a, b = place // 10, place % 10
    at = {"element": a, "triplet": (a, b, b.flip(0))}.get(kind, (a, b))
    part = {"losses": values, "indices": at, "reduction_type": kind, "divisor": 7}
    if kind == "zero":
        part = {"losses": 0, "indices": None, "reduction_type": "already_reduced"}
    if kind == "reduced":
        part = {"losses": values.mean(), "indices": None, "reduction_type": "already_reduced"}
    mine, other = make(ours), make(theirs)
    if reducer == "anchor" and kind == "triplet":
        with pytest.raises(TypeError, match="PerAnchorReducer"):
            mine({"loss": part}, embeddings, labels)
        return
    found, wanted = (each({"loss": part}, embeddings, labels) for each in (mine, other))
    torch.testing.assert_close(found, wanted)
    if mine.collect_stats:
        for name in mine._record_these_stats:
            assert getattr(mine, name) == getattr(other, name)


def test_numbers_that_a_threshold_counts():
    part = {"losses": torch.tensor([0.1, 0.5, 0.7, 2.0]), "indices": torch.arange(4), "reduction_type": "element"}
    reducer = ours.reducers.ThresholdReducer(low=0.2, high=1.0, collect_stats=True)
    assert reducer({"loss": part}, torch.zeros(4, 2), torch.zeros(4)).item() == pytest.approx(0.6)
    assert (reducer.losses_size, reducer.num_past_filter, reducer.num_above_low, reducer.num_below_high) == (4, 2, 3, 2)
    reducer.reset_stats()
    assert reducer.num_past_filter == 0
    assert not hasattr(ours.reducers.ThresholdReducer(low=0.2), "num_past_filter")


def test_wrong_parts_are_one_sentence():
    reducer, rows_, labels = ours.reducers.MeanReducer(), torch.zeros(3, 2), torch.zeros(3)
    part = {"losses": torch.ones(3), "indices": torch.arange(3), "reduction_type": "element"}
    for parts, says in (
        ({"a": part, "b": part}, "MeanReducer: it reduces one part of a loss, but 2 came"),
        ({"a": {**part, "reduction_type": "row"}}, "MeanReducer: reduction_type must be"),
        ({"a": {**part, "indices": torch.arange(2)}}, "MeanReducer: losses and indices of the kind element"),
        ({"a": {**part, "reduction_type": "pos_pair"}}, "MeanReducer: losses and indices of the kind pos_pair"),
    ):
        with pytest.raises(ValueError, match=says):
            reducer(parts, rows_, labels)
    with pytest.raises(ValueError, match="this loss has no divisor"):
        ours.reducers.DivisorReducer()({"a": part}, rows_, labels)


class Largest(ours.reducers.BaseReducer):
    def element_reduction(self, losses, loss_indices, embeddings, labels):
        return losses.max()


class LargestOfTheirs(reducers.BaseReducer):
    def element_reduction(self, losses, loss_indices, embeddings, labels):
        return losses.max()

    pos_pair_reduction = neg_pair_reduction = triplet_reduction = element_reduction


class Halved(ours.reducers.MeanReducer):
    def element_reduction(self, losses, *rest):
        return losses.mean() / 2


@pytest.mark.parametrize("name", NAMES)
def test_a_reducer_of_ones_own(name):
    embeddings, labels = rows(name)
    wanted = made(theirs, name, LargestOfTheirs())(embeddings, labels)
    for reducer in (Largest(), LargestOfTheirs()):
        mine = made(ours, name, reducer)
        assert not hasattr(mine, "robust")
        assert mine(embeddings, labels).item() == pytest.approx(wanted.item(), rel=1e-6)
    whole, half = (made(ours, name, kind())(embeddings, labels) for kind in (ours.reducers.MeanReducer, Halved))
    if name != "MarginLoss":
        assert half.item() == pytest.approx(whole.item() / 2)


def test_one_of_ours_in_a_loss_of_pml():
    embeddings, labels = rows("")
    mine, other = (
        theirs.losses.NCALoss(reducer=m.reducers.ThresholdReducer(low=0.2))(embeddings, labels) for m in (ours, theirs)
    )
    assert mine.item() == pytest.approx(other.item())


def test_copies_do_not_share_a_reducer():
    reducer = ours.reducers.AvgNonZeroReducer(collect_stats=True)
    loss = ours.losses.ContrastiveLoss(reducer=reducer)
    assert loss.reducer.reducers["pos_loss"] is not reducer
    embeddings, labels = rows("")
    loss(embeddings, labels)
    other = theirs.losses.ContrastiveLoss(reducer=theirs.reducers.AvgNonZeroReducer(collect_stats=True))
    other(embeddings, labels)
    for key in ("pos_loss", "neg_loss"):
        found, wanted = loss.reducer.reducers[key], other.reducer.reducers[key]
        assert (found.losses_size, found.num_past_filter) == (wanted.losses_size, wanted.num_past_filter)
    assert copy.deepcopy(loss)(embeddings, labels).item() == loss(embeddings, labels).item()


@pytest.mark.parametrize("name", NAMES)
def test_numbers_of_a_loss(name):
    """What PML collects, and the names that its record keeper logs."""
    embeddings, labels = rows(name)
    mine, other = (made(m, name, None, collect_stats=True) for m in (ours, theirs))
    found, wanted = mine(embeddings, labels), other(embeddings, labels)
    assert found.item() == pytest.approx(wanted.item(), rel=close(name))
    wanted_names = getattr(other, "_record_these_stats", [])
    assert mine._record_these_stats == wanted_names
    for stat in wanted_names:
        assert getattr(mine, stat) == pytest.approx(getattr(other, stat))
    assert set(mine._record_these) <= set(getattr(other, "_record_these", ()))
    mine.reset_stats()
    assert all(getattr(mine, stat) == 0 for stat in wanted_names)


@pytest.mark.parametrize("name", ["TripletMarginLoss", "NTXentLoss", "SupConLoss", "LiftedStructureLoss", "MarginLoss"])
def test_a_batch_without_a_pair_is_said_once(name):
    loss = made(ours, name, ours.reducers.ThresholdReducer(low=0.1))
    embeddings = torch.randn(4, WIDTH, dtype=torch.float64, requires_grad=True)
    with pytest.warns(nf.DegenerateBatchWarning, match=f"{name}: this batch has nothing to learn from") as said:
        values = [loss(embeddings, torch.arange(4)) for _ in range(2)]
    assert len(said) == 1
    values[0].backward()
    assert not embeddings.grad.any()


def test_what_lists_cannot_tell_is_refused():
    embeddings, labels = rows("")
    relation = nf.Relation.from_labels(labels, weights=torch.arange(1.0, len(labels) + 1))
    ours.losses.ContrastiveLoss()(embeddings, relation)
    for name in ("ContrastiveLoss", "TripletMarginLoss", "MultiSimilarityLoss"):
        with pytest.raises(ValueError, match=f"{name}: a Relation with weights or representatives needs a recipe"):
            made(ours, name, ours.reducers.ThresholdReducer(low=0.1))(embeddings, relation)
    plain = made(ours, "ContrastiveLoss", ours.reducers.ThresholdReducer(low=0.1))
    assert plain(embeddings, nf.Relation.from_labels(labels)).item() == plain(embeddings, labels).item()
