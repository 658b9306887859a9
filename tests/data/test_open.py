"""Opening data by path: its kind is detected from its files, and nothing is written among them."""

from __future__ import annotations

import csv
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from needs import need
from PIL import Image
from shell import run

from nearfar.data import open_data
from nearfar.data._registry import MARKS, kind_of
from nearfar.train import load, parse
from nearfar.train._build import set_data_name
from nearfar.train._recipe import default_config

SIDE = 72
"""Large enough for a photograph."""


def png(seed: int) -> bytes:
    stream = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def fill(home: Path, classes: int = 8, each: int = 2) -> None:
    for number in range(classes):
        (home / f"kind{number}").mkdir(parents=True)
        for place in range(each):
            (home / f"kind{number}" / f"{place}.png").write_bytes(png(number * each + place))


def make_folder(home: Path) -> Path:
    fill(home / "photos")
    return home / "photos"


def make_split(home: Path) -> Path:
    for side in ("train", "test"):
        fill(home / "split" / side)
    return home / "split"


def make_shards(home: Path) -> Path:
    (home / "shards").mkdir()
    with tarfile.open(home / "shards" / "s-000.tar", "w") as archive:
        for number in range(16):
            for end, data in (("png", png(number)), ("cls", str(number % 8).encode())):
                entry = tarfile.TarInfo(f"{number:03d}.{end}")
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
    return home / "shards"


def make_tar(home: Path) -> Path:
    return make_shards(home) / "s-000.tar"


def make_manifest(home: Path) -> Path:
    photos = make_folder(home)
    with (photos / "list.csv").open("w", encoding="utf-8", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(["path", "label"])
        rows.writerows([str(file.relative_to(photos)), file.parent.name] for file in sorted(photos.rglob("*.png")))
    return photos / "list.csv"


def make_vectors(home: Path) -> Path:
    np.savez(home / "v.npz", x=np.random.default_rng(0).normal(size=(48, 6)), y=np.arange(48) % 12)
    return home / "v.npz"


def make_pair(home: Path) -> Path:
    (home / "pair").mkdir()
    for side in ("train", "test"):
        np.savez(home / "pair" / f"{side}.npz", x=np.random.default_rng(0).normal(size=(48, 6)), y=np.arange(48) % 12)
    return home / "pair"


def make_hf(home: Path) -> Path:
    package = need("datasets")
    columns = {"x": np.random.default_rng(0).normal(size=(48, 6)).tolist(), "label": [i % 12 for i in range(48)]}
    package.Dataset.from_dict(columns).save_to_disk(str(home / "hf"))
    return home / "hf"


MAKES = {
    "folder": make_folder,
    "folder, split": make_split,
    "shards": make_shards,
    "shards, one": make_tar,
    "manifest": make_manifest,
    "vectors": make_vectors,
    "vectors, two": make_pair,
    "hf": make_hf,
}
QUICK = ["--model.name", "mlp", "--batches.classes", "2", "--batches.samples", "2", "--data.size", "8",
         "--training.steps", "2", "--training.evaluate_every", "2", "--training.diagnose_every", "0"]  # fmt: skip


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "nearfar"


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() if path.is_file() else b"" for path in sorted(folder.rglob("*"))}


@pytest.mark.parametrize("kind", MAKES)
def test_what_a_path_holds(kind, tmp_path, cache):
    path, name = MAKES[kind](tmp_path), kind.split(",")[0]
    assert kind_of(path) == kind_of(str(path)) == name
    found, wanted = open_data(None, path), open_data(name, path)
    assert (found.name, list(found.train.names)) == (wanted.name, list(wanted.train.names))
    assert set_data_name(parse({"data": {"path": str(path)}})).data.name == name
    assert set_data_name(parse({"data": {"name": "cub", "path": str(path)}})).data.name == "cub"


