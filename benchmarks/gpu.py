"""Everything to be known from a GPU in one command: each probe has its own time limit and its own file of results.

    python benchmarks/gpu.py --output OUT --seconds 1500           on the machine with the GPU
    python benchmarks/gpu.py --output OUT --device cpu --tiny      does it run at all?
    python benchmarks/gpu.py --output OUT --probes graphs big      some of the probes

The probes, in this order:

    correctness   every loss on every engine, against dense in float64 on the CPU
    small         128 to 2,048 rows beside PML, with kernel launches and memory
    graphs        CUDA graphs of every loss: captured by hand, and by `torch.compile(mode="reduce-overhead")`
    waits         how often the host waits for the device in a step
    big           8,192 to 1,048,576 rows

Each probe is a process. It writes its file after each case, so that a probe that is stopped keeps its results; called
again with the same folder, it goes on. After a lost device, a new process goes on with the next case.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "src"))  # where the package is not installed

from nearfar._utils.files import write_text
from nearfar.bench import SUBJECTS, DeviceLostError, Limits, Patience, Plan, Row, measure, offered
from nearfar.bench._launches import launches
from nearfar.bench._pages import keep, known, line
from nearfar.bench._subjects import PRECISIONS, Step, backward, batch, matmul, our_step
from nearfar.bench._timing import clock_of, reason

SHARES = {"correctness": 0.26, "small": 0.26, "graphs": 0.14, "waits": 0.02, "big": 0.32}
"""Shares of the time limit; what a probe does not need goes to the next ones."""
LOST, GRACE, TRIES = 3, 20.0, 30
"""Exit code after a lost device; last seconds of a probe, in which no case begins; most processes of a probe."""
TOLERANCE = {"float64": 1e-8, "float32": 1e-5, "tf32": 1e-2, "bf16": 3e-2, "fp16": 3e-2}
"""Allowed errors, relative to the norm; rounding across the corner of a hinge can exceed them, as the table shows."""
HEAVY = ("MultiSimilarity", "SupCon", "NTXent", "Contrastive", "DroKL", "DroTopK", "Triplet hard", "LiftedStructure",
         "Triplet all", "GeneralizedLifted", "Circle", "Margin")  # fmt: skip
"""Losses that are timed at 32,768 rows."""


class Cases:
    """Results by case in one JSON file, which is written after each case.

    Args:
        file: the file.
        seconds: time limit, after which no case begins.
    """

    def __init__(self, file: Path, seconds: float) -> None:
        self.file, self.end = file, time.monotonic() + seconds
        self.found: dict[str, dict[str, Any]] = {}
        if file.exists():
            self.found = {each["case"]: each for each in json.loads(file.read_text(encoding="utf-8"))["results"]}

    def run(self, case: str, device: str, probe: Callable[[], dict[str, Any]]) -> None:
        """Run a case, unless its result is known or the time is up; an error is its result."""
        if case in self.found or time.monotonic() > self.end:
            return
        start = time.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found = probe()
            except Exception as error:  # a finding, whatever it is
                found = {"failed": reason(error)}
        self.found[case] = {"case": case, **found, "took": time.monotonic() - start}
        self.write()
        print(f"{case:<48} {found}", flush=True)
        if device == "cuda":
            try:
                torch.cuda.synchronize()
                if "failed" in found:  # a capture that broke off may leave the generator or the allocator in it
                    _records()
            except RuntimeError as error:
                raise DeviceLostError(str(error)) from None

    def write(self) -> None:
        """Write the file; NaN and infinity become words, which JSON does not have."""
        lines = ",\n".join("  " + json.dumps(_plain(each)) for each in self.found.values())
        head = json.dumps({"torch": torch.__version__, "device": _name()})[1:-1]
        write_text(self.file, f'{{{head},\n "results": [\n{lines}\n ]}}\n')


def _records() -> None:
    """Draw numbers, empty the cache and record a graph; RuntimeError if the process can no longer do so."""
    x = torch.randn(8, device="cuda")
    torch.cuda.empty_cache()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.mul(2)
    torch.cuda.synchronize()


def _plain(each: dict[str, Any]) -> dict[str, Any]:
    return {
        key: (float(f"{value:.5g}") if math.isfinite(value) else str(value)) if isinstance(value, float) else value
        for key, value in each.items()
    }


def _name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def _subjects(given: argparse.Namespace) -> list[str]:
    """Every loss and miner that does not draw, the usual ones first."""
    names = sorted(SUBJECTS, key=lambda name: not SUBJECTS[name].usual)
    return [name for name in names if not _product(our_step(SUBJECTS[name], 16, 8, "dense")).draws][: given.most]


def _product(loss: Any) -> Any:
    """The product of a loss, or of the loss inside another one."""
    inner = getattr(loss, "loss", None)
    return getattr(loss, "robust", loss).product if inner is None else _product(inner)


# Correctness


def _solved(name: str, rows: int, engine: str, device: str, precision: str, e: torch.Tensor) -> list[torch.Tensor]:
    """The value and the gradients of a loss, in float64 on the CPU."""
    torch.manual_seed(0)
    loss: Any = SUBJECTS[name].make(rows, e.shape[1], engine)
    loss = (loss.double() if precision == "float64" else loss).to(device)
    y = batch(rows, e.shape[1])[1].to(device)
    leaf = e.detach().to(device, PRECISIONS[precision]).requires_grad_()
    value = loss(leaf, y)
    value.sum().backward()
    learned = [x.grad for x in loss.parameters() if x.grad is not None]
    return [each.detach().double().cpu() for each in (value, leaf.grad, *learned)]


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-12))


@cache
def _reference(name: str, rows: int, width: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Dense in float64 on the CPU, on rows rounded to a type."""
    return _solved(name, rows, "dense", "cpu", "float64", batch(rows, width)[0].detach().to(dtype))


