"""Model files that can run code are read only with `--trust-model`; no other file ever runs any."""

from __future__ import annotations

import io
import zipfile

import numpy as np
import pytest
import torch
from hostile_files import Payload
from shell import TRUST, Flat, run, saved

from nearfar._utils.checks import RECENT
from nearfar.cli.commands.networks import load_model
from nearfar.evaluation import Vectors

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's own exporters


def with_payload(path, mark):
    """A sound .pt2 whose example inputs are a pickle that leaves a mark."""
    saved(Flat(12), torch.randn(5, 3, 4), path)
    pickled = io.BytesIO()
    torch.save((((torch.randn(5, 3, 4),), {}), Payload(mark)), pickled)
    with zipfile.ZipFile(path) as archive:
        members = {member.filename: archive.read(member) for member in archive.infolist()}
    (inputs,) = (
        name for name in members if name.endswith(("data/sample_inputs/model.pt", "serialized_example_inputs.pt"))
    )
    members[inputs] = pickled.getvalue()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


@pytest.fixture
def data(tmp_path):
    np.savez(tmp_path / "d.npz", x=np.ones((4, 3, 4), "f4"))
    return tmp_path


@pytest.mark.parametrize("command", ["embed", "export"])
def test_a_pt2_runs_nothing_unless_it_is_trusted(data, command):
    mark = data / "mark"
    with_payload(data / "m.pt2", mark)
    words = ["d.npz", "-o", "v.npz"] if command == "embed" else ["-o", "m.onnx"]
    said = run(data, command, "m.pt2", *words, code=1)
    assert "unpickles" in said
    assert "--trust-model" in said
    assert not mark.exists()
    assert sorted(path.name for path in data.iterdir()) == ["d.npz", "m.pt2"]
    # the example is no example, so it then fails where the example is looked at: PyTorch 2.6 embeds without it
    run(data, command, "m.pt2", *words, TRUST, code=int(RECENT or command == "export"))
    assert mark.exists()  # the payload is a real one


def test_a_torchscript_writes_nothing_unless_it_is_trusted(data):
    class Writes(torch.nn.Module):
        def __init__(self, path: str):
            super().__init__()
            self.path = path

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.flatten(1) + torch.from_file(self.path, True, 1, dtype=torch.float32)

    mark = data / "mark"
    torch.jit.save(torch.jit.script(Writes(str(mark))), str(data / "m.pt"))
    said = run(data, "embed", "m.pt", "d.npz", "-o", "v.npz", code=1)
    assert "can write files" in said
    assert "--trust-model" in said
    assert not mark.exists()
    run(data, "embed", "m.pt", "d.npz", "-o", "v.npz", TRUST)
    assert mark.exists()


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".ts", ".pt2"])
def test_in_python_too(tmp_path, suffix):
    path = tmp_path / f"m{suffix}"
    saved(Flat(12), torch.randn(5, 3, 4), path)
    with pytest.raises(ValueError, match="--trust-model"):
        load_model(path)
    assert load_model(path, trust_model=True).fingerprint == load_model(path, trust_model=True).fingerprint


@pytest.mark.parametrize("name", ["m.pt", "m.pt2", "m.onnx", "v.npz"])
def test_plain_pickles_are_refused_even_if_trusted(data, name):
    mark = data / "mark"
    torch.save({"model": Payload(mark)}, data / name)
    words = ["embed", name, "d.npz"] if name != "v.npz" else ["embed", "m.onnx", name]
    if name == "v.npz":
        saved(Flat(12), torch.randn(5, 3, 4), data / "m.onnx")
        np.savez(data / name, x=np.array([Payload(mark)], dtype=object))
    run(data, *words, "-o", "o.npz", TRUST, code=1)
    assert not mark.exists()


def test_onnx_needs_no_trust(data):
    saved(Flat(12), torch.randn(5, 3, 4), data / "m.onnx")
    run(data, "embed", "m.onnx", "d.npz", "-o", "v.npz")
    assert len(Vectors.load(data / "v.npz")) == 4
