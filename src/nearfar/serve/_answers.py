"""`Searcher`: search an index by a picture, a text or a vector; answers are names and scores."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nearfar.evaluation import Neighbors, SearchIndex
from nearfar.evaluation._fingerprint import check_fingerprint, check_same_network
from nearfar.serve._pictures import RefusedError


@dataclass(frozen=True)
class Answer:
    """One neighbor.

    Attributes:
        row: its row in the index.
        name: its name, or its row if the vectors have no names.
        score: its similarity, larger = more similar.
        label: its class, or None.
    """

    row: int
    name: str
    score: float
    label: str | None


class Searcher:
    """Search an index by a picture or a text, or by a vector; safe to use from several threads.

    Args:
        index: the index to search.
        embed: maps a PIL image, or a text, to its vector [d]; None if only vectors are accepted.
        texts: whether `embed` takes texts.
        max_results: most neighbors of one answer.
    """

    def __init__(
        self,
        index: SearchIndex,
        embed: Callable[[Any], Tensor] | None = None,
        *,
        texts: bool = False,
        max_results: int = 100,
    ) -> None:
        self.index, self.embed, self.most = index, embed, min(max_results, len(index))
        self.takes = "vectors" if embed is None else "texts" if texts else "pictures"

    def by_picture(self, picture: Any, k: int) -> list[Answer]:
        """The k nearest of a PIL image."""
        return self._embedded("pictures", picture, k)

    def by_text(self, text: str, k: int) -> list[Answer]:
        """The k nearest of a text."""
        return self._embedded("texts", text, k)

    def _embedded(self, kind: str, query: Any, k: int) -> list[Answer]:
        if self.embed is None or self.takes != kind:
            other = {"pictures": "a picture, or a vector as JSON", "texts": "a text, or a vector as JSON"}
            take = other.get(self.takes, "a vector as JSON")
            raise RefusedError(422, f"this index holds no network that embeds {kind}: send {take}.")
        return self._nearest(self.embed(query), k)

    def by_vector(self, given: Any, k: int) -> list[Answer]:
        """The k nearest of a vector, given as {"vector": [...], "fingerprint": "..."} read from JSON."""
        if not isinstance(given, dict) or not isinstance(given.get("vector"), list):
            raise RefusedError(422, 'JSON must be {"vector": [numbers]}, and may name the network\'s "fingerprint".')
        numbers, mark = given["vector"], given.get("fingerprint")
        if not all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers):
            raise RefusedError(422, "the vector must be a list of numbers.")
        if len(numbers) != self.index.width:
            raise RefusedError(422, f"the vector has {len(numbers):,} numbers, and {self.index.width:,} are needed.")
        try:
            x = torch.tensor([float(number) for number in numbers])
        except OverflowError:
            x = torch.tensor([math.inf])
        if not bool(torch.isfinite(x).all()):
            raise RefusedError(422, "the vector holds NaN, infinity or a number beyond float32.")
        if mark is not None:
            self._check_network(mark)
        return self._nearest(x, k)

    def _check_network(self, mark: Any) -> None:
        try:
            sides = ("the index", self.index.fingerprint), ("the vector", check_fingerprint("search", str(mark)))
            check_same_network("search", *sides)
        except ValueError as error:
            raise RefusedError(409, str(error).removeprefix("search: ")) from None

    def _nearest(self, x: Tensor, k: int) -> list[Answer]:
        found = self.index.search(x[None], k)
        return self.answers(found)[0]

    def answers(self, found: Neighbors) -> list[list[Answer]]:
        """The neighbors of each query, without missing entries."""
        rows = zip(self.index.names(found), found.places.tolist(), found.scores.tolist(), strict=True)
        return [
            [
                Answer(place, name, score, self.index.label(place))
                for name, place, score in zip(names, places, scores, strict=True)
                if place >= 0
            ]
            for names, places, scores in rows
        ]
