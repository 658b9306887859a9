"""Rows held as codes, a byte or a bit per dimension: all of them are compared with the queries, block by block.

Queries stay as they are: the score of a row is the inner product of a query and the unit row along the row's code.
"""

import numpy as np
import torch
from torch import Tensor

from nearfar.evaluation._exact_search import TILE, Neighbors, strips
from nearfar.evaluation._faiss import Plan, merge
from nearfar.similarity import codes, unit


def code_width(plan: Plan) -> int:
    """Bytes per row."""
    return plan.width if plan.kind == "int8" else -(-plan.width // 8)


def encode(plan: Plan, rows: np.ndarray) -> np.ndarray:
    """The codes of rows [n, d]: int8 [n, d], or bits as uint8 [n, ceil(d / 8)]."""
    if plan.kind == "int8":
        return codes(torch.from_numpy(rows), "int8").to(torch.int8).numpy()
    return np.packbits(codes(torch.from_numpy(rows), "bits").numpy() > 0, axis=1)


def decode(plan: Plan, coded: np.ndarray) -> Tensor:
    """The unit rows [n, d] along some codes."""
    if plan.kind == "int8":
        return unit(torch.from_numpy(np.array(coded)).float())
    ones = torch.from_numpy(np.unpackbits(coded, axis=1, count=plan.width)).float()
    return ones.mul_(2).sub_(1).div_(plan.width**0.5)


def search_codes(plan: Plan, coded: np.ndarray, queries: Tensor, k: int) -> Neighbors:
    """The k rows with the largest scores for each query [n, d]; of equal scores the first row wins."""
    block, found = max(k, 2 * TILE // plan.width), list[Neighbors]()
    for start in range(0, plan.rows, block):
        rows = decode(plan, coded[start : start + block])
        near = list(strips(queries, rows, k=min(k, len(rows)), similarity="dot"))
        scores, places = (torch.cat([getattr(each, side) for _, each in near]) for side in ("scores", "places"))
        found = [merge([*found, Neighbors(scores, places + start)], k)]
    return found[0]
