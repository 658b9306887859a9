"""Do the tests notice? Mutants of the sources, each run against the tests that reach it.

python scripts/mutants.py --minutes 60        go on for an hour from where the last call ended, then report
python scripts/mutants.py --report            report alone
python scripts/mutants.py --check             run every test that killed a mutant on the sources as they are

240 mutants are drawn with a fixed seed, 30 of each package. What was found stays in build/mutants: which test reaches
which mutant (found anew for a test file that has changed), and the verdicts. No mutant touches the working tree.
A verdict is one of

killed    a test fails, or its process dies
timeout   a test hangs
survived  all tests that reach the mutant pass
unseen    no test reaches it, and those of its package pass
open      more tests reach it than the bound (`--seconds`) allows, and the ones that were run pass
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mutants_draw import Mutant, draw
from mutants_tests import ROOT, Copy, Session, copied, preload, run, write_probes

PACKAGES = ["losses", "sets", "engines", "evaluation", "train", "data", "doctor", "serve"]
HOME = ROOT / "build" / "mutants"
INTERPRETED = "tests/interpreted/"
"""Tests that run Triton's interpreter; only mutants of kernels and of what calls them are run against these."""
ELSEWHERE = {"bench", "geometry", "gpu", "linear", "plot", "pml", "project", "studies", "tune"}
"""Folders of tests that are about other packages, or about no behavior."""
VERDICTS = ("killed", "timeout", "survived", "unseen", "open")


def main() -> None:
    """Draw, find the tests, decide, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60, help="that this call may take")
    parser.add_argument("--seconds", type=float, default=120, help="of tests that one mutant may take")
    parser.add_argument("--each", type=int, default=30, help="mutants of a package")
    parser.add_argument("--seed", type=int, default=21)
    parser.add_argument("--only", nargs="*", default=PACKAGES, choices=PACKAGES, help="packages")
    parser.add_argument("--report", action="store_true", help="report alone")
    parser.add_argument("--check", action="store_true", help="run the tests that killed mutants on the sources alone")
    given = parser.parse_args()
    end = time.monotonic() + 60 * given.minutes
    HOME.joinpath("tests").mkdir(parents=True, exist_ok=True)
    mutants = draw(PACKAGES, given.each, given.seed)
    if not given.report:
        preload()
        # with spares: what takes the place of mutants whose code goes away is known already
        spare = draw(PACKAGES, 2 * given.each, given.seed)
        for whole in (False, True):
            tests, found = find_tests(mutants, spare, whole, end)
            if not given.check:
                decide([m for m in mutants if m.package in given.only], tests, given.seconds, end, found and whole)
        if given.check:
            check(tests, end)
    report(mutants)


@dataclass
class Tests:
    """What is known of a test file.

    Attributes:
        path: of the file, below the root.
        digest: of its content.
        probed: keys of the mutants that were looked for.
        times: seconds of each test.
        failed: tests that fail without a mutant.
        hits: which tests reach a mutant.
    """

    path: str
    digest: str
    probed: list[str]
    times: dict[str, float]
    failed: list[str]
    hits: dict[str, list[str]]

    def reach(self, mutant: Mutant) -> list[str]:
        """The tests that reach a mutant, in the order of the file."""
        found = {*self.hits.get(mutant.key, ())} - {*self.failed}
        return [test for test in self.times if test in found]

    @cached_property
    def breadth(self) -> Counter[str]:
        """How many mutants each test reaches."""
        return Counter(test for found in self.hits.values() for test in found)

    @property
    def interpreted(self) -> bool:
        """Whether they run Triton's interpreter."""
        return self.path.startswith(INTERPRETED)


def test_files(mutants: Sequence[Mutant], whole: bool) -> list[str]:
    """Test files; those named after a package or a module of a mutant come first, or alone."""
    found = (path for path in (ROOT / "tests").rglob("test_*.py") if path.parent.name not in ELSEWHERE)
    names = sorted(path.relative_to(ROOT).as_posix() for path in found)
    near = {*PACKAGES, *(Path(m.path).stem.strip("_") for m in mutants)}
    own = [name for name in names if not name.startswith(INTERPRETED) and any(part in name for part in near)]
    rest = sorted({*names} - {*own}, key=lambda name: (name.startswith(INTERPRETED), name))
    return own + rest if whole else own


