"""Search and clustering behind PML's names: `FaissKNN`, `FaissKMeans`, `CustomKNN`, without faiss."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearfar._utils.checks import nearest
from nearfar.evaluation.faiss_backend import faiss
from nearfar.evaluation.index import Index
from nearfar.evaluation.k_means import k_means
from nearfar.evaluation.neighbors import neighbors
from nearfar.evaluation.vectors import Vectors

__all__ = ["CustomKNN", "FaissKMeans", "FaissKNN", "home", "return_results", "run_pca"]


def home(device: torch.device | str | None) -> torch.device:
    """The device given, or a GPU where there is one, or the CPU."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device)


def return_results(D: Tensor, I: Tensor, ref_includes_query: bool) -> tuple[Tensor, Tensor]:
    """Leave each query itself out of k + 1 neighbors found; where a row is not among its own, the last one.

    Args:
        D: [n, k + 1] distances.
        I: [n, k + 1] places.
        ref_includes_query: the references begin with the queries; else nothing is left out.
    """
    if not ref_includes_query:
        return D, I
    itself = torch.arange(len(I), device=I.device)[:, None] == I
    itself[:, -1] |= ~itself.any(dim=1)
    return D[~itself].view(len(D), -1), I[~itself].view(len(I), -1)


class FaissKNN:
    """Exact search by squared Euclidean distances, with the calls of PML's class of that name; faiss is not needed.

    Args:
        reset_before: each call searches its own reference, and no rows of before.
        reset_after: rows are forgotten after a call.
        index_init_fn: width -> an index of faiss, such as `faiss.IndexFlatIP`, where another search is wanted.
        gpus: checked as in PML; the search runs where the rows are.

    >>> found = FaissKNN()(torch.tensor([[0.0], [2.0]]), 1, torch.tensor([[3.0], [0.5]]))
    >>> [part.flatten().tolist() for part in found]
    [[0.25, 1.0], [1, 0]]
    """

    def __init__(
        self,
        reset_before: bool = True,
        reset_after: bool = True,
        index_init_fn: Callable[[int], Any] | None = None,
        gpus: Sequence[int] | None = None,
    ) -> None:
        if gpus is not None and (not isinstance(gpus, list | tuple) or not len(gpus)):
            raise (ValueError if isinstance(gpus, list | tuple) else TypeError)(
                f"FaissKNN: gpus must be a list of one or more numbers, or None, but came as {gpus!r}."
            )
        self.reset_before, self.reset_after = reset_before, reset_after
        self.index_init_fn, self.gpus = index_init_fn, gpus
        self.reset()

    def reset(self) -> None:
        """Forget all rows."""
        self.index: Any = None

    def train(self, embeddings: Any) -> None:
        """Forget all rows, and remember these [m, d]."""
        self.reset()
        self.add(embeddings)

    def add(self, embeddings: Any) -> None:
        """Remember these rows [m, d] too."""
        rows = torch.as_tensor(embeddings).detach()
        if self.index_init_fn is not None:
            self.index = self.index_init_fn(rows.shape[1]) if self.index is None else self.index
            self.index.add(_array(rows))
        else:
            before = [] if self.index is None else [self.index.vectors.x.to(rows.device)]
            self.index = Index(torch.cat([*before, rows]), similarity="euclidean")

    def __call__(
        self, query: Tensor, k: int, reference: Tensor | None = None, ref_includes_query: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Squared distances and places [n, k] of the k nearest rows, nearest first.

        Args:
            query: [n, d].
            k: how many.
            reference: [m, d] rows to search, beside those of before where they are kept.
            ref_includes_query: the reference begins with the queries, which do not find themselves.
        """
        if self.reset_before:
            self.reset()
        if reference is not None:
            self.add(reference)
        if self.index is None:
            raise ValueError("FaissKNN: there are no rows to search; pass reference, or call train first.")
        found = self._search(query, k + int(ref_includes_query))
        if self.reset_after:
            self.reset()
        return return_results(*found, ref_includes_query)

    def _search(self, query: Tensor, k: int) -> tuple[Tensor, Tensor]:
        if self.index_init_fn is not None:
            distances, places = (torch.as_tensor(x).to(query.device) for x in self.index.search(_array(query), k))
            return distances, places
        rows = self.index.vectors.x.to(query.device)
        found = neighbors(query.detach(), rows.to(query.dtype), k=k, similarity="euclidean")
        return found.scores.square(), found.places

    def save(self, filename: str | os.PathLike[str]) -> None:
        """Write the rows to a file: of faiss with `index_init_fn`, else one of `nf.Index`."""
        if self.index is None:
            raise ValueError("FaissKNN: there are no rows to save; call train first.")
        if self.index_init_fn is None:
            self.index.vectors = Vectors(self.index.vectors.x.cpu())
            self.index.save(filename)
        else:
            _faiss().write_index(self.index, os.fspath(filename))

    def load(self, filename: str | os.PathLike[str]) -> None:
        """Read a file that `save` wrote."""
        self.index = Index.load(filename) if self.index_init_fn is None else _faiss().read_index(os.fspath(filename))


def _array(rows: Tensor) -> np.ndarray:
    return np.ascontiguousarray(rows.detach().float().cpu().numpy())


def _faiss() -> Any:
    return faiss("leave index_init_fn out")


class FaissKMeans:
    """k-means, with the call of PML's class of that name; faiss is not needed.

    Args:
        options: `niter`, the most steps (25); `nredo`, how many runs (1), of which the best counts; `seed` (1234);
            `gpu` and `verbose` are allowed and change nothing: it runs where the rows are.

    >>> FaissKMeans(niter=20)(torch.tensor([[0.0], [0.1], [5.0], [5.1]]), 2).tolist() in ([0, 0, 1, 1], [1, 1, 0, 0])
    True
    """

    KNOWN = ("niter", "nredo", "seed", "gpu", "verbose")

    def __init__(self, **options: Any) -> None:
        for name in options:
            if name not in self.KNOWN:
                raise TypeError(f"FaissKMeans: there is no option {name!r}; {nearest(name, self.KNOWN)}")
        self.kwargs = options

    def __call__(self, x: Tensor, nmb_clusters: int) -> Tensor:
        """The cluster [n] of each row [n, d]."""
        given = self.kwargs
        counts = {"steps": given.get("niter", 25), "restarts": given.get("nredo", 1), "seed": given.get("seed", 1234)}
        return k_means(torch.as_tensor(x), nmb_clusters, **counts).assignment


class CustomKNN:
    """Exact search by any distance: PML's, ours, or one of your own with `is_inverted`.

    Args:
        distance: rows and rows -> a matrix of distances.
        batch_size: how many queries are compared at once; None for all.
    """

    def __init__(self, distance: Any, batch_size: int | None = None) -> None:
        self.distance, self.batch_size = distance, batch_size

    def __call__(
        self, query: Tensor, k: int, reference: Tensor, ref_includes_query: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Distances and places [n, k] of the k nearest rows; see `FaissKNN`."""
        found = []
        for part in torch.split(query, self.batch_size or max(1, len(query))):
            table = self.distance(part, reference)
            found.append(torch.topk(table, k + int(ref_includes_query), largest=self.distance.is_inverted, dim=1))
        distances, places = (torch.cat(side) for side in zip(*found, strict=True))
        return return_results(distances, places, ref_includes_query)


def run_pca(x: Tensor, output_dimensionality: int) -> Tensor:
    """Rows [n, d] in the coordinates of their first principal components [n, output_dimensionality]."""
    middle = x.detach().double()
    middle = middle - middle.mean(dim=0)
    if output_dimensionality > min(x.shape):
        raise ValueError(
            f"run_pca: output_dimensionality must be at most {min(x.shape)}, the smaller side of the rows, but came as "
            f"{output_dimensionality}."
        )
    axes: Tensor = torch.linalg.svd(middle, full_matrices=False).Vh[:output_dimensionality]
    return (middle @ axes.T).to(x.dtype)
