"""Tar shards in WebDataset's format: what is read equals what was written, by an index that is built once."""

from __future__ import annotations

import importlib
import io
import json
import os
import pickle
import shutil
import sys
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from shard_cases import birds, png, write
from webdataset.tariterators import group_by_keys, tar_file_expander

import nearfar as nf
from nearfar.batches import MPerClass
from nearfar.data import View, _cache, genuine, open_data, part, transforms
from nearfar.data._picture_cache import cache_pictures
from nearfar.data._samples import PackedNames
from nearfar.data._shards import Members, ShardIndex, open_index

module = importlib.import_module("nearfar.data._shards")  # the package has a function of this name


def value(picture) -> int:
    return picture.getpixel((0, 0))[0]


def values(samples) -> list[int]:
    return [value(samples[i]) for i in range(len(samples))]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """The user's cache folder, where indices lie."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "nearfar" / "shards"


def indices(cache: Path) -> list[Path]:
    return sorted(cache.glob("nearfar-index-*.npz"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """Shards that no test changes."""
    folder = tmp_path_factory.mktemp("birds")
    birds(folder)
    return folder


@pytest.fixture
def folder(shared, tmp_path) -> Path:
    return Path(shutil.copytree(shared, tmp_path / "birds", ignore=shutil.ignore_patterns("*nearfar*")))


def test_braces_and_a_folder_read_the_same_samples_as_the_package(shared):
    data = open_data("shards", shared / "s-{000..002}.tar")
    again = open_data("shards", shared)
    assert data.name == shared.name
    found = {}
    for side in (data.train, data.test):
        found |= {
            name: (value(side[i]), side.classes[side.labels[i]], side[i].tobytes()) for i, name in enumerate(side.names)
        }
    wanted = {}
    for path in sorted(shared.glob("*.tar")):
        with path.open("rb") as stream:
            for each in group_by_keys(tar_file_expander([{"url": str(path), "stream": stream}])):
                with Image.open(io.BytesIO(each["png"])) as picture:
                    wanted[f"{each['__key__']}.png"] = value(picture), each["cls"].decode(), picture.tobytes()
    assert found == wanted
    assert list(again.train.names) == list(data.train.names)
    assert values(again.test) == values(data.test)


def test_classes_of_the_two_sides_differ_and_the_split_is_that_of_a_folder(shared):
    data = open_data("shards", shared)
    assert set(data.train.classes).isdisjoint(data.test.classes)
    assert len(data.train.classes) == len(data.test.classes) == 3
    rest, held = nf.data.class_disjoint(data.train, 1 / 3, seed=1)
    validation = part(part(data.train, np.sort(np.concatenate([rest, held]))), held)
    assert [int(name[:6]) for name in validation.names] == values(validation)


def test_the_index_is_built_once_and_again_when_a_shard_changes(folder, cache, monkeypatch):
    passes, scan = [], module.scan
    monkeypatch.setattr(module, "scan", lambda *words: passes.append(1) or scan(*words))
    first = open_data("shards", folder)
    (path,) = indices(cache)
    before, lock = path.read_bytes(), path.with_name(f".{path.name}.lock")
    lock.unlink()
    assert list(open_data("shards", folder).train.names) == list(first.train.names)
    assert len(passes) == 1
    assert not lock.exists()  # to read an index nobody has to wait, or to be allowed to write
    write(folder / "s-001.tar", [{"__key__": "new", "png": png(99), "cls": 0}])
    data = open_data("shards", folder)
    assert len(passes) == 2
    assert 99 in values(data.train) + values(data.test)
    assert indices(cache) == [path]
    assert path.read_bytes() != before
    path.write_bytes(path.read_bytes()[:-9] + b"too short")
    with pytest.warns(UserWarning, match=r"nearfar-index-.* does not match its seal, so the data is made again"):
        open_data("shards", folder)
    assert len(passes) == 3
    open_data("shards", folder, labels="cls")  # another question, another index
    assert len(indices(cache)) == 2


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such lock")
def test_while_one_builds_the_index_others_wait(folder, monkeypatch):
    passes, scan, alone = [], module.scan, _cache.alone
    both = threading.Barrier(2)  # neither goes for the lock before both have found no index

    def slow(*words):
        passes.append(1)
        return scan(*words)

    def together(path):
        both.wait(30)
        return alone(path)

    monkeypatch.setattr(module, "scan", slow)
    monkeypatch.setattr(_cache, "alone", together)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: list(open_data("shards", folder).train.names), range(2)))
    assert found[0] == found[1]
    assert len(passes) == 1


def test_nothing_is_written_beside_the_shards(folder, cache, monkeypatch):
    before = sorted(folder.rglob("*"))
    open_data("shards", folder)
    assert sorted(folder.rglob("*")) == before
    assert len(indices(cache)) == 1
    moved = folder.rename(folder.parent / "moved")
    assert len(open_data("shards", moved).train) == 12


def test_an_index_that_cannot_be_written_is_used_all_the_same(folder, monkeypatch):
    def full(path, arrays):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_cache, "write_arrays", full)
    with pytest.warns(UserWarning, match="could not be written .No space left on device., so the next run makes it"):
        assert len(open_data("shards", folder).train) == 12


def test_labels_from_json_another_suffix_and_a_table(tmp_path):
    samples = [
        {
            "__key__": f"in/{i}",
            "png": png(i),
            "json": json.dumps({"label": i % 4, "bird": {"kind": f"kind {i % 3}"}}),
            "kind.txt": f"{i % 2}\n",
        }
        for i in range(12)
    ]
    write(tmp_path / "a.tar", samples)

    def classes(**words) -> set[str]:
        data = open_data("shards", tmp_path / "a.tar", **words)
        assert sorted(values(data.train) + values(data.test)) == list(range(12))
        return {*data.train.classes, *data.test.classes}

    assert classes() == classes(labels="json") == {"0", "1", "2", "3"}
    assert classes(labels="json.bird.kind") == {"kind 0", "kind 1", "kind 2"}
    assert classes(labels=".kind.txt") == {"0", "1"}
    rows = "".join(f"in/{i},{'ab'[i // 6]},{('test', 'train')[i // 6]}\n" for i in range(12))
    (tmp_path / "labels.csv").write_text(f"key,label,split\n{rows}", encoding="utf-8")
    data = open_data("shards", tmp_path)  # labels.csv comes first
    assert (data.train.classes, data.test.classes) == (("b",), ("a",))
    assert values(data.train) == [6, 7, 8, 9, 10, 11]
    (tmp_path / "labels.csv").write_text("key,label\n" + rows.replace(",test", "").replace(",train", ""), "utf-8")
    assert {*open_data("shards", tmp_path).train.classes} < {"a", "b"}


def test_numbers_are_sorted_as_numbers(tmp_path):
    write(tmp_path / "a.tar", [{"__key__": str(i), "png": png(i), "cls": i} for i in (10, 9, 2, 100)])
    index = open_index([tmp_path / "a.tar"], None, None)
    assert index.classes == ("2", "9", "10", "100")
    assert index.labels.tolist() == [2, 1, 0, 3]


@pytest.mark.parametrize("name", ["{}-{:03d}.tar", "{}/{:03d}.tar"])
def test_shards_for_train_and_for_test(tmp_path, name):
    for number, side in enumerate(("train", "test")):
        samples = [{"__key__": f"{side}{i}", "png": png(10 * number + i), "cls": i % 2} for i in range(4)]
        write(tmp_path / name.format(side, 0), samples)
    data = open_data("shards", tmp_path)
    assert (values(data.train), values(data.test)) == ([0, 1, 2, 3], [10, 11, 12, 13])
    together = "::".join(str(tmp_path / name.format(side, 0)) for side in ("train", "test"))
    assert values(open_data("shards", together).test) == [10, 11, 12, 13]
    write(tmp_path / "more.tar", [{"__key__": "x", "png": png(1), "cls": 0}])
    with pytest.raises(ValueError, match=r"but .*more.tar is for neither; begin its name with one of these words"):
        open_data("shards", tmp_path)


def test_batches_resume_as_those_of_a_folder(shared):
    train = open_data("shards", shared).train
    sampler = MPerClass(train.labels, classes=2, samples=2, seed=3)
    first = [next(iter(sampler)) for _ in range(5)]
    again = MPerClass(open_data("shards", shared).train.labels, classes=2, samples=2, seed=3)
    again.load_state_dict(sampler.state_dict(step=3))
    assert [next(iter(again)) for _ in range(2)] == first[3:]


def test_workers_get_what_this_process_reads(shared):
    from torch.utils.data import DataLoader

    view = View(open_data("shards", shared).train, transforms.get("photographs", train=True, size=8), seed=0)
    keys = [[(0, 1), (5, 1)], [(3, 2), (4, 2)]]
    here = [view.__getitems__(batch) for batch in keys]
    there = list(DataLoader(view, batch_sampler=keys, collate_fn=nf.data.collate, num_workers=1))
    for mine, theirs in zip(here, there, strict=True):
        assert all((a == b).all() for a, b in zip(mine, theirs, strict=True))
    copied = pickle.loads(pickle.dumps(view.samples))
    assert values(copied) == values(view.samples)


@pytest.mark.parametrize("cache", ["disk", "memory", "device"])
def test_pictures_are_decoded_once(folder, tmp_path, cache):
    train = open_data("shards", folder).train
    transform = transforms.get("photographs", train=False, size=8)
    once = cache_pictures(train, transform, cache, folder=tmp_path / "pixels")
    before = values(once)
    assert before == values(train)
    (file,) = (tmp_path / "pixels").glob("*.pixels")
    fresh = cache_pictures(open_data("shards", folder).train, transform, cache, folder=tmp_path / "pixels")
    assert values(fresh) == before
    assert list((tmp_path / "pixels").glob("*.pixels")) == [file]
    os.utime(folder / "s-000.tar", ns=(1, 1))
    values(cache_pictures(open_data("shards", folder).train, transform, cache, folder=tmp_path / "pixels"))
    assert len(list((tmp_path / "pixels").glob("*.pixels"))) == 2


def test_names_and_places_are_made_on_access():
    names = PackedNames.pack(f"{i}é.png" for i in range(1000))
    assert names[7:9] == ["7é.png", "8é.png"]
    assert names[-1] == "999é.png"
    with pytest.raises(IndexError):
        names[1000]
    assert list(PackedNames.pack(["a\udcff"])) == ["a\\udcff"]
    index = ShardIndex(
        (Path("a.tar"), Path("empty.tar"), Path("b.tar")),
        np.array([0, 600, 600, 1000]),
        np.arange(1000) * 512,
        np.full(1000, 9, dtype=np.uint32),
        np.zeros(1000, dtype=np.int64),
        names,
        ("one",),
        np.empty(0, dtype=np.int8),
        np.zeros((3, 2), dtype=np.int64),
    )
    places = Members(index)
    assert [str(places[i]) for i in (0, 599, 600, -1)] == [
        "a.tar:0é.png", "a.tar:599é.png", "b.tar:600é.png", "b.tar:999é.png"
    ]  # fmt: skip
    assert places[2:3] == [places[2]]
    samples = nf.data.Pictures(places, index.labels, names, index.classes)
    assert samples.names is names
    assert samples.paths is places
    assert isinstance(part(samples, [3, 1]).names, PackedNames)
    assert list(part(samples, [3, 1]).names) == ["3é.png", "1é.png"]


# what is wrong, and the words of the one sentence about it


def sample(key: str = "0", **files):
    return {"__key__": key, "png": png(1), "cls": 0} | files


BAD = {
    "no label": ([{"__key__": "a/7", "png": png(1)}], {"labels": "cls"}, "'a/7' in .*s.tar has no file .cls"),
    "an empty label": ([sample(cls=" \n")], {}, "'0' in .* has an empty label"),
    "a label that is no text": ([sample(cls=b"\xff\xfe\xff")], {}, "'0' in .* has a file .cls that cannot be read"),
    "no such key": ([sample(json='{"label": null}')], {"labels": "json"}, "has no 'label' in its .json"),
    "broken json": ([sample(json="{")], {"labels": "json.x"}, "has a file .json that cannot be read"),
    "deep json": ([sample(json="[" * 200_000)], {"labels": "json.x"}, "has a file .json that cannot be read"),
    "no labels anywhere": ([{"__key__": "0", "png": png(1)}], {}, "neither .cls nor .json .*say with labels where"),
    "no picture": ([{"__key__": "0", "cls": 1}], {}, r"must have one picture, but has none \(.cls\)"),
    "two pictures": ([sample(jpg=b"x")], {}, r"must have one picture, but has 2 \(.cls, .jpg, .png\)"),
    "another input": ([sample()], {"inputs": "webp"}, "'0' in .* has no file .webp"),
    "one key twice": ([sample("a"), sample("b"), sample("a")], {}, "two samples have the key 'a', in .* and in .*"),
    "no samples": ([], {}, "hold no samples"),
    "no samples with labels": ([], {"labels": "cls"}, "hold no samples"),
    "a way out": ([sample("../../a")], {}, r"'../../a.cls' leads out of the archive .*s.tar"),
    "the root": ([sample("/etc/a")], {}, r"'/etc/a.cls' leads out of the archive .*s.tar"),
    "no words": ([sample()], {"labels": "."}, "labels must be a suffix .* but came as '.'"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_samples_are_one_sentence(tmp_path, case):
    samples, words, said = BAD[case]
    write(tmp_path / "s.tar", samples)
    with pytest.raises(ValueError, match=rf"^shards: .*{said}") as caught:
        open_data("shards", tmp_path / "s.tar", **words)
    assert "\n" not in str(caught.value)
    assert not indices(tmp_path)


def test_two_files_of_one_name(tmp_path):
    with tarfile.open(tmp_path / "s.tar", "w") as archive:
        for _ in range(2):
            archive.addfile(tarfile.TarInfo("a.png"))
    with pytest.raises(ValueError, match=r"^shards: .*s.tar is not a WebDataset \(a.png: duplicate file name"):
        open_data("shards", tmp_path / "s.tar")


def test_links_and_files_about_the_shard_belong_to_no_sample(tmp_path):
    write(tmp_path / "s.tar", [sample("a"), sample("b", cls=1)])
    with tarfile.open(tmp_path / "s.tar", "a") as archive:
        link = tarfile.TarInfo("c.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
        archive.addfile(tarfile.TarInfo("__meta__/about.json"))
    data = open_data("shards", tmp_path / "s.tar")
    assert sorted([*data.train.names, *data.test.names]) == ["a.png", "b.png"]


@pytest.mark.parametrize("cut", ["inside a picture", "inside a header", "between two files"])
def test_a_shard_that_was_cut_short(folder, cut):
    path = folder / "s-001.tar"
    with tarfile.open(path) as archive:
        entry = archive.getmembers()[4]
    size = {
        "inside a picture": entry.offset_data + 10,
        "inside a header": entry.offset + 100,
        "between two files": entry.offset,
    }[cut]
    os.truncate(path, size)
    with pytest.raises(
        ValueError, match=r"^shards: .*s-001.tar (was cut short|cannot be read as a plain tar file).*copy"
    ):
        open_data("shards", folder)


def test_what_is_no_plain_tar_file(tmp_path):
    (tmp_path / "s.tar").write_bytes(b"no tar file" * 100)
    with pytest.raises(ValueError, match=r"s.tar cannot be read as a plain tar file .*; copy it again"):
        open_data("shards", tmp_path)
    with tarfile.open(tmp_path / "s.tar.gz", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("a.png"))
    with pytest.raises(ValueError, match=r"cannot be read as a plain tar file .*; unpack it with gunzip"):
        open_data("shards", tmp_path / "s.tar.gz")


def test_a_shard_that_vanished(folder):
    data = open_data("shards", folder / "s-{000..002}.tar")
    skipping = open_data("shards", folder / "s-{000..002}.tar", on_corrupt="skip")
    (folder / "s-001.tar").unlink()
    lost = next(i for i, name in enumerate(data.train.names) if 8 <= int(name[:6]) < 16)
    with pytest.raises(nf.data.CorruptImageError, match=r"s-001.tar:\d+.png cannot be read .No such file"):
        data.train[lost]
    with pytest.warns(nf.data.CorruptImageWarning, match=r"s-001.tar:\d+.png"):
        assert genuine(skipping.train, lost) is None
    assert skipping.train[lost].size == (8, 8)  # another of its class
    with pytest.raises(FileNotFoundError, match=r"^shards: there is no file .*s-001.tar, one of 3; put all"):
        open_data("shards", folder / "s-{000..002}.tar")


def test_a_picture_that_cannot_be_read(tmp_path):
    samples = [sample(str(i), png=png(i) if i else b"no picture", cls=i % 2) for i in range(6)]
    write(tmp_path / "s.tar", samples)
    for on_corrupt in ("stop", "skip"):
        data = open_data("shards", tmp_path, on_corrupt=on_corrupt)
        side = data.train if "0.png" in data.train.names else data.test
        if on_corrupt == "stop":
            with pytest.raises(nf.data.CorruptImageError, match=r"s.tar:0.png cannot be read .no picture of a known"):
                side[0]
        else:
            with pytest.warns(nf.data.CorruptImageWarning):
                assert value(side[0]) == 2


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("pipe:cat s.tar", "path must name files of this machine"),
        ("https://example.org/s-{00..09}.tar", "path must name files of this machine"),
        ("s-{0..1.tar}}", "cannot be expanded"),
        ("${HOME}/s.tar", "cannot be expanded"),
        ("s-{0,0}.tar", "names s-0.tar twice"),
    ],
)
def test_bad_paths(path, said):
    with pytest.raises(ValueError, match=f"^shards: .*{said}"):
        open_data("shards", path)


def test_bad_tables_and_folders(folder, tmp_path):
    table = folder / "labels.csv"
    good = "".join(f"{i:06d},{i % 3}\n" for i in range(24))
    for rows, said in {
        "key,label\n" + good + "000001,2\n": "000001 stands in rows 3 and 26 of .*labels.csv",
        "key,label\n" + good.replace("000003,0\n", ""): "'000003' in .*s-000.tar has no row in .*labels.csv",
        "key,label\n" + good + "000099,2\n": "1 of the 25 keys in .* are in none of the 3 shards, .* '000099'",
        "key,label,split\n" + good.replace("\n", ",dev\n"): "split in .* must be train or test, but row 2 has 'dev'",
        "key,label,split\n" + good.replace("\n", ",test\n"): "no sample of the table of labels is for train",
    }.items():
        table.write_text(rows, encoding="utf-8")
        with pytest.raises((ValueError, FileNotFoundError), match=f"^shards: .*{said}"):
            open_data("shards", folder)
    with pytest.raises(FileNotFoundError, match=r"^shards: there is no file .*other.csv"):
        open_data("shards", folder, labels="other.csv")
    (tmp_path / "none").mkdir()
    with pytest.raises(FileNotFoundError, match=r"none holds no .tar files"):
        open_data("shards", tmp_path / "none")
    with pytest.raises(ValueError, match=r"^open_data: labels is for shards and hf, but 'cls' came for 'folder'"):
        open_data("folder", tmp_path, labels="cls")
