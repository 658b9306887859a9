"""A network that computes embeddings: a trunk, pooling of feature maps, a head, scaling to unit length."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from nearfar._utils.checks import check_choice, check_whole
from nearfar._utils.keywords import Keywords
from nearfar._utils.memory import check_room
from nearfar.similarity import unit

__all__ = ["Embedder", "Shape", "freeze_norms", "group_norms", "linear"]

Shape = tuple[int, ...]


class Embedder(Keywords, nn.Module):
    """x [b, ...] -> trunk -> pool -> head -> embeddings [b, embedding_dim], of unit length by default.

    Args:
        trunk: its output is feature maps [b, c, h, w], which are pooled, or vectors [b, c]. One with an attribute
            `takes` gets inputs of this dtype, and `transform` is its own transform from a raw sample to an input.
        embedding_dim: dimension of the embedding; None: that of the pooled features, with a square head initialized to
            the identity, so that training starts from the features and not from a random projection of them.
        size: the shape of one input.
        pool: "avg", "max", "both" (side by side, so the head is twice as wide) or "gem", the generalized mean
            (mean_p max(x_p, 0)³)^(1/3) over the places p of a map: between the average and the largest value. A trunk
            that gives vectors takes "avg" only.
        normalize: scale each embedding to unit length.
        hidden: width of a hidden layer in the head; None: the head is linear.
        bn_neck: a batch norm after the head, which gives every dimension the same variance.
        flip: outside training, embed a picture and its mirror image, and take the mean of both.
        mean: per channel, subtracted from pictures with values in 0..1 by the transform.
        std: per channel, what the transform then divides by.
    """

    def __init__(
        self,
        trunk: nn.Module,
        *,
        embedding_dim: int | None,
        size: Shape,
        pool: str = "avg",
        normalize: bool = True,
        hidden: int | None = None,
        bn_neck: bool = False,
        flip: bool = False,
        mean: tuple[float, ...] = (0.0,),
        std: tuple[float, ...] = (1.0,),
    ) -> None:
        super().__init__()
        if embedding_dim is not None:
            check_whole("Embedder", "embedding_dim", embedding_dim)
        check_choice("Embedder", "pool", pool, POOLS)
        self.trunk, self.size, self.pool, self.normalize = trunk, tuple(size), pool, normalize
        self.mean, self.std, self.flip = tuple(mean), tuple(std), flip
        if flip and len(self.size) != 3:
            raise ValueError(
                f"Embedder: flip mirrors pictures [c, h, w], but inputs have the shape {list(self.size)}; leave it out."
            )
        self.compiled: tuple[Callable[[Tensor], Tensor], ...] = ()
        """The trunk compiled for training, see `nearfar.train._build`; in a tuple, so that it is not a submodule."""
        features = self.features(self.size)
        self.embedding_dim = embedding_dim or hidden or features
        self.head = _head(features, embedding_dim, hidden, bn_neck)

    @property
    def transform(self) -> Any:
        """The transform that the network brings, such as a tokenizer; None if inputs need none of its own."""
        return getattr(self.trunk, "transform", None)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the embeddings [b, embedding_dim]."""
        x = x.to(getattr(self.trunk, "takes", None) or next(self.head.parameters()).dtype)
        z = self._embed(x)
        if not self.flip or self.training:
            return z
        mean = (z + self._embed(x.flip(-1))) / 2
        return unit(mean) if self.normalize else mean

    def _embed(self, x: Tensor) -> Tensor:
        z: Tensor = self.head(self._pool_features(x))
        return unit(z) if self.normalize else z

    def _pool_features(self, x: Tensor) -> Tensor:
        fast = self.compiled and self.training and torch.is_grad_enabled()
        return self._pool(self.compiled[0](x) if fast else self.trunk(x))

    def _pool(self, maps: Tensor) -> Tensor:
        return POOLS[self.pool](maps) if maps.ndim == 4 else maps

    def features(self, size: Shape) -> int:
        """The number of pooled features for inputs of a shape, by a forward pass of zeros without side effects."""
        modes = [(module, module.training) for module in self.trunk.modules()]
        self.trunk.eval()
        with torch.no_grad():
            like = getattr(self.trunk, "takes", None) or next(self.trunk.parameters(), torch.empty(0)).dtype
            z = self.trunk(torch.zeros(1, *size, dtype=like))
        for module, training in modes:
            module.training = training
        if z.ndim not in (2, 4):
            raise ValueError(
                f"Embedder: trunk must give maps [b, c, h, w] or vectors [b, c], but gave shape {list(z.shape)}."
            )
        if z.ndim == 2 and self.pool != "avg":
            raise ValueError(
                f"Embedder: pool={self.pool!r} needs feature maps, but the trunk gives vectors {list(z.shape)}, which "
                "it pools in its own way; leave pool out (model.pool avg), or take a network that ends in maps."
            )
        return self._pool(z).shape[1]


