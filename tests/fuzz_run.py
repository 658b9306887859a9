"""Random losses on random batches in random manners, against the slow oracle of the algebra.

    python tests/fuzz_run.py --first 0 --count 10000      # seeds 0 ... 9999; --first goes on where one stopped
    python tests/fuzz_run.py --first 137 --count 1        # one of them again

A seed that fails is printed with that line, its configuration and what was found.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
import warnings

import numpy as np
import torch
from fuzz import Case, drawn, perturbed
from fuzz_manners import ENGINES, Manner, engine, laid, manners, mode
from oracles import algebra

import nearfar as nf

CLOSE = {torch.float64: 1e-10, torch.float32: 3e-4}
"""How far value and gradient may lie from the oracle's, relative to the largest of them."""
HALF = {torch.bfloat16: 2**-8, torch.float16: 2**-10}
"""What a gradient in half precision may be off by besides: one rounding (two, of small numbers, in float16)."""


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


def found(case: Case, manner: Manner) -> list:
    """The same by the package; None in place of what was not asked for."""
    batch = case.batch
    with engine(manner.engine) as name, warnings.catch_warnings():
        warnings.simplefilter("ignore", nf.DegenerateBatchWarning)
        loss = case.make(name)
        loss.zero_grad()
        with torch.inference_mode(manner.asks == "inside"):
            rows = laid(torch.tensor(batch.rows, dtype=case.rounded), manner.rows).detach()
            rows.requires_grad_(
                manner.asks in ("all", "rows") or (manner.asks == "references" and batch.place is not None)
            )
            references = None
            if batch.references is not None and batch.place is None:
                references = laid(torch.tensor(batch.references, dtype=case.rounded), manner.references).detach()
                references.requires_grad_(manner.asks in ("all", "references"))
        with mode(manner.asks):
            if batch.place is not None:
                references = rows[torch.tensor(batch.place)]
            value = loss(rows, batch.relation(lambda x: laid(x, manner.told)), ref_emb=references)
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


def settled(seed: int) -> tuple[Case, list]:
    """The case of a seed and its answer, on rows where rounding is felt no more than it must be.

    Not at a jump of the gradient, where it could fall either way, and no pair so near that its distance, made of
    products, has few digits left.
    """
    for attempt in range(20):
        case = drawn(seed, attempt)
        if case.refused:  # other rows may come with a relation that the loss does not take
            continue
        grain, close = float(torch.finfo(case.dtype).eps), CLOSE[case.dtype]
        try:
            answer = wanted(case)
        except algebra.UnclearError:
            continue
        near = case.product.similarity == "neg_euclidean" and case.batch.crowded(case.product.normalize) * grain
        if case.exact or not (near > close / 2 or far(wanted(perturbed(case, 30 * grain)), answer) > close / 2):
            return case, answer
    raise AssertionError(f"every draw lies at a jump\n{case}")


def check_refused(case: Case) -> None:
    """The package must refuse the case, in one sentence."""
    for name in ("dense", "tiled"):
        try:
            found(case, Manner(name))
        except ValueError as error:
            said = str(error)
        else:
            raise AssertionError(f"{name} takes what must be refused\n{case}")
        assert any(reason in said for reason in case.refused.split("|")), f"{said}\n{case}"
        assert said.endswith("."), f"{said}\n{case}"
        assert "\n" not in said, f"{said}\n{case}"


def asked(case: Case, manner: Manner, got: list) -> None:
    """Whoever asked for a gradient must have it, in its own type; nobody else."""
    references = case.batch.references is not None and case.batch.place is None
    for slope, wants in zip(got[1:], (("all", "rows"), ("all", "references") if references else ()), strict=False):
        if wants and manner.asks in wants:
            assert slope is not None, f"{manner} asked for a gradient and got none\n{case}"
    if not manner.grad and manner.asks != "none":
        assert all(slope is None for slope in got[1:]), f"{manner}: a gradient that nobody asked for\n{case}"


def check(seed: int) -> None:
    """Fail with a sentence where the package and the oracle differ on a seed."""
    first = drawn(seed)
    if first.refused:
        check_refused(first)
        return
    case, answer = settled(seed)
    close = CLOSE[case.dtype]
    for manner in manners(seed):
        got = found(case, manner)
        asked(case, manner, got)
        apart = far(got[:1], answer[:1])
        assert apart < close, f"{manner}: the value differs from the oracle's by {apart:.2g}\n{case}"
        apart = far(got[1:], answer[1:])
        assert apart < close + HALF.get(case.rounded, 0.0), f"{manner}: the gradient differs by {apart:.2g}\n{case}"


def main(arguments: list[str] | None = None) -> int:
    """Check a range of seeds; the number of those that failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=10_000, help="how many seeds")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    failed, start = list[int](), time.monotonic()
    print(f"seeds {given.first} ... {given.first + given.count - 1} on {', '.join(ENGINES)}", flush=True)
    for done, seed in enumerate(range(given.first, given.first + given.count)):
        try:
            check(seed)
        except Exception as error:
            failed.append(seed)
            if not isinstance(error, AssertionError):
                traceback.print_exc()
            print(f"FAILED: python tests/fuzz_run.py --first {seed} --count 1\n{error}", flush=True)
        if (done + 1) % 500 == 0:
            spent = time.monotonic() - start
            print(f"{done + 1} seeds, up to {seed}, {len(failed)} failed, {spent:.0f} s", flush=True)
    print(f"{given.count} seeds, {len(failed)} failed{': ' + ', '.join(map(str, failed)) if failed else ''}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
