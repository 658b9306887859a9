"""The report page without a browser: its contents, escaping, size, and how it does without optional parts."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import tomllib
from dataclasses import dataclass
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
from hostile_files import bomb
from PIL import Image
from runs import config, tiny

import nearfar as nf
from nearfar import report
from nearfar.report._gallery import gallery
from nearfar.report._inputs import read_inputs
from nearfar.report._journal import QUANTITIES, read_journal
from nearfar.report._maps import GRID, on_grid, principal, sample
from nearfar.train import fit

HOSTILE = "<script>alert(1)</script>\"'</script><!--&amp;\u2028"
QUICK = {"queries": 20, "points": 60}


def some_data(classes: int = 12, each: int = 8, width: int = 10, noise: float = 1.0, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(classes).repeat(each)
    centers = torch.randn(classes, width, generator=generator)
    return 0.7 * centers[labels] + noise * torch.randn(len(labels), width, generator=generator), labels


def data_of(page: str) -> dict:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    return json.loads(text)


def sections_of(page: str) -> list[str]:
    return re.findall(r'<section id="(\w+)"', page)


class Balance(HTMLParser):
    """Counts what is open; void elements do not open."""

    VOID = {"meta", "input", "img", "br", "line", "circle", "path", "polygon", "polyline"}

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag, attributes):
        self.links += [value for name, value in attributes if name in ("src", "href", "action", "data")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag


@pytest.fixture
def run(tmp_path):
    """A whole run folder."""
    folder = tmp_path / "a run"
    folder.mkdir()
    x, y = some_data()
    images = np.zeros((len(x), 16, 16), dtype=np.uint8)
    images[:, 4:9, 4:9] = 200
    np.savez(folder / "embeddings.npz", x=x, y=y, name=[f"n{i}" for i in range(len(x))], images=images)
    lines = [{"step": s, "loss": 2.0 - s / 20, "lr": 0.1, "metrics": {"recall@1": s / 40}} for s in range(0, 30, 3)]
    (folder / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (folder / "config.yaml").write_text("loss: DroTopK\n", encoding="utf-8")
    return folder


def test_page_is_whole_and_loads_nothing(run):
    page = report.build(run, findings=[], **QUICK)
    assert sections_of(page) == ["headline", "scores", "findings", "curves", "gallery", "map", "confusion", "setup"]
    balance = Balance()
    balance.feed(page)
    assert balance.open == []
    assert balance.links
    assert all(link.startswith("#") for link in balance.links)
    assert "<title>a run · nearfar</title>" in page
    assert "default-src 'none'" in page


def test_only_the_pages_own_script_may_run(run):
    page = report.build(run, **QUICK)
    script = re.search(r"<script>(.*?)</script>", page, re.S)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page


def test_numbers_are_those_of_evaluate():
    x, y = some_data()
    page = report.build((x, y), clustering=True, **QUICK)
    found = nf.evaluate(x, y, clustering=True)
    for name, value in found.scores().items():
        assert f"{100 * value:.1f}" in page, name
    bar = found.intervals["recall@1"]
    assert f"{100 * bar.low:.1f} to {100 * bar.high:.1f}" in page
    assert "spread over k-means starts" in page


def test_lone_queries_are_told():
    x, y = some_data()
    y[5] = 99
    page = report.build((x, y), queries=20)
    assert re.search(r"Lone queries</dt><dd>1<small>left out", page)
    points = data_of(page)["map"]
    assert [row for row, near in zip(points["rows"], points["nearest"], strict=True) if near == -1] == [5]


def test_whatever_comes_as_text_is_escaped(run):
    names = [HOSTILE + str(i) for i in range(96)]
    (run / "config.yaml").write_text(HOSTILE, encoding="utf-8")
    (run / "journal.jsonl").write_text(json.dumps({"step": 1, HOSTILE + "loss": 2.0}), encoding="utf-8")
    finding = {"name": HOSTILE, "severity": HOSTILE, "evidence": {HOSTILE: HOSTILE}, "remedy": HOSTILE}
    classes = [HOSTILE] * 12
    page = report.build(run, names=names, classes=classes, title=HOSTILE, findings=[finding], **QUICK)
    assert "<script>alert" not in page
    assert page.count("<script") == 2
    assert page.count("</script>") == 2
    assert "<!--" not in page
    data = data_of(page)
    assert data["classes"] == [HOSTILE] * 12
    assert data["map"]["names"][0].startswith(HOSTILE)
    balance = Balance()
    balance.feed(page)
    assert balance.open == []


@pytest.mark.parametrize("side", [40, 220])
def test_two_hundred_queries_stay_below_five_megabytes(side):
    """Noise is what compresses worst."""
    x, y = some_data(classes=60, each=25)

    def noise(row: int) -> np.ndarray:
        return np.random.default_rng(row).integers(0, 256, (side, side, 3), dtype=np.uint8)

    page = report.build((x, y), images=noise, names=["long/" * 20 + str(i) for i in range(len(x))], points=400)
    data = data_of(page)
    assert len(data["queries"]) == 200
    rows = {row for q in data["queries"] for row in (q["row"], q["right"], *q["near"])}
    assert {str(row) for row in rows} <= set(data["pictures"]["data"])
    assert 1_500_000 < len(page.encode()) <= 5_000_000


def test_drawings_keep_their_pixels_and_turn_dark_on_light(run):
    data = data_of(report.build(run, **QUICK))
    shown = data["pictures"]
    assert shown["ink"]
    picture = Image.open(io.BytesIO(base64.b64decode(shown["data"][str(data["queries"][0]["row"])])))
    pixels = np.asarray(picture.convert("L"))
    assert pixels.shape == (16, 16)
    assert pixels[0, 0] == 255
    assert pixels[6, 6] == 55
    atlas = data["atlas"]
    sheet = Image.open(io.BytesIO(base64.b64decode(atlas["uri"].partition(",")[2])))
    assert sheet.size[0] == atlas["across"] * atlas["tile"]
    assert atlas["across"] ** 2 >= len(data["map"]["rows"])


def test_pictures_come_in_many_forms(tmp_path):
    x, y = some_data()
    color = np.random.default_rng(0).integers(0, 256, (len(x), 20, 20, 3), dtype=np.uint8)
    names = [f"{i}.png" for i in range(len(x))]
    for name, pixels in zip(names, color, strict=True):
        Image.fromarray(pixels).save(tmp_path / name)
    forms = {
        "array": color,
        "tensor, channels first": torch.from_numpy(color).permute(0, 3, 1, 2),
        "list of arrays": list(color),
        "list of paths": [tmp_path / name for name in names],
        "folder": tmp_path,
        "function to images": lambda row: Image.fromarray(color[row]),
    }
    pages = {form: report.build((x, y), names=names, images=images, **QUICK) for form, images in forms.items()}
    assert len(set(pages.values())) == 1, [form for form in forms if pages[form] != pages["array"]]


def test_pictures_that_cannot_be_read_are_counted(tmp_path):
    x, y = some_data()
    (tmp_path / "broken.png").write_bytes(b"no picture")
    paths = [tmp_path / ("broken.png" if i % 2 else "absent.png") for i in range(len(x))]
    page = report.build((x, y), images=paths, **QUICK)
    assert "pictures could not be read" in page
    assert data_of(page)["pictures"] is None


def test_what_is_missing_is_left_out_with_a_note(run):
    whole = report.build(run, findings=[], **QUICK)
    assert "Not on this page" not in whole
    (run / "journal.jsonl").unlink()
    (run / "config.yaml").unlink()
    with np.load(run / "embeddings.npz") as stored:
        np.savez(run / "embeddings.npz", x=stored["x"], y=stored["y"])
    page = report.build(run, **QUICK)
    assert sections_of(page) == ["headline", "scores", "gallery", "map", "confusion", "setup"]
    for note in ("Curves: there is no journal", "findings: none were given", "Pictures: there are none"):
        assert note in page
    assert "config.yaml: there is none" in page
    assert 'href="#curves"' not in page
    assert data_of(page)["map"]["names"][3] == "row 3"


def test_findings_are_shown_from_objects_and_mappings():
    @dataclass
    class Finding:
        name: str = "collapse"
        severity: str = "error"
        evidence: str = "the mean cosine is 0.97"
        remedy: str = "Lower the rate."

    x, y = some_data()
    page = report.build((x, y), findings=(one for one in (Finding(), vars(Finding(name="stall")))), **QUICK)
    for word in ("collapse", "stall", "the mean cosine is 0.97", "Lower the rate."):
        assert word in page
    assert "Nothing found: healthy." in report.build((x, y), findings=[], **QUICK)


def test_a_file_of_vectors_is_enough(tmp_path):
    x, y = some_data()
    np.savez(tmp_path / "vectors.npz", x=x.half(), y=y.numpy().astype(np.uint16))
    assert '<h1 id="headline-title">vectors</h1>' in report.build(tmp_path / "vectors.npz", **QUICK)


def test_write_is_whole_or_nothing(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    assert report.write(path, some_data(), **QUICK) == path
    before = path.read_text(encoding="utf-8")
    assert before.rstrip().endswith("</html>")

    def torn(*_):
        raise OSError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", torn)
        with pytest.raises(OSError, match="no room"):
            report.write(path, some_data(seed=1), **QUICK)
    assert path.read_text(encoding="utf-8") == before
    assert [found.name for found in tmp_path.iterdir()] == ["report.html"]
    assert report.write(tmp_path / "new" / "report.html", some_data(), **QUICK).is_file()


def test_same_seed_same_page(run):
    assert report.build(run, seed=3, **QUICK) == report.build(run, seed=3, **QUICK)
    assert report.build(run, seed=3, **QUICK) != report.build(run, seed=4, **QUICK)


def test_nan_rows_are_named():
    x, y = some_data()
    x[7, 2] = torch.nan
    with pytest.raises(ValueError, match=r"rows 7"):
        report.build((x, y))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"queries": 0}, "queries must be a whole number"),
        ({"similarity": "cosin"}, "did you mean 'cosine'"),
        ({"names": ["a"]}, "names must have one entry per row"),
        ({"classes": ["a", "b"]}, "classes must name each of the 12 classes"),
        ({"images": [None]}, "images must have one entry per row"),
        ({"images": np.zeros((96, 4, 4))}, "a picture must be uint8"),
    ],
)
def test_bad_arguments_are_told_in_a_sentence(change, words):
    with pytest.raises(ValueError, match=words):
        report.build(some_data(), **change)


def test_bad_sources_are_told_in_a_sentence(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"pass a vectors\.npz"):
        report.build(tmp_path / "absent.npz")
    with pytest.raises(FileNotFoundError, match=r"embeddings\.npz is not there"):
        report.build(tmp_path)
    (tmp_path / "text.npz").write_text("no archive", encoding="utf-8")
    with pytest.raises(ValueError, match=r"is not an \.npz file, or was cut short"):
        report.build(tmp_path / "text.npz")
    np.savez(tmp_path / "half.npz", x=np.eye(3))
    with pytest.raises(ValueError, match="must hold y"):
        report.build(tmp_path / "half.npz")
    with pytest.raises(TypeError, match="source must be"):
        report.build(3)
    with pytest.raises(FileNotFoundError, match="images must be a folder"):
        report.build(some_data(), images=tmp_path / "absent")


@pytest.mark.parametrize("name", ["../secret/s.png", "SECRET", "link.png", "linked/s.png", "in\0side.png"])
def test_names_lead_nowhere_else_unless_asked(tmp_path, name):
    secret, folder = tmp_path / "secret" / "s.png", tmp_path / "pictures"
    for home in (secret.parent, folder):
        home.mkdir()
    Image.new("RGB", (8, 8), "red").save(secret)
    (folder / "link.png").symlink_to(secret)
    (folder / "linked").symlink_to(secret.parent)
    x, y = some_data(classes=2, each=3)
    names = [str(secret) if name == "SECRET" else name] * len(x)
    with pytest.raises(ValueError, match=r"leads out of .*pictures, .* pass --outside|holds a null character"):
        report.build((x, y), names=names, images=folder, **QUICK)
    if "\0" not in name:
        assert "could not be read" not in report.build((x, y), names=names, images=folder, outside=True, **QUICK)


def test_pictures_that_mean_harm_are_counted(tmp_path):
    """A bomb, a pipe, a loop, a program for a printer, a folder, an absent file and a name that no file can have."""
    x, y = some_data(classes=2, each=4)
    Image.new("RGB", (8, 8), "red").save(tmp_path / "good.png")
    (tmp_path / "bomb.png").write_bytes(bomb(60_000))
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "loop.png").symlink_to(tmp_path / "loop.png")
    (tmp_path / "printer.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n")
    (tmp_path / "folder.png").mkdir()
    names = [f"{word}.png" for word in ("good", "bomb", "pipe", "loop", "printer", "folder", "absent", "x" * 5000)]
    assert "7 pictures could not be read" in report.build((x, y), names=names, images=tmp_path, **QUICK)
    mapped = dict.fromkeys(names) | {"good.png": tmp_path / "good.png"}
    assert "7 pictures could not be read" in report.build((x, y), names=names, images=mapped, **QUICK)


KINDS = {
    "truth values": np.zeros(12, dtype=bool),
    "complex numbers": np.zeros(12, dtype=complex),
    "words": np.full(12, "a"),
    "bytes": np.full(12, b"a"),
    "records": np.zeros(12, dtype=[("a", "i4")]),
    "dates": np.zeros(12, dtype="M8[D]"),
    "spans of time": np.zeros(12, dtype="m8[s]"),
    "fractions": np.zeros(12),
}


@pytest.mark.parametrize("kind", KINDS)
def test_columns_of_every_kind(tmp_path, kind):
    """Each wrong column is one sentence that names it; no message of torch's own, and no file that a column names."""
    x, y = (part.numpy() for part in some_data(classes=3, each=4))
    column, path = KINDS[kind], tmp_path / "v.npz"

    def told(**arrays):
        np.savez(path, **{"x": x, "y": y, **arrays})
        with pytest.raises(TypeError) as error:
            report.build(path, **QUICK)
        return str(error.value)

    assert told(y=column).startswith(f"report: y must be integers [n], but came as {kind}")
    if kind != "fractions":
        assert told(x=np.stack([column, column], 1)).startswith(
            f"report: x must hold real numbers [n, d], but came as {kind}"
        )
    if kind not in ("words", "bytes", "dates"):
        assert (
            told(name=column) == f"report: names must be words [n], but came as {kind} ({column.dtype}) of shape [12]."
        )
        assert told(classes=column[:3]).startswith(f"report: classes must be words [n], but came as {kind}")
    assert f"must be uint8 [n, h, w] or [n, h, w, 3], not {kind}" in told(images=column)
    assert "names must be words [n]" in told(name=np.full((12, 2), "a"))


