"""`build_index` and `DiskIndex`: memory-mapped files, resumed to equal bytes after a kill, checked for damage."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from importlib import import_module

import numpy as np
import pytest
import torch
from disks import full_disk
from forks import ran
from needs import need

from nearfar.evaluation import DiskIndex, Index, Vectors, build_index, neighbors, open_index
from nearfar.evaluation import _disk_build as disk_build

torch.set_num_threads(1)
KINDS = ("exact", "int8", "bits", "ivf", "ivfpq", "hnsw")
CODED = ("int8", "bits", "ivfpq")


@pytest.fixture(autouse=True)
def faiss():
    module = need("faiss")
    module.omp_set_num_threads(1)
    return module


def rows(n=900, width=8, seed=0):
    """Rows around twelve centers, so that cells and codes have something to find."""
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(12, width, generator=torch.Generator().manual_seed(7))
    return centers[torch.randint(12, (n,), generator=generator)] + 0.4 * torch.randn(n, width, generator=generator)


def vectors(n=900):
    return Vectors(
        rows(n),
        y=torch.arange(n) % 3 + 4,
        name=[f"ä-{row}" for row in range(n)],
        classes=["ant", "bee", "cat"],
        images=torch.arange(n).to(torch.uint8)[:, None, None].expand(n, 4, 4),
        fingerprint="aa/bb",
    )


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """One index of each kind, of the same vectors, in parts of 250 rows."""
    home = tmp_path_factory.mktemp("built")
    need("faiss")
    for kind in KINDS:
        build_index(home / kind, vectors(), kind=kind, chunk=250)
    return home


@pytest.mark.parametrize("kind", KINDS)
def test_it_finds_what_exact_search_finds(built, kind):
    index, q = open_index(built / kind), rows(60, seed=1)
    assert repr(index) == f"DiskIndex(900 vectors of width 8, cosine, {kind})"
    found, exact = index.search(q, 10), neighbors(q, rows(), k=10)
    pairs = zip(found.places.tolist(), exact.places.tolist(), strict=True)
    hits = np.mean([len(set(a) & set(b)) / 10 for a, b in pairs])
    assert hits == 1 if kind == "exact" else hits > 0.9
    right = found.places == exact.places
    # of codes the vectors themselves decide the scores, in float16
    torch.testing.assert_close(found.scores[right], exact.scores[right], atol=2e-3 if kind in CODED else 1e-5, rtol=0)
    assert (found.scores.diff(dim=1) <= 0).all()
    assert index.names(found)[0][0] == f"ä-{found.places[0, 0]}"
    assert index.label(0) == "ant"
    assert index.label(5) == "cat"
    assert index.thumbnails[7].max() == 7


@pytest.mark.parametrize("kind", KINDS[1:])
def test_the_recall_that_is_stored_is_what_is_found(built, kind):
    """Measured anew by a loop over the index's own rows, each without itself."""
    index, x = DiskIndex(built / kind), rows()
    chosen = np.sort(np.random.default_rng(1).permutation(900)[:500])
    exact = neighbors(x, k=10).places.tolist()
    found = index.search(x[chosen], 11).places.tolist()
    hits = [len({p for p in found[i] if p != row} & set(exact[row])) / 10 for i, row in enumerate(chosen.tolist())]
    # float16 and normalized rows may swap the last of two near-equal neighbors
    assert index.recall["recall"] == pytest.approx(np.mean(hits), abs=0.01)
    assert index.recall["recall"] >= (0.9 if kind == "bits" else 0.95)  # here a byte a row
    assert index.recall["queries"] == 500
    assert index.recall["curve"][-1] == [index.effort, index.recall["recall"]]
    assert all(recall < 0.95 for _, recall in index.recall["curve"][:-1])


def test_a_wanted_recall_decides_the_effort(tmp_path):
    few = build_index(tmp_path / "few", rows(), kind="ivf", cells=20, recall=0.2)
    all_ = build_index(tmp_path / "all", rows(), kind="ivf", cells=20, recall=1)
    assert few.effort == 1 < all_.effort
    assert few.recall["recall"] < all_.recall["recall"] == 1


