"""Hooks of mkdocs.yml: reference pages, pages of results, links out of docs/, and examples in docstrings.

Pages link to tests, benchmarks and examples by relative paths, which work where the repository is read. On the site
`benchmarks/RESULTS-*.md` are pages of their own; other links lead to the address in pyproject.toml, and without one
they are text with the path. A path that does not exist is a warning, and `make site` fails on warnings.
"""

from __future__ import annotations

import logging
import posixpath
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
import losses_page
import reference

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REPOSITORY = PROJECT.get("urls", {}).get("Source")
PAGE = re.compile(r"(?<![\w/])docs/([\w/-]+)\.md")
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")
RESULTS = {path.stem.removeprefix("RESULTS-"): path for path in sorted((ROOT / "benchmarks").glob("RESULTS-*.md"))}
CELL = re.compile(r"<td.*?</td>", re.DOTALL)
CODE = re.compile(r"(?<=<code>)[^<]{25,}(?=</code>)")
log = logging.getLogger("mkdocs.hooks.site")


class Doctests(Preprocessor):
    """Puts examples that stand bare in a docstring into fences: Markdown takes `>>>` for quotes."""

    def run(self, lines: list[str]) -> list[str]:
        """The lines, with fences added."""
        found: list[str] = []
        fenced = example = False
        for line in lines:
            fenced ^= line.lstrip().startswith("```")
            if example and not line.strip():
                found.append("```")
                example = False
            elif line.startswith(">>> ") and not fenced and not example:
                found += ["", "```pycon"]
                example = True
            found.append(line)
        return [*found, "```"] if example else found


class Examples(Extension):
    """Puts `Doctests` before all other work on the text."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        """Called by Markdown."""
        md.preprocessors.register(Doctests(md), "doctests", 100)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Writes the reference and the results into the navigation."""
    config.markdown_extensions.append(Examples())  # type: ignore[arg-type]
    for entry in config.nav or []:
        if "Reference" in entry:
            entry["Reference"] = [{name: f"reference/{name}.md"} for name in reference.pages()]
    if config.nav is not None and RESULTS:
        config.nav.append({"Results": [f"results/{name}.md" for name in RESULTS]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the reference, one page for each package, the results, and a picture of each loss."""
    for name, text in reference.pages().items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    for name, path in RESULTS.items():
        files.append(File.generated(config, f"results/{name}.md", content=path.read_text(encoding="utf-8")))
    for name in losses_page.names():
        if drawn := losses_page.picture(name):
            files.append(File.generated(config, f"images/losses/{name}.svg", content=drawn))
    return files


def on_page_markdown(text: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Leads links out of docs/ to the results and the repository; hides sidebars that are empty or in the way."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]
    if page.file.src_uri == "guides/losses.md":  # a wide table, whose names lead to the reference
        page.meta["hide"] = ["toc"]
        text = re.sub(r"^\| `(\w+)` \|", r"| [`\1`][nearfar.losses.\1] |", text, flags=re.MULTILINE)
    place = page.file.src_uri
    folder = "benchmarks" if place.startswith("results/") else posixpath.join("docs", posixpath.dirname(place))

    def lead(match: re.Match[str]) -> str:
        words, target, anchor = match.groups(default="")
        path = posixpath.normpath(posixpath.join(folder, target))
        result = re.fullmatch(r"benchmarks/RESULTS-(\w+)\.md", path)
        if path.startswith("docs/") and folder != "benchmarks":
            return match.group()
        if not (ROOT / path).exists():
            log.warning("%s links to %s, which is not there.", place, path)
        if path.startswith("docs/") or result:
            inside = f"results/{result[1]}.md" if result else path.removeprefix("docs/")
            return f"[{words}]({posixpath.relpath(inside, posixpath.dirname(place))}{anchor})"
        if REPOSITORY is None:
            return words if posixpath.basename(path) in words else f"{words} (`{path}`)"
        return f"[{words}]({REPOSITORY}/{'tree' if (ROOT / path).is_dir() else 'blob'}/main/{path}{anchor})"

    return LINK.sub(lead, text)


def on_page_content(html: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Lets long names break in tables, and makes links of the pages that docstrings name by their path."""
    html = CELL.sub(lambda cell: CODE.sub(_breakable, cell.group()), html)
    if not page.file.src_uri.startswith("reference/"):
        return html

    def lead(match: re.Match[str]) -> str:
        if not (ROOT / match.group()).exists():
            log.warning("%s names %s, which is not there.", page.file.src_uri, match.group())
        return f'<a href="../{match.group(1)}.html">{match.group(1)}</a>'

    return PAGE.sub(lead, html)


def _breakable(name: re.Match[str]) -> str:
    """A long name that may break behind `_`, `::` and `(`."""
    return re.sub(r"(_|::|\()(?=\w)", r"\1<wbr>", name.group())
