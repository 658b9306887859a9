"""Figures for notebooks and papers: each function draws on a matplotlib axis, `ax=` or a new one, and returns it."""

from nearfar.plot._classes import class_confusion, class_recall
from nearfar.plot._maps import embedding_map
from nearfar.plot._pair_weights import weights
from nearfar.plot._recall import recall_curve
from nearfar.plot._retrievals import gallery

__all__ = ["class_confusion", "class_recall", "embedding_map", "gallery", "recall_curve", "weights"]