@pytest.mark.parametrize("similarity", ["dot", "euclidean"])
@pytest.mark.parametrize("kind", ["exact", "ivfpq", "hnsw"])
def test_other_similarities(tmp_path, kind, similarity):
    if (kind, similarity) == ("hnsw", "dot"):
        pytest.skip("refused, see below")
    x, q = rows(400), rows(20, seed=1)
    index = build_index(tmp_path / "i", x, similarity, kind, chunk=150, cells=4)
    found, exact = index.search(q, 5), neighbors(q, x, k=5, similarity=similarity)
    right = found.places == exact.places
    assert right.float().mean() > 0.6
    torch.testing.assert_close(found.scores[right], exact.scores[right], atol=1e-4, rtol=1e-4)


def test_codes_alone_need_no_vectors(tmp_path):
    index = build_index(tmp_path / "i", rows(), rerank=0, code_bytes=4, recall=0.4)
    assert not (tmp_path / "i" / "vectors.npy").exists()
    assert index.search(rows(5, seed=1), 900).places.shape == (5, 900)
    few = index.search(rows(5, seed=1), 900, effort=1)
    assert (few.places[0, -1], few.scores[0, -1]) == (-1, -torch.inf)  # not in the one cell that was looked into
    assert index.names(few)[0][-1] == "-"


def by_codes(x, q, kind, effort, k):
    """The k best of the k·effort rows with the best codes, ranked by the rows in float16; a loop over queries."""
    x, q = (rows / rows.norm(dim=1, keepdim=True) for rows in (x, q))
    top = x.abs().amax(dim=1, keepdim=True)
    coded = (x / top * 127).round() if kind == "int8" else (x > 0) * 2.0 - 1
    coded = coded / coded.norm(dim=1, keepdim=True)
    found = []
    for query in q:
        listed = (coded @ query).sort(descending=True, stable=True).indices[: k * effort].sort().values
        exact = x[listed].half().float() @ query
        found.append(listed[exact.sort(descending=True, stable=True).indices[:k]].tolist())
    return found


@pytest.mark.parametrize("effort", [1, 4])
@pytest.mark.parametrize("kind", ["int8", "bits"])
def test_codes_choose_the_candidates_and_vectors_rank_them(tmp_path, monkeypatch, kind, effort):
    """Blocks of 64 rows; a width that is no multiple of eight, so that the last byte of a row is padded."""
    monkeypatch.setattr("nearfar.evaluation._codes.TILE", 11 * 32)
    x, q = rows(700, 11), rows(40, 11, seed=1)
    index = build_index(tmp_path / "i", x, kind=kind, chunk=250)
    assert index.search(q, 5, effort=effort).places.tolist() == by_codes(x, q, kind, effort, 5)
    stored = np.load(tmp_path / "i" / "codes.npy")
    assert stored.nbytes == 700 * (11 if kind == "int8" else 2)


@pytest.mark.parametrize("kind", ["int8", "bits"])
def test_all_candidates_are_exact_search(tmp_path, kind):
    """With k·effort rows or more, the answer is that of the vectors in float16."""
    x, q = rows(300), rows(20, seed=1)
    found = build_index(tmp_path / "i", x, kind=kind).search(q, 10, effort=30)
    unit = x / x.norm(dim=1, keepdim=True)
    exact = neighbors(q / q.norm(dim=1, keepdim=True), unit.half().float(), k=10, similarity="dot")
    assert torch.equal(found.places, exact.places)


def test_codes_alone(tmp_path):
    index = build_index(tmp_path / "i", rows(width=16), kind="bits", rerank=0)
    assert not (tmp_path / "i" / "vectors.npy").exists()
    assert index.effort == 1
    assert index.recall["recall"] < 0.95
    assert index.search(rows(5, 16, seed=1), 900).places.sort().values.tolist() == [list(range(900))] * 5
    with pytest.raises(ValueError, match="kind='bits' needs similarity='cosine': its codes hold directions alone"):
        build_index(tmp_path / "j", rows(), "euclidean", "bits")


def test_a_mapped_array_is_read_in_chunks_and_a_moved_folder_still_answers(tmp_path, built):
    np.save(tmp_path / "x.npy", rows().numpy())
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    build_index(tmp_path / "i", mapped, kind="ivfpq", chunk=250)
    shutil.move(tmp_path / "i", tmp_path / "j")
    q = rows(20, seed=1)
    assert torch.equal(DiskIndex(tmp_path / "j").search(q, 5).places, DiskIndex(built / "ivfpq").search(q, 5).places)


