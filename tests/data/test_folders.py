"""User data: folders, manifests and vectors, and every error in them."""

import numpy as np
import pytest
from PIL import Image

from nearfar.data import CorruptImageError, open_data


def image(path, color=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (color, 0, 0)).save(path)
    return path


# ------------------------------------------------------------------------------------------- folders


def test_folders_with_train_and_test(tmp_path):
    for side, names in (("train", ("ant", "bee")), ("test", ("cat", "dog", "emu"))):
        for name in names:
            for i in range(2):
                image(tmp_path / side / name / f"{i}.PNG", i)
    (tmp_path / "train" / "ant" / "notes.txt").write_text("no image", encoding="utf-8")
    (tmp_path / "train" / ".hidden").mkdir()
    data = open_data("folder", tmp_path)
    assert data.name == tmp_path.name
    assert data.train.classes == ("ant", "bee")
    assert data.test.classes == ("cat", "dog", "emu")
    assert data.train.labels.tolist() == [0, 0, 1, 1]
    assert list(data.train.names) == ["ant/0.PNG", "ant/1.PNG", "bee/0.PNG", "bee/1.PNG"]
    assert data.test[5].getpixel((0, 0)) == (1, 0, 0)
    assert data.gallery is None


def test_folders_without_split_are_halved_by_class(tmp_path):
    for name in "abcdef":
        image(tmp_path / name / "0.jpg")
    data, again = open_data("folder", tmp_path), open_data("folder", str(tmp_path))
    assert sorted(data.train.classes + data.test.classes) == list("abcdef")
    assert len(data.train.classes) == 3
    assert data.test.classes == again.test.classes


def test_wrong_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        open_data("folder", tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds no class folders"):
        open_data("folder", tmp_path)
    image(tmp_path / "train" / "a" / "0.png")
    with pytest.raises(ValueError, match="holds only train/"):
        open_data("folder", tmp_path)
    (tmp_path / "test" / "b").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"class folders of .*test hold no images"):
        open_data("folder", tmp_path)


def test_an_empty_class_folder_is_a_warning(tmp_path):
    for name in "bdf":
        image(tmp_path / name / "0.png")
    for name in ("a", "c\x1b[2J", "e"):
        (tmp_path / name).mkdir()
    (tmp_path / "e" / "notes.txt").write_text("no image", encoding="utf-8")
    with pytest.warns(UserWarning, match=r"3 of 6 class folders of .* are left out: a, c\\x1b\[2J, e\.") as told:
        data = open_data("folder", tmp_path)
    assert len(told) == 1
    assert sorted(data.train.classes + data.test.classes) == ["b", "d", "f"]
    assert sorted(np.concatenate([data.train.labels, data.test.labels]).tolist()) in ([0, 0, 1], [0, 1, 0])


def test_one_class_cannot_be_halved(tmp_path):
    image(tmp_path / "a" / "0.png")
    with pytest.raises(ValueError, match="needs two classes or more"):
        open_data("folder", tmp_path)


def test_what_to_do_about_corrupt_images_is_handed_on(tmp_path):
    for side in ("train", "test"):
        image(tmp_path / side / "a" / "0.png", 7)
        (tmp_path / side / "a" / "1.png").write_bytes(b"")
    with pytest.raises(CorruptImageError, match=r"train/a/1\.png"):
        open_data("folder", tmp_path).train[1]
    with pytest.warns(UserWarning, match="stands in"):
        assert open_data("folder", tmp_path, on_corrupt="skip").test[1].getpixel((0, 0)) == (7, 0, 0)
    with pytest.raises(ValueError, match="on_corrupt must be one of"):
        open_data("folder", tmp_path, on_corrupt="drop")


# ----------------------------------------------------------------------------------------- manifests


def manifest(folder, text, images=("a.png", "b.png", "in/c.png")):
    for name in images:
        image(folder / name)
    path = folder / "list.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_manifest_with_split(tmp_path):
    data = open_data(
        "manifest", manifest(tmp_path, "label,path,split\nx,a.png,train\ny,b.png,test\nx,in/c.png,train\n")
    )
    assert data.name == "list"
    assert list(data.train.names) == ["a.png", "in/c.png"]
    assert data.train.classes == ("x",)
    assert data.test.classes == ("y",)
    assert data.train[1].size == (8, 8)


def test_manifest_without_split_is_halved_by_class(tmp_path):
    data = open_data("manifest", manifest(tmp_path, "path,label\na.png,1\nb.png,2\nin/c.png,2\n"))
    assert {data.train.classes, data.test.classes} == {("1",), ("2",)}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "but has none"),
        ("path,class\na.png,1\n", "but has path, class"),
        ("path,label,weight\na.png,1,2\n", "but has path, label, weight"),
        ("path,label\n", "holds no rows"),
        ("path,label\na.png,1\nb.png,\n", "row 3 of .* must fill path, label, but holds b.png"),
        ("path,label\na.png,1,9\n", "row 2 of .* must fill path, label"),
        ("path,label\na.png,1\nb.png,1\na.png,2\n", r"a\.png stands in rows 2 and 4"),
        ("path,label,split\na.png,1,train\nb.png,2,valid\n", "must be train or test, but row 3 has 'valid'"),
        ("path,label,split\na.png,1,train\nb.png,2,train\n", "is for test"),
    ],
)
def test_wrong_manifests(tmp_path, text, told):
    with pytest.raises(ValueError, match=told):
        open_data("manifest", manifest(tmp_path, text))


