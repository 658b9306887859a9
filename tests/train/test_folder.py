"""Run folders: nothing that a run did not write is touched, and no two runs share one."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import forks
import pytest
from disks import full_disk
from rich.console import Console
from runs import config, journal, tiny, weights

from nearfar._utils import lock
from nearfar.cli import demo
from nearfar.train import _folder as folder
from nearfar.train import fit
from nearfar.train._folder import FILES, LOCK, MARK, Owner, RunFolder, is_run

HERE = Path(__file__).parents[1] / "support"


def small(steps: int = 4):
    return config(training={"steps": steps, "evaluate_every": 2, "checkpoint_every": 2, "diagnose_every": 0})


def kept(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


@pytest.mark.parametrize("words", [("config.yaml",), ("config.yaml", "notes.txt"), ("notes.txt",)])
def test_the_demo_touches_no_folder_that_is_not_a_run(tmp_path, words):
    for name in words:
        (tmp_path / name).write_text("mine", encoding="utf-8")
    for overwrite in (False, True):
        with pytest.raises(FileExistsError, match="holds no demo; choose another --folder"):
            demo.run(tmp_path, steps=1, overwrite=overwrite)
    assert kept(tmp_path) == dict.fromkeys(words, b"mine")


def test_the_demo_replaces_a_run_when_asked_and_keeps_what_lies_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "open_data", lambda name: tiny())
    monkeypatch.setattr(demo, "recipe", lambda *, steps, seed, quick: small(steps))
    monkeypatch.setattr(demo.report, "write", lambda page, *_, **__: page.write_text("a page", encoding="utf-8"))
    quiet = Console(quiet=True)
    demo.run(tmp_path / "d", steps=4, console=quiet)
    others = {"notes.txt": b"years", "checkpoints/mine.pt": b"of", "tensorboard/x": b"work"}
    for name, text in others.items():
        (tmp_path / "d" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "d" / name).write_bytes(text)
    before = kept(tmp_path / "d")
    with pytest.raises(FileExistsError, match="already holds a run; --overwrite replaces it"):
        demo.run(tmp_path / "d", steps=2, console=quiet)
    assert kept(tmp_path / "d") == before
    demo.run(tmp_path / "d", steps=2, overwrite=True, console=quiet)
    after = kept(tmp_path / "d")
    assert set(after) == set(before)
    assert {name: after[name] for name in others} == others
    assert journal(tmp_path / "d")[-1]["step"] == 2


@pytest.mark.parametrize("name", [*FILES, MARK])
def test_a_run_writes_over_nothing_that_it_finds(tmp_path, name):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("mine", encoding="utf-8")
    with pytest.raises(FileExistsError, match=rf"holds {re.escape(name)}, which this run would write over"):
        fit(small(), tmp_path, data=tiny())
    assert kept(tmp_path) == {name: b"mine"}


@pytest.mark.parametrize("size", [0, 1, 58, 113, 274])
def test_a_run_can_begin_again_after_the_disk_was_full_as_it_began(tmp_path, size):
    with RunFolder(tmp_path) as place, full_disk(size), pytest.raises(OSError, match="cannot make"):
        place.claim()
    with pytest.raises(FileNotFoundError, match="no run to resume"):
        fit(small(), tmp_path, data=tiny(), resume=True)
    assert fit(small(), tmp_path, data=tiny()).finished


def test_removal_wants_the_mark(tmp_path):
    for text in ("", None, "{", "[]", '{"other": 1}'):
        if text is not None:
            (tmp_path / MARK).write_text(text, encoding="utf-8")
        (tmp_path / "config.yaml").write_text("mine", encoding="utf-8")
        if text == "":
            folder.remove(tmp_path)  # killed between the making of the mark and its writing
            assert kept(tmp_path) == {MARK: b""}
            (tmp_path / MARK).unlink()
        else:
            with pytest.raises(ValueError, match="is not a run"):
                folder.remove(tmp_path)
            assert (tmp_path / "config.yaml").read_text(encoding="utf-8") == "mine"


def test_trainings_of_one_second_get_folders_of_their_own(tmp_path, monkeypatch):
    """Also when the clock is put back: a name that is taken is never taken again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(folder.time, "strftime", lambda form: "20261115-210358")
    found, barrier = [], threading.Barrier(8)

    def claim() -> None:
        barrier.wait()
        with RunFolder(None) as place:
            found.append(place.claim())

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stamp = "20261115-210358"
    assert sorted(map(str, found)) == sorted([f"runs/{stamp}"] + [f"runs/{stamp}-{i}" for i in range(2, 9)])
    assert all(is_run(path) for path in found)
    assert fit(small(), data=tiny()).folder == Path("runs") / f"{stamp}-9"


