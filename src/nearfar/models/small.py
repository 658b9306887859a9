"""The network "small": three convolutions for gray-scale drawings."""

import torch
from torch import Tensor, nn

__all__ = ["Small", "small"]

# channels, side of the kernel; strides of two cost a third of strides of one with pooling
LAYERS = ((32, 5), (64, 3), (128, 3))


class Small(nn.Sequential):
    """The network `small`, run in channels-last memory format, a quarter faster on a CPU; weights keep their layout."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        x = x.contiguous(memory_format=torch.channels_last)
        for layer in self:
            x = layer(x)
        return x


def small(inputs: int = 1) -> nn.Module:
    """Three convolutions for drawings of about 32 x 32 pixels; the map is flattened, since position matters."""
    layers: list[nn.Module] = []
    before = inputs
    for channels, side in LAYERS:
        layers += [
            nn.Conv2d(before, channels, side, stride=2, padding=side // 2, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
        ]
        before = channels
    return Small(*layers, nn.Flatten())
