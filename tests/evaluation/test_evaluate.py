"""`evaluate` against the oracle, by hand, against scikit-learn and pytorch-metric-learning, on random and real data."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from needs import need
from oracles import retrieval as oracle
from retrieval_cases import PROBLEMS, judged, problem

import nearfar as nf

DATA = Path(__file__).parents[2] / ".." / "shared" / "data"
torch.set_num_threads(1)


def stored(name):
    if not (DATA / name).is_file():
        pytest.skip(f"the data file {name} is not at ../shared/data beside the repository")
    return np.load(DATA / name)


def calculator(x, y):
    """What pytorch-metric-learning makes of it, with its own search instead of faiss."""
    from pytorch_metric_learning.distances import CosineSimilarity
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
    from pytorch_metric_learning.utils.inference import CustomKNN

    include = ("precision_at_1", "r_precision", "mean_average_precision_at_r")
    search = CustomKNN(CosineSimilarity(), batch_size=512)
    judge = AccuracyCalculator(include=include, device=torch.device("cpu"), knn_func=search, k="max_bin_count")
    return judge.get_accuracy(x, y)


@pytest.mark.parametrize("kind", PROBLEMS)
@pytest.mark.parametrize("ties", ["place", "favorable"])
def test_equals_the_oracle(kind, ties):
    x, y, g, z = problem(kind, seed=3)
    found = nf.evaluate(x, y, ks=(1, 3, 7), ref_emb=g, ref_labels=z, ties=ties, resamples=0)
    S, y, names, itself = judged(x, y, g, z, "cosine")
    for k in (1, 3, 7):
        assert found.recall[k] == pytest.approx(oracle.recall_at_k(S, y, names, k, itself, ties))
    assert found.precision_at_1 == found.recall[1]
    assert found.mrr == pytest.approx(oracle.reciprocal_rank(S, y, names, itself, ties))
    assert found.r_precision == pytest.approx(oracle.r_precision(S, y, names, itself))
    assert found.map_at_r == pytest.approx(oracle.map_at_r(S, y, names, itself))
    counted = oracle.counted(S, y, names, itself)
    assert found.queries == len(counted)
    assert found.lone == len(y) - len(counted)
    assert found.classes == len({y[i] for i in counted})
    for row in found.per_class:
        mine = [i for i in counted if y[i] == row.label]
        assert row.queries == len(mine)
        assert row.map_at_r == pytest.approx(np.mean([oracle.ap_at_r_of(S, y, names, i, itself) for i in mine]))
        if ties == "place":
            hits = [oracle.rank(S, y, names, i, itself) == 1 for i in mine]
            assert row.recall_at_1 == pytest.approx(np.mean(hits))
    assert [row.recall_at_1 for row in found.per_class] == sorted(row.recall_at_1 for row in found.per_class)


def test_a_tie_by_hand():
    """The query's right and wrong neighbor score the same; the wrong one comes first."""
    x = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0], [-1.0, -1.0], [-1.0, -1.0]])
    y = torch.tensor([0, 1, 0, 1, 2])
    by_place, favorable = (nf.evaluate(x, y, ks=(1,), ties=ties).per_query.rank[0] for ties in ("place", "favorable"))
    assert (int(by_place), int(favorable)) == (2, 1)


def test_lone_queries_by_hand():
    """Class 2 has one sample: no right answer, left out of the mean; it still stands in the others' way."""
    x = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.95, 0.05], [0.0, 1.0]])
    found = nf.evaluate(x, torch.tensor([0, 0, 2, 0]), ks=(1, 2))
    assert (found.lone, found.queries, found.classes) == (1, 3, 1)
    assert found.recall == {1: pytest.approx(1 / 3), 2: pytest.approx(1.0)}


def test_query_and_gallery_by_hand():
    """Class 7 is not in the gallery: those queries are lone. A gallery row equal to a query is fair game."""
    x, g = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, -1.0]])
    found = nf.evaluate(x, torch.tensor([1, 7]), ks=(1, 2), ref_emb=g, ref_labels=torch.tensor([2, 1, 1]))
    assert (found.lone, found.queries) == (1, 1)
    assert found.recall == {1: 0.0, 2: 1.0}
    assert found.r_precision == 0.5
    assert found.map_at_r == 0.25


def test_random_data_agrees_with_pml():
    need("pytorch_metric_learning")
    torch.manual_seed(0)
    y = torch.randint(0, 40, (400,))
    y[:3] = torch.arange(1000, 1003)  # lone: both leave them out
    x = torch.nn.functional.one_hot(y % 64, 64).float() + 0.7 * torch.randn(400, 64)
    ours, theirs = nf.evaluate(x, y), calculator(x, y)
    assert ours.precision_at_1 == pytest.approx(theirs["precision_at_1"])
    assert ours.r_precision == pytest.approx(theirs["r_precision"])
    assert ours.map_at_r == pytest.approx(theirs["mean_average_precision_at_r"])


