"""Relations: which pairs are positive and which are negative, from labels, a matrix, or index tuples."""

from nearfar.relations.relation import Relation
from nearfar.relations.tile import Tile

__all__ = ["Relation", "Tile"]
