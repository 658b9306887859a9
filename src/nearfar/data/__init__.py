"""Data sets: the built-in one (`glyphs`), the benchmarks of the field, and your own images and vectors."""

from nearfar.data import transforms
from nearfar.data._benchmarks import cars, cub, flowers, inshop, omniglot, sop
from nearfar.data._corrections import correct
from nearfar.data._folders import folder, manifest, vectors
from nearfar.data._glyphs import Glyphs, Split, glyphs
from nearfar.data._hf import hf
from nearfar.data._loading import View, collate
from nearfar.data._pictures import CorruptImageError, CorruptImageWarning, Pictures
from nearfar.data._registry import open_data
from nearfar.data._samples import ByName, DataSet, Labeled, Samples, Tensors, genuine, numbered, part
from nearfar.data._shards import shards
from nearfar.data._splits import class_disjoint, classes_by_name
from nearfar.data._texts import Texts, texts
from nearfar.data._tokens import Document, Tokens

__all__ = [
    "ByName",
    "CorruptImageError",
    "CorruptImageWarning",
    "DataSet",
    "Document",
    "Glyphs",
    "Labeled",
    "Pictures",
    "Samples",
    "Split",
    "Tensors",
    "Texts",
    "Tokens",
    "View",
    "cars",
    "class_disjoint",
    "classes_by_name",
    "collate",
    "correct",
    "cub",
    "flowers",
    "folder",
    "genuine",
    "glyphs",
    "hf",
    "inshop",
    "manifest",
    "numbered",
    "omniglot",
    "open_data",
    "part",
    "shards",
    "sop",
    "texts",
    "transforms",
    "vectors",
]
