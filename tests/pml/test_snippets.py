"""Short scripts as PML's documentation has them run with the import replaced, and give the same numbers."""

from __future__ import annotations

import logging
import textwrap
import warnings

import numpy as np
import pytest
import torch
from needs import need
from pml_snippets import OWN, PARTS, START
from pml_snippets_more import DRAWN, LOSSES, USES
from pytorch_metric_learning import losses as their_losses
from torch import nn
from torch.utils.data import TensorDataset

SCRIPTS = START | OWN | PARTS | USES
SEARCHING = (
    "samplers", "scores", "scores of all kinds", "a score of one's own", "a comparison of labels of one's own",
    "inference", "searches", "a tester",
)  # fmt: skip
"""Scripts in which PML searches with faiss."""


def ground(folder):
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(4).repeat_interleave(8)
    torch.manual_seed(0)
    images = torch.randn(32, 5, generator=generator) + 2 * torch.eye(5)[labels]
    model = nn.Linear(5, 8)
    return {
        "torch": torch,
        "np": np,
        "embeddings": nn.functional.normalize(torch.randn(32, 8, generator=generator) + 1.5 * torch.eye(8)[labels]),
        "labels": labels,
        "images": images,
        "model": model,
        "dataset": TensorDataset(images, labels),
        "folder": folder,
    }


def ran(code, folder):
    """What a script leaves as `out`."""
    logging.getLogger("PML").setLevel(logging.ERROR)
    place = ground(folder)
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(textwrap.dedent(code), "<snippet>", "exec"), place)
    out = place.get("out")
    return None if out is None else float(torch.as_tensor(out).detach())


def replaced(code):
    return code.replace("pytorch_metric_learning", "nearfar.pml")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_with_the_import_replaced(name, tmp_path):
    if name in SEARCHING:
        need("faiss")
    code = SCRIPTS[name]
    assert code.count("pytorch_metric_learning") > 0
    want = ran(code, tmp_path)
    found = ran(replaced(code), tmp_path)
    assert (found is None) == (want is None)
    if want is not None:
        assert found == pytest.approx(want, rel=1e-4)
        assert np.isfinite(found)


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_of_the_page(name, tmp_path):
    settings = ", ".join(f"{key}={value!r}" for key, value in LOSSES[name].items())
    given = "" if name == "ManifoldLoss" else ", labels"  # which takes none
    code = f"""
        from pytorch_metric_learning import losses
        embeddings.requires_grad_()
        out = losses.{name}({settings})(embeddings{given})
        out.backward()
        assert embeddings.grad is not None
    """
    want, found = ran(code, tmp_path), ran(replaced(code), tmp_path)
    assert np.isfinite(found)
    if name not in DRAWN:
        assert found == pytest.approx(want, rel=1e-3)


def test_the_page_of_losses_is_whole():
    bases = {"BaseLossWrapper", "BaseMetricLossFunction", "EmbeddingRegularizerMixin", "WeightRegularizerMixin"}
    wrappers = {"CrossBatchMemory", "GenericPairLoss", "MultipleLosses", "SelfSupervisedLoss", "VICRegLoss"}
    names = {name for name, kind in vars(their_losses).items() if isinstance(kind, type)}
    assert names - bases - wrappers == set(LOSSES)


def test_two_views_by_vicreg(tmp_path):
    code = """
        from pytorch_metric_learning import losses
        loss_func = losses.VICRegLoss(invariance_lambda=25, variance_mu=25, covariance_v=1)
        out = loss_func(embeddings, ref_emb=embeddings.flip(1))
    """
    assert ran(replaced(code), tmp_path) == pytest.approx(ran(code, tmp_path), rel=1e-4)
