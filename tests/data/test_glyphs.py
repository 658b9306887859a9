"""The embedded data set: its rule, its determinism and its cache."""

import importlib
import os
import subprocess
import sys
import unicodedata
import warnings
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from forks import start

from nearfar._utils.files import check_seal
from nearfar.data import Glyphs, Split, glyphs

# The package attribute of the same name is the function, so the modules are fetched by name.
module = importlib.import_module("nearfar.data._glyphs")
cache = importlib.import_module("nearfar.data._cache")

SCRIPTS = {"GREEK", "CYRILLIC", "ARMENIAN", "GEORGIAN"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("glyphs")


@pytest.fixture(scope="module")
def data(folder: Path) -> Glyphs:
    return glyphs(cache=folder, progress=False)


@pytest.fixture
def drawn(data: Glyphs, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Replace the drawing by the arrays already drawn; the list grows by one at each call."""
    (stored,) = folder.glob("*.npz")
    with np.load(stored) as archive:
        arrays = dict(archive)
    calls: list[bool] = []

    def draw(_fonts: object, progress: bool) -> dict[str, np.ndarray]:
        calls.append(progress)
        return arrays

    monkeypatch.setattr(module, "_draw", draw)
    return calls


def character(split: Split, char: str) -> dict[int, np.ndarray]:
    """The pictures of one character by face."""
    label = next(i for i, name in enumerate(split.names) if name.startswith(f"U+{ord(char):04X} "))
    rows = split.labels == label
    return dict(zip(split.faces[rows].tolist(), split.images[rows].numpy(), strict=True))


def code(name: str) -> int:
    return int(name.split()[0].removeprefix("U+"), 16)


def same_data(first: Glyphs, second: Glyphs) -> bool:
    return all(
        a.names == b.names
        and torch.equal(a.images, b.images)
        and torch.equal(a.labels, b.labels)
        and torch.equal(a.faces, b.faces)
        for a, b in ((first.train, second.train), (first.test, second.test))
    )


# ---------------------------------------------------------------------------------------- what is in it


def test_counts(data: Glyphs) -> None:
    assert (len(data.train.names), len(data.train.labels)) == (1621, 22421)
    assert (len(data.test.names), len(data.test.labels)) == (524, 6808)
    assert len(data.faces) == len(set(data.faces)) == 20


@pytest.mark.parametrize("side", ["train", "test"])
def test_shapes_and_types(data: Glyphs, side: str) -> None:
    split: Split = getattr(data, side)
    n = len(split.labels)
    assert split.images.shape == (n, 32, 32)
    assert split.images.dtype == torch.uint8
    assert split.faces.shape == split.labels.shape == (n,)
    assert split.faces.dtype == split.labels.dtype == torch.int64
    assert split.labels.unique().tolist() == list(range(len(split.names)))
    assert split.faces.min() >= 0
    assert split.faces.max() < len(data.faces)


@pytest.mark.parametrize("side", ["train", "test"])
def test_each_class_has_twelve_faces_or_more_and_each_face_once(data: Glyphs, side: str) -> None:
    split: Split = getattr(data, side)
    assert split.labels.bincount().min() >= 12
    assert len(set(zip(split.labels.tolist(), split.faces.tolist(), strict=True))) == len(split.labels)


@pytest.mark.parametrize("side", ["train", "test"])
def test_no_picture_is_blank_and_all_are_antialiased(data: Glyphs, side: str) -> None:
    images = getattr(data, side).images
    assert images.flatten(1).amax(1).min() >= 64
    assert ((images > 0) & (images < 255)).float().mean() > 0.05


def test_test_scripts_never_occur_in_training(data: Glyphs) -> None:
    assert all(SCRIPTS.isdisjoint(name.split()) for name in data.train.names)
    assert all(not SCRIPTS.isdisjoint(name.split()) for name in data.test.names)
    found = Counter(word for name in data.test.names for word in name.split() if word in SCRIPTS)
    assert found == {"GREEK": 280, "CYRILLIC": 122, "ARMENIAN": 77, "GEORGIAN": 45}


def test_names_and_order(data: Glyphs) -> None:
    assert "U+0041 LATIN CAPITAL LETTER A" in data.train.names
    assert "U+03C9 GREEK SMALL LETTER OMEGA" in data.test.names
    for split in (data.train, data.test):
        codes = [code(name) for name in split.names]
        assert codes == sorted(set(codes))
        assert {unicodedata.category(chr(c))[0] for c in codes} <= set("LNPS")


def test_polytonic_greek_stays(data: Glyphs) -> None:
    names = " ".join(data.test.names)
    for char in "ἀἁἂἃἄἅἆἇᾀᾁὠὡᾠᾡᾦᾧἈἉᾈᾉ":
        assert f"U+{ord(char):04X} " in names


# ------------------------------------------------------------------------------------------ look-alikes


def test_no_two_classes_show_the_same_picture_in_half_of_their_faces(data: Glyphs) -> None:
    faces: dict[str, set[int]] = defaultdict(set)
    owners: dict[tuple[int, bytes], list[str]] = defaultdict(list)
    for split in (data.train, data.test):
        for image, label, face in zip(split.images.numpy(), split.labels.tolist(), split.faces.tolist(), strict=True):
            faces[split.names[label]].add(face)
            owners[face, image.tobytes()].append(split.names[label])
    equal = Counter(
        (first, second) for names in owners.values() for i, first in enumerate(names) for second in names[i + 1 :]
    )
    assert equal, "some pairs do coincide in a minority of faces, such as italic Cyrillic and Latin"
    for (first, second), times in equal.items():
        assert 2 * times < len(faces[first] & faces[second]), (first, second)


@pytest.mark.parametrize(
    ("kept", "dropped"), [("A", "ΑА"), ("o", "οоօ"), ("Γ", "Г"), ("Ω", "\u2126"), ("è", "ѐ"), ("Ð", "ĐƉ")]
)
def test_of_look_alikes_the_lowest_code_point_stays(data: Glyphs, kept: str, dropped: str) -> None:
    codes = {code(name) for name in data.train.names + data.test.names}
    assert ord(kept) in codes
    assert codes.isdisjoint(map(ord, dropped))


def test_near_pictures_count_as_look_alikes_and_the_split_widens_the_limit() -> None:
    base = np.zeros((1, 3, 32, 32), dtype=np.uint8)
    base[:, :, 4:28, 4:28] = 200
    base[:, 1, 10, 10] = 200 - 63  # within a quarter of 255
    base[:, 2, 10, 10] = 200 - 127  # within a half, and 64 from its neighbor
    there = np.ones((1, 3), dtype=np.bool_)
    keep = module._without_look_alikes
    one_side = np.zeros(3, dtype=np.bool_)
    assert keep(base, there, one_side).tolist() == [True, False, True]
    assert keep(base, there, np.array([False, False, True])).tolist() == [True, False, False]


@pytest.mark.parametrize(("more", "kept"), [(0, [True, False]), (1, [True, True])])
def test_near_pictures_differ_by_a_tenth_of_the_larger_at_most(more: int, kept: list[bool]) -> None:
    pictures = np.full((1, 2, 1024), 100, dtype=np.uint8)
    pictures[:, :, 1000:] = 0
    pictures[:, 1, :400] -= 50  # 400 * 50 ** 2 is a tenth of 1000 * 100 ** 2
    pictures[:, 1, 400] -= more
    there, test = np.ones((1, 2), dtype=np.bool_), np.zeros(2, dtype=np.bool_)
    assert module._without_look_alikes(pictures.reshape(1, 2, 32, 32), there, test).tolist() == kept


def test_look_alikes_in_a_minority_of_faces_is_kept() -> None:
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (5, 2, 32, 32), dtype=np.uint8)
    there = np.ones((5, 2), dtype=np.bool_)
    test = np.zeros(2, dtype=np.bool_)
    pictures[:2, 1] = pictures[:2, 0]
    assert module._without_look_alikes(pictures, there, test).tolist() == [True, True]
    there[4, 1] = False  # now two of the four shared faces
    assert module._without_look_alikes(pictures, there, test).tolist() == [True, False]


def test_misdrawn_and_wrongly_encoded_pictures_are_left_out(data: Glyphs) -> None:
    modern = [i for i, face in enumerate(data.faces) if face.startswith("cm")]
    assert set(modern) <= set(character(data.train, "A"))
    assert set(modern).isdisjoint(character(data.train, "<"))  # Computer Modern shows an inverted "!" there
    codes = {code(name) for name in data.train.names + data.test.names}
    assert codes.isdisjoint({0x04CB, 0x04F6, 0x1D41})  # one face of twelve shows a neighbor: 11 remain
    assert codes.isdisjoint({0x2031})  # wider than the frame


# -------------------------------------------------------------------------------------------- pictures


@pytest.mark.parametrize(
    ("side", "pair"),
    [("train", p) for p in ("Oo", "Ss", "Vv", "Ww", "Xx")] + [("test", p) for p in ("Жж", "Юю", "Ψψ", "Φφ")],
)
def test_upper_and_lower_case_differ(data: Glyphs, side: str, pair: str) -> None:
    upper, lower = (character(getattr(data, side), char) for char in pair)
    for face in upper.keys() & lower.keys():
        assert not np.array_equal(upper[face], lower[face])
        if pair.isascii():  # the same shape, so the size must tell them apart
            heights = [np.flatnonzero(p[face].max(axis=1) > 64).size for p in (upper, lower)]
            assert heights[0] >= heights[1] + 3


def test_letters_of_a_face_stand_on_one_baseline(data: Glyphs) -> None:
    rows = {
        int(np.flatnonzero(picture.max(axis=1) > 64)[-1])
        for char in "HTx"
        for picture in character(data.train, char).values()
    }
    assert rows == {24}  # 1.07 ems below the top, at 22.9 pixels an em, lies in this row


def test_nothing_is_cut_off(data: Glyphs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame twice as large, at the same scale, must hold no more ink."""
    from matplotlib.ft2font import FT2Font

    face = module.FACES.index("DejaVuSerif-BoldItalic")
    font = FT2Font(str(module._fonts()[face]))
    chars = module._charmap(font, module.FACES[face])
    split = data.test
    rows = torch.nonzero(split.faces == face)[:, 0].tolist()
    codes = np.array([code(split.names[int(split.labels[row])]) for row in rows])
    monkeypatch.setattr(module, "SIZE", 64)
    monkeypatch.setattr(module, "BOTTOM", module.BOTTOM - 0.7)
    monkeypatch.setattr(module, "TOP", module.TOP + 0.7)
    large = np.zeros((len(codes), 64, 64), dtype=np.uint8)
    module._draw_face(font, chars, codes, large)
    ink = split.images[rows].flatten(1).sum(1).double()
    # the step moves by part of a pixel, which costs rounding: not more than a fiftieth of the ink
    np.testing.assert_allclose(large.sum(axis=(1, 2)), ink.numpy(), rtol=0.02)


def test_raw_pixels_find_a_third_of_the_neighbors(data: Glyphs) -> None:
    pixels = torch.nn.functional.normalize(data.test.images.flatten(1).float())
    scores = pixels @ pixels.T
    scores.fill_diagonal_(-1.0)
    recall = (data.test.labels[scores.argmax(1)] == data.test.labels).float().mean().item()
    assert 0.380 <= recall <= 0.392  # 38.6 per cent


# -------------------------------------------------------------------------------- determinism and cache


def test_another_process_draws_the_same_bytes(data: Glyphs, folder: Path, tmp_path: Path) -> None:
    program = "import sys; from nearfar.data import glyphs; glyphs(cache=sys.argv[1], progress=False)"
    environment = os.environ | {"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], env=environment, capture_output=True, encoding="utf-8"
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == run.stderr == ""  # no bar where none is wanted
    (first,), (second,) = folder.glob("*"), tmp_path.glob("*")
    assert first.name == second.name
    assert first.read_bytes() == second.read_bytes()


def test_the_file_is_sealed_and_its_name_carries_what_the_data_depends_on(data: Glyphs, folder: Path) -> None:
    import matplotlib

    (stored,) = folder.glob("*")
    check_seal("test", stored, needed=True)
    assert stored.name.startswith(f"glyphs-{module.FORMAT}-matplotlib-{matplotlib.__version__}-")


def test_a_changed_font_changes_the_name(tmp_path: Path) -> None:
    fonts = [tmp_path / "a.ttf", tmp_path / "b.ttf"]
    for font in fonts:
        font.write_bytes(b"outlines")
    before = module._stem(fonts)
    fonts[1].write_bytes(b"outline")
    assert module._stem(fonts) != before


def test_second_call_reads_the_cache(data: Glyphs, folder: Path, drawn: list[bool]) -> None:
    assert same_data(glyphs(cache=str(folder)), data)
    assert drawn == []


@pytest.mark.parametrize("damage", ["flipped", "truncated", "empty"])
def test_broken_cache_file_is_made_again_with_one_warning(
    data: Glyphs, folder: Path, tmp_path: Path, drawn: list[bool], damage: str
) -> None:
    (good,) = folder.glob("*")
    payload = bytearray(good.read_bytes())
    if damage == "flipped":
        payload[len(payload) // 2] ^= 1
    broken = tmp_path / good.name
    broken.write_bytes({"flipped": payload, "truncated": payload[:-1], "empty": b""}[damage])
    with pytest.warns(UserWarning, match="does not match its seal") as caught:
        again = glyphs(cache=tmp_path)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert same_data(again, data)
    assert [path.name for path in tmp_path.iterdir()] == [good.name]
    assert broken.read_bytes() == good.read_bytes()
    glyphs(cache=tmp_path)  # sound again: no warning, which would be an error here
    assert len(drawn) == 1


def test_unwritable_folder_costs_one_warning_and_not_the_data(data: Glyphs, tmp_path: Path, drawn: list[bool]) -> None:
    (tmp_path / "file").write_text("a regular file", encoding="utf-8")
    with pytest.warns(UserWarning, match="could not be written") as caught:
        result = glyphs(cache=tmp_path / "file" / "below")
    assert len(caught) == 1
    assert caught[0].filename == __file__
    message = str(caught[0].message)
    assert message.count(". ") == 0
    assert message.endswith(".")
    assert same_data(result, data)


@pytest.mark.parametrize("call", ["replace", "fsync"])
def test_failed_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.warns(UserWarning, match="No space left on device") as caught:
        result = cache.load_or_make(tmp_path, "stem", lambda: {"x": np.arange(3)})
    assert len(caught) == 1
    assert result["x"].tolist() == [0, 1, 2]
    assert list(tmp_path.iterdir()) == []


def test_no_reader_ever_sees_half_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Just before the rename the folder holds no file that a reader would take for data."""
    seen: list[list[Path]] = []
    replace = os.replace

    def spy(source: Path, target: Path) -> None:
        assert Path(source).parent == Path(target).parent == tmp_path
        seen.append(list(tmp_path.glob("*.npz")))
        replace(source, target)

    monkeypatch.setattr(os, "replace", spy)
    cache.load_or_make(tmp_path, "stem", lambda: {"x": np.arange(3)})
    assert seen == [[]]
    assert [path.name for path in tmp_path.iterdir()] == ["stem.npz"]


def test_processes_that_draw_at_once_share_one_sound_file(tmp_path: Path) -> None:
    program = (
        "import sys, time, warnings, numpy as np; from pathlib import Path; from nearfar.data import _cache\n"
        "warnings.simplefilter('error')\n"
        "def make():\n    time.sleep(0.5); return {'x': np.arange(200_000)}\n"
        "assert _cache.load_or_make(Path(sys.argv[1]), 'stem', make)['x'].sum() == 19_999_900_000"
    )
    runs = [start(program, str(tmp_path)) for _ in range(2)]
    said = [run.communicate(timeout=60) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], said
    (stored,) = tmp_path.iterdir()
    assert stored.name == "stem.npz"
    check_seal("test", stored, needed=True)


def test_other_stems_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "stem-2.npz").write_bytes(b"another data set, another version")
    cache.load_or_make(tmp_path, "stem", lambda: {"x": np.arange(3)})
    assert (tmp_path / "stem-2.npz").read_bytes() == b"another data set, another version"


def test_every_flipped_bit_of_a_cache_makes_it_anew(tmp_path: Path) -> None:
    path, made = tmp_path / "stem.npz", []

    def make() -> cache.Arrays:
        made.append(True)
        return {"x": np.arange(300)}

    cache.load_or_make(tmp_path, "stem", make)
    good = path.read_bytes()
    places = range(0, len(good), 41)
    for at in places:
        path.write_bytes(good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :])
        with pytest.warns(UserWarning, match="made again"):
            assert cache.load_or_make(tmp_path, "stem", make)["x"].tolist() == list(range(300))
        assert path.read_bytes() == good
    assert len(made) == 1 + len(places)


def test_a_cache_that_another_program_wrote_is_not_taken(tmp_path: Path) -> None:
    np.savez(tmp_path / "stem.npz", x=np.zeros(3))
    with pytest.warns(UserWarning, match="made again"):
        assert cache.load_or_make(tmp_path, "stem", lambda: {"x": np.ones(3)})["x"].tolist() == [1, 1, 1]


def test_default_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.default_folder() == tmp_path / "xdg" / "nearfar"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the standard says to ignore a relative path
    assert cache.default_folder() == tmp_path / ".cache" / "nearfar"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.default_folder() == tmp_path / ".cache" / "nearfar"


def test_default_folder_is_used(
    data: Glyphs, folder: Path, tmp_path: Path, drawn: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    glyphs(progress=False)
    assert [path.name for path in (tmp_path / "nearfar").iterdir()] == [p.name for p in folder.iterdir()]
    assert drawn == [False]


def test_no_home_folder_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nobody)
    with pytest.raises(RuntimeError, match="set XDG_CACHE_HOME to an absolute path"):
        cache.default_folder()


# ---------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("wrong", [3, b"folder", True])
def test_cache_that_is_no_path(wrong: object) -> None:
    with pytest.raises(TypeError, match=r"glyphs: cache must be a path or None, but came as .*; pass the folder"):
        glyphs(cache=wrong)  # type: ignore[arg-type]


def test_missing_font_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import matplotlib

    monkeypatch.setattr(matplotlib, "get_data_path", lambda: str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"DejaVuSans\.ttf is missing; install matplotlib anew"):
        glyphs(cache=tmp_path)


def test_import_is_cheap() -> None:
    program = "import sys; import nearfar.data._glyphs; sys.exit(bool({'matplotlib', 'rich'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_reading_the_cache_warns_of_nothing(data: Glyphs, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        glyphs(cache=folder)