def test_vectors_make_a_page():
    x, y = some_data(classes=3, each=4)
    held = nf.evaluation.Vectors(x, y, [f"<{i}>" for i in range(12)], classes=("a", "b", "c"))
    assert report.build(held, **QUICK) == report.build((x, y), names=held.name, classes=held.classes, **QUICK)
    assert report.build((x.tolist(), y.tolist()), **QUICK) == report.build((x.double(), y), **QUICK)
    with pytest.raises(ValueError, match="these Vectors hold no y"):
        report.build(nf.evaluation.Vectors(x))


def test_class_names_by_mapping_by_place_and_by_order():
    x, y = some_data(classes=3)
    assert read_inputs((x, y)).classes == {0: "class 0", 1: "class 1", 2: "class 2"}
    assert read_inputs((x, y), classes=["a", "b", "c", "d"]).classes == {0: "a", 1: "b", 2: "c"}
    assert read_inputs((x, y + 101), classes=["a", "b", "c"]).classes == {101: "a", 102: "b", 103: "c"}
    assert read_inputs((x, y), classes={1: "one"}).classes == {0: "class 0", 1: "one", 2: "class 2"}


@pytest.mark.parametrize("similarity", ["cosine", "dot", "euclidean"])
def test_gallery_against_a_plain_loop(similarity):
    x, y = some_data(classes=6, each=5)
    found = nf.evaluate(x, y, similarity=similarity)
    shown = gallery(x, found.per_query, [], queries=1000, near=4, similarity=similarity, seed=0)
    assert len(shown) == len(x)
    a = x.double().numpy()
    for query in shown:
        one = a[query.row]
        if similarity == "cosine":
            scores = a @ one / np.linalg.norm(a, axis=1) / np.linalg.norm(one)
        else:
            scores = a @ one if similarity == "dot" else -np.linalg.norm(a - one, axis=1)
        order = [row for row in np.argsort(-scores) if row != query.row]
        right = [row for row in order if y[row] == y[query.row]]
        wrong = [row for row in order if y[row] != y[query.row]]
        assert list(query.near) == order[:4]
        assert query.right == right[0]
        assert query.rank == order.index(right[0]) + 1
        assert query.gap == pytest.approx(scores[wrong[0]] - scores[right[0]], abs=1e-4)
        assert query.scores == pytest.approx(scores[order[:4]], abs=1e-4)
    keys = [(-query.rank, -query.gap) for query in shown]
    assert keys == sorted(keys)


