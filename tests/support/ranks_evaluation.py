"""Evaluations that several ranks share, each beside the same evaluation by one process; and how they fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import nearfar as nf
from nearfar._utils.process_group import Group
from nearfar.evaluation import _exact_search as exact_search
from nearfar.evaluation import _mine as mining
from nearfar.evaluation import _rank_counting as rank_counting
from nearfar.evaluation import _retrieval as retrieval
from nearfar.evaluation import k_means, neighbors
from nearfar.evaluation import parallel as module
from nearfar.evaluation.parallel import current_group, split_over


@contextmanager
def small_tiles() -> Iterator[None]:
    """Tiles of 192 x 192, so that two thousand rows are many strips on every rank, with messages within a strip."""
    constants = {rank_counting: ("TILE", "WIDE"), retrieval: ("TILE",), module: ("WORK",), mining: ("CHUNK",)}
    before = {(owner, name): getattr(owner, name) for owner, names in constants.items() for name in names}
    usual = exact_search.strips.__kwdefaults__["tile"]
    exact_search.strips.__kwdefaults__["tile"] = 192 * 192
    for owner, name in before:
        setattr(owner, name, {"WIDE": 512, "WORK": 2**20, "CHUNK": 500}.get(name, 2**17))
    try:
        yield
    finally:
        exact_search.strips.__kwdefaults__["tile"] = usual
        for (owner, name), value in before.items():
            setattr(owner, name, value)


N = 2100
"""Rows that are enough for the sweep that multiplies each pair of strips once."""


def rows(n: int, d: int = 12, seed: int = 0, **more: Any) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), **more)


def classes(n: int, count: int, seed: int = 1) -> Tensor:
    return torch.randint(count, (n,), generator=torch.Generator().manual_seed(seed))


def cases() -> dict[str, Callable[[], Any]]:
    """Each gives something that is compared entry by entry."""
    y, names = torch.randperm(N, generator=torch.Generator().manual_seed(1)) // 4, torch.arange(900) % 80
    x, gallery = rows(N)[y] + 0.9 * rows(N, seed=2), rows(N)[names] + 0.9 * rows(900, seed=3)
    few = torch.round(rows(900, 3, seed=4))  # most rows come several times: ties all over
    tiny = torch.where(torch.arange(N)[:, None] == N - 1, x * 1e-30, x)
    several = nf.Relation.from_multilabel((rows(500, 6, seed=5) > 1).long())
    scored = nf.evaluate
    return {
        "among themselves": lambda: scored(x, y, resamples=50),
        "euclidean": lambda: scored(x, y, similarity="euclidean", resamples=0),
        "far from the origin": lambda: scored(x[:700] + 1000, y[:700], similarity="euclidean", resamples=0),
        "dot, in float64": lambda: scored(x[:700].double(), y[:700], similarity="dot", resamples=0),
        "half precision": lambda: scored(x[:700].half(), y[:700], resamples=0),
        "many of a class": lambda: scored(x[:500], y[:500] % 3, resamples=0),
        "gallery": lambda: scored(x, y, ref_emb=gallery, ref_labels=names, resamples=0),
        "small gallery": lambda: scored(x, y, ref_emb=gallery[:100], ref_labels=names[:100], resamples=0),
        "favorable": lambda: scored(few, classes(900, 60), ties="favorable", resamples=0),
        "ties": lambda: scored(few, classes(900, 60), resamples=0),
        "deep ties": lambda: scored(few, classes(900, 600), ks=(1,), resamples=0),
        "norms that vanish": lambda: scored(tiny, y, resamples=0),
        "fewer rows than ranks": lambda: scored(x[:2], y[:2] * 0, ks=(1,), resamples=0),
        "clustering": lambda: scored(x[:300], y[:300] % 20, clustering=True, resamples=0),
        "relation": lambda: scored(rows(500, seed=6), several, resamples=20),
        "k-means": lambda: vars(k_means(x[:900], 40, restarts=1)),
        "neighbors with ties": lambda: vars(neighbors(few, k=9, similarity="euclidean")),
        "neighbors, each pair once": lambda: vars(neighbors(x, k=8)),
        "neighbors, norms that vanish": lambda: vars(neighbors(tiny, k=9)),
        "mined among themselves": lambda: vars(nf.mine(x, y, margin=0.05)),
        "mined in a gallery": lambda: vars(nf.mine(x[:700], y[:700] % 80, ref_emb=gallery, ref_labels=names, k=5)),
        "mined, fewer queries than ranks": lambda: vars(nf.mine(x[:1], y[:1] * 0, ref_emb=x[:9], ref_labels=y[:9] * 0)),
    }


def values(found: Any) -> dict[str, Any]:
    """Everything in a result, tensors as bytes."""
    fields = found if isinstance(found, dict) else {**found.to_dict(), **vars(found.per_query)}
    return {name: v.numpy().tobytes() if isinstance(v, Tensor) else v for name, v in fields.items()}


def compared(rank: int, world: int) -> dict[str, bool]:
    """Whether each case is the same by one process and by all."""
    found = {}
    with small_tiles():
        for name, case in cases().items():
            alone = values(case())
            with split_over(Group("evaluate")):
                found[name] = values(case()) == alone
    return found


def failing(rank: int, world: int) -> list[str]:
    """What each rank hears of a row that only one of them reads."""
    x, heard = rows(300), []
    x[299] = torch.nan
    with split_over(Group("evaluate")):
        for attempt in (lambda: nf.evaluate(x, classes(300, 5)), lambda: neighbors(x, k=3)):
            try:
                attempt()
            except ValueError as error:
                heard.append(str(error))
    assert current_group().world == 1
    return heard


def everything(rank: int, world: int) -> Any:
    return compared(rank, world), failing(rank, world)
