"""A report page: one self-contained HTML file about an embedding."""

from typing import Never

from nearfar._utils.renamed import no_such_name
from nearfar.report.page import build, write

__all__ = ["build", "write"]


def __getattr__(name: str) -> Never:
    """Only what is not there is asked here."""
    raise no_such_name("nearfar.report", name)