def _correct(name: str, rows: int, engine: str, device: str, precision: str, width: int) -> dict[str, Any]:
    e = batch(rows, width)[0].detach().to(PRECISIONS[precision])
    wanted = _reference(name, rows, width, e.dtype)
    with matmul(precision):
        found = _solved(name, rows, engine, device, precision, e)
    errors = [_error(a, b) for a, b in zip(found, wanted, strict=True)]
    good = bool(max(errors) <= TOLERANCE[precision])  # False for NaN
    return {"value": errors[0], "gradient": max(errors[1:]), "ok": good}


def correctness(given: argparse.Namespace) -> None:
    """Every loss on every engine and in every precision against dense on the CPU in float64."""
    cases = Cases(given.output / "correctness.json", given.seconds)
    sizes = (
        (24,) if given.tiny else (203, 1030)
    )  # all precisions of the small one first: triplets of 1,030 rows take long
    for rows in sizes:
        for precision in ("float32", "bf16", "tf32", "fp16", "float64"):
            for name in _subjects(given):
                for engine in offered(given.device)[2:]:
                    what = f"{name}, {engine}, {precision}, {rows} rows"
                    case = (name, rows, engine, given.device, precision, 40)
                    cases.run(what, given.device, lambda case=case: _correct(*case))


# Tables


def _table(given: argparse.Namespace, file: str, plans: Iterator[Plan]) -> list[Row]:
    """Measure the plans one after the other into one file."""
    rows: list[Row] = []
    end = time.monotonic() + given.seconds
    for plan in plans:
        left = end - time.monotonic()
        if left <= 0:
            break
        plan = replace(plan, seconds=left)
        rows = known(given.output / file, plan)
        for row in measure(plan, known=rows):
            rows.append(row)
            keep(given.output / file, rows, plan)
            print(*(line(row, who) for who in row.cells if who in plan.engines), sep="\n", flush=True)
    return rows


def _plan(given: argparse.Namespace, **more: Any) -> Plan:
    common: dict[str, Any] = {
        "width": given.width,
        "device": given.device,
        "engines": offered(given.device),
        "patience": Patience(2, 0.1) if given.tiny else Patience(25, 0.5),
        "limits": Limits(4096, 20),
    }
    plan = {**common, **more}
    if given.tiny:
        plan.update(sizes=(16, 32), losses=plan["losses"][: given.most], memory=False)
    return Plan(**plan)