def test_gallery_holds_the_worst_the_worst_classes_and_right_ones():
    x, y = some_data(classes=30, each=10, noise=1.2)
    found = nf.evaluate(x, y)
    worst = [row.label for row in found.worst]
    shown = gallery(x, found.per_query, worst, queries=80, near=6, similarity="cosine", seed=0)
    assert len(shown) == len({query.row for query in shown}) == 80
    assert sum(query.rank == 1 for query in shown) == 20
    asked = {int(y[query.row]) for query in shown if query.rank > 1}
    assert set(worst) <= asked
    deepest = sorted(found.per_query.rank.tolist(), reverse=True)[:40]
    assert sorted((query.rank for query in shown), reverse=True)[:40] == deepest


def test_confusion_against_a_plain_loop():
    x, y = some_data(classes=14, each=7)
    page = report.build((x, y), **QUICK)
    u = torch.nn.functional.normalize(x.double(), dim=1).numpy()
    scores = u @ u.T
    np.fill_diagonal(scores, -np.inf)
    first = y.numpy()[scores.argmax(axis=1)]
    worst = [row.label for row in nf.evaluate(x, y).worst]
    lines = re.findall(r"<tr>(<th scope=\"row\"><span class=\"who\">.*?)</tr>", page, re.S)
    for label, line in zip(worst, lines, strict=True):
        mine = first[y.numpy() == label]
        expected = [int((mine == other).sum()) for other in worst]
        expected.append(len(mine) - sum(expected))
        cells = re.findall(r'<td class="cell[^>]*>(.*?)</td>', line)
        assert [int(cell) if cell.isdigit() else 0 for cell in cells] == expected
        wrong = [(count, -other) for other, count in enumerate(np.bincount(mine, minlength=14)) if other != label]
        count, other = max(wrong)
        assert f'<td class="mostly">class {-other} <small>({count} of 7)</small>' in line


