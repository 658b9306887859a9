"""Cases for `nf.Distributed`: each computes on a share of its rows, or on all of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from engine_cases import MINERS, PRODUCTS, SETS, larger, on, relations
from gathered_pml import of_pml
from table import CLASSES, ROWS, tensors, tied_batch
from torch import Tensor

import nearfar as nf

L, M, P, S = nf.losses, nf.miners, nf.pairs, nf.sets
SPLITS = {2: (0.62, 1.0), 3: (0.4, 0.43, 1.0)}
"""Where the rows of one rank end: unequal, and one rank with next to nothing."""


@dataclass(frozen=True)
class Share:
    """One rank of `world`, or one process alone."""

    rank: int = 0
    world: int = 1

    def rows(self, n: int) -> slice:
        if self.world == 1:
            return slice(0, n)
        ends = [0, *(round(n * end) for end in SPLITS[self.world])]
        return slice(ends[self.rank], ends[self.rank + 1])

    def __call__(self, x: Tensor) -> Tensor:
        return x[self.rows(len(x))]

    def wrap(self, loss: Any, **options: Any) -> Any:
        return nf.Distributed(loss, **options) if self.world > 1 else loss


Case = Callable[[Share], dict[str, Any]]


def measured(share: Share, loss: Any, embeddings: Tensor, labels: Any, **more: Any) -> dict[str, Any]:
    """The value, the gradient of this rank's rows, and of all that is learnt."""
    mine = share(embeddings.detach()).clone().requires_grad_()
    leaves = {"rows": mine}
    if "ref_emb" in more:
        leaves["refs"] = more["ref_emb"] = share(more["ref_emb"].detach()).clone().requires_grad_()
    value = share.wrap(loss, averaged=False)(mine, labels, **more)
    (value * torch.linspace(1.0, 2.0, value.numel(), dtype=value.dtype).reshape(value.shape)).sum().backward()
    return {
        "value": value.detach(),
        **{name: leaf.grad for name, leaf in leaves.items()},
        "learnt": [p.grad for p in loss.parameters()],
    }


def plain(make: Callable[[], Any], batch: Callable[[], tuple[Tensor, Tensor]], engine: str, tile: int | None) -> Case:
    def run(share: Share) -> dict[str, Any]:
        embeddings, labels = batch()
        torch.manual_seed(0)
        loss = on(make().double(), engine, tile)
        labels = labels % CLASSES if hasattr(loss, "proxies") else labels
        return measured(share, loss, embeddings, share(labels))

    return run


def many() -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    return torch.randn(301, 8, generator=rng, dtype=torch.float64), torch.randint(0, 60, (301,), generator=rng)


def of_table() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for row in ROWS:
        found[f"{row.id}/tile"] = plain(row.loss, larger, "tiled", 4)
        found[f"{row.id}/tied"] = plain(row.loss, lambda: tensors(*tied_batch()), "tiled", 2)
        if row.id in ("DroTopK", "LiftedStructure", "Triplet", "ProxyNCA"):  # whole on every rank: one way for all
            found[f"{row.id}/dense"] = plain(row.loss, larger, "dense", None)
        if not row.proxies:
            found[f"{row.id}/many"] = plain(row.loss, many, "tiled", None)
    return found


def of_products() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for name, over in SETS.items():
        for groups in ("batch", "sign", "anchor", "anchor_sign"):
            pair = P.Squared() if name == "power" else P.Hinge()
            similarity = nf.similarity.NegEuclidean() if name == "power" else None
            kinds = [("random", larger)]
            if groups in ("batch", "sign"):  # an anchor's ties lie on one rank
                kinds.append(("tied", lambda: tensors(*tied_batch())))
            for kind, batch in kinds:
                found[f"{name}/{groups}/{kind}"] = plain(
                    lambda pair=pair, over=over, groups=groups, similarity=similarity: nf.RobustLoss(
                        pair=pair, over=over, groups=groups, similarity=similarity
                    ),
                    batch, "tiled", 3 if groups in ("batch", "sign") else 9,  # sets of anchors: a solution each strip
                )  # fmt: skip
    found["nested"] = plain(lambda: nf.Nested(on(L.SupCon(), "tiled", 5), dims=(2, 4)), larger, "", None)
    for name, make in PRODUCTS.items():
        found[name] = plain(make, larger, "tiled", 5)
    for name, miner in MINERS.items():
        for make in (L.Contrastive, L.SupCon, L.DroKL, L.Triplet, L.LiftedStructure):
            found[f"{make.__name__}/{name}"] = plain(
                lambda make=make, miner=miner: make(miner=miner), larger, "tiled", 5
            )
    return found


def of_relations() -> dict[str, Case]:
    """Labels with more to say: joined from every rank."""
    found: dict[str, Case] = {}
    makers = (L.MultiSimilarity, L.Margin, lambda: L.DroTopK(k=6), L.LiftedStructure, L.Triplet, L.SupCon)

    def related(make: Any, kind: str) -> Case:
        def run(share: Share) -> dict[str, Any]:
            embeddings, labels = larger(30)
            whole = relations(labels)[kind]
            return measured(share, on(make().double(), "tiled", 4), embeddings, part(whole, share, kind))

        return run

    for kind in ("ignored", "sample weights", "multi-label", "representatives", "among"):
        for place, make in enumerate(makers):
            found[f"{kind}/{place}"] = related(make, kind)
    return found


def part(whole: nf.Relation, share: Share, kind: str) -> nf.Relation:
    """The relation that a rank makes of its own rows."""
    if kind == "multi-label":
        return nf.Relation.from_multilabel(share(whole._grades._row))
    given = whole._given
    stand = None if given.projection is None else share(given.projection.rows)
    return nf.Relation.from_labels(
        share(whole._row),
        ignore=whole._ignore,
        weights=None if given.weights is None else share(given.weights),
        representatives=stand,
        among_representatives=kind == "among",
    )


