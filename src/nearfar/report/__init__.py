"""A report page: one self-contained HTML file about an embedding, and small figures for notebooks."""

from nearfar.report.figures import classes_figure, recall_figure
from nearfar.report.page import build, write

__all__ = ["build", "classes_figure", "recall_figure", "write"]
