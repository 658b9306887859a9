"""`Nested`: a loss on several prefixes of the embeddings, so that short embeddings serve as well."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nearfar._utils.checks import check_positive, check_whole
from nearfar._utils.settings import MISSING
from nearfar.losses.explanation import Explanation, sum_explanations
from nearfar.losses.robust import Call
from nearfar.losses.wrapper import Wrapper

__all__ = ["Nested"]


class Nested(Wrapper):
    """A loss on several prefixes of the embeddings (Matryoshka), so that the first dimensions alone are an embedding.

        Σ over k of  w_k · loss(first k dimensions)

    Kusupati et al. 2022.

    Algebra: Σ w_k · loss on x[:, :k]; each prefix is normalized as the loss's similarity says.

    Args:
        loss: any loss without proxies.
        dims: k, in any order; the width of the embeddings is one of them only if it is named.
        weights: w_k, one for each of `dims`; None for 1 each.

    Relations: with the width of the embeddings alone it is `loss`, exactly; in general, the sum of the losses.

    >>> import torch, nearfar as nf
    >>> rows, labels = torch.eye(6) + 0.5, torch.tensor([0, 0, 1, 1, 2, 2])
    >>> inner = nf.losses.NTXent()
    >>> found = nf.Nested(inner, dims=(2, 4, 6))(rows, labels)
    >>> bool(found == inner(rows[:, :2], labels) + inner(rows[:, :4], labels) + inner(rows, labels))
    True
    """

    dims: Sequence[int] = MISSING
    weights: Sequence[float] | None = None

    def _remake(self) -> None:
        super()._remake()
        if hasattr(self.loss, "proxies"):
            raise TypeError(
                f"Nested: the proxies of {type(self.loss).__name__} are as wide as the embeddings, so it takes no "
                "prefix; take a loss without proxies."
            )
        dims, weights = (x if isinstance(x, list | tuple) else () for x in (self.dims, self.weights or ()))
        if not dims or (self.weights is not None and len(weights) != len(dims)):
            raise ValueError(
                f"Nested: dims must be a list of widths, and weights one number for each, but dims={self.dims!r} and "
                f"weights={self.weights!r} came."
            )
        for dim in dims:
            check_whole("Nested", "dims", dim)
        for weight in weights:
            check_positive("Nested", "weights", weight, zero=True)

    def _core(self) -> Any:
        return self.loss._core()

    def _calls(self, call: Call) -> Iterator[tuple[float, Call]]:
        """The weight and the call of each prefix."""
        width = call.embeddings.shape[1]
        if max(self.dims) > width:
            raise ValueError(
                f"{self.owner}: dims of Nested must not exceed the width of the embeddings ({width}), but came as "
                f"{self.dims!r}."
            )
        for dim, weight in zip(self.dims, self.weights or [1.0] * len(self.dims), strict=True):
            columns = None if call.ref_emb is None else call.ref_emb[:, :dim]
            yield weight, replace(call, embeddings=call.embeddings[:, :dim], ref_emb=columns)

    def _value(self, call: Call) -> Tensor:
        return torch.stack([weight * self.loss._value(inner) for weight, inner in self._calls(call)]).sum()

    def _explanation(self, call: Call) -> Explanation:
        """The explanations of the prefixes side by side, as if the columns stood once for each prefix."""
        found = [(weight, self.loss._explanation(inner)) for weight, inner in self._calls(call)]
        return sum_explanations(found, call.shape[1])
