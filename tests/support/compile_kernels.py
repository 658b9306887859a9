"""Compiles the fused kernels for a GPU that need not be there.

tests/engines/test_fused.py runs this file in its own process.

The interpreter runs what Triton's compiler may refuse. Launches are caught on a CPU, and their kernels compiled for
Hopper with the types and choices that they were launched with.
"""

from __future__ import annotations

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nearfar.engines import _kernels, _kernels_pairs, _kernels_triplets, cuda, launch
from nearfar.engines.spec import LOW, Spec

ROWS, COLS, WIDTH = 40, 50, 96
TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.int8: "*i8",
}


class Caught:
    """Stands for a kernel, and compiles it where it is launched."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return self.compile

    def compile(self, *given, num_warps=4, num_stages=2, **choices):
        names = self.kernel.arg_names
        values = dict(zip(names, given, strict=False)) | choices
        signature = {name: self.kind(values[name], name) for name in names}
        fixed = {(i,): values[name] for i, name in enumerate(names) if signature[name] == "constexpr"}
        aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name][0] == "*"}
        source = ASTSource(fn=self.kernel, signature=signature, constexprs=fixed, attrs=aligned)
        options = {"num_warps": num_warps, "num_stages": num_stages}
        found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        print(self.kernel.__name__, "mma" if "mma" in found.asm["ptx"] else "fma")

    def kind(self, value, name):
        if value is None or any(p.name == name and p.is_constexpr for p in self.kernel.params):
            return "constexpr"
        if isinstance(value, torch.Tensor):
            return TYPES[value.dtype]
        return "i32" if isinstance(value, int) else "fp32"


def work(kind: torch.dtype, given: int = 0, vectors=(), score=None, **more) -> cuda.Kernels:
    """Rows and, with `given` vectors, columns of their own; `vectors` of the operator."""
    square = not given
    count = ROWS if square else COLS
    pairs = [torch.zeros(x, dtype=torch.int32) for x in (ROWS, count)]
    for bit, dtype in ((1, torch.int8), (2, torch.int32), (4, torch.float32)):
        pairs += [torch.zeros(x, dtype=dtype) for x in (ROWS, count)] if given & bit else []
    floor = torch.zeros(ROWS) if given else None
    offset = torch.zeros(()) if given else None
    spec = Spec(1.0, 0.0, given=given, dtype=LOW.index(kind), **more)
    cols = None if square else torch.zeros(COLS, WIDTH)
    return cuda.Kernels(spec, torch.zeros(ROWS, WIDTH), cols, offset, score, floor, [*pairs, *vectors])


def main() -> None:
    for module in (_kernels, _kernels_triplets, _kernels_pairs):
        for name in module.__all__:
            setattr(module, name, Caught(getattr(module, name)))
    launch._blocks = lambda x, kind: {"BM": 32, "BN": 32, "BK": 32}
    numbers, near = torch.ones(ROWS), torch.ones(ROWS, 3)
    work(torch.bfloat16, itself=1, half=1).fold()
    work(torch.bfloat16, itself=1, half=1, sums=1).fold()
    work(torch.bfloat16, half=1, shape=1, drop=1, keep=1, sums=3).fold()
    every = {"itself": 3, "similarity": 2, "power": 3.0, "drop": 1, "sums": 2, "flat": 1, "held": 1}
    work(torch.float32, 7, shape=1, side=2, **every).fold()
    saved = [numbers] * 4
    work(torch.float16, 7, saved, shape=2, **every).weigh()
    work(torch.bfloat16, 0, [numbers, numbers, numbers[:0], numbers], half=1, sums=1).weigh()
    work(torch.bfloat16, 0, saved, half=1, shape=1, drop=1, sums=3).weigh()
    work(torch.float32, 7, shape=3, itself=2, similarity=1).hardest()
    work(torch.bfloat16, half=1).hardest()
    place = near.long()
    work(torch.bfloat16, 0, [place, near], near, itself=1, shape=1, similarity=2).fold()
    work(torch.bfloat16, 7, [place, near, *saved], near, itself=2, shape=2, band=1, drop=1).weigh()
    above = work(torch.bfloat16, half=2)
    (area,) = above.areas(2**20, half=True)
    into = torch.zeros(2, dtype=torch.int32), torch.zeros(9, dtype=torch.int64), torch.zeros(9, dtype=torch.int64)
    tensors = torch.zeros(()), torch.zeros(area.tall, area.wide), *into
    above.start(_kernels_pairs.collect, area, tensors, 9, 9, SIDE=0, HALF=2)
    rows = torch.zeros(ROWS, WIDTH)
    for rest, far in (([], 0), ([rows, rows], 1)):
        work(torch.float32, 0, [place, *rest], similarity=far).near()
        work(torch.float32, 0, [place, *rest, near, near], similarity=far).weigh_near()


if __name__ == "__main__":
    main()
