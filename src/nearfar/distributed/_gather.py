"""`Distributed`: the loss over the rows of all processes, with the value and gradient of a single process."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from nearfar._utils.process_group import Group, ProcessGroup, several
from nearfar._utils.tensors import check_embeddings, check_placed
from nearfar.distributed._agreement import LossSummary, agree
from nearfar.losses.explanation import Explanation
from nearfar.losses.robust import Call, Loss
from nearfar.losses.scored import are_scores, takes_scores
from nearfar.relations.relation import Relation


class Distributed(Loss):
    """Compute a loss over the embeddings of all ranks: the value and the gradient of one large batch.

    Every rank passes its rows [n_r, d] and labels; sizes may differ. Embeddings and labels are gathered, strips of the
    matrix of pairs are distributed over the ranks, and partial results (duals, numerators, gradients) are summed: each
    rank does about 1/world of the work, and all get the same numbers. Small batches, losses with random draws, and
    engine="dense" are computed completely on every rank instead, with the same result.

    The value is that of one process on the concatenated batch, not multiplied by the number of ranks. Gradients of the
    loss's own parameters are complete on every rank. With `averaged`, gradients of the embeddings are multiplied by the
    number of ranks, by which DDP and FSDP divide, so every parameter of the network gets exactly the gradient of a
    single process.

    Without `torch.distributed`, or with one process, this is the wrapped loss. Wrap a memory as
    `Distributed(CrossBatchMemory(loss, ...))`.

    Args:
        loss: any loss, also of `nearfar.pml` or PML; what PML computes, every rank computes completely.
        averaged: whether gradients are averaged over ranks after backward, as by DDP and FSDP, and not summed.
        group: a process group; None for all processes.
    """

    def __init__(self, loss: Any, *, averaged: bool = True, group: Any = None) -> None:
        super().__init__()
        if not (isinstance(loss, Loss) or hasattr(loss, "of_all_ranks") or _is_of_pml(loss)) or isinstance(
            loss, Distributed
        ):
            raise TypeError(f"Distributed: loss must be a nearfar loss, but came as {type(loss).__name__}.")
        self.loss = loss
        self.averaged = averaged
        self.group = group
        self._summary = LossSummary()

    def _judged(self, call: Call) -> Tensor:
        if self._alone and self._has_ranks:
            arguments = (call.embeddings, call.labels, call.indices, call.ref_emb, call.ref_labels)
            value: Tensor = self.loss(*arguments, ids=call.ids, ref_ids=call.ref_ids)
            return value
        if self._alone:
            return _by_pml(self.loss, call)
        with torch.autocast(device_type=_device(call.embeddings), enabled=False):
            return self._value(replace(call, owner=self._name))

    def _examined(self, call: Call) -> Explanation:
        if self._alone:
            return super()._examined(call)
        with torch.autocast(device_type=_device(call.embeddings), enabled=False):
            return self._explanation(replace(call, owner=self._name))

    @property
    def _alone(self) -> bool:
        return not several(self.group)

    @property
    def _name(self) -> str:
        return getattr(self.loss, "owner", type(self.loss).__name__)

    @property
    def _has_ranks(self) -> bool:
        """Whether the loss is one that can share the work; PML's own cannot."""
        return isinstance(self.loss, Loss) or hasattr(self.loss, "of_all_ranks")

    def _value(self, call: Call) -> Tensor:
        whole = self._whole(call)
        if not self._has_ranks:
            return _by_pml(self.loss, whole)
        value: Tensor = self.loss._value(whole) if isinstance(self.loss, Loss) else self.loss.of_all_ranks(whole)
        return value

    def _explanation(self, call: Call) -> Explanation:
        """Explain the loss over the rows of all ranks; every rank computes all of it."""
        if not self._has_ranks:
            raise ValueError(
                f"{type(self.loss).__name__}: PML computes this loss, which has no pair weights to explain."
            )
        whole = self._whole(call)
        inner = self.loss if isinstance(self.loss, Loss) else self.loss.robust
        found: Explanation = inner._explanation(whole)
        return found

    def _whole(self, call: Call) -> Call:
        """Gather the rows of all ranks into one call."""
        if self._alone:
            return call
        ranks = Group("Distributed", self.group)
        rows_of, cols_of = agree(ranks, self, call, self._summary, _problem(self.loss, call))
        rows = JointRows(ranks, rows_of)
        cols = None if call.ref_emb is None else JointRows(ranks, cols_of)
        factor = ranks.world if self.averaged else 1
        labels = call.labels
        if isinstance(labels, Relation):
            labels = labels.gathered(rows, rows if cols is None else cols)
        return Call(
            call.owner,
            rows.concatenate(call.embeddings, factor),
            rows(labels) if isinstance(labels, Tensor) else labels,
            None,
            None if cols is None or call.ref_emb is None else cols.concatenate(call.ref_emb, factor),
            None if cols is None or call.ref_labels is None else cols(call.ref_labels),
            None if call.ids is None else rows(call.ids.to(call.embeddings.device)),
            None if cols is None or call.ref_ids is None else cols(call.ref_ids.to(call.embeddings.device)),
            ranks,
        )

    def extra_repr(self) -> str:
        return f"averaged={self.averaged}"


