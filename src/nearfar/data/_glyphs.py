"""The built-in data set: characters drawn in the font faces that matplotlib includes.

A class is a character, a sample is that character in one face. Training classes are Latin letters, digits,
punctuation and symbols; test classes are Greek, Cyrillic, Armenian and Georgian, scripts that training
never shows. Nothing is downloaded.
"""

import hashlib
import unicodedata
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from nearfar._utils.extras import need
from nearfar._utils.files import Arrays
from nearfar.data._cache import default_folder, load_or_make

if TYPE_CHECKING:
    from matplotlib.ft2font import FT2Font

FORMAT = 1  # increase if the rule or the drawing changes, so that older cache files are ignored
SIZE = 32  # pixels a side
BOTTOM, TOP = -0.33, 1.07  # vertical range of the picture, in ems above the baseline; the width is the same
FEWEST = 12  # faces a character must have
FEW = frozenset((*range(0x21, 0x7F), *range(0x391, 0x3CA)))  # code points of `few_glyphs`
TEST_SCRIPTS = frozenset({"GREEK", "CYRILLIC", "ARMENIAN", "GEORGIAN"})

_DEJAVU = tuple(
    f"DejaVu{family}{style}"
    for family, styles in (
        ("Sans", ("", "-Bold", "-BoldOblique", "-Oblique")),
        ("SansMono", ("", "-Bold", "-BoldOblique", "-Oblique")),
        ("Serif", ("", "-Bold", "-BoldItalic", "-Italic")),
    )
    for style in styles
)
_STIX = ("STIXGeneral", "STIXGeneralBol", "STIXGeneralBolIta", "STIXGeneralItalic")
# TeX encodings: in these four fonts only letters and digits have their own code points ("<" shows "¡").
_COMPUTER_MODERN = ("cmb10", "cmr10", "cmss10", "cmtt10")
FACES = _DEJAVU + _STIX + _COMPUTER_MODERN
# Errors of the fonts, found by eye: these code points show the glyph of a neighbor (the bold T shows S).
_MISDRAWN = {
    "DejaVuSansMono-Oblique": frozenset({0x04CB, 0x04CC, 0x04F6, 0x04F7}),
    "DejaVuSerif-Bold": frozenset({0x1D40, 0x1D41, 0x1D42}),
}

Pictures = NDArray[np.uint8]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Split:
    """One side of the data set.

    Attributes:
        images: uint8 `[n, 32, 32]`; 0 is paper, 255 is ink.
        labels: int64 `[n]`, classes from 0 without gaps, in the order of their code points.
        names: One per class, such as `U+03C9 GREEK SMALL LETTER OMEGA`.
        faces: int64 `[n]`, which of `Glyphs.faces` each image shows.
    """

    images: torch.Tensor
    labels: torch.Tensor
    names: tuple[str, ...]
    faces: torch.Tensor


@dataclass(frozen=True, eq=False)
class Glyphs:
    """The data set: `train` and `test` have no class and no script in common; `faces` names the font faces."""

    train: Split
    test: Split
    faces: tuple[str, ...]


def glyphs(*, cache: str | Path | None = None, progress: bool = True) -> Glyphs:
    """Draw the data set, or read it from the cache.

    The rule, in the order in which it is applied:

    1. *Faces.* Twelve of DejaVu (Sans, Sans Mono, Serif), four of STIX General, and four of Computer Modern,
       the last for ASCII letters and digits only, because their other code points show other signs.
    2. *Characters.* Letters, numbers, punctuation and symbols of Unicode (no spaces, controls, private use
       or combining marks). The words of its Unicode name say whether a character is of a test script.
    3. *Pictures.* 32 x 32 pixels, anti-aliased, unhinted, one scale and one baseline for all, so that upper and
       lower case may differ by size alone. The advance width stands in the middle; ink that would leave
       the picture at a side is moved in by as much as it takes. A picture is left out when it is blank, the
       face's sign for a missing character, larger than the frame, or one of seven errors of the fonts.
    4. *Classes.* Characters with 12 pictures or more.
    5. *Look-alikes.* In one face two pictures look alike when their squared difference is at most a tenth
       of the larger squared norm and no pixel differs by more than a quarter of the range (a half, if one character
       is for training and the other for testing). Two characters are look-alikes when they look alike in
       half or more of the faces that have both. In the order of code points, a character that
       looks like one already kept is dropped. Nothing is dropped for being hard: polytonic Greek stays.

    Args:
        cache: Folder for the drawn data; by default `$XDG_CACHE_HOME/nearfar` or `~/.cache/nearfar`.
        progress: Show a bar while drawing, or occasional plain lines if there is no terminal.

    Returns:
        Both splits; the same matplotlib gives the same bytes.

    Raises:
        TypeError: If `cache` is not a path.
        FileNotFoundError: If the installed matplotlib lacks one of the faces.
    """
    if not isinstance(cache, str | Path | None):
        raise TypeError(f"glyphs: cache must be a path or None, but came as {cache!r}; pass the folder for the data.")
    fonts = _fonts()
    folder = default_folder() if cache is None else Path(cache)
    return _assemble(load_or_make(folder, _stem(fonts), lambda: _draw(fonts, progress)))


