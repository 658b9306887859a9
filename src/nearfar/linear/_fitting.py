"""Fit a linear map in rounds: choose triplets in the space of A, optimize A on them, and choose again.

A stochastic round takes Adam steps on the triplets of drawn anchors:

    f_b(A) = Σ w_ijk μ·softplus((|A(x_i - x_j)|² - |A(x_i - x_k)|² + α)/μ)      anchors i of the batch, targets j,
                                                                               impostors k, w even or from a set

The gradient goes through z = A x, dA = (dZ)' X, so that no difference of rows is formed in the input space; f_b need
not decrease. In a certified round triplets, weights and μ are fixed, and each step lowers their loss by a recorded
decrease.
"""

import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearfar.linear._ccp import ccp
from nearfar.linear._convex import psd_reference
from nearfar.linear._descent import Path, descend, size
from nearfar.linear._neighbors import Classes, Triplets, choose, differences, sort_classes
from nearfar.linear._objective import TripletObjective
from nearfar.pairs import smooth_hinge
from nearfar.sets import UncertaintySet

RATE = 0.05  # the first step moves each entry of A by this share of their root mean square
ANNEAL = (1.0, 0.3)  # the temperatures at the start and the end of an annealed run, in margins (or 1 for a margin of 0)
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
    def start(cls, A: Tensor) -> "Adam":
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
    def of(cls, x: Tensor, chosen: Triplets) -> "Batch":
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
    """The options of a stochastic run."""

    margin: float  # α
    mu: float | None  # μ, or None to anneal it
    kind: str  # kind of triplets, see `choose`
    targets: int  # targets per anchor
    impostors: int  # impostors per anchor
    over: UncertaintySet | None  # the set of triplet weights, or None for uniform ones
    batch: int  # anchors drawn per round
    refresh: int  # steps per choice of triplets
    tolerance: float  # a loss of at most this ends the run

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


START = 0.1
"""Mean squared distance to a target at the start, in margins; so small that the loss is nearly linear in A'A and all
triplets determine the first directions, not only those violated at the start."""
PER_ANCHOR = 4  # triplets per anchor of a certified round: few triplets of many anchors overfit less


@dataclass(frozen=True)
class Step:
    """One step of a fit, and its certificate."""

    stage: str  # "sgd", "gd", "ccp" or "convex"
    round: int  # the number of its choice of triplets; within a round of gd or ccp, `value` never rises
    value: float  # the loss after the step; for "sgd" the loss of the batch before it
    mu: float  # the temperature of the round
    norm: float  # |A|_F in units where every feature has variance 1
    certified: bool  # whether the decrease is guaranteed
    decrease: float = math.nan  # the guaranteed decrease of the loss of its round; NaN if nothing is certified
    gap: float = math.nan  # relative duality gap of a ccp subproblem or of the convex solution; NaN elsewhere


@dataclass(frozen=True, eq=False)
class Problem:
    """Rows x [n, m] in float64, sorted by class, centered, each feature divided by its standard deviation."""

    x: Tensor
    classes: Classes

    @classmethod
    def of(cls, X: NDArray[np.float64], labels: NDArray[np.int64], scale: NDArray[np.float64]) -> "Problem":
        """Build from rows X [n, m], classes 0, 1, ... [n] and the standard deviations [m]."""
        classes = sort_classes(torch.tensor(labels))
        return cls(torch.tensor((X - X.mean(axis=0)) / scale)[classes.order], classes)