def of_ladders() -> dict[str, Case]:
    """Graded relations of what the rows say of themselves, labels and ids, and a floor under the spread of all rows."""
    parents, table = torch.tensor([5, 5, 6, 6, 6, -1, -1]), torch.arange(25.0).reshape(5, 5) % 4
    pairs = torch.combinations(torch.arange(30))

    def graded(make: Callable[[Share, Tensor], nf.Relation], rungs: tuple[float, ...]) -> Case:
        def run(share: Share) -> dict[str, Any]:
            embeddings, labels = larger(30)
            loss = L.Ladder(on(L.MultiSimilarity().double(), "tiled", 4), rungs=rungs)
            return measured(share, loss, embeddings, make(share, labels % 5))

        return run

    makers: dict[str, tuple[Callable[[Share, Tensor], nf.Relation], tuple[float, ...]]] = {
        "tree": (lambda share, y: nf.Relation.from_tree(parents, share(y)), (0, 1)),
        "scores": (lambda share, y: nf.Relation.from_scores(table, share(y)), (0, 1, 2)),
        "pairs": (lambda share, y: nf.Relation.from_pairs(pairs[::3], pairs[1::3], share(torch.arange(30))), (0,)),
    }
    found = {f"ladder/{name}": graded(*case) for name, case in makers.items()}
    floored = lambda: L.Triplet(mining="hard", floor=0.99)  # noqa: E731
    return found | {"floor": plain(floored, larger, "tiled", 4)}


def with_reference(make: Callable[[], Any], *, named: bool) -> Case:
    def run(share: Share) -> dict[str, Any]:
        embeddings, labels = larger()
        others, names = larger(23, seed=8)
        more: dict[str, Any] = {"ref_emb": others, "ref_labels": share(names % 7)}
        if named:
            more |= {"ids": share(torch.arange(len(labels))), "ref_ids": share(torch.arange(23) + 30)}
        return measured(share, on(make().double(), "tiled", 5), embeddings, share(labels % 7), **more)

    return run


def of_references() -> dict[str, Case]:
    makers = {row.id: row.loss for row in ROWS if row.reference}
    return {
        f"{name}/{'named' if named else 'reference'}": with_reference(make, named=named)
        for name, make in makers.items()
        for named in (False, True)
    }


def remembered(make: Callable[[], Any], sizes: tuple[int, ...] = (20, 41, 13), **options: Any) -> Case:
    """Batches of unequal sizes through a memory that wraps around, and one that reads it then."""

    def run(share: Share) -> dict[str, Any]:
        memory = nf.CrossBatchMemory(on(make().double(), "tiled", 8), size=50, **options)
        found: dict[str, Any] = {}
        for n in sizes:
            embeddings, labels = larger(n, seed=n)
            found[f"{n} rows"] = measured(share, memory, embeddings, share(labels), ids=share(torch.arange(n)))
        return found | {"memory": memory.state_dict()}

    return run


def of_memories() -> dict[str, Case]:
    found = {f"memory/{row.id}": remembered(row.loss) for row in ROWS if row.reference}
    return found | {"memory/limited": remembered(L.SupCon, (20, 41, 13, 30, 24), warmup=2, max_age=2)}


def drawn(make: Callable[[], Any]) -> Case:
    def run(share: Share) -> dict[str, Any]:
        embeddings, labels = larger()
        torch.manual_seed(5 + share.rank)
        found = measured(share, make().double(), embeddings, share(labels))
        return found | {"first draws afterwards": torch.rand(2)} if share.rank == 0 else found

    return run


def of_draws() -> dict[str, Case]:
    return {
        "sampled": drawn(lambda: L.DroKL(samples=7)),
        "distance-weighted": drawn(lambda: L.Margin(miner=M.DistanceWeighted())),
    }


KEPT = ("DroTopK", "LiftedStructure", "Margin", "SupCon", "limited")
"""What three ranks try with a memory, which knows nothing of its loss."""


def cases(world: int) -> dict[str, Case]:
    """Two ranks try everything; three the table, and memories of a few losses."""
    table, memories = of_table() | of_draws(), of_memories()
    if world == 2:
        return table | memories | of_products() | of_relations() | of_ladders() | of_references() | of_pml()
    return table | {f"memory/{name}": memories[f"memory/{name}"] for name in KEPT}


def all_cases(rank: int, world: int) -> dict[str, Any]:
    """Every case on this rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", nf.DegenerateBatchWarning)
        return {name: case(Share(rank, world)) for name, case in cases(world).items()}


CLOSE = {"atol": 1e-10, "rtol": 1e-10}


def same(found: list[Any], wanted: Any, name: str) -> None:
    """What all ranks found is what one process found; gradients of rows are put one behind the other."""
    if isinstance(wanted, dict):
        for key in wanted:
            parts = [x[key] for x in found if key in x]
            if key in ("rows", "refs"):
                torch.testing.assert_close(torch.cat(parts), wanted[key], **CLOSE)
            else:
                same(parts, wanted[key], f"{name}, {key}")
    elif isinstance(wanted, list):
        for place, value in enumerate(wanted):
            same([x[place] for x in found], value, name)
    elif isinstance(wanted, torch.Tensor):
        for part in found:
            torch.testing.assert_close(part, wanted, **CLOSE)
            assert torch.equal(part, found[0]), f"{name} differs between ranks"
    else:
        assert all(part == wanted for part in found), name
