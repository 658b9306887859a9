"""The operators in Triton: run kernels over the tiles of a matrix product, and merge the results of the tiles.

A strip of G = dF/d⟨x, y⟩ is written in the dtype of the products, and two matrix products turn it into gradients; the
n x m matrix is never held. On a CPU the kernels run under Triton's interpreter (TRITON_INTERPRET=1), which tests use.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from nearfar.engines.launch import Area, Launch, on_device
from nearfar.engines.spec import AROUND, BELOW_TOP, MOMENTS, POWER, fold_outputs

__all__ = ["Kernels"]

STATES = 2**23  # maximum number of state entries that the tiles of a strip write in a fold
STEP = 4  # number of positives whose triplets a kernel unrolls; each value compiles a kernel of its own
STRIP = 2**25  # entries of a strip of gradients
MANY = 8  # buffer size as a multiple of the K requested pairs; if more lie above the level, another engine is used
PAIRS = {"BM": 16, "BK": 64}  # block sizes of a program that computes single pairs: rows and entries
TALL = 1024  # minimum number of rows of a strip of gradients, because each strip adds to the gradients of all columns


class Kernels(Launch):
    """One call of an operator; takes the arguments of `Launch`."""

    def fold(self) -> list[Tensor]:
        """Fold the rows, or their triplets if scores of positives are given; without gradients."""
        if self.score is not None:
            return self._triplets()
        from nearfar.engines._kernels import fold

        spec, states, live, mined = self.spec, States(self), self._live(), int(self.floor is not None)
        for area in self.areas(STATES * self.blocks["BM"] // (2 * states.number), half=bool(spec.half)):
            rows, cols = states.empty(area)
            self.start(
                fold, area, (live, rows, cols), spec.high, spec.level, 1 / spec.gamma, spec.about, SIDE=spec.side,
                MINED=mined, HALF=spec.half, DROP=spec.drop, EXP=spec.sums, MARK=int(len(live) > 0), **states.kept,
            )  # fmt: skip
            states.add(rows, area.r0)
            if spec.half:
                states.add(cols, area.c0)
        return [*states.outputs(), self.empty(0), live, self.empty(0), self.empty(0)]

    def _live(self) -> Tensor:
        """By tiles of the matrix, whether any of their weights is not 0; empty if that is not worth knowing."""
        spec = self.spec
        sparse = self.floor is not None or spec.drop or spec.shape == POWER
        tall, wide = -(-self.n // self.blocks["BM"]), -(-self.m // self.blocks["BN"])
        return self.empty(tall * wide * int(sparse and spec.keep)).zero_()

    def weigh(self) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of rows, columns and offset, from dF/dt [n] and the level and norm of the weights."""
        if self.score is not None:
            return self._weigh_triplets()
        from nearfar.engines._kernels import weigh

        level, norm, live, pull = self.more
        spec, unit = self.spec, self._unit(pull)
        level = level.float().contiguous()
        norm = torch.ones_like(norm) if spec.sums == MOMENTS else norm
        coef = torch.where(norm == 0, 0.0, pull / unit / torch.where(norm == 0, 1.0, norm)).float().contiguous()
        learned = self.rows.new_zeros((), dtype=torch.float64)
        gradients = KernelGradients(self)
        for area in self.areas(STRIP, half=bool(spec.half), least=TALL):
            g, rows, cols = gradients.empty(area, zero=bool(spec.half or len(live)))
            learn = self.empty(area.wide, area.high if self.offset is not None else 0).zero_()
            self.start(
                weigh, area, (live, level, coef, g, rows, cols, learn), spec.high, spec.level, 1 / spec.gamma,
                spec.about, spec.first, spec.second, SIDE=spec.side, MINED=int(self.floor is not None), HALF=spec.half,
                DROP=spec.drop, EXP=spec.sums, FAR=int(self.far), MARK=int(len(live) > 0),
            )  # fmt: skip
            gradients.add(area, g, rows, cols)
            learned = learned + learn.sum(dtype=torch.float64) if self.offset is not None else learned
        by_row, by_col = gradients.found(unit)
        return by_row, by_col, (learned * unit * (spec.by_offset / spec.a)).to(self.rows.dtype)

    def maxima(self) -> Iterator[tuple[Area, Tensor, Tensor, Tensor, Tensor]]:
        """By strips: the largest loss of each row in each tile, and its column; if symmetric, the same of columns."""
        from nearfar.engines._kernels import hardest

        spec = self.spec
        for area in self.areas(STATES * self.blocks["BM"] // 4, half=bool(spec.half)):
            shapes = (area.wide, area.high), (area.tall, area.width if spec.half == 1 else 0)
            tops, turned = (self.empty(*shape) for shape in shapes)
            if spec.half:  # tiles below the diagonal are not written
                tops, turned = tops.fill_(-torch.inf), turned.fill_(-torch.inf)
            places, turned_places = (self.empty(*shape, dtype=torch.int32) for shape in shapes)
            tensors, mined = (tops, places, turned, turned_places), int(self.floor is not None)
            self.start(hardest, area, tensors, spec.high, SIDE=spec.side, MINED=mined, HALF=spec.half)
            yield area, tops, places, turned, turned_places

    def hardest(self) -> tuple[Tensor, Tensor, Tensor]:
        """The largest loss of each row (-inf without pairs), and the column of one of its largest losses."""
        best = self.empty(len(self.x)).fill_(-torch.inf)
        place = self.empty(len(self.x), dtype=torch.int64).zero_()
        for area, mine, at_mine, turned, at_turned in self.maxima():
            for tops, places, first in ((mine, at_mine, area.r0), (turned, at_turned, area.c0)):
                if not tops.numel():
                    continue
                here = slice(first, first + tops.shape[1])
                top, tile = tops.max(dim=0)
                at = places.gather(0, tile[None])[0].long()
                place[here] = torch.where(top > best[here], at, place[here])
                best[here] = torch.maximum(best[here], top)
        best = best[: self.n].clone()
        return best, place[: self.n].clone(), (best > -torch.inf).long()

    def candidates(self, count: int) -> Tensor:
        """Positions row·m + col of the losses that reach a level reached by at least `count`; those above it first.

        Ends with -1; reads their number. Empty if more than `MANY` times `count` lie above the level.
        """
        from nearfar.engines._kernels_pairs import collect

        most = min(MANY * count, self.n * self.m)
        best, tops = self.empty(0), []
        for area, top, *_ in self.maxima():
            every = torch.cat([best, top.reshape(-1)])
            best = every.topk(min(count, len(every))).values
            tops.append((area, top.view(area.wide, area.tall, -1).amax(dim=2).T.contiguous()))
        # with fewer tiles than requested pairs, the level is below all losses
        level = best.amin() if len(best) == count else best.new_full((), -torch.inf)
        level = level.clamp_min(torch.finfo(level.dtype).min)
        number = self.empty(2, dtype=torch.int32).zero_()
        places = self.empty(most + count, dtype=torch.int64).fill_(-1)
        for area, top in tops:
            tensors = (level, top, number, places[:most], places[most:])
            self.start(collect, area, tensors, most, count, SIDE=self.spec.side, HALF=self.spec.half)
        above, equal = number.tolist()
        if above > most:
            return places[:0].clone()
        # kernels write in an order that is not that of the pairs
        return places.sort(descending=True).values[: above + min(equal, count)].clone()

    def _triplets(self) -> list[Tensor]:
        """Fold the triplets of each row."""
        from nearfar.engines._kernels_triplets import fold_triplets

        spec, (scores, real, step) = self.spec, self._steps()
        found = self.empty(scores.shape[1] + 3, len(self.x), dtype=torch.float64)
        for area in self.areas(STATES * self.blocks["BM"] // len(found), half=False):
            states = self.empty(len(found), area.wide, area.high)
            self.start(
                fold_triplets, area, (scores, real, states), scores.shape[1], spec.low, spec.high, BAND=spec.band,
                DROP=spec.drop, STEP=step,
            )  # fmt: skip
            found[:, area.r0 : area.r0 + area.high] = states.sum(dim=1, dtype=torch.float64)
        first, pulls = found[:3, : self.n], found[3 : 3 + self.more[0].shape[1], : self.n].T.float().contiguous()
        none = [torch.zeros_like(x) for x in first]
        return [*(x.clone() for x in first), *none, pulls, *(self.empty(0) for _ in range(3))]

    def _weigh_triplets(self) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of rows and columns with respect to the scores of negatives."""
        from nearfar.engines._kernels_triplets import weigh_triplets

        pull = self.more[-1]
        spec, unit, gradients = self.spec, self._unit(pull), KernelGradients(self)
        coef, (scores, real, step) = (pull / unit).float().contiguous(), self._steps()
        for area in self.areas(STRIP, half=False, least=TALL):
            g, rows, cols = gradients.empty(area, zero=False)
            self.start(
                weigh_triplets, area, (scores, real, coef, g, rows, cols), scores.shape[1], spec.low, spec.high,
                BAND=spec.band, DROP=spec.drop, FAR=int(self.far), STEP=step,
            )  # fmt: skip
            gradients.add(area, g, rows, cols)
        return *gradients.found(unit), self.rows.new_zeros(())

    def _steps(self) -> tuple[Tensor, Tensor, int]:
        """Scores and measures [n, P] of positives in float32, padded to whole steps, and the positives per step."""
        assert self.score is not None  # noqa: S101 - called for triplets alone
        step = min(STEP, self.score.shape[1])
        both = (x.detach().float() for x in (self.score, self.more[1]))
        near, real = (pad(x, (0, -x.shape[1] % step)).contiguous() for x in both)
        return near, real, step

    def near(self) -> Tensor:
        """Products or squared distances [n, P] of each row and its columns `place`, without a tensor [n, P, d]."""
        from nearfar.engines._kernels_pairs import near

        place, *rest = self.more
        found, (given, more) = self.rows.new_empty(place.shape), self._single(rest)
        with on_device(self.rows):
            near[(-(-self.n // PAIRS["BM"]),)](
                *given, place.contiguous(), found, self.n, place.shape[1], self.rows.shape[1], **more
            )
        return found

    def weigh_near(self) -> tuple[Tensor, Tensor]:
        """Gradients of rows and columns (empty if the columns are the rows), given those of the outputs of `near`."""
        from nearfar.engines._kernels_pairs import near_back

        place, *rest, _, slope = self.more
        given, more = self._single(rest)
        by_row = self.rows.new_zeros(self.rows.shape)  # not `zeros_like`, which keeps strides
        by_col = by_row if self.square else self.cols.new_zeros(self.cols.shape)
        width, grid = self.rows.shape[1], [-(-size // PAIRS[x]) for size, x in zip(self.rows.shape, PAIRS, strict=True)]
        with on_device(self.rows):
            near_back[tuple(grid)](
                *given, place.contiguous(), slope.contiguous(), by_row, by_col, self.n, place.shape[1], width, **more
            )
        return by_row, self.rows.new_empty(0) if self.square else by_col

    def _single(self, rest: list[Tensor]) -> tuple[list[Tensor], dict[str, int]]:
        """Rows and columns, their float32 remainders, and the choices of the kernels of single pairs."""
        both = [self.rows.contiguous(), self.cols.contiguous()]
        lost = [x.contiguous() for x in (rest[0], rest[-1])] if rest else both
        return [*both, *lost], {"FAR": int(self.far), "REST": int(bool(rest)), **PAIRS}

    def _unit(self, pull: Tensor) -> Tensor:
        """A power of two to divide these numbers by, so that their products keep their digits in 16 bits."""
        if self.type == torch.float32:
            return pull.new_ones(())
        most = pull.abs().amax()
        return torch.where(most == 0, 1.0, torch.exp2(most.log2().ceil()))


class States:
    """Accumulated states [states, n] of all rows, float64; see the kernel `fold` for the list of states."""

    def __init__(self, work: Kernels) -> None:
        spec = work.spec
        self.work, self.tops, self.moments = work, spec.sums == BELOW_TOP, spec.sums == MOMENTS
        self.kept = {
            "FLAT": int(spec.sums in (AROUND, BELOW_TOP) and spec.flat and not spec.held),
            "HOLD": int(spec.sums in (AROUND, BELOW_TOP) and spec.held),
            "SIZED": int(spec.drop or self.moments or work.counted),
            "COUNTED": int(work.counted),
        }
        first = ["total", *["level"] * self.tops, *["second", "level"] * self.moments]
        more = zip(("second", "held", "size", "seen"), self.kept.values(), strict=True)
        self.names = [*first, *(name for name, there in more if there)]
        self.number = len(self.names)
        self.found = self._nothing(work.empty(self.number, len(work.x), dtype=torch.float64))

    def _nothing(self, state: Tensor) -> Tensor:
        state.zero_()
        if self.tops:
            state[1].fill_(-torch.inf)
        if self.moments:
            state[2].fill_(torch.inf)
        return state

    def empty(self, area: Area) -> tuple[Tensor, Tensor]:
        """Buffers for a strip: row states [states, tiles, rows], and column states if pairs are symmetric."""
        rows = self.work.empty(self.number, area.wide, area.high)
        if not self.work.spec.half:
            return rows, rows
        # tiles below the diagonal are not written
        return self._nothing(rows), self._nothing(self.work.empty(self.number, area.tall, area.width))

    def add(self, state: Tensor, first: int) -> None:
        """Merge the states [states, tiles, rows] of the rows from `first` on into the accumulated ones."""
        here = self.found[:, first : first + state.shape[2]]
        if not self.tops:
            least = torch.minimum(here[2], state[2].amin(dim=0)) if self.moments else None
            here += state.sum(dim=1, dtype=torch.float64)
            if least is not None:
                here[2] = least
            return
        every = torch.cat([here[:, None], state.double()], dim=1)
        top = every[1].amax(dim=0)
        gap = torch.where(every[1] == -torch.inf, 0.0, (every[1] - top) / self.work.spec.gamma)
        shrink = torch.exp(gap)
        total, place = every[0], 2
        here[0], here[1] = (shrink * total).sum(dim=0), top
        if self.kept["FLAT"]:  # Σ w(e^{z + gap} - 1), with Σ w = Σ w·e^z - Σ w(e^z - 1)
            here[place] = (shrink * every[place] + (total - every[place]) * torch.expm1(gap)).sum(dim=0)
            place += 1
        if self.kept["HOLD"]:
            here[place] = (shrink * (every[place] + gap * total)).sum(dim=0)
            place += 1
        here[place:] = every[place:].sum(dim=1)

    def outputs(self) -> list[Tensor]:
        """The outputs of a fold."""
        work, spec = self.work, self.work.spec
        found = {name: x[: work.n].clone() for name, x in zip(self.names, self.found, strict=True)}  # no shared memory
        zero = torch.zeros_like(found["total"])
        level = found.get("level", torch.full_like(zero, spec.level))
        size, seen = (found["size"], found["seen"]) if work.counted else work.members()
        more = (found.get(name, zero) for name in ("second", "held"))
        return fold_outputs(spec, found["total"], found.get("size", size), seen, level, *more)


class KernelGradients:
    """Gradients of rows and columns, summed over strips; one for both where the columns are the rows."""

    def __init__(self, work: Kernels) -> None:
        self.work = work
        self.rows = torch.zeros(work.x.shape, dtype=torch.float32, device=work.x.device)
        self.cols = self.rows if work.square else torch.zeros(work.y.shape, dtype=torch.float32, device=work.x.device)
        self.buffer = work.empty(0, dtype=work.type)
        self.far = work.far
        self.row_sums = work.empty(len(work.x) if self.far else 0).zero_()
        self.col_sums = self.row_sums if work.square else work.empty(len(work.y) if self.far else 0).zero_()

    def empty(self, area: Area, *, zero: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Buffers for a strip of G, and for its row and column sums by tiles, which are 0 in tiles that write none."""
        entries = area.high * area.width
        if self.buffer.numel() < entries:
            self.buffer = self.work.empty(entries, dtype=self.work.type)
        sums = (self.work.empty(area.wide, area.high * self.far), self.work.empty(area.tall, area.width * self.far))
        if zero:
            sums = (sums[0].zero_(), sums[1].zero_())
        return self.buffer[:entries].view(area.high, area.width), *sums

    def add(self, area: Area, g: Tensor, row_sums: Tensor, col_sums: Tensor) -> None:
        """Back-propagate a strip of dF/d⟨x, y⟩."""
        rows, cols = slice(area.r0, area.r0 + area.high), slice(area.c0, None)
        _add_product(self.rows[rows], g, self.work.y[cols])
        _add_product(self.cols[cols], g.T, self.work.x[rows])
        if self.far:
            self.row_sums[rows] += row_sums.sum(dim=0)
            self.col_sums[cols] += col_sums.sum(dim=0)

    def found(self, unit: Tensor) -> tuple[Tensor, Tensor]:
        """The sums times a factor, in the dtype of the rows; no column gradient if the columns are the rows."""
        rows = self._finished(self.rows, self.row_sums, self.work.x, unit)[: self.work.n]
        if self.work.square:
            return rows, rows.new_empty(0)
        return rows, self._finished(self.cols, self.col_sums, self.work.y, unit)[: self.work.m]

    def _finished(self, sums: Tensor, far: Tensor, x: Tensor, unit: Tensor) -> Tensor:
        if self.far:
            sums.addcmul_(far[:, None], x.float(), value=-1)
        return sums.mul_(unit.float())[:, : self.work.rows.shape[1]].to(self.work.rows.dtype)


def _add_product(sums: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to sums, in float32; half-precision inputs use tensor cores directly."""
    if a.dtype == torch.float32:
        torch.addmm(sums, a, b, out=sums)
    elif a.is_cuda:
        torch.addmm(sums, a, b, out_dtype=torch.float32, out=sums)
    else:
        sums += a.float() @ b.float()
