"""`Index`: exact by default, faiss on request, a single checked file, measured recall."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from needs import need

from nearfar._utils.files import read_arrays, write_arrays
from nearfar.evaluation import Index, Vectors, neighbors

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def faiss():
    module = need("faiss")
    module.omp_set_num_threads(1)
    return module


def rows(n=600, width=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, width, generator=generator)


@pytest.mark.parametrize("similarity", ["cosine", "dot", "euclidean"])
def test_exact_is_our_search(similarity):
    x, q = rows(), rows(20, seed=1)
    found = Index(x, similarity).search(q, 7)
    wanted = neighbors(q, x, k=7, similarity=similarity)
    assert torch.equal(found.places, wanted.places)
    assert torch.equal(found.scores, wanted.scores)
    assert Index(x, similarity).measured_recall(q, 7) == 1.0


def test_names_are_carried_along(tmp_path):
    x = Vectors(torch.eye(3), y=[5, 6, 7], name=["a", "b", "ç"])
    index = Index.load(Index(x).save(tmp_path / "i.npz"))
    assert index.names(index.search(torch.eye(3)[[2, 0]], 1)) == [["ç"], ["a"]]
    assert index.vectors.y.tolist() == [5, 6, 7]
    bare = Index(torch.eye(3))
    assert bare.names(bare.search(torch.eye(3)[[2]], 1)) == [["2"]]


def test_queries_may_be_vectors():
    assert Index(torch.eye(3)).search(Vectors(torch.eye(3)), 1).places.flatten().tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
@pytest.mark.parametrize("similarity", ["cosine", "euclidean"])
def test_approximate_kinds(faiss, tmp_path, kind, similarity):
    x, q = rows(2000), rows(100, seed=1)
    index = Index(x, similarity, kind)
    found, exact = index.search(q, 5), neighbors(q, x, k=5, similarity=similarity)
    hits = np.mean(
        [len(set(a) & set(b)) / 5 for a, b in zip(found.places.tolist(), exact.places.tolist(), strict=True)]
    )
    assert index.measured_recall(q, 5) == pytest.approx(hits)
    assert 0.3 < hits <= 1
    right = found.places[:, 0] == exact.places[:, 0]
    torch.testing.assert_close(found.scores[right, 0], exact.scores[right, 0], atol=1e-5, rtol=1e-4)
    again = Index.load(index.save(tmp_path / "i.npz"))
    assert (again.kind, again.similarity) == (kind, similarity)
    assert torch.equal(again.search(q, 5).places, found.places)
    assert again.measured_recall(q, 5) == pytest.approx(hits)


def test_more_probes_find_more_and_all_cells_find_everything(faiss):
    x, q = rows(2000), rows(100, seed=1)
    few, more, every = (Index(x, kind="ivf", cells=40, probes=probes).measured_recall(q, 5) for probes in (1, 10, 40))
    assert few < more < every == 1.0


def test_what_ivf_does_not_find_is_marked(faiss):
    x = torch.cat([torch.eye(4)[[0]] + 0.01 * rows(50, 4), torch.eye(4)[[1]] + 0.01 * rows(50, 4)])
    found = Index(x, "euclidean", "ivf", cells=2, probes=1).search(torch.eye(4)[:1], 80)
    assert (found.places[0, -1], found.scores[0, -1]) == (-1, -torch.inf)
    assert Index(x).names(found)[0][-1] == "-"


def test_few_rows_make_an_index_too(faiss, capfd):
    assert Index(rows(5), kind="ivf").measured_recall(rows(5), 1) == 1.0
    assert Index(rows(5), kind="hnsw").measured_recall(rows(5), 1) == 1.0
    assert "WARNING" not in "".join(capfd.readouterr())


def test_without_faiss_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "faiss", None)
    for kind in ("ivf", "hnsw"):
        with pytest.raises(ImportError, match=r'pip install "nearfar\[faiss\]", or choose kind="exact"'):
            Index(rows(), kind=kind)
    Index.load(Index(rows()).save(tmp_path / "i.npz")).search(rows(2), 3)


def test_a_truncated_file_is_refused(tmp_path):
    path = Index(rows()).save(tmp_path / "i.npz")
    content = path.read_bytes()
    for size in (0, 10, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match=r"cut short|damaged") as error:
            Index.load(path)
        assert len(str(error.value).splitlines()) == 1


def test_an_altered_file_is_refused(tmp_path):
    path = Index(Vectors(rows(), name=[f"n{i}" for i in range(600)])).save(tmp_path / "i.npz")
    with np.load(path) as archive:
        arrays = dict(archive)
    arrays["x"][3, 3] += 1
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match="no intact seal"):
        Index.load(path)


def altered(path, **changes):
    """The index with other parts, sealed anew; a part that is None is left out."""
    arrays = read_arrays("test", path)
    arrays |= changes
    write_arrays(path, {key: np.asarray(value) for key, value in arrays.items() if value is not None})


def refused(path):
    with pytest.raises(ValueError, match="Index: ") as error:
        Index.load(path)
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


@pytest.mark.parametrize(
    "about",
    [
        "",
        "{",
        "[]",
        "null",
        "3",
        "{}",
        '{"similarity": "cosine"}',
        '{"similarity": "cosine", "kind": "flat"}',
        '{"similarity": 3, "kind": "exact"}',
        '{"similarity": ["cosine"], "kind": "exact"}',
        '{"similarity": "cosine", "kind": {"a": 1}}',
        '{"similarity": "cosine", "kind": "ivf"}',
        "[" * 100_000,
    ],
)
def test_a_wrong_description_is_one_sentence(tmp_path, about):
    path = Index(rows()).save(tmp_path / "i.npz")
    altered(path, about=about)
    assert "damaged or was made by hand" in refused(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": np.ones((0, 3), "f4")}, "of 0 vectors"),
        ({"x": np.ones(3)}, "must have shape [n, d]"),
        ({"name": np.array(["a"])}, "name must have one entry per row"),
        ({"faiss": np.zeros(9, "u1")}, "does not fit what it holds"),
        ({"fingerprint": "not one"}, "fingerprint must be hexadecimal"),
        ({"y": np.zeros(600)}, "y must be integers"),
    ],
)
def test_parts_that_do_not_fit_are_one_sentence(tmp_path, changes, words):
    path = Index(rows()).save(tmp_path / "i.npz")
    altered(path, **changes)
    with pytest.raises(ValueError) as error:
        Index.load(path)
    assert words in str(error.value)


def test_a_faiss_part_of_other_vectors_is_refused(faiss, tmp_path):
    """More rows, another width, another kind, another measure, no part at all, and bytes that are none."""
    path = tmp_path / "i.npz"
    small = rows(400)
    others = {
        "900 rows of width 12, measure 0, for 400 vectors of width 12": Index(rows(900), kind="ivf"),
        "400 rows of width 5, measure 0, for 400 vectors of width 12": Index(rows(400, 5), kind="ivf"),
        "IndexHNSWFlat": Index(small, kind="hnsw"),
        "IndexIVFFlat of 400 rows of width 12, measure 1": Index(small, "euclidean", "ivf"),
    }
    for words, other in others.items():
        Index(small, kind="ivf").save(path)
        altered(path, faiss=faiss.serialize_index(other._parts[0]))
        assert words in refused(path)
    for part, words in (
        (None, "does not fit"),
        (np.zeros(50, "u1"), "faiss cannot read its part"),
        (np.zeros(0, "u1"), "faiss cannot read its part"),
        (np.zeros((5, 2), "u1"), "uint8 of shape [5, 2]"),
        (np.zeros(5), "float64"),
    ):
        Index(small, kind="ivf").save(path)
        altered(path, faiss=part)
        assert words in refused(path)


@pytest.mark.parametrize("kind", ["exact", "ivf", "hnsw"])
def test_flipped_bits_over_the_whole_file_are_noticed(faiss, tmp_path, kind):
    path = Index(Vectors(rows(120, 6), name=[f"n{i}" for i in range(120)]), kind=kind).save(tmp_path / "i.npz")
    good = path.read_bytes()
    generator = np.random.default_rng(0)
    for at, bit in zip(generator.integers(len(good), size=150), generator.integers(8, size=150), strict=True):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :])
        with pytest.raises(ValueError):
            Index.load(path)
    path.write_bytes(good)
    Index.load(path)


def test_rows_that_are_not_there_are_not_found(faiss, tmp_path):
    """A faiss part that fits in every measure, and whose numbers of rows do not."""
    x = rows(120, 6)
    path = Index(x, "dot", "ivf").save(tmp_path / "i.npz")
    other = faiss.IndexIVFFlat(faiss.IndexFlatIP(6), 6, 3, faiss.METRIC_INNER_PRODUCT)
    other.train(x.numpy())
    other.add_with_ids(x.numpy(), np.arange(1000, 1120))
    altered(path, faiss=faiss.serialize_index(other))
    with pytest.raises(ValueError, match=r"found row 1\d+ of 120; make the index again"):
        Index.load(path).search(x, 5)


def test_the_network_is_remembered_and_another_refused(tmp_path):
    index = Index(Vectors(torch.eye(3), fingerprint="aa/bb", classes=["a", "b"], y=[0, 1, 1]))
    index = Index.load(index.save(tmp_path / "i.npz"))
    assert index.vectors.class_names() == {0: "a", 1: "b"}
    for good in (None, "aa", "aa/bb"):
        index.search(Vectors(torch.eye(3), fingerprint=good), 1)
    index.search(torch.eye(3), 1)
    for bad, what in (("ab/bb", "weights"), ("ab", "weights"), ("aa/bc", "preprocessing")):
        with pytest.raises(ValueError, match=f"networks with different {what}"):
            index.search(Vectors(torch.eye(3), fingerprint=bad), 1)


def test_other_files_are_refused(tmp_path):
    Vectors(rows()).save(tmp_path / "v.npz")
    with pytest.raises(ValueError, match="is not an index"):
        Index.load(tmp_path / "v.npz")
    with pytest.raises(FileNotFoundError, match="there is no file"):
        Index.load(tmp_path / "none.npz")


def test_saving_leaves_nothing_else_behind(tmp_path):
    Index(rows()).save(tmp_path / "i.npz")
    assert [p.name for p in tmp_path.iterdir()] == ["i.npz"]


def test_repr():
    assert repr(Index(rows())) == "Index(600 vectors of width 12, cosine, exact)"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Index(rows(), "cosin"), "did you mean 'cosine'"),
        (lambda: Index(rows(), kind="ivff"), "did you mean 'ivf'"),
        (lambda: Index(rows(), "dot", "hnsw"), "cosine"),
        (lambda: Index(torch.zeros(0, 3)), "at least one row"),
        (lambda: Index(rows()).search(rows(2, 5), 1), "12 wide"),
        (lambda: Index(rows()).search(rows(2), 601), "1..600"),
        (lambda: Index(rows()).search(rows(2), 0), "1..600"),
        (lambda: Index(torch.tensor([[torch.nan]])), "rows 0"),
    ],
)
def test_errors(call, words):
    with pytest.raises(ValueError) as error:
        call()
    assert words in str(error.value)


def test_one_search_may_take_another_effort(faiss):
    x, q = rows(2000), rows(100, seed=1)
    index, exact = Index(x, kind="ivf", cells=40, probes=1), Index(x).search(q, 5).places
    assert not torch.equal(index.search(q, 5).places, exact)
    assert torch.equal(index.search(q, 5, effort=40).places, exact)
    assert index.effort == 1
