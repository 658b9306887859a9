"""Figures for notebooks and papers: each function draws on a matplotlib axis, `ax=` or a new one, and returns it."""

from nearfar.plot.classes import class_confusion, class_recall
from nearfar.plot.maps import embedding_map
from nearfar.plot.pair_weights import weights
from nearfar.plot.recall import recall_curve
from nearfar.plot.retrievals import gallery

__all__ = ["class_confusion", "class_recall", "embedding_map", "gallery", "recall_curve", "weights"]
