"""`mine` against a loop over all pairs; indices, teachers, chunks, kills, a full disk and several processes."""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest
import torch
from disks import full_disk
from forks import ran
from oracles import hard_negatives as oracle
from oracles import similarity

import nearfar as nf
from nearfar.evaluation import Index, Mined, _mine, build_index

torch.set_num_threads(1)
CASES = {
    "plain": {},
    "window": {"ranks": (3, 9), "k": 4},
    "scores": {"scores": (-0.2, 0.6), "k": 40},
    "one end": {"scores": (None, 0.3)},
    "guard": {"margin": 0.05, "k": 7},
    "strict guard": {"margin": 0.6},
    "all": {"ranks": (2, 30), "scores": (-0.9, 0.9), "margin": 0.0, "k": 5},
}


def points(n, seed, classes=6, width=5):
    """Rows in float64, whose scores tell all pairs apart; row 0 is alone in its class."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (n,), generator=generator)
    y[0] = 99
    return torch.randn(n, width, generator=generator, dtype=torch.float64), y


def check(found, S, y, z, T=None, itself=False, **rule):
    wanted, positive = oracle.mine(S, y.tolist(), z.tolist(), T=T, itself=itself, **{"k": 10, **rule})
    assert [[j for j in row if j >= 0] for row in found.places.tolist()] == wanted
    np.testing.assert_allclose(found.positive, positive, rtol=0, atol=1e-6)
    for i, row in enumerate(wanted):
        assert (found.places[i, len(row) :] == -1).all()
        assert (found.scores[i, len(row) :] == -torch.inf).all()
        np.testing.assert_allclose(found.scores[i, : len(row)], [S[i][j] for j in row], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["cosine", "dot", "euclidean"])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_oracle(monkeypatch, case, kind):
    """Chunks of 16 queries, blocks of few pairs."""
    monkeypatch.setattr(_mine, "CHUNK", 16)
    monkeypatch.setattr(_mine, "BLOCK", 50)
    formula = {"cosine": similarity.cosine, "dot": similarity.dot}.get(
        kind, lambda x, y: similarity.neg_euclidean(x, y, normalize=False)
    )
    x, y = points(50, 0)
    g, z = points(70, 1)
    found = nf.mine(x, y, similarity=kind, **CASES[case])
    check(found, similarity.scores(x.numpy(), x.numpy(), formula), y, y, itself=True, **CASES[case])
    found = nf.mine(x.numpy(), y.tolist(), ref_emb=g, ref_labels=z, similarity=kind, **CASES[case])
    check(found, similarity.scores(x.numpy(), g.numpy(), formula), y, z, **CASES[case])


def test_a_teacher_judges():
    (x, y), (g, z) = points(40, 0), points(60, 1)
    t, u = points(40, 2)[0], points(60, 3)[0]
    S, T = (similarity.scores(a.numpy(), b.numpy(), similarity.cosine) for a, b in ((x, g), (t, u)))
    found = nf.mine(x, y, ref_emb=g, ref_labels=z, margin=0.1, teacher=(t, u), k=20)
    check(found, S, y, z, T=T, margin=0.1, k=20)
    S, T = (similarity.scores(a.numpy(), a.numpy(), similarity.cosine) for a in (x, t))
    check(nf.mine(x, y, margin=0.1, teacher=t), S, y, y, T=T, itself=True, margin=0.1)


def test_a_copy_of_a_positive_under_another_label_is_left_out():
    """To the bit, also without a margin; and kept without a guard."""
    x = torch.randn(64, 7, generator=torch.Generator().manual_seed(0))
    x = torch.cat([x, x[:32] * 4.0])  # row 64 + i has the direction of row i
    y = torch.arange(96)
    y[1:64:2] = y[0:64:2]  # pairs
    assert not (nf.mine(x, y, margin=0.0, k=90, ranks=(1, 90)).places[1:32:2] == torch.arange(64, 96, 2)[:, None]).any()
    assert (nf.mine(x, y, k=1).places[:32, 0] == torch.arange(64, 96)).all()


@pytest.mark.parametrize("kind", ["exact", "ivf", "int8"])
def test_an_index_of_the_references(tmp_path, kind):
    (x, y), (g, z) = points(40, 0), points(900, 1, classes=12)
    x, g = x.float(), g.float()
    index = Index(g, kind="ivf", cells=8, probes=8) if kind == "ivf" else build_index(tmp_path / "i", g, kind=kind)
    exact = nf.mine(x, y, ref_emb=g, ref_labels=z, margin=0.0)
    found = nf.mine(x, y, ref_emb=g, ref_labels=z, margin=0.0, index=index)
    hits = [
        len(set(a) & set(b)) / max(1, len(set(b)))
        for a, b in zip(found.places.tolist(), exact.places.tolist(), strict=True)
    ]
    assert np.mean(hits) > (0.98 if kind == "int8" else 0.999)
    torch.testing.assert_close(found.positive, exact.positive, equal_nan=True)
    with pytest.raises(ValueError, match=r"^mine: the index must be of the 40 references, but is "):
        nf.mine(x, y, index=index)
    with pytest.raises(ValueError, match=r"^mine: the index compares by cosine, not by dot; name that one"):
        nf.mine(x, y, ref_emb=g, ref_labels=z, index=index, similarity="dot")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": 0}, "k must be a whole number"),
        ({"ranks": (0, 5)}, "ranks must be a window of whole numbers from 1 on, but came as"),
        ({"ranks": (5, 4)}, "ranks must be a window"),
        ({"scores": (0.5, 0.4)}, "scores must be a window, the lower end first"),
        ({"scores": (float("nan"), None)}, "scores must be a window"),
        ({"margin": float("nan")}, "margin must be a finite number"),
        ({"similarity": "cos"}, "similarity must be one of"),
        ({"teacher": torch.zeros(3, 2)}, "teacher must have a row for each of the 4 queries, not 3"),
        (
            {"embeddings": torch.tensor([[1.0], [2.0], [3.0], [torch.nan]])},
            "embeddings must be finite, but 1 of 4 rows",
        ),
        ({"embeddings": torch.zeros(0, 2), "labels": torch.zeros(0).long()}, "0 queries and 0 references came"),
        ({"labels": torch.arange(3)}, "labels must"),
        ({"ref_emb": torch.zeros(2, 3), "ref_labels": [0, 1]}, "ref_emb must be 2 wide like embeddings, but is 3 wide"),
        ({"ref_emb": torch.zeros(2, 2)}, "ref_emb and ref_labels belong together"),
    ],
)
def test_wrong_arguments(changes, message):
    with pytest.raises((ValueError, TypeError), match=f"^mine: {message}"):
        nf.mine(**{"embeddings": torch.eye(4)[:, :2], "labels": torch.arange(4) // 2, **changes})


def test_one_class_has_no_negatives():
    found = nf.mine(torch.eye(3), torch.zeros(3).long(), k=2)
    assert found.places.tolist() == [[-1, -1]] * 3
    assert found.positive.tolist() == [0.0] * 3
    assert nf.mine(torch.eye(1), torch.zeros(1).long()).positive.isnan().all()


def equal(a, b):
    return all(
        torch.equal(getattr(a, name).nan_to_num(), getattr(b, name).nan_to_num())
        for name in ("places", "scores", "positive")
    )


def given(n=100):
    x, y = points(n, 0)
    return x.float(), y


KILLED = """
import os, sys
from nearfar.evaluation import _mine, mine
from tests.evaluation.test_mine import given
_mine.CHUNK = 16
honest, calls = _mine._split, []
def deadly(*args):
    calls.append(1)
    if len(calls) > int(sys.argv[1]):
        os.kill(os.getpid(), 9)
    return honest(*args)
