"""PML's `DistributedLossWrapper` and `DistributedMinerWrapper`: the loss of one process on the rows of all of them."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from nearfar._utils.process_group import Group, several
from nearfar._utils.tensors import check_embeddings
from nearfar.distributed.agreement import Looks, agree
from nearfar.distributed.gather import Distributed, JointRows
from nearfar.losses.robust import Call
from nearfar.pml._theirs import theirs
from nearfar.pml._tuples import Indices

__all__ = ["DistributedLossWrapper", "DistributedMinerWrapper"]

__getattr__, __dir__ = theirs(__name__)


class DistributedLossWrapper(nn.Module):
    """Compute a loss over the rows of all ranks: value and gradient are those of one process with the whole batch.

    Without `torch.distributed`, or with one process, it is the loss inside. The value is not multiplied by the number
    of ranks, as it is in PML; gradients of the embeddings are, since `DistributedDataParallel` divides by it, so that
    the network gets the gradient of one process. Ranks may have different numbers of rows. Where nearfar can, ranks
    share the work (`nf.Distributed`); with an index tuple, and for a loss that is not ours, each computes all of it.

    Index tuples count a rank's own rows first, then those of the other ranks, as `DistributedMinerWrapper` gives them.
    Where ranks bring different ones, such as tuples of their own rows, the loss is that of all of them together.

    Args:
        loss: a loss of `nearfar.pml`, of nearfar or of PML, or a `CrossBatchMemory` of one.
        efficient: as in PML, where True means a cheaper and different gradient; here both are exact.
    """

    def __init__(self, loss: nn.Module, efficient: bool = False) -> None:
        super().__init__()
        if not isinstance(loss, nn.Module) or isinstance(loss, DistributedLossWrapper):
            raise TypeError(f"DistributedLossWrapper: loss must be a loss, but came as {type(loss).__name__}.")
        self.loss = loss
        self.efficient = efficient
        self._remembers = "enqueue_mask" in inspect.signature(loss.forward).parameters
        self._looks = Looks()
        self._in_step = ""
        self._shared = (_shared(loss),)  # in a tuple: the loss is a submodule once, under PML's name

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: Indices | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        enqueue_mask: Tensor | None = None,
    ) -> Any:
        """Compute the loss, a differentiable scalar, the same on every rank.

        Args:
            embeddings: [n, d] rows of this rank.
            labels: [n] integers.
            indices_tuple: see above.
            ref_emb: [m, d] reference rows of this rank; those of all ranks are the reference.
            ref_labels: [m] integers.
            enqueue_mask: [n] of a `CrossBatchMemory`.
        """
        if self._remembers and (ref_emb is not None or ref_labels is not None):
            raise ValueError("DistributedLossWrapper: a CrossBatchMemory takes no reference; leave ref_emb out.")
        labels, ref_labels = (x.to(embeddings.device) if isinstance(x, Tensor) else x for x in (labels, ref_labels))
        last = (enqueue_mask,) if self._remembers else (ref_emb, ref_labels)
        if not several():
            return self.loss(embeddings, labels, indices_tuple, *last)
        (shared,) = self._shared
        # what one rank calls with and another does not must not leave them waiting for each other
        given = "no tuple" if indices_tuple is None else f"a tuple of {len(indices_tuple)}"
        self._in_step = f"a call with {given} and {'a' if enqueue_mask is not None else 'no'} mask"
        if indices_tuple is None and enqueue_mask is None and shared is not None:
            return shared(embeddings, labels, None, ref_emb, ref_labels)
        call = Call("DistributedLossWrapper", embeddings, labels, None, ref_emb, ref_labels)
        joint = _Joint(self, self._looks, call, indices_tuple)
        indices = None if indices_tuple is None else joint.together(indices_tuple)
        if self._remembers:
            last = (None if enqueue_mask is None else joint.rows(enqueue_mask.to(embeddings.device)),)
        else:
            last = (joint.ref_emb, joint.ref_labels)
        with joint.ranks.same_draws(embeddings.device):
            return self.loss(joint.embeddings, joint.labels, indices, *last)


def _shared(loss: nn.Module) -> Distributed | None:
    """The loss by `nf.Distributed`, in which ranks share the work; None where it is not one of ours."""
    try:
        return Distributed(loss)
    except TypeError:
        return None


class DistributedMinerWrapper(nn.Module):
    """Mine the rows of all ranks, as one process would.

    The tuple counts a rank's own rows first, then those of the other ranks; all ranks find the same pairs. Without
    `torch.distributed`, or with one process, it is the miner inside.

    Args:
        miner: a miner of `nearfar.pml` or PML.
        efficient: each rank keeps the pairs and triplets of its own anchors only; `DistributedLossWrapper` joins them.
    """

    def __init__(self, miner: nn.Module, efficient: bool = False) -> None:
        super().__init__()
        if not isinstance(miner, nn.Module) or isinstance(miner, DistributedMinerWrapper):
            raise TypeError(f"DistributedMinerWrapper: miner must be a miner, but came as {type(miner).__name__}.")
        self.miner = miner
        self.efficient = efficient
        self._looks = Looks()

    def forward(
        self, emb: Tensor, labels: Tensor, ref_emb: Tensor | None = None, ref_labels: Tensor | None = None
    ) -> Indices:
        """Compute the index tuple; the arguments are those of a miner, with the rows of this rank."""
        labels = labels.to(emb.device)
        ref_labels = None if ref_labels is None else ref_labels.to(emb.device)
        found: Indices
        if not several():
            found = self.miner(emb, labels, ref_emb, ref_labels)
            return found
        with torch.no_grad():
            joint = _Joint(self, self._looks, Call("DistributedMinerWrapper", emb, labels, None, ref_emb, ref_labels))
            with joint.ranks.same_draws(emb.device):
                found = self.miner(joint.embeddings, joint.labels, joint.ref_emb, joint.ref_labels)
        return joint.outwards(_of(found, joint.rows.mine) if self.efficient else found)


def _of(indices: Indices, mine: slice) -> Indices:
    """The pairs or triplets whose anchors lie in a slice."""
    groups = (indices,) if len(indices) == 3 else (indices[:2], indices[2:])
    kept = [(group, (group[0] >= mine.start) & (group[0] < mine.stop)) for group in groups]
    return tuple(part[own] for group, own in kept for part in group)


class _Joint:
    """The rows of all ranks, in the order of the ranks, and the way from a rank's own order to it.

    As in PML, an index tuple counts a rank's own rows first, then those of the other ranks; so a tuple of its own rows
    alone is one of these too.
    """

    def __init__(self, wrapper: nn.Module, looks: Looks, call: Call, indices: Indices | None = None) -> None:
        self.ranks = Group(type(wrapper).__name__, None)
        sizes = agree(self.ranks, wrapper, call, looks, _problem(call, indices))
        self.rows = JointRows(self.ranks, sizes.rows)
        self.cols = self.rows if call.ref_emb is None else JointRows(self.ranks, sizes.cols)
        factor = self.ranks.world  # DDP divides by it
        self.embeddings = self.rows.joined(call.embeddings, factor)
        self.labels = self.rows(call.labels) if isinstance(call.labels, Tensor) else None
        self.ref_emb = None if call.ref_emb is None else self.cols.joined(call.ref_emb, factor)
        self.ref_labels = None if call.ref_labels is None else self.cols(call.ref_labels)

    def inwards(self, indices: Indices) -> Indices:
        """A tuple in this rank's own order, in that of the joint rows."""
        return self._each(indices, _to_joint)

    def outwards(self, indices: Indices) -> Indices:
        """A tuple in the order of the joint rows, in this rank's own."""
        return self._each(indices, _from_joint)

    def _each(self, indices: Indices, turn: Any) -> Indices:
        kinds = (0, 1, 1) if len(indices) == 3 else (0, 1, 0, 1)
        sides = (self.rows, self.cols)
        return tuple(turn(part, sides[kind].mine) for part, kind in zip(indices, kinds, strict=True))

    def together(self, indices: Indices) -> Indices:
        """The tuples of all ranks, in the order of the joint rows: once if they are the same, else one by one."""
        mine = self.inwards(tuple(part.to(self.embeddings.device) for part in indices))
        if bool((self.ranks.gather(_sum(mine)) == _sum(mine)).all()):
            return mine
        lengths = self.ranks.gather(torch.tensor([len(part) for part in mine], device=self.embeddings.device)).T
        return tuple(JointRows(self.ranks, n)(part) for part, n in zip(mine, lengths.tolist(), strict=True))


