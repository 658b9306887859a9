"""Published weights: read without running code, without their classifier; and one sentence when offline."""

from __future__ import annotations

import re
import socket
import threading

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import save_file

from nearfar.data import transforms
from nearfar.models import build, lite0, weights
from nearfar.train import fit, open_run, parse

QUIET = Console(quiet=True)


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("form", ["safetensors", "pth", "wrapped"])
@pytest.mark.parametrize("name", ["timm:resnet10t", "torchvision:resnet18", "torchvision:mobilenet_v3_small"])
def test_published_files_fit_less_their_classifier(vision, name, form, tmp_path):
    from torchvision import models

    torch.manual_seed(0)
    kind, _, rest = name.partition(":")
    whole = vision.create_model(rest, pretrained=False) if kind == "timm" else models.get_model(rest)
    state, path = whole.state_dict(), tmp_path / "weights.pth"
    if form == "safetensors":
        path = tmp_path / "weights.safetensors"
        save_file({key: value.contiguous() for key, value in state.items()}, path)
    else:
        torch.save({"state_dict": state, "epoch": 3} if form == "wrapped" else state, path)
    model = build(name, weights=path, embedding_dim=4, inputs=(3, 64, 64)).eval()
    x = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        features = model._pool_features(x)
        last = getattr(whole.eval(), "fc", None) or whole.classifier
        torch.testing.assert_close(last(features), whole(x), atol=1e-5, rtol=1e-5)
    torch.save(model.trunk.state_dict(), tmp_path / "trunk.pth")  # our own trunk's is taken, too
    assert same(
        build(name, weights=tmp_path / "trunk.pth", embedding_dim=4).trunk.state_dict(), model.trunk.state_dict()
    )


def test_files_that_do_not_fit_are_one_sentence(vision, tmp_path):
    from torchvision import models

    torch.save(models.get_model("resnet34").state_dict(), tmp_path / "other.pth")
    with pytest.raises(ValueError, match=r"other\.pth do not fit the trunk: the file has in addition layer1\.2"):
        build("torchvision:resnet18", weights=tmp_path / "other.pth")
    short = dict(list(models.get_model("resnet18").state_dict().items())[:20])
    torch.save(short, tmp_path / "short.pth")
    with pytest.raises(ValueError, match=r"short\.pth do not fit the trunk: the file lacks layer"):
        build("torchvision:resnet18", weights=tmp_path / "short.pth")
    (tmp_path / "broken.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match=r"broken\.safetensors cannot be read"):
        build("torchvision:resnet18", weights=tmp_path / "broken.safetensors")


@pytest.mark.parametrize("name", ["timm:resnet10t", "torchvision:resnet18"])
def test_without_a_network_it_says_so_at_once_and_what_helps(vision, name, monkeypatch, tmp_path):
    monkeypatch.setattr(weights, "is_reachable", lambda address: False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    words = rf"models: the published weights of {name} could not be fetched \(\S+ does not answer\)"
    with pytest.raises(OSError, match=words) as caught:
        build(name, embedding_dim=4)
    assert "--model.weights PATH" in str(caught.value)
    assert "--model.pretrained false" in str(caught.value)
    build(name, embedding_dim=4, pretrained=False, inputs=(3, 64, 64))


def test_a_host_that_never_answers_is_given_up(monkeypatch):
    monkeypatch.setattr(weights, "getproxies", dict)
    monkeypatch.setattr(weights, "WAIT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert weights.is_reachable(f"http://127.0.0.1:{port}/weights.pth")
    assert not weights.is_reachable(f"http://127.0.0.1:{port}/weights.pth")
    release = threading.Event()

    def asleep(*_, **__):
        release.wait(5)
        raise OSError

    monkeypatch.setattr(weights.socket, "create_connection", asleep)
    assert not weights.is_reachable("https://weights.invalid/w.pth")
    release.set()


# -------------------------------------------------------------------------- what photographs get by default


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """Eight classes of two pictures of 100 x 80 pixels."""
    there, draw = tmp_path_factory.mktemp("photographs"), np.random.default_rng(0)
    for label in range(8):
        (there / str(label)).mkdir()
        for number in range(2):
            picture = Image.fromarray(draw.integers(0, 256, (80, 100, 3), dtype=np.uint8))
            picture.save(there / str(label) / f"{number}.png")
    return there


def settings(photographs, **more):
    short = {"steps": 1, "diagnose_every": 0, "baselines": False}
    data = {"name": "folder", "path": str(photographs), **more.pop("data", {})}
    return parse({"data": data, "model": {"embedding_dim": 4, **more}, "batches": {"samples": 2}, "training": short})


def shape_of(config):
    from nearfar.train._build import Input, open_dataset

    return Input.of(config, open_dataset(config.data)).shape


def test_sizes_that_suit(photographs):
    assert shape_of(settings(photographs)) == (3, 224, 224)
    assert shape_of(settings(photographs, data={"transform": "qi2020"})) == (3, 227, 227)
    assert shape_of(settings(photographs, data={"size": 48})) == (3, 48, 48)
    assert shape_of(settings(photographs, name="small")) == (3, 64, 64)
    assert shape_of(settings(photographs, name="timm:resnet10t")) == (3, 224, 224)
    with pytest.raises(ValueError, match="'none' leaves pictures as they are, but size=48 came"):
        shape_of(settings(photographs, data={"size": 48, "transform": "none"}))


def test_photographs_get_lite0_and_every_way_out_of_a_missing_package_works(photographs, tmp_path, monkeypatch):
    def absent():
        raise ImportError("no such package")

    monkeypatch.setattr("nearfar.models.registry.imagenet_file", absent)
    with pytest.raises(
        ImportError, match=r"pictures above 64 pixels get the network lite0.*nearfar\[lite0\]"
    ) as caught:
        fit(settings(photographs), tmp_path / "none", console=QUIET)
    told = dict(re.findall(r"--([a-z.]+) (\w+)", str(caught.value)))
    assert told == {"model.pretrained": "false", "data.size": "32"}
    down = settings(photographs, data={"size": 32})
    fit(down, tmp_path / "small", console=QUIET)
    assert type(open_run(tmp_path / "small").model.trunk).__name__ == "Small"
    fresh = settings(photographs, pretrained=False, data={"size": 66})
    fit(fresh, tmp_path / "fresh", console=QUIET)
    assert isinstance(open_run(tmp_path / "fresh").model.trunk, lite0.Lite0)
    assert open_run(tmp_path / "fresh").transform.crop == 66
    torch.save(lite0.Lite0().state_dict(), tmp_path / "lite0.pth")
    named = settings(photographs, weights=str(tmp_path / "lite0.pth"), data={"size": 66})
    fit(named, tmp_path / "named", console=QUIET)


def test_size_changes_crop_and_side_in_proportion():
    usual, half = (transforms.get("photographs", False, size=size) for size in (None, 112))
    assert (usual.crop, usual.side, half.crop, half.side) == (224, 256, 112, 128)
