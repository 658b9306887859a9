"""The small net: three convolutions for drawings of one channel."""

from __future__ import annotations

import torch
from torch import nn

# channels, pixels a side of the kernel; each stride is two, which costs a third of a stride of one and a pool
LAYERS = ((32, 5), (64, 3), (128, 3))


def small(inputs: int = 1) -> nn.Module:
    """Three convolutions for drawings of about 32 x 32 pixels; the map is flattened: place matters in a sign."""
    layers: list[nn.Module] = []
    before = inputs
    for channels, side in LAYERS:
        layers += [
            nn.Conv2d(before, channels, side, stride=2, padding=side // 2, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
        ]
        before = channels
    # channels last: a quarter faster on a CPU, with the same numbers up to rounding
    net = nn.Sequential(*layers, nn.Flatten())
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return net
