"""embed, evaluate and search on real-world input: nested folders, odd names, files in the way, changed pictures."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from shell import TRUST, Flat, run, saved

import nearfar as nf
from nearfar._utils.files import plain_target
from nearfar.cli.commands import embedding
from nearfar.evaluation import Vectors
from nearfar.evaluation._fingerprint import of_weights

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's own exporters
EMBED = ("embed", "m.pt", TRUST, "--size", 8)


def picture(path, seed):
    """A picture of noise; the same number of bytes for every seed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 256, (12, 10, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path.with_suffix(".bmp"))


@pytest.fixture
def home(tmp_path):
    """A model, and a folder with two classes of three pictures."""
    saved(Flat(3 * 8 * 8), torch.randn(2, 3, 8, 8), tmp_path / "m.pt")
    for number, label in enumerate(("auk", "wren")):
        for each in range(3):
            picture(tmp_path / "birds" / label / str(each), 10 * number + each)
    return tmp_path


def test_class_names_are_kept_and_printed(home):
    assert "v.npz: 6 vectors of width 6, 2 classes (auk, wren)" in run(home, *EMBED, "birds", "-o", "v.npz")
    assert Vectors.load(home / "v.npz").class_names() == {0: "auk", 1: "wren"}
    shown = run(home, "evaluate", "v.npz", "-k", 1, "--json", "e.json")
    assert re.search(r"│\s+auk │", shown)
    assert {
        row["name"]: row["label"] for row in json.loads((home / "e.json").read_text(encoding="utf-8"))["per_class"]
    } == {
        "auk": 0,
        "wren": 1,
    }


def test_many_classes_are_cut_and_words_are_numbered(home):
    names = np.array([f"class {i % 5}" for i in range(20)])
    np.savez(home / "d.npz", x=np.random.default_rng(0).normal(size=(20, 192)), y=names)
    shown = run(home, "embed", "m.pt", TRUST, "d.npz", "-o", "v.npz")
    assert "5 classes (class 0, class 1, class 2, ...)" in shown
    assert Vectors.load(home / "v.npz").y.tolist() == [i % 5 for i in range(20)]


def test_names_cannot_move_the_cursor(home):
    Vectors(torch.eye(4), [0, 0, 1, 1], ["\x1b[2Ja"] * 4, classes=["\x1b[31mred", "[/b]"]).save(home / "v.npz")
    run(home, "index", "v.npz", "-o", "i.npz")
    shown = run(home, "evaluate", "v.npz", "-k", 1) + run(home, "search", "i.npz", "v.npz", "-k", 2)
    assert "\x1b[2J" not in shown
    assert "\\x1b[31mred" in shown
    assert "[/b]" in shown


def test_a_gallery_is_matched_by_the_names_of_its_classes(tmp_path):
    """The same class has another number where the folders differ."""
    x = torch.eye(4)
    Vectors(x[[0, 1, 1]], [0, 1, 1], classes=["auk", "wren"]).save(tmp_path / "q.npz")
    Vectors(x[[2, 0, 1]], [0, 1, 2], classes=["aaa", "auk", "wren"]).save(tmp_path / "g.npz")
    queries, gallery = (Vectors.load(tmp_path / name) for name in ("q.npz", "g.npz"))
    assert nf.evaluate(queries, ref_emb=gallery, ks=(1,)).recall == {1: 1.0}
    run(tmp_path, "evaluate", "q.npz", "--gallery", "g.npz", "-k", 1, "--json", "e.json")
    assert json.loads((tmp_path / "e.json").read_text(encoding="utf-8"))["scores"]["recall@1"] == 1.0
    Vectors(x[[2, 0, 1]], [0, 1, 2]).save(tmp_path / "h.npz")  # without names the numbers count
    run(tmp_path, "evaluate", "q.npz", "--gallery", "h.npz", "-k", 1, "--json", "e.json")
    assert json.loads((tmp_path / "e.json").read_text(encoding="utf-8"))["scores"]["recall@1"] == 0.0


