"""Scores between rows; throughout the library, larger = more similar.

A similarity works in two steps, so that an engine only needs a matrix product and one elementwise operation:

    x' = prepare(x)                        [n, d]   plain autograd, once per row
    s  = finish(x' y'ᵀ, |x'|², |y'|²)      [n, m]   elementwise

Distances are negated here and nowhere else. A distance computed from products is lost in the rounding of |x|² if all
rows are close together; `prepared` then moves the origin among them, which changes no distance and no derivative. If
only some rows are close together, losses use float64 rows, or differences of rows (engines/distances.py).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from nearfar._utils.checks import check_choice, check_positive, check_whole
from nearfar._utils.settings import Number
from nearfar._utils.shortcuts import HOOKS, Part
from nearfar._utils.tensors import products, quick_unit, readable, root, squares, unit

__all__ = [
    "Called",
    "Centers",
    "Cosine",
    "Dot",
    "NegEuclidean",
    "NegSquaredEuclidean",
    "Quantized",
    "Similarity",
    "called",
    "codes",
    "origin",
    "quantize",
    "root",
    "unit",
]


def _wide(x: Tensor) -> Tensor:
    """Convert to float64, except on Apple's GPUs, which have none."""
    return x if x.device.type == "mps" else x.double()


SAMPLE = 1024
"""Number of rows that are sampled to locate all rows."""
BLOCK = 2**22
"""Number of entries that are converted to float64 at a time."""
CROWD = 64.0
"""The origin moves if the squared distance of rows to their mean is this many times below their squared length."""


def origin(x: Tensor) -> Tensor:
    """Choose a new origin [d] for rows x [n, d]: a central row if most rows are near each other but far from 0, else 0.

    The origin is a row, not the mean, so that equal rows become exactly 0 and a few distant rows do not move it.
    Rows that are not finite are ignored.
    """
    finite = torch.isfinite(x).all(dim=1, keepdim=True)
    x = torch.where(finite, x, 0.0)
    mean = x.sum(dim=0) / finite.sum().clamp_min(1)
    far = torch.where(finite[:, 0], (x - mean).square().sum(dim=1), torch.inf)
    crowded = far.median() * CROWD < mean.square().sum()
    return torch.where(crowded, x.index_select(0, far.argmin(dim=0, keepdim=True))[0], 0.0)


def _crowded(x: Tensor, unit: bool) -> bool:
    """Whether `origin` may move: the same test in fewer steps, if reading is free; True for broken rows.

    A crowd lies within an eighth of |mean| of the mean; if its rows are `unit` vectors, |mean| is thus at least 8/9.
    """
    mean = x.mean(dim=0)
    if unit and bool(mean.dot(mean) < 0.75):
        return False
    far = torch.linalg.vector_norm(x - mean, dim=1).median()
    return not bool(far * far * CROWD >= mean.dot(mean))


