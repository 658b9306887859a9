"""The frame of every HTML page: head, colors of light and dark mode, content security policy, footer."""

import base64
import hashlib
from html import escape
from importlib.resources import files

from nearfar import __version__

FOOTER = f"<footer><p>Written by nearfar {__version__}. One file: it loads nothing and sends nothing.</p></footer>"


def document(title: str, body: str, *, style: str, head: str = "") -> str:
    """Format a whole page: its title is text; body, style and further elements of the head are HTML and CSS."""
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
    """A content security policy that allows the page's own styles and what `rules` allow."""
    content = f"default-src 'none'; style-src 'unsafe-inline'; {rules}".rstrip("; ")
    return f'<meta http-equiv="Content-Security-Policy" content="{content}">'


def hash_of(script: str) -> str:
    """The hash of a script for a content security policy, so that no other script runs."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