@pytest.mark.parametrize("name", ["cells", "code_bytes", "links", "chunk"])
def test_a_number_of_nothing_is_no_default(tmp_path, name):
    with pytest.raises(ValueError, match=f"^build_index: {name} must be a whole number"):
        build_index(tmp_path / "i", rows(40), kind="ivfpq", **{name: 0})


@pytest.mark.parametrize("n", [1, 2, 5, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_few_rows(tmp_path, capfd, n, kind):
    if (kind, n) == ("ivfpq", 1):
        with pytest.raises(ValueError, match="needs two rows or more"):
            build_index(tmp_path / "i", rows(n), kind=kind)
        return
    index = build_index(tmp_path / "i", rows(n), kind=kind, chunk=3)
    assert index.search(rows(n)[:1], 1).places.item() == 0
    assert "".join(capfd.readouterr()) == ""  # faiss has nothing to say either


KILLED = """
import os, sys
import faiss
from nearfar.evaluation import _disk_build as disk_build
faiss.omp_set_num_threads(1)
from tests.evaluation.test_disk_index import vectors
step, after, kind, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
home = disk_build if hasattr(disk_build, step) else disk_build.approximate
honest, calls = getattr(home, step), []
def deadly(*args, **how):
    calls.append(1)
    if len(calls) > after:
        os.kill(os.getpid(), 9)
    return honest(*args, **how)
setattr(home, step, deadly)
disk_build.build_index(folder, vectors(), kind=kind, chunk=250)
"""


@pytest.mark.parametrize(
    ("kind", "step", "after", "left"),
    [
        ("ivfpq", "train", 0, 4),
        ("ivfpq", "build_part", 2, 2),
        ("ivfpq", "join", 0, 0),
        ("ivfpq", "choose_effort", 0, 0),
        ("ivf", "build_part", 3, 1),
        ("hnsw", "build_part", 1, 3),
        ("bits", "encode", 2, 0),
        ("int8", "choose_effort", 0, 0),
    ],
)
def test_a_build_that_was_killed_goes_on_and_ends_equal(built, tmp_path, monkeypatch, kind, step, after, left):
    folder = tmp_path / "i"
    here = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    died = ran(KILLED, step, str(after), kind, str(folder), env=here, cwd=tmp_path)
    assert died.returncode == -9, died.stderr
    with pytest.raises(ValueError, match="holds no finished index"):
        open_index(folder)
    honest, calls = disk_build.approximate.build_part, []
    monkeypatch.setattr(disk_build.approximate, "build_part", lambda *args: (calls.append(1), honest(*args)))
    build_index(folder, vectors(), kind=kind, chunk=250)
    assert len(calls) == left
    assert contents(folder) == contents(built / kind)


def test_parts_that_no_longer_fit_are_made_again(built, tmp_path, monkeypatch):
    """A damaged part, changed vectors, rows that were not written out; and then nothing is left to do."""
    folder, honest, calls = tmp_path / "i", disk_build.approximate.build_part, []

    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(disk_build.approximate, "join", stop)
    changed = vectors()
    changed.x[260] += 1
    with pytest.raises(KeyboardInterrupt):
        build_index(folder, changed, chunk=250)
    monkeypatch.undo()
    part = folder / "parts" / "part-00003.faiss"
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    monkeypatch.setattr(disk_build.approximate, "build_part", lambda *args: (calls.append(args[3]), honest(*args)))
    build_index(folder, vectors(), chunk=250)
    assert calls == [0, 250, 500, 750]  # row 260 was in the training sample
    assert contents(folder) == contents(built / "ivfpq")
    build_index(folder, vectors(), chunk=250)
    assert len(calls) == 4


def test_a_damaged_part_alone_is_made_again(built, tmp_path, monkeypatch):
    folder, calls = tmp_path / "i", []
    monkeypatch.setattr(disk_build.approximate, "join", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        build_index(folder, vectors(), chunk=250)
    monkeypatch.undo()
    part = folder / "parts" / "part-00003.faiss"
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    stored = np.load(folder / "vectors.npy", mmap_mode="r+")
    stored[10] = 0
    stored.flush()
    honest = disk_build.approximate.build_part
    monkeypatch.setattr(disk_build.approximate, "build_part", lambda *args: (calls.append(args[3]), honest(*args)))
    build_index(folder, vectors(), chunk=250)
    assert calls == [0, 750]
    assert contents(folder) == contents(built / "ivfpq")


def test_lists_of_former_parts_are_not_kept(built, tmp_path, monkeypatch):
    """Joined, then given other vectors and stopped before they are joined, then with nothing left but to join."""

    def stop(*args):
        raise KeyboardInterrupt

    changed = vectors()
    changed.x[260] += 1
    for home, step, given in ((disk_build, "choose_effort", changed), (disk_build.approximate, "join", vectors())):
        monkeypatch.setattr(home, step, stop)
        with pytest.raises(KeyboardInterrupt):
            build_index(tmp_path / "i", given, chunk=250)
        monkeypatch.undo()
    build_index(tmp_path / "i", vectors(), chunk=250)
    assert contents(tmp_path / "i") == contents(built / "ivfpq")


def test_other_vectors_or_settings_are_refused(built, tmp_path):
    for changes in ({"chunk": 100}, {"seed": 1}, {"recall": 0.5}, {"similarity": "euclidean"}):
        with pytest.raises(ValueError, match="holds an index of other vectors or settings"):
            build_index(built / "exact", vectors(), **{"kind": "exact", "chunk": 250, **changes})
    other = vectors()
    other.x[3, 3] += 1
    for given in (other, rows()):
        with pytest.raises(ValueError, match="holds an index of other vectors or settings"):
            build_index(built / "exact", given, kind="exact", chunk=250)
    (tmp_path / "i").mkdir()
    (tmp_path / "i" / "letter.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(FileExistsError, match="not an empty folder"):
        build_index(tmp_path / "i", rows(), kind="exact")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(FileExistsError, match="not an empty folder"):
        build_index(tmp_path / "loop", rows(), kind="exact")


def test_a_build_can_begin_again_after_the_disk_was_full_as_it_began(tmp_path):
    with full_disk(100), pytest.raises(OSError, match="large"):
        build_index(tmp_path / "i", rows(20), kind="exact")
    (tmp_path / "i" / ".plan.json.7-01234567.part").write_text("half", encoding="utf-8")  # killed while writing
    assert len(build_index(tmp_path / "i", rows(20), kind="exact")) == 20
    assert not (tmp_path / "i" / ".plan.json.7-01234567.part").exists()


def test_two_builders_at_once(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    (tmp_path / "i").mkdir()
    with (tmp_path / "i" / ".lock").open("w", encoding="utf-8") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        disk_build.disk.write_record(tmp_path / "i" / "plan.json", {})
        with pytest.raises(ValueError, match="unfinished index of other vectors"):
            build_index(tmp_path / "i", rows(20), kind="exact")
        (tmp_path / "i" / "plan.json").unlink()
        (tmp_path / "i" / ".lock").rename(tmp_path / "lock")
        monkeypatch.setattr(disk_build, "LOCK", "../lock")
        with pytest.raises(ValueError, match="another process is building"):
            build_index(tmp_path / "i", rows(20), kind="exact")


def test_a_vector_of_another_network_is_refused(built):
    index = DiskIndex(built / "ivfpq")
    for good in (None, "aa", "aa/bb"):
        index.search(Vectors(rows(3), fingerprint=good), 1)
    for bad, what in (("ab/bb", "weights"), ("aa/bc", "preprocessing")):
        with pytest.raises(ValueError, match=f"networks with different {what}") as error:
            index.search(Vectors(rows(3), fingerprint=bad), 1)
        assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("kind", ["ivfpq", "hnsw", "bits"])
def test_damage_is_noticed(built, tmp_path, kind):
    """A flipped bit in every file, a file that is cut or gone, a record that lies."""
    folder = tmp_path / "i"
    generator = np.random.default_rng(0)
    files = contents(built / kind)
    assert files.pop(disk_build.LOCK, b"") == b""  # it stays, and holds nothing
    for name, good in files.items():
        shutil.copytree(built / kind, folder)
        at = int(generator.integers(len(good)))
        flipped = good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :]
        for bad in (flipped, good[:-1], b"") if name != "about.json" else (good[:-9], b"", b"[]", b"{}", b"[" * 99999):
            (folder / name).write_bytes(bad)
            with pytest.raises(ValueError, match=r"is damaged \(|holds no finished index") as error:
                DiskIndex(folder)
            assert len(str(error.value).splitlines()) == 1
        (folder / name).unlink()
        with pytest.raises(ValueError, match=r"is damaged \(|holds no finished index"):
            DiskIndex(folder)
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"plan": {}}, "not an index record"),
        ({"plan": 3}, "not an index record"),
        ({"files": {"../secret.txt": {"bytes": 1, "digest": ""}}}, "lists a file '../secret.txt'"),
        ({"fingerprint": "not one"}, "must be hexadecimal"),
        ({"effort": "many"}, "is damaged"),
        ({"files": {}}, "faiss cannot read|do not fit"),
    ],
)
def test_a_record_that_lies(built, tmp_path, changes, words):
    shutil.copytree(built / "ivfpq", tmp_path / "i")
    path = tmp_path / "i" / "about.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")
    with pytest.raises(ValueError, match=words) as error:
        DiskIndex(tmp_path / "i")
    assert len(str(error.value).splitlines()) == 1


