"""Random losses that the kernels of the fused engine are to compute, and a count of those that they did.

Most combinations of factors have no kernels and go to the tiled engine, so that factors are drawn again, turn by turn,
until the kernels take them; one seed in five takes what comes. `python tests/support/fuzz_run.py --kernels` runs them,
in a process that has TRITON_INTERPRET=1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from fuzz import Case, drawn
from interpreter import quicken, unfused

from nearfar.engines.cuda import Kernels

quicken()
TURNS, ATTEMPTS = 200, 3
AS_IT_COMES = 5
"""One seed in so many takes a combination whether or not it has kernels."""


def served(case: Case) -> bool:
    """Whether the fused engine says that its kernels take this combination."""
    if case.refused:
        return False
    loss = case.make("fused")
    relation = case.batch.relation().projected(loss.anchors, among=loss.among_representatives)
    return unfused(loss.product, relation) is None


def draws(seed: int) -> Iterator[Case]:
    """What a seed draws, one after the other, until a case is found that can be compared."""
    for turn in range(1, TURNS):
        for attempt in range(ATTEMPTS):
            case = drawn(seed, attempt, turn=turn)
            if seed % AS_IT_COMES == 0 or served(case):
                yield case


@contextmanager
def counted() -> Iterator[list[int]]:
    """The numbers of columns of all products that kernels were started for, in a list that grows."""
    found, start = list[int](), Kernels.__init__

    def heard(work: Kernels, *given: object) -> None:
        start(work, *given)  # type: ignore[arg-type]
        found.append(work.m)

    with patch.object(Kernels, "__init__", heard):
        yield found