@pytest.mark.parametrize("name", ["../secret/s.png", "SECRET", "link.png", "linked/s.png", "in/../../secret/s.png"])
def test_manifests_lead_nowhere_else_unless_asked(tmp_path, name):
    secret = image(tmp_path / "secret" / "s.png", 9)
    path = manifest(tmp_path / "data", "")
    (tmp_path / "data" / "link.png").symlink_to(secret)
    (tmp_path / "data" / "linked").symlink_to(secret.parent)
    name = str(secret) if name == "SECRET" else name
    path.write_text(f"path,label,split\na.png,1,train\n{name},2,test\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"leads out of .*data, .* set data\.outside: true") as told:
        open_data("manifest", path)
    assert name in str(told.value)
    assert open_data("manifest", path, outside=True).test[0].getpixel((0, 0)) == (9, 0, 0)


def test_manifests_may_go_up_and_down_inside(tmp_path):
    path = manifest(tmp_path, "path,label,split\nin/../a.png,1,train\nlinked/c.png,2,test\nover.png,1,test\n")
    (tmp_path / "linked").symlink_to(tmp_path / "in")
    (tmp_path / "over.png").symlink_to(tmp_path / "b.png")
    (tmp_path / "far").symlink_to(tmp_path)
    assert len(open_data("manifest", tmp_path / "far" / path.name).test) == 2


def test_missing_images_are_counted(tmp_path):
    path = manifest(tmp_path, "path,label\na.png,1\nno.png,2\nneither.png,2\n")
    with pytest.raises(FileNotFoundError, match=r"2 of 3 images are missing, the first is .*no\.png"):
        open_data("manifest", path)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        open_data("manifest", tmp_path / "other.csv")


# ------------------------------------------------------------------------------------------- vectors

X, Y = np.arange(12.0).reshape(6, 2), np.array([7, 7, 9, 9, 8, 8])


def test_vectors_with_split(tmp_path):
    split = np.array(["train", "train", "test", "test", "train", "test"])
    np.savez(tmp_path / "v.npz", x=X, y=Y, split=split, name=np.array(list("abcdef")))
    data = open_data("vectors", tmp_path / "v.npz")
    assert data.train.classes == ("7", "8")
    assert data.test.classes == ("8", "9")
    assert list(data.test.names) == ["c", "d", "f"]
    assert data.test[2].tolist() == [10.0, 11.0]


@pytest.mark.parametrize("prefix", ["", "birds_"])
def test_vectors_in_two_files(tmp_path, prefix):
    np.savez(tmp_path / f"{prefix}train.npz", x=X.astype(np.float16), y=Y)
    np.savez(tmp_path / f"{prefix}test.npz", x=X[:2], y=np.array(["p", "q"]))
    data = open_data("vectors", tmp_path / f"{prefix}train.npz" if prefix else tmp_path)
    assert (len(data.train), len(data.test)) == (6, 2)
    assert data.test.classes == ("p", "q")
    assert data.train[1].dtype == data.test[1].dtype


def test_vectors_without_split_are_halved_by_class(tmp_path):
    np.savez(tmp_path / "v.npz", x=X, y=Y)
    data = open_data("vectors", tmp_path / "v.npz")
    assert sorted(data.train.classes + data.test.classes) == ["7", "8", "9"]


@pytest.mark.parametrize(
    ("arrays", "told"),
    [
        ({"x": X}, "but y is missing; it holds x"),
        ({"x": X[0], "y": Y[:2]}, r"numbers \[n, d\], but came as float64 \[2\]"),
        ({"x": X.astype(str), "y": Y}, "x in .* must be numbers"),
        ({"x": X, "y": Y[:3]}, r"y in .* one entry per row of x \(6\), but came with shape \[3\]"),
        ({"x": X, "y": Y, "split": np.array(["train"])}, "split in .* one entry per row"),
        ({"x": X, "y": Y, "split": np.array(["both"] * 6)}, "sample 0 says 'both'"),
        ({"x": np.where(X == 5, np.nan, X), "y": Y}, "1 rows hold NaN or infinity, the first is row 2"),
        ({"x": X, "y": Y.astype(object)}, "pickled objects"),
    ],
)
def test_wrong_vectors(tmp_path, arrays, told):
    np.savez(tmp_path / "v.npz", **arrays)
    with pytest.raises(ValueError, match=told):
        open_data("vectors", tmp_path / "v.npz")


def test_missing_vectors(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file"):
        open_data("vectors", tmp_path)
    np.savez(tmp_path / "train.npz", x=X, y=Y)
    with pytest.raises(FileNotFoundError, match=r"train\.npz but no test\.npz"):
        open_data("vectors", tmp_path)


# ------------------------------------------------------------------------------------------ the door


def test_the_door():
    with pytest.raises(ValueError, match="did you mean 'inshop'"):
        open_data("in-shop", "somewhere")
    with pytest.raises(ValueError, match="'sop' needs a path"):
        open_data("sop")
    data = open_data("glyphs")
    assert (len(data.train), len(data.test)) == (22_421, 6808)
    assert data.test.names[0].startswith(data.test.classes[0])
    assert data.train[0].shape == (32, 32)
