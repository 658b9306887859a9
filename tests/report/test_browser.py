"""The report page in a real browser."""

from __future__ import annotations

import json
import shutil
import time
from importlib.resources import files

import numpy as np
import pytest
import torch
from browser import Browser
from runs import config, tiny

from nearfar import report
from nearfar._utils.page import document
from nearfar.report._curves import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis
from nearfar.train import fit
from nearfar.tune._page import Mark, scatter

pytestmark = pytest.mark.browser

HOSTILE = "<script>alert(1)</script>\"'</script><img src=x onerror=alert(2)>"


def pictures(rows: int) -> np.ndarray:
    """Grey drawings of 24 x 24, ink on black ground, each row's own."""
    drawn = np.zeros((rows, 24, 24), dtype=np.uint8)
    for row in range(rows):
        drawn[row, 3 + row % 7 : 12 + row % 9, 4 + row % 5 : 20] = 255
    return drawn


def some_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(13).repeat(9)
    centers = torch.randn(13, 12, generator=generator)
    return 0.6 * centers[labels] + torch.randn(len(labels), 12, generator=generator), labels


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A run folder with a journal, pictures, and names that try to break out."""
    run = tmp_path_factory.mktemp("run")
    x, y = some_data()
    classes = [HOSTILE if label == 3 else f"kind {label:02d} & co" for label in range(13)]
    names = [f"{HOSTILE}-{row}" if row % 10 == 0 else f"sample-{row}" for row in range(len(x))]
    np.savez(run / "embeddings.npz", x=x, y=y, name=names, classes=classes, images=pictures(len(x)))
    lines = [{"step": s, "loss": 1 / (1 + s), "lr": 0.1, "metrics": {"recall@1": s / 60}} for s in range(50)]
    (run / "journal.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    (run / "config.yaml").write_text(f"name: {HOSTILE}\n", encoding="utf-8")
    finding = {"name": HOSTILE, "severity": "error", "evidence": {"share": 0.5}, "remedy": HOSTILE}
    return report.write(run / "report.html", run, findings=[finding], title=HOSTILE)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def browser(chromium, page):
    """The page, freshly loaded; at the end nothing may have been complained about or fetched."""
    chromium.problems.clear()
    chromium.requests.clear()
    chromium.window(1280, 900)
    chromium.open(page, ".query")
    yield chromium
    assert chromium.problems == []
    assert [url for url in chromium.requests if not url.startswith("data:image/")] == [page.as_uri()]


def shown(browser: Browser) -> int:
    return int(str(browser.ask("document.querySelector('.count').textContent")).split()[0])


def test_loads_without_a_complaint_and_shows_every_part(browser):
    parts = browser.ask("[...document.querySelectorAll('main > section')].map((s) => s.id)")
    assert parts == ["headline", "scores", "findings", "curves", "gallery", "map", "confusion", "setup"]
    assert browser.ask("[...document.images].every((i) => i.complete && i.naturalWidth > 0)")
    assert browser.ask("document.querySelectorAll('.query').length") == 12
    assert browser.ask("document.querySelectorAll('.curve svg polyline').length") == 3


def test_hostile_names_are_only_text(browser):
    assert browser.ask("document.querySelector('h1').textContent") == HOSTILE
    assert browser.ask("document.querySelectorAll('img[src=x]').length") == 0
    assert browser.ask("document.scripts.length") == 2
    browser.ask("document.querySelector('[data-value=all]').click()")
    browser.ask(f"(() => {{ const i = document.getElementById('filter'); i.value = {json.dumps(HOSTILE)};"
                " i.dispatchEvent(new Event('input')); })()")  # fmt: skip
    assert shown(browser) > 0
    assert HOSTILE in browser.ask("document.querySelector('.query').textContent")


PAYLOADS = (
    "<script>window.ran = 1</script>",
    "</script><script>window.ran = 2</script>",
    "<img src=x onerror='window.ran = 3'>",
    '" onmouseover=window.ran=4 autofocus onfocus=window.ran=5 x="',
    "' onclick='window.ran = 6",
    "<a href=javascript:window.ran=7>javascript:window.ran=7</a>",
    "<svg onload=window.ran=8><!--",
    "]]></style></title></textarea><iframe srcdoc='<script>parent.ran = 9</script>'></iframe>",
    "${window.ran = 10}\u2028window.ran = 11;//`",
)


@pytest.fixture(scope="module")
def hostile_run(tmp_path_factory):
    """A run folder of a stranger: something to be run in every word that a page shows, the name of the run included."""
    run = tmp_path_factory.mktemp("strange") / PAYLOADS[2].replace("/", "_")
    run.mkdir()
    x, y = some_data()
    words = "".join(PAYLOADS)
    classes = [f"{PAYLOADS[label % 9]}{label}" for label in range(13)]
    names = [f"{PAYLOADS[row % 9]}{row}" for row in range(len(x))]
    np.savez(run / "embeddings.npz", x=x, y=y, name=names, classes=classes, images=pictures(len(x)))
    lines = [
        {"step": s, "loss": 1 / (1 + s), f"loss {words}": s, words: 1.5 * s, "metrics": {f"recall {words}": s / 60}}
        for s in range(50)
    ]
    lines.append({"step": words, f"rate {words}": float("nan")})
    (run / "journal.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    (run / "config.yaml").write_text(f"name: {words}\n", encoding="utf-8")
    return run


def test_nothing_in_a_strangers_run_is_run(chromium, hostile_run, tmp_path):
    """Escaping alone is judged: the policy of the page, which forbids all of it a second time, is taken out first."""
    words = "".join(PAYLOADS)
    finding = {"name": words, "severity": words, "evidence": {words: words, "plain": 0.5}, "remedy": words}
    text = report.build(hostile_run, findings=[finding, {"name": words, "evidence": words}])
    policy = '<meta http-equiv="Content-Security-Policy"'
    start = text.index(policy)
    naked = tmp_path / "naked.html"
    naked.write_text(text[:start] + text[text.index(">", start) + 1 :], encoding="utf-8")
    chromium.problems.clear()
    chromium.requests.clear()
    chromium.window(1280, 900)
    chromium.open(naked, ".query")
    assert chromium.ask("document.querySelector('h1').textContent") == hostile_run.name
    chromium.click(".query")  # the larger view
    chromium.key("Escape")
    chromium.click("button.pick")  # a class of the confusion table, as a filter
    chromium.ask("document.querySelector('[data-value=all]').click()")
    chromium.ask(f"(() => {{ const i = document.getElementById('filter'); i.value = {json.dumps(PAYLOADS[2])};"
                 " i.dispatchEvent(new Event('input')); })()")  # fmt: skip
    assert shown(chromium) > 0
    chromium.mouse("mouseMoved", *chromium.middle(".field canvas"))
    chromium.mouse("mouseMoved", *chromium.middle(".curve svg"))
    chromium.ask("for (const e of document.querySelectorAll('*'))"
                 " for (const kind of ['mouseover', 'focus']) e.dispatchEvent(new Event(kind))")  # fmt: skip
    assert chromium.ask("window.ran === undefined")
    assert chromium.ask("document.querySelectorAll('iframe, a[href^=javascript], img[src=x]').length") == 0
    assert chromium.ask("document.scripts.length") == 2
    assert chromium.ask("[...document.querySelectorAll('*')].every((e) => [...e.attributes].every((a) =>"
                        " !a.name.startsWith('on')))")  # fmt: skip
    assert chromium.problems == []
    assert [url for url in chromium.requests if not url.startswith("data:image/")] == [naked.as_uri()]


def test_click_opens_the_larger_view_and_arrows_move_in_it(browser):
    browser.click(".query")
    assert browser.ask("document.getElementById('detail').open")
    assert browser.ask("document.querySelector('.bar-top p').textContent").startswith("Query 1 of ")
    scores = browser.ask("[...document.querySelectorAll('.answers .place')].map((e) => e.textContent)")
    assert len(scores) in (6, 7)
    assert all("#" in text and "." in text and ("right" in text or "wrong" in text) for text in scores)
    browser.key("ArrowRight")
    browser.key("ArrowRight")
    assert browser.ask("document.querySelector('.bar-top p').textContent").startswith("Query 3 of ")
    browser.key("ArrowLeft")
    assert browser.ask("document.querySelector('.bar-top p').textContent").startswith("Query 2 of ")
    browser.key("Escape")
    browser.wait("!document.getElementById('detail').open")
    browser.wait("document.activeElement.dataset.place === '1'")  # the focus is where one left off


def test_arrows_and_enter_work_in_the_gallery(browser):
    browser.ask("document.querySelector('.query').focus()")
    for _ in range(12):
        browser.key("ArrowDown")
    assert browser.ask("document.activeElement.dataset.place") == "12"  # on the second page
    assert browser.ask("document.querySelector('.pager span').textContent").startswith("Page 2 of ")
    browser.key("ArrowUp")
    assert browser.ask("document.activeElement.dataset.place") == "11"
    browser.key("Enter")
    assert browser.ask("document.querySelector('.bar-top p').textContent").startswith("Query 12 of ")


def test_worst_come_first_and_marks_differ_by_more_than_color(browser):
    ranks = browser.ask("data.queries.map((q) => q.rank)")
    assert ranks == sorted(ranks, reverse=True)
    looks = browser.ask("""['right', 'wrong'].map((kind) => {
        const tile = document.querySelector(`.tile.${kind}`);
        return [getComputedStyle(tile.querySelector('.frame')).borderTopStyle,
                tile.querySelector('.badge').textContent, tile.title.split(':')[0]]; })""")
    assert looks == [["solid", "✓", "right"], ["dashed", "✕", "wrong"]]


def test_filter_and_switch_change_the_list(browser):
    failures = shown(browser)
    browser.click("[data-value=all]")
    everything = shown(browser)
    assert everything > failures
    browser.click("#filter")
    browser.call("Input.insertText", text="kind 05")
    some = shown(browser)
    assert 0 < some < everything
    assert browser.ask("[...document.querySelectorAll('.query b')].every((b) => b.textContent === 'kind 05 & co')")
    browser.call("Input.insertText", text=" of nowhere")
    assert shown(browser) == 0
    assert "No query" in browser.ask("document.querySelector('.queries').textContent")


def test_a_class_of_the_confusion_table_leads_to_its_queries(browser):
    name = browser.ask("document.querySelector('.pick').textContent")
    browser.click(".pick")
    assert browser.ask("document.getElementById('filter').value") == name
    assert shown(browser) > 0


def test_theme_follows_the_system_and_the_button(browser):
    def ground() -> str:
        return browser.ask("getComputedStyle(document.body).backgroundColor")

    browser.ask("localStorage.clear()")
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
    light = ground()
    browser.click("#theme")
    dark = ground()
    assert sum(map(int, light[4:-1].split(","))) > 600 > 150 > sum(map(int, dark[4:-1].split(",")))
    browser.click("#theme")
    assert ground() == light
    browser.ask("(localStorage.clear(), delete document.documentElement.dataset.theme)")
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert ground() == dark
    browser.call("Emulation.setEmulatedMedia", features=[])


def point(browser: Browser, place: int) -> tuple[float, float]:
    """Where a point of the map is on the screen, before any zoom."""
    browser.middle(".field canvas")
    x, y = browser.ask(f"""(() => {{
        const b = document.querySelector('.field canvas').getBoundingClientRect();
        const [x, y] = (data.map.tsne || data.map.pca)[{place}], unit = Math.min(b.width - 40, b.height - 76) / 10000;
        return [b.x + b.width / 2 + (x - 5000) * unit, b.y + b.height / 2 - (y - 5000) * unit]; }})()""")
    return x, y


def test_map_tells_what_is_under_the_pointer(browser):
    assert browser.ask("document.querySelector('.tip').hidden")
    x, y = point(browser, 17)
    browser.mouse("mouseMoved", x, y)
    browser.wait("!document.querySelector('.tip').hidden")
    told = browser.ask("document.querySelector('.tip').textContent")
    assert "nearest is" in told
    assert "kind" in told or HOSTILE in told
    assert browser.ask("document.querySelector('.tip i.pic img').naturalWidth") == 24


def test_map_zooms_drags_and_obeys_keys(browser):
    def picture() -> str:
        browser.key("Escape")  # no ring around a point
        return browser.ask("document.querySelector('.field canvas').toDataURL()")

    start = point(browser, 17)
    browser.ask("document.querySelector('.field canvas').focus()")
    first = picture()
    browser.mouse("mouseWheel", *start, deltaX=0, deltaY=-400)
    zoomed = picture()
    assert zoomed != first
    browser.mouse("mousePressed", *start, button="left", clickCount=1)
    browser.mouse("mouseMoved", start[0] + 60, start[1] + 30, button="left", buttons=1)
    browser.mouse("mouseReleased", start[0] + 60, start[1] + 30, button="left", clickCount=1)
    assert picture() not in (zoomed, first)
    browser.key("0", "0")
    assert picture() == first
    browser.key("+", "+")
    assert picture() != first
    browser.key("ArrowRight")
    browser.wait("!document.querySelector('.tip').hidden")
    here = browser.ask("document.querySelector('.tip').textContent")
    browser.key("ArrowDown")
    assert browser.ask("document.querySelector('.tip').textContent") != here
    browser.key("Escape")
    assert browser.ask("document.querySelector('.tip').hidden")


def test_map_turns_into_the_other_layout_and_pins_a_class(browser):
    browser.middle(".field canvas")
    first = browser.screenshot().tobytes()
    browser.click("[data-value=pca]")
    time.sleep(0.8)
    second = browser.screenshot().tobytes()
    assert second != first
    browser.click(".classes button")
    assert browser.ask("document.querySelector('.classes button').getAttribute('aria-pressed')") == "true"
    assert browser.screenshot().tobytes() != second


def test_screenshot_shows_something_and_narrow_windows_do_not_overflow(browser):
    shot = np.asarray(browser.screenshot())
    assert shot.shape[:2] == (900, 1280)
    assert len(np.unique(shot.reshape(-1, 3), axis=0)) > 50
    browser.window(380, 800)
    assert browser.ask("document.documentElement.scrollWidth") <= 380
    browser.click(".query")
    assert browser.ask("document.getElementById('detail').getBoundingClientRect().width") <= 380
    assert np.asarray(browser.screenshot()).std() > 10


MEASURED = """[...document.querySelectorAll('.curve > svg')].map((svg) => {
    const texts = [...svg.querySelectorAll('.tick')].map((t) => t.getBoundingClientRect());
    const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
    return {
        size: svg.getScreenCTM().a * parseFloat(getComputedStyle(svg.querySelector('.tick')).fontSize),
        over: texts.some((a, i) => texts.some((b, j) => i < j && meet(a, b))),
        out: texts.some((t) => t.left < 0 || t.right > innerWidth),
        words: svg.parentNode.querySelector('figcaption').textContent,
    }; })"""
RISES = """[...document.querySelectorAll('.curve > svg')].map((svg, i) => {
    const heights = [...svg.querySelectorAll('polyline')].map((line) => line.getBoundingClientRect().height);
    const flat = data.curves[i].series.every((points) => new Set(points.map((point) => point[1])).size === 1);
    return flat ? null : Math.max(...heights) / svg.getBoundingClientRect().height; })"""


def check_charts(chromium, width: int, count: int) -> None:
    """Labels of 11 pixels or more that stay apart and inside the window."""
    charts = chromium.ask(MEASURED)
    assert len(charts) == count
    for chart in charts:
        assert 11 <= chart["size"] <= 16, chart
        assert not chart["over"], chart
        assert not chart["out"], chart
    assert chromium.ask("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", [390, 1280])
def test_curves_of_a_real_run_can_be_read(chromium, tmp_path, width):
    """No line is flattened by the axis of another quantity."""
    plan = {"steps": 30, "evaluate_every": 5, "explain_every": 5, "diagnose_every": 5}
    fit(config(training=plan, optimizer={"max_grad_norm": 1.0}), tmp_path / "run", data=tiny())
    path = report.write(tmp_path / "page.html", tmp_path / "run")
    chromium.problems.clear()
    chromium.window(width, 900)
    chromium.open(path, ".curve")
    check_charts(chromium, width, 14)
    rises = chromium.ask(RISES)
    assert sum(rise is None for rise in rises) <= 2  # the numbers of pairs that the set takes
    assert all(rise is None or rise > 0.25 for rise in rises), rises
    chromium.mouse("mouseMoved", *chromium.middle(".curve svg"))
    assert " at " in chromium.ask("document.querySelector('.curve output').textContent")
    assert chromium.problems == []


@pytest.mark.parametrize("width", [390, 1280])
def test_charts_of_a_search_can_be_read(chromium, tmp_path, width):
    kinds = ("cosine", "euclidean", "dot product", "squared")
    sides, height = (LEFT, WIDTH - RIGHT), (HEIGHT - BOTTOM, TOP)
    charts = [
        ("trials", Axis(1, 30, *sides, name="trial")),
        ("optimizer.weight_decay", Axis(1e-6, 1e-1, *sides, log=True, name="log")),
        ("loss.temperature", Axis(0.02, 0.07, *sides, log=True, name="log")),
        ("training.steps", Axis(100, 12_345, *sides)),
        ("loss.similarity", Axis(0, 3, *sides, names=kinds)),
    ]
    drawn = "".join(
        scatter(title, [Mark(x.low, 50.0, "a"), Mark(x.high, 80.0, "b")], x, Axis(45, 85, *height), color)
        for color, (title, x) in enumerate(charts)
    )
    style = files("nearfar.report").joinpath("page.css").read_text(encoding="utf-8")
    page = document("a search", f'<main><div class="curves">{drawn}</div></main>', style=style)
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    chromium.window(width, 900)
    chromium.open(tmp_path / "page.html", ".curve")
    check_charts(chromium, width, len(charts))


def test_without_pictures_words_stand_in_their_place(chromium, tmp_path):
    x, y = some_data()
    path = report.write(tmp_path / "plain.html", (x, y))
    chromium.problems.clear()
    chromium.open(path, ".query")
    assert chromium.ask("document.querySelector('.strip .tile').textContent").startswith("class ")
    assert chromium.ask("document.images.length") == 0
    assert chromium.problems == []


def test_points_outside_the_gallery_have_a_picture_of_their_own(chromium, tmp_path):
    x, y = some_data()
    path = report.write(tmp_path / "few.html", (x, y), images=pictures(len(x)), queries=4, near=2)
    chromium.problems.clear()
    chromium.window(1280, 900)
    chromium.open(path, ".query")
    place = chromium.ask("data.map.rows.findIndex((row) => !data.pictures.data[row])")
    assert place >= 0
    chromium.mouse("mouseMoved", *point(chromium, place))
    chromium.wait("!document.querySelector('.tip').hidden")
    look = chromium.ask("getComputedStyle(document.querySelector('.tip i')).backgroundImage")
    assert look.startswith('url("data:image/')
    assert chromium.problems == []


def test_a_missing_browser_skips_and_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("NEARFAR_BROWSER", raising=False)
    with pytest.raises(pytest.skip.Exception, match="apt-get install chromium"):
        Browser(tmp_path)


def test_a_missing_browser_fails_where_one_is_demanded(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setenv("NEARFAR_BROWSER", "required")
    with pytest.raises(pytest.fail.Exception, match="apt-get install chromium"):
        Browser(tmp_path)