def test_few_rows_one_class_and_equal_rows_make_pages():
    for x, y in (
        (torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([4, 4])),
        (torch.randn(9, 1, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2])),
        (torch.ones(12, 3), torch.arange(4).repeat(3)),
        (torch.randn(20, 5, generator=torch.Generator().manual_seed(0)), torch.zeros(20, dtype=torch.long)),
    ):
        data = data_of(report.build((x, y)))
        assert len(data["queries"]) == len(x)


def test_principal_axes_are_those_of_the_singular_values():
    for shape in ((40, 6), (6, 40)):
        x = np.random.default_rng(0).normal(size=shape)
        axes, explained = principal(x, 4)
        centered = x - x.mean(axis=0)
        u, s, _ = np.linalg.svd(centered, full_matrices=False)
        wanted = np.abs((u * s)[:, :4] / np.abs(centered).max())
        assert np.abs(axes) == pytest.approx(wanted, abs=1e-8)
        assert explained == pytest.approx((s[:2] ** 2).sum() / (s**2).sum())


def test_map_takes_whole_classes_worst_first_and_stays_on_its_grid():
    y = np.arange(20).repeat(10)
    rows = sample(y, [7, 3], 85, seed=0)
    assert len(rows) == 85
    counts = np.bincount(y[rows], minlength=20)
    assert counts[7] == counts[3] == 10
    assert sorted(counts[counts > 0].tolist()) == [5] + [10] * 8
    assert (sample(y, [], 500, seed=0) == np.arange(200)).all()
    placed = on_grid(np.random.default_rng(0).normal(size=(50, 2)) * [3, 1])
    assert placed.min() >= 0
    assert placed.max() <= GRID


