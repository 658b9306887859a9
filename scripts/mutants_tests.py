"""Tests on a changed copy of the sources: sessions of pytest in a fork, and which test reaches which mutant.

The copy comes first on the path, also on that of the processes that tests start. Which test reaches a mutant is written
down by calls that stand before the statements in another copy, also by processes that tests start.
"""

from __future__ import annotations

import ast
import atexit
import compileall
import contextlib
import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from mutants_draw import SOURCE, Mutant, offsets

__all__ = ["ROOT", "Copy", "Session", "copied", "preload", "run", "write_probes"]

ROOT = SOURCE.parents[1]
MODULES = ("matplotlib.figure", "PIL.Image", "scipy.stats", "torch.distributed", "typer.testing", "yaml")
PROBE = """
import os
import torch

seen = set()

def hit(number):
    if torch.compiler.is_compiling():
        return
    test = os.environ.get("PYTEST_CURRENT_TEST")
    if test is None:
        with open({current!r}, encoding="utf-8") as file:
            test = file.read() + " (setup)"
    if (number, test) not in seen:
        line = f"{{number}}\\t{{test}}\\n"
        file = os.open({hits!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(file, line.encode())
            seen.add((number, test))
        except OSError:  # a test that allows no large files: what it reaches later counts
            pass
        finally:
            os.close(file)
"""


