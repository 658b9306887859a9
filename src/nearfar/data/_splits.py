"""Splits by class, so that a network is evaluated on classes that it has not seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from nearfar._utils.checks import check_seed
from nearfar.data._samples import Labels, Samples, part


def class_disjoint(samples: Samples, share: float, *, seed: int) -> tuple[Labels, Labels]:
    """Hold out a share of the classes: indices of the remaining samples and of the held-out ones, both ascending.

    At least one class is on each side. The same labels, share and seed give the same split.

    >>> import torch
    >>> from nearfar.data import Tensors
    >>> rest, held_out = class_disjoint(Tensors(torch.eye(6), [0, 0, 1, 1, 2, 2]), 1 / 3, seed=0)
    >>> len(rest), len(held_out)
    (4, 2)
    """
    check_seed("class_disjoint", seed)
    if not 0 < share < 1:
        raise ValueError(f"class_disjoint: share must lie between 0 and 1, both excluded, but came as {share!r}.")
    among = classes_to_split(samples)
    if len(among) < 2:
        raise ValueError("class_disjoint: a split by class needs two classes or more, but one came; add other classes.")
    count = min(max(round(share * len(among)), 1), len(among) - 1)
    chosen = np.zeros(len(samples.classes), dtype=np.bool_)
    chosen[among[np.random.default_rng(seed).permutation(len(among))[:count]]] = True
    held_out = chosen[samples.labels]
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def classes_to_split(samples: Samples) -> Labels:
    """The classes of the samples, or of the queries where only some samples are queries."""
    queries = getattr(samples, "queries", None)
    found: Labels = np.arange(len(samples.classes)) if queries is None else np.unique(samples.labels[queries])
    return found


def classes_by_name(samples: Samples, patterns: Sequence[str]) -> tuple[Labels, Labels]:
    """Hold out the classes whose names match a pattern: indices of the remaining samples and of the held-out ones.

    Classes of one kind (an alphabet, a genus, a maker) often differ by the same details. A random share of the classes
    is then an easy test, because others of their kind teach these details; a whole kind is a hard one.

    Args:
        samples: the data set.
        patterns: as for file names: `*` is any text, `?` one character, `[a-f]` one of these; case matters.

    >>> import torch
    >>> from nearfar.data import Tensors
    >>> birds = Tensors(torch.eye(4), [0, 1, 2, 3], classes=("gull, herring", "gull, ivory", "tern, arctic", "wren"))
    >>> rest, held_out = classes_by_name(birds, ["gull*"])
    >>> rest, held_out
    (array([2, 3]), array([0, 1]))
    """
    chosen = np.zeros(len(samples.classes), dtype=np.bool_)
    for pattern in patterns:
        found = np.array([fnmatchcase(name, pattern) for name in samples.classes], dtype=np.bool_)
        if not found.any():
            raise ValueError(
                f"classes_by_name: no class matches {pattern!r}; class names are like {samples.classes[0]!r}, and "
                "a pattern must match the whole name ('*' is any text)."
            )
        chosen |= found
    held_out = chosen[samples.labels]
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def hold_out(samples: Samples, share: float, patterns: Sequence[str] = ()) -> tuple[Samples, Samples]:
    """Split into classes for training and held-out classes, which match the patterns, if any, or are a random share."""
    rest, held_out = classes_by_name(samples, patterns) if patterns else class_disjoint(samples, share, seed=0)
    return part(samples, rest), part(samples, held_out)


@dataclass(frozen=True)
class Shares:
    """The numbers of classes for training, validation and the test; `str` gives them in words.

    >>> print(Shares.of(15, 0.1, test=15))
    30 classes: 15 for the test, 2 held out, 13 to learn from
    """

    learn: int  # classes to learn from
    held_out: int = 0  # training classes held out to choose the best weights
    test: int = 0  # test classes; 0 if they are not known to differ from the training classes

    @staticmethod
    def of(training: int, share: float, *, test: int = 0) -> Shares:
        """Hold out a share of the training classes, and leave at least two to learn from.

        At least two are held out, because retrieval within a single class is always right; of fewer than four, none.
        """
        count = min(max(round(share * training), 2), training - 2) if share else 0
        held = count if count >= 2 else 0
        return Shares(training - held, held, test)

    def __str__(self) -> str:
        parts = ((self.test, "for the test"), (self.held_out, "held out"), (self.learn, "to learn from"))
        total = self.test + self.held_out + self.learn
        return f"{total:,} classes: " + ", ".join(f"{count:,} {words}" for count, words in parts if count)


def classes_apart(train: Samples, test: Samples) -> int:
    """The number of classes that are only in the test; 0 if class names do not distinguish them."""
    sides = [{samples.classes[label] for label in classes_to_split(samples)} for samples in (train, test)]
    return len(sides[1]) if sides[0].isdisjoint(sides[1]) else 0