def _generalized_mean(maps: Tensor) -> Tensor:
    """Generalized-mean pooling (Radenović, Tolias & Chum 2019) with p = 3; in float32, as cubes of bf16 lose digits."""
    exact = maps if maps.dtype == torch.float64 else maps.float()
    # the root has an infinite slope at 0
    return exact.clamp(min=SMALLEST).pow(3).mean(dim=(2, 3)).pow(1 / 3)


SMALLEST = 1e-6
WIDEST = 1 << 14
"""The most features of a square head: its weights then take a gigabyte."""
POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "avg": lambda maps: maps.mean(dim=(2, 3)),
    "max": lambda maps: maps.amax(dim=(2, 3)),
    "both": lambda maps: torch.cat([maps.mean(dim=(2, 3)), maps.amax(dim=(2, 3))], dim=1),
    "gem": _generalized_mean,
}


def _head(features: int, embedding_dim: int | None, hidden: int | None, bn_neck: bool) -> nn.Module:
    layers: list[nn.Module] = []
    if hidden is not None:
        check_whole("Embedder", "hidden", hidden)
        layers += [linear(features, hidden, "hidden"), nn.ReLU()]
        features = hidden
    layers.append(_identity(features) if embedding_dim is None else linear(features, embedding_dim, "embedding_dim"))
    if bn_neck:
        layers.append(nn.BatchNorm1d(embedding_dim or features))
    return nn.Sequential(*layers) if len(layers) > 1 else layers[0]


def linear(features: int, width: int, name: str) -> nn.Linear:
    """A linear layer, if there is memory for its weights; `name` is the setting of its width, for the error."""
    check_room("Embedder", f"{name}={width:,} from {features:,} features", 4 * features * width)
    return nn.Linear(features, width)


def _identity(features: int) -> nn.Linear:
    """A linear layer initialized to the identity."""
    if features > WIDEST:
        raise ValueError(
            f"Embedder: embedding_dim=None makes a head of {features} x {features} numbers, but {WIDEST} a side are "
            "the most; name a dimension."
        )
    layer = nn.Linear(features, features)
    nn.init.eye_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def freeze_norms(model: nn.Module) -> int:
    """Freeze the statistics of every batch norm, now and after `model.train()`; scale and shift are still trained.

    Returns:
        How many layers were frozen; a second call freezes none.

    >>> freeze_norms(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)))
    1
    """
    norms = (part for part in model.modules() if isinstance(part, _BatchNorm))
    layers = [norm for norm in norms if _freeze not in norm._forward_pre_hooks.values()]
    for layer in layers:
        layer.eval()
        layer.register_forward_pre_hook(_freeze)
    return len(layers)


def group_norms(model: nn.Module, groups: int = 8) -> int:
    """Replace every batch norm by a group norm, so that a sample's embedding does not depend on the other samples.

    Ranks and chunks (`nf.cached_step`) then give exactly what one large batch gives. Statistics and affine parameters
    are initialized anew. The number of groups is the largest divisor of the channels up to `groups`.

    Returns:
        How many layers were replaced.

    >>> group_norms(nn.Sequential(nn.Conv2d(1, 12, 3), nn.BatchNorm2d(12)))
    1
    """
    count = 0
    for module in list(model.modules()):
        for name, part in list(module.named_children()):
            if isinstance(part, _BatchNorm):
                channels = part.num_features
                number = max(k for k in range(1, min(groups, channels) + 1) if channels % k == 0)
                like = next(part.parameters(), torch.empty(0))
                norm = nn.GroupNorm(number, channels, eps=part.eps, affine=part.affine).to(like.device, like.dtype)
                setattr(module, name, norm)
                count += 1
    return count


def _freeze(layer: nn.Module, _: Any) -> None:
    """Registered as a hook, because `model.train()` would set the mode of every part again."""
    layer.training = False
