"""Errors on one of several ranks: each case runs on all of them, and their messages are collected."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engine_cases import larger
from runs import config, tiny
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import nearfar as nf
from nearfar.distributed import _agreement as agreement
from nearfar.pml.losses import LiftedStructureLoss
from nearfar.train import fit

L, G = nf.losses, nf.Distributed
Try = Callable[[], Any]


def heard(attempt: Try) -> str:
    """The sentence that an attempt ends with."""
    try:
        attempt()
    except (TypeError, ValueError, RuntimeError) as problem:
        return str(problem)
    return "nothing"


def calls(last: bool) -> dict[str, Try]:
    """Ranks that bring other rows, or other things with them."""
    x, y = larger(12)
    loss = G(L.SupCon().double())
    torch.manual_seed(0)
    proxies = L.ProxyNCA(5, 4).double()
    labels, weights = nf.Relation.from_labels, torch.ones(12, dtype=torch.float64)
    seven = (x[:7], y[:7])
    triplet = tuple(torch.arange(3)[:, None])
    return {
        "width": lambda: loss(x[:, : 3 if last else 4], y),
        "type": lambda: loss(x.float() if last else x, y),
        "labels": lambda: loss(x, y[:5] if last else y),
        "NaN": lambda: loss(x * torch.nan if last else x, y),
        "NaN explained": lambda: loss.explain(x * torch.nan if last else x, y),
        "list": lambda: loss(x.tolist() if last else x, y),
        "relation": lambda: loss(x, labels(y) if last else y),
        "gradient": lambda: loss(x.clone().requires_grad_() if last else x, y),
        "no gradient": lambda: torch.no_grad()(loss)(x, y) if last else loss(x.clone().requires_grad_(), y),
        "reference": lambda: loss(x, y, None, *seven) if last else loss(x, y),
        "weights": lambda: loss(x, labels(y, weights=weights) if last else labels(y)),
        "types of weights": lambda: loss(x, labels(y, weights=weights.float() if last else weights)),
        "ignored": lambda: loss(x, labels(y, ignore=3 if last else None)),
        "ids": lambda: loss(x, y, ids=torch.arange(12)) if last else loss(x, y),
        "few ids": lambda: loss(x, y, ids=torch.arange(5 if last else 12)),
        "indices": lambda: loss(x, y, (torch.tensor([0]), torch.tensor([1]), torch.tensor([2]))),
        "matrix": lambda: loss(x, nf.Relation.from_matrix(y[:, None] == y[None, :])),
        "pair weights": lambda: loss(x, labels(y, weights=torch.ones(12, 12))),
        "second": lambda: torch.autograd.grad(loss(g := x.clone().requires_grad_(), y), g, create_graph=True),
        "labels of proxies": lambda: G(proxies)(x, y),
        "tuple of PML": lambda: G(LiftedStructureLoss())(x, y, triplet if last else None),
        "reference of PML": lambda: G(LiftedStructureLoss())(x, y, None, *seven),
    }


def losses(last: bool) -> dict[str, Try]:
    """Ranks whose losses differ."""
    x, y = larger(12)
    large = torch.randn(600, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def seeded() -> nn.Module:
        torch.manual_seed(int(last))
        return G(L.ProxyNCA(60, 4).double())

    def drifting() -> None:
        torch.manual_seed(0)
        inner = L.ProxyNCA(60, 4).double()
        loss = G(inner)
        for number in range(agreement.EVERY + 1):
            with torch.no_grad():
                inner.proxies += 1e-9 * number * last  # roundings are let pass
                inner.proxies += float(last and number == agreement.EVERY)
            loss(x, y)
        raise AssertionError("nobody looked again")

    def remembered() -> Tensor:
        memory = nf.CrossBatchMemory(L.SupCon().double(), size=20)
        if last:
            memory(x, y)
        return G(memory)(x, y)

    return {
        "k": lambda: G(L.DroTopK(k=7 if last else 5))(x, y),
        "k, many rows": lambda: G(L.DroTopK(k=7000 if last else 5))(large, torch.arange(600) // 4),
        "class": lambda: G(L.SupCon() if last else L.NTXent())(x, y),
        "inner": lambda: G(L.DroKL(pair=nf.pairs.Hinge(margin=0.3 if last else 0.2)))(x, y),
        "shape": lambda: G(L.ProxyNCA(60 + last, 4).double())(x, y),
        "averaged": lambda: G(L.SupCon(), averaged=last)(x, y),
        "mode": lambda: G(nf.CrossBatchMemory(L.SupCon().double(), 20)).train(not last)(x, y),
        "memory": remembered,
        "values": lambda: seeded()(x, y),
        "values later": drifting,
    }


def complaints(rank: int, world: int) -> dict[str, Any]:
    """What each rank hears; in between all still understand each other."""
    last = rank == world - 1
    found: dict[str, Any] = {name: heard(attempt) for name, attempt in (calls(last) | losses(last)).items()}
    x, y = larger(12)
    mine = x[: 0 if last else 12].clone().requires_grad_()
    found["empty"] = G(L.DroTopK(k=5), averaged=False)(mine, y[: len(mine)])
    found["empty"].backward()
    found["gradient of empty"] = mine.grad
    half = slice(6, 12) if last else slice(6)
    found["int8"] = G(L.SupCon())(x[half], y[half].to(torch.int8 if last else torch.int64))
    kinds = (nf.Relation.from_labels(y[half].to(kind)) for kind in (torch.int32, torch.int64))
    found["int32"] = G(L.SupCon())(x[half], list(kinds)[last])
    encoder = DistributedDataParallel(nn.Linear(4, 3, dtype=torch.float64))
    with torch.no_grad():
        encoder.module.weight.copy_(torch.eye(3, 4))
        encoder.module.bias.zero_()
    found["cached"] = nf.cached_step(encoder, mine.detach(), y[: len(mine)], G(L.SupCon()), 5)
    found["slope of cached"] = encoder.module.weight.grad
    found["worlds"] = _refused()
    return {name: x.detach() if isinstance(x, Tensor) else x for name, x in found.items()}


def _refused() -> str:
    """What the trainer says to processes that no launcher told of each other."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        os.environ.pop(name, None)
    with tempfile.TemporaryDirectory() as folder:
        return heard(lambda: fit(config(), Path(folder) / "run", data=tiny()))