def small(given: argparse.Namespace) -> None:
    """Small batches with PML and launches: losses that PML has, then the others; float32, then bf16."""
    both = [name for name in SUBJECTS if SUBJECTS[name].peer is not None]
    ours = tuple(name for name in SUBJECTS if SUBJECTS[name].peer is None)
    sizes = (128, 512, 2048)

    def plans() -> Iterator[Plan]:
        for losses, precision in ((tuple(both), "float32"), (ours, "float32"), (HEAVY, "bf16")):
            engines = offered(given.device, ("auto", "dense"))
            yield _plan(
                given, losses=losses, sizes=sizes, precisions=(precision,), engines=engines, launches=min(sizes)
            )

    _table(given, "small.json", plans())


def big(given: argparse.Namespace) -> None:
    """Large batches: first the sizes that have bars."""

    def plans() -> Iterator[Plan]:
        few: dict[str, Any] = {
            "patience": Patience(7, 1.0),
            "engines": offered(given.device, ("auto",)),
            "peers": False,
        }
        yield _plan(given, losses=HEAVY, sizes=(32768,), precisions=("bf16",), **few)
        yield _plan(given, losses=HEAVY[:1], sizes=(262144, 1048576), precisions=("bf16",), **few)
        yield _plan(given, losses=HEAVY, sizes=(32768,), precisions=("tf32", "float32"), **few)
        yield _plan(given, losses=HEAVY, sizes=(8192,), precisions=("float32", "bf16"), **few)
        yield _plan(given, losses=HEAVY[:4], sizes=(131072,), precisions=("bf16", "float32"), **few)

    _table(given, "big.json", plans())


# Graphs


def _median(step: Callable[[], Any], device: str, times: int = 30) -> float:
    clock, found = clock_of(device, 2), []
    for _ in range(times):
        start = clock()
        step()
        found.append(clock() - start)
    return 1e3 * statistics.median(found[1:])