@dataclass(eq=False)
class Run:
    """The state of a fit: its problem, its options, and the steps so far."""

    problem: Problem
    plan: Plan  # the margin, the temperature, and how to choose triplets
    most: int  # the largest number of triplets of a certified round
    seed: int  # of the draws
    verbose: int = 0  # whether to print a line per round
    history: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        self.round = self.history[-1].round + 1 if self.history else 0

    def scale(self, A: Tensor) -> Tensor:
        """Scale A so that the mean squared distance to a target is `START` margins, in any units of the data."""
        A = A / size(A)
        chosen = self.plan.choose(self.problem.x, A, self.problem.classes, self.generator)
        u, v, _ = differences(self.problem.x, chosen, self.most, self.generator)
        for rows in (u, v):  # targets may all be duplicates of their anchors
            mean = float((rows @ A.T).square().sum(dim=1).mean())
            if mean > 0:
                return A * math.sqrt(START * (self.plan.margin or 1.0) / mean)
        return A

    def run_stochastic(self, A: Tensor, steps: int) -> Tensor:
        """Run rounds of Adam in float32, with a cosine schedule of the learning rate."""
        state, x, refresh = Adam.start(A.float()), self.problem.x.float(), self.plan.refresh
        for first in range(0, steps, refresh):
            mu = anneal(self.plan.mu, self.plan.margin, first / max(1, steps - refresh))
            shares = [cosine(t, steps) for t in range(first, min(first + refresh, steps))]
            if self.adam_round(state, x, mu, shares) <= self.plan.tolerance:
                break
        return state.A.double()

    def adam_round(self, state: Adam, x: Tensor, mu: float, shares: list[float]) -> float:
        """Choose triplets once and take a step for each share of the learning rate; return the last loss."""
        batch = Batch.of(x, self.plan.choose(x, state.A, self.problem.classes, self.generator))
        values: list[float] = []
        for share in shares:
            value, gradient = batch.value_and_gradient(state.A, self.plan.margin, mu, self.plan.over)
            values.append(value)
            if value <= self.plan.tolerance:
                break
            state.step(gradient, share)
        norm = size(state.A)
        self._record([Step("sgd", self.round, value, mu, norm, certified=False) for value in values])
        return values[-1]

    def run_certified(self, stage: str, A: Tensor, steps: int, refresh: int, *, polish: bool = False) -> Tensor:
        """Run rounds of gd, ccp or the convex problem in float64; with `polish`, at the last temperature only."""
        for first in range(0, steps, refresh):
            share = 1.0 if polish else min(1.0, first / max(1, steps - refresh))
            mu = anneal(self.plan.mu, self.plan.margin, share)
            count = min(refresh, steps - first)
            A = self._run_round(stage, self.objective(A, mu), A, count)
        return A

    def objective(self, A: Tensor, mu: float) -> TripletObjective:
        """The loss of at most `most` triplets chosen in the space of A; weights of a set are computed at A."""
        each = 1 if self.plan.kind == "hard" else min(PER_ANCHOR, self.plan.targets * self.plan.impostors)
        wide = replace(self.plan, batch=-(-self.most // each))
        chosen = wide.choose(self.problem.x.float(), A.float(), self.problem.classes, self.generator)
        u, v, _ = differences(self.problem.x, chosen, self.most, self.generator)
        objective = TripletObjective(u, v, margin=self.plan.margin, mu=mu)
        if self.plan.over is None:
            return objective
        s = objective.products(A)[2]
        weights = triplet_weights(s, torch.ones_like(s), mu, self.plan.over)
        # without loss there is no worst case
        return objective.reweighted(weights) if float(weights.sum()) > 0 else objective

    def _run_round(self, stage: str, objective: TripletObjective, A: Tensor, steps: int) -> Tensor:
        """Run and record a certified round."""
        if stage == "convex":
            return self._convex(objective, A, steps)
        solve = ccp if stage == "ccp" else descend
        path: Path = solve(objective, A, steps=steps, tolerance=self.plan.tolerance)
        self._record(
            [
                Step(stage, self.round, each.value, objective.mu, each.norm, True, each.certified, each.gap)
                for each in path.iterates[1:]
            ]
        )
        return path.A

    def _convex(self, objective: TripletObjective, A: Tensor, steps: int) -> Tensor:
        """Minimize over M = A'A ⪰ 0; the recorded gap is the one before the truncation to rank d."""
        if not (objective.u.any() or objective.v.any()):  # all rows are equal, so every map is optimal
            return A
        found = psd_reference(objective, A.T @ A, steps=steps, tolerance=max(self.plan.tolerance, 1e-12))
        before, cut = float(objective.value(A)), found.factor(len(A))
        value, gap = float(objective.value(cut)), (found.value - found.lower) / max(found.value, 1e-300)
        fell = value <= before
        decrease = before - value if fell else math.nan
        self._record([Step("convex", self.round, value, objective.mu, size(cut), fell, decrease, gap)])
        return cut if size(cut) > 0 else A  # if M = 0 is optimal, keep A: A = 0 would map all rows to one

    def _record(self, steps: list[Step]) -> None:
        self.history.extend(steps)
        if self.verbose and steps:
            from nearfar._utils.console import say

            last = steps[-1]
            sure = f"certified decrease {sum(s.decrease for s in steps):.3g}" if last.certified else "stochastic"
            say(f"{last.stage:>6} round {self.round:3d}  loss {last.value:.5f}  |A| {last.norm:.3g}  {sure}")
        self.round += 1
