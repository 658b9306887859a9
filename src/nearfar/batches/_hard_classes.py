"""`HardClasses`: embeddings of the representatives, and the classes nearest to a seed class (Can et al. 2019)."""

from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearfar._utils.checks import check_choice, check_whole
from nearfar._utils.tensors import check_embeddings

Stale = Literal["keep", "drop"]


class HardClasses:
    """A table Z [L, d] with one embedding per class, and the choice of classes that are hard to tell apart, in O(L·d).

    A batch of g classes consists of s seed classes, each drawn uniformly from those least used in the projection, and
    of the classes whose rows are nearest to a seed's row (Euclidean). Classes without a row are never chosen as near;
    the places then left, and the share `mix`, are filled uniformly from the other classes.

    Rows are stale: the row of a class dates from the last forward pass of one of its representatives. Embeddings must
    be those that the loss compares (unit rows for cosine).

    Args:
        classes: L.
        mix: the share of a batch drawn at random.
        seeds: s, how many neighborhoods a batch holds.
        stale: "keep" rows of earlier projections until they are renewed, or "drop" them at a new projection.

    Attributes:
        embeddings: Z, or None before the first update; on the device of the first embeddings.
        valid: [L] boolean, classes that have a row.
    """

    def __init__(self, classes: int, *, mix: float = 0.0, seeds: int = 1, stale: Stale = "keep") -> None:
        check_whole("HardClasses", "classes", classes)
        check_whole("HardClasses", "seeds", seeds)
        check_choice("HardClasses", "stale", stale, ("keep", "drop"))
        if not 0 <= mix < 1:
            raise ValueError(f"HardClasses: mix must be a share from 0 to below 1, but came as {mix!r}.")
        self.classes, self.mix, self.seeds, self.stale = classes, mix, seeds, stale
        self.embeddings: Tensor | None = None
        self.valid = torch.zeros(classes, dtype=torch.bool)

    @property
    def kind(self) -> int:
        """The options as one number above zero, for the fingerprint of a state."""
        return 1 + 2 * self.seeds + (self.stale == "drop") + 1000003 * round(1e6 * self.mix)

    def update(self, classes: Tensor, embeddings: Tensor) -> None:
        """Write rows [r, d] for class numbers [r]; if a class occurs twice, its last row is kept."""
        check_embeddings("HardClasses", "embeddings", embeddings)
        if len(classes) != len(embeddings):
            raise ValueError(f"HardClasses: each row needs a class, but {len(classes)} came for {len(embeddings)}.")
        rows = embeddings.detach()
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        if self.embeddings is None:
            self.embeddings = rows.new_zeros(self.classes, rows.shape[1])
        if rows.shape[1] != self.embeddings.shape[1]:
            raise ValueError(
                f"HardClasses: embeddings must stay {self.embeddings.shape[1]} wide, but came {rows.shape[1]} wide."
            )
        place = _last(classes.cpu())
        numbers = classes.cpu()[place]
        self.embeddings[numbers.to(self.embeddings.device)] = rows[place.to(rows.device)].to(self.embeddings)
        self.valid[numbers] = True

    def new_projection(self) -> None:
        """Start a projection with new representatives: keep the rows until they are renewed, or drop them all."""
        if self.stale == "drop":
            self.valid.zero_()

    def nearest(self, seed: int, count: int, exclude: NDArray[np.bool_] | None = None) -> NDArray[np.int64]:
        """Up to `count` class numbers whose rows are nearest to the row of `seed`; none if `seed` has no row."""
        allowed = self.valid.clone()
        if exclude is not None:
            allowed &= ~torch.from_numpy(exclude)
        allowed[seed] = False
        count = min(count, int(allowed.sum()))
        if self.embeddings is None or not self.valid[seed] or count < 1:
            return np.empty(0, dtype=np.int64)
        # from differences, which stay exact for near rows, and without a copy of the table
        exact = "donot_use_mm_for_euclid_dist"
        distance = torch.cdist(self.embeddings[seed][None], self.embeddings, compute_mode=exact)[0]
        distance = torch.where(allowed.to(distance.device), distance, torch.inf)
        found: NDArray[np.int64] = distance.topk(count, largest=False).indices.cpu().numpy()
        return found

    def choose(self, random: np.random.Generator, used: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """Choose `count` different class numbers: seeds with their neighbors, then random ones."""
        chosen = np.zeros(self.classes, dtype=bool)
        drawn: list[NDArray[np.int64]] = []

        def take(numbers: NDArray[np.int64]) -> None:
            chosen[numbers] = True
            drawn.append(numbers)

        hard = max(1, count - round(self.mix * count))
        seeds = min(self.seeds, hard)
        for i in range(seeds):
            free = np.flatnonzero(~chosen)
            least = free[used[free] == used[free].min()]
            seed = random.choice(least, 1)
            take(seed)
            take(self.nearest(int(seed[0]), hard // seeds + (i < hard % seeds) - 1, chosen))
        take(random.permutation(np.flatnonzero(~chosen))[: count - int(chosen.sum())])
        return np.concatenate(drawn)

    def state_dict(self) -> dict[str, Any]:
        """Copies of the rows (on the CPU) and of `valid`."""
        rows = None if self.embeddings is None else self.embeddings.detach().cpu().clone()
        return {"embeddings": rows, "valid": self.valid.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the rows of a saved table, on the device of the present rows."""
        if len(state["valid"]) != self.classes:
            raise ValueError(
                f"HardClasses: the state must be of {self.classes} classes, but has {len(state['valid'])}."
            )
        device = None if self.embeddings is None else self.embeddings.device
        rows = state["embeddings"]
        self.embeddings = None if rows is None else rows.clone().to(device)
        self.valid = state["valid"].cpu().clone()


def _last(classes: Tensor) -> Tensor:
    """The last position of each class number; assignment by repeated indices may keep any of them."""
    places = {number: place for place, number in enumerate(classes.tolist())}
    return torch.tensor(list(places.values()), dtype=torch.int64)
