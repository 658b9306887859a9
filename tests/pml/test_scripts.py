"""The training scripts of benchmarks/pml_scripts run with either import, and the page tells what was measured."""

from __future__ import annotations

import gc
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import pml_scripts as page  # noqa: E402


def driver():
    """The module benchmarks/speed/pml_scripts.py, which is no package."""
    told = importlib.util.spec_from_file_location("measured_scripts", ROOT / "benchmarks/speed/pml_scripts.py")
    module = importlib.util.module_from_spec(told)
    told.loader.exec_module(module)
    return module


def script(name, library):
    """A script's functions, with the imports of one library."""
    text = (ROOT / "benchmarks/pml_scripts" / name).read_text(encoding="utf-8")
    place = {"__name__": "script"}
    exec(compile(driver().replace_imports(text, library), name, "exec"), place)
    assert ("nearfar.pml" in str(place["losses"].__name__)) == (library == "nearfar")
    return place


def test_one_process(capsys):
    found = {}
    for library in ("PML", "nearfar"):
        script("triplets.py", library)["main"](epochs=1, batch_size=32, most=300)
        found[library] = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert set(found["PML"]["seconds"]) == set(found["nearfar"]["seconds"]) == {"training", "loss and miner", "scores"}
    # the two runs draw other batches
    assert found["nearfar"]["precision_at_1"] == pytest.approx(found["PML"]["precision_at_1"], abs=0.3)


def test_a_group_of_one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        mine, other = (script("two_processes.py", library)["train"](0, 1, 3, 32) for library in ("nearfar", "PML"))
    finally:
        gc.collect()  # the last reference to a group, if a reducer has it, joins threads that may wait for the GIL
        dist.destroy_process_group()
    assert mine["loss"] == pytest.approx(other["loss"], rel=1e-4)


def test_the_page_has_what_was_measured():
    told = json.loads(page.RESULTS.read_text(encoding="utf-8"))
    assert page.shown(page.PAGE.read_text(encoding="utf-8")) == page.table(told), "run python scripts/pml_scripts.py"
    assert [row["script"] for row in told["results"]] == list(driver().SCRIPTS)
    two = told["results"][1]["ends"]
    # after twenty steps of training both are at the same place
    assert two["PML"]["loss"] == pytest.approx(two["nearfar"]["loss"], rel=0.02)