def test_journal_is_read_whatever_it_holds(tmp_path):
    path = tmp_path / "journal.jsonl"
    assert read_journal(path).panels == ()
    lines = [{"step": s, "loss": 1.0, "weight_max": 0.5, "temperature": 3, "done": True} for s in range(1000)]
    lines[502]["loss"] = 99.0
    lines[700]["loss"] = float("nan")
    lines[10]["metrics"] = {"recall@1": 0.5, "comment": "good"}
    path.write_text("\n".join(map(json.dumps, lines)) + '\n[1]\n{"step": 1000, "lo', encoding="utf-8")
    journal = read_journal(path)
    panels = {panel.title: panel.series for panel in journal.panels}
    assert {title: [one.name for one in series] for title, series in panels.items()} == {
        "Loss": ["Loss"],
        "Recall at k": ["R@1"],
        "weight max": ["weight max"],
        "temperature": ["temperature"],
    }
    assert panels["Recall at k"][0].points[0][1:] == (50.0, 50.0, 50.0)  # in percent
    points = panels["Loss"][0].points
    assert len(points) <= 240
    assert max(point[3] for point in points) == 99.0  # a single peak still shows
    assert (points[0][0], points[-1][0]) == (0, 999)
    assert journal.notes == (
        "2 unreadable lines of the journal passed over.",
        "loss is not finite at 1 step, first at step 700.",
    )


