"""The benchmarks' readers on small replicas of their official layouts, and CUB and Omniglot where they are at hand."""

import io
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from nearfar.data import CorruptImageError, DataSet, Tensors, cars, cub, flowers, inshop, open_data, sop

DATA = Path(__file__).parents[2] / ".." / "shared" / "data"


def at_hand(name):
    if not (DATA / name).is_file():
        pytest.skip(f"the data file {name} is not at ../shared/data beside the repository")
    return DATA


def image(path, color=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (color, 0, 0)).save(path)


@pytest.fixture
def birds(tmp_path):
    """Two images of each of the classes 99, 100, 101 and 200."""
    numbers = (99, 100, 101, 200)
    images = [(f"{n:03d}.Bird_{n}/Bird_{i}.jpg", n) for n in numbers for i in range(2)]
    for name, number in images:
        image(tmp_path / "images" / name, number)
    (tmp_path / "images.txt").write_text(
        "".join(f"{i} {name}\n" for i, (name, _) in enumerate(images, 1)), encoding="utf-8"
    )
    (tmp_path / "image_class_labels.txt").write_text(
        "".join(f"{i} {n}\n" for i, (_, n) in enumerate(images, 1)), encoding="utf-8"
    )
    (tmp_path / "classes.txt").write_text("".join(f"{n} {n:03d}.Bird_{n}\n" for n in numbers), encoding="utf-8")
    return tmp_path


