"""Every example runs for five steps; every configuration we ship reads and names parts that exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nearfar.demo import recipe
from nearfar.train import load
from nearfar.train.config import to_tree
from nearfar.train.parts import check, make_loss

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_for_five_steps(path, tmp_path):
    start = "import runpy, sys; from vision import mend; mend(); runpy.run_path(sys.argv[0], run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", start.replace("sys.argv[0]", repr(str(path))), "--steps", "5"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)},
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"loss \d+\.\d{4}", done.stdout), done.stdout


def test_there_are_examples_for_four_ways():
    assert len(EXAMPLES) == 4


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configuration_reads(path):
    config = load(path)
    check(config)
    make_loss(config, classes=10)


def test_the_demo_is_a_configuration_too():
    assert to_tree(load(ROOT / "configs" / "glyphs.yaml")) == to_tree(recipe())


def test_the_papers_settings():
    bird, product = (load(ROOT / f"configs/paper/004_{name}.yaml") for name in ("cub", "sop"))
    assert (bird.optimiser.rate, product.optimiser.rate) == (1e-5, 1e-4)
    assert bird.optimiser.betas == (0.9, 0.99)
    assert bird.optimiser.head == 10
    assert bird.optimiser.proximal == 1e-3
    assert product.batches.options == {"batch_size": 128, "samples": 2, "rho": 6, "hard_classes": True}
    robust = load(ROOT / "configs/paper/002_cub.yaml")
    assert robust.data.transform == "002"
    assert robust.model.freeze_norms