def few_glyphs() -> Glyphs:
    """A small data set, drawn in a second and not cached: ASCII characters for training, Greek ones for the test."""
    return _assemble(_draw(_fonts(), progress=False, among=FEW))


def _fonts() -> tuple[Path, ...]:
    matplotlib = need("matplotlib", "glyphs, drawn in its fonts,", "plot")
    folder = Path(matplotlib.get_data_path(), "fonts", "ttf")
    fonts = tuple(folder / f"{face}.ttf" for face in FACES)
    for font in fonts:
        if not font.is_file():
            raise FileNotFoundError(
                f"glyphs needs the fonts that come with matplotlib, but {font} is missing; install matplotlib "
                "anew from its wheel (pip install --force-reinstall matplotlib)."
            )
    return fonts


def _stem(fonts: Sequence[Path]) -> str:
    """The cache's file name, from everything that the pictures depend on: format, matplotlib, and the fonts' bytes."""
    import matplotlib

    digest = hashlib.sha256()
    for font in fonts:
        digest.update(hashlib.sha256(font.read_bytes()).digest())
    return f"glyphs-{FORMAT}-matplotlib-{matplotlib.__version__}-{digest.hexdigest()[:16]}"


def _draw(fonts: Sequence[Path], progress: bool, among: Container[int] = range(0x110000)) -> Arrays:
    """Apply the rule of `glyphs`, to some code points or to all: pictures, classes, look-alikes."""
    from matplotlib.ft2font import FT2Font

    opened = [FT2Font(str(font)) for font in fonts]
    maps = [
        {code: index for code, index in _charmap(font, face).items() if code in among}
        for font, face in zip(opened, FACES, strict=True)
    ]
    spread = np.unique(np.concatenate([list(chars) for chars in maps]), return_counts=True)
    codes: NDArray[np.int64] = spread[0][spread[1] >= FEWEST]
    pictures = np.zeros((len(fonts), len(codes), SIZE, SIZE), dtype=np.uint8)
    from nearfar._utils.progress import Progress  # it brings rich, which reading the data does not need

    with Progress("drawing glyphs, font faces", len(fonts), shown=progress) as bar:
        for face in range(len(fonts)):
            _draw_face(opened[face], maps[face], codes, pictures[face])
            bar.advance()
    there: Flags = np.any(pictures, axis=(2, 3))
    enough = there.sum(axis=0) >= FEWEST
    pictures, there, codes = pictures[:, enough], there[:, enough], codes[enough]
    kept = _without_look_alikes(pictures, there, np.array([_is_test(int(code)) for code in codes]))
    pictures, there, codes = pictures[:, kept], there[:, kept], codes[kept]
    labels, faces = np.nonzero(there.T)
    return {"images": pictures[faces, labels], "labels": labels, "faces": faces, "codes": codes}


def _charmap(font: "FT2Font", face: str) -> dict[int, int]:
    """Map the code points that the rule allows to the glyph indices of the face."""

    def is_allowed(code: int) -> bool:
        if face in _COMPUTER_MODERN:
            return code < 128 and chr(code).isalnum()
        return unicodedata.category(chr(code))[0] in "LNPS" and code not in _MISDRAWN.get(face, ())

    return {int(code): int(index) for code, index in font.get_charmap().items() if is_allowed(code)}


def _is_test(code: int) -> bool:
    return not TEST_SCRIPTS.isdisjoint(unicodedata.name(chr(code)).split())


def _draw_face(font: "FT2Font", chars: dict[int, int], codes: NDArray[np.int64], out: Pictures) -> None:
    """Draw the characters of one face into `out [c, 32, 32]`; missing and unfit characters stay blank."""
    font.set_size(1000.0, 72.0)  # outlines in thousandths of an em, whatever the face's own grid
    pen = _Pen()
    missing = pen.draw(font, 0).tobytes()
    for row, code in enumerate(codes.tolist()):
        if code in chars:
            picture = pen.draw(font, chars[code])
            if picture.tobytes() != missing:
                out[row] = picture


