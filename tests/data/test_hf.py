"""Data sets that Hugging Face's `datasets` wrote to disk."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, List, Value
from shard_cases import png

import nearfar as nf
from nearfar.data import Tensors, genuine, open_data, transforms
from nearfar.data._picture_cache import cache_pictures

BIRDS = ("gull", "tern", "wren", "crow")


@pytest.fixture(scope="module", autouse=True)
def _quiet():
    from datasets.utils.logging import disable_progress_bar, enable_progress_bar

    disable_progress_bar()
    yield
    enable_progress_bar()


def rows(first: int = 0, count: int = 12) -> dict[str, list]:
    numbers = range(first, first + count)
    return {
        "photo": [{"bytes": png(i), "path": f"{i}.png"} for i in numbers],
        "label": [i % 4 for i in numbers],
        "place": [f"place {i % 3}" for i in numbers],
    }


FEATURES = Features({"photo": Image(), "label": ClassLabel(names=list(BIRDS)), "place": Value("string")})


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """Data sets that no test changes."""
    folder = tmp_path_factory.mktemp("hf")
    one = Dataset.from_dict(rows(), features=FEATURES)
    one.save_to_disk(folder / "one")
    two = {"train": one, "test": Dataset.from_dict(rows(50), features=FEATURES)}
    DatasetDict(two).save_to_disk(folder / "two")
    DatasetDict({"train": one}).save_to_disk(folder / "alone")
    DatasetDict({"train": one, "dev": one}).save_to_disk(folder / "dev")
    return folder


def value(picture) -> int:
    return picture.getpixel((0, 0))[0]


def values(samples) -> list[int]:
    return [value(samples[i]) for i in range(len(samples))]


def test_a_dictionary_has_its_splits(shared):
    data = open_data("hf", shared / "two")
    assert (data.name, data.train.classes, len(data.test)) == ("two", tuple(sorted(BIRDS)), 12)
    assert values(data.train) == list(range(12))
    assert values(data.test) == list(range(50, 62))
    assert [data.train.classes[label] for label in data.train.labels[:4]] == list(BIRDS)
    assert (data.test.names[3], len(data.test.names)) == ("test/3", 12)


@pytest.mark.parametrize("name", ["one", "alone"])
def test_of_one_split_half_of_the_classes_are_for_the_test(shared, name):
    data = open_data("hf", shared / name)
    assert {*data.train.classes} | {*data.test.classes} == {*BIRDS}
    assert len(data.train.classes) == 2
    assert sorted(values(data.train) + values(data.test)) == list(range(12))
    for side in (data.train, data.test):
        assert [int(each.rsplit("/")[-1]) for each in side.names] == values(side)


def test_columns_by_name(shared):
    data = open_data("hf", shared / "one", labels="place", inputs="photo")
    assert {*data.train.classes} | {*data.test.classes} == {"place 0", "place 1", "place 2"}


def test_samples_travel_to_other_processes(shared):
    train = open_data("hf", shared / "two").train
    assert values(pickle.loads(pickle.dumps(train))) == values(train)


def test_pictures_are_decoded_once(shared, tmp_path):
    place = Path(shutil.copytree(shared / "two", tmp_path / "two"))
    transform = transforms.get("photographs", train=False, size=8)
    for times, stamp in ((1, None), (1, None), (2, 1)):
        for file in (place / "train").glob("*.arrow"):
            if stamp is not None:
                os.utime(file, ns=(stamp, stamp))
        train = cache_pictures(open_data("hf", place).train, transform, "disk", folder=tmp_path / "pixels")
        assert values(train) == list(range(12))
        assert len(list((tmp_path / "pixels").glob("*.pixels"))) == times


@pytest.mark.parametrize("kind", ["float32", "int64"])
def test_vectors(tmp_path, kind):
    x = np.arange(24).reshape(8, 3)
    features = Features({"v": List(Value(kind)), "y": ClassLabel(names=["a", "b"])})
    Dataset.from_dict({"v": x.tolist(), "y": [0, 1] * 4}, features=features).save_to_disk(tmp_path / "v")
    data = open_data("hf", tmp_path / "v")
    assert isinstance(data.train, Tensors)
    both = np.concatenate([data.train.x.numpy(), data.test.x.numpy()])
    assert both.dtype == np.float32
    assert sorted(both[:, 0].tolist()) == x[:, 0].tolist()


def test_pictures_as_bytes(tmp_path):
    features = Features(b=Value("binary"), label=Value("int64"))
    given = {"b": [png(1), png(2), None], "label": [0, 1, 2]}
    Dataset.from_dict(given, features=features).save_to_disk(tmp_path / "d")
    data = open_data("hf", tmp_path / "d")
    for side in (data.train, data.test):
        for i, name in enumerate(side.names):
            if name == "2":
                with pytest.raises(nf.data.CorruptImageError, match=r"b of row 2 cannot be read .the row holds no"):
                    side[i]
            else:
                assert value(side[i]) == int(name) + 1


def test_a_file_that_a_row_names_must_lie_in_the_folder(tmp_path):
    (tmp_path / "secret.png").write_bytes(png(9))
    place = tmp_path / "d"
    photos = [
        {"bytes": None, "path": name} for name in ("in.png", str(tmp_path / "secret.png"), "../secret.png", "no.png")
    ]
    photos += [{"bytes": b"no picture", "path": None}]
    given = {"photo": photos, "label": [0, 1, 0, 1, 0]}
    struct = {"bytes": Value("binary"), "path": Value("string")}
    Dataset.from_dict(given, features=Features(photo=struct, label=Value("int64"))).save_to_disk(place)
    info = json.loads((place / "dataset_info.json").read_text(encoding="utf-8"))
    info["features"]["photo"] = {"_type": "Image"}  # the package itself puts files into the rows; a stranger may not
    (place / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    (place / "in.png").write_bytes(png(5))
    said = ["", "leads out of", "leads out of", "no such file", "no picture of a known format"]
    data = open_data("hf", place)
    for side in (data.train, data.test):
        for i, name in enumerate(side.names):
            if said[int(name)]:
                with pytest.raises(
                    nf.data.CorruptImageError, match=rf"photo of row {name} cannot be .*{said[int(name)]}"
                ):
                    side[i]
            else:
                assert value(side[i]) == 5
    trusted = open_data("hf", place, outside=True)
    side = trusted.train if "1" in trusted.train.names else trusted.test
    assert value(side[0]) == 9
    skipping = open_data("hf", place, on_corrupt="skip")
    side = skipping.train if "0" in skipping.train.names else skipping.test
    with pytest.warns(nf.data.CorruptImageWarning, match="photo of row 2 cannot be read"):
        assert genuine(side, 1) is None
    assert value(side[1]) == 5


def saved(folder: Path, **columns) -> Path:
    Dataset.from_dict(columns).save_to_disk(folder / "d")
    return folder / "d"


def test_bad_input_is_one_sentence(shared, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"^hf: there is no folder .*nowhere"):
        open_data("hf", tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"^hf: .*empty cannot be read as a data set that save_to_disk wrote"):
        open_data("hf", tmp_path / "empty")
    with pytest.raises(ValueError, match=r"^hf: .*dev must hold the splits train and test, .* but holds train, dev"):
        open_data("hf", shared / "dev")
    with pytest.raises(ValueError, match=r"^hf: labels must name a column of .*, but 'kind' came; its columns are p"):
        open_data("hf", shared / "one", labels="kind")
    with pytest.raises(ValueError, match=r"^hf: inputs must name a column of .*, but 'x' came"):
        open_data("hf", shared / "one", inputs="x")
    cut = Path(shutil.copytree(shared / "one", tmp_path / "cut"))
    (file,) = cut.glob("*.arrow")
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"^hf: .*cut cannot be read"):
        open_data("hf", cut)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"v": [[1.0], [2.0]], "label": [0, None]}, "row 1 of .* has no label: label holds 'None'"),
        ({"v": [[1.0], [2.0]], "label": [0.5, 1.0]}, "row 0 of .* has no label: label holds '0.5'"),
        ({"v": [[1.0], [float("nan")]], "label": [0, 1]}, "v in .* must be finite, but 1 rows hold NaN"),
        ({"v": [[1.0], [2.0, 3.0]], "label": [0, 1]}, r"v in .* must be numbers \[n, d\], but came as object"),
        ({"v": [[1.0], [2.0]], "w": [[1.0], [2.0]], "label": [0, 1]}, "inputs must name a column .* none is named"),
        ({"v": [[1.0], [2.0]], "kind": [0, 1]}, "labels must name a column .* none is named; its columns are v, kind"),
        ({"v": [], "label": []}, "(holds no rows|cannot be read)"),
    ],
)
def test_bad_columns(tmp_path, columns, said):
    with pytest.raises(ValueError, match=f"^hf: .*{said}"):
        open_data("hf", saved(tmp_path, **columns))
