"""Figures for notebooks and papers: each function draws on a matplotlib axis, `ax=` or a new one, and returns it."""

from nearfar.plot._maps import embedding_map
from nearfar.plot._pair_weights import weights
from nearfar.plot._retrievals import gallery
from nearfar.plot._scores import class_confusion, class_recall, recall_curve

__all__ = ["class_confusion", "class_recall", "embedding_map", "gallery", "recall_curve", "weights"]