class _Pen:
    """Draws outlines with Agg on one small canvas; not FreeType bitmaps, which would depend on hinting."""

    def __init__(self) -> None:
        from matplotlib import ft2font
        from matplotlib.backends.backend_agg import RendererAgg
        from matplotlib.transforms import IdentityTransform

        # matplotlib 3.10 moved the flag into an enumeration and keeps the old name for a while only
        flags: Any = getattr(ft2font, "LoadFlags", None)
        self._unhinted = flags.NO_HINTING if flags else vars(ft2font)["LOAD_NO_HINTING"]
        self._canvas: Any = RendererAgg(SIZE, SIZE, 72.0)  # type: ignore[no-untyped-call]
        self._context = self._canvas.new_gc()
        self._context.set_linewidth(0.0)
        self._context.set_snap(False)
        self._identity = IdentityTransform()

    def draw(self, font: "FT2Font", index: int) -> Pictures:
        """Return the picture `[32, 32]` of a glyph; blank if it has no ink or does not fit."""
        from matplotlib.path import Path as Outline

        blank = np.zeros((SIZE, SIZE), dtype=np.uint8)
        glyph: Any = font.load_glyph(index, flags=self._unhinted)  # type: ignore[arg-type]
        points, kinds = font.get_path()
        ink = points[kinds != Outline.CLOSEPOLY]  # closing entries have no point
        if not len(ink):
            return blank
        scale = SIZE / (TOP - BOTTOM) / 1000.0
        (left, low), (right, high) = ink.min(axis=0) * scale, ink.max(axis=0) * scale
        up = -BOTTOM * 1000.0 * scale
        if right - left > SIZE or low + up < 0.0 or high + up > SIZE:
            return blank
        middle = (SIZE - glyph.linearHoriAdvance / 65536.0 * scale) / 2.0
        across = min(max(middle, -left), SIZE - right)
        self._canvas.clear()
        self._canvas.draw_path(
            self._context, Outline(points * scale + (across, up), kinds), self._identity, (0.0, 0.0, 0.0)
        )
        return np.array(self._canvas.buffer_rgba(), dtype=np.uint8)[..., 3]


def _without_look_alikes(pictures: Pictures, there: Flags, test: Flags) -> Flags:
    """Decide which characters [c] to keep: all that do not look like one kept before.

    `pictures` are [f, c, 32, 32]: faces, and characters in the order of code points. `there` [f, c] says whether the
    face has the character, and `test` [c] whether its script is for the test.
    """
    votes = np.zeros((len(test), len(test)), dtype=np.int64)
    for face in range(len(pictures)):
        rows = np.flatnonzero(there[face])
        first, second = _near_pictures(pictures[face, rows], test[rows])
        votes[rows[second], rows[first]] += 1
    shared = there.T.astype(np.int64) @ there.astype(np.int64)
    look = (votes > 0) & (2 * votes >= shared)
    kept = np.zeros(len(test), dtype=np.bool_)
    for character in range(len(test)):
        kept[character] = not (look[character] & kept).any()
    return kept


def _near_pictures(pictures: Pictures, test: Flags) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the pairs (first < second) of pictures `[c, 32, 32]` of one face that look alike."""
    flat = pictures.reshape(len(pictures), -1).astype(np.float32)
    gram = flat @ flat.T
    norm = np.diagonal(gram).copy()
    # first a cheap, slightly loose test; pairs that pass it are measured in integers, so that rounding on some
    # machine cannot move a pair across the limit
    distance = np.add.outer(norm, norm)
    distance -= 2.0 * gram
    distance -= 0.11 * np.maximum.outer(norm, norm)
    first, second = np.nonzero(distance <= 0.0)
    first, second = first[first < second], second[first < second]
    difference = flat[first].astype(np.int64) - flat[second].astype(np.int64)
    larger = np.maximum(*((flat[rows].astype(np.int64) ** 2).sum(axis=1) for rows in (first, second)))
    limit = np.where(test[first] != test[second], 255 // 2, 255 // 4)
    close = 10 * (difference**2).sum(axis=1) <= larger
    close &= np.abs(difference).max(axis=1, initial=0) <= limit
    return first[close], second[close]


def _assemble(arrays: Arrays) -> Glyphs:
    codes = [int(code) for code in arrays["codes"]]
    test = np.array([_is_test(code) for code in codes])
    images, labels, faces = (torch.from_numpy(arrays[name]) for name in ("images", "labels", "faces"))

    def split(chosen: Flags) -> Split:
        rows = torch.from_numpy(chosen)[labels]
        place = torch.from_numpy(np.cumsum(chosen) - 1)
        names = tuple(
            f"U+{code:04X} {unicodedata.name(chr(code))}" for code, mine in zip(codes, chosen, strict=True) if mine
        )
        return Split(images=images[rows], labels=place[labels[rows]], names=names, faces=faces[rows])

    return Glyphs(train=split(~test), test=split(test), faces=FACES)
