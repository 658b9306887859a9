"""Decoded pictures: equal to the files, resumed, checked, shared; and crops on a device equal to PIL's."""

import errno
import gc
import multiprocessing
import os
import threading
import weakref

import numpy as np
import pytest
import runs
import torch
from PIL import Image

from nearfar.data import Tensors, View, _pixel_file, class_disjoint, part, transforms
from nearfar.data import _picture_cache as module
from nearfar.data._picture_cache import cache_data, cache_pictures
from nearfar.data._pictures import CorruptImageError, Pictures
from nearfar.data._pixel_file import PixelFile
from nearfar.data._samples import DataSet
from nearfar.data.transforms import Photograph
from nearfar.train import fit

torch.set_num_threads(1)
CPU = torch.device("cpu")


@pytest.fixture
def files(tmp_path):
    """Twelve smooth pictures of different sizes, three a class."""
    folder = tmp_path / "files"
    folder.mkdir()
    random = np.random.default_rng(0)
    for number in range(12):
        small = Image.fromarray(random.integers(0, 256, (6, 9, 3), dtype=np.uint8))
        small.resize((60 + 7 * number, 90 - 3 * number), Image.Resampling.BICUBIC).save(folder / f"{number:02}.png")
    return folder


def pictures(files, **options):
    return Pictures(sorted(files.iterdir()), np.arange(12) // 3, **options)


def shrunk(train=True, **options):
    return Photograph(crop=40, side=48, train=train, area=(0.16, 1.0), mean=(0.5,), std=(0.25,), **options)


def stored(samples, tmp_path, transform=None, cache="disk"):
    return cache_pictures(samples, transform or shrunk(), cache, folder=tmp_path / "cache")


KEYS = [(i, draw) for i in range(12) for draw in range(4)]


@pytest.mark.parametrize("cache", ["disk", "memory", "device"])
def test_decoded_pictures_are_the_files(files, tmp_path, cache):
    samples = pictures(files)
    for transform in (shrunk(), shrunk(train=False), shrunk(color=0.3), Photograph(crop=40, side=48, square=True)):
        x, labels, indices = View(samples, transform, seed=5).__getitems__(KEYS)
        y, *rest = View(stored(samples, tmp_path, transform, cache), transform, seed=5).__getitems__(KEYS)
        assert torch.equal(x, y)
        assert torch.equal(labels, rest[0])
        assert torch.equal(indices, rest[1])
    other = cache_pictures(samples, shrunk(), cache, folder=tmp_path / "other")
    assert np.array_equal(np.asarray(other[3]), np.asarray(stored(samples, tmp_path, cache=cache)[3]))
    assert len(list((tmp_path / "other").glob("*.pixels"))) == 1  # another folder is another file
    assert len(list((tmp_path / "cache").glob("*.pixels"))) == 2  # what is drawn does not matter, how it is stored does


@pytest.mark.parametrize("color", [0.0, 0.4])
def test_crops_on_a_device_are_those_of_pil(files, tmp_path, color):
    """To two gray levels, and most values exactly: PIL's weights are whole numbers."""
    samples, transform = pictures(files), shrunk(color=color)
    held = View(stored(samples, tmp_path), transform, seed=5, device=CPU)
    numbers, labels, indices = held.__getitems__(KEYS)
    assert numbers.shape == (len(KEYS), 8 if color else 5)
    got = held.render(numbers, indices, CPU)
    want, *rest = View(samples, transform, seed=5).__getitems__(KEYS)
    assert torch.equal(labels, rest[0])
    assert torch.equal(indices, rest[1])
    assert got.is_contiguous(memory_format=torch.channels_last)
    levels = 255 * 0.25 * (got - want).abs()
    assert levels.max() <= 2.001 * (1 + color) ** 3
    assert (levels > 0.5).float().mean() < 0.05
    assert len({tuple(row) for row in numbers[:, :5].tolist()}) > 40  # they are not all one crop
    assert 0 < numbers[:, 4].sum() < len(KEYS)


def test_middle_crops_on_a_device_are_exact(files, tmp_path):
    samples, transform = pictures(files), shrunk(train=False)
    held = View(stored(samples, tmp_path), transform, device=CPU)
    numbers, _, indices = held.__getitems__(range(12))
    want = View(samples, transform).__getitems__(range(12))[0]
    torch.testing.assert_close(held.render(numbers, indices, CPU), want, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["none", "glyphs"])
def test_drawings_on_a_device_are_those_in_memory(name):
    x = torch.randint(0, 256, (6, 14, 12), dtype=torch.uint8)
    transform = transforms.get(name, train=True, mean=(0.2,), std=(0.4,))
    samples = Tensors(x, [0, 0, 1, 1, 2, 2])
    whole, some = View(samples, transform, seed=1, device=CPU), [(3, 7), (0, 2), (5, 7)]
    numbers, _, indices = whole.__getitems__(some)
    want = View(samples, transform, seed=1).__getitems__(some)[0]
    assert torch.equal(whole.render(numbers, indices, CPU), want)
    one = torch.stack([View(samples, transform, seed=1)[key][0] for key in some])
    torch.testing.assert_close(want, one)


def test_parts_share_the_file_and_its_pixels(files, tmp_path):
    samples = pictures(files)
    whole = stored(samples, tmp_path)
    rest, held_out = class_disjoint(samples, 0.5, seed=0)
    for rows in (rest, held_out):
        some = stored(part(samples, rows), tmp_path)
        assert some.whole is whole
        assert np.array_equal(np.asarray(some[1]), np.asarray(whole[int(rows[1])]))
        view = View(some, shrunk(train=False), device=CPU)
        assert view.held.x is whole.hold(CPU).x
        numbers, labels, indices = view.__getitems__([0, 4])
        want = View(part(samples, rows), shrunk(train=False)).__getitems__([0, 4])
        torch.testing.assert_close(view.render(numbers, indices, CPU), want[0], atol=1e-6, rtol=0)
        assert torch.equal(labels, want[1])


def test_a_stopped_build_goes_on(files, tmp_path, monkeypatch):
    monkeypatch.setattr(_pixel_file, "TOGETHER", 4)
    samples, path, seen = pictures(files), tmp_path / "some.pixels", []

    def decode(stop):
        def one(number):
            seen.append(number)
            if number == stop:
                raise KeyboardInterrupt
            return np.asarray(samples[number])

        return one

    with pytest.raises(KeyboardInterrupt):
        PixelFile.build(path, 12, decode(9), workers=1)
    assert not path.exists()
    with (tmp_path / "some.pixels.part").open("ab") as stream:
        stream.write(b"torn")  # what was written after the last commit
    seen.clear()
    file = PixelFile.build(path, 12, decode(None), workers=2)
    assert sorted(seen) == [8, 9, 10, 11]
    assert all(np.array_equal(file[i], np.asarray(samples[i])) for i in range(12))
    assert sorted(each.name for each in tmp_path.glob("some*")) == ["some.pixels", "some.pixels.lock"]
    seen.clear()
    PixelFile.build(path, 12, decode(None), workers=1)
    assert seen == []


def test_two_that_build_the_same_file_decode_once(files, tmp_path):
    samples, path, seen = pictures(files), tmp_path / "some.pixels", []

    def decode(number):
        seen.append(number)
        return np.asarray(samples[number])

    threads = [threading.Thread(target=PixelFile.build, args=(path, 12, decode), kwargs={"workers": 1})] * 1
    threads += [threading.Thread(target=PixelFile.build, args=(path, 12, decode), kwargs={"workers": 1})]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == list(range(12))


@pytest.mark.parametrize("cache", ["disk", "memory"])
def test_a_changed_byte_is_noticed(files, tmp_path, cache):
    samples = stored(pictures(files), tmp_path)
    with samples.path.open("r+b") if samples.file else None as stream:
        stream.seek(5)
        byte = stream.read(1)
        stream.seek(5)
        stream.write(bytes([byte[0] ^ 1]))
    again = stored(pictures(files), tmp_path, cache=cache)
    with pytest.raises(ValueError, match=r"picture 0 in .* is damaged; remove the file"):
        again[0]


def test_a_file_cut_short_is_made_anew(files, tmp_path):
    samples = stored(pictures(files), tmp_path)
    whole = samples.file.path.read_bytes()
    samples.path.write_bytes(whole[:-7])
    assert np.array_equal(np.asarray(stored(pictures(files), tmp_path)[11]), np.asarray(samples[11]))
    assert samples.path.read_bytes() == whole


def test_another_picture_is_another_file(files, tmp_path):
    first = stored(pictures(files), tmp_path)
    os.utime(files / "03.png", ns=(1, 1))
    assert stored(pictures(files), tmp_path).path != first.path


def test_broken_pictures(files, tmp_path):
    (files / "04.png").write_bytes(b"no picture")
    with pytest.raises(CorruptImageError, match=r"04\.png cannot be read"):
        stored(pictures(files), tmp_path)[0]
    samples = pictures(files, on_corrupt="skip")
    found = stored(samples, tmp_path)
    with pytest.warns(UserWarning, match=r"04\.png"):
        assert found.genuine(4) is None
    assert found.corrupt == {4}
    for transform in (shrunk(), shrunk(train=False)):
        for substitutes in (True, False):
            want = View(samples, transform, substitutes=substitutes).__getitems__(KEYS)
            plain = View(found, transform, substitutes=substitutes).__getitems__(KEYS)
            held = View(found, transform, substitutes=substitutes, device=CPU)
            numbers, labels, indices = held.__getitems__(KEYS)
            assert torch.equal(plain[0], want[0])
            assert torch.equal(indices, want[2])
            assert torch.equal(labels, want[1])
            assert (held.render(numbers, indices, CPU) - want[0]).abs().mean() < 0.05
    for name in ("03.png", "05.png"):
        (files / name).write_bytes(b"no picture")
    with (
        pytest.warns(UserWarning, match="cannot be read"),
        pytest.raises(CorruptImageError, match="no image of the class '1' can be read"),
    ):
        stored(pictures(files, on_corrupt="skip"), tmp_path)[3]


def test_a_full_disk_is_one_sentence(files, tmp_path, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(_pixel_file.os, "fsync", full)
    with pytest.raises(OSError, match=r"cannot be written \(No space left on device\); make room, name another folder"):
        stored(pictures(files), tmp_path)[0]


def test_a_side_that_nobody_reads_is_not_decoded(files, tmp_path):
    one, other = pictures(files), pictures(files)
    data = cache_data(DataSet("files", one, other), shrunk(), "disk", folder=tmp_path / "cache")
    assert data.train[0].size == (48, 72)
    assert data.test._file is None
    assert cache_data(data, shrunk(), "disk").train is data.train  # a second time changes nothing
    assert cache_data(DataSet("files", one, other), shrunk(), "none").train is one


def test_samples_that_nobody_keeps_are_freed(files, tmp_path):
    samples = pictures(files)
    gone = weakref.ref(stored(samples, tmp_path))
    assert gone()[0].size == (48, 72)
    del samples
    gc.collect()
    assert gone() is None


def test_pictures_too_large_for_a_device(files, tmp_path, monkeypatch):
    samples = stored(pictures(files), tmp_path)
    monkeypatch.setattr(module.torch.cuda, "mem_get_info", lambda device: (samples.file.bytes, 0))
    assert samples.hold(torch.device("cuda")) is None


def test_a_run_is_the_same_with_every_cache(files, tmp_path):
    """Losses and weights, bit for bit."""
    found = []
    for cache, workers in (("none", 0), ("disk", 0), ("memory", 2), ("device", 0)):
        config = runs.config(
            data={
                "name": "folder",
                "path": "x",
                "transform": "photographs",
                "size": 16,
                "train_size": 12,
                "min_area": 0.3,
                "color": 0.2,
                "cache": cache,
                "cache_folder": str(tmp_path / "cache"),
                "workers": workers,
                "validation": 0,
            },
            model={"name": "small", "embedding_dim": 8},
            batches={"name": "MPerClass", "classes": 2, "samples": 2},
            training={"steps": 3, "evaluate_every": 3, "checkpoint_every": 3},
        )
        data = DataSet("files", pictures(files), pictures(files))
        result = fit(config, tmp_path / cache, data=data)
        losses = [line["loss"] for line in runs.journal(tmp_path / cache) if "loss" in line]
        found.append((losses, result.test.recall, runs.weights(tmp_path / cache)))
    for losses, recall, weights in found[1:]:
        assert losses == found[0][0]
        assert recall == found[0][1]
        assert all(torch.equal(weights[name], found[0][2][name]) for name in weights)


@pytest.mark.skipif(
    multiprocessing.get_start_method() != "fork", reason="workers would not inherit the test's function"
)
def test_workers_decode_the_same_file(files, tmp_path, monkeypatch):
    """Several processes write the bytes that one writes, without a draw from the global generator."""
    monkeypatch.setattr(_pixel_file, "BLOCK", 4)
    monkeypatch.setattr(_pixel_file, "TOGETHER", 8)
    samples, before = pictures(files), torch.get_rng_state()
    parents = set()

    def decode(number):
        parents.add(number)  # in a worker, this changes a copy
        return np.asarray(samples[number])

    found = [PixelFile.build(tmp_path / f"{n}.pixels", 12, decode, workers=n).path.read_bytes() for n in (2, 1)]
    assert found[0] == found[1]
    assert torch.equal(before, torch.get_rng_state())
    parents.clear()
    PixelFile.build(tmp_path / "again.pixels", 12, decode, workers=2)
    assert not parents
    assert sorted(path.suffix for path in tmp_path.glob("again*")) == [".lock", ".pixels"]


def test_an_error_of_a_worker_is_raised_as_it_is(files, tmp_path, monkeypatch):
    monkeypatch.setattr(_pixel_file, "BLOCK", 4)
    (files / "09.png").write_bytes(b"no picture")
    monkeypatch.setattr(module, "usable_cores", lambda: 2)
    with pytest.raises(CorruptImageError, match=r"^Pictures: the image \S*09\.png cannot be read"):
        stored(pictures(files), tmp_path)[0]
    samples = pictures(files, on_corrupt="skip")
    with pytest.warns(UserWarning, match=r"09\.png"):
        assert stored(samples, tmp_path).corrupt == {9}
    assert samples.corrupt == {9}
