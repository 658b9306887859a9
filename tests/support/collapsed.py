"""Batches whose classes have collapsed, and every loss that can be given a Euclidean similarity."""

from __future__ import annotations

import inspect
import math
import re
from pathlib import Path

import torch
from table import ROWS

import nearfar as nf
from nearfar.similarity import NegEuclidean, NegSquaredEuclidean

L = nf.losses
KINDS = (NegEuclidean, NegSquaredEuclidean)
SPREADS = (1e-2, 1e-3, 1e-4, 1e-5)
APART = (math.inf, 0.6, 0.2, 0.05)
"""How far classes are apart: at right angles, where the usual margins push no more; at distances at which one or
another margin is felt; and so near that rows crowd and get a new origin."""
CLOSE = 1e-4
"""What is asked for is 1e-3."""
K = {"k": 6}
NEEDS = {"DroTopK": K, "DroTopKPN": K, "DroTrimmed": {"top": 3, **K}, "DroTrimmedPN": {"wrong": 0.3, **K}}
PROXIES = {row.name for row in ROWS if row.proxies}


def takes_distances(name):
    return "similarity" in inspect.signature(getattr(L, name)).parameters and name not in PROXIES


def with_similarity(name, kind):
    return lambda: getattr(L, name)(similarity=kind(), **NEEDS.get(name, {}))


MADE = [row for row in ROWS if not row.proxies and isinstance(getattr(row.make(), "similarity", None), KINDS)]
LOSSES = {row.id: row.make for row in MADE} | {
    f"{name}-{kind.__name__}": with_similarity(name, kind)
    for name in L.__all__
    for kind in KINDS
    if takes_distances(name)
}


def collapsed(spread, apart, n=32, dim=16, seed=0):
    """Classes of four around their centers, float32, and labels."""
    rng = torch.Generator().manual_seed(seed)
    centers = torch.eye(dim)[: n // 4]
    if apart < math.inf:
        centers = torch.ones(dim) + apart * torch.randn(n // 4, dim, generator=rng)
    labels = torch.arange(n) % (n // 4)
    rows = 2 * torch.nn.functional.normalize(centers, dim=1)[labels] + spread * torch.randn(n, dim, generator=rng)
    return rows.float(), labels


def slope(loss, rows, labels, dtype, **more):
    leaf = rows.detach().clone().to(dtype).requires_grad_()
    more = {key: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x for key, x in more.items()}
    (found,) = torch.autograd.grad(loss.to(dtype)(leaf, labels, **more), leaf)
    return found.double()


def off(found, wanted):
    """How far a gradient lies from another, beside that one's length, if float32 can hold it."""
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-30))


def holds(make, engine, arrange=lambda rows, labels: (rows, labels, {}), apart=APART):
    """The float32 gradient at all spreads and distances of classes is that of float64; some are not 0.

    Args:
        make: a new loss.
        engine: which is held to dense.
        arrange: gives rows, labels and keywords of a call from the rows and labels of a batch.
        apart: distances of classes.
    """
    felt = False
    for gap in apart:
        for spread in SPREADS:
            rows, labels, more = arrange(*collapsed(spread, gap))
            loss, exact = make(), make()
            loss.engine, exact.engine = engine, "dense"
            wanted = slope(exact, rows, labels, torch.float64, **more)
            found = slope(loss, rows, labels, torch.float32, **more)
            assert off(found, wanted) < CLOSE, (gap, spread)
            felt |= bool(wanted.norm() > 1e-6)
    assert felt


def on_ranks(rank, world):
    """How far the gradient of this rank's rows is off, by engine."""
    rows, labels = collapsed(1e-4, 0.6)
    here = slice(len(rows) * rank // world, len(rows) * (rank + 1) // world)
    wanted, found = slope(L.LiftedStructure(engine="dense"), rows, labels, torch.float64)[here], {}
    for engine in ("dense", "tiled"):
        leaf = rows[here].clone().requires_grad_()
        nf.Distributed(L.LiftedStructure(engine=engine), averaged=False)(leaf, labels[here]).backward()
        found[engine] = off(leaf.grad.double(), wanted)
    return found


EUCLIDEAN = [row for row in ROWS if not row.proxies and isinstance(row.make().similarity, KINDS)]


def crowd(spread, n=32, dim=16, seed=0):
    """Rows around one point at distance 2 from 0, in float32, and labels."""
    rng = torch.Generator().manual_seed(seed)
    middle = 2 * torch.nn.functional.normalize(torch.ones(dim) + 0.3 * torch.randn(dim, generator=rng), dim=0)
    return (middle + spread * torch.randn(48, dim, generator=rng)[:n]).float(), torch.arange(n) // 4


def stated():
    """The largest error that the documentation names for each spread."""
    text = (Path(__file__).parents[2] / "docs" / "guides" / "precision.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| (1e-\d) \| (\S+) \| [\d.]+ \| -?[\d.]+ \|$", text, re.MULTILINE)
    return {float(spread): float(bound) for spread, bound in lines}
