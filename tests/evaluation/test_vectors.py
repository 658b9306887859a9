"""`Vectors` and their file: round trips, refusals and their messages, atomic writes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nearfar._utils.files import atomic_write, write_arrays
from nearfar.evaluation import Vectors


def full():
    images = torch.arange(2 * 3 * 3).reshape(2, 3, 3).to(torch.uint8)
    return Vectors(torch.eye(2, 4), torch.tensor([7, -1]), ("Ω/1.png", "b"), images)


def test_round_trip(tmp_path):
    before = full()
    path = before.save(tmp_path / "deep" / "vectors.npz")
    after = Vectors.load(path)
    assert torch.equal(after.x, before.x)
    assert torch.equal(after.y, before.y)
    assert torch.equal(after.images, before.images)
    assert after.name == before.name
    assert (after.x.dtype, after.y.dtype, after.images.dtype) == (torch.float32, torch.int64, torch.uint8)
    assert [p.name for p in path.parent.iterdir()] == ["vectors.npz"]


def test_only_x_is_needed(tmp_path):
    path = Vectors(np.ones((3, 2))).save(tmp_path / "v.npz")
    found = Vectors.load(str(path))
    assert (found.y, found.name, found.images) == (None, None, None)
    assert repr(found) == "Vectors(3 vectors of width 2)"
    assert repr(full()) == "Vectors(2 vectors of width 4, with y, name, images)"


def test_equal_vectors_give_equal_bytes(tmp_path):
    a, b = full().save(tmp_path / "a.npz"), full().save(tmp_path / "b.npz")
    assert a.read_bytes() == b.read_bytes()


def test_a_run_folder_is_read_through_its_embeddings(tmp_path):
    full().save(tmp_path / "embeddings.npz")
    assert len(Vectors.load(tmp_path)) == 2


@pytest.mark.parametrize("kind", ["f2", "f4", "f8", "i4", "u2"])
def test_other_numbers_become_float32(tmp_path, kind):
    write_arrays(tmp_path / "v.npz", {"x": np.ones((2, 3), kind), "y": np.array([0, 1], "u2")})
    found = Vectors.load(tmp_path / "v.npz")
    assert found.x.dtype == torch.float32
    assert found.y.dtype == torch.int64


def test_names_of_bytes_are_read(tmp_path):
    write_arrays(tmp_path / "v.npz", {"x": np.ones((2, 3)), "name": np.array([b"a", b"bc"])})
    assert Vectors.load(tmp_path / "v.npz").name == ("a", "bc")


def npz(path, **arrays):
    np.savez(path, **arrays)


def broken(path, kind):
    """A file that cannot be read, and the words that must come."""
    x, good = np.ones((3, 2), "f4"), full()
    if kind == "missing":
        return "there is no file"
    if kind == "text":
        path.write_text("x, y\n1, 2\n", encoding="utf-8")
        return "is not an .npz file"
    if kind == "empty":
        path.write_bytes(b"")
        return "is not an .npz file"
    if kind == "npy":
        with path.open("wb") as stream:
            np.save(stream, x)
        return "is not an .npz file"
    if kind == "cut short":
        good.save(path)
        path.write_bytes(path.read_bytes()[:-30])
        return "cut short"
    if kind == "flipped":
        good.save(path)
        content = bytearray(path.read_bytes())
        content[content.index(np.eye(2, 4, dtype="f4").tobytes()) + 1] ^= 255
        path.write_bytes(bytes(content))
        return "damaged"
    arrays, words = {
        "no x": ({"vectors": x, "y": np.arange(3)}, "must hold the key x, the vectors [n, d], but holds vectors, y"),
        "three axes": ({"x": x[:, None]}, "must have shape [n, d], but came with shape [3, 1, 2]"),
        "one axis": ({"x": x[0]}, "must have shape [n, d]"),
        "nan": ({"x": np.array([[0.0], [np.nan], [np.inf]])}, "2 of 3 rows hold NaN or infinity (rows 1, 2)"),
        "short y": ({"x": x, "y": np.arange(2)}, "y must have one entry per row of x, but 2 came for 3 rows"),
        "short name": ({"x": x, "name": np.array(["a"])}, "name must have one entry per row of x, but 1 came for 3"),
        "float y": ({"x": x, "y": np.array([0.0, 1, 2])}, "y must be integers"),
        "wide y": ({"x": x, "y": np.ones((3, 2), int)}, "y must be integers of shape [n]"),
        "words as y": ({"x": x, "y": np.array(["a", "b", "c"])}, "number the classes"),
        "wide name": ({"x": x, "name": np.array([["a"]] * 3)}, "name must have shape [n]"),
        "float images": ({"x": x, "images": np.ones((3, 2, 2))}, "images must be uint8"),
        "deep images": ({"x": x, "images": np.ones((3, 2, 2, 4), "u1")}, "images must be uint8"),
        "pickled": ({"x": x, "name": np.array([{"a": 1}, 2, 3], dtype=object)}, "'name' in"),
        "complex": ({"x": x * 1j}, "real numbers"),
    }[kind]
    npz(path, **arrays)
    return words


BROKEN = [
    "missing",
    "text",
    "empty",
    "npy",
    "cut short",
    "flipped",
    "no x",
    "three axes",
    "one axis",
    "nan",
    "short y",
    "short name",
    "float y",
    "wide y",
    "words as y",
    "wide name",
    "float images",
    "deep images",
    "pickled",
    "complex",
]


@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_refused(tmp_path, kind):
    path = tmp_path / "v.npz"
    words = broken(path, kind)
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        Vectors.load(path)
    assert words in str(error.value)
    assert "v.npz" in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_pickles_are_never_loaded(tmp_path):
    """An object array whose unpickling would leave a mark."""

    class Mark:
        def __reduce__(self):
            return (open, (str(tmp_path / "mark"), "w"))

    np.savez(tmp_path / "v.npz", x=np.ones((1, 2)), name=np.array([Mark()], dtype=object))
    with pytest.raises(ValueError, match="never loaded"):
        Vectors.load(tmp_path / "v.npz")
    assert not (tmp_path / "mark").exists()


def test_a_folder_without_embeddings_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no embeddings\.npz"):
        Vectors.load(tmp_path)


def test_a_failed_write_leaves_the_former_file(tmp_path):
    path = full().save(tmp_path / "v.npz")
    before = path.read_bytes()

    def fail():
        with atomic_write(path) as temporary:
            temporary.write_bytes(b"half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["v.npz"]


def test_many_bad_rows_are_counted_and_the_first_named():
    x = torch.zeros(30, 2)
    x[10:] = torch.nan
    with pytest.raises(ValueError, match=r"20 of 30 rows .*rows 10, 11, 12, 13, 14, 15, 16, 17, \.\.\."):
        Vectors(x)
