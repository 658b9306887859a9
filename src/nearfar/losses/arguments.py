"""Checks of what a loss is made of and called with: its parts, its engine, the relation of its rows."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from nearfar._utils.checks import check_choice
from nearfar._utils.shortcuts import check_part
from nearfar.groups.groupings import Anchor, AnchorSign, Balanced, Batch, Grouping, Sign
from nearfar.groups.triplets import Positive, Triplets
from nearfar.relations.relation import Relation

__all__ = ["ENGINES", "GROUPS", "Engine", "check_engine", "check_relation", "for_each_sign", "grouping"]

GROUPS: dict[str, Grouping] = {
    "batch": Batch(),
    "sign": Sign(),
    "balanced": Balanced(),
    "anchor": Anchor(),
    "anchor_sign": AnchorSign(),
    "positive": Positive(),
    "triplets": Triplets(),
}
ENGINES = ("auto", "dense", "tiled", "fused")
Engine = Literal["auto", "dense", "tiled", "fused"]


def grouping(owner: str, groups: str | Grouping) -> Grouping:
    """A grouping by its name, or the one that was given."""
    if isinstance(groups, str):
        check_choice(owner, "groups", groups, GROUPS)
        groups = GROUPS[groups]
    check_part(owner, "groups", groups, Grouping, '"batch" or nf.groups.Batch()')
    return groups


def for_each_sign(owner: str, name: str, value: Any, kind: type[Any], such_as: str) -> tuple[Any, Any]:
    """The part for positive and that for negative pairs: two that came, or one for both."""
    if isinstance(value, tuple | list):
        if len(value) != 2:
            raise ValueError(
                f"{owner}: {name} may be two, one for positive and one for negative pairs, but {len(value)} came."
            )
        for place, part in zip(("positive", "negative"), value, strict=True):
            check_part(owner, f"{name} for {place} pairs", part, kind, such_as)
        return value[0], value[1]
    check_part(owner, name, value, kind, such_as)
    return value, value


def check_engine(owner: str, engine: str) -> None:
    """Demand the name of an engine."""
    check_choice(owner, "engine", engine, ENGINES)


def check_relation(
    owner: str, relation: Relation, embeddings: Tensor, ref_emb: Tensor | None, more: tuple[Tensor | None, ...]
) -> None:
    """Demand a relation of these rows and references, on their device, and nothing (`more`) that it already holds."""
    square, shape = ref_emb is None, (len(embeddings), len(embeddings if ref_emb is None else ref_emb))
    if relation.device != embeddings.device:
        raise ValueError(
            f"{owner}: the Relation is on {relation.device} but the embeddings are on {embeddings.device}; "
            "move one of them."
        )
    if any(x is not None for x in more):
        raise ValueError(
            f"{owner}: a Relation already holds ref_labels, ids and ref_ids; give them to its constructor."
        )
    if relation.shape != shape or relation.square != square:
        given = "its own reference" if square else "a reference"
        raise ValueError(
            f"{owner}: the Relation is {relation.shape[0]} x {relation.shape[1]}"
            f"{' (square)' if relation.square else ''}, but the embeddings are {shape[0]} x {shape[1]} "
            f"with {given}."
        )