def test_cub_features_agree_with_pml():
    data = stored("cub200_lite0_test.npz")
    x, y = torch.from_numpy(data["x"]).float(), torch.from_numpy(data["y"]).long()
    ours = nf.evaluate(x, y)
    assert round(100 * ours.recall[1], 1) == 54.2
    theirs = calculator(x, y)
    assert ours.precision_at_1 == pytest.approx(theirs["precision_at_1"], abs=1e-9)
    assert ours.r_precision == pytest.approx(theirs["r_precision"], abs=1e-5)
    assert ours.map_at_r == pytest.approx(theirs["mean_average_precision_at_r"], abs=1e-5)


def test_omniglot_pixels_agree_with_pml():
    """659 characters x 20 drawings, less their mean image (as drawn, R@1 is 29.0)."""
    data = stored("omniglot_28.npz")
    labels = data["labels"].astype(np.int64)
    test = ~data["background"][labels]
    x = torch.from_numpy(np.unpackbits(data["images"][test], axis=1)).float()
    x, y = x - x.mean(dim=0), torch.from_numpy(labels[test])
    ours = nf.evaluate(x, y, resamples=0)
    assert ours.queries == 659 * 20
    assert round(100 * ours.recall[1], 1) == 29.5
    theirs = calculator(x, y)
    assert ours.precision_at_1 == pytest.approx(theirs["precision_at_1"], abs=1e-9)
    assert ours.r_precision == pytest.approx(theirs["r_precision"], abs=1e-5)
    assert ours.map_at_r == pytest.approx(theirs["mean_average_precision_at_r"], abs=1e-5)


def test_clustering_agrees_with_sklearn():
    from sklearn.metrics import adjusted_mutual_info_score, normalized_mutual_info_score

    torch.manual_seed(0)
    y = torch.arange(120) // 10
    x = torch.randn(12, 8)[y] + 0.8 * torch.randn(120, 8)
    found = nf.evaluate(x, y, clustering=True)
    unit = torch.nn.functional.normalize(x)
    assignment = nf.evaluation.k_means(unit, 12).assignment.numpy()
    assert found.nmi == pytest.approx(normalized_mutual_info_score(y, assignment))
    assert found.ami == pytest.approx(adjusted_mutual_info_score(y, assignment))
    assert found.f1 == pytest.approx(oracle.pair_f1(assignment, y.tolist()))
    spread = found.intervals["nmi over starts"]
    assert spread.low <= found.nmi <= spread.high
    assert "nmi" not in found.intervals


def test_clustering_only_on_request():
    found = nf.evaluate(torch.randn(20, 3), torch.arange(20) // 4)
    assert (found.nmi, found.ami, found.f1) == (None, None, None)
    assert not {"nmi", "ami", "f1"} & found.scores().keys()


def small(**given):
    torch.manual_seed(1)
    y = torch.arange(60) // 6
    return nf.evaluate(torch.randn(10, 5)[y] + 0.6 * torch.randn(60, 5), y, **given)


def test_results_as_a_dictionary():
    found = small(clustering=True)
    record = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert record["scores"]["recall@1"] == found.recall[1]
    assert record["scores"]["nmi"] == found.nmi
    assert record["intervals"]["map_at_r"]["low"] == found.intervals["map_at_r"].low
    assert len(record["per_class"]) == 10
    assert record["unit"] == "class"


def test_results_as_a_frame():
    need("pandas")
    found = small(clustering=True)
    frame = found.to_frame()
    assert frame.loc["recall@2", "value"] == found.recall[2]
    assert frame.loc["mrr", "high"] == found.intervals["mrr"].high
    assert frame["low"].notna()["r_precision"]


def test_a_frame_without_pandas_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="use to_dict"):
        small().to_frame()


def test_repr_reads_well():
    lines = repr(small()).splitlines()
    assert lines[0] == "60 queries of 10 classes; 95% intervals over classes"
    assert lines[1].split()[0] == "recall@1"
    assert "[" in lines[1]
    assert "lone" in repr(nf.evaluate(torch.eye(3), torch.tensor([0, 0, 1])))
    assert "over queries" in repr(small(unit="query"))


def test_intervals_hold_the_value_and_stay_in_range():
    found = small()
    for name, interval in found.intervals.items():
        assert interval.value == pytest.approx(found.scores()[name])
        assert 0 <= interval.low <= interval.value <= interval.high <= 1
        assert (interval.error > 0) == (interval.value < 1)
    assert small(seed=1).intervals != found.intervals
    assert small().intervals == found.intervals
    assert small(resamples=0).intervals == {}


def test_one_class_has_scores_and_no_intervals():
    found = nf.evaluate(torch.randn(6, 3), torch.zeros(6, dtype=torch.long))
    assert found.recall[1] == 1.0
    assert found.map_at_r == 1.0
    assert found.intervals == {}
    assert "no intervals" in repr(found)
    assert nf.evaluate(torch.randn(6, 3), torch.zeros(6, dtype=torch.long), unit="query").intervals


