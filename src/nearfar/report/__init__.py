"""A report page: one self-contained HTML file about an embedding."""

from typing import Never

from nearfar._utils.keywords import no_such_name
from nearfar.report._page import build, write

__all__ = ["build", "write"]


def __getattr__(name: str) -> Never:
    """Raise an AttributeError that suggests the nearest name."""
    raise no_such_name("nearfar.report", name, __all__)
