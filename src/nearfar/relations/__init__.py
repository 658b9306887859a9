"""Which pairs are positive and which negative: `Relation`, its options, representatives, and index tuples."""

from nearfar.relations.relation import Relation, Tile

__all__ = ["Relation", "Tile"]
