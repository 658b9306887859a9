"""Samples, parts, views and splits: what a data set is and how a network reads it."""

import pickle
import warnings

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from nearfar.data import (
    CorruptImageError,
    CorruptImageWarning,
    Labeled,
    Pictures,
    Samples,
    Tensors,
    View,
    class_disjoint,
    collate,
    numbered,
    part,
    transforms,
)

torch.set_num_threads(1)


def pictures_in_memory(classes=6, each=4, side=12):
    x = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (classes * each, side, side), dtype=np.uint8))
    return Tensors(x, np.repeat(np.arange(classes), each))


def files(folder, classes=2, each=3):
    """Image files of one color each: the red channel tells the index."""
    paths = []
    for i in range(classes * each):
        path = folder / str(i // each) / f"{i}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (20, 20), (i, 0, 0)).save(path)
        paths.append(path)
    return paths, np.repeat(np.arange(classes), each)


# ------------------------------------------------------------------------------------------- samples


def test_all_kinds_are_samples(tmp_path):
    paths, labels = files(tmp_path)
    memory = pictures_in_memory()
    for samples in (memory, Pictures(paths, labels), Labeled(memory.x, memory.labels), part(memory, [0, 5])):
        assert isinstance(samples, Samples)
        assert len(samples) == len(samples.labels) == len(samples.names)
        assert samples.labels.dtype == np.int64
        assert samples.labels.max() + 1 == len(samples.classes)


def test_pictures_in_memory_stay_bytes():
    samples = pictures_in_memory()
    assert samples[3].dtype == torch.uint8
    assert samples.names[5] == "1/1"


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        ([0, 2, 2], "class 1 has no sample"),
        ([0, -1, 1], "-1 came"),
        ([0.0, 1.0, 1.0], "3 integers, one per sample, but came as float64"),
        ([0, 1], r"came as int64 of shape \[2\]"),
    ],
)
def test_labels_without_gaps(labels, told):
    with pytest.raises(ValueError, match=told):
        Tensors(torch.eye(3), labels)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"classes": ["a"]}, "classes must name all 2 classes, but 1"),
        ({"classes": ["a", "b", "c"]}, "class 2 has no sample"),
        ({"names": ["a"]}, "names must name all 3 samples, but 1"),
    ],
)
def test_names_fit(given, told):
    with pytest.raises(ValueError, match=told):
        Tensors(torch.eye(3), [0, 1, 1], **given)


def test_nothing_is_no_data():
    with pytest.raises(ValueError, match=r"came as \[0, 3\]"):
        Tensors(torch.zeros(0, 3), np.zeros(0, dtype=int))


def test_numbered():
    labels, classes = numbered([30, 4, 30])
    assert labels.tolist() == [1, 0, 1]
    assert classes == ("4", "30")  # in the order of the numbers, not of their digits


def test_labeled_reads_items_and_targets():
    class Set:
        targets = [1, 0]
        classes = ["cat", "dog"]

        def __len__(self):
            return 2

        def __getitem__(self, index):
            return torch.tensor([float(index)]), self.targets[index]

    samples = Labeled(Set())
    assert samples[1].tolist() == [1.0]
    assert samples.names == ["dog/0", "cat/0"]
    with pytest.raises(ValueError, match="list has neither targets nor labels"):
        Labeled([1, 2])


def test_part_renumbers_and_keeps_names(tmp_path):
    paths, labels = files(tmp_path, classes=3, each=2)
    memory = Tensors(torch.arange(6.0)[:, None], labels, [f"n{i}" for i in range(6)], ("a", "b", "c"))
    for whole in (memory, Labeled(memory.x, labels, memory.names, memory.classes)):
        chosen = part(whole, [5, 0, 4])
        assert chosen.labels.tolist() == [1, 0, 1]
        assert chosen.classes == ("a", "c")
        assert list(chosen.names) == ["n5", "n0", "n4"]
        assert [float(chosen[i]) for i in range(3)] == [5.0, 0.0, 4.0]
    again = part(part(Pictures(paths, labels), [5, 0, 4]), [2])
    assert again[0].getpixel((0, 0)) == (4, 0, 0)
    for wrong, told in (([], "none came"), ([6], "0..5, but came as 6 to 6"), ([-1], "came as -1")):
        with pytest.raises(ValueError, match=told):
            part(memory, wrong)


# ------------------------------------------------------------------------------------------- images


def test_a_corrupt_image_is_named(tmp_path):
    paths, labels = files(tmp_path)
    paths[1].write_bytes(paths[1].read_bytes()[:40])
    samples = Pictures(paths, labels)
    assert samples[0].mode == "RGB"
    with pytest.raises(CorruptImageError, match=r"0/1\.png cannot be read") as caught:
        samples[1]
    assert caught.value.__cause__ is None
    with pytest.raises(ValueError, match="on_corrupt must be one of 'stop', 'skip'"):
        Pictures(paths, labels, on_corrupt="ignore")


@pytest.mark.parametrize("damage", [b"", b"no image", None])
def test_skipping_takes_another_of_the_class_and_says_so(tmp_path, damage):
    paths, labels = files(tmp_path)
    for path in (paths[2], paths[4]):
        path.unlink()
        if damage is not None:
            path.write_bytes(damage)
    samples = Pictures(paths, labels, on_corrupt="skip")
    with pytest.warns(CorruptImageWarning, match=r"0/2\.png cannot be read"):
        stand_in = samples[2]
    assert stand_in.getpixel((0, 0)) == (0, 0, 0)  # around the end of its class
    assert samples[4].getpixel((0, 0)) == (5, 0, 0)  # and not a second warning, which would be an error here
    assert samples[2].getpixel((0, 0)) == (0, 0, 0)
    assert samples.corrupt == {2, 4}


