"""Random losses on random batches, called with random options, against the slow oracle of the algebra.

    python tests/support/fuzz_run.py --first 0 --count 10000      # seeds 0 ... 9999; --first goes on where one stopped
    python tests/support/fuzz_run.py --first 137 --count 1        # one of them again
    TRITON_INTERPRET=1 python tests/support/fuzz_run.py --kernels --count 2000  # losses for the fused engine's kernels

A seed that fails is printed with that line, its configuration and what was found.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch

sys.path.append(str(Path(__file__).parents[1]))  # where the oracles are, also for a script
from fuzz import Case, drawn, perturbed
from fuzz_calls import ENGINES, KERNELS, CallOptions, call_options, engine, lay_out, mode
from fuzz_kernels import counted, draws
from oracles import algebra

import nearfar as nf
from nearfar.engines.auto import INSTALLED

CLOSE = {torch.float64: 1e-10, torch.float32: 3e-4}
"""How far value and gradient may lie from the oracle's, relative to the largest of them."""
HALF = {torch.bfloat16: 2**-8, torch.float16: 2**-10}
"""What a gradient in half precision may be off by besides: one rounding (two, of small numbers, in float16)."""
HALF_PRODUCTS = 0.03
"""How far kernels that take products of float16 may be off."""


def told(case: Case) -> np.ndarray:
    """What each value counts: unequal shares where there is one an anchor."""
    return np.linspace(1.0, 2.0, len(case.batch.rows)) if case.product.reduction == "none" else np.ones(())


def wanted(case: Case) -> list:
    """Value, gradient of the rows, of the references and of the thresholds, by the oracle."""
    batch = case.batch
    found = algebra.answer(case.product, batch.rows, batch.references, batch.A, batch.U, batch.orders, told(case))
    rows, references = found.rows, [found.references]
    if batch.references is None:
        references = []
    elif batch.place is not None:  # each reference is a row
        rows, references = rows.copy(), []
        np.add.at(rows, batch.place, found.references)
    thresholds = found.threshold_positive, found.threshold_negative
    if case.shared:
        thresholds = (sum(thresholds),) * 2
    return [found.value, rows, *references, *thresholds]


def found(case: Case, options: CallOptions) -> list:
    """The same by the package; None in place of what was not asked for."""
    batch = case.batch
    with engine(options.engine) as name, warnings.catch_warnings():
        warnings.simplefilter("ignore", nf.DegenerateBatchWarning)
        warnings.filterwarnings("ignore", '.* engine="fused" needs a CUDA device', UserWarning)
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, of exponentials that kernels mask afterwards
        loss = case.make(name)
        loss.zero_grad()
        with torch.inference_mode(options.asks == "inside"):
            rows = lay_out(torch.tensor(batch.rows, dtype=case.rounded), options.rows).detach()
            rows.requires_grad_(
                options.asks in ("all", "rows") or (options.asks == "references" and batch.place is not None)
            )
            references = None
            if batch.references is not None and batch.place is None:
                references = lay_out(torch.tensor(batch.references, dtype=case.rounded), options.references).detach()
                references.requires_grad_(options.asks in ("all", "references"))
        with mode(options.asks):
            if batch.place is not None:
                references = rows[torch.tensor(batch.place)]
            value = loss(rows, batch.relation(lambda x: lay_out(x, options.relation)), ref_emb=references)
        if value.requires_grad:
            (value * torch.tensor(told(case), dtype=case.dtype)).sum().backward()
    more = [references.grad] if references is not None and batch.place is None else []
    thresholds = [getattr(pair, "offset", None) for pair in (loss.pair_positive, loss.pair_negative)]
    slopes = [rows.grad, *more, *(None if x is None else x.grad for x in thresholds)]
    return [value.detach().numpy(), *(None if x is None else x.double().numpy() for x in slopes)]


def far(a: list, b: list) -> float:
    """The largest difference of value and gradients, each relative to its largest entry (but to 0.01 at least)."""
    apart = [0.0]
    for x, y in zip(a, b, strict=True):
        if x is None or y is None or not np.size(y):
            continue
        assert np.shape(x) == np.shape(y)
        gap = np.max(np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64)))
        apart.append(float(gap) / max(0.01, float(np.max(np.abs(y)))) if np.isfinite(gap) else np.inf)
    return max(apart)


def attempts(seed: int) -> Iterator[Case]:
    """The loss of a seed on one batch after the other."""
    return (drawn(seed, attempt) for attempt in range(20))


def settled(cases: Iterable[Case], *, half: bool = False) -> tuple[Case, list]:
    """The first case, and its answer, whose rows are such that rounding is felt no more than it must be.

    Not at a jump of the gradient, where it could fall either way, and no pair so near that its distance, made of
    products, has few digits left. `half`: products of rows in half precision are taken in it.
    """
    for case in cases:
        if case.refused:  # other rows may come with a relation that the loss does not take
            continue
        grain, close, moves = float(torch.finfo(case.dtype).eps), CLOSE[case.dtype], 1
        try:
            answer = wanted(case)
        except algebra.UnclearError:
            continue
        near = case.product.similarity == "neg_euclidean" and case.batch.crowded(case.product.normalize) * grain
        if half and case.rounded != case.dtype:
            grain, close, moves = 2**-9 / 30, HALF_PRODUCTS / 2, 3
        moved = (far(wanted(perturbed(case, 30 * grain, time)), answer) for time in range(moves))
        if case.exact or not (near > close / 2 or any(by > close / 2 for by in moved)):
            return case, answer
    raise AssertionError("every draw lies at a jump")