def test_files_by_which_benchmarks_are_known(tmp_path):
    for name, files in MARKS.items():
        for place, file in enumerate(files):
            home = tmp_path / f"{name}{place}"
            (home / file).parent.mkdir(parents=True)
            (home / file).touch()
            fill(home / "images", 2, 1)
            (home / "archive.tar").touch()
            assert kind_of(home) == name
    assert kind_of("some/s-{000..099}.tar") == kind_of("a.tar::b.tar") == "shards"
    assert kind_of(tmp_path / "omniglot0" / "omniglot_28.npz") == "omniglot"


@pytest.mark.parametrize("make", ["empty", "text", "unknown.bin", "two", "v.vectors"])
def test_a_path_that_fits_nothing_is_an_error(make, tmp_path, cache):
    place = tmp_path / make
    if make == "unknown.bin":
        place.touch()
    else:
        place.mkdir()
    if make == "text":
        (place / "readme.txt").touch()
    if make == "two":
        for file in ("train.npz", "cars_annos.mat"):
            (place / file).touch()
    said = run(tmp_path, "train", "--data.path", make, "--run", "r", code=1)
    assert f"{make} {'may be cars or vectors' if make == 'two' else 'is not a known kind of data by its files'}" in said
    assert "correct the path, or, in a configuration, name the data set with data.name, one of omniglot, cub" in said
    assert not cache.exists()
    assert not (tmp_path / "r").exists()


def test_a_missing_path_is_an_error(tmp_path):
    assert "there is no file or folder photos" in run(tmp_path, "train", "--data.path", "photos", "--run", "r", code=1)


def test_glyphs_have_no_path(tmp_path, cache):
    (tmp_path / "photos").mkdir()
    words = ("train", "--data.name", "glyphs", "--data.path", "photos", "--run", "r")
    assert "glyphs are drawn and have no path, but photos came" in run(tmp_path, *words, code=1)
    assert not list((tmp_path / "photos").iterdir())
    assert set_data_name(parse({})).data.name == "glyphs"


def test_a_folder_of_photographs_gets_their_recipe(tmp_path):
    photos = make_folder(tmp_path)
    config, words = default_config([("data.path", str(photos))])
    assert (config.data.name, config.loss.name) == ("folder", "ProxyAnchor")
    assert words.startswith("these are photographs")
    config, words = default_config([("data.path", str(make_vectors(tmp_path)))])
    assert (config.data.name, config.model.embedding_dim) == ("vectors", None)


@pytest.mark.parametrize("kind", MAKES)
@pytest.mark.parametrize("way", [["--dry-run"], []])
def test_nothing_is_written_among_the_data(kind, way, tmp_path, cache):
    """With every cache, by a dry run and by a run; the run's configuration then names the kind."""
    path = MAKES[kind](tmp_path)
    home = path if path.is_dir() else path.parent
    if home == tmp_path:
        home = (tmp_path / "alone").resolve()
        home.mkdir()
        path = path.rename(home / path.name)
    size = QUICK if kind.split(",")[0] not in ("vectors", "hf") else [*QUICK[:6], *QUICK[8:]]
    before = contents(home)
    run(tmp_path, "train", "--data.path", path, *size, "--data.cache", "disk", "--run", tmp_path / "run", *way)
    assert contents(home) == before
    if not way:
        assert load(tmp_path / "run" / "config.yaml").data.name == kind.split(",")[0]


def test_a_dry_run_within_the_data_leaves_its_picture_elsewhere(tmp_path, cache):
    photos = make_folder(tmp_path)
    before = contents(photos)
    said = run(photos, "train", "--data.path", ".", *QUICK, "--dry-run")
    assert f"first batch: {cache / 'first-batch.png'}" in said
    assert contents(photos) == before


def test_a_cache_within_the_data_is_refused(tmp_path, cache):
    photos = make_folder(tmp_path)
    before = contents(photos)
    for place in ("photos/cache", "photos"):
        words = ("train", "--data.path", "photos", *QUICK, "--data.cache", "disk", "--data.cache_folder", place)
        for way in (["--dry-run"], []):
            said = run(tmp_path, *words, "--run", "r", *way, code=1)
            assert "data.cache_folder must lie outside the data" in said
    assert contents(photos) == before
