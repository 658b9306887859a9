"""A network exported with its preprocessing gives the vectors of its run; nothing is assumed silently."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from needs import need
from PIL import Image, ImageDraw
from shell import Flat, run, saved
from torch import nn

from nearfar import models
from nearfar._utils import checkpoint
from nearfar.data import transforms
from nearfar.data.transforms import Moved, Photograph, Plain
from nearfar.evaluation import Vectors, export_onnx
from nearfar.evaluation._preprocessing import Pixels, beside_graph, describe, from_description, from_text
from nearfar.models import registry
from nearfar.runs._config import to_tree, to_yaml
from nearfar.train import parse

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's own exporters


@pytest.fixture(scope="module", autouse=True)
def _extra():
    for name in ("onnx", "onnxruntime", "onnxscript"):
        need(name)


def photographs(folder, count=3):
    """Pictures of several sizes and shapes, with edges and shades."""
    rng = np.random.default_rng(0)
    for label, size in (("auk", (260, 300)), ("wren", (420, 240))):
        (folder / label).mkdir(parents=True)
        for number in range(count):
            shade = np.linspace(0, 255, size[0])[None, :, None] * rng.random(3)[None, None, :]
            picture = Image.fromarray(np.broadcast_to(shade, (size[1], size[0], 3)).astype(np.uint8))
            draw = ImageDraw.Draw(picture)
            for _ in range(12):
                left, top = rng.integers(0, size[0]), rng.integers(0, size[1])
                box = [int(n) for n in (left, top, left + rng.integers(5, 90), top + rng.integers(5, 90))]
                draw.ellipse(box, fill=tuple(rng.integers(0, 256, 3).tolist()))
            picture.save(folder / label / f"{number}.png")


def a_run(folder, monkeypatch):
    """A run folder of a network for photographs with a mean and a deviation, its weights by chance."""
    kind = (nn.Conv2d(3, 8, 9, stride=8), (3, 224, 224), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    monkeypatch.setitem(registry.OWN, "small", lambda inputs, pretrained, hidden: copy.deepcopy(kind))
    config = parse(
        {"model": {"name": "small", "embedding_dim": 8, "pool": "max"}, "data": {"transform": "photographs"}}
    )
    torch.manual_seed(0)
    model = models.build("small", embedding_dim=8, inputs=(3, 224, 224), pool="max")
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    about = {"transform": "photographs", "shape": [3, 224, 224]}
    state = {"step": 1, "score": None, "model": model.state_dict(), "inputs": about, "config": to_tree(config)}
    checkpoint.save(folder / "checkpoints" / "best.pt", state)


def cosines(a, b):
    return torch.nn.functional.cosine_similarity(a.double(), b.double())


def test_a_run_and_its_export_give_the_same_vectors(tmp_path, monkeypatch):
    photographs(tmp_path / "birds")
    a_run(tmp_path / "run", monkeypatch)
    run(tmp_path, "export", "run", "-o", "m.onnx")
    shown = [run(tmp_path, "embed", model, "birds", "-o", f"{model}.npz") for model in ("run", "m.onnx")]
    ours, theirs = (Vectors.load(tmp_path / f"{model}.npz") for model in ("run", "m.onnx"))
    assert cosines(ours.x, theirs.x).min() >= 0.9999
    assert cosines(ours.x, ours.x.roll(1, 0)).max() < 0.999  # pictures are told apart
    assert ours.fingerprint == theirs.fingerprint
    assert not any("preprocessing" in text for text in shown)  # nothing had to be assumed
    for option in (["--size", 64], ["--imagenet"]):
        for model in ("run", "m.onnx"):
            said = run(tmp_path, "embed", model, "birds", "-o", "w.npz", *option, code=1)
            assert "brings its own preprocessing" in said


def test_the_graph_takes_pixels_and_its_file_says_how_to_cut_them(tmp_path):
    import onnxruntime

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 6 * 6, 5))
    transform = Photograph(crop=8, side=10, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    export_onnx(model, torch.rand(2, 3, 8, 8), tmp_path / "m.onnx", transform=transform)
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].type == "tensor(uint8)"
    told = json.loads(session.get_modelmeta().custom_metadata_map["nearfar.transform"])
    assert told == {"name": "photograph", "crop": 8, "side": 10, "square": False, "resampling": "bilinear"}
    pixels = torch.randint(256, (7, 3, 8, 8), dtype=torch.uint8)
    by_hand = (pixels.float() / 255 - torch.tensor([0.4, 0.5, 0.6])[:, None, None]) / torch.tensor([0.2, 0.3, 0.4])[
        :, None, None
    ]
    with torch.no_grad():
        wanted = model(by_hand).numpy()
    np.testing.assert_allclose(session.run(None, {"input": pixels.numpy()})[0], wanted, atol=1e-4)


@pytest.mark.parametrize("mean", [(2.0,), (2.0, 0.0, 1.0, -1.0)])
def test_the_mean_of_numbers_goes_into_the_graph_too(tmp_path, mean):
    import onnxruntime

    torch.manual_seed(0)
    model, transform = nn.Linear(4, 3), Plain(mean=mean, std=(0.5,))
    export_onnx(model, torch.randn(2, 4), tmp_path / "m.onnx", transform=transform)
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    x = torch.randn(6, 4)
    with torch.no_grad():
        wanted = model(torch.stack([transform(row, np.random.default_rng(0)) for row in x])).numpy()
    np.testing.assert_allclose(session.run(None, {"input": x.numpy()})[0], wanted, atol=1e-5)


def test_what_is_assumed_of_another_onnx_is_said(tmp_path):
    photographs(tmp_path / "birds", count=1)
    saved(Flat(3 * 8 * 8), torch.randn(2, 3, 8, 8), tmp_path / "m.onnx")
    shown = run(tmp_path, "embed", "m.onnx", "birds", "-o", "v.npz")
    assert "defines no preprocessing; images were given to it as 3 x 8 x 8, the middle cut out, in 0..1" in shown
    shown = run(tmp_path, "embed", "m.onnx", "birds", "-o", "w.npz", "--imagenet")
    assert "in 0..1, then shifted and scaled by ImageNet's mean" in shown
    first, second = (Vectors.load(tmp_path / name).fingerprint for name in ("v.npz", "w.npz"))
    assert first.split("/")[0] == second.split("/")[0]
    assert first != second


class OfPixels(nn.Module):
    def forward(self, x):
        return x.float().mean(dim=(2, 3))


def test_another_onnx_of_whole_numbers_gets_pixels_and_no_fractions(tmp_path):
    photographs(tmp_path / "birds", count=1)
    export_onnx(OfPixels(), torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8), tmp_path / "m.onnx")
    assert "in 0..255" in run(tmp_path, "embed", "m.onnx", "birds", "-o", "v.npz")
    assert Vectors.load(tmp_path / "v.npz").x.max() > 1
    np.savez(tmp_path / "d.npz", x=np.full((2, 3, 8, 8), 0.5))
    assert "not whole" in run(tmp_path, "embed", "m.onnx", "d.npz", "-o", "w.npz", code=1)
    assert "no room for --imagenet" in run(tmp_path, "embed", "m.onnx", "birds", "-o", "w.npz", "--imagenet", code=1)


@pytest.mark.parametrize("name", sorted({**transforms.NAMED, **transforms.CROPS}))
def test_every_transform_of_evaluation_is_described_and_read_back(name):
    transform = transforms.get(name, False, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    back = from_text("m.onnx", json.dumps(beside_graph(describe(transform))))
    if isinstance(transform, Photograph):
        picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 280, 3), dtype=np.uint8))
        assert isinstance(back, Pixels)
        x = back(picture, np.random.default_rng(0))
        by_hand = (x.double() / 255 - torch.tensor([0.1, 0.2, 0.3])[:, None, None]) / torch.tensor([0.4, 0.5, 0.6])[
            :, None, None
        ]
        torch.testing.assert_close(by_hand.float(), transform(picture, np.random.default_rng(0)))
    else:
        assert back == Plain()


@pytest.mark.parametrize("transform", [transforms.get("qi2020", True), Moved(), lambda picture, generator: picture])
def test_what_cannot_be_described(transform):
    with pytest.raises(ValueError, match="must be a deterministic one"):
        describe(transform)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        '"plain"',
        '{"name": "photo"}',
        '{"name": ["plain"]}',
        '{"name": "plain", "mean": [1]}',
        '{"name": "photograph", "crop": -1}',
        '{"name": "photograph", "crop": 1e9}',
        '{"name": "photograph", "crop": "8"}',
        '{"name": "photograph", "crop": 300, "side": 256}',
        '{"name": "photograph", "train": true}',
        '{"name": "photograph", "crop": 8.5}',
        '{"name": "photograph", "square": 2}',
        "[" * 100_000,
    ],
)
def test_a_description_made_by_hand_is_one_sentence(text):
    with pytest.raises(ValueError, match=r"m\.onnx describes its preprocessing") as error:
        from_text("m.onnx", text)
    assert len(str(error.value).splitlines()) == 1


def test_a_description_names_4096_channels_at_most():
    for count in (4096, 4097):
        told = {**describe(Plain()), "mean": [0.5] * count, "std": [1.0]}
        if count == 4096:
            assert len(from_description(told).mean) == count
        else:
            with pytest.raises(ValueError, match="unknown preprocessing"):
                from_description(told)
