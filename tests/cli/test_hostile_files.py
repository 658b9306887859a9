"""Hostile files, given to every command that reads them: one sentence, nothing executed, nothing written outside."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import pickle
import tarfile

import numpy as np
import pytest
import torch
from hostile_files import Payload, bomb
from PIL import Image
from shell import Flat, run, saved
from typer.testing import CliRunner

from nearfar._utils import checkpoint
from nearfar.cli.main import app
from nearfar.data import _tables, open_data
from nearfar.report._journal import read_journal
from nearfar.runs._config import save
from nearfar.train import parse
from nearfar.train._folder import MARK

torch.set_num_threads(1)
X, Y = np.random.default_rng(0).standard_normal((12, 4)).astype(np.float32), np.repeat(np.arange(4), 3)


@pytest.fixture
def place(tmp_path):
    """A folder to work in; beside it a secret, and the mark that code would leave if it were run."""
    (tmp_path / "work").mkdir()
    (tmp_path / "secret").mkdir()
    Image.new("RGB", (8, 8), "red").save(tmp_path / "secret" / "s.png")
    np.savez(tmp_path / "work" / "good.npz", x=X, y=Y, name=[f"{i}.png" for i in range(12)])
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    yield tmp_path / "work"
    assert not (tmp_path / "mark").exists(), "code in a file was run"
    outside = {path for path in tmp_path.rglob("*") if "work" not in path.relative_to(tmp_path).parts}
    assert outside == {path for path in before if "work" not in path.relative_to(tmp_path).parts}


def refused(place, *words):
    """The sentence at the end of what a command prints."""
    with contextlib.chdir(place):
        shown = CliRunner().invoke(app, list(map(str, words)), env={"COLUMNS": "160"}, catch_exceptions=False)
    assert shown.exit_code == 1, shown.output
    said = shown.output.strip().splitlines()[-1]  # above it may stand how far it came
    assert said.startswith("nearfar ")
    return said


def payload(place):
    return Payload(place.parent / "mark")


# ------------------------------------------------------------------------------------------- pickled arrays

READERS = {
    "report": ("report", "FILE"),
    "evaluate": ("evaluate", "FILE"),
    "gallery": ("evaluate", "good.npz", "--gallery", "FILE"),
    "compare": ("compare", "good.npz", "FILE"),
    "index": ("index", "FILE", "-o", "index.npz"),
    "search": ("search", "FILE", "good.npz"),
    "queries": ("search", "sound.npz", "FILE"),
    "diagnose": ("diagnose", "FILE"),
    "vectors": ("train", "--data.name", "vectors", "--data.path", "FILE", "--run", "run"),
    "omniglot": ("train", "--data.name", "omniglot", "--data.path", "FILE", "--run", "run"),
    "recommend": ("recommend", "vectors", "--path", "FILE"),
}


def hostile_arrays(place, kind):
    path = place / "bad.npz"
    thing = np.empty(12, dtype=object)
    thing[:] = [payload(place)] * 12
    arrays = {"x": X, "y": Y}
    if kind == "a bare pickle":
        path.write_bytes(pickle.dumps(payload(place), protocol=2))
    elif kind == "a pickle in a zip":
        np.savez(path, **{**arrays, "y": thing})
    elif kind == "pickled vectors":
        np.savez(path, x=thing, y=Y, images=thing, labels=thing, class_names=thing, background=thing)
    return path.name


@pytest.mark.parametrize("command", READERS)
@pytest.mark.parametrize("kind", ["a bare pickle", "a pickle in a zip", "pickled vectors"])
def test_pickled_arrays_are_never_loaded(place, command, kind):
    if command == "queries":
        run(place, "index", "good.npz", "-o", "sound.npz")
    name = hostile_arrays(place, kind)
    said = refused(place, *(name if word == "FILE" else word for word in READERS[command]))
    assert "pickled objects, which are never loaded" in said or "is not an .npz file" in said, said
    assert not (place / "report.html").exists()
    assert not (place / "index.npz").exists()


# --------------------------------------------------------------------------------------- pickled checkpoints


@pytest.mark.parametrize("words", [("embed", "run", "good.npz", "-o", "out.npz"), ("export", "run", "-o", "out.onnx"),
                                   ("train", "--run", "run", "--resume")])  # fmt: skip
@pytest.mark.parametrize("kind", ["a bare pickle", "a pickle in a checkpoint"])
def test_pickled_checkpoints_are_never_loaded(place, words, kind):
    home = place / "run" / "checkpoints"
    home.mkdir(parents=True)
    tree = {"data": {"name": "vectors", "path": "good.npz"}, "model": {"name": "linear"}, "batches": {"classes": 2}}
    save(parse(tree), place / "run" / "config.yaml")
    (place / "run" / MARK).write_text("", encoding="utf-8")
    for name in ("best.pt", "last.pt"):
        if kind == "a bare pickle":
            (home / name).write_bytes(pickle.dumps(payload(place), protocol=2))
        else:  # with a seal that is right
            checkpoint.save(home / name, {"model": payload(place)})
    said = refused(place, *words)
    assert "best.pt" in said or "last.pt" in said
    assert not list(place.glob("out.*"))


def test_pickled_weights_are_never_loaded(place):
    torch.save(payload(place), place / "weights.pth")
    said = refused(
        place,
        "train",
        "--model.weights",
        "weights.pth",
        "--run",
        "run",
        "--data.name",
        "vectors",
        "--data.path",
        "good.npz",
        "--batches.classes",
        "2",
    )
    assert "weights.pth" in said


# ------------------------------------------------------------------------------------------- configurations

YAML = {
    "a tag": "loss: !!python/object/apply:os.system ['touch ../mark']\n",
    "a module": "loss: !!python/module:os\n",
    "aliases": "loss:\n  name: DroKL\n  a: &a [1, 1]\n"
    + "".join(f"  x{i}: &x{i} [{', '.join(['*a' if i == 0 else f'*x{i - 1}'] * 9)}]\n" for i in range(9)),
    "depth": "loss: " + "[" * 600 + "\n",
    "length": "loss: " + "a" * (2 << 20) + "\n",
    "no text": "loss: \xff\xfe",
}


@pytest.mark.parametrize("kind", YAML)
@pytest.mark.parametrize("command", ["train", "config", "embed"])
def test_configurations_run_nothing(place, command, kind):
    (place / "run").mkdir()
    for file in (place / "bad.yaml", place / "run" / "config.yaml"):
        file.write_bytes(YAML[kind].encode("latin1"))
    words = {"train": ("train", "bad.yaml", "--run", "new"), "config": ("config", "bad.yaml"),
             "embed": ("embed", "run", "good.npz", "-o", "out.npz")}[command]  # fmt: skip
    said = refused(place, *words)
    assert len(said) < 500
    assert not (place / "new").exists()


# ---------------------------------------------------------------------------- lists and archives that lead out


def pictures(place, *names):
    for name in names:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (len(name), 0, 0)).save(place / name)


@pytest.mark.parametrize("name", ["../secret/s.png", "sub/../../secret/s.png", "link.png"])
@pytest.mark.parametrize("kind", ["manifest", "sop", "inshop", "cub"])
def test_lists_lead_nowhere_else(place, kind, name):
    pictures(place, "sub/a.png", "images/sub/a.png")
    (place / "link.png").symlink_to(place.parent / "secret" / "s.png")
    (place / "images" / "link.png").symlink_to(place.parent / "secret" / "s.png")
    if kind == "cub":
        name = name.replace("../secret", "../../secret")
        (place / "images.txt").write_text(f"1 sub/a.png\n2 {name}\n", encoding="utf-8")
        (place / "image_class_labels.txt").write_text("1 1\n2 150\n", encoding="utf-8")
        (place / "classes.txt").write_text("1 a\n150 b\n", encoding="utf-8")
    elif kind == "manifest":
        (place / "list.csv").write_text(f"path,label\nsub/a.png,1\n{name},2\n", encoding="utf-8")
    elif kind == "sop":
        for side in ("train", "test"):
            (place / f"Ebay_{side}.txt").write_text(
                f"image_id class_id super_class_id path\n1 1 1 {name}\n", encoding="utf-8"
            )
    else:
        rows = "".join(f"{name} id {side}\n" for side in ("train", "query", "gallery"))
        (place / "list_eval_partition.txt").write_text(f"3\nimage item status\n{rows}", encoding="utf-8")
    path = "list.csv" if kind == "manifest" else "."
    said = refused(place, "recommend", kind, "--path", path)
    assert "leads out of" in said
    assert "data.outside: true" in said


@pytest.mark.parametrize(("entry", "told"), [
    ("../../secret/s.png", "leads out of the archive"),
    ("/secret/s.png", "leads out of the archive"),
    ("link", "are in none of the archives"),
    ("cut", "cannot be read as a plain tar file"),
])  # fmt: skip
def test_archives_lead_nowhere_else(place, entry, told):
    with tarfile.open(place / "cub200_full-00.tar", "w") as archive:
        member = tarfile.TarInfo("s.png" if entry in ("link", "cut") else entry)
        if entry == "link":
            member.type, member.linkname = tarfile.SYMTYPE, str(place.parent / "secret" / "s.png")
            archive.addfile(member)
        else:
            member.size = 3
            archive.addfile(member, io.BytesIO(b"abc"))
    if entry == "cut":
        (place / "cub200_full-00.tar").write_bytes(b"\1" * 700)
    (place / "cub200_full_labels.csv").write_text("filename,class_id,class_name\ns.png,1,a\n", encoding="utf-8")
    assert told in refused(place, "recommend", "cub", "--path", ".")


def test_names_of_vectors_lead_nowhere_else(place):
    np.savez(place / "bad.npz", x=X, y=Y, name=["../../secret/s.png"] * 12)
    (place / "pictures").mkdir()
    said = refused(place, "report", "bad.npz", "--images", "pictures")
    assert "leads out of pictures" in said
    np.savez(place / "bad.npz", x=X, y=Y, images=[str(place.parent / "secret" / "s.png")] * 12)
    assert "must be uint8" in refused(place, "report", "bad.npz")
    assert not (place / "report.html").exists()


# ----------------------------------------------------------------------------------------- columns of each kind

COLUMNS = {
    "fractions": Y + 0.5,
    "truth values": Y > 1,
    "complex numbers": Y + 1j,
    "words": Y.astype(str),
    "bytes": Y.astype("S2"),
    "records": np.zeros(12, dtype=[("a", "i4")]),
    "dates": Y.astype("M8[D]"),
    "spans of time": Y.astype("m8[s]"),
}


@pytest.mark.parametrize("kind", COLUMNS)
@pytest.mark.parametrize("command", ["diagnose", "report"])
def test_columns_of_each_kind_are_named(place, command, kind):
    np.savez(place / "bad.npz", x=X, y=COLUMNS[kind])
    said = refused(place, command, "bad.npz")
    assert f"must be integers [n], but came as {kind}" in said
    if kind != "fractions":
        np.savez(place / "bad.npz", x=np.stack([COLUMNS[kind]] * 2, 1), y=Y)
        assert f"must hold real numbers [n, d], but came as {kind}" in refused(place, command, "bad.npz")


# ------------------------------------------------------------------------------------- pictures and folders


def test_bombs_pipes_and_programs_are_corrupt_pictures(place):
    pictures(place, *(f"{side}/{c}/{i}.png" for side in ("train", "test") for c in "ab" for i in range(2)))
    bad = place / "train" / "a" / "0.png"
    for kind, told in (("bomb", "more than 178,956,970 pixels"), ("printer", "no picture of a known format")):
        bad.write_bytes(bomb(60_000) if kind == "bomb" else b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n")
        words = ("train", "--data.name", "folder", "--data.path", ".", "--run", "run", "--data.transform", "none")
        said = refused(place, *words, "--batches.classes", "2", "--batches.samples", "2", "--model.name", "linear")
        assert f"a/0.png cannot be read ({told})" in said
    bad.unlink()
    os.mkfifo(bad)  # no plain file: it is passed over, and not waited for
    assert len(open_data("folder", place).train) == 3


def test_links_in_circles_end(place):
    pictures(place, "data/a/0.png", "data/b/0.png")
    (place / "data" / "a" / "round").symlink_to(place / "data")
    (place / "data" / "b" / "itself.png").symlink_to(place / "data" / "b" / "itself.png")
    (place / "data" / "c").symlink_to(place / "data" / "c")
    data = open_data("folder", place / "data")
    assert sorted([*data.train.names, *data.test.names]) == ["a/0.png", "b/0.png"]


@pytest.mark.filterwarnings("ignore")  # of torch's own tracer, and of the pictures that are skipped
def test_embedding_ends_whatever_the_folder_holds(place):
    pictures(place, *(f"data/{c}/{i}.png" for c in "ab" for i in range(2)))
    saved(Flat(3 * 8 * 8), torch.zeros(2, 3, 8, 8), place / "m.pt")
    (place / "data" / "a" / "bomb.png").write_bytes(bomb(60_000))
    os.mkfifo(place / "data" / "b" / "pipe.png")
    (place / "data" / "a" / "round").symlink_to(place / "data")
    (place / "data" / "b" / "itself.png").symlink_to(place / "data" / "b" / "itself.png")
    words = ("embed", "m.pt", "data", "-o", "v.npz", "--size", "8", "--trust-model")
    assert "bomb.png cannot be read (more than 178,956,970 pixels)" in refused(place, *words)
    run(place, *words, "--on-corrupt", "skip")
    with np.load(place / "v.npz") as stored:
        assert stored["name"].tolist() == ["a/0.png", "a/1.png", "b/0.png", "b/1.png"]


@pytest.mark.parametrize("name", ["new\nline", "'quote\"", "<script>", "\x1b[2J\x1b]0;x\x07", "[bold]x[red]", "\udcff"])
def test_names_that_mean_harm_are_shown_harmlessly(place, name):
    pictures(place, *(f"data/{c}/{i}.png" for c in (name, "b", "c", "d") for i in range(2)))
    for i in range(2):
        (place / "data" / name / f"{i}.png").write_bytes(b"no picture")
    data = open_data("folder", place / "data")
    home = data.train if name in data.train.classes else data.test
    with pytest.raises(ValueError, match="cannot be read") as error:
        home[list(home.labels).index(home.classes.index(name))]
    assert str(error.value).isprintable()


# -------------------------------------------------------------------------------------------- enormous lines


def test_enormous_lines_are_not_read_whole(place, monkeypatch):
    monkeypatch.setattr(_tables, "LONGEST", 10_000)
    long = "a" * 20_000
    (place / "list.csv").write_text(f"path,label\n{long},1\n", encoding="utf-8")
    assert "line 2 of list.csv has more than 10,000 characters" in refused(
        place, "recommend", "manifest", "--path", "list.csv"
    )
    (place / "Ebay_train.txt").write_text(f"heading\n1 1 1 {long}\n", encoding="utf-8")
    assert "line 2 of Ebay_train.txt has more than 10,000" in refused(place, "recommend", "sop", "--path", ".")
    (place / "cub200_full_labels.csv").write_text(f"filename,class_id,class_name\n\n{long}", encoding="utf-8")
    assert "line 3 of cub200_full_labels.csv has more" in refused(place, "recommend", "cub", "--path", ".")


@pytest.mark.parametrize(("text", "told"), [
    (b"path,label\n\"a,1\nb,2\n", "cannot be read as a CSV file"),
    (b"path,label\na\0.png,1\n", "holds a null character"),
    (b"path,label\n\xff\xfe,1\n", "is not UTF-8 text"),
    (b"path,label\n" + b"a" * 200_000 + b",1\n", "field larger than field limit"),
    (b"path,label\n" + b"a" * 5_000 + b",1\n", "1 of 1 images are missing"),
])  # fmt: skip
def test_lists_that_are_none(place, text, told):
    (place / "list.csv").write_bytes(text)
    said = refused(place, "recommend", "manifest", "--path", "list.csv")
    assert told in said
    assert len(said) < 500
    assert csv.field_size_limit() == 131_072


# -------------------------------------------------------------------------------------------------- journals


@pytest.mark.parametrize("line", [
    "[" * 50_000, '{"step": 1, "loss": ' + "9" * 400 + "}", '{"step": 1, "loss": ' + "9" * 9_000 + "}", "\xff\0",
    '{"step": 1, "loss": 1e308}\n{"step": 2, "loss": -1e308}', '{"step": -1e300, "loss": 1}\n{"step": 1e300}',
    '{"step": "<b>", "loss": 1, "metrics": {"<script>": 2}}', "7", '{"doctor": 3, "step": 2, "loss": null}',
])  # fmt: skip
def test_journals_of_strangers(place, line):
    (place / "run").mkdir()
    sound = "\n".join(f'{{"step": {s}, "loss": {1 / s}, "lr": 0.1, "time": 1}}' for s in range(1, 9))
    (place / "run" / "journal.jsonl").write_text(f"{sound}\n{line}\n", encoding="latin1")
    np.savez(place / "run" / "embeddings.npz", x=X, y=Y)
    assert read_journal(place / "run" / "journal.jsonl").panels
    run(place, "report", "run")
    assert (
        "<script>"
        not in (place / "report.html").read_text(encoding="utf-8").partition("</title>")[2].partition("<script")[0]
    )