def find_tests(mutants: Sequence[Mutant], spare: Sequence[Mutant], whole: bool, end: float) -> tuple[list[Tests], bool]:
    """Which test reaches which mutant, and whether the time sufficed."""
    found: list[Tests] = []
    with contextlib.ExitStack() as stack:
        copy: Copy | None = None
        for path in test_files(mutants, whole):
            kept = HOME / "tests" / f"{path.replace('/', '.')}.json"
            digest = hashlib.sha256((ROOT / path).read_bytes()).hexdigest()
            known = Tests(**json.loads(kept.read_text(encoding="utf-8"))) if kept.exists() else None
            if known is None or known.digest != digest or not {m.key for m in mutants} <= {*known.probed}:
                if time.monotonic() > end:
                    return found, False
                if copy is None:
                    copy = stack.enter_context(copied())
                    hits = write_probes(copy, spare)
                known = _reached(copy, hits, path, spare)
                known.digest = digest
                kept.write_text(json.dumps(asdict(known), indent=0), encoding="utf-8")
            found.append(known)
    return found, True


def _reached(copy: Copy, hits: Path, path: str, mutants: Sequence[Mutant]) -> Tests:
    hits.write_text("", encoding="utf-8")
    begun = time.monotonic()
    session = run(copy, [path], seconds=1800, interpret=path.startswith(INTERPRETED))
    whole = [test for test in session.times if test.startswith(f"{path}::")]
    reached: dict[str, dict[str, None]] = {}
    for line in sorted({*hits.read_text(encoding="utf-8", errors="replace").splitlines()}):
        number, words = line.split("\t", 1)
        test, _, phase = words.rpartition(" ")
        if test.startswith(f"{path}::"):
            # what a fixture or a server reaches, later tests of the file may depend on
            tests = whole if phase == "(setup)" else [test]
            reached.setdefault(mutants[int(number)].key, {}).update(dict.fromkeys(tests))
    print(f"{path}: {len(whole)} tests reach {len(reached)} mutants, {len(session.failed)} fail, "
          f"{time.monotonic() - begun:.0f} s", flush=True)  # fmt: skip
    times = {test: round(session.times[test], 3) for test in whole}
    return Tests(path, "", [m.key for m in mutants], times, session.failed, {k: [*v] for k, v in reached.items()})


def decide(mutants: Sequence[Mutant], tests: Sequence[Tests], seconds: float, end: float, whole: bool) -> None:
    """Run the mutants that have no verdict yet, the packages in turn; none survives before all tests are known."""
    known = verdicts()
    turns = sorted(mutants, key=lambda m: [x for x in mutants if x.package == m.package].index(m))
    with copied() as copy:
        for mutant in turns:
            chosen, reached = _chosen(mutant, tests)
            words = json.dumps([whole, sorted((file.path, file.digest, some) for file, some in chosen)])
            digest = hashlib.sha256(words.encode()).hexdigest()[:12]
            last = known.get(mutant.key, {})
            if last.get("verdict") in ("killed", "timeout") or (
                last.get("tests") == digest and (last["verdict"] != "open" or last["seconds"] >= seconds)
            ):
                continue
            if time.monotonic() > end:
                return
            begun = time.monotonic()
            with copy.change(mutant):
                verdict, by = _verdict(copy, mutant, chosen, seconds, 3 if whole else 1)
            if verdict == "survived" and not (whole and reached):
                verdict = "unseen" if whole else "open"
            print(f"{mutant.key} {verdict:8} {time.monotonic() - begun:4.0f} s  {mutant.name[:110]}", flush=True)
            line = {"key": mutant.key, "verdict": verdict, "by": by, "tests": digest, "seconds": seconds}
            with (HOME / "verdicts.jsonl").open("a", encoding="utf-8") as file:
                print(json.dumps(line | {"name": mutant.name}), file=file)


Choice = tuple[Tests, list[str]]


def _chosen(mutant: Mutant, tests: Sequence[Tests]) -> tuple[list[Choice], bool]:
    """The tests for a mutant, file by file, and whether they reach it; else those that bear its name."""
    name = Path(mutant.path).stem
    kernels = mutant.place.kernel or name.startswith(("_kernels", "fused", "launch"))
    allowed = [file for file in tests if kernels or not file.interpreted]
    chosen = [(file, reached) for file in allowed if (reached := file.reach(mutant))]
    whole = [(file, [test for test in file.times if test not in file.failed]) for file in allowed]
    own = [name.strip("_"), mutant.package, *(["fused", "interpreted"] if kernels else [])]

    def rank(choice: Choice) -> float:
        # tests that reach little else are most likely about it
        return sum(choice[0].breadth[test] for test in choice[1]) / len(choice[1])

    found = chosen or [x for x in whole if x[1] and any(part in x[0].path for part in own)]
    return sorted(found, key=rank), bool(chosen)


