"""PML's `InferenceModel` and `MatchFinder`, and the searches they use; faiss is not needed."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from nearfar.pml._theirs import theirs
from nearfar.pml.distances import CosineSimilarity
from nearfar.pml.utils._search import CustomKNN, FaissKMeans, FaissKNN, home, return_results, run_pca

__all__ = ["CustomKNN", "FaissKMeans", "FaissKNN", "InferenceModel", "MatchFinder", "return_results", "run_pca"]

__getattr__, __dir__ = theirs(__name__)


class MatchFinder:
    """Say which rows match: those nearer than a threshold.

    Args:
        distance: a distance of `nearfar.pml` or PML.
        threshold: in the distance's own units; a match is at it or nearer.

    >>> from nearfar.pml.distances import LpDistance
    >>> finder = MatchFinder(LpDistance(normalize_embeddings=False), threshold=1)
    >>> finder.get_matching_pairs(torch.tensor([[0.0], [3.0]]), torch.tensor([[0.5], [9.0]]), return_tuples=True)
    [(0, 0)]
    """

    def __init__(self, distance: Any, threshold: float | None = None) -> None:
        self.distance, self.threshold = distance, threshold

    def get_matching_pairs(
        self,
        query_emb: Tensor,
        ref_emb: Tensor | None = None,
        threshold: float | None = None,
        return_tuples: bool = False,
    ) -> Any:
        """Which queries match which references.

        Args:
            query_emb: [n, d].
            ref_emb: [m, d]; the queries themselves where there are none.
            threshold: instead of the one of the object.
            return_tuples: a list of (query, reference) instead of a boolean array [n, m].
        """
        with torch.no_grad():
            table = self.distance(query_emb, query_emb if ref_emb is None else ref_emb)
            matches = self._near(table, threshold)
        if return_tuples:
            return [(row, column) for row, column in matches.nonzero().tolist()]
        return matches.cpu().numpy()

    def is_match(self, x: Tensor, y: Tensor, threshold: float | None = None) -> Any:
        """Whether each row of x [n, d] matches its row of y [n, d]: a bool for one, else an array."""
        with torch.no_grad():
            matches = self._near(self.distance.pairwise_distance(x, y), threshold)
        return bool(matches) if matches.numel() == 1 else matches.cpu().numpy()

    def _near(self, numbers: Tensor, threshold: float | None) -> Tensor:
        limit = self.threshold if threshold is None else threshold
        if limit is None:
            raise ValueError("MatchFinder: there is no threshold; pass threshold, here or when the object is made.")
        return numbers >= limit if self.distance.is_inverted else numbers <= limit


class InferenceModel:
    """A network with the search of its embeddings.

    Args:
        trunk: input -> features.
        embedder: features -> embedding; None for the features themselves.
        match_finder: `MatchFinder(CosineSimilarity(), threshold=0.9)` where none is given.
        normalize_embeddings: divide embeddings by their norm.
        knn_func: `FaissKNN(reset_before=False, reset_after=False)` where none is given.
        data_device: where inputs are moved to; None for a GPU where there is one.
        dtype: what inputs are converted to; None leaves them.

    >>> model = InferenceModel(torch.nn.Identity(), data_device="cpu")
    >>> model.train_knn(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    >>> model.get_nearest_neighbors(torch.tensor([[0.1, 2.0]]), k=1)[1].tolist()
    [[1]]
    """

    def __init__(
        self,
        trunk: nn.Module,
        embedder: nn.Module | None = None,
        match_finder: Any = None,
        normalize_embeddings: bool = True,
        knn_func: Any = None,
        data_device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.trunk, self.embedder = trunk, nn.Identity() if embedder is None else embedder
        self.match_finder = MatchFinder(CosineSimilarity(), threshold=0.9) if match_finder is None else match_finder
        self.knn_func = FaissKNN(reset_before=False, reset_after=False) if knn_func is None else knn_func
        self.normalize_embeddings = normalize_embeddings
        self.data_device, self.dtype = home(data_device), dtype

    def get_embeddings(self, x: Any) -> Tensor:
        """Embeddings [n, d] of inputs: a tensor, or a list of tensors; anything else is handed to the trunk."""
        x = _stacked(x)
        if isinstance(x, Tensor):
            x = x.to(self.data_device, self.dtype)
        self.trunk.eval()
        self.embedder.eval()
        with torch.no_grad():
            found: Tensor = self.embedder(self.trunk(x))
        return nn.functional.normalize(found) if self.normalize_embeddings else found

    def get_embeddings_from_tensor_or_dataset(self, inputs: Any, batch_size: int) -> Tensor:
        """Embeddings of many inputs, a batch at a time; of a dataset's samples the first part counts."""
        inputs = _stacked(inputs)
        if isinstance(inputs, Tensor | list):
            parts = [inputs[i : i + batch_size] for i in range(0, len(inputs), batch_size)]
            return torch.cat([self.get_embeddings(part) for part in parts])
        if not isinstance(inputs, Dataset):
            raise TypeError(
                f"InferenceModel: inputs must be a tensor, a list or a dataset, but came as {type(inputs).__name__}."
            )
        loader = DataLoader(inputs, batch_size=batch_size)
        return torch.cat([self.get_embeddings(x[0] if isinstance(x, tuple | list) else x) for x in loader])

    def train_knn(self, inputs: Any, batch_size: int = 64) -> None:
        """Search among the embeddings of these inputs from now on, and no others."""
        self.call_knn(self.knn_func.train, inputs, batch_size)

    def add_to_knn(self, inputs: Any, batch_size: int = 64) -> None:
        """Search among the embeddings of these inputs too."""
        self.call_knn(self.knn_func.add, inputs, batch_size)

    def call_knn(self, func: Callable[[Tensor], object], inputs: Any, batch_size: int) -> None:
        """Call a function with the embeddings of all inputs."""
        func(self.get_embeddings_from_tensor_or_dataset(inputs, batch_size))

    def get_nearest_neighbors(self, query: Any, k: int) -> tuple[Tensor, Tensor]:
        """Distances and places [n, k] of the nearest neighbors of each input."""
        found: tuple[Tensor, Tensor] = self.knn_func(self.get_embeddings(query), k)
        return found

    def get_matches(
        self, query: Any, ref: Any = None, threshold: float | None = None, return_tuples: bool = False
    ) -> Any:
        """Which inputs match which others; see `MatchFinder.get_matching_pairs`."""
        rows = self.get_embeddings(query)
        cols = rows if ref is None else self.get_embeddings(ref)
        return self.match_finder.get_matching_pairs(rows, cols, threshold, return_tuples)

    def is_match(self, x: Any, y: Any, threshold: float | None = None) -> Any:
        """Whether each input matches the other of the same number; see `MatchFinder.is_match`."""
        return self.match_finder.is_match(self.get_embeddings(x), self.get_embeddings(y), threshold)

    def save_knn_func(self, filename: str | os.PathLike[str]) -> None:
        """Write what `train_knn` remembered to a file."""
        self.knn_func.save(filename)

    def load_knn_func(self, filename: str | os.PathLike[str]) -> None:
        """Read a file that `save_knn_func` wrote."""
        self.knn_func.load(filename)


def _stacked(x: Any) -> Any:
    return torch.stack(x) if isinstance(x, list) and all(isinstance(one, Tensor) for one in x) else x