def test_k_larger_than_the_gallery_finds_everything():
    found = nf.evaluate(torch.randn(10, 3), torch.arange(10) // 2, ks=(1, 9, 1000))
    assert found.recall[9] == found.recall[1000] == 1.0


def test_the_worst_ten_come_first():
    torch.manual_seed(0)
    y = torch.arange(200) // 10
    found = nf.evaluate(torch.nn.functional.one_hot(y, 20) * (y[:, None] > 4) + 0.2 * torch.randn(200, 20), y)
    assert {row.label for row in found.worst[:5]} == {0, 1, 2, 3, 4}
    assert len(found.worst) == 10


def test_order_of_samples_and_names_of_classes_do_not_matter():
    torch.manual_seed(0)
    y = torch.arange(100) // 5
    x = torch.randn(20, 6)[y] + torch.randn(100, 6)
    order = torch.randperm(100)
    a, b = nf.evaluate(x, y, resamples=0), nf.evaluate(x[order], 7 * y[order] - 50, resamples=0)
    assert a.scores() == pytest.approx(b.scores())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"embeddings": torch.tensor([[1.0, 0], [torch.nan, 0], [0, 1]])}, "rows 1"),
        ({"labels": torch.tensor([0, 1, 2])}, "no query has a right answer"),
        ({"ks": (0,)}, "whole numbers from 1 on"),
        ({"ks": ()}, "whole numbers from 1 on"),
        ({"ks": (1.5,)}, "whole numbers from 1 on"),
        ({"unit": "classes"}, "did you mean 'class'"),
        ({"similarity": "euclid"}, "did you mean 'euclidean'"),
        ({"ref_labels": torch.tensor([1])}, "belong together"),
    ],
)
def test_errors(given, words):
    with pytest.raises((ValueError, TypeError)) as error:
        nf.evaluate(**{"embeddings": torch.eye(3)[:, :2], "labels": torch.tensor([0, 0, 1]), **given})
    assert words in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_compare_by_hand():
    """b is right everywhere, a nowhere."""
    y = torch.arange(40) // 2
    good, bad = torch.eye(20)[y], torch.eye(40)
    a, b = nf.evaluate(bad, y), nf.evaluate(good, y)
    better, worse, same = nf.compare(a, b), nf.compare(b, a), nf.compare(b, b, score="map_at_r")
    assert (better.verdict, worse.verdict, same.verdict) == ("better", "worse", "cannot tell")
    assert better.difference.value == pytest.approx(better.b - better.a)
    assert "better" in str(better)
    assert "recall@1" in str(better)


def test_compare_looks_at_queries_counted_in_both():
    """With other galleries other queries are lone; only common ones are compared."""
    x, y = torch.eye(4), torch.tensor([0, 1, 2, 3])
    a = nf.evaluate(x, y, ref_emb=x[:3], ref_labels=y[:3])
    b = nf.evaluate(x, y, ref_emb=x[1:], ref_labels=y[1:])
    assert (a.lone, b.lone) == (1, 1)
    found = nf.compare(a, b)
    assert (found.a, found.b) == (1.0, 1.0)


def test_compare_with_one_class_cannot_tell():
    x, y = torch.randn(6, 3), torch.zeros(6, dtype=torch.long)
    assert nf.compare(nf.evaluate(x, y), nf.evaluate(x, y)).verdict == "cannot tell"


def test_compare_errors():
    a, b = nf.evaluate(torch.eye(4), torch.tensor([0, 0, 1, 1])), nf.evaluate(torch.eye(4), torch.tensor([0, 1, 0, 1]))
    with pytest.raises(ValueError, match="same queries"):
        nf.compare(a, b)
    for score in ("recal@1", "nmi", "recall@0", "recall@x"):
        with pytest.raises(ValueError, match="must be one of recall@K"):
            nf.compare(a, a, score=score)


@pytest.mark.parametrize("kind", ["random", "gallery"])
@pytest.mark.parametrize("similarity", ["cosine", "euclidean"])
def test_the_curve_is_the_evaluation_of_each_prefix(kind, similarity):
    x, y, g, z = problem(kind, seed=3)
    ref = {} if g is None else {"ref_emb": g, "ref_labels": z}
    found = nf.evaluate(x, y, similarity=similarity, dims=(3, 1, 3), **ref)
    assert list(found.curve) == [1, 3]
    for width, each in found.curve.items():
        cut = {} if g is None else {"ref_emb": g[:, :width].clone(), "ref_labels": z}
        alone = nf.evaluate(x[:, :width].clone(), y, similarity=similarity, **cut)
        assert each.to_dict() == alone.to_dict()
    whole = nf.evaluate(x, y, similarity=similarity, **ref)
    assert found.to_dict() == whole.to_dict() | {"curve": {str(w): e.to_dict() for w, e in found.curve.items()}}
    assert json.loads(json.dumps(found.to_dict()))["curve"]["3"]["intervals"]["map_at_r"]["low"] >= 0


@pytest.mark.parametrize("dims", [(0,), (99,), (True,), (2.0,)])
def test_widths_that_the_rows_do_not_have(dims):
    with pytest.raises(ValueError, match=r"^evaluate: dims must be widths from 1 to 2, that of the rows, but came as"):
        nf.evaluate(torch.eye(2), [0, 0], dims=dims)