def _eager(step: Step, e: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    leaf = e.detach().clone().requires_grad_()
    backward(step, leaf, y)
    assert leaf.grad is not None  # noqa: S101 - every loss has a gradient
    return leaf.grad


def captured(name: str, engine: str, rows: int, width: int) -> dict[str, Any]:
    """Capture forward and backward by hand, and replay on other rows."""
    e, y = batch(rows, width, "cuda")
    step = our_step(SUBJECTS[name], rows, width, engine, "cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            e.grad = None
            backward(step, e, y)
    torch.cuda.current_stream().wait_stream(side)
    eager = _median(lambda: backward(step, e, y), "cuda")
    e.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backward(step, e, y)
    with torch.no_grad():
        e.copy_(torch.randn_like(e))
    graph.replay()
    torch.cuda.synchronize()
    assert e.grad is not None  # noqa: S101 - made in the capture
    error = _error(e.grad, _eager(step, e, y))
    return {"ms": _median(graph.replay, "cuda"), "eager ms": eager, "gradient": error, "ok": error < 1e-3}


def reduced(name: str, engine: str, rows: int, width: int, given: argparse.Namespace) -> dict[str, Any]:
    """`torch.compile(mode="reduce-overhead")` of the loss: one graph, replayed."""
    torch.compiler.reset()
    e, y = batch(rows, width, given.device)
    step = our_step(SUBJECTS[name], rows, width, engine, given.device)
    how: dict[str, Any] = {"backend": given.backend} if given.backend else {"mode": "reduce-overhead"}
    compiled = torch.compile(step, fullgraph=True, dynamic=False, **how)

    learned = list(step.parameters()) if isinstance(step, torch.nn.Module) else []

    def once() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        for x in (e, *learned):  # a gradient lies in the graph's memory, which the next run overwrites
            x.grad = None
        backward(compiled, e, y)

    for _ in range(4):
        once()
    assert e.grad is not None  # noqa: S101 - every loss has a gradient
    error = _error(e.grad, _eager(step, e, y))
    found = {"ms": _median(once, given.device), "gradient": error, "ok": error < 1e-3}
    if given.device == "cpu":  # its operators are counted by a mode under which nothing is compiled
        return found
    try:
        return {**found, "launches": launches(compiled, e, y)}
    except RuntimeError as error:  # what was measured stands
        return {**found, "launches": reason(error)}


def graphs(given: argparse.Namespace) -> None:
    """CUDA graphs of every loss: all of them by hand, then by the compiler, which takes longer."""
    cases = Cases(given.output / "graphs.json", given.seconds)
    rows = 16 if given.tiny else 128
    for name in _subjects(given) if given.device == "cuda" else ():
        case = (name, "auto", rows, given.width)
        cases.run(f"by hand, {name}, auto", given.device, lambda case=case: captured(*case))
    for name in _subjects(given):
        case = (name, "auto", rows, given.width)
        cases.run(f"compiled, {name}", given.device, lambda case=case: reduced(*case, given))


# Waits


def count_waits(name: str, engine: str, rows: int, given: argparse.Namespace) -> dict[str, Any]:
    """How often the host waits for the device in one step; None on a CPU."""
    step, (e, y) = (
        our_step(SUBJECTS[name], rows, given.width, engine, given.device),
        batch(rows, given.width, given.device),
    )
    backward(step, e, y)  # the first step sets up what later ones use
    if given.device != "cuda":
        return {"waits": None}
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            backward(step, e, y)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return {"waits": sum("synchronizing" in str(each.message) for each in heard)}


def waits(given: argparse.Namespace) -> None:
    """Waits of the host in a step of every loss."""
    cases = Cases(given.output / "waits.json", given.seconds)
    for name in _subjects(given):
        for engine in offered(given.device):
            case = (name, engine, 16 if given.tiny else 2048, given)
            cases.run(f"{name}, {engine}", given.device, lambda case=case: count_waits(*case))


PROBES = {"correctness": correctness, "small": small, "graphs": graphs, "waits": waits, "big": big}


def session(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the probes one after the other, each in its own process, within the time limit."""
    end, found = time.monotonic() + given.seconds, []
    for place, name in enumerate(given.probes):
        later = sum(SHARES[each] for each in given.probes[place:])
        start, tries = time.monotonic(), []
        limit = (end - start) * SHARES[name] / later
        while len(tries) < TRIES and (left := limit - (time.monotonic() - start)) > 0:
            tries.append(_process(given, name, left))
            if tries[-1] != LOST:
                break
        found.append({"probe": name, "exit codes": tries, "seconds": round(time.monotonic() - start, 1)})
        print(f"== {found[-1]}", flush=True)
        write_text(given.output / "session.json", json.dumps({"device": _name(), "probes": found}, indent=1) + "\n")
    return found


def _process(given: argparse.Namespace, name: str, seconds: float) -> int | str:
    """The exit code of a probe's process, or "time" if it was stopped."""
    own = seconds - min(GRACE, 0.2 * seconds)
    words = [sys.executable, __file__, "--probe", name, "--seconds", str(own), "--output", str(given.output),
             "--device", given.device, "--width", str(given.width), "--most", str(given.most),
             *(["--tiny"] if given.tiny else []), *(["--backend", given.backend] if given.backend else [])]  # fmt: skip
    print(f"== {name}, {seconds:.0f} s", flush=True)
    child = subprocess.Popen(words, start_new_session=True, encoding="utf-8")
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired:
        return "time"
    finally:
        with suppress(ProcessLookupError):  # all of it has ended, also what it has started, such as compilers
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the folder of the result files")
    parser.add_argument("--seconds", type=float, default=1500.0, help="for all of it")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--probes", nargs="+", default=list(PROBES), choices=list(PROBES))
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tiny", action="store_true", help="a few rows of a few losses")
    parser.add_argument("--most", type=int, default=99, help="losses in a probe")
    parser.add_argument("--backend", default="", help="of torch.compile, in place of reduce-overhead")
    parser.add_argument("--probe", choices=list(PROBES), help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    if given.probe is None:
        session(given)
        return
    try:
        PROBES[given.probe](given)
    except DeviceLostError as error:
        print(error, flush=True)
        os._exit(LOST)  # what would be cleaned up lies on the lost device


if __name__ == "__main__":
    main()
