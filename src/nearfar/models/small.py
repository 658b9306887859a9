"""The small nets: convolutions for drawings of one channel, and layers for vectors."""

from __future__ import annotations

from torch import nn

CHANNELS = (32, 64, 128)


def small(inputs: int = 1) -> nn.Module:
    """Three convolutions for drawings of about 32 x 32 pixels; the map is flattened: place matters in a sign."""
    layers: list[nn.Module] = []
    before = inputs
    for channels, side, stride in zip(CHANNELS, (5, 3, 3), (2, 1, 1), strict=True):
        layers += [
            nn.Conv2d(before, channels, side, stride, side // 2, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
        ]
        if stride == 1:
            layers.append(nn.MaxPool2d(2))
        before = channels
    return nn.Sequential(*layers, nn.Flatten())