def test_a_flat_folder_is_embedded_and_searched(home):
    for each in range(3):
        picture(home / "flat" / f"p{each}", each)
    (home / "flat" / "notes.txt").write_text("no picture", encoding="utf-8")
    assert "3 vectors of width 6, without classes" in run(home, *EMBED, "flat", "-o", "q.npz")
    found = Vectors.load(home / "q.npz")
    assert found.name == ("p0.bmp", "p1.bmp", "p2.bmp")
    assert found.y is None
    run(home, *EMBED, "birds", "-o", "v.npz")
    run(home, "index", "v.npz", "-o", "i.npz")
    run(home, "search", "i.npz", "q.npz", "-k", 1, "--json", "s.json")
    near = [row["neighbors"][0]["name"] for row in json.loads((home / "s.json").read_text(encoding="utf-8"))]
    assert near == ["auk/0.bmp", "auk/1.bmp", "auk/2.bmp"]  # the same pictures


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["birds", "flat"], "one DATA is taken, but birds and flat came; run it once for each"),
        (["mixed"], "mixed holds 1 images of its own (x.bmp is the first) beside 1 in class folders"),
        (["split"], "holds the folders train and test, which are not classes; name one of them, such as split/test"),
        (["empty"], "empty holds no images"),
    ],
)
def test_folders_that_are_not_clear(home, words, sentence):
    picture(home / "mixed" / "x", 0)
    picture(home / "mixed" / "a" / "x", 0)
    for side in ("train", "test"):
        picture(home / "split" / side / "auk" / "x", 0)
    (home / "empty" / "a").mkdir(parents=True)
    assert sentence in run(home, *EMBED, *words, "-o", "v.npz", code=1)


def test_two_vectors_to_evaluate(home):
    assert "one VECTORS is taken, but a.npz and b.npz came" in run(home, "evaluate", "a.npz", "b.npz", code=1)


def commands(output):
    """Every command that writes a file, with the words before it."""
    return {
        "embed": [*EMBED, "birds", "-o", output],
        "index": ["index", "v.npz", "-o", output],
        "export": ["export", "m.pt2", TRUST, "-o", output],
        "evaluate": ["evaluate", "v.npz", "--json", output],
    }


@pytest.mark.parametrize("command", ["embed", "index", "export", "evaluate"])
@pytest.mark.parametrize("kind", ["folder", "pipe", "socket", "loop"])
def test_only_plain_files_are_replaced(home, command, kind):
    Vectors(torch.eye(4), [0, 0, 1, 1]).save(home / "v.npz")
    output = home / "there.npz"
    if kind == "folder":
        output.mkdir()
    elif kind == "pipe":
        os.mkfifo(output)
    elif kind == "socket":
        with contextlib.chdir(home), socket.socket(socket.AF_UNIX) as listening:
            listening.bind("there.npz")  # by a short name: those of sockets are limited
    elif kind == "loop":
        output.symlink_to(output)
    before = os.lstat(output)
    said = run(home, *commands(output)[command], code=1)
    assert "which is never replaced; name a file" in said
    after = os.lstat(output)
    assert (before.st_mode, before.st_ino, before.st_rdev) == (after.st_mode, after.st_ino, after.st_rdev)


def test_a_device_is_no_plain_file():
    """Asked without writing: a mistake here, made by root, would cost the machine its /dev/null."""
    with pytest.raises(FileExistsError, match="/dev/null is no plain file, which is never replaced"):
        plain_target(Path(os.devnull))


def test_a_link_stays_and_its_file_is_replaced(home):
    (home / "real").mkdir()
    (home / "real" / "v.npz").write_text("old", encoding="utf-8")
    (home / "v.npz").symlink_to(home / "real" / "v.npz")
    run(home, *EMBED, "birds", "-o", "v.npz")
    assert (home / "v.npz").is_symlink()
    assert len(Vectors.load(home / "real" / "v.npz")) == 6


@pytest.fixture
def unfinished(monkeypatch):
    """Chunks stay, as after a kill just before the end."""
    monkeypatch.setattr(embedding, "clear_parts", lambda output: None)


def test_contents_count_when_embed_goes_on(home, unfinished):
    run(home, *EMBED, "birds", "-o", "v.npz")
    (parts,) = home.glob(".v.npz.*.parts")
    chunk = parts / "chunk-000000.npz"
    before, stamp = Vectors.load(home / "v.npz"), chunk.stat().st_mtime_ns
    run(home, *EMBED, "birds", "-o", "v.npz")
    assert chunk.stat().st_mtime_ns == stamp  # nothing changed: taken up
    changed = home / "birds" / "auk" / "1.bmp"
    old = changed.stat()
    picture(changed, 77)
    os.utime(changed, ns=(old.st_atime_ns, old.st_mtime_ns))
    assert changed.stat().st_size == old.st_size  # the same name, size and time
    run(home, *EMBED, "birds", "-o", "v.npz")
    after = Vectors.load(home / "v.npz")
    assert [bool(same) for same in (before.x == after.x).all(dim=1)] == [True, False, True, True, True, True]
    run(home, *EMBED, "birds", "-o", "fresh.npz")
    assert torch.equal(Vectors.load(home / "fresh.npz").x, after.x)


