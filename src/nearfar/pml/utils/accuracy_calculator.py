"""PML's `AccuracyCalculator` over `nearfar.evaluation`: exact search and k-means without faiss."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nearfar._utils.checks import nearest
from nearfar.evaluation.clustering import demand_scores
from nearfar.pml._theirs import theirs
from nearfar.pml.utils._metrics import (
    Comparison,
    Counts,
    Score,
    get_label_match_counts,
    maybe_get_avg_of_avgs,
    mean_average_precision,
    mean_reciprocal_rank,
    not_lone,
    nothing,
    precision_at_k,
    r_precision,
)
from nearfar.pml.utils._search import FaissKMeans, FaissKNN, home

__all__ = [
    "AccuracyCalculator",
    "get_label_match_counts",
    "maybe_get_avg_of_avgs",
    "mean_average_precision",
    "mean_reciprocal_rank",
    "precision_at_k",
    "r_precision",
]

__getattr__, __dir__ = theirs(__name__)

METHOD = "calculate_"
AT_R = ("mean_average_precision_at_r", "r_precision")
DEEP = ("mean_average_precision", "mean_reciprocal_rank")


class AccuracyCalculator:
    """Retrieval and clustering scores of an embedding, by PML's names.

    `precision_at_1`, `r_precision`, `mean_average_precision`, `mean_average_precision_at_r`, `mean_reciprocal_rank`,
    `NMI`, `AMI`; a subclass adds a metric by a method `calculate_NAME`, which gets what was computed by keyword.
    Queries without a right answer are left out. `nf.evaluate` gives the same numbers with error bars, and more of them.

    Args:
        include: names of metrics; all where none is given.
        exclude: names of metrics to leave out.
        avg_of_avgs: the mean over classes of the mean over their queries.
        return_per_class: a list of these means, by ascending label.
        k: how many neighbors are searched: a number; None for all references; "max_bin_count" for as many as the
            largest class has.
        label_comparison_fn: (labels, labels) -> whether they belong together; by default, whether they are equal.
        device: where to compute; None for a GPU where there is one.
        knn_func: (query, k, reference, ref_includes_query) -> distances and places; by default exact search by
            Euclidean distances.
        kmeans_func: (rows, k) -> the cluster of each row; by default `nf.evaluation.k_means`.

    >>> x, labels = torch.tensor([[0.0], [0.1], [0.25], [5.0], [5.1], [0.45]]), torch.tensor([0, 0, 0, 1, 1, 1])
    >>> found = AccuracyCalculator(include=("precision_at_1", "r_precision")).get_accuracy(x, labels)
    >>> [f"{name} {value:.3f}" for name, value in found.items()]
    ['precision_at_1 0.833', 'r_precision 0.750']
    """

    def __init__(
        self,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        avg_of_avgs: bool = False,
        return_per_class: bool = False,
        k: int | str | None = None,
        label_comparison_fn: Comparison | None = None,
        device: torch.device | None = None,
        knn_func: Callable[..., tuple[Tensor, Tensor]] | None = None,
        kmeans_func: Callable[[Tensor, int], Tensor] | None = None,
    ) -> None:
        if avg_of_avgs and return_per_class:
            raise ValueError("AccuracyCalculator: avg_of_avgs and return_per_class exclude each other; choose one.")
        if k not in (None, "max_bin_count") and not (isinstance(k, int) and not isinstance(k, bool) and k > 0):
            raise ValueError(
                f"AccuracyCalculator: k must be a whole number above zero, None or 'max_bin_count', but came as {k!r}."
            )
        names = [name.removeprefix(METHOD) for name in dir(self) if name.startswith(METHOD)]
        self.original_function_dict = {name: getattr(self, METHOD + name) for name in names}
        self.check_primary_metrics(include, exclude)
        self.original_function_dict = self.get_function_dict(include, exclude)
        self.curr_function_dict = self.get_function_dict()
        self.avg_of_avgs, self.return_per_class, self.k = avg_of_avgs, return_per_class, k
        self.device = home(device)
        self.knn_func = FaissKNN() if knn_func is None else knn_func
        self.kmeans_func = FaissKMeans(niter=20) if kmeans_func is None else kmeans_func
        self.label_comparison_fn: Comparison = torch.eq if label_comparison_fn is None else label_comparison_fn
        clustering = sorted({*self.requires_clustering()} & {*self.get_curr_metrics()})
        if label_comparison_fn is not None and clustering:
            raise ValueError(
                f"AccuracyCalculator: {', '.join(clustering)} cannot be had with a label_comparison_fn, since clusters "
                f"need classes; pass exclude={tuple(clustering)!r}."
            )

    def get_function_dict(self, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> dict[str, Any]:
        """Metrics by name; `include` empty for all."""
        chosen = self.original_function_dict
        return {name: x for name, x in chosen.items() if (not include or name in include) and name not in exclude}

    def get_curr_metrics(self) -> list[str]:
        """The names of the metrics of the last call, or of the next one before any."""
        return list(self.curr_function_dict)

    def requires_clustering(self) -> list[str]:
        """Metrics that need clusters; a subclass adds its own."""
        return ["NMI", "AMI"]

    def requires_knn(self) -> list[str]:
        """Metrics that need neighbors; a subclass adds its own."""
        return ["precision_at_1", "r_precision", *AT_R[:1], *DEEP]

    def description(self) -> str:
        """What PML's testers append to the names of files."""
        return "avg_of_avgs" if self.avg_of_avgs else ""

    def check_primary_metrics(self, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> None:
        """Require tuples or lists of known names."""
        known = list(self.original_function_dict)
        for given in (include, exclude):
            if not isinstance(given, tuple | list):
                raise TypeError(f"AccuracyCalculator: include and exclude must be tuples of names, but {given!r} came.")
            for name in given:
                if name not in known:
                    raise ValueError(f"AccuracyCalculator: there is no metric {name!r}; {nearest(str(name), known)}")

    def get_cluster_labels(self, query: Tensor, query_labels: Tensor, **_: Any) -> Tensor:
        """The cluster of each query, with as many clusters as there are labels."""
        return self.kmeans_func(query, len(torch.unique(query_labels)))

    def calculate_NMI(self, query_labels: Tensor, cluster_labels: Tensor, **_: Any) -> float:  # noqa: N802
        """Normalized mutual information of clusters and labels."""
        return float(demand_scores().normalized_mutual_info_score(*_whole(query_labels, cluster_labels)))

    def calculate_AMI(self, query_labels: Tensor, cluster_labels: Tensor, **_: Any) -> float:  # noqa: N802
        """Adjusted mutual information of clusters and labels."""
        return float(demand_scores().adjusted_mutual_info_score(*_whole(query_labels, cluster_labels)))

    def calculate_precision_at_1(self, **found: Any) -> Score:
        """The share of queries whose nearest neighbor is right."""
        return self._average(found, precision_at_k, 1)

    def calculate_r_precision(self, **found: Any) -> Score:
        """The share of right answers among the first R neighbors."""
        return self._average(found, r_precision, found["ref_includes_query"], found["label_counts"])

    def calculate_mean_average_precision(self, **found: Any) -> Score:
        """Average precision over all neighbors."""
        return self._average(found, mean_average_precision, found["ref_includes_query"], found["label_counts"])

    def calculate_mean_average_precision_at_r(self, **found: Any) -> Score:
        """Average precision over the first R neighbors."""
        sides = found["ref_includes_query"], found["label_counts"]
        return self._average(found, mean_average_precision, *sides, at_r=True)

    def calculate_mean_reciprocal_rank(self, **found: Any) -> Score:
        """1 / rank of the first right answer."""
        return self._average(found, mean_reciprocal_rank)

    def _average(self, found: Mapping[str, Any], metric: Callable[..., Score], *more: Any, **options: Any) -> Score:
        """A metric over the queries that have a right answer."""
        kept = found["not_lone_query_mask"]
        if not bool(kept.any()):
            return nothing(found["label_counts"], self.return_per_class)
        sides = found["knn_labels"][kept], found["query_labels"][kept][:, None]
        how = self.avg_of_avgs, self.return_per_class, self.label_comparison_fn
        return metric(*sides, *more, *how, **options)

    def get_accuracy(
        self,
        query: Any,
        query_labels: Any,
        reference: Any = None,
        reference_labels: Any = None,
        ref_includes_query: bool = False,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Compute the metrics.

        Args:
            query: [n, d] rows, a tensor or an array.
            query_labels: [n], or [n, c] with a `label_comparison_fn`.
            reference: [m, d] rows that are searched; None searches the queries among themselves.
            reference_labels: [m] or [m, c].
            ref_includes_query: the reference begins with the queries, which do not find themselves.
            include: metrics of this call, of those that were chosen.
            exclude: metrics to leave out of this call.
        """
        if reference is None:
            reference, reference_labels, ref_includes_query = query, query_labels, True
        query, reference = (_rows(x, self.device) for x in (query, reference))
        query_labels, reference_labels = (_labels(x, self.device) for x in (query_labels, reference_labels))
        _check(query, query_labels, reference, reference_labels, ref_includes_query)
        self.curr_function_dict = self.get_function_dict(include, exclude)
        found: dict[str, Any] = {
            "query": query,
            "reference": reference,
            "query_labels": query_labels,
            "reference_labels": reference_labels,
            "ref_includes_query": ref_includes_query,
            "label_comparison_fn": self.label_comparison_fn,
        }
        chosen = {*self.get_curr_metrics()}
        if chosen & {*self.requires_knn()}:
            found.update(self._neighbors(query, query_labels, reference, reference_labels, ref_includes_query))
        if chosen & {*self.requires_clustering()}:
            found["cluster_labels"] = self.get_cluster_labels(**found)
        return self._get_accuracy(self.curr_function_dict, **found)

    def _get_accuracy(self, function_dict: Mapping[str, Callable[..., Any]], **found: Any) -> dict[str, Any]:
        return {name: metric(**found) for name, metric in function_dict.items()}

    def _neighbors(
        self, query: Tensor, query_labels: Tensor, reference: Tensor, reference_labels: Tensor, includes: bool
    ) -> dict[str, Any]:
        """What metrics of neighbors get: labels and distances of the neighbors, and who has a right answer."""
        compare = self.label_comparison_fn
        counts = get_label_match_counts(query_labels, reference_labels, compare)
        kept = not_lone(query_labels, counts, includes, compare)
        if not bool(kept.any()):
            warnings.warn(
                "AccuracyCalculator: no query has a right answer in the reference, so that the metrics of neighbors "
                "are NaN.",
                stacklevel=3,
            )
        depth = self._depth(counts, self.determine_k(counts[1], len(reference), includes))
        distances, places = self.knn_func(query, depth, reference, includes)
        return {
            "label_counts": counts,
            "knn_labels": reference_labels[places],
            "knn_distances": distances,
            "lone_query_labels": torch.unique(query_labels[~kept], dim=0),
            "not_lone_query_mask": kept,
        }

    def determine_k(self, bin_counts: Tensor, num_reference_embeddings: int, ref_includes_query: bool) -> int:
        """How many neighbors are searched."""
        most, largest = num_reference_embeddings - int(ref_includes_query), int(bin_counts.max())
        if self.k is None or most < 1:
            return most
        if self.k == "max_bin_count":
            return min(most, max(1, largest - int(ref_includes_query)))
        short = sorted({*AT_R} & {*self.get_curr_metrics()})
        if int(self.k) < largest and short:
            warnings.warn(
                f"AccuracyCalculator: {', '.join(short)} would need {largest} neighbors, the size of the largest "
                f"class, but k={self.k}: their values are too low; pass k='max_bin_count'.",
                stacklevel=4,
            )
        return min(int(self.k), most)

    def _depth(self, counts: Counts, k: int) -> int:
        """Fewer neighbors than k where the metrics do not look farther, and nobody else does."""
        chosen = {*self.get_curr_metrics()} - {*self.requires_clustering()}
        own = all(
            getattr(type(self), METHOD + name) is getattr(AccuracyCalculator, METHOD + name, None) for name in chosen
        )
        if not own or chosen & {*DEEP}:
            return k
        return min(k, int(counts[1].max()) if chosen & {*AT_R} else 1) if k > 1 else k


def _rows(x: Any, device: torch.device) -> Tensor:
    rows: Tensor = torch.as_tensor(x).detach().to(device)
    return rows.to(torch.promote_types(rows.dtype, torch.float32))


def _labels(x: Any, device: torch.device) -> Tensor:
    """Labels as floating numbers, as in PML, but wide enough that no two integers below 2^53 become one."""
    return torch.as_tensor(x).to(device).to(torch.float32 if device.type == "mps" else torch.float64)


def _whole(labels: Tensor, clusters: Tensor) -> tuple[Any, Any]:
    numbers = torch.unique(labels, return_inverse=True)[1]
    return numbers.cpu().numpy(), torch.as_tensor(clusters).cpu().numpy()


def _check(query: Tensor, query_labels: Tensor, reference: Tensor, reference_labels: Tensor, includes: bool) -> None:
    for rows, labels, name in ((query, query_labels, "query"), (reference, reference_labels, "reference")):
        if len(rows) != len(labels):
            raise ValueError(
                f"AccuracyCalculator: {name} must have one label for each row, but {len(labels)} came for {len(rows)}."
            )
    n = len(query)
    if includes and not (
        reference[:n].shape == query.shape
        and torch.allclose(query, reference[:n])
        and torch.equal(query_labels, reference_labels[:n])
    ):
        raise ValueError(
            "AccuracyCalculator: with ref_includes_query=True the reference and its labels must begin with the queries "
            "and theirs, in the same order, but they differ."
        )
