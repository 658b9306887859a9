"""Adam on the smoothed triplet loss of random anchors, with a learning rate derived from the data.

    f_b(A) = Σ w_ijk μ·softplus((|A(x_i - x_j)|² - |A(x_i - x_k)|² + α)/μ)      anchors i of the batch, targets j,
                                                                               impostors k, w even or from a set
The gradient goes through z = A x, dA = (dZ)' X, so that no difference of rows is formed in the input space. Nothing is
certified: f need not decrease.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfar.linear._neighbors import Classes, Triplets, choose
from nearfar.pairs import smooth_hinge
from nearfar.sets import UncertaintySet

RATE = 0.05
"""The first step moves each entry of A by this share of their root mean square."""
ANNEAL = (1.0, 0.3)
"""The temperatures at the start and the end of an annealed run, in margins (or 1 for a margin of 0)."""
COPY_BELOW = 0.8  # rows are copied if a batch uses less than this share of them; else all are mapped


@dataclass(eq=False)
class Adam:
    """The Adam optimizer of a matrix A [d, m]; `pace` is the learning rate."""

    A: Tensor
    first: Tensor
    second: Tensor
    pace: float
    count: int = 0

    @classmethod
    def start(cls, A: Tensor) -> Adam:
        """Start without moments; the learning rate is `RATE` times the root mean square of A."""
        return cls(A, torch.zeros_like(A), torch.zeros_like(A), RATE * float(A.square().mean().sqrt()))

    def step(self, gradient: Tensor, share: float) -> None:
        """Take a step A ← A - share·pace·m̂/√v̂, with moments over about 10 and 100 steps."""
        self.count += 1
        self.first.lerp_(gradient, 0.1)
        self.second.lerp_(gradient.square(), 0.01)
        scale = math.sqrt(1 - 0.99**self.count) / (1 - 0.9**self.count)
        # entries that never had a gradient (of a constant feature) do not move
        self.A.addcdiv_(self.first, self.second.sqrt().clamp_min_(1e-30), value=-share * self.pace * scale)


@dataclass(frozen=True, eq=False)
class Batch:
    """The rows used by a set of triplets, and the triplets as indices into them."""

    x: Tensor
    anchors: Tensor
    targets: Tensor
    impostors: Tensor
    measure: Tensor

    @classmethod
    def of(cls, x: Tensor, chosen: Triplets) -> Batch:
        """Copy the rows that are used, unless they are most of x."""
        b, k = chosen.targets.shape
        places = torch.cat([chosen.anchors, chosen.targets.flatten(), chosen.impostors.flatten()])
        rows, index = torch.unique(places, return_inverse=True)
        if len(rows) < COPY_BELOW * len(x):
            x, places = x[rows], index
        near, far = places[b : b + b * k], places[b + b * k :]
        return cls(x, places[:b], near.view(b, k), far.view(b, -1), chosen.measure)

    def value_and_gradient(
        self, A: Tensor, margin: float, mu: float, over: UncertaintySet | None
    ) -> tuple[float, Tensor]:
        """The loss f_b(A) and its gradient [d, m]; by Danskin's theorem the weights p* of a set count as constant."""
        z = self.x @ A.T
        head = z[self.anchors][:, None]
        near, far = head - z[self.targets], head - z[self.impostors]
        s = near.square().sum(dim=2)[:, :, None] - far.square().sum(dim=2)[:, None] + margin
        weights = triplet_weights(s, self.measure, mu, over)
        value = float((weights * smooth_hinge(s, mu)).sum())
        q = weights * (torch.sigmoid(s / mu) if mu else (s > 0).to(s.dtype))
        near *= 2 * q.sum(dim=2)[:, :, None]
        far *= -2 * q.sum(dim=1)[:, :, None]
        slope = torch.zeros_like(z)
        slope.index_add_(0, self.anchors, near.sum(dim=1) + far.sum(dim=1))
        slope.index_add_(0, self.targets.flatten(), near.flatten(0, 1), alpha=-1)
        slope.index_add_(0, self.impostors.flatten(), far.flatten(0, 1), alpha=-1)
        return value, slope.T @ self.x


def triplet_weights(s: Tensor, measure: Tensor, mu: float, over: UncertaintySet | None) -> Tensor:
    """Weights of the shape of s that sum to 1: uniform over existing triplets, or the worst case over `over`."""
    if over is None:
        return measure / measure.sum()
    losses = smooth_hinge(s, mu).reshape(1, -1)
    return over.weights(losses, measure.reshape(1, -1) > 0).reshape(s.shape)


def anneal(mu: float | None, margin: float, share: float) -> float:
    """The temperature μ after a share in [0, 1] of the run: `mu`, or if None geometric between the ends of `ANNEAL`."""
    if mu is not None:
        return mu
    first, last = ANNEAL
    return float((margin or 1.0) * first * (last / first) ** share)


@dataclass(frozen=True)
class Plan:
    """The options of a stochastic run.

    Attributes:
        margin: α.
        mu: μ, or None to anneal it.
        kind: kind of triplets, see `choose`.
        targets: targets per anchor.
        impostors: impostors per anchor.
        over: the set of triplet weights, or None for uniform ones.
        batch: anchors drawn per round.
        refresh: steps per choice of triplets.
        tolerance: a loss of at most this ends the run.
    """

    margin: float
    mu: float | None
    kind: str
    targets: int
    impostors: int
    over: UncertaintySet | None
    batch: int
    refresh: int
    tolerance: float

    def choose(self, x: Tensor, A: Tensor, classes: Classes, generator: torch.Generator) -> Triplets:
        """Choose the triplets of a random batch of anchors, in the space of A."""
        anchors = classes.anchors()
        if len(anchors) > self.batch:
            anchors = anchors[torch.randperm(len(anchors), generator=generator)[: self.batch].sort().values]
        counts = {"targets": self.targets, "impostors": self.impostors}
        return choose(x @ A.T, classes, anchors, kind=self.kind, generator=generator, **counts)


def cosine(t: int, steps: int) -> float:
    """The cosine schedule ½(1 + cos(πt/T)): the share of the learning rate at step t of T."""
    return 0.5 * (1 + math.cos(math.pi * t / steps))