def _some(x: Tensor, y: Tensor | None) -> Tensor:
    """A sample of about `SAMPLE` rows of each."""
    some = [z[:: max(1, len(z) // SAMPLE)] for z in (x, y) if z is not None]
    return some[0] if y is None else torch.cat(some)


class Similarity(Part, nn.Module, ABC):
    """Scores s(x, y), larger = more similar.

    Args:
        normalize: divide every row by its Euclidean norm first.
    """

    shortcuts = ("norms", "shifts", "form", "of_squares")
    norms: bool = True
    """Whether `finish` reads the norms; False if a score is the product itself."""
    shifts: bool = False
    """Whether scores only depend on differences of rows, so that one vector may be subtracted from all."""
    form: Literal["dot", "squared", "distance"] | None = None
    """Whether a score is the product, -|x - y|² or -|x - y|; None for any other."""
    of_squares: Callable[[Tensor], Tensor] | None = None
    """A method that makes scores from squared distances; None if scores need the products."""

    def __init__(self, *, normalize: bool = True) -> None:
        super().__init__()
        self.normalize = normalize

    def prepare(self, x: Tensor) -> Tensor:
        """Transform each row once, before any product: [n, d] -> [n, d]."""
        if not self.normalize:
            return x
        return quick_unit(x)

    @abstractmethod
    def finish(self, dot: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
        """Scores [n, m] from products [n, m] and the squared norms [n, 1] and [1, m] of the prepared rows."""

    @abstractmethod
    def distance(self, scores: Tensor) -> Tensor:
        """Euclidean distance [n, m] between unit rows with these scores (distance-weighted mining needs it)."""

    def scores(self, x: Tensor, y: Tensor) -> Tensor:
        """All scores [n, m] between prepared rows x [n, d] and y [m, d]."""
        if not self.norms:
            return products(x, y)
        if self.of_squares is not None:
            return self.of_squares(squares(x, y))
        rows = (x * x).sum(dim=1)
        cols = rows if y is x else (y * y).sum(dim=1)
        return self.finish(products(x, y), rows[:, None], cols[None, :])

    def prepared(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Convert raw rows x [n, d] and y [m, d] (None: the rows themselves) to the form that `scores` takes."""
        rows = self.prepare(x)
        cols = rows if y is None else self.prepare(y)
        if not self.shifts or not len(rows) or not len(cols):
            return rows, cols
        with torch.no_grad():
            if readable(rows) and not _crowded(_some(rows, None if y is None else cols), self.normalize):
                return rows, cols  # most batches lie around the origin, which their own dtype suffices to tell
            start = origin(self.prepare(_wide(_some(x, y))))
        rows = self._moved(x, rows, start)
        return rows, rows if y is None else self._moved(y, cols, start)

    def _moved(self, x: Tensor, rows: Tensor, start: Tensor) -> Tensor:
        """Prepared rows minus `start`, accurate to the rounding of the difference; derivatives are those of `rows`."""
        with torch.no_grad():
            blocks = torch.split(x, max(1, BLOCK // max(1, x.shape[1])))
            moved = torch.cat([(self.prepare(_wide(block)) - start).to(rows.dtype) for block in blocks])
        return moved + (rows - rows.detach()) if rows.requires_grad else moved

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """All scores [n, m] between raw rows x [n, d] and y [m, d]."""
        return self.scores(*self.prepared(x, y))

    def extra_repr(self) -> str:  # noqa: D102
        return "" if self.normalize else "normalize=False"


class Cosine(Similarity, swift=True):
    """Cosine similarity, s = ⟨x, y⟩ / (|x| |y|).

    >>> Cosine()(torch.tensor([[3.0, 0.0]]), torch.tensor([[2.0, 0.0], [0.0, 5.0]]))
    tensor([[1., 0.]])
    """

    norms = False
    form = "dot"

    def __init__(self) -> None:
        super().__init__(normalize=True)

    def finish(self, dot: Tensor, rows: Tensor, cols: Tensor) -> Tensor:  # noqa: D102
        return dot

    def distance(self, scores: Tensor) -> Tensor:  # noqa: D102
        return root(2 - 2 * scores)


class Dot(Similarity, swift=True):
    """Dot product, s = ⟨x, y⟩; rows are not normalized by default."""

    norms = False
    form = "dot"

    def __init__(self, *, normalize: bool = False) -> None:
        super().__init__(normalize=normalize)

    def finish(self, dot: Tensor, rows: Tensor, cols: Tensor) -> Tensor:  # noqa: D102
        return dot

    def distance(self, scores: Tensor) -> Tensor:  # noqa: D102
        if not self.normalize:
            raise ValueError("Dot: raw rows have no distance that products alone give; use Cosine or NegEuclidean.")
        return root(2 - 2 * scores)


class NegEuclidean(Similarity, swift=True):
    """Negated Euclidean distance, s = -|x - y|, of unit rows by default.

    >>> NegEuclidean()(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0], [-1.0, 0.0]]))
    tensor([[-1.4142, -2.0000]])
    """

    shifts = True
    form = "distance"

    def finish(self, dot: Tensor, rows: Tensor, cols: Tensor) -> Tensor:  # noqa: D102
        return -root(rows + cols - 2 * dot)

    def of_squares(self, square: Tensor) -> Tensor:  # noqa: D102
        return -root(square)

    def distance(self, scores: Tensor) -> Tensor:  # noqa: D102
        return -scores


class NegSquaredEuclidean(Similarity, swift=True):
    """Negated squared Euclidean distance, s = -|x - y|², of unit rows by default."""

    shifts = True
    form = "squared"

    def finish(self, dot: Tensor, rows: Tensor, cols: Tensor) -> Tensor:  # noqa: D102
        return 2 * dot - (rows + cols)

    def of_squares(self, square: Tensor) -> Tensor:  # noqa: D102
        return -square

    def distance(self, scores: Tensor) -> Tensor:  # noqa: D102
        return root(-scores)


class Centers(Similarity):
    """Cosine between a row and a class with several centers: that of the nearest center, or a soft choice among them.

        s(x, c) = max_k ⟨x, c_k⟩,  or  Σ_k p_k ⟨x, c_k⟩ with p = softmax of ⟨x, c_k⟩/γ,  of unit vectors

    A reference row is a class: its centers side by side, [m, centers·d], while rows are [n, d].

    Args:
        dim: d, the width of a row and of one center.
        gamma: γ, the temperature of the choice; 0 takes the nearest center.
        normalize: divide rows and centers by their norm; False compares by the raw product.

    >>> Centers(2)(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0, 3.0, 0.0], [-1.0, 0.0, 0.0, 5.0]]))
    tensor([[1., 0.]])
    """

    def __init__(self, dim: int, *, gamma: Number = 0.0, normalize: bool = True) -> None:
        super().__init__(normalize=normalize)
        check_whole("Centers", "dim", dim)
        check_positive("Centers", "gamma", gamma, zero=True, learned=True)
        self.dim = dim
        self.gamma = gamma

    def prepare(self, x: Tensor) -> Tensor:  # noqa: D102
        return super().prepare(x.reshape(-1, self.dim)).reshape(x.shape)

    def finish(self, dot: Tensor, rows: Tensor, cols: Tensor) -> Tensor:  # noqa: D102
        return dot

    def scores(self, x: Tensor, y: Tensor) -> Tensor:  # noqa: D102
        each = products(x, y.reshape(-1, self.dim)).reshape(len(x), len(y), -1)
        if not isinstance(self.gamma, Tensor) and self.gamma == 0:
            return each.amax(dim=2)
        return (torch.softmax(each / self.gamma, dim=2) * each).sum(dim=2)

    def distance(self, scores: Tensor) -> Tensor:  # noqa: D102
        return root(2 - 2 * scores)

    def extra_repr(self) -> str:  # noqa: D102
        return f"dim={self.dim}, gamma={self.gamma}" + ("" if self.normalize else ", normalize=False")


CodeType = Literal["int8", "bits"]


def codes(x: Tensor, dtype: CodeType) -> Tensor:
    """Whole numbers [n, d], of the type of x, that stand for the directions of rows x [n, d].

        int8    round(127 x / max|x|), the maximum over each row
        bits    1 where x > 0, else -1

    The scale belongs to a row, not to a dimension: it is not learned, no row lies out of range, the code of a row does
    not depend on other rows, and it cancels in the cosine, so that nothing is stored beside the codes. NaN stays NaN.
    """
    check_choice("codes", "dtype", dtype, ("int8", "bits"))
    if dtype == "bits":
        return torch.where(x.isnan(), x, torch.where(x > 0, 1.0, -1.0).to(x.dtype))
    top = x.abs().amax(dim=1, keepdim=True) if x.shape[1] else x.new_zeros(len(x), 1)
    return torch.round(x / torch.where(top == 0, 1.0, top) * 127)


def quantize(x: Tensor, dtype: CodeType) -> Tensor:
    """Unit rows [n, d] along the `codes` of x; the gradient is that of the unit rows x/|x| (straight-through).

    >>> quantize(torch.tensor([[3.0, -4.0]]), "bits")
    tensor([[ 0.7071, -0.7071]])
    """
    exact = quick_unit(x)
    rounded = unit(codes(exact.detach(), dtype))
    return rounded + (exact - exact.detach()) if exact.requires_grad else rounded


class Quantized(Similarity, swift=True):
    """Cosine similarity of quantized rows, s = ⟨q(x), q(y)⟩ with `quantize`: trains for an index of int8 or bits.

    Args:
        dtype: "int8", a byte per dimension, or "bits".

    >>> Quantized("bits")(torch.tensor([[3.0, 1.0]]), torch.tensor([[1.0, 9.0], [5.0, -1.0]]))
    tensor([[1.0000, 0.0000]])
    """

    norms = False
    form = "dot"

    def __init__(self, dtype: CodeType = "int8") -> None:
        super().__init__(normalize=True)
        check_choice("Quantized", "dtype", dtype, ("int8", "bits"))
        self.dtype = dtype

    def prepare(self, x: Tensor) -> Tensor:  # noqa: D102
        return quantize(x, self.dtype)

    def finish(self, dot: Tensor, rows: Tensor, cols: Tensor) -> Tensor:  # noqa: D102
        return dot

    def distance(self, scores: Tensor) -> Tensor:  # noqa: D102
        return root(2 - 2 * scores)

    def extra_repr(self) -> str:  # noqa: D102
        return repr(self.dtype)


class Called(Similarity):
    """Wraps a similarity that must be called as a whole, because its `forward` is custom or has hooks.

    Losses otherwise prepare rows once and score them in parts, which would bypass `forward`.
    """

    def __init__(self, of: Similarity) -> None:
        super().__init__(normalize=of.normalize)
        self.of = of

    def prepare(self, x: Tensor) -> Tensor:  # noqa: D102
        return x

    def finish(self, dot: Tensor, rows: Tensor, cols: Tensor) -> Tensor:  # noqa: D102
        return self.of.finish(dot, rows, cols)

    def distance(self, scores: Tensor) -> Tensor:  # noqa: D102
        return self.of.distance(scores)

    def scores(self, x: Tensor, y: Tensor) -> Tensor:  # noqa: D102
        found: Tensor = self.of(x, y)
        return found


def called(similarity: Similarity) -> Similarity:
    """Return the similarity, wrapped in `Called` if its `forward` is custom or has hooks."""
    own = type(similarity).forward is not Similarity.forward or "forward" in similarity.__dict__
    hooked = any(getattr(similarity, name) for name in HOOKS)
    return Called(similarity) if own or hooked else similarity
