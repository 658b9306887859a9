"""`nearfar calibrate`, and its threshold in an index, in searches and in the report."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from shell import run

import nearfar as nf
from nearfar.evaluation import Calibration, DiskIndex, Index, Vectors, build_index

FAR = 0.1


def blobs(noise=0.35, seed=0, classes=40, each=5, first=0):
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(classes, 16, generator=generator)
    y = torch.arange(classes).repeat_interleave(each)
    return centers[y] + noise * torch.randn(len(y), 16, generator=generator), y + first


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Vectors to calibrate on, a gallery, its own classes and strangers as queries, and a calibration."""
    folder = tmp_path_factory.mktemp("decisions")
    Vectors(*blobs(seed=1), fingerprint="ab").save(folder / "others.npz")
    x, y = blobs(seed=0)
    Vectors(x, y, name=[f"g{row}" for row in range(len(x))]).save(folder / "gallery.npz")
    strangers = blobs(seed=2, first=100)[0][::5][:3]
    Vectors(torch.cat([x[[0, 7]] + 0.05, strangers]), name=["a", "b", "c", "d", "e"]).save(folder / "asked.npz")
    run(folder, "calibrate", "others.npz", "--far", FAR, "--per", "query", "-o", "c.json")
    return folder


def test_the_command_prints_and_writes_what_python_finds(home):
    shown = run(home, "calibrate", "others.npz", "--far", 0.02, "--confidence", 0.9, "-o", "pairs.json")
    found = nf.calibrate(Vectors.load(home / "others.npz"), None, 0.02, 0.9)
    assert shown.splitlines()[: len(repr(found).splitlines())] == repr(found).splitlines()
    assert Calibration.load(home / "pairs.json") == found
    assert "The guarantee (90%) holds for at least as many new classes of the same population." in shown
    assert found.fingerprint == "ab"
    shown = run(home, "calibrate", "others.npz", "--gallery", "others.npz", "--similarity", "euclidean", "--far", 0.02)
    assert f"{2 * found.negative:,} negative pairs" in shown


def test_what_cannot_be_calibrated_is_one_sentence(home):
    Vectors(torch.eye(3)).save(home / "bare.npz")
    assert "holds no y" in run(home, "calibrate", "bare.npz", code=1)
    assert run(home, "calibrate", "others.npz", "--far", "1e-9", code=1).startswith(
        "nearfar calibrate: far=1e-09 is less than one of 19,500 negative pairs; pass 5.1e-05 or more"
    )
    assert "--output must end in .json" in run(home, "calibrate", "others.npz", "-o", "c.txt", code=1)
    assert "'pair', 'query'" in run(home, "calibrate", "others.npz", "--per", "pairs", code=1)


@pytest.mark.parametrize("output", ["i.npz", "i.index"])
def test_strangers_are_unknown(home, output):
    """By the table, the JSON and the page; the neighbors are still there, as the nearest that were found."""
    usable = Calibration.load(home / "c.json").usable
    built = run(home, "index", "gallery.npz", "-o", output, "--calibration", "c.json")
    sentence = f"Unknown is what scores {usable:.4f} or less: at most {FAR:g} of queries of classes that are not in the"
    assert sentence in " ".join(built.split())
    shown = run(home, "search", output, "asked.npz", "-k", 2, "--json", "s.json", "--page", "s.html")
    assert sentence in " ".join(shown.split())
    record = json.loads((home / "s.json").read_text(encoding="utf-8"))
    assert [each["known"] for each in record] == [True, True, False, False, False]
    assert [each["known"] for each in record] == [each["neighbors"][0]["score"] > usable for each in record]
    for name, known in zip("abcde", (True, True, False, False, False), strict=True):
        assert (f"│ {name}: unknown" in shown) != known
        assert (f"{name}: unknown<" in (home / "s.html").read_text(encoding="utf-8")) != known