def test_parts_of_another_index_are_refused(built, tmp_path):
    shutil.copytree(built / "ivfpq", tmp_path / "i")
    path = tmp_path / "i" / "about.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    for key, value in (("width", 9), ("kind", "ivf"), ("similarity", "euclidean"), ("rows", 800)):
        path.write_text(json.dumps(record | {"plan": record["plan"] | {key: value}}), encoding="utf-8")
        with pytest.raises(ValueError, match=r"is damaged \("):
            DiskIndex(tmp_path / "i")


def test_large_files_are_verified_where_asked(built, tmp_path, monkeypatch):
    shutil.copytree(built / "ivfpq", tmp_path / "i")
    path = tmp_path / "i" / "vectors.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    monkeypatch.setattr("nearfar.evaluation._disk_index.SMALL", 1)
    DiskIndex(tmp_path / "i")
    with pytest.raises(ValueError, match=r"vectors\.npy has changed since it was written"):
        DiskIndex(tmp_path / "i", verify=True)


def test_the_network_lies_in_the_index(tmp_path):
    (tmp_path / "n.onnx").write_bytes(b"weights")
    index = build_index(
        tmp_path / "i", rows(20), kind="exact", network=tmp_path / "n.onnx", preprocessing={"name": "plain"}
    )
    assert index.network.read_bytes() == b"weights"
    assert index.preprocessing == {"name": "plain"}
    assert DiskIndex(build_index(tmp_path / "j", rows(20), kind="exact").folder).network is None