class JointRows:
    """The order of the rows of all ranks in the joint batch; `mine` is the slice of those of this rank."""

    def __init__(self, ranks: ProcessGroup, sizes: list[int]) -> None:
        self.ranks = ranks
        self.sizes = sizes
        start = sum(sizes[: ranks.rank])
        self.mine = slice(start, start + sizes[ranks.rank])

    def __call__(self, x: Tensor) -> Tensor:
        """Concatenate a tensor [n_r, ...] from each rank, without a gradient."""
        if not x.is_floating_point() and x.dtype != torch.bool:
            x = x.long()  # labels and ids may have different integer types on different ranks
        kind = x.dtype
        x = x.to(torch.uint8) if kind == torch.bool else x
        most = max(self.sizes)
        padded = torch.cat([x, x.new_zeros(most - len(x), *x.shape[1:])]) if len(x) < most else x
        parts = self.ranks.gather(padded)
        return torch.cat([part[:size] for part, size in zip(parts, self.sizes, strict=True)]).to(kind)

    def concatenate(self, x: Tensor, factor: int) -> Tensor:
        """Concatenate the rows of all ranks; this rank's rows get their gradient, times `factor`."""
        whole: Tensor = _Concatenate.apply(x, self, factor)  # type: ignore[no-untyped-call]
        return whole


class _Concatenate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: JointRows, factor: int) -> Tensor:
        ctx.mine, ctx.factor = rows.mine, factor
        return rows(x)

    @staticmethod
    def backward(ctx: Any, *whole: Tensor) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "Distributed: there is no second derivative across processes, which create_graph=True asks for; "
                "take it of the loss inside."
            )
        # every rank has the complete gradient, so nothing is summed
        return whole[0][ctx.mine] * ctx.factor, None, None


def _problem(loss: nn.Module, call: Call) -> Exception | None:
    """The error in this rank's call, or None; it is raised only after the other ranks know of it."""
    try:
        check_embeddings(call.owner, "embeddings", call.embeddings)
        if isinstance(loss, Loss):
            check_placed(call.owner, loss, call.embeddings.device)
        if call.indices is not None:
            raise ValueError("Distributed: an index tuple knows one rank's rows only; use miner= on the loss instead.")
        if not (takes_scores(loss) and are_scores(call)):
            _check_ids(call, call.relation())
    except (TypeError, ValueError) as found:
        return found
    return None


def _check_ids(call: Call, relation: Relation) -> None:
    """Require one id per row, since ranks exchange them."""
    n, m = call.shape
    given = (call.ids, n), (call.ref_ids, m), (relation._given.ids, n), (relation._given.ref_ids, m)
    for ids, count in given:
        if ids is not None and (not isinstance(ids, Tensor) or ids.shape != (count,)):
            came = list(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
            raise ValueError(f"Distributed: ids must be a tensor of shape [{count}], one per row, but came as {came}.")


def _is_of_pml(loss: object) -> bool:
    """Whether this is a loss of pytorch-metric-learning, or a subclass of one."""
    return any(kind.__module__.startswith("pytorch_metric_learning.losses.") for kind in type(loss).__mro__)


def _by_pml(loss: Any, call: Call) -> Tensor:
    """The value of a loss of PML."""
    if call.ids is not None or call.ref_ids is not None:
        raise ValueError(f"{type(loss).__name__}: PML computes this loss, which takes no ids; leave them out.")
    reference = () if call.ref_emb is None else (call.ref_emb, call.ref_labels)
    value: Tensor = loss(call.embeddings, call.labels, call.indices, *reference)
    return value


def _device(x: object) -> str:
    return x.device.type if isinstance(x, Tensor) else "cpu"
