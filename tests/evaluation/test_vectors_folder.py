"""Folders of vectors: lazy reads, atomic replacement, detected damage."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from disks import full_disk
from shell import Flat, run, saved

import nearfar as nf
from nearfar.evaluation import Vectors
from nearfar.evaluation.vectors_folder import MANIFEST, verify, write_folder


def written(folder, dtype="float32", rows=50):
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows))
    y = np.arange(rows) // 5
    write_folder(folder, [part.numpy() for part in x.split(20)], {"y": y}, dtype)
    return x


@pytest.mark.parametrize(("dtype", "kind"), [("float32", "float32"), ("float16", "float16"), ("bf16", "bfloat16")])
def test_rows_come_back_in_the_type_that_was_asked_for(tmp_path, dtype, kind):
    x = written(tmp_path / "a.vectors", dtype)
    found = Vectors.load(tmp_path / "a.vectors")
    assert found.x.dtype == getattr(torch, kind)
    assert torch.equal(found.x, x.to(found.x.dtype))
    alone = nf.evaluate(found.x.float(), found.y, resamples=20)
    assert nf.evaluate(found, resamples=20).to_dict() == alone.to_dict()
    found.save(tmp_path / "b.npz")
    assert torch.equal(Vectors.load(tmp_path / "b.npz").x, found.x.float())
    assert found.in_terms_of(Vectors([[1.0]], [0])).x is found.x
    verify(tmp_path / "a.vectors")


def test_nothing_is_read_before_it_is_touched(tmp_path):
    """The rows that are read are those in the file at that time; and nothing written to them reaches it."""
    written(tmp_path / "a.vectors")
    found, again = (Vectors.load(tmp_path / "a.vectors") for _ in range(2))
    (file,) = (tmp_path / "a.vectors").glob("x-*.bin")
    before = file.read_bytes()
    with file.open("r+b") as stream:
        stream.write(np.full(8, 7, np.float32).tobytes())
    assert found.x[0].tolist() == [7.0] * 8
    again.x[1] = 0
    assert file.read_bytes()[32:] == before[32:]
    with pytest.raises(ValueError, match=r"part 0 of .* is damaged"):
        verify(tmp_path / "a.vectors")


def test_vectors_are_replaced_whole_and_others_never(tmp_path):
    folder = tmp_path / "a.vectors"
    written(folder)
    (folder / "mine.txt").write_text("mine", encoding="utf-8")

    def torn():
        yield np.ones((3, 8), np.float32)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_folder(folder, torn(), {})
    assert len(Vectors.load(folder)) == 50
    x = written(folder, rows=30)
    assert torch.equal(Vectors.load(folder).x, x)
    assert sorted(path.suffix for path in folder.iterdir()) == [".bin", ".json", ".npz", ".txt"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(FileExistsError, match="holds no vectors, so it is not replaced"):
        written(tmp_path / "other")


@pytest.mark.parametrize("size", [0, 1200])
def test_an_interrupted_write_can_be_repeated(tmp_path, size):
    """The disk is full as the fields (0) or the rows (1200) are written; then a process is killed as it writes."""
    folder = tmp_path / "a.vectors"
    with full_disk(size), pytest.raises(OSError, match="large"):
        written(folder)
    assert not list(folder.glob(".*"))
    (folder / ".x-0123456789abcdef.bin.7-01234567.part").write_bytes(b"half")
    x = written(folder)
    assert torch.equal(Vectors.load(folder).x, x)
    assert sorted(path.suffix for path in folder.iterdir()) == [".bin", ".json", ".npz"]


@pytest.mark.parametrize("how", ["short", "no manifest", "another kind", "path"])
def test_what_is_damaged_is_refused(tmp_path, how):
    folder = tmp_path / "a.vectors"
    written(folder)
    about = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    if how == "short":
        (file,) = folder.glob("x-*.bin")
        file.write_bytes(file.read_bytes()[:-1])
    elif how == "no manifest":
        (folder / MANIFEST).write_text("{", encoding="utf-8")
    else:
        changed = {"dtype": "float128"} if how == "another kind" else {"key": "../../../../x"}
        (folder / MANIFEST).write_text(json.dumps(about | changed), encoding="utf-8")
    with pytest.raises(ValueError, match="embed again"):
        Vectors.load(folder)


def test_numbers_that_a_type_cannot_hold(tmp_path):
    with pytest.raises(ValueError, match="too long for float16; store them as float32 or bf16"):
        write_folder(tmp_path / "a.vectors", [np.full((1, 2), 1e6, np.float32)], {}, "float16")


@pytest.mark.filterwarnings("ignore")
def test_embed_stores_what_is_asked_for(tmp_path):
    saved(Flat(7), torch.randn(2, 7), tmp_path / "m.pt")
    np.savez(tmp_path / "x.npz", x=np.random.default_rng(0).normal(size=(30, 7)).astype(np.float32), y=np.arange(30))
    words = ("embed", "m.pt", "--trust-model", "x.npz")
    for dtype, output in (("float32", "a.npz"), ("float16", "h.npz"), ("bf16", "b.vectors")):
        run(tmp_path, *words, "--dtype", dtype, "-o", output)
    whole, half, short = (Vectors.load(tmp_path / name) for name in ("a.npz", "h.npz", "b.vectors"))
    assert torch.equal(half.x, whole.x.half().float())
    assert torch.equal(short.x, whole.x.bfloat16())
    assert short.fingerprint == whole.fingerprint
    assert "an .npz file cannot hold bf16" in run(tmp_path, *words, "--dtype", "bf16", "-o", "c.npz", code=1)
    assert "must be one of" in run(tmp_path, *words, "--dtype", "float8", "-o", "c.npz", code=1)