def check_refused(case: Case) -> None:
    """The package must refuse the case, in one sentence."""
    for name in ("dense", "tiled", "fused"):
        try:
            found(case, CallOptions(name))
        except ValueError as error:
            said = str(error)
        else:
            raise AssertionError(f"{name} takes what must be refused\n{case}")
        assert any(reason in said for reason in case.refused.split("|")), f"{said}\n{case}"
        assert said.endswith("."), f"{said}\n{case}"
        assert "\n" not in said, f"{said}\n{case}"


def asked(case: Case, options: CallOptions, got: list) -> None:
    """Whoever asked for a gradient must have it, in its own type; nobody else."""
    references = case.batch.references is not None and case.batch.place is None
    for slope, wants in zip(got[1:], (("all", "rows"), ("all", "references") if references else ()), strict=False):
        if wants and options.asks in wants:
            assert slope is not None, f"{options} asked for a gradient and got none\n{case}"
    if not options.grad and options.asks != "none":
        assert all(slope is None for slope in got[1:]), f"{options}: a gradient that nobody asked for\n{case}"


def tied(case: Case, options: CallOptions) -> bool:
    """Whether several pairs may be the largest; kernels give one of them what dense shares out, with the same value."""
    chosen = {case.product.over_positive[0], case.product.over_negative[0]} & {"worst", "topk"}
    return case.exact and options.engine.startswith("fused") and bool(chosen)


def compare(case: Case, answer: list, ways: list[CallOptions]) -> None:
    """Fail with a sentence where the package and the oracle differ on a case."""
    for options in ways:
        got = found(case, options)
        asked(case, options, got)
        if tied(case, options):
            got[1:] = [None] * len(got[1:])
        half = case.rounded != case.dtype and options.engine.startswith("fused")
        close = HALF_PRODUCTS if half else CLOSE[case.dtype]
        apart = far(got[:1], answer[:1])
        assert apart < close, f"{options}: the value differs from the oracle's by {apart:.2g}\n{case}"
        apart = far(got[1:], answer[1:])
        assert apart < close + HALF.get(case.rounded, 0.0), f"{options}: the gradient differs by {apart:.2g}\n{case}"


def check(seed: int) -> bool:
    """Hold dense, tiled and auto to the oracle on a seed; false where the package refuses it, as it should."""
    first = drawn(seed)
    if first.refused:
        check_refused(first)
        return False
    compare(*settled(attempts(seed)), call_options(seed))
    return True


def check_kernels(seed: int) -> bool:
    """Hold dense, tiled and fused to the oracle on a seed; whether kernels were at work."""
    case, answer = settled(draws(seed), half=True)
    with counted() as products:
        compare(case, answer, call_options(seed, kernels=True))
    return bool(products)


def main(arguments: list[str] | None = None) -> int:
    """Check a range of seeds; the number of those that failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=10_000, help="how many seeds")
    parser.add_argument("--kernels", action="store_true", help="losses for the fused engine, in Triton's interpreter")
    given = parser.parse_args(arguments)
    if given.kernels and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("--kernels needs TRITON_INTERPRET=1 in the environment.")
    if given.kernels and not INSTALLED:
        print("Triton is not installed (it is built for Linux on x86): no kernels are tried.")
        return 0
    torch.set_num_threads(1)
    names = KERNELS if given.kernels else ENGINES
    print(f"seeds {given.first} ... {given.first + given.count - 1} on {', '.join(names)}", flush=True)
    failed, counts = run(range(given.first, given.first + given.count), kernels=given.kernels)
    print(f"{given.count} seeds, {len(failed)} failed{': ' + ', '.join(map(str, failed)) if failed else ''}")
    print(f"{counts} {'went through the kernels' if given.kernels else 'were served, the others refused as they must'}")
    return len(failed)


def run(seeds: range, *, kernels: bool) -> tuple[list[int], int]:
    """The seeds that failed, and how many of the others were served (by kernels)."""
    trial: Callable[[int], bool] = check_kernels if kernels else check
    failed, counts, start = list[int](), 0, time.monotonic()
    for done, seed in enumerate(seeds):
        try:
            counts += trial(seed)
        except Exception as error:
            failed.append(seed)
            if not isinstance(error, AssertionError):
                traceback.print_exc()
            again = f"python tests/support/fuzz_run.py {'--kernels ' if kernels else ''}--first {seed} --count 1"
            print(f"FAILED: {again}\n{error}", flush=True)
        if (done + 1) % 500 == 0:
            spent = time.monotonic() - start
            print(f"{done + 1} seeds, up to {seed}, {len(failed)} failed, {spent:.0f} s", flush=True)
    return failed, counts


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
