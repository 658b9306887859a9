"""torchvision beside a CPU build of torch: the index builds it for CUDA; it imports once two operators are known."""

from __future__ import annotations

import torch

_library = torch.library.Library("torchvision", "FRAGMENT")


def mend() -> None:
    """Declare the operators that torchvision's own library would have brought; where it fits, nothing is done."""
    for name in ("nms", "qnms"):
        try:
            _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        except RuntimeError:  # they are there: a build that fits
            return