@pytest.fixture
def shards(tmp_path):
    """The same in two tar archives with a table."""
    rows = ["filename,class_id,class_name,official_split,width,height"]
    for shard, numbers in enumerate(((99, 100), (101, 200))):
        with tarfile.open(tmp_path / f"cub200_full-0{shard}.tar", "w") as archive:
            for number in numbers:
                stream = io.BytesIO()
                Image.new("RGB", (8, 8), (number, 0, 0)).save(stream, "WEBP", lossless=True)
                entry = tarfile.TarInfo(f"{number:03d}/bird.webp")
                entry.size = stream.tell()
                stream.seek(0)
                archive.addfile(entry, stream)
                rows.append(f"{entry.name},{number},{number:03d}.Bird_{number},train,8,8")
    (tmp_path / "cub200_full_labels.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return tmp_path


@pytest.fixture
def blossoms(tmp_path):
    """Flowers as published: pictures numbered from 1, and their classes in a .mat file."""
    numbers = [1, 51, 51, 52, 102]
    for place, number in enumerate(numbers, start=1):
        image(tmp_path / "jpg" / f"image_{place:05d}.jpg", number)
    savemat(tmp_path / "imagelabels.mat", {"labels": np.array([numbers], dtype=np.uint8)})
    return tmp_path


@pytest.fixture
def flower_shards(tmp_path):
    """The same in two tar archives with a table."""
    rows = ["name,label"]
    for shard, numbers in enumerate(((1, 51, 51), (52, 102))):
        with tarfile.open(tmp_path / f"flowers102-0{shard}.tar", "w") as archive:
            for place, number in enumerate(numbers):
                stream = io.BytesIO()
                Image.new("RGB", (8, 8), (number, 0, 0)).save(stream, "WEBP", lossless=True)
                entry = tarfile.TarInfo(f"{number:03d}/image_{place}.webp")
                entry.size = stream.tell()
                stream.seek(0)
                archive.addfile(entry, stream)
                rows.append(f"{entry.name},{number}")
    (tmp_path / "flowers102_labels.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return tmp_path


@pytest.fixture
def vehicles(tmp_path):
    numbers = [1, 98, 98, 99, 196]
    names = [f"car_ims/{i:06d}.jpg" for i in range(1, len(numbers) + 1)]
    for name, number in zip(names, numbers, strict=True):
        image(tmp_path / name, number)
    kind = [("relative_im_path", object), ("bbox_x1", object), ("class", object), ("test", object)]
    table = np.zeros((1, len(numbers)), dtype=kind)
    for i, (name, number) in enumerate(zip(names, numbers, strict=True)):
        table[0, i] = (name, 1, number, 0)
    words = np.array([[f"Car {n}" for n in range(1, 197)]], dtype=object)
    savemat(tmp_path / "cars_annos.mat", {"annotations": table, "class_names": words})
    return tmp_path


@pytest.fixture
def products(tmp_path):
    number = 0
    for side, classes in (("train", (1, 2)), ("test", (11319, 11320, 11321))):
        rows = ["image_id class_id super_class_id path"]
        for label in classes:
            for i in range(2):
                number += 1
                rows.append(f"{number} {label} 1 bicycle_final/{label}_{i}.JPG")
                (tmp_path / "bicycle_final").mkdir(exist_ok=True)
                Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / "bicycle_final" / f"{label}_{i}.JPG", "JPEG")
        (tmp_path / f"Ebay_{side}.txt").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return tmp_path


SHOP = (
    ("img/WOMEN/Dresses/id_00000002/02_1_front.jpg", "id_00000002", "train"),
    ("img/WOMEN/Dresses/id_00000002/02_2_side.jpg", "id_00000002", "train"),
    ("img/MEN/Denim/id_00000008/01_1_front.jpg", "id_00000008", "gallery"),
    ("img/MEN/Denim/id_00000007/01_1_front.jpg", "id_00000007", "query"),
    ("img/MEN/Denim/id_00000008/01_2_side.jpg", "id_00000008", "query"),
    ("img/MEN/Denim/id_00000007/01_2_side.jpg", "id_00000007", "gallery"),
    ("img/MEN/Denim/id_00000007/01_3_back.jpg", "id_00000007", "gallery"),
)


def shop(folder, rows=SHOP, place="Eval"):
    for i, (name, _, _) in enumerate(rows):
        image(folder / name, i)
    (folder / place).mkdir(exist_ok=True)
    lines = [str(len(rows)), "image_name item_id evaluation_status", *("   ".join(row) for row in rows)]
    (folder / place / "list_eval_partition.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


# ------------------------------------------------------------------------------------------- splits


@pytest.mark.parametrize("layout", ["birds", "shards"])
def test_cub(layout, request):
    data = cub(request.getfixturevalue(layout), check=False)
    assert data.train.classes == ("099.Bird_99", "100.Bird_100")
    assert data.test.classes == ("101.Bird_101", "200.Bird_200")
    assert data.test.labels.max() == 1
    assert abs(data.test[len(data.test) - 1].getpixel((0, 0))[0] - 200) <= 3
    assert data.ks == (1, 2, 4, 8, 16, 32)


@pytest.mark.parametrize("layout", ["blossoms", "flower_shards"])
def test_flowers(layout, request):
    data = flowers(request.getfixturevalue(layout), check=False)
    assert (data.name, data.ks) == ("flowers", (1, 2, 4, 8))
    assert [int(name) for name in data.train.classes] == [1, 51]
    assert data.test.classes == ("052", "102")
    assert data.train.labels.tolist() == [0, 1, 1]
    assert abs(data.test[1].getpixel((0, 0))[0] - 102) <= 3


def test_flowers_whose_labels_cannot_be_read(blossoms):
    (blossoms / "imagelabels.mat").write_bytes(b"no such file")
    with pytest.raises(ValueError, match=r"flowers: .*imagelabels\.mat must hold labels"):
        flowers(blossoms)


def test_flowers_at_hand():
    data = open_data("flowers", at_hand("flowers102_labels.csv"))
    assert (len(data.train), len(data.test)) == (3493, 4696)
    assert not set(data.train.classes) & set(data.test.classes)
    assert min(data.test[4695].size) == 256


def test_cars(vehicles):
    data = cars(vehicles, check=False)
    assert data.train.classes == ("Car 1", "Car 98")
    assert data.test.classes == ("Car 99", "Car 196")
    assert data.train.labels.tolist() == [0, 1, 1]
    assert data.train.names[2] == "car_ims/000003.jpg"
    assert abs(data.test[0].getpixel((0, 0))[0] - 99) <= 3
    assert data.ks == (1, 2, 4, 8, 16, 32)


def test_sop(products):
    data = sop(products, check=False)
    assert data.train.labels.tolist() == [0, 0, 1, 1]
    assert data.test.classes == ("11319", "11320", "11321")
    assert data.test.names[0] == "bicycle_final/11319_0.JPG"
    assert data.ks == (1, 10, 100, 1000)


@pytest.mark.parametrize("place", ["Eval", "."])
def test_inshop_queries_and_gallery_share_their_labels(tmp_path, place):
    data = inshop(shop(tmp_path, place=place), check=False)
    assert len(data.train) == 2
    assert data.gallery is not None
    assert data.test.classes == data.gallery.classes == ("id_00000007", "id_00000008")
    assert data.test.labels.tolist() == [0, 1]
    assert data.gallery.labels.tolist() == [1, 0, 0]
    assert data.ks == (1, 10, 20, 30, 40, 50)


@pytest.mark.parametrize(
    ("name", "layout", "told"),
    [
        ("cub", "birds", "5,864 images of 100 classes, but 4 of 2 were found"),
        ("cub", "shards", "5,864 images of 100 classes, but 2 of 2 were found"),
        ("flowers", "blossoms", "3,493 images of 51 classes, but 3 of 2 were found"),
        ("flowers", "flower_shards", "3,493 images of 51 classes, but 3 of 2 were found"),
        ("cars", "vehicles", "8,054 images of 98 classes, but 3 of 2 were found"),
        ("sop", "products", "59,551 images of 11,318 classes, but 4 of 2 were found"),
    ],
)
def test_counts_are_checked(name, layout, told, request):
    with pytest.raises(ValueError, match=told):
        open_data(name, request.getfixturevalue(layout))


def test_inshop_counts_are_checked(tmp_path):
    with pytest.raises(ValueError, match="25,882 images of 3,997 classes, but 2 of 1 were found"):
        open_data("inshop", shop(tmp_path))


# ------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("cub", "images.txt"),
        ("flowers", "imagelabels.mat"),
        ("cars", "cars_annos.mat"),
        ("sop", "Ebay_train.txt"),
        ("inshop", "list_eval_partition.txt"),
        ("omniglot", "omniglot_28.npz"),
    ],
)
def test_a_missing_list_is_named(tmp_path, name, file):
    with pytest.raises(FileNotFoundError, match=f"{name}: there is no file .*{file}"):
        open_data(name, tmp_path)


