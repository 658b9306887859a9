"""Training on a GPU: pictures held there are those of the files, and recorded kernels compute what plain ones do."""

from __future__ import annotations

import pytest
import runs
import torch

from nearfar import models
from nearfar.data import View
from nearfar.data._samples import DataSet
from nearfar.train import _build as module
from nearfar.train import fit
from nearfar.train._build import compile_trunk
from tests.data.test_cache import KEYS, files, pictures, shrunk, stored  # noqa: F401

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here; run on a GPU machine"),
]
GPU = torch.device("cuda", 0)


def test_held_pictures_are_the_files(files, tmp_path):  # noqa: F811
    samples = pictures(files)
    for transform in (shrunk(), shrunk(color=0.3), shrunk(train=False)):
        view = View(stored(samples, tmp_path), transform, seed=5, device=GPU)
        numbers, _, indices = view.__getitems__(KEYS)
        got = view.render(numbers, indices, GPU)
        want = View(samples, transform, seed=5).__getitems__(KEYS)[0]
        assert got.device == GPU
        levels = 255 * 0.25 * (got.cpu() - want).abs()
        assert levels.max() <= 5
        assert (levels > 0.5).float().mean() < 0.05


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch's own, of its first recording
@pytest.mark.parametrize("how", ["graphs", "kernels"])
def test_a_compiled_network_computes_the_same(how, monkeypatch):
    """Several steps, with batch norms that learn, and a batch of another shape in between."""
    monkeypatch.setattr(module, "_compiled", set())
    torch.manual_seed(0)
    x = torch.randn(5, 12, 1, 16, 16, device=GPU)

    def trained(fast):
        torch.manual_seed(1)
        model = models.build("small", embedding_dim=8, inputs=(1, 16, 16), bn_neck=True).to(GPU).train()
        if fast:
            compile_trunk(model, how)
        moves, found = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step, batch in enumerate(x):
            out = model(batch[: 7 if step == 3 else None])
            out.square().sum(dim=1).sub(torch.arange(len(out), device=GPU)).square().mean().backward()
            moves.step()
            moves.zero_grad()
            found.append(out.detach().clone())
        with torch.no_grad():
            found.append(model.eval()(x[0]))
        return found, model.state_dict()

    (plain, weights), (fast, others) = trained(False), trained(True)
    for a, b in zip(plain, fast, strict=True):
        torch.testing.assert_close(a, b, atol=2e-3, rtol=2e-3)
    assert weights.keys() == others.keys()
    for name in weights:
        torch.testing.assert_close(weights[name], others[name], atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(("cache", "how"), [("none", "none"), ("device", "none"), ("device", "kernels")])
def test_a_run_on_a_gpu(files, tmp_path, cache, how):  # noqa: F811
    config = runs.config(
        data={
            "name": "folder",
            "path": "x",
            "transform": "photographs",
            "size": 16,
            "cache": cache,
            "cache_folder": str(tmp_path / "cache"),
            "validation": 0,
        },
        model={"name": "small", "embedding_dim": 8},
        batches={"name": "MPerClass", "classes": 2, "samples": 2},
        training={"steps": 4, "evaluate_every": 2, "checkpoint_every": 2, "precision": "bf16", "compile": how},
    )
    data = DataSet("files", pictures(files), pictures(files))
    assert fit(config, tmp_path / "run", data=data).finished
