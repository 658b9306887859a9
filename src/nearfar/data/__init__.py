"""Data sets: the built-in one (`glyphs`), the benchmarks of the field, and your own images and vectors."""

from nearfar.data import transforms
from nearfar.data._glyphs import Glyphs, Split, glyphs
from nearfar.data.benchmarks import cars, cub, flowers, inshop, omniglot, sop
from nearfar.data.folders import folder, manifest, vectors
from nearfar.data.hf import hf
from nearfar.data.loading import View, collate
from nearfar.data.pictures import CorruptImageError, CorruptImageWarning, Pictures
from nearfar.data.registry import open_data
from nearfar.data.samples import ByName, DataSet, Labeled, Samples, Tensors, genuine, numbered, part
from nearfar.data.shards import shards
from nearfar.data.splits import class_disjoint, classes_by_name

__all__ = [
    "ByName",
    "CorruptImageError",
    "CorruptImageWarning",
    "DataSet",
    "Glyphs",
    "Labeled",
    "Pictures",
    "Samples",
    "Split",
    "Tensors",
    "View",
    "cars",
    "class_disjoint",
    "classes_by_name",
    "collate",
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
    "transforms",
    "vectors",
]
