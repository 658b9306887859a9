"""Networks as .safetensors files: exact round trips, and one sentence for files that are damaged or incomplete."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from runs import config, tiny
from safetensors.torch import load_file, safe_open, save_file
from shell import run
from shop import photographs

import nearfar as nf
from nearfar.data import transforms
from nearfar.evaluation._preprocessing import describe, fingerprint_of
from nearfar.models.saved import Network, Saved, read
from nearfar.train import fit, open_run

PLAIN = transforms.get("none", False)
NETWORKS = {
    "small": Network("small", 6, (1, 16, 16), bn_neck=True),
    "groups": Network("lite0", 6, (3, 32, 32), pool="both", group_norms=True),
    "linear": Network("linear", 3, (5,), normalize=False),
    "mlp": Network("mlp", 3, (2, 4), hidden=7),
    "hidden": Network("linear", 3, (5,), hidden=4, float64=True),
    "frozen": Network("small", 4, (1, 16, 16), freeze_norms=True),
    "lite0": Network("lite0", 8, (3, 64, 64)),
    "flip": Network("small", None, (1, 16, 16), flip=True),
}


def made(name: str, transform=PLAIN, classes=("a", "ß")) -> Saved:
    """A network with weights of its own."""
    torch.manual_seed(3)
    model = NETWORKS[name].make()
    for buffer in model.buffers():
        buffer.copy_(torch.rand(buffer.shape) + 1)
    return Saved(model.eval(), NETWORKS[name], transform, classes)


@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_read_is_what_was_written_bit_for_bit(tmp_path, name):
    transform = transforms.get("photographs", False, (0.5,) * 3, (0.2,) * 3, size=48) if name == "lite0" else PLAIN
    saved = made(name, transform)
    path = saved.save(tmp_path / "m.safetensors")
    model, again = nf.models.load(path), read(path)
    assert not model.training
    assert all(map(torch.equal, saved.model.state_dict().values(), model.state_dict().values()))
    assert [(key, value.dtype) for key, value in saved.model.state_dict().items()] == [
        (key, value.dtype) for key, value in model.state_dict().items()
    ]
    x = torch.randn(2, *saved.network.inputs)
    assert torch.equal(saved.model(x), model(x))
    assert (again.network, again.classes) == (saved.network, ("a", "ß"))
    assert describe(again.transform) == describe(transform)
    assert {p.requires_grad for p in model.parameters()} == {True}
    assert path.read_bytes() == made(name, transform).save(tmp_path / "n.safetensors").read_bytes()
    if name == "frozen":
        model.train()(x)
        assert all(map(torch.equal, saved.model.buffers(), model.buffers()))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    fit(
        config(training={"steps": 2, "evaluate_every": 2, "baselines": False, "diagnose_every": 0}),
        folder / "r",
        data=tiny(),
    )
    return folder


def test_a_run_is_exported_and_loaded_and_embeds_as_before(trained):
    said = run(trained, "export", "r", "--format", "safetensors", "-o", "m.safetensors")
    assert said.startswith("m.safetensors: mlp on 8, 4 dimensions")
    want = open_run(trained / "r").model
    x = torch.randn(5, 8)
    for path in ("r", "m.safetensors"):
        model = nf.models.load(trained / path)
        assert torch.equal(model(x), want(x))
        assert not model.training
    assert read(trained / "m.safetensors").classes == read(trained / "r").classes
    assert len(read(trained / "r").classes) == 9  # three of twelve were held out
    np.savez(trained / "v.npz", x=x.numpy())
    for path, out in (("r", "a.npz"), ("m.safetensors", "b.npz")):
        run(trained, "embed", path, "v.npz", "-o", out)
    a, b = (nf.evaluation.Vectors.load(trained / name) for name in ("a.npz", "b.npz"))
    assert torch.equal(a.x, b.x)
    assert a.fingerprint == b.fingerprint


def test_every_reader_of_a_run_looks_at_as_much_of_a_picture_as_its_test_did(tmp_path):
    """The share of a picture and the mirror image are told to the run folder, to .safetensors and to the vectors."""
    photographs(tmp_path / "pictures")
    data = {"name": "folder", "path": str(tmp_path / "pictures"), "transform": "photographs"}
    settings = config(
        data={**data, "size": 16, "crop_pct": 0.8, "validation": 0},
        model={"name": "small", "embedding_dim": 4, "flip": True},
        batches={"name": "MPerClass", "classes": 2, "samples": 2},
        training={"steps": 1, "evaluate_every": 1, "baselines": False, "diagnose_every": 0},
    )
    fit(settings, tmp_path / "run")
    opened = open_run(tmp_path / "run")
    path = read(tmp_path / "run").save(tmp_path / "m.safetensors")
    assert (opened.transform.crop, opened.transform.side) == (16, 20)
    mark = str(np.load(tmp_path / "run" / "embeddings.npz")["fingerprint"])
    assert fingerprint_of(opened.model, opened.transform) == mark
    for saved in (read(tmp_path / "run"), read(path)):
        assert saved.model.flip
        assert fingerprint_of(saved.model, saved.transform) == mark
    opened.model.flip = False  # other vectors by the same weights
    assert fingerprint_of(opened.model, opened.transform) != mark


def test_onnx_stays_the_default_and_the_format_must_be_known(trained):
    assert "--format must be one of" in run(trained, "export", "r", "-o", "x.bin", "--format", "pickle", code=1)
    assert "must end in .safetensors" in run(trained, "export", "r", "-o", "x.onnx", "--format", "safetensors", code=1)
    (trained / "m.pt2").write_bytes(b"")
    words = ("export", "m.pt2", "-o", "x.safetensors", "--format", "safetensors")
    assert "m.pt2 must be a run folder" in run(trained, *words, code=1)


def test_another_place_without_a_network_is_one_sentence(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"^models: .*empty holds no config\.yaml; name the folder"):
        nf.models.load(tmp_path / "empty")
    with pytest.raises(FileNotFoundError, match="there is no file"):
        nf.models.load(tmp_path / "no.safetensors")
    with pytest.raises(ValueError, match=r"must be a run folder or a \.safetensors file"):
        nf.models.load(tmp_path / "m.pt")


def test_weights_without_a_description_are_told_from_damaged_ones(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match="holds weights without a description of their network; models"):
        nf.models.load(tmp_path / "m.safetensors")


def test_every_flipped_byte_and_every_cut_is_noticed(tmp_path):
    path = made("linear").save(tmp_path / "m.safetensors")
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for place in {*range(16), *rng.integers(len(whole), size=150).tolist(), len(whole) - 1}:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(ValueError, match=r"^models: [^\n]*$"):
            nf.models.load(path)
    for length in (0, 7, 8, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"^models: [^\n]*$"):
            nf.models.load(path)


HOSTILE = {
    "wide": {"embedding_dim": 1 << 23},
    "wider": {"embedding_dim": 10**15},
    "negative": {"embedding_dim": -1},
    "truth": {"embedding_dim": True},
    "hidden": {"hidden": 1 << 23},
    "inputs": {"inputs": [1 << 12, 1 << 12, 1 << 12]},
    "long": {"inputs": [1 << 23]},
    "words": {"inputs": ["5"]},
    "one": {"inputs": 5},
    "pool": {"pool": "__import__('os')"},
    "flag": {"normalize": "yes"},
    "new flag": {"flip": "yes"},
    "square": {"inputs": [1 << 23], "embedding_dim": None},
    "flip": {"flip": True},
    "name": {"name": "linaer"},
    "outside": {"name": "timm:no_such_network"},
    "other": {"name": "small", "inputs": [1, 8, 8]},
    "strange": {"device": "cuda"},
}


def test_a_network_without_a_new_setting_is_written_as_before(tmp_path):
    """Files of an older version can be read, and an older version can read those that need nothing new."""

    def told(name):
        with safe_open(made(name).save(tmp_path / "m.safetensors"), framework="pt") as file:
            return json.loads(file.metadata()["nearfar"])["network"]

    assert "flip" not in told("small")
    assert told("flip")["flip"] is True


@pytest.mark.parametrize("which", HOSTILE)
def test_a_description_is_not_believed(tmp_path, which):
    path = made("linear").save(tmp_path / "m.safetensors")
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["nearfar"])
    about["network"] |= HOSTILE[which]
    save_file(load_file(path), path, {"nearfar": json.dumps(about)})
    with pytest.raises((ValueError, ImportError), match=r"^models: [^\n]*$"):
        nf.models.load(path)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format": 2}', '{"format": 1}', "[" * 100_000, '{"format": 1, "network": 3, "classes": null}'],
)
def test_a_description_that_is_none_is_one_sentence(tmp_path, text):
    path = made("linear").save(tmp_path / "m.safetensors")
    save_file(load_file(path), path, {"nearfar": text})
    with pytest.raises(ValueError, match=r"^models: [^\n]*; export it again\.$"):
        nf.models.load(path)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "photograph", "crop": 10**9},
        {"name": "nothing"},
        {"name": "plain", "mean": "x", "std": [1.0]},
        {"name": "plain", "mean": [float("nan")], "std": [1.0]},
        {"name": "plain", "mean": [0.0], "std": [0.0]},
        {"name": "plain", "mean": [0.0] * 5000, "std": [1.0]},
        [],
    ],
)
def test_preprocessing_is_not_believed_either(tmp_path, change):
    path = made("linear").save(tmp_path / "m.safetensors")
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["nearfar"])
    save_file(load_file(path), path, {"nearfar": json.dumps({**about, "preprocessing": change})})
    with pytest.raises(ValueError, match="unknown preprocessing"):
        nf.models.load(path)


def test_an_older_run_without_names_of_classes_is_saved_without_them(tmp_path):
    path = replace(made("linear"), classes=None).save(tmp_path / "m.safetensors")
    assert read(path).classes is None
    assert re.search(rb'"classes\\": null', path.read_bytes())
