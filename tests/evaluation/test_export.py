"""ONNX export: a file only if onnxruntime gives the same vectors, for batches of any size."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from needs import need
from torch import nn

from nearfar.evaluation import export_onnx

needed = ("onnx", "onnxruntime", "onnxscript")


@pytest.fixture(scope="module", autouse=True)
def _extra():
    for name in needed:
        need(name)


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(), nn.Linear(144, 5)
    )


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    model = network().train()
    model[1].running_mean.fill_(0.3)  # evaluation mode differs from training mode
    folder = tmp_path_factory.mktemp("onnx")
    found = export_onnx(model, torch.randn(1, 1, 8, 8), folder / "model.onnx")
    return model, found


def test_onnxruntime_agrees_on_batches_of_any_size(exported):
    import onnxruntime

    model, found = exported
    session = onnxruntime.InferenceSession(str(found.path), providers=["CPUExecutionProvider"])
    for size in (1, 2, 7, 30):
        x = torch.randn(size, 1, 8, 8)
        with torch.no_grad():
            wanted = model.eval()(x).numpy()
        got = session.run([found.output], {found.input: x.numpy()})[0]
        np.testing.assert_allclose(got, wanted, atol=1e-5)


def test_it_says_what_was_checked(exported):
    _, found = exported
    assert found.difference <= found.tolerance
    assert found.batches == (4, 1)
    assert "agrees within" in str(found)
    assert str(found.path) in str(found)


def test_one_file_and_nothing_else(exported):
    _, found = exported
    assert [p.name for p in found.path.parent.iterdir()] == ["model.onnx"]


def test_nothing_of_this_machine_is_in_the_file(exported):
    content = exported[1].path.read_bytes()
    assert b"stack_trace" not in content
    assert os.fsencode(Path(torch.__file__).parent) not in content


def test_modes_are_put_back(tmp_path):
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout())
    model[1].eval()
    export_onnx(model, torch.randn(2, 3), tmp_path / "m.onnx")
    assert (model.training, model[0].training, model[1].training) == (True, True, False)


def test_disagreement_leaves_no_file(tmp_path, exported):
    model, _ = exported
    with pytest.raises(ValueError, match=r"more than 0e\+00; no file was written"):
        export_onnx(model, torch.randn(2, 1, 8, 8), tmp_path / "m.onnx", tolerance=0.0)
    assert list(tmp_path.iterdir()) == []


class Branch(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class Fixed(nn.Module):
    def forward(self, x):
        return x.reshape(2, -1)


class Two(nn.Module):
    def forward(self, x):
        return x, x


@pytest.mark.parametrize(
    ("model", "words"),
    [(Branch(), "could not be exported"), (Fixed(), "itself fails on a batch of 5"), (Two(), "but gave tuple")],
)
def test_what_cannot_be_exported(tmp_path, capfd, model, words):
    with pytest.raises(ValueError, match=words) as error:
        export_onnx(model, torch.randn(2, 3), tmp_path / "m.onnx")
    assert len(str(error.value).splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
    assert "forward" not in "".join(capfd.readouterr())  # nothing of the exporter's own pages


def test_whole_numbers_as_input(tmp_path):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(20, 6)

        def forward(self, x):
            return self.table(x).mean(dim=1)

    found = export_onnx(Words(), torch.randint(0, 20, (3, 4)), tmp_path / "m.onnx")
    assert found.batches == (6, 1)


@pytest.mark.parametrize("name", needed)
def test_without_the_extra_one_sentence(monkeypatch, tmp_path, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf'{name}, which is not installed; run pip install "nearfar\[onnx\]"'):
        export_onnx(nn.Linear(2, 2), torch.ones(1, 2), tmp_path / "m.onnx")


def test_a_bad_example(tmp_path):
    with pytest.raises(ValueError, match="one sample or more"):
        export_onnx(nn.Linear(2, 2), torch.ones(0, 2), tmp_path / "m.onnx")


def test_an_older_pytorch_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("nearfar.evaluation._export.RECENT", False)
    with pytest.raises(ImportError, match=r"^export_onnx needs PyTorch 2\.11 or newer, but this is \d+\.\d+"):
        export_onnx(nn.Linear(2, 2), torch.ones(1, 2), tmp_path / "m.onnx")
