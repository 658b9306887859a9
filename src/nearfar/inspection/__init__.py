"""Inspect a data set: copies, wrong labels, classes that are two or one, strangers; as a page and as corrections."""

from nearfar.inspection._inspect import CUTS, Finding, Inspection, inspect
from nearfar.inspection._page import write_page

__all__ = ["CUTS", "Finding", "Inspection", "inspect", "write_page"]
