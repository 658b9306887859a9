"""Values, gradients and index tuples of `nearfar.pml` are PML's: where our code runs, and where PML's does."""

from __future__ import annotations

import pytest
import torch
from pml_cases import CLASSES, LOSSES, MINERS, batch, check_same, make, mined, outcome, pairs, slopes
from pytorch_metric_learning import distances, reducers, regularizers
from pytorch_metric_learning import losses as their_losses
from pytorch_metric_learning import miners as their_miners

import nearfar.pml.losses._native as native
from nearfar.pml import losses, miners

every_loss = pytest.mark.parametrize("name", LOSSES)
every_miner = pytest.mark.parametrize("name", MINERS)
REDUCERS = (reducers.MeanReducer(), reducers.SumReducer(), reducers.AvgNonZeroReducer())
DISTANCES = (
    distances.CosineSimilarity(),
    distances.LpDistance(power=2),
    distances.LpDistance(normalize_embeddings=False),
    distances.DotProductSimilarity(normalize_embeddings=False),
    distances.LpDistance(p=1),
)
PATHS = pytest.mark.parametrize("small", [2**16, 0], ids=["small batches", "large batches"])


@pytest.fixture(autouse=True)
def _of_any_size(monkeypatch):
    """Our code runs for the few rows of these tests, too."""
    monkeypatch.setattr(miners.TripletMarginMiner, "least", 0)
    for name in LOSSES:
        monkeypatch.setattr(getattr(losses, name), "least", (0, 0))


def twins(name, **settings):
    """Our loss and PML's with equal settings; None where PML does not allow them."""
    if isinstance(outcome(lambda: getattr(their_losses, name)(**settings)), type):
        return None
    return getattr(losses, name)(**settings).double(), getattr(their_losses, name)(**settings).double()


def runs_here(loss, given, indices=None, *, reference=False):
    """Whether our code computes a call."""
    more = (given["ref"], given["ref_labels"]) if reference else (None, None)
    return loss._compute(given["rows"], given["labels"], indices, *more, None, None) is not None


@PATHS
@every_loss
def test_values_and_gradients(name, small, monkeypatch):
    monkeypatch.setattr(native, "SMALL", small)
    given = batch(n=18)
    settings = [{}, *({"distance": x} for x in DISTANCES), *({"reducer": x} for x in REDUCERS)]
    for each in settings if small else settings[:3]:
        made = twins(name, **each)
        if made is None:
            continue
        for reference in (False, True):
            for miner in (None, *MINERS):
                about = name, each, reference, miner
                listed = mined(miner, given, reference=reference)
                wanted = slopes(made[1], given, listed, reference=reference)
                check_same(slopes(made[0], given, listed, reference=reference), wanted, about)
                if miner is not None:
                    ours = mined(miner, given, reference=reference, library=miners)
                    assert pairs(ours) == pairs(listed), about
                    check_same(slopes(made[0], given, ours, reference=reference), wanted, about)


@every_loss
def test_our_code_runs_where_the_class_says_so(name):
    given, loss = batch(), getattr(losses, name)()
    for reference in (False, True):
        for miner in (None, *MINERS):
            listed = mined(miner, given, reference=reference)
            wanted = (loss.references or not reference) and (loss.tuples or miner is None)
            assert runs_here(loss, given, listed, reference=reference) == wanted
    loss.least = (25, 25)
    assert not runs_here(loss, given)


VARIANTS = (
    ("TripletMarginLoss", {"swap": True}),
    ("TripletMarginLoss", {"smooth_loss": True, "margin": 0.3}),
    ("TripletMarginLoss", {"swap": True, "smooth_loss": True, "distance": distances.CosineSimilarity()}),
    ("TripletMarginLoss", {"triplets_per_anchor": 3}),
    ("MarginLoss", {"learn_beta": True}),
    ("MarginLoss", {"learn_beta": True, "nu": 0.1}),
    ("MarginLoss", {"learn_beta": True, "num_classes": 6}),
    ("MarginLoss", {"beta": 0.4, "distance": distances.CosineSimilarity()}),
    ("ContrastiveLoss", {"pos_margin": 0.9, "neg_margin": 0.2, "distance": distances.CosineSimilarity()}),
    ("NTXentLoss", {"temperature": 0.01}),
    ("ContrastiveLoss", {"embedding_regularizer": regularizers.LpRegularizer(), "embedding_reg_weight": 0.3}),
    ("MarginLoss", {"embedding_regularizer": regularizers.LpRegularizer(), "embedding_reg_weight": 0.3}),
    ("SupConLoss", {"reducer": reducers.ThresholdReducer(low=0.2)}),
    ("MultiSimilarityLoss", {"reducer": reducers.MultipleReducers({"loss": reducers.SumReducer()})}),
    ("MultiSimilarityLoss", {"reducer": reducers.DoNothingReducer()}),
)


