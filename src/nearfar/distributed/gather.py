"""`Distributed`: the loss of all processes' rows together, value and gradient as one process would compute them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nearfar._utils.checks import check_embeddings
from nearfar._utils.process_group import Group, ProcessGroup, several
from nearfar.distributed.agreement import Looks, agree
from nearfar.losses.explanation import Explanation
from nearfar.losses.loss import Call, Loss
from nearfar.relations.relation import Relation

__all__ = ["Distributed"]


class Distributed(Loss):
    """loss(rows of all ranks), the same value on every rank, with the gradient of one big batch.

    Every rank brings its rows [n_r, d] and labels; sizes may differ. Embeddings and labels are gathered, strips of the
    matrix of pairs are dealt out to the ranks, and what each finds (duals, numerators, gradients) is added up, so that
    each rank does about 1/world of the work and all end with the same numbers. Small batches, losses that draw, and
    engine="dense" are computed whole on every rank instead: the same numbers again.

    The value is that of one process on the concatenated batch; it is not multiplied by the number of ranks. Gradients
    of the loss's own parameters are whole on every rank. Those of the embeddings are multiplied by the number of ranks
    where `averaged` (DDP and FSDP divide by it when they average), so that every parameter of the network gets
    exactly the gradient of the single process.

    Without `torch.distributed`, or with one process, it is the loss inside. A memory goes inside:
    `Distributed(CrossBatchMemory(loss, ...))`.

    Args:
        loss: any loss.
        averaged: gradients are averaged over ranks after backward, as DDP and FSDP do; False where they are summed.
        group: a process group; None for all processes.
    """

    def __init__(self, loss: Loss, *, averaged: bool = True, group: Any = None) -> None:
        super().__init__()
        if not isinstance(loss, Loss) or isinstance(loss, Distributed):
            raise TypeError(f"Distributed: loss must be a nearfar loss, but came as {type(loss).__name__}.")
        self.loss = loss
        self.averaged = averaged
        self.group = group
        self._looks = Looks()

    @property
    def exact_gradient(self) -> bool:
        """Whether the gradient is that of the value."""
        return bool(getattr(self.loss, "exact_gradient", True))

    def _judged(self, call: Call) -> Tensor:
        if self._alone:
            told = (call.embeddings, call.labels, call.indices, call.ref_emb, call.ref_labels)
            value: Tensor = self.loss(*told, ids=call.ids, ref_ids=call.ref_ids)
            return value
        with torch.autocast(device_type=_device(call.embeddings), enabled=False):
            return self._value(replace(call, owner=self.loss.owner))

    def _examined(self, call: Call) -> Explanation:
        if self._alone:
            return super()._examined(call)
        with torch.autocast(device_type=_device(call.embeddings), enabled=False):
            return self._explanation(replace(call, owner=self.loss.owner))

    @property
    def _alone(self) -> bool:
        return not several(self.group)

    def _value(self, call: Call) -> Tensor:
        return self.loss._value(self._whole(call))

    def _explanation(self, call: Call) -> Explanation:
        """Of all ranks' rows, whole on every rank."""
        return self.loss._explanation(self._whole(call))

    def _whole(self, call: Call) -> Call:
        """The call with the rows of all ranks."""
        if self._alone:
            return call
        ranks = Group("Distributed", self.group)
        sizes = agree(ranks, self, call, self._looks, _problem(call))
        rows = _Rows(ranks, sizes.rows)
        cols = None if call.ref_emb is None else _Rows(ranks, sizes.cols)
        factor = ranks.world if self.averaged else 1
        labels = call.labels
        if isinstance(labels, Relation):
            labels = labels.gathered(rows, rows if cols is None else cols)
        return Call(
            call.owner,
            rows.joined(call.embeddings, factor),
            rows(labels) if isinstance(labels, Tensor) else labels,
            None,
            None if cols is None or call.ref_emb is None else cols.joined(call.ref_emb, factor),
            None if cols is None or call.ref_labels is None else cols(call.ref_labels),
            None if call.ids is None else rows(call.ids.to(call.embeddings.device)),
            None if cols is None or call.ref_ids is None else cols(call.ref_ids.to(call.embeddings.device)),
            ranks,
        )

    def extra_repr(self) -> str:  # noqa: D102
        return f"averaged={self.averaged}"


class _Rows:
    """How the rows of all ranks stand one behind the other; calling it joins a tensor [n_r, ...] of each."""

    def __init__(self, ranks: ProcessGroup, sizes: list[int]) -> None:
        self.ranks = ranks
        self.sizes = sizes
        start = sum(sizes[: ranks.rank])
        self.mine = slice(start, start + sizes[ranks.rank])

    def __call__(self, x: Tensor) -> Tensor:
        if not x.is_floating_point() and x.dtype != torch.bool:
            x = x.long()  # ranks may have read their labels and ids in types of their own
        kind = x.dtype
        x = x.to(torch.uint8) if kind == torch.bool else x
        most = max(self.sizes)
        padded = torch.cat([x, x.new_zeros(most - len(x), *x.shape[1:])]) if len(x) < most else x
        parts = self.ranks.gather(padded)
        return torch.cat([part[:size] for part, size in zip(parts, self.sizes, strict=True)]).to(kind)

    def joined(self, x: Tensor, factor: int) -> Tensor:
        """The rows of all ranks; the gradient comes back to this rank's own, times `factor`."""
        whole: Tensor = _Joined.apply(x, self, factor)  # type: ignore[no-untyped-call]
        return whole


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: _Rows, factor: int) -> Tensor:
        ctx.mine, ctx.factor = rows.mine, factor
        return rows(x)

    @staticmethod
    def backward(ctx: Any, *whole: Tensor) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "Distributed: there is no second derivative across processes, which create_graph=True asks for; "
                "take it of the loss inside."
            )
        # every rank has the gradient of the whole: nothing to add up
        return whole[0][ctx.mine] * ctx.factor, None, None


def _problem(call: Call) -> Exception | None:
    """What is wrong with this rank's call; the others must hear of it before it is raised."""
    try:
        check_embeddings(call.owner, "embeddings", call.embeddings)
        if call.indices is not None:
            raise ValueError(
                "Distributed: an index tuple knows the rows of one rank only; use miner= on the loss instead."
            )
        _check_ids(call, call.relation())
    except (TypeError, ValueError) as found:
        return found
    return None


def _check_ids(call: Call, relation: Relation) -> None:
    """Demand an id of each row: one process alone may pass over them, but what is exchanged must fit."""
    n, m = call.shape
    given = (call.ids, n), (call.ref_ids, m), (relation._given.ids, n), (relation._given.ref_ids, m)
    for ids, count in given:
        if ids is not None and (not isinstance(ids, Tensor) or ids.shape != (count,)):
            came = list(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
            raise ValueError(
                f"Distributed: ids must be a tensor of shape [{count}], one of each row, but came as {came}."
            )


def _device(x: object) -> str:
    return x.device.type if isinstance(x, Tensor) else "cpu"