def test_without_a_calibration_nothing_is_said(home):
    assert "nknown" not in run(home, "index", "gallery.npz", "-o", "plain.npz")
    assert "nknown" not in run(home, "search", "plain.npz", "asked.npz", "--json", "s.json")
    assert "known" not in (home / "s.json").read_text(encoding="utf-8")
    assert Index.load(home / "plain.npz").knows(0.5) is None


def test_a_finished_folder_takes_another_calibration(home):
    vectors, found = Vectors.load(home / "gallery.npz"), Calibration.load(home / "c.json")
    made = build_index(home / "later.index", vectors, kind="exact")
    assert made.calibration is None
    before = (home / "later.index" / "vectors.npy").stat().st_mtime_ns
    assert build_index(home / "later.index", vectors, kind="exact", calibration=found).calibration == found
    assert build_index(home / "later.index", vectors, kind="exact").calibration == found
    assert (home / "later.index" / "vectors.npy").stat().st_mtime_ns == before
    assert DiskIndex(home / "later.index").knows(found.usable) is False
    assert DiskIndex(home / "later.index").knows(found.usable + 1e-6) is True


@pytest.mark.parametrize("make", [Index, lambda *words, **more: build_index("never.index", *words, **more)])
def test_a_calibration_of_something_else_is_refused(home, make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    vectors, found = Vectors.load(home / "gallery.npz"), Calibration.load(home / "c.json")
    with pytest.raises(ValueError, match="the calibration is for cosine, but the index for euclidean"):
        make(vectors, "euclidean", kind="exact", calibration=found)
    with pytest.raises(ValueError, match="the calibration and the vectors come from networks with different weights"):
        make(Vectors(vectors.x, fingerprint="cd"), kind="exact", calibration=found)
    few = nf.calibrate(*blobs(classes=3), 0.1)
    with pytest.raises(ValueError, match="3 classes with 75 negative pairs are too few to guarantee"):
        make(vectors, kind="exact", calibration=few)
    assert not list(tmp_path.iterdir())


def test_a_damaged_calibration_in_an_index_is_an_error(home):
    """The file of an index is sealed, so that only one made by hand can hold it."""
    from nearfar._utils.files import read_arrays, write_arrays

    Index(Vectors.load(home / "gallery.npz"), calibration=Calibration.load(home / "c.json")).save(home / "d.npz")
    assert Index.load(home / "d.npz").calibration == Calibration.load(home / "c.json")
    arrays = read_arrays("test", home / "d.npz")
    about = json.loads(str(arrays["about"])) | {"calibration": {"threshold": 1}}
    write_arrays(home / "d.npz", {**arrays, "about": np.array(json.dumps(about))})
    with pytest.raises(ValueError, match=r"d\.npz is damaged or was made by hand"):
        Index.load(home / "d.npz")


def test_the_report_shows_the_curve_and_the_cost(home):
    run(home, "report", "others.npz", "-o", "r.html", "--calibration", "c.json", "--queries", 5)
    page, found = (home / "r.html").read_text(encoding="utf-8"), Calibration.load(home / "c.json")
    section = page.split('<section id="decision"')[1].split("</section>")[0]
    for number in (f"{found.threshold:.4f}", f"{found.guaranteed:.4f}", f"{100 * found.guaranteed_tar.value:.1f}%"):
        assert number in section
    assert "holds for at least as many new classes of the same population" in section
    assert section.count("<circle") == 2
    assert len(section.split('points="')[1].split('"')[0].split()) > 10
    assert '<a href="#decision">' in page


def test_a_report_says_that_nothing_is_guaranteed():
    x, y = blobs(classes=3)
    few = nf.calibrate(x, y, 0.1)
    section = (
        nf.report.build((x, y), calibration=few, queries=3).split('<section id="decision"')[1].split("</section>")[0]
    )
    assert "No threshold can be guaranteed" in section
    assert "guaranteed</td>" not in section
    assert section.count("<circle") == 1
