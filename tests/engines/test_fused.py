"""The fused engine: its kernels in Triton's interpreter, who serves where they are missing, and the table of ways."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from interpreter import unfused
from own_parts import CASES
from processes import interpreted

import nearfar as nf
from nearfar.engines.auto import INSTALLED, has_triton

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import engine_ways  # noqa: E402

L = nf.losses
CPU = torch.device("cpu")


def batch(n=24):
    return torch.randn(n, 5, generator=torch.Generator().manual_seed(0)), torch.arange(n) // 3


with_triton = pytest.mark.skipif(
    not INSTALLED, reason="the kernels need Triton, which is built for Linux on x86, and PyTorch 2.11"
)


def run(*command, **more):
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"} | more
    command = [sys.executable, *command]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


@with_triton
@pytest.mark.parametrize("file", ["tests/interpreted/test_kernels.py", "tests/interpreted/test_zero_and_reduction.py"])
def test_the_kernels_in_the_interpreter(file):
    assert " passed" in interpreted(file)


@with_triton
def test_the_kernels_compile_for_a_gpu(tmp_path):
    """The interpreter runs what the compiler refuses; no GPU is needed to see that it does not."""
    said = run("tests/support/compile_kernels.py", TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0").split()
    kernels = ["fold"] * 4 + ["weigh"] * 3 + ["hardest"] * 2 + ["fold_triplets", "weigh_triplets", "collect"]
    kernels += ["near", "near_back"] * 2
    assert said[::2] == kernels
    assert [name for name, way in zip(kernels, said[1::2], strict=True) if way == "fma"] == [
        "fold",
        "hardest",
        *kernels[-4:],
    ]


@pytest.fixture
def _no_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.usefixtures("_no_interpreter")
def test_without_a_gpu_the_tiled_engine_serves_and_says_so():
    x, y = batch()
    assert not has_triton(CPU)
    for loss, dense in ((L.DroTopK(k=5, engine="fused"), L.DroTopK(k=5)), (L.SupCon(engine="fused"), L.SupCon())):
        sentence = (
            rf'^{type(loss).__name__}: engine="fused" needs a CUDA device, Triton and PyTorch 2.11 or newer, but the '
            r'embeddings are on cpu; engine="tiled" serves instead\.$'
        )
        with pytest.warns(UserWarning, match=sentence):
            found = loss(x, y)
        torch.testing.assert_close(found, dense(x, y), atol=1e-6, rtol=1e-6)


@pytest.mark.usefixtures("_no_interpreter")
def test_it_is_said_once_for_a_line():
    x, y = batch()
    loss = L.SupCon(engine="fused")
    with warnings.catch_warnings(record=True) as said:
        warnings.resetwarnings()
        for _ in range(3):
            loss(x, y)
    assert len(said) == 1
    assert said[0].filename == __file__


@pytest.mark.usefixtures("_no_interpreter")
@pytest.mark.filterwarnings("ignore:.*engine=.fused.:UserWarning")
def test_what_tiled_refuses_is_dense():
    """A part of one's own that says nothing of strips, and an index tuple."""

    class Own(nf.links.Add):
        def forward(self, sides):
            return super().forward(sides)

    x, y = batch()
    factors = {"pair": nf.pairs.Linear(0.5), "over": nf.sets.KL(0.1), "groups": "anchor_sign", "link": Own()}
    loss, wanted = (nf.RobustLoss(**factors, engine=engine) for engine in ("fused", "dense"))
    torch.testing.assert_close(loss(x, y), wanted(x, y))
    index = (torch.tensor([0, 3]), torch.tensor([1, 4]), torch.tensor([5, 0]))
    torch.testing.assert_close(L.Triplet(engine="fused")(x, None, index), L.Triplet(engine="dense")(x, None, index))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_part_with_one_method_of_its_own_is_not_fused(case):
    relation = nf.Relation.from_labels(batch()[1])
    for way in case.losses():
        for part in (case.made(), case.patched()):
            assert unfused(way(part).product, relation)


def test_a_hook_is_not_fused():
    loss = L.SupCon()
    relation = nf.Relation.from_labels(batch()[1])
    assert unfused(loss.product, relation) is None
    loss.pair_negative.register_forward_hook(lambda module, given, found: 2 * found)
    assert unfused(loss.product, relation)


# ---------------------------------------------------------------- which way each loss goes


def test_the_table_of_ways_is_what_the_code_says():
    """Written by scripts/engine_ways.py."""
    assert engine_ways.shown(engine_ways.PAGE.read_text(encoding="utf-8")) == engine_ways.table()