def _to_joint(places: Tensor, mine: slice) -> Tensor:
    count = mine.stop - mine.start
    others = places - count
    return torch.where(places < count, places + mine.start, others + (others >= mine.start) * count)


def _from_joint(places: Tensor, mine: slice) -> Tensor:
    count = mine.stop - mine.start
    own = (places >= mine.start) & (places < mine.stop)
    return torch.where(own, places - mine.start, places + (places < mine.start) * count)


def _sum(indices: Indices) -> Tensor:
    """Two numbers of a tuple that do not depend on the order of its entries: how many there are, and a hash of them."""
    groups = (indices,) if len(indices) == 3 else (indices[:2], indices[2:])
    total = torch.zeros((), dtype=torch.int64, device=indices[0].device)
    for salt, group in enumerate(groups):
        mixed = torch.full_like(group[0], 7919 * (salt + 1), dtype=torch.int64)
        for part in group:
            mixed = (mixed ^ (mixed >> 29)) * 6364136223846793005 + part.long()  # whole numbers wrap around
        total = total + (mixed * (mixed ^ (mixed >> 31))).sum()
    return torch.stack([total, total.new_tensor(sum(len(group[0]) for group in groups))])


def _problem(call: Call, indices: Indices | None) -> Exception | None:
    """What is wrong with this rank's call, which the other ranks must learn before it is raised."""
    try:
        check_embeddings(call.owner, "embeddings", call.embeddings)
        if call.ref_emb is not None:
            check_embeddings(call.owner, "ref_emb", call.ref_emb)
        for labels, rows in ((call.labels, call.embeddings), (call.ref_labels, call.ref_emb)):
            if isinstance(labels, Tensor) and rows is not None and len(labels) != len(rows):
                raise ValueError(f"{call.owner}: {len(labels)} labels came for {len(rows)} rows.")
        if indices is not None and len(indices) not in (3, 4):
            raise ValueError(f"{call.owner}: an index tuple has 3 or 4 tensors, but {len(indices)} came.")
    except (TypeError, ValueError) as found:
        return found
    return None