def test_every_quantity_of_a_run_has_a_chart_of_its_own_with_a_plain_name(tmp_path):
    """All that `fit` writes; a name as in the code, or two units on one axis, would be seen here."""
    plan = {"evaluate_every": 5, "explain_every": 5, "diagnose_every": 5}
    loss = {"name": "SpreadFloor", "loss": {"name": "DroTopK", "k": 8}}
    fit(config(loss=loss, training=plan, optimizer={"max_grad_norm": 1.0}), tmp_path / "run", data=tiny())
    panels = read_journal(tmp_path / "run" / "journal.jsonl").panels
    known = {title for _, title, _ in QUANTITIES}
    assert {panel.title.removesuffix(", held-out classes") for panel in panels} == known
    several = {"Recall at k, held-out classes": ["R@1", "R@2", "R@4", "R@8"], "Spread of pairs": ["V", "bound"]}
    for panel in panels:
        assert [one.name for one in panel.series] == several.get(panel.title, [panel.title])
        assert panel.unit or panel.title == "Loss"
    drawn = re.search(r'<section id="curves".*?</section>', report.build(tmp_path / "run", **QUICK), re.S)[0]
    assert drawn.count("<svg viewBox=") == len(panels) + 6  # and those in the legends of recall and spread
    words = re.sub(r"<[^>]*>", " ", drawn)
    assert not re.search(r"\w_\w|recall@|\blr\b", words)


def test_many_quantities_are_cut_short_with_a_note(tmp_path):
    path = tmp_path / "journal.jsonl"
    lines = [{"step": 1, "restart": {"count": 1, "after": 0}, **{f"x_{i}": i for i in range(50)}, "loss": 2.0}]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    journal = read_journal(path)
    assert [panel.title for panel in journal.panels] == ["Loss", *(f"x {i}" for i in range(39))]
    assert journal.notes == ("11 further quantities of the journal are not drawn.",)


def test_curves_are_drawn_inside_their_frame(run):
    (run / "journal.jsonl").write_text('{"step": 5, "loss": 0.0}\n', encoding="utf-8")  # one point, no range at all
    page = report.build(run, **QUICK)
    drawn = re.search(r'<section id="curves".*?</section>', page, re.S)[0]
    assert not re.search(r"\b(nan|inf)\b", drawn)


def test_style_and_scripts_are_packaged():
    here = files("nearfar.report")
    beside = [part.name for part in here.iterdir() if part.name.endswith((".css", ".js", ".html"))]
    assert {"page.css", "theme.js", "page.js", "gallery.js", "map.js"} == set(beside)
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    packaged = project["tool"]["setuptools"]["package-data"]["nearfar"]
    assert {"_utils/*.css", "report/*.css", "report/*.js"} <= set(packaged)
    for name in beside:
        assert len(here.joinpath(name).read_text(encoding="utf-8").splitlines()) <= 400