def broken(rank: int, world: int) -> None:
    """Fail while all are there."""
    dist.barrier()
    raise ValueError("of every rank")


class Breaks(nn.Module):
    """An encoder, or a miner of pairs, that fails on some rank when it is called once more than `good` times."""

    def __init__(self, good: int | None) -> None:
        super().__init__()
        self.good, self.seen = good, 0
        self.inner = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        if self.good is not None and self.seen > self.good:
            raise ValueError("of this rank alone")
        return self.inner(x)


def silences(rank: int, world: int) -> dict[str, str]:
    """One rank fails by itself, says nothing, and does not come again; the others wait for it, but not for ever."""
    x, y = larger(12)
    last = rank == world - 1

    def alone(loss: Any) -> Callable[[Any], None]:
        def attempt(group: Any) -> None:
            gathered = G(loss(), group=group)
            for number in range(2):
                if last and number == 1:
                    raise ValueError("of this rank alone")
                gathered(x.clone().requires_grad_(), y).backward()

        return attempt

    def cached(good: int) -> Callable[[Any], None]:
        def attempt(group: Any) -> None:
            encoder = DistributedDataParallel(Breaks(good if last else None), process_group=group)
            nf.cached_step(encoder, x, y, G(L.SupCon(), group=group), 6)

        return attempt

    tries = {
        "loss": alone(lambda: L.DroTopK(k=5, engine="tiled")),
        "memory": alone(lambda: nf.CrossBatchMemory(L.SupCon().double(), size=20)),
        "before the loss": cached(1),
        "after the loss": cached(3),
    }
    groups = [dist.new_group(timeout=timedelta(seconds=5)) for _ in tries]
    dist.barrier()
    with ThreadPoolExecutor(len(tries)) as pool:  # each waits for its own group: all at once
        waiting = {
            name: pool.submit(heard, partial(attempt, group))
            for group, (name, attempt) in zip(groups, tries.items(), strict=True)
        }
    return {name: each.result() for name, each in waiting.items()}
