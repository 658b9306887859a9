"""`nf.inspect`, `nearfar inspect` and `data.corrections`: planted cases, files, hostile input, memory, the page."""

from __future__ import annotations

import csv
import io
import json
import tarfile

import numpy as np
import pytest
import torch
from browser import Browser
from PIL import Image, ImageOps
from shell import run
from torch.utils._python_dispatch import TorchDispatchMode

import nearfar as nf
from nearfar.data import DataSet, Tensors, correct, open_data
from nearfar.evaluation import Vectors, neighbors
from nearfar.inspection import inspect, write_page
from nearfar.inspection._samples import read

HOSTILE = "<script>alert(1)</script>\"'<img src=x onerror=alert(2)>"


def drawing(rng) -> Image.Image:
    """A smooth random picture of 48 x 48 pixels."""
    rough = Image.fromarray((255 * rng.random((16, 16, 3))).astype(np.uint8))
    return rough.resize((48, 48), Image.Resampling.BICUBIC)


def pictures(folder, *, sides=("",), each=14, classes=4, seed=0):
    """Class folders of pictures that resemble their class."""
    rng = np.random.default_rng(seed)
    means = [drawing(rng) for _ in range(classes)]
    for side in sides:
        for number, mean in enumerate(means):
            home = folder / side / f"kind{number}"
            home.mkdir(parents=True)
            for i in range(each):
                Image.blend(mean, drawing(rng), 0.45).save(home / f"{i:02d}.png")
    return folder


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """Train and test folders with a wrong label, copies of every kind, one under another label, one unreadable."""
    folder = pictures(tmp_path_factory.mktemp("planted") / "data", sides=("train", "test"))
    train, test = folder / "train", folder / "test"
    (train / "kind0" / "03.png").rename(train / "kind2" / "wrong.png")
    Image.open(train / "kind1" / "00.png").save(train / "kind1" / "again.jpg", quality=60)
    ImageOps.mirror(Image.open(train / "kind1" / "05.png")).save(train / "kind1" / "mirror.png")
    Image.open(train / "kind3" / "07.png").crop((3, 2, 46, 45)).save(train / "kind3" / "part.png")
    Image.open(test / "kind0" / "01.png").save(train / "kind0" / "leak.png")
    Image.open(train / "kind3" / "01.png").save(train / "kind0" / "two.png")
    (test / "kind2" / "broken.png").write_bytes(b"no picture")
    return folder


@pytest.fixture(scope="module")
def found(planted):
    return inspect(planted)


def pairs(found, kind):
    names = found.material.names
    return [tuple(names[row] for row in each.rows) for each in found.of(kind)]


def test_everything_planted_is_found_and_nothing_else(found):
    assert sorted(pairs(found, "copy")) == [
        ("kind1/again.jpg", "kind1/00.png"),
        ("kind1/mirror.png", "kind1/05.png"),
        ("kind3/part.png", "kind3/07.png"),
    ]
    assert {each.note for each in found.of("copy")} == {"whole", "mirrored", "cropped"}
    assert pairs(found, "copy across sides") == [("kind0/leak.png", "kind0/01.png")]
    assert pairs(found, "copy with another label") == [("kind0/two.png", "kind3/01.png")]
    wrong = {found.material.names[each.rows[0]]: each for each in found.of("wrong label")}
    assert {name: each.label for name, each in wrong.items()} == {"kind2/wrong.png": "kind0", "kind0/two.png": "kind3"}
    assert {found.given(row) for row in wrong["kind2/wrong.png"].rows[1:]} == {"kind0"}
    assert [each.name for each in found.of("unreadable")] == [("kind2/broken.png", "test", "kind2")]


def test_the_corrections_are_taken_by_data_and_by_train(found, planted, tmp_path):
    file = found.save(tmp_path / "c.csv")
    before = open_data("folder", planted, on_corrupt="skip")
    after = open_data("folder", planted, on_corrupt="skip", corrections=file)
    gone = {"kind1/again.jpg", "kind1/mirror.png", "kind3/part.png", "kind0/leak.png", "kind0/two.png"}
    assert set(before.train.names) - set(after.train.names) == gone
    assert set(before.test.names) - set(after.test.names) == {"kind2/broken.png"}
    classes = {
        name: after.train.classes[label] for name, label in zip(after.train.names, after.train.labels, strict=True)
    }
    assert classes["kind2/wrong.png"] == "kind0"
    assert all(name.startswith(label) for name, label in classes.items() if name != "kind2/wrong.png")


