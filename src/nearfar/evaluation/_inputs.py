"""Convert the inputs of an evaluation: tensors, arrays, lists or `Vectors`, with labels or a relation."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nearfar._utils.arrays import labels_of, rows_of
from nearfar.evaluation._fingerprint import check_same_network
from nearfar.evaluation._vectors import Vectors
from nearfar.relations.relation import Relation


@dataclass(frozen=True, eq=False)
class Inputs:
    """Queries, their labels or relation, and the gallery if there is one."""

    x: Tensor  # [n, d] queries
    y: Tensor | Relation  # [n] labels, or a relation n x m
    ref: Tensor | None = None  # [m, d] gallery, or None
    ref_y: Tensor | None = None  # [m] labels of the gallery; None without a gallery, and if y is a relation


def read_inputs(owner: str, embeddings: Any, labels: Any, ref_emb: Any = None, ref_labels: Any = None) -> Inputs:
    """Convert everything to tensors; a relation that labels can express becomes labels."""
    if isinstance(embeddings, Vectors) and isinstance(ref_emb, Vectors):
        check_same_network(owner, ("the queries", embeddings.fingerprint), ("the gallery", ref_emb.fingerprint))
        if labels is None and ref_labels is None:
            ref_emb = ref_emb.in_terms_of(embeddings)
    x, labels = _side(owner, "embeddings", embeddings, labels)
    ref = None
    if ref_emb is not None:
        ref, ref_labels = _side(owner, "ref_emb", ref_emb, ref_labels)
    if isinstance(ref_labels, Relation):
        raise TypeError(f"{owner}: pass a relation of queries and gallery as labels, not as ref_labels.")
    if isinstance(labels, Relation):
        return _relation_inputs(owner, x, labels, ref, ref_labels)
    if labels is None:
        raise ValueError(f"{owner}: labels are needed, but none came; pass labels or Vectors with y.")
    if ref_labels is not None:
        ref_labels = labels_of(owner, "ref_labels", ref_labels, x.device)
    return Inputs(x, labels_of(owner, "labels", labels, x.device), ref, ref_labels)


def demand_classes(owner: str, y: Tensor | Relation) -> Tensor:
    """Require labels: one class per sample."""
    if isinstance(y, Relation):
        raise TypeError(f"{owner}: labels are needed, but {y!r} came; pass integer labels [n].")
    return y


def _side(owner: str, name: str, embeddings: Any, labels: Any) -> tuple[Tensor, Any]:
    if isinstance(embeddings, Vectors):
        return embeddings.x, embeddings.y if labels is None else labels
    return rows_of(owner, name, embeddings), labels


def _relation_inputs(owner: str, x: Tensor, relation: Relation, ref: Tensor | None, ref_labels: Any) -> Inputs:
    if ref_labels is not None and ref is None:
        raise ValueError(f"{owner}: ref_labels came without ref_emb.")
    columns = len(x) if ref is None else len(ref)
    if relation.shape != (len(x), columns) or relation.square != (ref is None):
        among = "among themselves (no reference)" if ref is None else "against a gallery (a reference)"
        raise ValueError(
            f"{owner}: the relation must be of {len(x)} x {columns} rows {among}, but {relation!r} came; "
            "make it of the rows that are passed."
        )
    if relation.device != x.device:
        raise ValueError(f"{owner}: the relation is on {relation.device} but the rows are on {x.device}; move one.")
    if relation.weighted or relation.anchors is not None:
        extra = "pair weights" if relation.weighted else "representatives"
        raise ValueError(f"{owner}: {extra} have no meaning for a ranking; make the relation without them.")
    plain = relation.plain_labels()
    if plain is None:
        return Inputs(x, relation, ref, None)
    return Inputs(x, plain[0], ref, None if ref is None else plain[1])
