"""What pytest leaves alone: doctests are collected from every module, and some cannot be imported everywhere."""

from __future__ import annotations

import importlib.util
import os

collect_ignore = []
if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore += ["tests/fused_cases.py"]  # test_fused.py runs them in a process of their own
if importlib.util.find_spec("triton") is None:
    collect_ignore += [f"src/nearfar/engines/_kernels{name}.py" for name in ("", "_pairs", "_top", "_triplets")]
    collect_ignore += ["tests/fused_compiled.py"]