def test_training_with_corrections_equals_training_on_corrected_files(tmp_path):
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(8), 8)
    x = (rng.normal(size=(8, 6))[y] + 0.3 * rng.normal(size=(64, 6))).astype(np.float32)
    given = y.copy()
    given[[3, 20]] = [5, 0]
    np.savez(tmp_path / "given" if (tmp_path / "given").mkdir() else tmp_path / "given" / "train.npz", x=x, y=given)
    np.savez(tmp_path / "given" / "test.npz", x=x[:32], y=y[:32] + 100)
    (tmp_path / "right").mkdir()
    keep = np.arange(64) != 20
    np.savez(tmp_path / "right" / "train.npz", x=x[keep], y=y[keep])
    np.savez(tmp_path / "right" / "test.npz", x=x[:32], y=y[:32] + 100)
    names = open_data("vectors", tmp_path / "given").train.names
    corrections = f"name,action,label,more\n{names[3]},relabel,0,\n{names[20]},ignore,,note\n{names[7]},keep,,\n"
    (tmp_path / "c.csv").write_text(corrections, encoding="utf-8")
    flags = ["--training.steps", 4, "--training.evaluate_every", 2, "--data.validation", 0]
    flags += ["--batches.name", "MPerClass", "--batches.classes", 4, "--batches.samples", 3]
    run(tmp_path, "train", "--data.path", "given", "--data.corrections", "c.csv", *flags, "--run", "a")
    run(tmp_path, "train", "--data.path", "right", *flags, "--run", "b")
    run(tmp_path, "train", "--data.path", "given", *flags, "--run", "c")

    def losses(name):
        lines = (tmp_path / name / "journal.jsonl").read_text(encoding="utf-8").splitlines()
        return [line["loss"] for line in map(json.loads, lines) if "loss" in line]

    assert losses("a") == losses("b")
    assert losses("a") != losses("c")


def test_the_command_writes_a_page_and_corrections(planted, found, tmp_path):
    shown = run(tmp_path, "inspect", planted)
    assert "3 x copy\n" in shown
    assert rows((tmp_path / "inspection.csv").read_text(encoding="utf-8")) == rows(found.corrections())
    page = (tmp_path / "inspection.html").read_text(encoding="utf-8")
    assert page.count("<img src=") == sum(len(each.rows) for each in found.findings)
    assert "https://" not in page
    assert "must end in .csv" in run(tmp_path, "inspect", planted, "--csv", "a.txt", code=1)


def test_a_network_of_ones_own_embeds_the_pictures(planted):
    def transform(picture, generator):
        return torch.from_numpy(np.array(picture.resize((4, 4)))).float().flatten()

    own = inspect(planted, model=torch.nn.Linear(48, 5), transform=transform)
    assert own.material.x.shape == (len(own.material.names), 5)
    assert len(own.of("copy")) == 3


# ------------------------------------------------------------------------------------------- sources


def some(classes=5, each=20, seed=0):
    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(classes), each)
    x = (rng.normal(size=(classes, 8))[y] + 0.4 * rng.normal(size=(len(y), 8))).astype(np.float32)
    return x, y


def test_every_kind_of_source_gives_the_same_findings(tmp_path):
    x, y = some()
    y[7] = 3
    np.savez(tmp_path / "v.npz", x=x, y=y)
    words = np.array(list("abcde"))[y]
    np.savez(tmp_path / "words.npz", x=x, y=words)
    run(tmp_path, "inspect", "v.npz")
    sources = [x.tolist(), Vectors(x, y), Tensors(x, y), tmp_path / "v.npz", str(tmp_path / "words.npz")]
    for source in sources:
        found = nf.inspect(source, y) if isinstance(source, list) else inspect(source)
        hit = found.of("wrong label")
        assert [found.material.names[each.rows[0]] for each in hit] in (["3/0"], ["d/0"])
        assert hit[0].label in ("0", "a")
    assert inspect(x).material.y is None
    assert inspect(x).of("wrong label") == ()


def test_shards_and_vectors_in_a_folder(planted, tmp_path):
    with tarfile.open(tmp_path / "s-0.tar", "w") as archive:
        for number, file in enumerate(sorted((planted / "train").glob("*/*.*"))):
            label = file.parent.name.encode()
            entry = tarfile.TarInfo(f"{number:04d}.cls")
            entry.size = len(label)
            archive.addfile(entry, io.BytesIO(label))
            archive.add(file, f"{number:04d}{file.suffix}")
    found = inspect(tmp_path / "s-0.tar")
    assert {each.note for each in found.of("copy")} >= {"whole", "mirrored"}
    assert sorted(each.label for each in found.of("wrong label")) == ["kind0", "kind3"]
    x, y = some()
    y[7] = 3
    np.savez(tmp_path / "v.npz", x=x, y=y, split=["train", "test"] * 50)
    split = inspect(tmp_path / "v.npz")
    assert set(split.material.sides) == {"train", "test"}
    assert len(split.of("wrong label")) == 1


# ------------------------------------------------------------------------------------------- hostile input


def test_bad_sources_are_one_sentence(tmp_path):
    x, y = some(2, 3)
    x[1, 0] = np.nan
    with pytest.raises(ValueError, match=r"hold NaN or infinity \(rows 1\)"):
        inspect(x, y)
    for rows_left in (0, 1):
        with pytest.raises(ValueError, match="at least two readable samples"):
            inspect(np.zeros((rows_left, 3), np.float32), np.zeros(rows_left, np.int64))
    with pytest.raises(ValueError, match=r"Vectors: y must have one entry per row"):
        inspect(x[2:], y)
    with pytest.raises(FileNotFoundError, match="there is no file or folder"):
        inspect(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="cuts must be one of"):
        inspect(x[2:], cuts={"copies": 1})
    broken = pictures(tmp_path / "broken", each=1)
    for file in broken.rglob("*.png"):
        file.write_bytes(b"")
    with pytest.raises(ValueError, match="no picture of the data can be read"):
        inspect(broken)


