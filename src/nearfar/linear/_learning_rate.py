"""A learning rate for the last linear layer of a network, from the curvature bound L(R) on its inputs.

The triplet loss of a head x ↦ W x + b on fixed inputs is f(W) of `TripletObjective`, since the bias cancels. The safe
step of f is

* a bound on the learning rate if plain SGD trains the head alone, on the mean loss μ·softplus((|Wu|² - |Wv|² + α)/μ) of
  these triplets, without normalizing embeddings: the loss of these triplets cannot rise;
* a heuristic for other batches, for layers below that are trained too, for momentum or Adam, for embeddings of unit
  length and for other losses. It still scales correctly with the inputs and the weights.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nearfar._utils.checks import check_positive
from nearfar._utils.tensors import check_embeddings
from nearfar.linear._descent import safe_step, size
from nearfar.linear._objective import TripletObjective


@dataclass(frozen=True)
class Suggestion:
    """A learning rate η with η·L = 1, where L bounds the curvature along the step, and the quantities behind it.

    Attributes:
        rate: η, the largest learning rate that is guaranteed to lower the loss of these triplets.
        smoothness: L(|W|) of the whole ball; 1/L is a smaller learning rate.
        value: f(W).
        gradient: |∇f(W)|_F.
        norm: |W|_F.
    """

    rate: float
    smoothness: float
    value: float
    gradient: float
    norm: float

    @property
    def decrease(self) -> float:
        """The guaranteed decrease (η/2)|∇f|² of one plain SGD step at this learning rate."""
        return self.rate / 2 * self.gradient**2


def suggest_step(
    head: nn.Linear | Tensor, triplets: Sequence[Tensor], *, margin: float = 1.0, mu: float = 1.0
) -> Suggestion:
    """Suggest a learning rate η for a linear head W [d, m] from triplets of its inputs.

    It is `safe_step` with the curvature around W: η·Σ wᵢ(2bᵢ + (|W Bᵢ| + η|∇f|bᵢ)²/μ) = 1. Scaling the inputs by c
    scales η by about c⁻² to c⁻⁴; scaling the inputs by c and the weights by 1/c scales η by exactly c⁻².

    Args:
        head: the layer or its weight, [d, m].
        triplets: inputs of the head for anchors, positives and negatives, three tensors [n, m].
        margin: α of the loss.
        mu: μ > 0, the smoothing of the loss; the hinge has no bound.

    Returns:
        The learning rate and the quantities behind it. The docstring of the module says when it is a bound.

    >>> head = nn.Linear(3, 2)
    >>> x = torch.eye(3)
    >>> suggest_step(head, (x[:1], x[1:2], x[2:])).rate > 0
    True
    """
    check_positive("suggest_step", "mu", mu)
    weight = (head.weight if isinstance(head, nn.Linear) else head).detach()
    if len(triplets) != 3:
        raise ValueError(
            f"suggest_step: triplets must be three tensors (anchors, positives, negatives), but {len(triplets)} came."
        )
    for name, rows in zip(("anchors", "positives", "negatives"), triplets, strict=True):
        check_embeddings("suggest_step", name, rows)
        if rows.shape[1] != weight.shape[1] or len(rows) != len(triplets[0]):
            raise ValueError(
                f"suggest_step: {name} must have shape [{len(triplets[0])}, {weight.shape[1]}], inputs of the head, "
                f"but came with shape {list(rows.shape)}."
            )
    anchors, positives, negatives = (rows.detach().to(torch.float64) for rows in triplets)
    objective = TripletObjective(anchors - positives, anchors - negatives, margin=margin, mu=mu)
    A = weight.to(torch.float64)
    value, gradient = objective.value_and_gradient(A)
    norm = size(A)
    return Suggestion(
        safe_step(objective, A, gradient, local=True), objective.smoothness(norm), float(value), size(gradient), norm
    )


class StepGuard:
    """Cap the learning rate of each optimizer step at the η that `suggest_step` computes for its batch.

    The learning rates are restored after the step, so schedules are not affected. With momentum β the cap is (1-β)η,
    since velocities add up to 1/(1-β) steps.

    Args:
        head: the last linear layer.
        optimizer: its learning rates are capped, in every parameter group.
        margin: α of the loss.
        mu: μ > 0 of the loss.

    >>> head = nn.Linear(3, 2)
    >>> guard = StepGuard(head, torch.optim.SGD(head.parameters(), lr=1e9))
    >>> guard.is_bound
    True
    """

    def __init__(
        self, head: nn.Linear, optimizer: torch.optim.Optimizer, *, margin: float = 1.0, mu: float = 1.0
    ) -> None:
        check_positive("StepGuard", "mu", mu)
        self.head = head
        self.optimizer = optimizer
        self.margin = margin
        self.mu = mu
        self.capped = 0
        """The number of steps that were shortened."""

    @property
    def is_bound(self) -> bool:
        """Whether the cap guarantees that the loss of each batch decreases: plain SGD that trains only the head."""
        mine = {id(parameter) for parameter in self.head.parameters()}
        groups = self.optimizer.param_groups
        others = [p for p in itertools.chain.from_iterable(g["params"] for g in groups) if id(p) not in mine]
        extras = any(group.get(name) for group in groups for name in ("momentum", "weight_decay", "maximize"))
        return type(self.optimizer) is torch.optim.SGD and not others and not extras

    def step(self, triplets: Sequence[Tensor]) -> Suggestion:
        """Call `optimizer.step()` with learning rates of at most η, after backward; takes inputs of the head."""
        suggestion = suggest_step(self.head, triplets, margin=self.margin, mu=self.mu)
        groups = self.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        caps = [suggestion.rate * (1 - group.get("momentum", 0.0)) for group in groups]
        self.capped += any(float(rate) > cap for rate, cap in zip(rates, caps, strict=True))
        try:
            for group, rate, cap in zip(groups, rates, caps, strict=True):
                group["lr"] = min(float(rate), cap)
            self.optimizer.step()
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
        return suggestion