def test_only_its_own_chunks_are_removed(home):
    strange = [home / f".v.npz.{'0' * 16}.parts" / "mine.txt", home / ".v.npz.x.parts" / "plan.json"]
    for file in strange:
        file.parent.mkdir()
        file.write_text("mine", encoding="utf-8")
    stale = home / f".v.npz.{'1' * 16}.parts" / "chunk-000000.npz"
    stale.parent.mkdir()
    stale.write_text("half", encoding="utf-8")
    run(home, *EMBED, "birds", "-o", "v.npz")
    assert [file.read_text(encoding="utf-8") for file in strange] == ["mine", "mine"]
    assert not stale.parent.exists()
    assert len(list(home.glob(".v.npz.*.parts"))) == 2


def test_pictures_that_cannot_be_read_are_left_out_if_asked(home):
    run(home, *EMBED, "birds", "-o", "all.npz")
    (home / "birds" / "auk" / "1.bmp").write_bytes(b"BM")
    (home / "birds" / "wren" / "2.bmp").write_text("", encoding="utf-8")
    said = run(home, *EMBED, "birds", "-o", "v.npz", code=1)
    assert "auk/1.bmp cannot be read" in said
    assert "pass --on-corrupt skip" in said
    shown = run(home, *EMBED, "birds", "-o", "v.npz", "--on-corrupt", "skip", "--thumbnails", 4)
    assert shown.endswith("2 images could not be read and were left out:\nauk/1.bmp\nwren/2.bmp\n")
    whole, found = Vectors.load(home / "all.npz"), Vectors.load(home / "v.npz")
    kept = [0, 2, 3, 4]
    assert found.name == tuple(whole.name[row] for row in kept)
    assert found.y.tolist() == [0, 0, 1, 1]
    torch.testing.assert_close(found.x, whole.x[kept])
    assert found.images.shape == (4, 4, 4, 3)
    assert "must be one of" in run(home, *EMBED, "birds", "-o", "v.npz", "--on-corrupt", "skp", code=1)


def test_nothing_is_left_if_nothing_can_be_read(home):
    for file in (home / "birds").rglob("*.bmp"):
        file.write_bytes(b"")
    assert "all 6 samples were left out" in run(home, *EMBED, "birds", "-o", "v.npz", "--on-corrupt", "skip", code=1)
    assert not (home / "v.npz").exists()


def test_vectors_of_two_networks_do_not_meet(home):
    other = Flat(3 * 8 * 8)
    with torch.no_grad():
        other.linear.bias += 1
    saved(other, torch.randn(2, 3, 8, 8), home / "other.pt")
    for model, output in (("m.pt", "v.npz"), ("m.pt", "same.npz"), ("other.pt", "o.npz")):
        run(home, "embed", model, TRUST, "--size", 8, "birds", "-o", output)
    run(home, "embed", "m.pt", TRUST, "--size", 8, "--imagenet", "birds", "-o", "imagenet.npz")
    run(home, "index", "v.npz", "-o", "i.npz")
    run(home, "search", "i.npz", "same.npz", "-k", 1)
    run(home, "evaluate", "v.npz", "--gallery", "same.npz", "-k", 1)
    run(home, "compare", "v.npz", "o.npz")  # compares networks, each in its own space
    for queries, what in (("o.npz", "weights"), ("imagenet.npz", "preprocessing")):
        words = f"come from networks with different {what}; embed both with one"
        assert words in run(home, "search", "i.npz", queries, "-k", 1, code=1)
        assert words in run(home, "evaluate", "v.npz", "--gallery", queries, "-k", 1, code=1)
    Vectors(torch.randn(2, 6)).save(home / "unknown.npz")
    run(home, "search", "i.npz", "unknown.npz", "-k", 1)


def test_a_fingerprint_is_of_the_weights_alone():
    model = torch.nn.Conv2d(3, 4, 3)
    first = of_weights(model)
    assert of_weights(model.to(memory_format=torch.channels_last)) == first
    assert of_weights(torch.nn.Identity()) == ""
    with torch.no_grad():
        model.weight[0, 0, 0, 0] += 1e-3
    assert of_weights(model) != first
