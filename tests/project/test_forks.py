"""A fork behaves like `python -c`: output, exit codes, signals, folder, environment, and no trace of other forks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from forks import POSSIBLE, Fork, ran, start

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
