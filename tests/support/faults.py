"""Faults, on purpose: runs killed at random moments, raced for, out of disk; files damaged; a clock set back.

    make faults                                   # 100 kills and all the rest, some minutes on two cores
    python tests/support/faults.py --kills 10 --seed 7    # fewer, from another seed

A killed run is resumed, at times killed again, and must end with the journal (but for times), the checkpoints, the
scores and the vectors of a run that was left alone, bit for bit. A damaged file must be refused, or told of and
repaired; never used without a word. The runs are children of this process, which has imported everything already.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from disks import full_disk
from rich.console import Console
from runs import config, tiny

from nearfar._utils import checkpoint
from nearfar._utils.journal import read_lines
from nearfar.data import _cache
from nearfar.evaluation import Index, Vectors, embed
from nearfar.train import fit
from nearfar.train._folder import MARK

TRAINING = {"steps": 24, "evaluate_every": 3, "checkpoint_every": 4, "explain_every": 5, "diagnose_every": 6}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "projections": {
        "batches": {"name": "Representatives", "batch_size": 8, "samples": 2, "rho": 2, "hard_classes": True},
        "loss": {"name": "Margin"},
        "optimizer": {"proximal": 0.1},
    },
    "proxies": {"loss": {"name": "ProxyNCA"}, "optimizer": {"name": "sgd", "max_grad_norm": 0.5}},
    "memory and chunks": {"training": {"cross_batch_memory": 30, "cross_batch_memory_warmup": 2, "chunk": 5}},
    "workers": {"data": {"workers": 1}},
    "mined": {"batches": {"name": "MinedNegatives", "batch_size": 8, "every": 5}},
}


def train(kind: str, folder: Path, **how: Any) -> None:
    """One run of a kind, in silence."""
    settings = KINDS[kind]
    settings = {**settings, "training": {**TRAINING, **settings.get("training", {})}}
    fit(config(**settings), folder, data=tiny(), console=Console(quiet=True), **how)


def go_on(kind: str, folder: Path) -> None:
    """As a user does after a crash: resume, or begin where nothing has begun."""
    try:
        train(kind, folder, resume=True)
    except FileNotFoundError:
        train(kind, folder)


def child(act: Callable[..., None], *args: Any, log: Path | None = None) -> int:
    """A process of its own that runs `act`, and ends with 0, or with 3 after an OSError and 4 after another error."""
    pid = os.fork()
    if pid:
        return pid
    code = 0
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # workers of a killed run complain
    try:
        act(*args)
    except OSError as error:
        code = 3
        if log is not None:
            log.write_text(f"{error}", encoding="utf-8")
    except BaseException as error:
        code = 4
        print(f"  {type(error).__name__}: {error}", flush=True)
    os._exit(code)


def ended(pid: int) -> int:
    """How a child ended: its exit code, or minus its signal; its processes end with it.

    A worker that a loader starts while its process is killed would wait for batches without end.
    """
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return code


def kept(folder: Path) -> dict[str, Any]:
    """All that a run leaves behind, but for times."""
    lines = read_lines(folder / "journal.jsonl")
    assert not lines.damaged
    assert not lines.torn
    found: dict[str, Any] = {
        "journal": [{key: value for key, value in line.items() if key != "time"} for line in lines.entries],
        "scores": json.loads((folder / "scores.json").read_text(encoding="utf-8")),
        "vectors": torch.from_numpy(np.load(folder / "embeddings.npz")["x"]),
        "names": sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()),
    }
    for name, needs in (("last", checkpoint.LAST), ("best", checkpoint.BEST)):
        found[name] = checkpoint.load(folder / "checkpoints" / f"{name}.pt", needs)
    return found


def same(a: Any, b: Any) -> bool:
    """Equal to the bit, whatever it is nested in."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


