"""A fork behaves like `python -c`: output, exit codes, signals, folder, environment, and no trace of other forks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forks import POSSIBLE, Fork, ran, start
from processes import ended
from processes import start as start_ranks

CODES = {
    "end": ("import sys; print('shown', sys.argv); print('said', file=sys.stderr)", 0),
    "exit": ("import sys; sys.exit(3)", 3),
    "sentence": ("raise SystemExit('a sentence')", 1),
    "error": ("def f():\n    raise KeyError('gone')\nf()", 1),
    "at exit": ("import atexit; atexit.register(print, 'last'); print('first')", 0),
    "names": ("print(sorted(name for name in globals() if name[0] != '_'), __name__)", 0),
    "threads": ("import torch; print(torch.get_num_threads())", 0),
}


@pytest.mark.parametrize("name", CODES)
def test_a_fork_ends_like_a_process(name, tmp_path):
    code, wanted = CODES[name]
    found = ran(code, "a", "b", cwd=tmp_path)
    told = {"cwd": tmp_path, "capture_output": True, "encoding": "utf-8", "env": os.environ | {"OMP_NUM_THREADS": "1"}}
    real = subprocess.run([sys.executable, "-c", code, "a", "b"], check=False, **told)
    assert found.returncode == real.returncode == wanted
    assert found.stdout == real.stdout
    assert found.stderr.splitlines()[-1:] == real.stderr.splitlines()[-1:]


def test_a_fork_has_its_own_folder_environment_and_state(tmp_path):
    code = "import os, sys; sys.kept = 1; open('here', 'w').close(); print(dict(os.environ))"
    assert ran(code, env={"ONLY": "this"}, cwd=tmp_path).stdout.startswith("{'ONLY': 'this'")
    assert (tmp_path / "here").exists()
    assert ran("import os, sys; print(hasattr(sys, 'kept'), 'ONLY' in os.environ)").stdout == "False False\n"
    draw = "import torch; print(torch.rand(3).tolist())"
    assert ran(draw).stdout != ran(draw).stdout
    assert Path(ran("import os; print(os.getcwd())").stdout.strip()) == Path.cwd()


@pytest.mark.skipif(not POSSIBLE, reason="forks are for Linux")
def test_signals_and_those_that_do_not_end():
    assert ran("import os; os.kill(os.getpid(), 9)").returncode == -signal.SIGKILL
    waiting = start("import time; time.sleep(1000)")
    assert isinstance(waiting, Fork)
    assert waiting.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.communicate(timeout=0.0)


def test_no_other_process_can_take_the_port_of_a_group_before_its_ranks_meet():
    """Otherwise rank 0 fails, and rank 1 waits at a port that answers nothing."""
    ranks = start_ranks("import os, sys; print(os.environ['MASTER_PORT'], file=sys.stderr)", world=2)
    port, same = map(int, ended(ranks, 20))
    assert port == same
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))


@pytest.mark.skipif(not POSSIBLE, reason="forks are for Linux")
def test_what_all_ranks_wrote_is_shown_if_one_is_late(tmp_path):
    code = """import os, sys, time
print('rank', os.environ['RANK'], file=sys.stderr, flush=True)
open(sys.argv[1] + os.environ['RANK'], 'w').close()
time.sleep(1000 * (os.environ['RANK'] == '0'))"""
    ranks = start_ranks(code, str(tmp_path / "rank"), world=2)
    while ranks[1].poll() is None or not (tmp_path / "rank0").exists():
        time.sleep(0.01)
    late, fine = ended(ranks, 0.0)
    assert late.splitlines() == ["still running after 0 s", "rank 0"]
    assert fine.splitlines() == ["rank 1"]
    assert [rank.returncode for rank in ranks] == [None, 0]