def test_one_file_is_opened_too(tmp_path):
    assert isinstance(open_index(Index(rows(20)).save(tmp_path / "i.npz")), Index)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        open_index(tmp_path / "none")


def test_without_faiss_one_sentence(built, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ImportError, match=r'pip install "nearfar\[faiss\]", or choose kind="exact"'):
        build_index(tmp_path / "i", rows(20))
    with pytest.raises(ImportError, match=r'pip install "nearfar\[faiss\]"'):
        DiskIndex(built / "ivf")
    build_index(tmp_path / "i", rows(20), kind="exact").search(rows(2), 3)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"kind": "ivfpqq"}, "did you mean 'ivfpq'"),
        ({"similarity": "cosin"}, "did you mean 'cosine'"),
        ({"kind": "hnsw", "similarity": "dot"}, "compares distances"),
        ({"code_bytes": 3}, "must divide the width 8"),
        ({"rerank": -1}, "rerank"),
        ({"recall": 1.5}, "recall must lie in"),
        ({"chunk": 0.5}, "chunk must be a whole number"),
        ({"threads": 0}, "threads must be a whole number"),
        ({"vectors": torch.zeros(0, 3)}, "a row or more"),
        ({"vectors": torch.zeros(3)}, "must be [m, d]"),
        ({"vectors": torch.tensor([[1.0], [torch.nan]]), "kind": "exact"}, "row 1 holds NaN"),
    ],
)
def test_errors(tmp_path, how, words):
    how = {"vectors": rows(20), **how}
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        build_index(tmp_path / "i", **how)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(("k", "wide"), [(0, 8), (901, 8), (1, 7), (True and 1.5, 8)])
def test_wrong_questions(built, k, wide):
    with pytest.raises(ValueError, match=r"1\.\.900|8 wide"):
        DiskIndex(built / "exact").search(rows(2, wide), k)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_beside_another_search_of_faiss(tmp_path, kind):
    """faiss.contrib.torch_utils, which pytorch-metric-learning imports, replaces the methods of every index."""
    import_module("faiss.contrib.torch_utils")
    index = build_index(tmp_path / "i", rows(300), kind=kind, chunk=150, cells=None if kind == "hnsw" else 4)
    assert index.search(rows(300)[:5], 1).places.flatten().tolist() == [0, 1, 2, 3, 4]
