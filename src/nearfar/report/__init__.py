"""A report page: one self-contained HTML file about an embedding."""

from nearfar._utils.keywords import suggest_names
from nearfar.report._page import build, write

__all__ = ["build", "write"]
__getattr__ = suggest_names("nearfar.report", __all__)
