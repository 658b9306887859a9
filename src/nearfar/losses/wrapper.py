"""`Wrapper`: the base class of losses around another loss."""

from abc import ABC
from dataclasses import field

from nearfar._utils.shortcuts import check_part
from nearfar.losses.annealing import advance
from nearfar.losses.robust import Loss

__all__ = ["Wrapper"]


class Wrapper(Loss, ABC):
    """A loss around another one, whose name messages use."""

    loss: Loss = field(kw_only=False)

    def _remake(self) -> None:
        check_part(type(self).__name__, "loss", self.loss, Loss, "nf.losses.Triplet()")
        check_scalar(type(self).__name__, self.loss)
        self.owner = self.loss.owner

    def step(self) -> None:
        """Count a training step, in case the wrapped loss anneals."""
        advance(self.loss)


def check_scalar(owner: str, loss: Loss) -> None:
    """Require a loss of one number."""
    if getattr(loss, "reduction", None) == "none":
        raise ValueError(
            f'{owner}: the loss must be one number, but came with reduction="none"; leave the reduction out.'
        )