_mine._split = deadly
mine(*given(), margin=0.1, folder=sys.argv[2])
"""


@pytest.mark.parametrize("after", [0, 3])
def test_mining_that_was_killed_goes_on_and_ends_equal(tmp_path, monkeypatch, after):
    here = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    died = ran(KILLED, str(after), str(tmp_path / "m"), env=here, cwd=tmp_path)
    assert died.returncode == -9, died.stderr
    with pytest.raises(ValueError, match="is not finished; run the command that was interrupted again"):
        Mined.load(tmp_path / "m")
    monkeypatch.setattr(_mine, "CHUNK", 16)
    honest, calls = _mine._split, []
    monkeypatch.setattr(_mine, "_split", lambda *args: (calls.append(1), honest(*args))[1])
    found = nf.mine(*given(), margin=0.1, folder=tmp_path / "m")
    assert len(calls) == 7 - after
    nf.mine(*given(), margin=0.1, folder=tmp_path / "whole")
    assert contents(tmp_path / "m") == contents(tmp_path / "whole")
    assert equal(found, Mined.load(tmp_path / "m"))
    assert equal(found, nf.mine(*given(), margin=0.1))


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_only_chunks_that_changed_are_mined_again(tmp_path, monkeypatch):
    """A damaged file, changed queries; other references and other settings are refused."""
    monkeypatch.setattr(_mine, "CHUNK", 16)
    (x, y), (g, z) = given(), points(40, 1)
    rest = {"ref_emb": g, "ref_labels": z, "folder": tmp_path / "m"}
    nf.mine(x, y, **rest)
    before = contents(tmp_path / "m")
    honest, calls = _mine._split, []
    monkeypatch.setattr(_mine, "_split", lambda *args: (calls.append(1), honest(*args))[1])
    nf.mine(x, y, **rest)
    assert calls == []
    path = tmp_path / "m" / "chunk-000002.npz"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    nf.mine(x, y, **rest)
    assert len(calls) == 1
    assert contents(tmp_path / "m") == before
    x[50] += 1
    found = nf.mine(x, y, **rest)
    assert len(calls) == 2
    assert equal(found, nf.mine(x, y, ref_emb=g, ref_labels=z))
    for changes in ({"k": 3}, {"margin": 0.1}, {"ref_emb": g + 1}, {"ref_labels": z + 1}):
        with pytest.raises(ValueError, match=r"^mine: the folder .* holds chunks of .* name another folder"):
            nf.mine(x, y, **rest | changes)


@pytest.mark.parametrize("damage", [b"", b"[]", b"{", b"{}"])
def test_a_damaged_plan(tmp_path, damage):
    nf.mine(*given(), folder=tmp_path / "m")
    (tmp_path / "m" / "plan.json").write_bytes(damage)
    with pytest.raises(ValueError, match=r"plan\.json is damaged; make the folder again"):
        Mined.load(tmp_path / "m")
    with pytest.raises(ValueError, match=r"^mine: the folder .* holds chunks of"):
        nf.mine(*given(), folder=tmp_path / "m")


@pytest.mark.parametrize("room", [0, 300, 1500])
def test_a_full_disk(tmp_path, monkeypatch, room):
    monkeypatch.setattr(_mine, "CHUNK", 16)
    with full_disk(room), pytest.raises(OSError, match="File too large"):
        nf.mine(*given(), folder=tmp_path / "m")
    found = nf.mine(*given(), folder=tmp_path / "m")
    assert equal(found, nf.mine(*given()))
    assert not list((tmp_path / "m").glob(".*"))
