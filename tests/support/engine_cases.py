"""Losses, sets, miners and relations for tests that compare engines, and the comparison itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from table import DIM
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import nearfar as nf

L, M, P, S = nf.losses, nf.miners, nf.pairs, nf.sets


CLOSE = {"atol": 1e-10, "rtol": 1e-10}


def on(loss, engine, tile=None):
    """The same loss on another engine, in strips of `tile` rows."""
    loss.engine, loss.tile = engine, tile
    return loss


def measured(loss, embeddings, *args, ref_emb=None, parameters=None, **kwargs):
    """Value, and gradients of embeddings, reference and parameters."""
    leaf = embeddings.detach().clone().requires_grad_()
    if ref_emb is not None:
        kwargs["ref_emb"] = ref_emb.detach().clone().requires_grad_()
    value = loss(leaf, *args, **kwargs)
    # unequal shares, so that a value an anchor is pulled unequally too
    (value * torch.linspace(1.0, 2.0, value.numel(), dtype=value.dtype).reshape(value.shape)).sum().backward()
    more = [kwargs["ref_emb"].grad] if ref_emb is not None else []
    return [value.detach(), leaf.grad, *more, *(p.grad for p in parameters or loss.parameters())]


def check(make, tiles, embeddings, *args, close=CLOSE, **kwargs):
    wanted = measured(on(make(), "dense"), embeddings, *args, **kwargs)
    for tile in tiles:
        found = measured(on(make(), "tiled", tile), embeddings, *args, **kwargs)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, **close)


def larger(n=41, seed=3, dim=DIM):
    """Classes of one to seven rows, in no order; some singletons."""
    rng = np.random.default_rng(seed)
    sizes = [7, 6, 6, 5, 5, 4, 3, 2, 1, 1, 1]
    y = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))[:n]
    return torch.tensor(rng.normal(size=(len(y), dim))), torch.tensor(y)


def relations(labels):
    n = len(labels)
    rng = torch.Generator().manual_seed(4)
    positive = labels[:, None] == labels[None, :]
    hot = torch.rand(n, 4, generator=rng) < 0.3
    stand = torch.zeros(n, dtype=torch.bool)
    stand[[0, 3, 5, 8, 11, 20]] = True
    weights = torch.rand(n, n, generator=rng, dtype=torch.float64) * (torch.rand(n, n, generator=rng) < 0.8)
    R = nf.Relation
    return {
        "ignored": R.from_labels(torch.where(torch.arange(n) % 5 == 2, -1, labels), ignore=-1),
        "sample weights": R.from_labels(labels, weights=torch.rand(n, generator=rng, dtype=torch.float64)),
        "pair weights": R.from_labels(labels, weights=weights),
        "multi-label": R.from_multilabel(hot),
        "matrix": R.from_matrix(positive, torch.rand(n, n, generator=rng) < 0.7),
        "representatives": R.from_labels(labels, representatives=stand),
        "among": R.from_labels(labels, representatives=stand, among_representatives=True),
    }


SETS = {
    "mean": S.Mean(), "worst": S.Worst(), "top-k": S.TopK(7), "top-k-part": S.TopK(3.3),
    "fraction": S.TopK(fraction=0.2),
    "kl": S.KL(0.1), "kl-zero_member": S.KL(0.2, normalized=False, zero_member=True), "kl-ball": S.KLBall(0.3),
    "kl-ball-corner": S.KLBall(30.0), "kl-ball-flat": S.KLBall(0.0), "chi-square": S.ChiSquare(1.0),
    "chi-square-far": S.ChiSquare(300.0), "chi-square-corner": S.ChiSquare(1e7), "held": S.DetachedWeights(S.KL(0.3)),
    "held-zero_member": S.DetachedWeights(S.KL(0.3, zero_member=True)),
    "held-drop": S.DetachedWeights(S.KL(0.3, zero="drop")),
    "drop-zero_member": S.KL(0.3, zero="drop", zero_member=True), "held-top": S.DetachedWeights(S.TopK(5)),
    "drop": S.KL(0.1, zero="drop"), "worst-zero_member": S.Worst(zero_member=True),
    "top-zero_member": S.TopK(4, zero_member=True), "power": S.PowerWeights(1.0, 3.0),
}  # fmt: skip


PRODUCTS = {
    "lifted-none": lambda: L.LiftedStructure(reduction="none"),
    "lifted-sum": lambda: L.LiftedStructure(reduction="sum"),
    "anchor-none": lambda: nf.RobustLoss(pair=P.Hinge(), over=S.ChiSquare(1.0), groups="anchor", reduction="none"),
    "supcon-none": lambda: L.SupCon(reduction="none"),
    "nt-xent-none": lambda: L.NTXent(reduction="none"),
    "angular-none": lambda: L.Angular(reduction="none"),
    "angular-sum": lambda: L.Angular(reduction="sum"),
    "balanced": lambda: L.Triplet(mining="balanced", margin=0.3),
    "swap": lambda: L.Triplet(swap=True, margin=0.3),
    "triplets-smooth": lambda: L.Triplet(smooth=0.1, margin=0.3),
    "semi-hard-nonzero": lambda: L.Triplet(mining="semihard", margin=0.3, reduction="nonzero"),
    "learnt": lambda: L.Margin(learn=True),
    "learnt-per-anchor": lambda: nf.RobustLoss(pair=P.Hinge(learn=True), over=S.KL(0.2), groups="anchor_sign"),
    "learnt-top-k": lambda: nf.RobustLoss(pair=P.Hinge(learn=True), over=S.TopK(9)),
    "learnt-sign": lambda: nf.RobustLoss(pair=P.Hinge(learn=True), over=S.TopK(9), groups="sign"),
    "proxy-anchor-mined": lambda: L.MultiSimilarity(miner=M.Hard()),
    "lifted-mined": lambda: L.LiftedStructure(miner=M.MultiSimilarity()),
    "lifted-top-k": lambda: nf.RobustLoss(
        pair=P.Linear(), over=S.TopK(3), groups="anchor_sign", link=nf.links.LiftedLink()
    ),
}


MINERS = {
    "multi-similarity": M.MultiSimilarity(),
    "hard": M.Hard(),
    "semi-hard": M.SemiHard(),
    "balanced-hard": M.BalancedHard(),
    "expected": M.DistanceWeighted(sample=False),
}


class Largest(TorchDispatchMode):
    """Watches the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, torch.Tensor):
                stored = x.untyped_storage().nbytes() // max(1, x.element_size())
                self.most = max(self.most, min(x.numel(), stored))
        return made


def largest(loss, embeddings, *args, **kwargs):
    watch = Largest()
    with watch:
        loss(embeddings.requires_grad_(), *args, **kwargs).sum().backward()
    return watch.most
