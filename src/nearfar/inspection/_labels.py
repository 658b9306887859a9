"""The probability that a label is wrong, from a mixture that is fitted to the labels as they are.

Two pieces of evidence speak for class c of row i, and neither uses the row's own label:

    e₁(i, c) = cos(z_i, mean of class c without i)        of centered vectors
    e₂(i, c) = log(1 + number of c among the k nearest rows)

With p_i(c) = softmax over c of (a₁ e₁ + a₂ e₂), a label is right with probability 1 - ε and then drawn from p_i; else
it is drawn from the other classes evenly. The likelihood of the given labels is maximized over a₁, a₂ and ε, and

    score_i = P(label is wrong) = ε (1 - p_i(y)) / (C - 1)  /  [(1 - ε) p_i(y) + ε (1 - p_i(y)) / (C - 1)].
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nearfar.evaluation import Neighbors
from nearfar.similarity import unit

ENTRIES = 2**21  # entries of a tile [rows, classes], and of the sample to which the mixture is fitted
STEPS = 60  # steps of L-BFGS at most


@dataclass(frozen=True, eq=False)
class Doubts:
    """What the mixture says about each label."""

    score: Tensor  # [n] the probability that the label is wrong; 0 for rows alone in their class
    label: Tensor  # [n] the most probable other class
    noise: float  # ε, the share of wrong labels


def doubt_labels(z: Tensor, y: Tensor, near: Neighbors, *, seed: int = 0) -> Doubts:
    """Fit the mixture to a sample, and score each label y of 0..C-1, each of which occurs; z are centered unit rows."""
    counts = torch.bincount(y)
    classes = len(counts)
    found = Doubts(torch.zeros(len(y)), y.clone(), 0.0)
    judged = (counts[y] > 1).nonzero().flatten()
    if classes < 2 or not len(judged):
        return found
    sums = torch.zeros(classes, z.shape[1], dtype=z.dtype).index_add_(0, y, z)
    generator = torch.Generator().manual_seed(seed)
    tall = max(2, ENTRIES // classes)
    chosen = judged[torch.randperm(len(judged), generator=generator)[:tall]]
    weights, noise = _fit(_evidence(chosen, z, y, near.places, sums), y[chosen])
    for rows in torch.split(judged, tall):
        p = torch.softmax(torch.einsum("e,etc->tc", weights, _evidence(rows, z, y, near.places, sums)), dim=1)
        own = p.gather(1, y[rows, None])[:, 0]
        found.score[rows] = _wrong(own, noise, classes).float()
        found.label[rows] = p.scatter(1, y[rows, None], -1.0).argmax(dim=1)
    return Doubts(found.score, found.label, float(noise))


def _evidence(rows: Tensor, z: Tensor, y: Tensor, places: Tensor, sums: Tensor) -> Tensor:
    """e₁ and e₂ of some rows, [2, t, C] in float64."""
    mine, own = z[rows], y[rows]
    cosine = mine @ unit(sums).T
    cosine.scatter_(1, own[:, None], (unit(sums[own] - mine) * mine).sum(dim=1, keepdim=True))
    votes = torch.zeros_like(cosine).scatter_add_(1, y[places[rows]], torch.ones_like(places[rows], dtype=z.dtype))
    return torch.stack([cosine.double(), votes.double().log1p()])


def _wrong(own: Tensor, noise: Tensor, classes: int) -> Tensor:
    """P(label is wrong) where the class of the label has probability `own`."""
    bad = noise * (1 - own) / (classes - 1)
    return bad / ((1 - noise) * own + bad).clamp_min(torch.finfo(own.dtype).tiny)


def _fit(evidence: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The weights (a₁, a₂) and ε of the largest likelihood; a weak prior keeps them finite if classes are separate."""
    classes = evidence.shape[2]
    scale = 1 / evidence.std(dim=(1, 2)).clamp_min(1e-6)
    logs = torch.zeros(len(evidence), dtype=torch.float64, requires_grad=True)
    odds = torch.tensor(-3.0, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([logs, odds], max_iter=STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        p = torch.log_softmax(torch.einsum("e,etc->tc", logs.exp() * scale, evidence), dim=1)
        own, noise = p.gather(1, y[:, None])[:, 0].exp(), torch.sigmoid(odds)
        given = (1 - noise) * own + noise * (1 - own) / (classes - 1)
        prior = (logs.square().sum() + (odds + 3).square() / 4) / len(y)
        value = prior - given.clamp_min(1e-300).log().mean()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    return (logs.exp() * scale).detach(), torch.sigmoid(odds).detach()