class Copy:
    """A copy of the sources that may be changed, beside the files of a session.

    Args:
        folder: where it is made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.source, self._clock = folder, folder / "src", 1_000_000_000
        shutil.copytree(SOURCE.parent, self.source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        compileall.compile_dir(self.source, quiet=2)

    @contextlib.contextmanager
    def change(self, mutant: Mutant) -> Iterator[None]:
        """Hold the mutant as long as the context lasts; its time of change is one that no bytecode has."""
        path = self.source / "nearfar" / mutant.path
        content, times = path.read_bytes(), path.stat()
        path.write_bytes(mutant.apply(content))
        self._clock += 10
        os.utime(path, (self._clock, self._clock))
        try:
            yield
        finally:
            path.write_bytes(content)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@contextlib.contextmanager
def copied() -> Iterator[Copy]:
    """A copy in a temporary folder; one that removes itself at exit would do so in each fork."""
    folder = Path(tempfile.mkdtemp(prefix="mutants-"))
    try:
        yield Copy(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Session:
    """What came of a session.

    Attributes:
        code: of pytest; None where it was ended.
        times: seconds of each test that ran to its end.
        failed: tests that failed, and modules that could not be collected.
        running: the test that ran when it was ended.
    """

    code: int | None = None
    times: dict[str, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    running: str = ""


class _Plugin:
    """Runs the chosen tests alone, and writes down how each of them went."""

    def __init__(self, current: Path, results: Path, chosen: frozenset[str] | None) -> None:
        self.current, self.chosen = current, chosen
        self.results = results.open("w", encoding="utf-8", buffering=1)

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        if self.chosen is not None:
            wanted = {item: item.nodeid in self.chosen or isinstance(item, pytest.DoctestItem) for item in items}
            left = [item for item in items if not wanted[item]]
            items[:] = [item for item in items if wanted[item]]
            config.hook.pytest_deselected(items=left)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.current.write_text(nodeid, encoding="utf-8")

    def pytest_runtest_logreport(self, report: Any) -> None:
        print(json.dumps([report.nodeid, report.duration, report.outcome]), file=self.results)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            print(json.dumps([report.nodeid, 0.0, "failed"]), file=self.results)


def preload() -> None:
    """Import what tests need and no mutant changes, once for all sessions."""
    for name in MODULES:
        import_module(name)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


def run(
    copy: Copy,
    files: Sequence[str],
    chosen: Iterable[str] | None = None,
    *,
    seconds: float,
    first: bool = False,
    interpret: bool = False,
) -> Session:
    """Run tests of these files on the copy, in a process group that is ended when it is done or late.

    Args:
        copy: the sources.
        files: of tests, below the root.
        chosen: the tests; None for all.
        seconds: that it may take.
        first: end at the first failure.
        interpret: run Triton's kernels in its interpreter.
    """
    results, current = copy.folder / "results", copy.folder / "current"
    results.unlink(missing_ok=True)
    current.write_text("", encoding="utf-8")
    pid = os.fork()
    if not pid:
        _inside(copy, files, _Plugin(current, results, None if chosen is None else frozenset(chosen)), first, interpret)
    session, end = Session(), time.monotonic() + seconds
    while session.code is None and time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            session.code = os.waitstatus_to_exitcode(status)
        else:
            time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if session.code is None:
        os.waitpid(pid, 0)
        session.running = current.read_text(encoding="utf-8")
    for line in results.read_text(encoding="utf-8").splitlines() if results.exists() else ():
        with contextlib.suppress(ValueError):  # half a line of a session that was ended
            test, took, outcome = json.loads(line)
            session.times[test] = session.times.get(test, 0.0) + took
            if outcome == "failed" and test not in session.failed:
                session.failed.append(test)
    return session


def _inside(copy: Copy, files: Sequence[str], plugin: _Plugin, first: bool, interpret: bool) -> None:
    """The session in its process; it never returns."""
    code = 3
    try:
        os.setsid()
        log = os.open(copy.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        null = os.open(os.devnull, os.O_RDONLY)
        for descriptor, opened in enumerate((null, log, log)):
            os.dup2(opened, descriptor)
        home = copy.folder / "home"
        shutil.rmtree(home, ignore_errors=True)
        os.environ |= {"PYTHONPATH": str(copy.source), "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(home),
                       "HYPOTHESIS_STORAGE_DIRECTORY": str(home)}  # fmt: skip
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        if interpret:
            os.environ["TRITON_INTERPRET"] = "1"
        sys.dont_write_bytecode = False
        sys.path.insert(0, str(copy.source))
        os.chdir(ROOT)
        words = ["-q", "-c", str(ROOT / "pyproject.toml"), f"--basetemp={copy.folder / 'tmp'}"]
        words += ["-p", "no:cacheprovider", "-p", "no:xdist"]
        code = int(pytest.main([*words, *(["-x"] if first else []), *files], plugins=[plugin]))
    except BaseException:
        traceback.print_exc()
    finally:
        plugin.results.close()
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        os._exit(code)


def write_probes(copy: Copy, mutants: Sequence[Mutant]) -> Path:
    """Put a call before the statement of each mutant, in the copy; return the file that the calls write to."""
    hits = copy.folder / "hits"
    wanted: dict[str, list[tuple[ast.stmt, int]]] = {}
    for number, mutant in enumerate(mutants):
        for path, statement in _statements(mutant):
            wanted.setdefault(path, []).append((statement, number))
    for path, calls in wanted.items():
        file = copy.source / "nearfar" / path
        file.write_bytes(_probed(file.read_bytes(), calls))
    words = PROBE.format(current=str(copy.folder / "current"), hits=str(hits))
    (copy.source / "nearfar" / "_probe.py").write_text(words, encoding="utf-8")
    return hits


def _probed(content: bytes, calls: Sequence[tuple[ast.stmt, int]]) -> bytes:
    begins, tree = offsets(content), ast.parse(content)
    first = next(x for x in tree.body if not _opens(x))
    added = [(begins[first.lineno - 1], b"from nearfar._probe import hit as __hit__\n")]
    compound = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.FunctionDef, ast.ClassDef,
                ast.AsyncFor, ast.AsyncWith, ast.AsyncFunctionDef, ast.Match)  # fmt: skip
    for statement, number in calls:
        decorators = getattr(statement, "decorator_list", [])
        line = min([statement.lineno, *(x.lineno for x in decorators)])
        end = b"\n" + b" " * statement.col_offset if isinstance(statement, compound) else b"; "
        added.append((begins[line - 1] + statement.col_offset, f"__hit__({number})".encode() + end))
    for at, words in sorted(added, reverse=True):
        content = content[:at] + words + content[at:]
    return content


def _opens(node: ast.stmt) -> bool:
    """Docstrings and imports from the future, which stand before all else."""
    if isinstance(node, ast.ImportFrom):
        return node.module == "__future__"
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _statements(mutant: Mutant) -> Iterator[tuple[str, ast.stmt]]:
    """Where it is seen that a mutant is reached: its statement, else the start of each function that it concerns."""
    place = mutant.place
    if place.kernel:
        return
    if place.function is not None:
        yield mutant.path, _line(place.statement, place.function) if place.statement else _entry(place.function)
        return
    names = {place.assigned} - {""} | ({place.owner.name} if place.owner else set())
    for path in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(path.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _compiled(node):
                used = {getattr(x, "id", None) or getattr(x, "attr", None) or getattr(x, "arg", None)
                        for x in ast.walk(node)}  # fmt: skip
                if used & names:
                    yield path.relative_to(SOURCE).as_posix(), _entry(node)


def _compiled(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("jit" in ast.unparse(x) for x in node.decorator_list)


def _entry(function: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.stmt:
    return function.body[1] if ast.get_docstring(function) and len(function.body) > 1 else function.body[0]


def _line(found: ast.stmt, function: ast.AST) -> ast.stmt:
    """The statement itself; for one that begins with `elif`, the `if` before it."""
    parents = {child: node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}
    while isinstance(found, ast.If) and isinstance(parent := parents.get(found), ast.If):
        if parent.orelse != [found] or parent.col_offset != found.col_offset:
            break
        found = parent
    return found