class Faults:
    """The kinds of fault; what was lost is counted in `lost`."""

    def __init__(self, place: Path, seed: int) -> None:
        self.place, self.random = place, random.Random(seed)
        self.lost: list[str] = []
        self.whole: dict[str, dict[str, Any]] = {}
        self.seconds: dict[str, float] = {}
        self.points: dict[str, int] = {}
        train("plain", place / "warm")  # what is loaded at first use is loaded here, and not in every child
        for kind in KINDS:
            begun, folder = time.monotonic(), place / "whole" / kind
            count = place / "count"
            code = ended(child(self._counted, kind, folder, count))
            assert code == 0, f"{kind}: the run that is left alone fails"
            self.seconds[kind] = time.monotonic() - begun
            self.whole[kind], self.points[kind] = kept(folder), int(count.read_text(encoding="utf-8"))
        self._number = 0

    def _counted(self, kind: str, folder: Path, count: Path) -> None:
        seen = Counter[str]()
        watch(folder, lambda: seen.update(["file"]))
        train(kind, folder)
        count.write_text(str(seen["file"]), encoding="utf-8")

    def fresh(self) -> Path:
        """A name for the next run."""
        self._number += 1
        return self.place / str(self._number)

    def judge(self, what: str, kind: str, folder: Path) -> None:
        """Resume to the end, and compare."""
        code = ended(child(go_on, kind, folder))
        if code != 0 or not same(kept(folder), self.whole[kind]):
            self.lost.append(f"{what}: {kind} in {folder} ({'differs' if code == 0 else f'ended with {code}'})")
        else:
            shutil.rmtree(folder)

    def kills(self, count: int) -> str:
        """Kill -9 at random moments, every third resumed run once more."""
        done, moments = 0, Counter[str]()
        while done < count:
            kind = list(KINDS)[done % len(KINDS)]
            folder, again = self.fresh(), True
            while again:
                pid = child(go_on, kind, folder)
                time.sleep(self.random.uniform(0, self.seconds[kind]))
                os.kill(pid, signal.SIGKILL)
                killed = ended(pid) == -signal.SIGKILL
                done += killed
                moments[_reached(folder) if killed else "too late"] += 1
                again = killed and done < count and self.random.random() < 1 / 3
            self.judge("kill", kind, folder)
        return f"{done} kills: " + ", ".join(f"{number} {moment}" for moment, number in sorted(moments.items()))

    def at_files(self, count: int) -> str:
        """Kill -9 just before a file is opened, renamed or removed: the moments that a random one seldom hits."""

        def die(kind: str, folder: Path, at: int) -> None:
            left = [at]

            def step() -> None:
                left[0] -= 1
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)

            watch(folder, step)
            go_on(kind, folder)

        for number in range(count):
            kind, folder = list(KINDS)[number % len(KINDS)], self.fresh()
            at = self.random.randint(1, self.points[kind])
            code = ended(child(die, kind, folder, at))
            if code != -signal.SIGKILL:
                self.lost.append(f"{kind}: not killed at its file operation {at} but ended with {code}")
            self.judge(f"killed at file operation {at}", kind, folder)
        return f"{count} kills at a file operation"

    def races(self, count: int) -> str:
        """Four processes resume one folder at once: one has it, the others are told so, none spoils it."""
        refused = 0
        for number in range(count):
            kind, folder = list(KINDS)[number % len(KINDS)], self.fresh()
            pid = child(train, kind, folder)
            time.sleep(0.6 * self.seconds[kind])
            os.kill(pid, signal.SIGKILL)
            ended(pid)
            codes = sorted(ended(pid) for pid in [child(go_on, kind, folder) for _ in range(4)])
            if codes[0] != 0 or not set(codes) <= {0, 3}:
                self.lost.append(f"race: {kind} ended with {codes}")
            refused += codes.count(3)
            self.judge("race", kind, folder)
        return f"{count} races of four, {refused} refused"

    def full_disks(self, count: int) -> str:
        """No file may grow beyond a random size, as on a disk that is full."""

        def cramped(kind: str, folder: Path, limit: int) -> None:
            with full_disk(limit):
                train(kind, folder)

        stopped = 0
        for number in range(count):
            kind, folder = list(KINDS)[number % len(KINDS)], self.fresh()
            sizes = [path.stat().st_size for path in (self.place / "whole" / kind).rglob("*") if path.is_file()]
            log = self.place / "said"
            log.unlink(missing_ok=True)
            code = ended(child(cramped, kind, folder, self.random.randint(0, max(sizes)), log=log))
            if code not in (0, 3) or (code == 3 and "\n" in log.read_text(encoding="utf-8")):
                self.lost.append(f"full disk: {kind} ended with {code}")
            stopped += code == 3
            self.judge("full disk", kind, folder)
        return f"{count} full disks, {stopped} of them told of"

    def damage(self, count: int) -> str:
        """Flip a bit, zero a block, cut short: each file is refused, or told of and repaired."""
        told = []
        for name, (make, read) in READERS.items():
            path = make(self.place / "damage", self.place / "whole" / "plain")
            good, right = path.read_bytes(), read(path)
            outcomes = Counter[str]()
            for _ in range(count):
                path.write_bytes(damaged(good, self.random))
                outcome = _outcome(read, path, right)
                outcomes[outcome] += 1
                if outcome in ("used", "raw"):
                    told_how = "passed without a word" if outcome == "used" else "is no single sentence"
                    self.lost.append(f"{name}: damage {told_how}")
                path.write_bytes(good)
            told.append(f"{name} " + "/".join(f"{number} {what}" for what, number in sorted(outcomes.items())))
        return f"{count} damages each: {', '.join(told)}"

    def clock(self) -> str:
        """The clock on the wall stands still, then goes back: names stay apart, and time in the journal grows."""

        def back() -> None:
            os.chdir(self.place)
            now = [2e9]

            def earlier() -> float:
                now[0] -= 60
                return now[0]

            time.time = earlier
            time.strftime = lambda form, *_: "20260101-000000"
            folders = [fit(config(training=TRAINING), data=tiny(), console=Console(quiet=True)).folder for _ in "123"]
            assert len(set(folders)) == 3
            train("plain", folders[0], resume=True)
            times = [entry["time"] for entry in read_lines(folders[0] / "journal.jsonl").entries if "time" in entry]
            assert times == sorted(times)

        if ended(child(back)):
            self.lost.append("clock: a run with a clock that goes back fails")
        return "a clock that goes back"