@pytest.mark.parametrize(
    ("read", "layout", "folder", "count"),
    [
        (cub, "birds", "images", 8),
        (flowers, "blossoms", "jpg", 5),
        (cars, "vehicles", "car_ims", 5),
        (sop, "products", "bicycle_final", 4),
    ],
)
def test_missing_images_are_counted(read, layout, folder, count, request):
    path = request.getfixturevalue(layout)
    shutil.rmtree(path / folder)
    with pytest.raises(FileNotFoundError, match=f"{count} of {count} images are missing, the first is"):
        read(path, check=False)


def test_a_missing_archive_is_told(shards):
    (shards / "cub200_full-01.tar").unlink()
    with pytest.raises(FileNotFoundError, match=r"2 of 4 images are in none of the archives .*101/bird\.webp"):
        cub(shards, check=False)


def test_a_corrupt_member_is_named(shards):
    archive = shards / "cub200_full-00.tar"
    archive.write_bytes(archive.read_bytes().replace(b"WEBP", b"WASP", 1))
    with pytest.raises(CorruptImageError, match=r"cub200_full-00\.tar:099/bird\.webp cannot be read"):
        cub(shards, check=False).train[0]


def test_broken_lists(birds):
    (birds / "image_class_labels.txt").write_text("1 99\n2 99\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"gives no class for 100\.Bird_100/Bird_0\.jpg"):
        cub(birds)
    for word in ("1.5", "-1", "٣", "1" * 19, "a"):
        (birds / "image_class_labels.txt").write_text(f"1 {word}\n", encoding="utf-8")
        with pytest.raises(ValueError, match=r"labels\.txt must have whole numbers for classes, but .* came"):
            cub(birds)
    (birds / "images.txt").write_text("1 a.jpg\n2\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"line 2 of .*images\.txt must hold 2 words, but holds 1"):
        cub(birds)
    (birds / "images.txt").write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match="holds no rows"):
        cub(birds)


def test_broken_annotations(vehicles):
    savemat(vehicles / "cars_annos.mat", {"annotations": np.zeros(3)})
    with pytest.raises(ValueError, match="must hold annotations"):
        cars(vehicles)
    for wrong in (b"", b"no mat file, but long enough to be read as one" * 9):
        (vehicles / "cars_annos.mat").write_bytes(wrong)
        with pytest.raises(ValueError, match="must hold annotations"):
            cars(vehicles)


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([row for row in SHOP if row[2] != "gallery"], "each must occur, but that fails for gallery"),
        ([*SHOP, ("img/x.jpg", "id_1", "valid")], "fails for valid"),
        ([*SHOP, ("img/x.jpg", "id_1", "query")], "1 are on one side only, such as id_1"),
    ],
)
def test_broken_partitions(tmp_path, rows, told):
    with pytest.raises(ValueError, match=told):
        inshop(shop(tmp_path, rows), check=False)


def test_one_side_alone_is_told(birds):
    (birds / "image_class_labels.txt").write_text("".join(f"{i} 5\n" for i in range(1, 9)), encoding="utf-8")
    with pytest.raises(ValueError, match=r"no image is for test \(classes above 100\)"):
        cub(birds, check=False)


# ---------------------------------------------------------------------------------------- omniglot


def test_omniglot_replica(tmp_path):
    drawings = np.zeros((4, 28, 28), dtype=np.uint8)
    drawings[1, 3, 5] = 1
    arrays = {
        "images": np.packbits(drawings.reshape(4, -1), axis=1),
        "labels": np.array([0, 1, 1, 2], dtype=np.int16),
        "class_names": np.array(["a/1", "b/1", "b/2"]),
        "background": np.array([False, True, False]),
    }
    np.savez(tmp_path / "omniglot_28.npz", **arrays)
    data = open_data("omniglot", tmp_path)
    assert data.train.classes == ("b/1",)
    assert data.test.classes == ("a/1", "b/2")
    assert isinstance(data.train, Tensors)
    assert data.train.x.nonzero().tolist() == [[0, 3, 5]]
    assert data.train.x.max() == 255
    del arrays["background"]
    np.savez(tmp_path / "omniglot_28.npz", **arrays)
    with pytest.raises(ValueError, match="lacks background"):
        open_data("omniglot", tmp_path)


# --------------------------------------------------------------------------------- where it is at hand


def test_real_omniglot():
    data = open_data("omniglot", at_hand("omniglot_28.npz"))
    assert (len(data.train), len(data.train.classes)) == (964 * 20, 964)
    assert (len(data.test), len(data.test.classes)) == (659 * 20, 659)


def test_real_cub():
    data: DataSet = open_data("cub", at_hand("cub200_full_labels.csv"))
    assert (len(data.train), len(data.test)) == (5864, 5924)
    for index in (0, 3000, 5923):
        assert min(data.test[index].size) <= 256
        assert data.test.names[index].startswith(data.test.classes[data.test.labels[index]][:3])
