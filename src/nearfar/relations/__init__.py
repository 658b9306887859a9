"""Relations: which pairs are positive and which are negative, from labels, a matrix, or index tuples."""

from nearfar.relations.relation import Relation, Tile

__all__ = ["Relation", "Tile"]