START = f"""
import sys, time
sys.path.insert(0, {str(HERE)!r})
from pathlib import Path
from runs import config, tiny
from nearfar.train import fit
def wait(moment):
    if moment.step == 3:
        Path(sys.argv[4]).touch()
        time.sleep(1000)
settings = config(**eval(sys.argv[2]))
fit(settings, Path(sys.argv[1]), data=tiny(), resume=sys.argv[3] == "resume", callbacks=[wait])
"""


def test_a_file_is_no_folder_of_a_run(tmp_path):
    (tmp_path / "a").write_text("mine", encoding="utf-8")
    with pytest.raises(FileExistsError, match="a is a file; choose another folder with --run"):
        RunFolder(tmp_path / "a").claim()
    assert (tmp_path / "a").read_text(encoding="utf-8") == "mine"


def test_what_a_killed_process_left_half_written_goes_with_the_run(tmp_path):
    with RunFolder(tmp_path / "a") as place:
        place.claim()
    half = tmp_path / "a" / ".journal.jsonl.0-0123abcd.part"
    half.write_text("half", encoding="utf-8")
    other = tmp_path / "a" / ".notes.part"
    other.write_text("mine", encoding="utf-8")
    shards, torn = (tmp_path / "a" / "checkpoints" / name for name in ("shards-4", "shards-6"))
    for path in (shards / ".metadata", shards / "__0_0.distcp", torn / "__0_0.distcp", torn / "notes.txt"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    folder.remove(tmp_path / "a")
    assert not half.exists()
    assert other.read_text(encoding="utf-8") == "mine"
    assert not shards.exists()
    assert [path.name for path in torn.iterdir()] == ["notes.txt"]


def start(path: Path, settings: dict, how: str = "new") -> forks.Fork | subprocess.Popen[bytes]:
    """A training that waits after its third step, its last checkpoint being of the second."""
    there = path.with_name(f"{path.name} is there")
    process = forks.start(START, str(path), repr(settings), how, str(there))
    while not there.exists():
        assert process.poll() is None, process.communicate(timeout=10)
        time.sleep(0.01)
    return process


def kill(process: forks.Fork | subprocess.Popen[bytes]) -> None:
    """End it at once, and wait for that; not for its pipes, which workers may have too."""
    os.kill(process.pid, signal.SIGKILL)
    while process.poll() is None:
        time.sleep(0.01)


EVERY_TWO = {"training": {"steps": 6, "evaluate_every": 2, "checkpoint_every": 2, "diagnose_every": 0}}


def test_one_process_at_a_time_and_the_lock_dies_with_it(tmp_path):
    """With workers: they are forked, outlive a killed parent for seconds, and must not keep its lock."""
    settings = {**EVERY_TWO, "data": {"workers": 1}}
    fit(config(**settings), tmp_path / "whole", data=tiny())
    process = start(tmp_path / "a", settings)
    for words in ({"resume": True}, {"overwrite": True}):
        with pytest.raises(BlockingIOError, match="another process is training in"):
            fit(config(**settings), tmp_path / "a", data=tiny(), **words)
    kill(process)
    fit(config(**settings), tmp_path / "a", data=tiny(), resume=True)
    process.communicate(timeout=100)
    assert journal(tmp_path / "a") == journal(tmp_path / "whole")


def test_killed_before_the_first_checkpoint_something_goes_on(tmp_path):
    settings = {"training": {**EVERY_TWO["training"], "checkpoint_every": 6, "diagnose_every": 3}}
    process = start(tmp_path / "a", settings)
    kill(process)
    process.communicate(timeout=100)
    assert not (tmp_path / "a/checkpoints/last.pt").exists()
    assert max(line["step"] for line in journal(tmp_path / "a")) == 3
    for name in "bc":  # killed while it began
        shutil.copytree(tmp_path / "a", tmp_path / name)
        folder.remove(tmp_path / name)
        with pytest.raises(FileNotFoundError, match="train without --resume"):
            fit(config(**settings), tmp_path / name, data=tiny(), resume=True)
    (tmp_path / "b" / MARK).write_text("", encoding="utf-8")
    with pytest.raises(FileExistsError, match="go on with --resume"):
        fit(config(**settings), tmp_path / "a", data=tiny())
    fit(config(**settings), tmp_path / "whole", data=tiny())
    for name, resume in {"a": True, "b": False, "c": False}.items():
        fit(config(**settings), tmp_path / name, data=tiny(), resume=resume)
        assert journal(tmp_path / name) == journal(tmp_path / "whole")
        assert all((weights(tmp_path / name)[k] == v).all() for k, v in weights(tmp_path / "whole").items())


def test_time_goes_on_where_it_stood_and_never_back(tmp_path, monkeypatch):
    fit(small(2), tmp_path / "a", data=tiny())
    path = tmp_path / "a/journal.jsonl"
    first = [json.loads(line)["time"] for line in path.read_text(encoding="utf-8").splitlines() if '"loss"' in line]
    monkeypatch.setattr(time, "time", lambda: 0.0)  # the clock on the wall is put back by decades
    fit(small(4), tmp_path / "a", data=tiny(), resume=True)
    times = [json.loads(line)["time"] for line in path.read_text(encoding="utf-8").splitlines() if '"loss"' in line]
    assert times[:2] == first
    assert times == sorted(times)


def test_nothing_in_the_sources_removes_whole_folders():
    source = Path(folder.__file__).parents[1]
    guilty = [path.name for path in source.rglob("*.py") if "rmtree" in path.read_text(encoding="utf-8")]
    assert not guilty, f"{guilty}: remove files that were written, by name"


def test_who_is_refused_reads_whose_folder_it_is(tmp_path, monkeypatch):
    with RunFolder(tmp_path / "a") as place:
        place.claim()
        owner = Owner.of(tmp_path / "a")
        assert owner is not None
        assert owner.process == os.getpid()
        with RunFolder(tmp_path / "a", overwrite=True) as other, pytest.raises(BlockingIOError) as refused:
            other.claim()
        assert f"(process {os.getpid()} of {owner.user} on {owner.machine}, since {owner.since})" in str(refused.value)
    assert Owner.of(tmp_path / "a") is None


def test_where_nothing_can_be_locked_the_owner_counts_until_it_is_gone(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    RunFolder(tmp_path / "a").claim()
    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    here = Owner.of_this_process()
    other = replace(here, machine="elsewhere")
    other.write(tmp_path / "a")
    with pytest.raises(BlockingIOError, match=f"if it was killed, remove .*{LOCK}"):
        RunFolder(tmp_path / "a").claim()
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    for content in (json.dumps(asdict(replace(here, process=done.pid))), "half a li"):
        (tmp_path / "a" / LOCK).write_text(content, encoding="utf-8")
        with pytest.warns(UserWarning, match="cannot be locked"), RunFolder(tmp_path / "a") as place:
            place.claim()
