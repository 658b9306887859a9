"""Results as text: JSON with one row per line and rounded numbers, and Markdown tables."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def as_json(found: Mapping[str, Any], rows: str = "results", digits: int = 5) -> str:
    """JSON with indented values, and the list `rows` at the end with one entry per line; numbers are rounded."""
    plain = round_numbers(found, digits)
    lines = ",\n".join("  " + json.dumps(each, ensure_ascii=False, allow_nan=False) for each in plain.pop(rows))
    head = json.dumps(plain, indent=1, ensure_ascii=False, allow_nan=False).removesuffix("\n}")
    return f'{head},\n "{rows}": [\n{lines}\n ]\n}}\n'


def round_numbers(value: Any, digits: int = 5) -> Any:
    """Round to significant digits; tuples become lists, and numbers that JSON cannot hold become None.

    >>> round_numbers({"a": (1.23456789, float("inf"))})
    {'a': [1.2346, None]}
    """
    if isinstance(value, Mapping):
        return {str(key): round_numbers(each, digits) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [round_numbers(each, digits) for each in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    return value


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])
