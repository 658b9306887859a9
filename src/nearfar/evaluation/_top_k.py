"""The k largest keys of each row, over tiles that arrive from left to right; ties go to the earlier column.

Once a row has k entries, only keys above its last entry matter, and soon there are few of them. Each tile is therefore
reduced to the maxima of blocks of columns, and only blocks whose maximum exceeds the row's last entry are read. This
costs a tenth of a matrix product; `topk` over the tile would cost a quarter.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class TopK:
    """The k largest keys so far: `keys` [n, k], largest first, and their columns `places` [n, k]."""

    def __init__(self, rows: int, k: int, like: Tensor) -> None:
        self.keys = torch.full((rows, k), -torch.inf, dtype=like.dtype, device=like.device)
        self.places = torch.zeros((rows, k), dtype=torch.long, device=like.device)

    def update(self, rows: slice, tile: Tensor, left: int, seen: int | None = None) -> None:
        """Merge the keys [rows, w] of columns left, left + 1, ..., which must follow all columns merged before.

        `tile` is contiguous or the transpose of a contiguous matrix. `seen` is the approximate number of columns merged
        so far, `left` by default; it affects only the speed.
        """
        k = self.keys.shape[1]
        found, seen = None, left if seen is None else seen
        if tile.device.type == "cpu" and seen >= 8 * k:
            # about k / seen of the columns still enter: balance the cost of reading maxima against that of blocks
            found = _above(tile, self.keys[rows, -1], max(2, min(32, math.isqrt(seen // (8 * k)))), most=max(64, 2 * k))
        if found is None:
            keys, places = top_k(tile if tile.stride(1) == 1 else tile.contiguous(), min(k, tile.shape[1]))
            self._merge(torch.arange(rows.start, rows.stop, device=tile.device), keys, places + left)
        elif len(found[0]):
            self._merge(found[0] + rows.start, found[1], found[2] + left)

    def _merge(self, rows: Tensor, keys: Tensor, places: Tensor) -> None:
        k = self.keys.shape[1]
        keys, places = torch.cat([self.keys[rows], keys], dim=1), torch.cat([self.places[rows], places], dim=1)
        ranked, order = keys.sort(dim=1, descending=True)
        ranked, spots = _by_place(ranked, places.gather(1, order), k)
        self.keys[rows], self.places[rows] = ranked[:, :k], spots[:, :k]


def merge_lists(lists: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge lists of (keys, columns), each [n, k], of different columns into the k best; ties by column."""
    k = lists[0][0].shape[1]
    keys, places = sort_by_key(*(torch.cat(side, dim=1) for side in zip(*lists, strict=True)))
    return keys[:, :k], places[:, :k]


def _above(tile: Tensor, bar: Tensor, fold: int, most: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Rows with keys above their threshold `bar`, with these keys (padded with -inf) and their columns.

    None if a row has more than `most` such keys. A block is `fold` columns, a stride apart, so that the maxima of all
    blocks are an elementwise maximum of slices.
    """
    wide = tile.shape[1]
    stride = -(-wide // fold)
    row, block = (_peaks(tile, stride) > bar[:, None]).nonzero(as_tuple=True)
    column = block[:, None] + stride * torch.arange(fold)
    last = column.clamp(max=wide - 1)
    base = tile if tile.stride(1) == 1 else tile.T
    keys = base.reshape(-1)[row[:, None] * tile.stride(0) + last * tile.stride(1)]
    hit = (keys > bar[row, None]) & (column < wide)
    row, column, keys = row[:, None].expand_as(hit)[hit], column[hit], keys[hit]
    counts = torch.bincount(row, minlength=len(bar))
    longest = int(counts.max()) if len(row) else 0
    if longest > most:
        return None
    some = counts > 0
    slot = torch.arange(len(row)) - (counts.cumsum(dim=0) - counts)[row]
    line = (some.cumsum(dim=0) - 1)[row]
    padded = keys.new_full((int(some.sum()), longest), -torch.inf)
    places = torch.zeros(padded.shape, dtype=torch.long)
    padded[line, slot], places[line, slot] = keys, column
    return some.nonzero().flatten(), padded, places


def _peaks(tile: Tensor, stride: int) -> Tensor:
    """The largest key of each block of columns, [n, stride]; block b holds columns b, b + stride, ..."""
    if tile.stride(1) != 1:  # reduce along the memory layout: five times faster than through the transpose
        return _peaks_down(tile.T, stride).T
    whole = tile.shape[1] // stride
    peaks = tile[:, : whole * stride].view(len(tile), whole, stride).amax(dim=1)
    rest = tile.shape[1] - whole * stride
    if rest:
        peaks[:, :rest] = torch.maximum(peaks[:, :rest], tile[:, whole * stride :])
    return peaks


def _peaks_down(tile: Tensor, stride: int) -> Tensor:
    whole = len(tile) // stride
    peaks = tile[: whole * stride].view(whole, stride, tile.shape[1]).amax(dim=0)
    rest = len(tile) - whole * stride
    if rest:
        peaks[:rest] = torch.maximum(peaks[:rest], tile[whole * stride :])
    return peaks


def top_k(tile: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row [n, w], largest first, ties by column; `topk` leaves the order of ties open."""
    keys, places = _by_place(*_candidates(tile, min(k + 1, tile.shape[1])), k)
    if keys.shape[1] > k:
        unclear = ((keys[:, k - 1] == keys[:, k]) & (keys[:, k] > -torch.inf)).nonzero().flatten()
        if len(unclear):
            keys[unclear, :k], places[unclear, :k] = _earliest(tile[unclear], keys[unclear, k - 1], k)
    return keys[:, :k], places[:, :k]


def _candidates(tile: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row, ties in any order: they lie in the k blocks with the largest maxima."""
    wide = tile.shape[1]
    fold = math.isqrt(wide // k)
    if tile.device.type != "cpu" or fold < 4:
        found = tile.topk(k, dim=1)
        return found.values, found.indices
    stride = -(-wide // fold)
    block = _peaks(tile, stride).topk(k, dim=1, sorted=False).indices
    column = (block[:, :, None] + stride * torch.arange(fold)).flatten(1)
    keys = tile.gather(1, column.clamp(max=wide - 1)).masked_fill_(column >= wide, -torch.inf)
    found = keys.topk(k, dim=1)
    return found.values, column.gather(1, found.indices).clamp_(max=wide - 1)


def _earliest(tile: Tensor, last: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest where the k-th, `last`, has ties beyond the list: keys above it, then its earliest ties."""
    above, equal = tile > last[:, None], tile == last[:, None]
    spare = k - above.sum(dim=1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(dim=1, dtype=torch.int32) <= spare))
    places = chosen.nonzero()[:, 1].reshape(len(tile), k)
    return sort_by_key(tile.gather(1, places), places)


def _by_place(keys: Tensor, places: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Sort ties among the first k entries by column, in lists that are sorted by key."""
    tied = ((keys[:, :-1] == keys[:, 1:])[:, :k] & (keys[:, 1:] > -torch.inf)[:, :k]).any(dim=1)
    if bool(tied.any()):
        keys[tied], places[tied] = sort_by_key(keys[tied], places[tied])
    return keys, places


def sort_by_key(keys: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Sort by key, equal keys by column: first by column, then stably by key."""
    places, order = places.sort(dim=1)
    keys, again = keys.gather(1, order).sort(dim=1, descending=True, stable=True)
    return keys, places.gather(1, again)
