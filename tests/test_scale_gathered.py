"""Two and three real processes give one process's numbers: value, every gradient, what a memory holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gathered_cases import Share, cases
from processes import together

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


@pytest.mark.filterwarnings("ignore::nearfar.DegenerateBatchWarning")
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_equal_one_process(world, tmp_path):
    """All cases in one start of the processes, which takes longer than they do."""
    found, wrong = together("gathered_cases", "all_cases", world, tmp_path), {}
    for name, case in cases(world).items():
        try:
            same([of_rank[name] for of_rank in found], case(Share()), name)
        except AssertionError as problem:
            wrong[name] = str(problem)
    assert not wrong, f"{len(wrong)} cases, first: {next(iter(wrong.items()))}; all: {list(wrong)}"
