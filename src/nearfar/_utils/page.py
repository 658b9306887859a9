"""The frame of every page: its head, the colors of light and dark, the policy of its scripts, the footer."""

from __future__ import annotations

import base64
import hashlib
from html import escape
from importlib.resources import files

from nearfar import __version__

__all__ = ["FOOTER", "allow", "document", "hash_of"]

FOOTER = f"<footer><p>Written by nearfar {__version__}. One file: it loads nothing and sends nothing.</p></footer>"


def document(title: str, body: str, *, style: str, head: str = "") -> str:
    """A whole page.

    Args:
        title: the title; text, where the others are HTML and CSS.
        body: inside of the body.
        style: rules beside those that all pages share.
        head: a further element of the head, such as `allow`.
    """
    shared = files("nearfar._utils").joinpath("page.css").read_text(encoding="utf-8")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
{head}
<title>{escape(title)}</title>
<style>
{shared}
{style}
</style>
</head>
<body>
{body}
</body>
</html>
"""


def allow(rules: str) -> str:
    """The policy of a page from a file: nothing is loaded but what `rules` allow beside its own styles."""
    content = f"default-src 'none'; style-src 'unsafe-inline'; {rules}".rstrip("; ")
    return f'<meta http-equiv="Content-Security-Policy" content="{content}">'


def hash_of(script: str) -> str:
    """A script as the source of a policy: this text runs and no other."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
