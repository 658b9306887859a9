"""What a loss checks of a batch: its relation, and whether its rows have pairs to learn from."""

from dataclasses import dataclass

from torch import Tensor

from nearfar.relations.relation import Relation

__all__ = ["Had", "check_relation"]


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


@dataclass(frozen=True, eq=False)
class Had:
    """Which rows [n] had a positive and which had a negative pair before mining."""

    had_positive: Tensor
    had_negative: Tensor

    @property
    def anchors(self) -> Tensor:
        """Rows with at least one pair."""
        return self.had_positive | self.had_negative

    def reason(self) -> str:
        """The reason why no anchor has the pairs that a loss needs; reads the data."""
        if not bool(self.anchors.any()):
            return "no two of its rows form a valid pair (a single row, or all are ignored)"
        if not bool(self.had_positive.any()):
            return "no two of its rows are positives of each other (every class is a singleton)"
        if not bool(self.had_negative.any()):
            return "all of its rows are positives of each other (there is one class only)"
        return "no anchor has both a positive and a negative pair"
