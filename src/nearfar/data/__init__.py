"""Data sets: today the embedded one, `glyphs`."""

from nearfar.data._glyphs import Glyphs, Split, glyphs

__all__ = ["Glyphs", "Split", "glyphs"]
