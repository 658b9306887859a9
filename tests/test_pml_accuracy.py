"""`AccuracyCalculator` of nearfar.pml against that of pytorch-metric-learning 2.9, on labels of every kind."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator as Theirs
from pytorch_metric_learning.utils.inference import CustomKNN as TheirKNN

from nearfar.pml.utils import accuracy_calculator
from nearfar.pml.utils.accuracy_calculator import AccuracyCalculator

NEIGHBORS = (
    "mean_average_precision",
    "mean_average_precision_at_r",
    "mean_reciprocal_rank",
    "precision_at_1",
    "r_precision",
)


def rows(count, seed):
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))


def drawn(count, classes, seed):
    return torch.randint(classes, (count,), generator=torch.Generator().manual_seed(seed))


def near(x, y):
    return (x - y).abs() <= 1


def shared(x, y):
    """Two labels of several columns belong together where the first agrees, or both others do."""
    return (x[..., 0] == y[..., 0]) | ((x[..., 1:] == y[..., 1:]).all(dim=-1))


def balanced():
    return {"query": rows(30, 1), "query_labels": torch.arange(5).repeat_interleave(6)}


def singletons():
    return {"query": rows(20, 2), "query_labels": torch.tensor([0] * 7 + [3] * 2 + [900] * 5 + list(range(10, 16)))}


def missing():
    """Some labels of the queries are not in the reference, and the reverse."""
    query = {"query": rows(17, 3), "query_labels": drawn(17, 6, 4)}
    return {**query, "reference": rows(40, 5), "reference_labels": drawn(40, 5, 6) + 2}


def included():
    """The reference holds the queries, and more."""
    query, labels = rows(12, 7), drawn(12, 4, 8)
    more = {"reference": torch.cat([query, rows(9, 9)]), "reference_labels": torch.cat([labels, drawn(9, 4, 10)])}
    return {"query": query, "query_labels": labels, **more, "ref_includes_query": True}


def nobody():
    """No query has a right answer."""
    return {"query": rows(6, 11), "query_labels": torch.arange(6)}


def columns():
    labels = torch.stack([drawn(24, 5, 12), drawn(24, 3, 13), drawn(24, 3, 14)], dim=1)
    return {"query": rows(24, 15), "query_labels": labels}


PATTERNS = {f.__name__: f for f in (balanced, singletons, missing, included, nobody)}
WAYS = ({}, {"avg_of_avgs": True}, {"return_per_class": True}, {"k": "max_bin_count"}, {"k": 4})


def compared(given, **settings):
    """What both say; PML's search is by its own matrix of distances."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a short k, and nobody with an answer
        mine = AccuracyCalculator(**settings).get_accuracy(**given)
    knn = TheirKNN(LpDistance(normalize_embeddings=False))
    other = Theirs(knn_func=knn, **settings).get_accuracy(**given)
    assert list(mine) == list(other)
    for name, want in other.items():
        # PML averages reciprocal ranks in float32
        close = 1e-6 if name == "mean_reciprocal_rank" else 1e-9
        assert mine[name] == pytest.approx(want, abs=close, nan_ok=True), name
        assert isinstance(want, type(mine[name]))  # of scikit-learn before 1.7, a float of NumPy
    return mine


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_same_numbers(pattern, way):
    compared(PATTERNS[pattern](), include=NEIGHBORS, **way)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_same_numbers_by_a_comparison_of_ones_own(way):
    compared(columns(), include=NEIGHBORS, label_comparison_fn=shared, **way)
    compared(missing(), exclude=("NMI", "AMI"), label_comparison_fn=near, **way)


@pytest.mark.parametrize("pattern", ["balanced", "singletons"])
def test_the_same_clusters_have_the_same_scores(pattern):
    given = PATTERNS[pattern]()

    def clusters(x, k):
        assert k == len(given["query_labels"].unique())
        return (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0.5).long()

    found = compared(given, kmeans_func=clusters, include=("NMI", "AMI"))
    assert 0 < found["NMI"] < 1


