"""Networks that compute embeddings: small ones of our own, EfficientNet-Lite0, and any of timm and torchvision.

>>> import torch
>>> from nearfar import models
>>> models.build("linear", inputs=(8,), embedding_dim=2)(torch.ones(3, 8)).shape
torch.Size([3, 2])
"""

from nearfar.models.embedder import Embedder, freeze_norms, group_norms
from nearfar.models.registry import NAMES, build
from nearfar.models.saved import load

__all__ = ["NAMES", "Embedder", "build", "freeze_norms", "group_norms", "load"]
