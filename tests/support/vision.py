"""Import torchvision beside a CPU build of torch: the index builds it for CUDA, so two operators are declared first."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch

_library = torch.library.Library("torchvision", "FRAGMENT")


def mend() -> None:
    """Declare the operators that torchvision's own library would have brought; where it loads, nothing is done."""
    if hasattr(torch.ops.torchvision, "nms") or _own_library_loads():
        return
    for name in ("nms", "qnms"):
        _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _own_library_loads() -> bool:
    found = find_spec("torchvision")
    if found is None or found.origin is None:
        return False
    for library in Path(found.origin).parent.glob("_C*.so"):
        try:
            torch.ops.load_library(str(library))
        except OSError:  # built for another torch
            return False
        return True
    return False