def test_everything_at_once_without_faiss(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    centers = torch.eye(6)[torch.arange(5).repeat_interleave(6)] * 50
    found = AccuracyCalculator().get_accuracy(centers + rows(30, 1), torch.arange(5).repeat_interleave(6))
    assert found == dict.fromkeys(sorted([*NEIGHBORS, "NMI", "AMI"]), pytest.approx(1))
    assert list(found) == sorted(found)


def test_arrays_and_choices_of_a_call():
    given = balanced()
    calculator = AccuracyCalculator(include=("precision_at_1", "r_precision", "NMI"))
    arrays = given["query"].numpy(), given["query_labels"].numpy()
    found = calculator.get_accuracy(*arrays, include=("r_precision", "precision_at_1"), exclude=("precision_at_1",))
    assert list(found) == calculator.get_curr_metrics() == ["r_precision"]
    assert found["r_precision"] == compared(given, include=("r_precision",))["r_precision"]


@pytest.mark.parametrize("kind", [AccuracyCalculator, Theirs], ids=["ours", "theirs"])
def test_a_metric_of_ones_own(kind):
    seen = {}

    class Mine(kind):
        def calculate_precision_at_2(self, knn_labels, query_labels, **kwargs):
            seen.update(kwargs, knn_labels=knn_labels)
            return accuracy_calculator.precision_at_k(
                knn_labels, query_labels[:, None], 2, self.avg_of_avgs, self.return_per_class, self.label_comparison_fn
            )

        def calculate_shape(self, cluster_labels, query, **kwargs):
            return len(cluster_labels) / len(query)

        def requires_knn(self):
            return [*super().requires_knn(), "precision_at_2"]

        def requires_clustering(self):
            return [*super().requires_clustering(), "shape"]

    settings = {"kmeans_func": lambda x, k: torch.zeros(len(x)), "knn_func": TheirKNN(LpDistance())}
    found = Mine(include=("precision_at_2", "shape"), **settings).get_accuracy(**balanced())
    assert found["shape"] == 1
    assert found["precision_at_2"] == pytest.approx(
        Theirs(include=("precision_at_1",), **settings).get_accuracy(**balanced())["precision_at_1"], abs=0.2
    )
    assert seen["knn_labels"].shape == (30, 29)
    wanted = {"query", "reference", "reference_labels", "ref_includes_query", "label_comparison_fn", "label_counts"}
    assert {*wanted, "knn_distances", "lone_query_labels", "not_lone_query_mask", "cluster_labels"} <= {*seen}


def test_fewer_neighbors_are_searched_where_nobody_looks_farther():
    depths = []

    def knn(query, k, reference, ref_includes_query):
        depths.append(k)
        return TheirKNN(LpDistance())(query, k, reference, ref_includes_query)

    for include in (("precision_at_1",), ("r_precision", "precision_at_1"), ("mean_reciprocal_rank",)):
        AccuracyCalculator(include=include, knn_func=knn).get_accuracy(**balanced())
    assert depths == [1, 6, 29]


def test_large_labels_stay_apart():
    """PML converts labels to float32, where these two are one."""
    labels = torch.tensor([2**24, 2**24 + 1] * 3)
    x = torch.eye(6)
    assert AccuracyCalculator(include=("r_precision",)).get_accuracy(x, labels)["r_precision"] < 1


def test_a_label_that_does_not_match_itself_loses_no_right_answer():
    """By a slow loop: each query has right answers in other views of its class; PML counts one too few."""
    labels = torch.tensor([[0, 0], [0, 1], [0, 1], [1, 0], [1, 1], [1, 1]])
    x = rows(6, 21)

    def other_view(a, b):
        return (a[..., 0] == b[..., 0]) & (a[..., 1] != b[..., 1])

    found = AccuracyCalculator(include=("r_precision",), label_comparison_fn=other_view).get_accuracy(x, labels)
    wanted = []
    for i in range(6):
        order = [j for j in torch.cdist(x, x)[i].argsort().tolist() if j != i]
        right = [j for j in range(6) if bool(other_view(labels[i], labels[j]))]
        wanted.append(len({*order[: len(right)]} & {*right}) / len(right))
    assert found["r_precision"] == pytest.approx(np.mean(wanted), abs=1e-12)


def test_what_cannot_be_is_told_in_one_sentence():
    with pytest.raises(ValueError, match="no metric 'precision_at_2'; did you mean 'precision_at_1'"):
        AccuracyCalculator(include=("precision_at_2",))
    with pytest.raises(TypeError, match="must be tuples of names, but 'NMI' came"):
        AccuracyCalculator(exclude="NMI")
    with pytest.raises(ValueError, match="exclude each other"):
        AccuracyCalculator(avg_of_avgs=True, return_per_class=True)
    for k in (0, -1, 2.5, "all", True):
        with pytest.raises(ValueError, match="k must be a whole number above zero, None or 'max_bin_count'"):
            AccuracyCalculator(k=k)
    with pytest.raises(ValueError, match=r"pass exclude=\('AMI', 'NMI'\)"):
        AccuracyCalculator(label_comparison_fn=near)
    with pytest.raises(ValueError, match="one label for each row, but 5 came for 30"):
        AccuracyCalculator().get_accuracy(rows(30, 1), torch.arange(5))
    with pytest.raises(ValueError, match="must begin with the queries"):
        AccuracyCalculator().get_accuracy(rows(3, 1), torch.arange(3), rows(4, 2), torch.arange(4), True)
    with pytest.warns(UserWarning, match=r"would need 6 neighbors.*pass k='max_bin_count'"):
        AccuracyCalculator(include=("r_precision",), k=2).get_accuracy(**balanced())
    with pytest.warns(UserWarning, match="no query has a right answer"):
        found = AccuracyCalculator(include=("r_precision",)).get_accuracy(**nobody())
    assert math.isnan(found["r_precision"])
