"""`nearfar mine`, through the app of the command line, in an empty folder."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from shell import TRUST, Flat, run, saved

import nearfar as nf
from nearfar.evaluation import Index, Mined, Vectors, _mine

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's own exporters


@pytest.fixture
def home(tmp_path):
    """Vectors of two sets, and a model with its samples."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(60) // 3
    x = torch.randn(20, 7, generator=generator)[y] + torch.randn(60, 7, generator=generator)
    Vectors(x, y, classes=[f"class {i:02d}" for i in range(20)]).save(tmp_path / "v.npz")
    Vectors(x.flip(0), y.flip(0), classes=[f"class {i:02d}" for i in range(20)]).save(tmp_path / "g.npz")
    np.savez(tmp_path / "x.npz", x=x.numpy(), y=y.numpy())
    saved(Flat(7), torch.randn(2, 7), tmp_path / "m.pt")
    return tmp_path


def same(found, wanted):
    assert torch.equal(found.places, wanted.places)
    assert torch.equal(found.scores, wanted.scores)
    assert torch.equal(found.positive, wanted.positive)


def test_it_writes_what_mine_finds(home):
    v, g = Vectors.load(home / "v.npz"), Vectors.load(home / "g.npz")
    said = run(home, "mine", "v.npz", "-o", "a", "-k", 4, "--ranks", "2,30", "--scores", "0.1,", "--margin", 0.1)
    wanted = nf.mine(v, k=4, ranks=(2, 30), scores=(0.1, None), margin=0.1)
    same(Mined.load(home / "a"), wanted)
    listed = (wanted.places >= 0).sum(dim=1)
    none = int((listed == 0).sum())
    assert none
    many = float(listed.float().mean())
    words = f"{many:.1f} hard negatives (of at most 4) for each of 60 samples; {none} have none."
    assert words in said
    run(home, "mine", "v.npz", "-o", "b", "--gallery", "g.npz", "--similarity", "euclidean")
    same(Mined.load(home / "b"), nf.mine(v, ref_emb=g, similarity="euclidean"))
    run(home, "mine", "v.npz", "-o", "c", "--teacher", "v.npz", "--margin", 0)
    same(Mined.load(home / "c"), nf.mine(v, margin=0.0))
    Index(v).save(home / "i.npz")
    run(home, "mine", "v.npz", "-o", "d", "--index", "i.npz")
    assert torch.equal(Mined.load(home / "d").places, nf.mine(v).places)


class Stop(BaseException):
    """Ends the process, as far as the command can tell."""


def test_samples_are_embedded_first_and_both_go_on(home, monkeypatch):
    """Stopped after it has embedded, while it mines; samples that changed in between are refused."""
    words = ("mine", "m.pt", "x.npz", TRUST, "--batch-size", 1, "-o", "out")
    monkeypatch.setattr(_mine, "CHUNK", 16)
    honest, calls = _mine._split, []

    def stop(*args):
        calls.append(1)
        if len(calls) == 3:
            raise Stop
        return honest(*args)

    monkeypatch.setattr(_mine, "_split", stop)
    with pytest.raises(Stop):
        run(home, *words)
    with pytest.raises(ValueError, match="is not finished"):
        Mined.load(home / "out")
    run(home, *words)
    assert len(calls) == 3 + 2
    same(Mined.load(home / "out"), nf.mine(Vectors.load(home / "out" / "embeddings.vectors")))
    assert sorted(path.name for path in (home / "out").iterdir()) == [
        *(f"chunk-{number:06d}.npz" for number in range(4)), "embeddings.vectors", "plan.json"
    ]  # fmt: skip
    fresh = Vectors.load(home / "out" / "embeddings.vectors")
    with pytest.raises(ValueError, match="holds chunks of"):
        nf.mine(Vectors(fresh.x + 1, fresh.y), folder=home / "out")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["v.npz", "--ranks", "5"], "--ranks must be two numbers, such as 10,100, but came as '5'"),
        (["v.npz", "--ranks", "5,2"], "ranks must be a window"),
        (["v.npz", "--scores", "a,b"], "--scores must be two numbers"),
        (["v.npz", "--gallery", "g.npz", "--teacher", "v.npz"], "--teacher judges samples among themselves"),
        (["v.npz", "x.npz", "more"], "one DATA is taken"),
        (["m.pt", "x.npz", TRUST], "x.npz holds no classes (y, or a folder for each)"),
        (["x.npz"], "x.npz holds no y, the classes of its vectors"),
        (["v.npz", "-o", "full"], "full holds other files (note.txt); name a new folder"),
    ],
)
def test_wrong_words(home, words, message):
    (home / "full").mkdir()
    (home / "full" / "note.txt").write_text("mine", encoding="utf-8")
    np.savez(home / "x.npz", x=np.eye(3, dtype=np.float32))
    out = [] if "-o" in words else ["-o", "new"]
    assert message in run(home, "mine", *words, *out, code=1)
    assert (home / "full" / "note.txt").read_text(encoding="utf-8") == "mine"