def _verdict(copy: Copy, mutant: Mutant, chosen: Sequence[Choice], seconds: float, turns: int) -> tuple[str, str]:
    """First quick tests of a few files, then the rest as far as the bound allows, those in the interpreter last."""
    doctests = str(copy.source / "nearfar" / mutant.path)
    done: set[str] = set()
    left = seconds
    for turn, choices in enumerate((_quick(chosen), chosen, chosen)[:turns]):
        interpret = turn == 2
        files, names, expected = [] if turn else [doctests], list[str](), 0.0
        for file, every in choices:
            if file.interpreted != interpret:
                continue
            some = [test for test in every if test not in done]
            took = sum(file.times[test] for test in some)
            while some and took > left:  # the slowest wait for a greater bound
                slow = max(some, key=file.times.__getitem__)
                some.remove(slow)
                took -= file.times[slow]
            if some:
                files.append(file.path)
                names += some
                expected += took
                left -= took
        if not files:
            continue
        done |= {*names}
        session = run(copy, files, names, seconds=120 + 5 * expected, first=True, interpret=interpret)
        if session.failed:
            return "killed", session.failed[0]
        if session.code is None:
            return "timeout", session.running
        if session.code not in (0, 5):
            return "killed", f"pytest ended with {session.code}"
        done -= {*names} - session.times.keys()
    every_one = {test for _, some in chosen for test in some}
    return ("survived" if done >= every_one else "open"), f"{len(done)} of {len(every_one)} tests pass"


def _quick(chosen: Sequence[Choice]) -> Iterator[Choice]:
    """At most three quick cases of each function, of the first four files, those that reach little else."""
    for file, tests in [choice for choice in chosen if not choice[0].interpreted][:4]:
        counts, some = Counter[str](), []
        for test in sorted(tests, key=lambda test: (file.breadth[test], file.times[test])):
            function = test.partition("[")[0]
            counts[function] += 1
            if counts[function] <= 3 and file.times[test] < 2:
                some.append(test)
        yield file, some


def verdicts() -> dict[str, dict[str, Any]]:
    """The last verdict of each mutant."""
    path = HOME / "verdicts.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {found["key"]: found for found in map(json.loads, lines)}


def check(tests: Sequence[Tests], end: float) -> None:
    """Run the tests that killed mutants without one; the verdicts of those that fail are taken back."""
    killers = {found["by"] for found in verdicts().values() if found["verdict"] == "killed"}
    bad = Session()
    with copied() as copy:
        for file in tests:
            if (some := killers & file.times.keys()) and time.monotonic() < end:
                bad.failed += run(copy, [file.path], some, seconds=1800, interpret=file.interpreted).failed
    for found in verdicts().values():
        if found["by"] in bad.failed:
            print(f"{found['by']} fails without a mutant: {found['key']} is open again")
            with (HOME / "verdicts.jsonl").open("a", encoding="utf-8") as file:
                print(json.dumps(found | {"verdict": "open", "tests": ""}), file=file)
    print(f"{len(killers)} tests killed mutants; {len(bad.failed)} of them fail without one")


def report(mutants: Sequence[Mutant]) -> None:
    """Counts of each package, then what was not killed; CONTRIBUTING.md names the ones that change no behavior."""
    known = verdicts()
    same = {*re.findall(r"^\| `([0-9a-f]{12})`", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE)}
    print(f"\n{'':12}{'drawn':>8}" + "".join(f"{word:>10}" for word in VERDICTS))
    for package in (*PACKAGES, ""):
        some = [m for m in mutants if package in ("", m.package)]
        counts = Counter(known[m.key]["verdict"] for m in some if m.key in known)
        print(f"{package or 'all':12}{len(some):8}" + "".join(f"{counts[word]:10}" for word in VERDICTS))
    for mutant in mutants:
        found = known.get(mutant.key)
        if found and found["verdict"] != "killed":
            why = ", changes no behavior" if mutant.key in same else ""
            print(f"\n{mutant.key} {found['verdict']}{why} ({found['by']}), line {mutant.line}\n    {mutant.name}")
    decided = [m.key for m in mutants if known.get(m.key, {}).get("verdict", "open") != "open"]
    noticed = sum(known[key]["verdict"] in ("killed", "timeout") for key in decided)
    changing = len([m for m in mutants if m.key not in same or known.get(m.key, {}).get("verdict") == "killed"])
    print(f"\n{len(decided)} of {len(mutants)} are decided; noticed: {noticed} = {noticed / len(mutants):.1%} of all, "
          f"{noticed / max(changing, 1):.1%} of those that change behavior")  # fmt: skip


if __name__ == "__main__":
    main()
