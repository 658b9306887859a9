"""The site: it is built strictly, every public name has its place in it, and it is read from disk in a real browser."""

from __future__ import annotations

import importlib
import inspect
import logging
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import griffe
import pytest
from browser import Browser
from filelock import FileLock
from needs import need

import nearfar

pytest.importorskip("mkdocs", reason="mkdocs is not installed (the extra site)")

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
need("mkdocs")
import equations  # noqa: E402
import reference  # noqa: E402
import site_hooks  # noqa: E402

# What a newcomer wants to do, and the page that the first page leads to.
WANTED = {
    "swap the import": "start/from-pml.html",
    "train on a folder": "start/your-photographs.html",
    "use two GPUs": "guides/several-gpus.html",
    "batch 8,192": "guides/big-batches.html",
    "read a collapsed run": "guides/doctor.html",
}
OPENED = ("index", "start/from-pml", "guides/losses", "reference/losses", "papers/qi-2020")


@pytest.fixture(scope="session")
def built(tmp_path_factory, worker_id) -> Path:
    """The site, built once for all processes that run tests."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "site"
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", check=False)
            assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_a_constructor_that_is_made_of_settings_is_shown():
    read = griffe.load(
        "nearfar",
        search_paths=[str(ROOT / "src")],
        extensions=griffe.load_extensions(str(ROOT / "scripts/site_settings.py")),
    )
    for name in nearfar.losses.__all__:
        kind = getattr(nearfar.losses, name)
        shown = [p.name for p in read[kind.__module__.removeprefix("nearfar.")][name].parameters]
        assert shown == ["self", *inspect.signature(kind).parameters]


def public_objects():
    """Every name of every `__all__` in a public module, as Python imports it."""
    for found in pkgutil.walk_packages(nearfar.__path__, "nearfar."):
        if any(part.startswith("_") for part in found.name.split(".")) or found.name.startswith("nearfar.cli"):
            continue
        module = importlib.import_module(found.name)
        for name in getattr(module, "__all__", ()):
            if not inspect.ismodule(getattr(module, name)):
                yield f"{found.name}.{name}", getattr(module, name)
    for name in nearfar.__all__:
        if not inspect.ismodule(getattr(nearfar, name)):
            yield f"nearfar.{name}", getattr(nearfar, name)


def test_every_public_name_is_on_a_reference_page(built):
    pages = "".join(path.read_text(encoding="utf-8") for path in sorted((built / "reference").glob("*.html")))
    headings = re.findall(r'<h2 id="(nearfar[\w.]*)\.(\w+)" class="doc doc-heading"', pages)
    inside = re.findall(r'<td><code id="(nearfar[\w.]*)\.(\w+)">', pages)
    shown = {id(getattr(importlib.import_module(module), name)) for module, name in headings + inside}
    names = dict(public_objects())
    assert len(names) > 150
    assert not [name for name, value in names.items() if id(value) not in shown]


def test_a_name_is_shown_once():
    offered, inside = reference.shown()
    paths = [path for _, _, path in offered + inside]
    assert len(paths) == len(set(paths))
    assert ("losses", "nearfar.losses.MultiSimilarity", "nearfar.losses.anchored.MultiSimilarity") in offered
    assert ("losses", "nearfar.losses.annealing.Anneal", "nearfar.losses.annealing.Anneal") in inside


def test_every_kind_of_name_has_its_words():
    first = inspect.getdoc(nearfar.evaluate).split("\n\n")[0]
    assert reference.summary("nearfar.evaluation._evaluate.evaluate") == " ".join(first.split())
    assert "run" in reference.summary("nearfar.runs.changes.MAY_CHANGE")
    assert "|" not in reference.summary("nearfar.similarity.Cosine").replace(r"\|", "")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "(1/α) log(1 + Σ_{P_i} e^{-α s_ij})",
            r"\frac{1}{\alpha} \log \left(1 + \sum _{P_{i}} e^{-\alpha  s_{ij}}\right)",
        ),
        ("[d - m₊]₊² (positive)", r"\left[d - m_{+}\right]_{+}^{2} \ \text{(positive)}"),
        ("mean over rows of  log( a / (a + b) )", r"\text{ mean over rows of }\quad \log \left(\frac{a}{a + b}\right)"),
        ("1 / (1 + e^{-x/τ})", r"\frac{1}{1 + e^{-x/\tau }}"),
        ("√(2ρ/n) ≥ max_p |C|", r"\sqrt{2\rho /n} \geq  \max _{p} |C|"),
    ],
)
def test_equations_become_tex(line, expected):
    assert equations.tex(line) == expected


def test_each_loss_has_its_equation_and_its_picture(built):
    page = (built / "reference" / "losses.html").read_text(encoding="utf-8")
    assert page.count('<div class="equation">') == len(nearfar.losses.__all__)
    for name in nearfar.losses.__all__:
        assert f'src="../images/losses/{name}.svg"' in page
        assert (built / "images" / "losses" / f"{name}.svg").is_file()


def test_each_wish_of_a_newcomer_is_one_click_away(built):
    first = (built / "index.html").read_text(encoding="utf-8")
    article = first[first.index("<article") : first.index("</article>")]
    assert set(WANTED.values()) <= set(re.findall(r'href="([^"]+)"', article))


def test_nothing_is_fetched_from_elsewhere(built):
    fetched = re.compile(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"?(https?:[^\" >]+)")
    for path in built.rglob("*.html"):
        found = fetched.findall(path.read_text(encoding="utf-8"))
        assert not found, path.name


TEXT = (
    "[b](../papers/b.md) [c of `browser.py`](../../tests/support/browser.py) [[d]](../../tests) "
    "[e](../../CONTRIBUTING.md#commands)"
)


@pytest.mark.parametrize(
    ("home", "expected"),
    [
        (None, "c of `browser.py` [d] (`tests`) e (`CONTRIBUTING.md`)"),
        (
            "https://example.org/a",
            "[c of `browser.py`](https://example.org/a/blob/main/tests/support/browser.py) "
            "[[d]](https://example.org/a/tree/main/tests) "
            "[e](https://example.org/a/blob/main/CONTRIBUTING.md#commands)",
        ),
    ],
)
def test_links_out_of_the_pages_lead_to_the_repository(caplog, monkeypatch, home, expected):
    monkeypatch.setattr(site_hooks, "REPOSITORY", home)
    page = SimpleNamespace(file=SimpleNamespace(src_uri="guides/a.md"), is_homepage=False)
    with caplog.at_level(logging.WARNING, "mkdocs.hooks.site"):
        assert site_hooks.on_page_markdown(TEXT, page, None) == f"[b](../papers/b.md) {expected}"
        assert not caplog.records
        site_hooks.on_page_markdown("[e](../../tests/gone.py)", page, None)
        page.file.src_uri = "reference/a.md"
        shown = site_hooks.on_page_content("see docs/index.md and docs/gone.md", page, None)
    assert shown.startswith('see <a href="../index.html">index</a>')
    assert [record.args for record in caplog.records] == [
        ("guides/a.md", "tests/gone.py"), ("reference/a.md", "docs/gone.md")
    ]  # fmt: skip


def test_results_are_pages_of_the_site(caplog, monkeypatch, tmp_path):
    for name in ("benchmarks/RESULTS-speed.md", "docs/guides/a.md", "docs/images/e.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(site_hooks, "ROOT", tmp_path)
    found = []
    for place, text in (
        ("guides/a.md", "[b](../../benchmarks/RESULTS-speed.md#x)"),
        ("index.md", "[b](../benchmarks/RESULTS-speed.md)"),
        ("results/speed.md", "[c](../docs/guides/a.md) ![d](../docs/images/e.png) [f](RESULTS-speed.md#y)"),
    ):
        page = SimpleNamespace(file=SimpleNamespace(src_uri=place), is_homepage=False)
        with caplog.at_level(logging.WARNING, "mkdocs.hooks.site"):
            found.append(site_hooks.on_page_markdown(text, page, None))
    assert found == [
        "[b](../results/speed.md#x)",
        "[b](results/speed.md)",
        "[c](../guides/a.md) ![d](../images/e.png) [f](speed.md#y)",
    ]
    assert not caplog.records


def test_long_names_may_break_in_tables():
    page = SimpleNamespace(file=SimpleNamespace(src_uri="guides/a.md"))
    name = "test_errata.py::test_that_has_a_name"
    html = site_hooks.on_page_content(
        f"<code>{name}</code><td><code>{name}</code> <code>short_one</code></td>", page, None
    )
    assert html.startswith(f"<code>{name}</code>")
    assert "errata.py::<wbr>test_<wbr>that" in html
    assert "short_one" in html


def test_examples_in_docstrings_stand_in_fences():
    run = site_hooks.Doctests().run
    assert run(["a", ">>> 1", "1", "", "b"]) == ["a", "", "```pycon", ">>> 1", "1", "```", "", "b"]
    assert run([">>> 1", "1"])[-1] == "```"
    fenced = ["```pycon", ">>> 1", "1", "", "```"]
    assert run(fenced) == fenced


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    chromium = Browser(tmp_path_factory.mktemp("profile"))
    yield chromium
    chromium.close()


def complaints(browser: Browser) -> list[str]:
    """What the console said, and what was fetched from anywhere but the disk."""
    return browser.problems + [url for url in browser.requests if not url.startswith(("file:", "data:"))]


@pytest.mark.browser
@pytest.mark.parametrize("page", OPENED)
def test_pages_open_from_disk_without_a_complaint(browser, built, page):
    browser.problems.clear()
    browser.requests.clear()
    browser.window(1280, 900)
    browser.open(built / f"{page}.html", "article h1")
    assert browser.ask("[...document.images].every((image) => image.complete && image.naturalWidth > 0)")
    browser.window(390, 800)
    assert browser.ask("document.documentElement.scrollWidth") <= 390
    assert complaints(browser) == []


@pytest.mark.browser
def test_every_equation_is_typeset(browser, built):
    browser.problems.clear()
    browser.open(built / "reference" / "losses.html", "article h1")
    typeset = "[...document.querySelectorAll('.equation')].filter((each) => each.querySelector('.katex-html')).length"
    browser.wait(f"{typeset} === {len(nearfar.losses.__all__)}")
    assert browser.ask("document.querySelectorAll('.katex-error').length") == 0
    assert complaints(browser) == []


@pytest.mark.browser
def test_the_search_finds_a_loss_without_a_network(browser, built):
    browser.problems.clear()
    browser.requests.clear()
    browser.window(1280, 900)
    browser.open(built / "index.html", "article h1")
    browser.wait("getComputedStyle(document.querySelector('.md-search')).display !== 'none'")
    browser.click(".md-search__input")
    browser.call("Input.insertText", text="MultiSimilarity")
    browser.wait("document.querySelectorAll('.md-search-result__link').length > 0")
    links = browser.ask("[...document.querySelectorAll('.md-search-result__link')].map((link) => link.href)")
    wanted = [link for link in links if "reference/losses.html" in link and "nearfar.losses.MultiSimilarity" in link]
    assert wanted, links
    browser.call("Page.navigate", url=wanted[0])
    browser.wait("document.getElementById('nearfar.losses.MultiSimilarity') !== null")
    assert complaints(browser) == []
