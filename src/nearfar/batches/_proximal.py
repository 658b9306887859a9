"""`Proximal`: the proximal term of alternating projections (Can et al. 2019, eq. 4.6)."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from nearfar._utils.checks import check_positive


class Proximal:
    """Add λ(θ - θₖ) to the gradient, the gradient of λ/2 |θ - θₖ|², with θₖ the parameters at the last `anchor()`.

    Call `add_gradient()` after `backward()` (after gradients were reduced across ranks and, in mixed precision,
    unscaled; before they are clipped), and `anchor()` when a projection begins. The paper prints the weight 1000 times
    too large (docs/papers/can-2019.md). Pass the network's trainable parameters, not those of the loss; running
    statistics are not parameters and are not affected.

    A parameter without a gradient (frozen, or not used in this step) gets none, so the optimizer does not move it.
    Construct it after the network is on its device; θₖ is one copy of the parameters.

    Args:
        params: parameters θ; those that need no gradient are left out.
        weight: λ.

    >>> theta = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    >>> proximal = Proximal([theta], weight=0.5)
    >>> theta.data += 1
    >>> theta.grad = torch.zeros(2)
    >>> proximal.add_gradient()
    >>> theta.grad
    tensor([0.5000, 0.5000])
    """

    def __init__(self, params: Iterable[Tensor], weight: float = 1e-3) -> None:
        check_positive("Proximal", "weight", weight, zero=True)
        self.params = [p for p in params if p.requires_grad]
        if not self.params:
            raise ValueError(
                "Proximal: params must hold a parameter that needs a gradient, but none came; "
                "an iterator such as model.parameters() can be walked only once."
            )
        self.weight = weight
        self.anchors = [p.detach().clone() for p in self.params]

    @torch.no_grad()
    def add_gradient(self) -> None:
        """p.grad += λ(θ - θₖ), for every parameter that has a gradient."""
        for p, anchor in zip(self.params, self.anchors, strict=True):
            if p.grad is not None:
                p.grad.add_(p.detach() - anchor, alpha=self.weight)

    @torch.no_grad()
    def anchor(self) -> None:
        """Set θₖ = θ at the start of a projection."""
        for p, anchor in zip(self.params, self.anchors, strict=True):
            anchor.copy_(p.detach())

    @torch.no_grad()
    def penalty(self) -> Tensor:
        """The value λ/2 |θ - θₖ|², for logging."""
        squares = [(p.detach() - a).square().sum() for p, a in zip(self.params, self.anchors, strict=True)]
        return self.weight / 2 * torch.stack(squares).sum()

    def state_dict(self) -> dict[str, Any]:
        """Copies of θₖ, in the order of the parameters."""
        return {"weight": self.weight, "anchors": [anchor.clone() for anchor in self.anchors]}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore θₖ from a saved state; the weight is a setting and stays."""
        shapes = [tuple(x.shape) for x in state["anchors"]]
        if shapes != [tuple(x.shape) for x in self.anchors]:
            raise ValueError(
                f"Proximal: the state must hold anchors for these {len(self.anchors)} parameters, "
                f"but came with {len(shapes)} of other shapes or number."
            )
        for anchor, saved in zip(self.anchors, state["anchors"], strict=True):
            anchor.copy_(saved)