def watch(folder: Path, step: Callable[[], None]) -> None:
    """Call `step` whenever this process is about to make, rename or remove a file of the run."""
    mine, inside = os.getpid(), str(folder)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in ("open", "os.mkdir", "os.rename", "os.remove") and os.getpid() == mine:
            path = args[0]
            if isinstance(path, str | os.PathLike) and str(path).startswith(inside):
                step()

    sys.addaudithook(hook)


def _reached(folder: Path) -> str:
    """How far a killed run had come."""
    if not (folder / MARK).exists():
        return "before it began"
    if not (folder / "checkpoints/last.pt").exists():
        return "before a checkpoint"
    return "at the end" if (folder / "embeddings.npz").exists() else "between checkpoints"


def damaged(good: bytes, draw: random.Random) -> bytes:
    """The bytes with a bit flipped, up to 512 of them zeroed, or their end lost; never as they were."""
    while True:
        bad, place = bytearray(good), draw.randrange(len(good))
        how = draw.choice(("flip", "zero", "cut"))
        if how == "flip":
            bad[place] ^= 1 << draw.randrange(8)
        elif how == "zero":
            bad[place : place + 512] = bytes(len(good[place : place + 512]))
        else:
            del bad[place:]
        if bytes(bad) != good:
            return bytes(bad)


def _outcome(read: Callable[[Path], Any], path: Path, right: Any) -> str:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            found = read(path)
        except (ValueError, FileNotFoundError) as error:
            return "refused" if "\n" not in str(error) else "raw"
        except Exception:
            return "raw"
        if same(found, right):
            return "repaired"
        return "told of" if told else "used"


Make = Callable[[Path, Path], Path]


def _copy(name: str) -> Make:
    def make(place: Path, run: Path) -> Path:
        folder = place / name.replace("/", "-")
        shutil.copytree(run, folder)
        return folder / name

    return make


def _read_journal(path: Path) -> list[Any]:
    """As a resumed run reads it: whatever is damaged or missing is told of."""
    from nearfar.runs._journal import cut

    before = path.read_bytes()
    try:
        cut(path, TRAINING["steps"], checkpoint.load(path.parent / "checkpoints/last.pt", checkpoint.LAST)["lines"])
        return [dict(entry) for entry in read_lines(path).entries]
    finally:
        path.write_bytes(before)


def _make_index(place: Path, run: Path) -> Path:
    path = place / "index.npz"
    Index(Vectors.load(run / "embeddings.npz")).save(path)
    return path


def _make_cache(place: Path, run: Path) -> Path:
    _read_cache(place / "cache" / "none")
    return next((place / "cache").iterdir())


def _read_cache(path: Path) -> dict[str, Any]:
    return {
        k: v.tolist() for k, v in _cache.load_or_make(path.parent, "numbers", lambda: {"x": np.arange(500.0)}).items()
    }


def _make_chunk(place: Path, run: Path) -> Path:
    _read_chunk(place / "chunks" / "none")
    return place / "chunks" / "chunk-000000.npz"


def _read_chunk(path: Path) -> Any:
    return embed(torch.nn.Identity(), torch.arange(600.0).reshape(100, 6), resume=path.parent, progress=False)


READERS: dict[str, tuple[Make, Callable[[Path], Any]]] = {
    "last.pt": (_copy("checkpoints/last.pt"), lambda path: checkpoint.load(path, checkpoint.LAST)),
    "best.pt": (_copy("checkpoints/best.pt"), lambda path: checkpoint.load(path, checkpoint.BEST)),
    "journal": (_copy("journal.jsonl"), _read_journal),
    "vectors": (_copy("embeddings.npz"), lambda path: Vectors.load(path).x),
    "index": (_make_index, lambda path: Index.load(path).vectors.x),
    "cache": (_make_cache, _read_cache),
    "chunk of embed": (_make_chunk, _read_chunk),
}


def main() -> int:
    """Run every kind of fault; 1 where something was lost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--points", type=int, default=50, help="kills at a file operation")
    parser.add_argument("--races", type=int, default=10)
    parser.add_argument("--disks", type=int, default=20)
    parser.add_argument("--damages", type=int, default=200, help="of each kind of file")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    args = parser.parse_args()
    torch.set_num_threads(1)
    gc.freeze()  # what all children share: none of them searches and copies it
    print(f"seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="nearfar-faults-") as place, contextlib.ExitStack():
        faults = Faults(Path(place), args.seed)
        for act in (
            lambda: faults.kills(args.kills),
            lambda: faults.at_files(args.points),
            lambda: faults.races(args.races),
            lambda: faults.full_disks(args.disks),
            lambda: faults.damage(args.damages),
            faults.clock,
        ):
            begun = time.monotonic()
            print(f"{act()} ({time.monotonic() - begun:.0f} s)", flush=True)
        for line in faults.lost:
            print(f"LOST {line}")
        print(f"{len(faults.lost)} lost" if faults.lost else "nothing was lost")
        return 1 if faults.lost else 0


if __name__ == "__main__":
    sys.exit(main())