@pytest.mark.parametrize("rows_", [2, 3, 40])
def test_one_class_equal_rows_and_few_rows(rows_):
    same = inspect(torch.ones(rows_, 3), torch.zeros(rows_, dtype=torch.long))
    assert set(same.counts()) <= {"copy"}
    assert inspect(torch.eye(rows_), torch.arange(rows_)).of("wrong label") == ()
    assert inspect(torch.zeros(rows_, 2)).of("stranger") == ()


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("0/0,drop,", "must have the action keep, ignore or relabel"),
        ("0/0,relabel,", "must have the action keep, ignore or relabel"),
        ("0/0,relabel,zebra", "'zebra', which is no class"),
        ("nobody,ignore,", "'nobody' names 0"),
        (",ignore,", "must fill name, action"),
        ("0/0,relabel,1\n0/0,relabel,2", "two labels"),
        ("both,ignore,", "'both' names 2; say which in a column side"),
    ],
)
def test_bad_corrections_are_one_sentence(tmp_path, row, says):
    file = tmp_path / "c.csv"
    file.write_text(f"name,action,label\n{row}\n", encoding="utf-8")
    train = Tensors(torch.eye(4), [0, 1, 2, 2], names=["0/0", "1/0", "2/0", "both"])
    test = Tensors(torch.eye(2), [0, 1], names=["both", "9/0"], classes=("8", "9"))
    with pytest.raises(ValueError, match=says):
        correct(DataSet("d", train, test), file)


def test_ignore_wins_and_a_class_of_the_other_side_leaves(tmp_path):
    file = tmp_path / "c.csv"
    text = (
        "name,side,action,label\na,train,relabel,y\na,,ignore,\nb,train,relabel,z\nc,test,ignore,\nd,train,relabel,x\n"
    )
    file.write_text(text, encoding="utf-8")
    train = Tensors(torch.eye(5), [0, 1, 0, 1, 1], names=["a", "b", "c", "d", "e"], classes=("x", "y"))
    test = Tensors(torch.eye(2), [0, 0], names=["c", "f"], classes=("z",))
    after = correct(DataSet("d", train, test), file)
    assert (list(after.train.names), after.train.labels.tolist()) == (["c", "d", "e"], [0, 0, 1])
    assert list(after.test.names) == ["f"]
    file.write_text("name,action\nf,ignore\nc,ignore\n", encoding="utf-8")
    with pytest.raises(ValueError, match="leaves no sample for test"):
        correct(DataSet("d", Tensors(torch.eye(2), [0, 1], names=["p", "q"]), test), file)


# ------------------------------------------------------------------------------------------- memory and page


class Largest(TorchDispatchMode):
    """The number of entries of the largest tensor that any operation returns."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else (out,):
            if isinstance(each, torch.Tensor):
                self.entries = max(self.entries, each.numel())
        return out


def test_no_matrix_of_all_pairs_is_made(monkeypatch):
    """With small tiles the largest tensor is far below n², and grows like n."""
    monkeypatch.setitem(neighbors.__kwdefaults__, "tile", 2**12)
    monkeypatch.setattr("nearfar.inspection._labels.ENTRIES", 2**12)
    sizes = []
    for n in (1500, 3000):
        x, y = some(n // 30, 30)
        with Largest() as largest:
            inspect(x, y)
        sizes.append(largest.entries)
    assert sizes[1] < 3000**2 / 20
    assert sizes[1] < 2.5 * sizes[0]


@pytest.mark.browser
def test_the_page_in_a_browser(planted, tmp_path, tmp_path_factory):
    material = read(planted, None, None, None, None, None)
    names = [HOSTILE if name == "kind0/leak.png" else name for name in material.names]
    classes = tuple(HOSTILE if name == "kind0" else name for name in material.classes)
    made = type(material)(**{**vars(material), "names": names, "classes": classes})
    page = write_page(tmp_path / "p.html", inspect(made), title=HOSTILE)
    browser = Browser(tmp_path_factory.mktemp("profile"))
    try:
        browser.open(page, ".query")
        assert browser.ask("[...document.images].every((i) => i.complete && i.naturalWidth > 0)")
        assert browser.ask("document.querySelector('h1').textContent") == HOSTILE
        assert browser.ask("document.scripts.length") == 1
        assert browser.ask("document.documentElement.scrollWidth <= window.innerWidth")
        parts = browser.ask("[...document.querySelectorAll('main > section')].map((s) => s.id)")
        assert parts[:4] == ["headline", "wrong-label", "copy-with-another-label", "copy-across-sides"]
        assert browser.problems == []
        assert [url for url in browser.requests if not url.startswith("data:image/")] == [page.as_uri()]
    finally:
        browser.close()
