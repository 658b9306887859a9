"""`mine`: the hard negatives of each query among all references, exactly or by an index, resumable and over ranks.

References of other classes are ranked by their score, the hardest first. Of a query q with the positives P (the
references of its class, without itself), the negatives x with

    ranks[0] ≤ rank of x among the negatives ≤ ranks[1],   scores[0] ≤ s(q, x) ≤ scores[1],
    t(q, x) < max over p in P of t(q, p) - margin                  (t = s, or the score of a teacher)

are kept, and the first k of them are the result. The last line guards against false negatives: unlabeled positives
score as high as labeled ones.

Queries are searched in chunks of `CHUNK`, so that memory does not depend on their number; ranks share the chunks.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nearfar._utils.checks import check_choice, check_whole
from nearfar._utils.progress import Progress
from nearfar.evaluation._chunks import Chunks, Part
from nearfar.evaluation._exact_search import TILE, Neighbors, strips
from nearfar.evaluation._index import SearchIndex
from nearfar.evaluation._inputs import demand_classes, read_inputs
from nearfar.evaluation._ranking_keys import BLOCK, METRICS, Metric, Rows, pair_keys, spaces
from nearfar.evaluation._ranking_keys import scores as scores_of
from nearfar.evaluation._retrieval import check_sides
from nearfar.evaluation._vectors import Vectors
from nearfar.evaluation.parallel import check_rows, current_group, merge_rows, share, single_process

CHUNK = 4096  # queries that are searched at once, and stored in one file
LISTED = 2048  # neighbors of a query beyond which fewer queries are searched at once


@dataclass(frozen=True)
class Rule:
    """Which negatives are kept; see `mine`."""

    k: int = 10
    ranks: tuple[int, int] = (1, 100)
    scores: tuple[float | None, float | None] = (None, None)
    margin: float | None = None
    similarity: Metric = "cosine"

    def __post_init__(self) -> None:
        check_whole("mine", "k", self.k)
        check_choice("mine", "similarity", self.similarity, METRICS)
        first, last = self.ranks
        if any(isinstance(x, bool) or not isinstance(x, int) for x in self.ranks) or not 1 <= first <= last:
            raise ValueError(f"mine: ranks must be a window of whole numbers from 1 on, but came as {self.ranks!r}.")
        low, high = (side if x is None else x for side, x in zip((-math.inf, math.inf), self.scores, strict=True))
        if not low <= high:
            raise ValueError(f"mine: scores must be a window, the lower end first, but came as {self.scores!r}.")
        if self.margin is not None and not math.isfinite(self.margin):
            raise ValueError(f"mine: margin must be a finite number or None, but came as {self.margin!r}.")


@dataclass(frozen=True, eq=False)
class Mined:
    """The hard negatives of each query.

    Attributes:
        places: [n, k] the rows of the references, hardest first; -1 where fewer were found.
        scores: [n, k] their scores, -inf where there is none.
        positive: [n] the score of the nearest positive, by the teacher if there is one; NaN for a query without one,
            which the guard cannot judge.
    """

    places: Tensor
    scores: Tensor
    positive: Tensor

    def __len__(self) -> int:
        return len(self.places)

    @classmethod
    def load(cls, folder: str | Path) -> "Mined":
        """Read what `mine` or `nearfar mine` wrote to a folder; unfinished work is an error."""
        store = Chunks("mine", Path(folder))
        plan = store.plan("queries", "chunk")
        try:
            return _join(list(store.read_all(-(-plan["queries"] // plan["chunk"]))))
        except FileNotFoundError:
            raise ValueError(f"mine: {folder} is not finished; run the command that was interrupted again.") from None


def mine(
    embeddings: Any,
    labels: Any = None,
    *,
    ref_emb: Any = None,
    ref_labels: Any = None,
    k: int = 10,
    ranks: tuple[int, int] = (1, 100),
    scores: tuple[float | None, float | None] = (None, None),
    margin: float | None = None,
    teacher: Any = None,
    similarity: Metric = "cosine",
    index: SearchIndex | None = None,
    folder: str | Path | None = None,
    progress: bool = False,
) -> Mined:
    """Find the hard negatives of each query among all references.

    Within `nearfar.evaluation.parallel.split_over` the ranks share the queries, and all get the whole result.

    Args:
        embeddings: [n, d] queries: a tensor, an array, lists or `Vectors`, also memory-mapped.
        labels: [n] integers; by default the y of `Vectors`. For pairs of texts, the number of the pair.
        ref_emb: [m, d] references; None for the queries themselves.
        ref_labels: [m] integers.
        k: the most negatives per query.
        ranks: the window of ranks, from 1, counted among the negatives.
        scores: the window of scores; None for an open end.
        margin: leave out negatives that score as high as the nearest positive less this margin, or higher; None to
            keep them.
        teacher: vectors of another network that judge `margin` instead: [n, d'], or a pair of them with a `ref_emb`.
        similarity: "cosine", "dot" or "euclidean".
        index: an index of the references to search instead of all of them; negatives that it misses are not found.
        folder: where finished chunks are kept, one file each; a call that was interrupted continues after them.
        progress: show a progress bar.

    >>> x = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.8, 0.3]])
    >>> mine(x, torch.tensor([0, 0, 1, 1]), k=2).places.tolist()
    [[3, 2], [3, 2], [1, 0], [1, 0]]
    """
    rule = Rule(k, tuple(ranks), tuple(scores), margin, similarity)  # type: ignore[arg-type]
    search = Search(embeddings, labels, ref_emb, ref_labels, rule, teacher, index)
    group = current_group()
    with single_process():
        parts = dict(search.chunks(folder, rank=group.rank, world=group.world, progress=progress))
    if group.world == 1:
        return _join(list(parts.values()))
    found, device, n = [], search.x.device, len(search.x)
    for name, shape, dtype in (("places", (n, k), torch.long), ("scores", (n, k), None), ("positive", (n,), None)):
        own = [(search.rows(number), torch.from_numpy(part[name]).to(device)) for number, part in parts.items()]
        found.append(merge_rows(group, torch.empty(shape, dtype=dtype or torch.float32, device=device), own).cpu())
    return Mined(*found)


def _join(parts: list[Part]) -> Mined:
    names = ("places", "scores", "positive")
    return Mined(*(torch.from_numpy(np.concatenate([part[name] for part in parts])) for name in names))


class Search:
    """The queries, the references, their labels, and the rule: everything that determines the result."""

    def __init__(
        self, embeddings: Any, labels: Any, ref_emb: Any, ref_labels: Any, rule: Rule, teacher: Any, index: Any
    ) -> None:
        given = read_inputs("mine", embeddings, labels, ref_emb, ref_labels)
        self.rule, self.itself, self.index = rule, given.ref is None, index
        self.y = demand_classes("mine", given.y)
        check_sides("mine", given.x, self.y, given.ref, given.ref_y)
        self.ref_y = self.y if given.ref_y is None else given.ref_y
        self.x, self.ref = _same_type(given.x, given.x if given.ref is None else given.ref)
        if not len(self.x) or not len(self.ref):
            raise ValueError(f"mine: {len(self.x)} queries and {len(self.ref)} references came; both must have rows.")
        if index is not None and (len(index), index.width) != tuple(self.ref.shape):
            raise ValueError(f"mine: the index must be of the {len(self.ref)} references, but is {index!r}.")
        if index is not None and index.similarity != rule.similarity:
            raise ValueError(
                f"mine: the index compares by {index.similarity}, not by {rule.similarity}; name that one."
            )
        self.teacher = None if teacher is None else self._teacher(teacher)
        self.order = torch.argsort(self.ref_y, stable=True)  # references, class after class
        names, counts = torch.unique(self.ref_y, return_counts=True)
        place = torch.searchsorted(names, self.y).clamp(max=len(names) - 1)
        self.count = torch.where(names[place] == self.y, counts[place], 0)  # references of a query's class
        self.start = (counts.cumsum(0) - counts)[place]

    def _teacher(self, given: Any) -> tuple[Tensor, Tensor]:
        """The vectors of the teacher, of queries and references."""
        sides = (given, given) if self.itself else given
        if not self.itself and not isinstance(given, tuple | list):
            raise ValueError("mine: with ref_emb, teacher must be two sets of vectors: of the queries and of ref_emb.")
        x, y = (each.x if isinstance(each, Vectors) else torch.as_tensor(each) for each in sides)
        for name, rows, of in (("queries", x, self.x), ("references", y, self.ref)):
            check_rows("mine", f"teacher's {name}", rows)
            if len(rows) != len(of):
                raise ValueError(f"mine: teacher must have a row for each of the {len(of)} {name}, not {len(rows)}.")
        return _same_type(x, y)

    @property
    def count_chunks(self) -> int:
        """The number of chunks of queries."""
        return -(-len(self.x) // CHUNK)

    def rows(self, number: int) -> slice:
        """The queries of a chunk."""
        return slice(number * CHUNK, min((number + 1) * CHUNK, len(self.x)))

    def plan(self) -> dict[str, Any]:
        """What identifies the search, with digests of the references, and of the teacher's."""
        kind = None if self.index is None else f"{self.index.kind} {self.index.effort}"
        about = {"queries": len(self.x), "references": len(self.ref), "chunk": CHUNK, "index": kind}
        digest = _digest(self.ref, self.ref_y)
        return {**about, **asdict(self.rule), "of": digest, "teacher": self.teacher and _digest(self.teacher[1])}

    def chunks(
        self, folder: str | Path | None, *, rank: int = 0, world: int = 1, progress: bool = False
    ) -> Iterator[tuple[int, Part]]:
        """Yield this rank's chunks with their numbers; those that the folder has are read from it."""
        store = None if folder is None else Chunks("mine", Path(folder))
        if store is not None:
            store.begin(self.plan(), _describe)
        mine = share(self.count_chunks, rank, world)
        x, y = spaces(*(self.teacher or (self.x, self.ref)), self.rule.similarity)
        total = sum(self.rows(number).stop - self.rows(number).start for number in mine)
        with Progress(f"mining {len(self.ref):,} references", total, shown=progress) as bar:
            for number in mine:
                rows = self.rows(number)
                digest = "" if store is None else self._digest(rows)
                part = None if store is None else store.read(number, digest)
                if part is None:
                    found = torch.cat([self._keep(at, near, x, y) for at, near in self._neighbors(rows)])
                    part = _split(found, self.rule.k)
                    if store is not None:
                        store.write(number, part, digest)
                bar.advance(rows.stop - rows.start)
                yield number, part

    def _digest(self, rows: slice) -> str:
        return _digest(self.x[rows], self.y[rows], *([] if self.teacher is None else [self.teacher[0][rows]]))

    def _neighbors(self, rows: slice) -> Iterator[tuple[slice, Neighbors]]:
        """Yield the nearest references of strips of queries, as many as hold the window of ranks and all positives."""
        depth = min(len(self.ref), self.rule.ranks[1] + int(self.count[rows].max()))
        if self.index is not None:
            for at in range(rows.start, rows.stop, 256):
                part = slice(at, min(at + 256, rows.stop))
                yield part, self.index.search(self.x[part].float(), depth)
            return
        tile = max(1 << 16, min(TILE, TILE * LISTED // depth))  # lists of many neighbors: fewer queries at once
        for part, near in strips(self.x[rows], self.ref, k=depth, similarity=self.rule.similarity, tile=tile):
            yield slice(part.start + rows.start, part.stop + rows.start), near

    def _keep(self, rows: slice, near: Neighbors, x: Rows, y: Rows) -> Tensor:
        """Apply the rule to the neighbors of some queries: float64 [t, 2k + 1], places, scores and the positive's."""
        rule, places = self.rule, near.places
        negative = (places >= 0) & (self.ref_y[places] != self.y[rows, None])
        rank = negative.cumsum(dim=1)
        keep = negative & (rank >= rule.ranks[0]) & (rank <= rule.ranks[1])
        low, high = rule.scores
        if low is not None:
            keep &= near.scores >= low
        if high is not None:
            keep &= near.scores <= high
        positive = self._positive(rows, x, y)
        if rule.margin is not None:
            query = torch.arange(rows.start, rows.stop, device=places.device)[:, None].expand_as(places)
            judged = torch.full_like(near.scores, -torch.inf)
            judged[keep] = self._pairs(query[keep], places[keep], x, y).to(judged)
            keep &= ~(judged >= positive[:, None] - rule.margin)
        first = (~keep).int().argsort(dim=1, stable=True)[:, : rule.k]
        missing = ~keep.gather(1, first)
        short = (0, rule.k - first.shape[1])  # there may be fewer references than k
        best = near.scores.gather(1, first).masked_fill(missing, -torch.inf)
        places = nn.functional.pad(places.gather(1, first).masked_fill(missing, -1), short, value=-1)
        best = nn.functional.pad(best, short, value=-torch.inf)
        return torch.cat([places.double(), best.double(), positive[:, None].double()], dim=1)

    def _positive(self, rows: slice, x: Rows, y: Rows) -> Tensor:
        """The score of the nearest positive of each query [t]; NaN where there is none."""
        count, best = self.count[rows], torch.full((rows.stop - rows.start,), -torch.inf, device=self.y.device)
        ends, step = count.cumsum(0), max(1, BLOCK // max(1, x.x.shape[1]))
        for at in range(0, int(ends[-1]), step):
            pair = torch.arange(at, min(at + step, int(ends[-1])), device=ends.device)
            query = torch.searchsorted(ends, pair, right=True)
            place = self.order[self.start[rows][query] + pair - (ends - count)[query]]
            query, place = (side[place != query + rows.start] if self.itself else side for side in (query, place))
            found = self._pairs(query + rows.start, place, x, y).to(best)
            best.scatter_reduce_(0, query, found, "amax")
        return best.masked_fill(best == -torch.inf, torch.nan)

    def _pairs(self, query: Tensor, place: Tensor, x: Rows, y: Rows) -> Tensor:
        """Scores [p] of pairs of a query and a reference, by the teacher if there is one."""
        step, parts = max(1, BLOCK // max(1, x.x.shape[1])), [torch.zeros(0, device=query.device)]
        for side in zip(torch.split(query, step), torch.split(place, step), strict=True):
            parts += [scores_of(pair_keys(x[side[0]], y[side[1]]), self.rule.similarity)]
        return torch.cat(parts)


def _same_type(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Both sides in float64 if one of them is; other types are converted to float32 where they are compared."""
    return (x.double(), y.double()) if torch.float64 in (x.dtype, y.dtype) else (x, y)


def _split(found: Tensor, k: int) -> Part:
    found = found.cpu()
    places, scores, positive = found[:, :k].long(), found[:, k:-1].float(), found[:, -1].float()
    return {"places": places.numpy(), "scores": scores.numpy(), "positive": positive.numpy()}


def _digest(*arrays: Tensor) -> str:
    """A digest of rows, block by block: of memory-mapped ones too, in the memory of a block."""
    found = hashlib.blake2b(digest_size=16)
    for array in arrays:
        found.update(f"{array.dtype} {tuple(array.shape)} ".encode())
        for block in torch.split(array.detach(), 1 << 14):
            found.update(block.cpu().contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()


def _describe(plan: dict[str, Any]) -> str:
    names = ("queries", "references", "k", "ranks", "scores", "margin", "similarity", "index")
    settings = ", ".join(f"{name} {plan.get(name)}" for name in names)
    return f"{settings}, vectors {str(plan.get('of'))[:8]}"