def test_a_class_without_readable_image_stops(tmp_path):
    paths, labels = files(tmp_path)
    for path in paths[3:]:
        path.write_bytes(b"")
    samples = Pictures(paths, labels, classes=("ant", "bee"), on_corrupt="skip")
    with pytest.warns(CorruptImageWarning), pytest.raises(CorruptImageError, match="no image of the class 'bee'"):
        samples[4]
    assert samples.corrupt == {3, 4, 5}


# ------------------------------------------------------------------------------------------- views


def test_view_gives_tensor_label_and_index():
    samples = pictures_in_memory()
    view = View(samples, transforms.get("none", train=True))
    x, label, index = view[7]
    assert x.shape == (1, 12, 12)
    assert (label, index) == (1, 7)
    torch.testing.assert_close(x[0] * 255, samples.x[7].float())
    assert view[(7, 3)][1:] == (1, 7)


def test_draws_depend_on_seed_draw_and_index_alone():
    samples = pictures_in_memory()
    moved = transforms.get("glyphs", train=True)
    view = View(samples, moved, seed=3)
    assert torch.equal(view[(4, 2)][0], View(samples, moved, seed=3)[(4, 2)][0])
    for other in (view[(4, 1)][0], View(samples, moved, seed=4)[(4, 2)][0], view[4][0]):
        assert not torch.equal(view[(4, 2)][0], other)
    same = Tensors(samples.x[:1].repeat(2, 1, 1), [0, 0])
    assert not torch.equal(View(same, moved)[0][0], View(same, moved)[1][0])


@pytest.mark.parametrize("name", ["none", "glyphs"])
def test_batches_equal_single_samples(name):
    samples = pictures_in_memory()
    transform = transforms.get(name, train=True, mean=(0.2,), std=(0.5,))
    keys = [(3, 1), (0, 1), (23, 2), (3, 5)]
    slow = View(Labeled(samples.x, samples.labels), transform, seed=1)  # nothing in memory, so one at a time
    for view in (View(samples, transform, seed=1), slow):
        x, labels, index = view.__getitems__(keys)
        torch.testing.assert_close(x, torch.stack([view[key][0] for key in keys]))
        assert labels.tolist() == [0, 0, 5, 0]
        assert labels.dtype == index.dtype == torch.int64
        assert index.tolist() == [3, 0, 23, 3]


def test_workers_draw_the_same():
    view = View(pictures_in_memory(), transforms.get("glyphs", train=True), seed=1)
    batches = [[(i, 9) for i in range(start, start + 6)] for start in (0, 6, 12)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons dislike forks of processes with threads
        loader = DataLoader(view, batch_sampler=batches, num_workers=2, collate_fn=collate)
        came = list(loader)
    for keys, (x, labels, index) in zip(batches, came, strict=True):
        wanted = view.__getitems__(keys)
        assert all(torch.equal(a, b) for a, b in zip(wanted, (x, labels, index), strict=True))


def test_a_view_travels_to_other_processes(tmp_path):
    paths, labels = files(tmp_path)
    for samples, name in ((pictures_in_memory(), "glyphs"), (Pictures(paths, labels), "can2019")):
        view = View(samples, transforms.get(name, train=True), seed=1)
        assert torch.equal(pickle.loads(pickle.dumps(view))[(1, 2)][0], view[(1, 2)][0])


def test_pictures_of_several_sizes_need_a_crop(tmp_path):
    for i, side in enumerate((20, 30)):
        Image.new("RGB", (side, side)).save(tmp_path / f"{i}.png")
    samples = Pictures([tmp_path / "0.png", tmp_path / "1.png"], [0, 0])
    with pytest.raises(ValueError, match=r"\[3, 20, 20\] and \[3, 30, 30\] came; choose a transform that crops"):
        View(samples, transforms.get("none", train=False)).__getitems__([0, 1])


# ------------------------------------------------------------------------------------------- splits


def test_class_disjoint():
    samples = pictures_in_memory(classes=10)
    rest, held = class_disjoint(samples, 0.3, seed=5)
    assert sorted(np.concatenate([rest, held]).tolist()) == list(range(40))
    assert not set(samples.labels[rest]) & set(samples.labels[held])
    assert len(set(samples.labels[held])) == 3
    again = class_disjoint(samples, 0.3, seed=5)
    assert all(np.array_equal(a, b) for a, b in zip((rest, held), again, strict=True))
    assert not np.array_equal(held, class_disjoint(samples, 0.3, seed=6)[1])


@pytest.mark.parametrize("share", [0.001, 0.999])
def test_no_side_is_empty(share):
    assert all(len(side) for side in class_disjoint(pictures_in_memory(), share, seed=0))


def test_splits_refuse_the_impossible():
    with pytest.raises(ValueError, match="share must lie between 0 and 1"):
        class_disjoint(pictures_in_memory(), 1.0, seed=0)
    with pytest.raises(ValueError, match="needs two classes or more"):
        class_disjoint(pictures_in_memory(classes=1), 0.5, seed=0)
