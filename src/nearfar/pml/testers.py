"""PML's testers: embed data sets, score them with an `AccuracyCalculator`, and call hooks."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from nearfar.pml._theirs import theirs
from nearfar.pml.utils._search import home, run_pca
from nearfar.pml.utils.accuracy_calculator import AccuracyCalculator

__all__ = ["BaseTester", "GlobalEmbeddingSpaceTester"]

__getattr__, __dir__ = theirs(__name__)

LOGGER = logging.getLogger("PML")  # PML's own logger: a script that shows or silences it does so here too
Split = tuple[str, list[str]]
Embedded = dict[str, tuple[Tensor, Tensor]]


class BaseTester:
    """Embed data sets and score them; a subclass says how, by `do_knn_and_accuracies`.

    Args:
        normalize_embeddings: divide embeddings by their norm.
        use_trunk_output: score the trunk's output, without the embedder.
        batch_size: how many samples are embedded at once.
        dataloader_num_workers: processes that load samples.
        pca: score that many principal components of the standardized embeddings; None for the embeddings.
        data_device: where inputs are moved to; None for a GPU where there is one.
        dtype: what inputs are converted to; None leaves them.
        data_and_label_getter: sample of the loader -> (inputs, labels); the sample itself where none is given.
        label_hierarchy_level: which column of labels counts: a number, a list of them, or "all".
        end_of_testing_hook: called with the tester at the end of `test`.
        dataset_labels: all labels, for `set_min_label_to_zero`.
        set_min_label_to_zero: labels are replaced by their rank among `dataset_labels`.
        accuracy_calculator: `AccuracyCalculator()` where none is given.
        visualizer: an object with `fit_transform`, such as UMAP, for the hook below.
        visualizer_hook: called as (visualizer, embeddings, labels, split, key, epoch).
    """

    def __init__(
        self,
        normalize_embeddings: bool = True,
        use_trunk_output: bool = False,
        batch_size: int = 32,
        dataloader_num_workers: int = 2,
        pca: int | None = None,
        data_device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        data_and_label_getter: Callable[[Any], Any] | None = None,
        label_hierarchy_level: int | Sequence[int] | str = 0,
        end_of_testing_hook: Callable[[Any], object] | None = None,
        dataset_labels: Any = None,
        set_min_label_to_zero: bool = False,
        accuracy_calculator: Any = None,
        visualizer: Any = None,
        visualizer_hook: Callable[..., object] | None = None,
    ) -> None:
        self.normalize_embeddings, self.use_trunk_output = normalize_embeddings, use_trunk_output
        self.batch_size, self.dataloader_num_workers = int(batch_size), dataloader_num_workers
        self.pca = int(pca) if pca else None
        self.data_device, self.dtype = home(data_device), dtype
        self.data_and_label_getter = data_and_label_getter or _itself
        self.label_hierarchy_level = label_hierarchy_level
        self.end_of_testing_hook = end_of_testing_hook
        self.dataset_labels, self.set_min_label_to_zero = dataset_labels, set_min_label_to_zero
        self.accuracy_calculator = AccuracyCalculator() if accuracy_calculator is None else accuracy_calculator
        self.visualizer, self.original_visualizer_hook = visualizer, visualizer_hook
        self.label_mapper = _ranks(dataset_labels) if set_min_label_to_zero else _as_they_are
        self.reference_split_names: dict[str, list[str]] = {}
        self.label_levels: Sequence[int] = ()
        self.embeddings_and_labels: Embedded = {}
        self.all_accuracies: dict[str, dict[str, Any]] = {}

    def visualizer_hook(self, *args: Any, **options: Any) -> None:
        """Call the hook of the visualizer, where there is one."""
        if self.original_visualizer_hook is not None:
            self.original_visualizer_hook(*args, **options)

    def maybe_normalize(self, embeddings: Tensor) -> Tensor:
        """Principal components, and unit rows, where they are asked for."""
        if self.pca:
            spread = embeddings.std(dim=0, unbiased=False)
            centered = embeddings - embeddings.mean(dim=0)
            embeddings = run_pca(centered / torch.where(spread > 0, spread, torch.ones_like(spread)), self.pca)
        return nn.functional.normalize(embeddings) if self.normalize_embeddings else embeddings

    def get_embeddings_for_eval(self, trunk_model: nn.Module, embedder_model: nn.Module, input_imgs: Any) -> Tensor:
        """Embeddings [n, d] of one batch."""
        if isinstance(input_imgs, Tensor):
            input_imgs = input_imgs.to(self.data_device, self.dtype)
        found: Tensor = trunk_model(input_imgs)
        return found if self.use_trunk_output else embedder_model(found)

    def compute_all_embeddings(
        self, dataloader: Any, trunk_model: nn.Module, embedder_model: nn.Module
    ) -> tuple[Tensor, Tensor]:
        """Embeddings [n, d] and labels [n, c] of all batches."""
        rows, names = [], []
        with torch.no_grad():
            for data in dataloader:
                inputs, labels = self.data_and_label_getter(data)
                rows.append(self.get_embeddings_for_eval(trunk_model, embedder_model, inputs).to(self.data_device))
                names.append(self._mapped(labels).to(self.data_device))
        if not rows:
            raise ValueError(f"{type(self).__name__}: a data set must have at least one sample, but one has none.")
        return torch.cat(rows), torch.cat(names)

    def _mapped(self, labels: Any) -> Tensor:
        """Labels of one batch as columns [n, c]; a list of tensors is one tensor for each column."""
        columns = labels if isinstance(labels, list | tuple) else [labels]
        table = np.concatenate([np.asarray(column).reshape(len(column), -1) for column in columns], axis=1)
        mapped = [torch.as_tensor(self.label_mapper(table[:, level], level)) for level in range(table.shape[1])]
        return torch.stack(mapped, dim=1)

    def get_all_embeddings(
        self,
        dataset: Any,
        trunk_model: nn.Module,
        embedder_model: nn.Module | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        eval: bool = True,
        return_as_numpy: bool = False,
    ) -> tuple[Any, Any]:
        """Embeddings [n, d] and labels [n, c] of a data set.

        Args:
            dataset: samples (input, label).
            trunk_model: input -> features.
            embedder_model: features -> embedding; None for the features.
            collate_fn: that of the DataLoader.
            eval: switch both networks to evaluation.
            return_as_numpy: arrays instead of tensors.
        """
        embeddings, labels = self._raw(dataset, trunk_model, embedder_model, collate_fn, eval)
        embeddings = self.maybe_normalize(embeddings)
        if return_as_numpy:
            return embeddings.cpu().numpy(), labels.cpu().numpy()
        return embeddings, labels

    def _raw(
        self,
        dataset: Any,
        trunk: nn.Module,
        embedder: nn.Module | None,
        collate_fn: Callable[[list[Any]], Any] | None,
        eval: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Embeddings as the networks give them, and labels."""
        embedder = nn.Identity() if embedder is None else embedder
        if eval:
            trunk.eval()
            embedder.eval()
        workers = self.dataloader_num_workers
        loader: Any = DataLoader(dataset, batch_size=self.batch_size, num_workers=workers, collate_fn=collate_fn)
        return self.compute_all_embeddings(loader, trunk, embedder)

    def test(
        self,
        dataset_dict: Mapping[str, Any],
        epoch: Any,
        trunk_model: nn.Module,
        embedder_model: nn.Module | None = None,
        splits_to_eval: Sequence[tuple[str, Sequence[str]]] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> dict[str, dict[str, Any]]:
        """Embed and score data sets; the scores of each by name, also kept as `all_accuracies`.

        Args:
            dataset_dict: data sets by the name of their split.
            epoch: stored with the scores.
            trunk_model: input -> features.
            embedder_model: features -> embedding; None for the features.
            splits_to_eval: (split of the queries, splits of the references); by default each split by itself.
            collate_fn: that of the DataLoader.
        """
        LOGGER.info("evaluating epoch %s", epoch)
        splits = self._splits(dataset_dict, splits_to_eval)
        needed = dict.fromkeys(name for query, references in splits for name in (query, *references))
        found = {name: self._raw(dataset_dict[name], trunk_model, embedder_model, collate_fn) for name in needed}
        # together, so that all splits have the same principal components
        whole = self.maybe_normalize(torch.cat([rows for rows, _ in found.values()]))
        parts = torch.split(whole, [len(rows) for rows, _ in found.values()])
        self.embeddings_and_labels = {
            name: (part, labels) for (name, (_, labels)), part in zip(found.items(), parts, strict=True)
        }
        self.maybe_visualize(self.embeddings_and_labels, epoch)
        self.all_accuracies = defaultdict(dict)
        for query, references in splits:
            self.all_accuracies[query]["epoch"] = epoch
            self.reference_split_names[query] = references
            self.do_knn_and_accuracies(self.all_accuracies[query], self.embeddings_and_labels, query, references)
        if self.end_of_testing_hook is not None:
            self.end_of_testing_hook(self)
        else:
            LOGGER.info("%s", dict(self.all_accuracies))
        self.embeddings_and_labels = {}
        return self.all_accuracies

    def _splits(
        self, dataset_dict: Mapping[str, Any], given: Sequence[tuple[str, Sequence[str]]] | None
    ) -> list[Split]:
        """Splits of queries and references; a split among its own references stands first there."""
        splits = [(name, [name]) for name in dataset_dict] if given is None else given
        queries = [query for query, _ in splits]
        owner = type(self).__name__
        if len(set(queries)) < len(queries):
            raise ValueError(
                f"{owner}: a split can be evaluated once in a call, but {queries!r} came; call test again."
            )
        for name in (name for query, references in splits for name in (query, *references)):
            if name not in dataset_dict:
                raise ValueError(f"{owner}: there is no split {name!r}; there are {', '.join(map(str, dataset_dict))}.")
        return [(query, sorted(references, key=lambda name: name != query)) for query, references in splits]

    def do_knn_and_accuracies(
        self,
        accuracies: dict[str, Any],
        embeddings_and_labels: Embedded,
        query_split_name: str,
        reference_split_names: list[str],
    ) -> None:
        """Write the scores of one split into `accuracies`."""
        raise TypeError(f"{type(self).__name__}: a tester of your own must have a method do_knn_and_accuracies(...).")

    def ref_includes_query(self, query_split_name: str, reference_split_names: Sequence[str]) -> bool:
        """Whether the queries are among their references."""
        return query_split_name in reference_split_names

    def set_reference_and_query(
        self, embeddings_and_labels: Embedded, query_split_name: str, reference_split_names: Sequence[str]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Embeddings and labels of the queries, and of the references."""
        rows, labels = zip(*(embeddings_and_labels[name] for name in reference_split_names), strict=True)
        return (*embeddings_and_labels[query_split_name], torch.cat(rows), torch.cat(labels))

    def label_levels_to_evaluate(self, query_labels: Tensor) -> Sequence[int]:
        """Which columns of labels [n, c] count."""
        level, columns = self.label_hierarchy_level, query_labels.shape[1]
        if level == "all":
            return range(columns)
        levels: Sequence[Any] = level if isinstance(level, list | tuple) else [level]
        if not all(isinstance(one, int) and 0 <= one < columns for one in levels):
            raise ValueError(
                f"{type(self).__name__}: label_hierarchy_level must be below {columns}, the columns of the labels, "
                f"or 'all', but came as {level!r}."
            )
        return levels

    def label_hierarchy_level_to_str(self, label_hierarchy_level: Any) -> str:
        """Levels as they stand in the names of scores."""
        several = isinstance(label_hierarchy_level, list | tuple)
        return "_".join(map(str, label_hierarchy_level)) if several else str(label_hierarchy_level)

    def accuracies_keyname(self, metric: str, label_hierarchy_level: Any = 0, average: bool = False) -> str:
        """The name of a score: `precision_at_1_level0`, or `AVERAGE_precision_at_1`."""
        if average:
            return f"AVERAGE_{metric}"
        several = label_hierarchy_level == "all" or isinstance(label_hierarchy_level, list | tuple)
        if several and len(self.label_levels) == 1:
            label_hierarchy_level = self.label_levels[0]
        return f"{metric}_level{self.label_hierarchy_level_to_str(label_hierarchy_level)}"

    def calculate_average_accuracies(
        self, accuracies: dict[str, Any], metrics: Sequence[str], label_levels: Sequence[int]
    ) -> None:
        """Add the mean of each metric over the levels."""
        for metric in metrics:
            found = [accuracies[self.accuracies_keyname(metric, label_hierarchy_level=level)] for level in label_levels]
            accuracies[self.accuracies_keyname(metric, average=True)] = sum(found) / len(found)

    def description_suffixes(self, base_name: str) -> str:
        """A name for records that says how was tested."""
        parts = [
            base_name,
            f"pca{self.pca}" if self.pca else "",
            "normalized" if self.normalize_embeddings else "",
            "trunk" if self.use_trunk_output else "",
            type(self).__name__,
            f"level_{self.label_hierarchy_level_to_str(self.label_hierarchy_level)}",
            self.accuracy_calculator.description(),
        ]
        return "_".join(part for part in parts if part)

    def maybe_visualize(self, embeddings_and_labels: Embedded, epoch: Any) -> None:
        """Reduce each split by the visualizer and call its hook, where there is one."""
        if self.visualizer is None:
            return
        name = type(self.visualizer).__name__
        for split, (embeddings, labels) in embeddings_and_labels.items():
            reduced = self.visualizer.fit_transform(embeddings.cpu().numpy())
            for level in self.label_levels_to_evaluate(labels):
                key = self.accuracies_keyname(name, label_hierarchy_level=level)
                self.visualizer_hook(self.visualizer, reduced, labels[:, level].cpu().numpy(), split, key, epoch)


class GlobalEmbeddingSpaceTester(BaseTester):
    """Search each query among all references.

    >>> rows = torch.tensor([[0.0, 1.0], [0.1, 1.0], [1.0, 0.0], [1.0, 0.1]])
    >>> data = torch.utils.data.TensorDataset(rows, torch.tensor([0, 0, 1, 1]))
    >>> tester = GlobalEmbeddingSpaceTester(
    ...     dataloader_num_workers=0, accuracy_calculator=AccuracyCalculator(include=("precision_at_1",))
    ... )
    >>> tester.test({"val": data}, 1, torch.nn.Identity())["val"]
    {'epoch': 1, 'precision_at_1_level0': 1.0}
    """

    def do_knn_and_accuracies(  # noqa: D102
        self,
        accuracies: dict[str, Any],
        embeddings_and_labels: Embedded,
        query_split_name: str,
        reference_split_names: list[str],
    ) -> None:
        sides = self.set_reference_and_query(embeddings_and_labels, query_split_name, reference_split_names)
        query, query_labels, reference, reference_labels = sides
        self.label_levels = self.label_levels_to_evaluate(query_labels)
        itself = self.ref_includes_query(query_split_name, reference_split_names)
        for level in self.label_levels:
            names = query_labels[:, level], reference_labels[:, level]
            found = self.accuracy_calculator.get_accuracy(query, names[0], reference, names[1], itself)
            for metric, value in found.items():
                accuracies[self.accuracies_keyname(metric, label_hierarchy_level=level)] = value
        if len(self.label_levels) > 1:
            metrics = self.accuracy_calculator.get_curr_metrics()
            self.calculate_average_accuracies(accuracies, metrics, self.label_levels)


def _itself(sample: Any) -> Any:
    return sample


def _as_they_are(labels: Any, level: int) -> Any:
    return labels


def _ranks(labels: Any) -> Callable[[Any, int], Any]:
    """(labels [n], column) -> their ranks among all labels of that column."""
    if labels is None:
        raise ValueError("BaseTester: set_min_label_to_zero needs dataset_labels; pass all labels of the data set.")
    table = np.asarray(labels)
    known = [np.unique(column) for column in (table[:, None] if table.ndim == 1 else table).T]

    def rank(names: Any, level: int) -> Any:
        return np.searchsorted(known[level], names)

    return rank