@PATHS
@pytest.mark.parametrize(("name", "settings"), VARIANTS, ids=lambda x: x if isinstance(x, str) else ",".join(x))
def test_settings(name, settings, small, monkeypatch):
    monkeypatch.setattr(native, "SMALL", small)
    mine, other = twins(name, **settings)
    for reference in (False, True):
        for indices in (None, mined("TripletMarginMiner", batch())):
            found, wanted = (slopes(loss, batch(), indices, reference=reference) for loss in (mine, other))
            check_same(found, wanted, (name, settings))


def changed(given, **more):
    return {**given, **more}


def broken(given, place):
    rows = given["rows"].clone()
    rows[place] = torch.nan
    return rows


class Rows(list):
    """A list that goes through the same steps as rows."""

    def detach(self):
        return self

    clone = requires_grad_ = detach


GIVEN = batch()
ROWS, LABELS = GIVEN["rows"], GIVEN["labels"]
BATCHES = {
    "NaN in a row": changed(GIVEN, rows=broken(GIVEN, 3)),
    "one number is NaN": changed(GIVEN, rows=broken(GIVEN, (3, 2))),
    "infinite": changed(GIVEN, rows=ROWS / 0),
    "equal rows": changed(GIVEN, rows=ROWS[torch.arange(24) // 2]),
    "rows of zeros": changed(GIVEN, rows=ROWS * (torch.arange(24) > 3)[:, None]),
    "one row": changed(GIVEN, rows=ROWS[:1], labels=LABELS[:1]),
    "two rows of a class": changed(GIVEN, rows=ROWS[:2], labels=LABELS[:1].repeat(2)),
    "two classes": changed(GIVEN, rows=ROWS[:2], labels=torch.arange(2)),
    "no rows": changed(GIVEN, rows=ROWS[:0], labels=LABELS[:0]),
    "one class": changed(GIVEN, labels=LABELS * 0),
    "no positives": changed(GIVEN, labels=torch.arange(24)),
    "labels as int32": changed(GIVEN, labels=LABELS.int()),
    "labels as uint8": changed(GIVEN, labels=LABELS.to(torch.uint8)),
    "labels as float": changed(GIVEN, labels=LABELS.double()),
    "labels as bool": changed(GIVEN, labels=LABELS > 2),
    "too few labels": changed(GIVEN, labels=LABELS[:7]),
    "labels of two columns": changed(GIVEN, labels=LABELS[:, None]),
    "a list of rows": changed(GIVEN, rows=Rows(ROWS.tolist())),
    "no labels": changed(GIVEN, labels=None),
    "rows of one axis": changed(GIVEN, rows=ROWS[:, 0]),
    "rows of three axes": changed(GIVEN, rows=ROWS[:, None]),
    "a number for rows": changed(GIVEN, rows=torch.tensor(1.0)),
    "wide reference": changed(GIVEN, ref=torch.cat([GIVEN["ref"], GIVEN["ref"]], dim=1)),
    "reference in float32": changed(GIVEN, ref=GIVEN["ref"].float()),
    "reference with NaN": changed(GIVEN, ref=GIVEN["ref"].where(torch.arange(8) > 0, torch.nan)),
    "few reference labels": changed(GIVEN, ref_labels=GIVEN["ref_labels"][:4]),
}


@every_loss
def test_batches_of_every_kind(name):
    """PML's value, NaN or error."""
    for kind, given in BATCHES.items():
        for reference in (False, True):
            loss, other = twins(name)
            found, wanted = (slopes(each, given, reference=reference) for each in (loss, other))
            if kind in ("equal rows", "rows of zeros") and not isinstance(wanted, type):
                # the gradient of a distance of 0 is a matter of rounding, as is which neighbor comes first
                found, wanted = found[:1], wanted[:1]
            check_same(found, wanted, (kind, reference), within=1e-6 if kind == "equal rows" else 1e-10)


@every_miner
def test_miners_with_batches_of_every_kind(name):
    for kind, given in BATCHES.items():
        for reference in (False, True):
            found, wanted = (
                outcome(lambda library=library: mined(name, given, reference=reference, library=library))  # noqa: B023
                for library in (miners, their_miners)
            )
            if isinstance(wanted, type):
                assert found is wanted, (kind, reference)
            elif kind != "equal rows":  # which of two equal distances is smaller is a matter of rounding
                assert pairs(found) == pairs(wanted), (kind, reference)


@every_miner
def test_miners_with_other_distances(name):
    given = batch(3)
    for distance in (*DISTANCES, Halved()):
        mine, other = (getattr(library, name)(distance=distance) for library in (miners, their_miners))
        for more in ((), (given["ref"], given["ref_labels"])):
            found, wanted = (each(given["rows"], given["labels"], *more) for each in (mine, other))
            assert pairs(found) == pairs(wanted)
            counts = [[getattr(each, f"num_{what}", None) for what in COUNTED] for each in (mine, other)]
            assert counts[0] == counts[1]


COUNTED = ("pos_pairs", "neg_pairs", "triplets")


class Halved(distances.LpDistance):
    """A user's distance, which asks for both sides."""

    def forward(self, query_emb, ref_emb):
        assert ref_emb is not None
        return super().forward(query_emb, ref_emb) / 2


def test_a_distance_of_the_users():
    for name in ("ContrastiveLoss", "TripletMarginLoss", "MultiSimilarityLoss"):
        mine, other = twins(name, distance=Halved())
        check_same(slopes(mine, batch()), slopes(other, batch()), name)


INDEX = (torch.tensor([0, 0, 1, 5]), torch.tensor([4, 4, 9, 6]), torch.tensor([2, 7, 7, 7]))
INDICES = {
    "triplets": INDEX,
    "pairs": (*INDEX[:2], INDEX[0], INDEX[2]),
    "a list": list(INDEX),
    "int32": tuple(x.int() for x in INDEX),
    "one pair of each": tuple(x[:1] for x in (*INDEX[:2], INDEX[0], INDEX[2])),
    "none": tuple(x[:0] for x in INDEX),
    "no negative pairs": (*INDEX[:2], INDEX[0][:0], INDEX[2][:0]),
    "no positive pairs": (INDEX[0][:0], INDEX[1][:0], INDEX[0], INDEX[2]),
    "from the end": (INDEX[0], INDEX[1] - 12, INDEX[2]),
    "outside": (INDEX[0], INDEX[1] + 30, INDEX[2]),
    "of both signs": (*INDEX[:2], INDEX[0], INDEX[1]),
    "uneven": (INDEX[0], INDEX[1][:2], INDEX[2]),
    "two tensors": INDEX[:2],
    "floats": tuple(x.double() for x in INDEX),
    "numbers": (1, 2, 3),
}


@PATHS
@every_loss
def test_index_tuples_of_every_kind(name, small, monkeypatch):
    """Pairs listed twice, triplets in a loss of pairs and the reverse, and what is no index tuple."""
    monkeypatch.setattr(native, "SMALL", small)
    for kind, indices in INDICES.items():
        mine, other = twins(name)
        found, wanted = (slopes(loss, batch(), indices) for loss in (mine, other))
        check_same(found, wanted, kind)


@every_loss
def test_second_derivatives(name):
    mine, other = twins(name)
    given = batch(n=30)  # PML's distances have no second derivative up to 25 rows

    def curve(loss):
        rows = given["rows"].clone().requires_grad_()
        slope = torch.autograd.grad(loss(rows, given["labels"]), rows, create_graph=True)[0]
        return torch.autograd.grad(slope.square().sum(), rows)[0]

    found, wanted = (outcome(lambda loss=loss: [curve(loss)]) for loss in (mine, other))
    check_same(found, wanted, name, within=1e-8)


@every_loss
def test_half_precision_of_losses_of_pairs_is_computed_in_float32(name):
    short = ROWS.to(torch.bfloat16).requires_grad_()
    loss = getattr(losses, name)()
    value = loss(short, LABELS)
    value.backward()
    assert value.dtype == torch.float32
    assert torch.equal(value, loss(short.detach().float(), LABELS))
    assert short.grad.dtype == torch.bfloat16
    assert torch.isfinite(short.grad).all()


def test_weights_and_ids():
    loss = losses.ContrastiveLoss()
    found = loss.explain(ROWS, LABELS)
    assert found.value.item() == pytest.approx(loss(ROWS, LABELS).item(), rel=1e-12)
    assert type(loss.robust).__name__ == "RobustLoss"
    ids, ref_ids = torch.arange(24), torch.arange(24).flip(0)
    ref, ref_labels = ROWS.flip(0) + 1e-3, LABELS.flip(0)
    same = (LABELS[:, None] == ref_labels) & (ids[:, None] != ref_ids)
    listed = (*torch.where(same), *torch.where(LABELS[:, None] != ref_labels))
    wanted = their_losses.ContrastiveLoss()(ROWS, LABELS, listed, ref, ref_labels)
    apart = loss(ROWS, LABELS, ref_emb=ref, ref_labels=ref_labels, ids=ids, ref_ids=ref_ids)
    assert apart.item() == pytest.approx(wanted.item(), rel=1e-9)
    unknown = losses.ContrastiveLoss(distance=distances.LpDistance(p=1))
    loss.least = (25, 25)  # PML is faster, but reads no ids
    torch.testing.assert_close(loss(ROWS, LABELS, ids=ids), loss(ROWS, LABELS))
    with pytest.raises(ValueError, match="ContrastiveLoss: PML computes this call, which takes no ids; leave them out"):
        unknown(ROWS, LABELS, ids=torch.arange(24))
    with pytest.raises(ValueError, match="PML computes this loss with these settings"):
        _ = unknown.robust


@pytest.mark.parametrize("name", CLASSES)
def test_class_vectors(name):
    """Every kind of batch, reducer and index tuple; the masks of PML are not made where our code runs."""
    far = {
        "a label without a vector": changed(GIVEN, labels=LABELS + 1),
        "a label below 0": changed(GIVEN, labels=LABELS - 1),
    }
    for settings in (
        {},
        *({"reducer": reducer} for reducer in REDUCERS),
        {"reducer": reducers.ClassWeightedReducer(torch.arange(6.0))},
        {"weight_regularizer": regularizers.LpRegularizer(), "embedding_regularizer": regularizers.LpRegularizer()},
        {"margin": 0.7, "scale": 3},
    ):
        mine, other = (make(getattr(library, name), **settings).double() for library in (losses, their_losses))
        for kind, given in (BATCHES | far).items() if not settings else {"usual": GIVEN}.items():
            for reference in (False, True):
                for miner in (None, "TripletMarginMiner"):
                    indices = mined(miner, GIVEN) if kind == "usual" else None
                    mine.zero_grad(), other.zero_grad()
                    found, wanted = (slopes(each, given, indices, reference=reference) for each in (mine, other))
                    check_same(found, wanted, (kind, settings))
        check_same([mine.get_logits(ROWS)], [other.get_logits(ROWS)])


@pytest.mark.parametrize("name", CLASSES)
def test_class_vectors_in_any_precision(name, monkeypatch):
    mine, other = (make(getattr(library, name)) for library in (losses, their_losses))
    for kind in (torch.float16, torch.bfloat16, torch.float32):
        found, wanted = (slopes(each, changed(GIVEN, rows=ROWS.to(kind))) for each in (mine, other))
        check_same(found, wanted, kind, within=1e-5)
        assert mine.W.dtype == other.W.dtype == kind
        with torch.autocast("cpu", torch.bfloat16):
            check_same([mine(ROWS.to(kind), LABELS)], [other(ROWS.to(kind), LABELS)])
    monkeypatch.setattr(their_losses.LargeMarginSoftmaxLoss, "get_target_mask", None)
    mine(ROWS.float(), LABELS)
    with pytest.raises(TypeError):
        other(ROWS.float(), LABELS)
