"""Checks the relation that a loss is called with."""

from torch import Tensor

from nearfar.relations.relation import Relation

__all__ = ["check_relation"]


def check_relation(
    owner: str, relation: Relation, embeddings: Tensor, ref_emb: Tensor | None, more: tuple[Tensor | None, ...]
) -> None:
    """Require that a relation fits rows and references and their device, and that no option (`more`) repeats it."""
    square, shape = ref_emb is None, (len(embeddings), len(embeddings if ref_emb is None else ref_emb))
    if relation.device != embeddings.device:
        raise ValueError(
            f"{owner}: the Relation is on {relation.device} but the embeddings are on {embeddings.device}; "
            "move one of them."
        )
    if any(x is not None for x in more):
        raise ValueError(f"{owner}: a Relation already has ref_labels, ids and ref_ids; give them to its constructor.")
    if relation.shape != shape or relation.square != square:
        given = "its own reference" if square else "a reference"
        raise ValueError(
            f"{owner}: the Relation is {relation.shape[0]} x {relation.shape[1]}"
            f"{' (square)' if relation.square else ''}, but the embeddings are {shape[0]} x {shape[1]} "
            f"with {given}."
        )
