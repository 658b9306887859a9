"""A small part of `make faults`: runs killed, raced for, out of disk; files damaged; a clock set back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FEW = ("--kills", "5", "--points", "5", "--races", "1", "--disks", "2", "--damages", "25")


def test_nothing_is_lost():
    words = [sys.executable, str(Path(__file__).parents[1] / "support" / "faults.py"), *FEW]
    # runs are forks of one process, which a GPU does not bear
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    shown = subprocess.run(words, capture_output=True, encoding="utf-8", timeout=600, env=hidden)
    assert shown.returncode == 0, shown.stdout + shown.stderr  # the seed is in it
    assert shown.stdout.endswith("nothing was lost\n")
