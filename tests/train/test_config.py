"""The configuration: typed, frozen, round-trips through YAML; wrong keys name the nearest right one."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import yaml

import nearfar as nf
from nearfar.runs._config import apply_flags, to_tree
from nearfar.runs._parts import LOSSES, check, make_loss
from nearfar.train import Config, Part, load, parse, to_yaml
from nearfar.tune._space import read_space


def test_the_printed_default_reads_back_equal(tmp_path):
    (tmp_path / "c.yaml").write_text(to_yaml(Config()), encoding="utf-8")
    assert to_tree(load(tmp_path / "c.yaml")) == to_tree(Config()) == to_tree(parse({}))


def test_every_key_is_explained():
    for line in to_yaml(Config()).splitlines():
        if not line.startswith(("  name", "  temperature", "  classes", "  samples")):
            assert "#" in line, line


def test_flags_change_single_keys_and_numbers_may_be_written_short(tmp_path):
    (tmp_path / "c.yaml").write_text(
        "optimizer: {lr: 1e-4, betas: [0.9, 0.99]}\nloss: {name: DroKL, gamma: 1}\n", encoding="utf-8"
    )
    config = load(tmp_path / "c.yaml", [("loss.gamma", "1e-2"), ("training.steps", "7"), ("data.transform", "qi2020")])
    assert config.optimizer.lr == 1e-4
    assert config.optimizer.betas == (0.9, 0.99)
    assert config.loss == Part("DroKL", {"gamma": 0.01})
    assert config.training.steps == 7
    assert config.data.transform == "qi2020"


def test_a_flag_that_names_another_loss_drops_the_arguments_of_the_old_one(tmp_path):
    (tmp_path / "c.yaml").write_text("loss: {name: DroKL, gamma: 1}\n", encoding="utf-8")
    assert load(tmp_path / "c.yaml", [("loss.name", "SupCon")]).loss == Part("SupCon", {})


def test_a_flag_that_names_other_data_or_another_network_leaves_the_other_keys(tmp_path):
    """They have the same keys whatever their name; a recipe's would be lost otherwise."""
    (tmp_path / "c.yaml").write_text(
        "data: {name: folder, size: 32, cache: disk}\nmodel: {name: lite0, pool: gem}\n", encoding="utf-8"
    )
    told = [("data.path", "there"), ("data.name", "cub"), ("model.name", "timm:resnet18")]
    config = load(tmp_path / "c.yaml", told)
    assert (config.data.name, config.data.path, config.data.size, config.data.cache) == ("cub", "there", 32, "disk")
    assert (config.model.name, config.model.pool) == ("timm:resnet18", "gem")


@pytest.mark.parametrize(
    ("written", "flags", "sizes"),
    [
        ("{size: 320, train_size: 224}", {"data.size": "128"}, (128, 90)),
        ("{size: 320, train_size: 224}", {"data": "{size: 128}"}, (128, 90)),
        ("{size: 320, train_size: 224}", {"data.size": "128", "data.train_size": "100"}, (128, 100)),
        ("{size: 320, train_size: 224}", {"data.train_size": "224", "data.size": "256"}, (256, 224)),
        ("{size: 320, train_size: 224}", {"data": "{size: 256, train_size: 224}"}, (256, 224)),
        ("{size: 320, train_size: 224}", {"data.train_size": "160"}, (320, 160)),
        ("{size: 320, train_size: 224}", {"data.size": "null"}, (None, None)),
        ("{train_size: 224}", {"data.size": "128"}, (128, None)),
        ("{size: 320}", {"data.size": "128"}, (128, None)),
        ("{}", {"data.size": "128"}, (128, None)),
    ],
)
def test_a_flag_for_the_size_scales_the_size_in_training(tmp_path, written, flags, sizes):
    (tmp_path / "c.yaml").write_text(f"data: {written}\n", encoding="utf-8")
    config = load(tmp_path / "c.yaml", list(flags.items()))
    assert (config.data.size, config.data.train_size) == sizes
    assert apply_flags(load(tmp_path / "c.yaml"), list(flags.items())) == config


@pytest.mark.parametrize(
    ("flag", "value", "written"),
    [
        ("loss", "SupCon", {"loss": "SupCon"}),
        ("loss", "{gamma: 2}", {"loss": {"name": "DroKL", "gamma": 2, "pair": "Hinge"}}),
        ("loss", "{gamma: 2, name: DroKL}", {"loss": {"name": "DroKL", "gamma": 2, "pair": "Hinge"}}),
        ("loss", "{k: 5, name: DroTopK}", {"loss": {"name": "DroTopK", "k": 5}}),
        (
            "batches",
            "{name: Representatives, batch_size: 32}",
            {"batches": {"name": "Representatives", "batch_size": 32}},
        ),
        ("batches", "Representatives", {"batches": "Representatives"}),
        ("batches", "{classes: 9}", {"batches": {"name": "MPerClass", "classes": 9, "samples": 2}}),
        ("training", "{steps: 8}", {"training": {"steps": 8, "seed": 3}}),
        ("optimizer", "{lr: 1e-4, betas: [.9, .99]}", {"optimizer": {"lr": 1e-4, "betas": [0.9, 0.99]}}),
        ("data", "{name: folder, path: there}", {"data": {"name": "folder", "path": "there"}}),
        ("model", "{embedding_dim: 7}", {"model": {"embedding_dim": 7}}),
    ],
)
def test_a_whole_section_may_come_as_a_flag(tmp_path, flag, value, written):
    tree = {
        "loss": {"name": "DroKL", "gamma": 1, "pair": "Hinge"},
        "batches": {"name": "MPerClass", "classes": 3, "samples": 2},
        "training": {"steps": 5, "seed": 3},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    assert load(tmp_path / "c.yaml", [(flag, value)]) == parse({**tree, **written})


def test_flags_change_a_loss_that_is_written_as_a_name_alone(tmp_path):
    (tmp_path / "c.yaml").write_text("loss: SupCon\ntraining:\n", encoding="utf-8")
    flags = [("loss.temperature", ".2"), ("training.steps", "3")]
    config = load(tmp_path / "c.yaml", flags)
    assert config.loss == Part("SupCon", {"temperature": 0.2})
    assert config.training.steps == 3


@pytest.mark.parametrize("section", ["data", "model", "loss", "batches", "optimizer", "training"])
@pytest.mark.parametrize("value", ["{a: 1", "[1, 2]", "7", "!!python/object:os.system {}"])
def test_a_section_that_is_no_mapping_is_told_how_to_write_it(section, value):
    with pytest.raises(
        ValueError, match=rf"^config: --{section} .*; write it in quotes as YAML, such as --{section} '{{"
    ):
        load(None, [(section, value)])
    with pytest.raises(ValueError, match=r"there is no training\.stps; did you mean 'steps'"):
        load(None, [("training", "{stps: 3}")])


def test_options_without_a_name_change_the_default_part():
    assert parse({"loss": {"temperature": 0.2}}).loss.options["temperature"] == 0.2
    assert parse({"loss": {"temperature": 0.2}}).loss.name == "NTXent"


def test_a_word_of_digits_stays_as_it_is():
    assert parse({"data": {"path": 5, "labels": 2.5}}).data.path == "5"


def test_a_configuration_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().training.steps = 3


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"lss": {}}, "there is no lss; did you mean 'loss'?"),
        ({"training": {"stps": 3}}, "there is no training.stps; did you mean 'steps'?"),
        ({"training": {"steps": 0}}, "training.steps must be a whole number above zero"),
        ({"training": {"steps": 1.5}}, "training.steps must be a whole number or auto, but came as 1.5"),
        ({"training": {"steps": True}}, "training.steps must be a whole number or auto, but came as True"),
        ({"training": {"precision": "half"}}, "training.precision must be one of float32, bf16, fp16"),
        ({"optimizer": {"lr": "fast"}}, "optimizer.lr must be a number, but came as 'fast'"),
        ({"optimizer": {"lr": -1}}, "optimizer.lr must be a number above zero"),
        ({"optimizer": {"betas": [0.9]}}, "optimizer.betas must be 2 numbers"),
        ({"data": {"validation": 1.0}}, "data.validation must be from 0 to below 1"),
        ({"data": {"crop_pct": 1.5}}, "data.crop_pct must be above 0 and at most 1"),
        ({"loss": 3}, "loss must be a name, or a mapping with a name"),
        ([], "the configuration must be a mapping"),
    ],
)
def test_wrong_values_are_one_sentence(tree, words):
    with pytest.raises(ValueError, match=words.replace("?", r"\?").replace("[", r"\[")) as caught:
        parse(tree)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"loss": "DroTopk"}, "did you mean 'DroTopK'"),
        ({"loss": {"name": "DroTopK", "kk": 3}}, "DroTopK has no loss.kk; did you mean 'k'"),
        ({"loss": {"name": "DroTopK", "k": 3, "pair": "Logistik"}}, "did you mean 'Logistic'"),
        ({"loss": {"name": "DroTopK", "k": 3, "pair": {"name": "Hinge", "magrin": 1}}}, "did you mean 'margin'"),
        ({"batches": "PerClas"}, "did you mean 'MPerClass'"),
        ({"batches": {"name": "MPerClass", "rank": 1}}, "MPerClass has no batches.rank"),
    ],
)
def test_unknown_parts_are_refused_before_data_are_read(tree, words):
    with pytest.raises(ValueError, match=words):
        check(parse(tree))


def test_a_configuration_never_makes_objects(tmp_path):
    (tmp_path / "c.yaml").write_text("loss: !!python/object/apply:os.system ['echo no']\n", encoding="utf-8")
    with pytest.raises(ValueError, match="not YAML"):
        load(tmp_path / "c.yaml")
    with pytest.raises(ValueError, match=r"loss.pair.name is 'os.system'"):
        check(parse({"loss": {"name": "DroTopK", "k": 3, "pair": {"name": "os.system"}}}))


def test_every_loss_can_be_named():
    assert set(LOSSES) == set(nf.losses.__all__)
    loss = make_loss(parse({"loss": "ProxyNCA", "model": {"embedding_dim": 7}}), classes=5)
    assert loss.proxies.shape == (5, 7)


def test_inner_parts_are_built():
    tree = {"name": "DroTopK", "k": 4, "pair": {"name": "Logistic", "threshold": 0.25}, "similarity": "Dot"}
    loss = make_loss(parse({"loss": tree}), classes=2)
    assert isinstance(loss.similarity, nf.similarity.Dot)
    assert loss.pair.threshold == 0.25
    around = {"name": "SpreadFloor", "floor": 0.4, "loss": {"name": "ProxyNCA", "scale": 3.0}}
    config = parse({"loss": around, "model": {"embedding_dim": 7}})
    check(config)
    loss = make_loss(config, classes=5)
    assert (loss.floor, loss.loss.scale, loss.loss.proxies.shape) == (0.4, 3.0, (5, 7))
    with pytest.raises(ValueError, match=r"^config: Triplet has no loss\.loss\.minin; did you mean 'mining'\?$"):
        check(parse({"loss": {"name": "SpreadFloor", "loss": {"name": "Triplet", "minin": "hard"}}}))


def test_a_missing_argument_is_one_sentence():
    with pytest.raises(ValueError, match="config: loss DroTrimmedPN"):
        make_loss(parse({"loss": {"name": "DroTrimmedPN"}}), classes=2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("training:\n  steps: 5\nloss: NTXent\ntraining:\n  seed: 1\n", "'training' stands twice, in lines 1 and 4"),
        ("training:\n  steps: 5\n  seed: 1\n  steps: 6\n", "'steps' stands twice, in lines 2 and 4"),
        ("loss: {name: DroTopK, k: 3, k: 4}\n", "'k' stands twice, in line 1"),
        ("loss:\n  name: DroTopK\n  pair: {name: Hinge, margin: 0, 'margin': 1}\n", "'margin' stands twice, in line 3"),
    ],
)
def test_a_key_that_stands_twice_is_refused_at_every_level(text, words, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(text, encoding="utf-8")
    for read in (load, lambda path: read_space(path)):
        with pytest.raises(ValueError, match=rf"c\.yaml: the key {words}; keep one of them\.$"):
            read(path)


def test_a_flag_with_a_key_twice_is_refused():
    with pytest.raises(ValueError, match=r"^--loss: the key 'k' stands twice, in line 1; keep one of them\.$"):
        load(None, [("loss", "{name: DroTopK, k: 1, k: 2}")])
    with pytest.raises(ValueError, match=r"^--loss.pair: the key 'margin' stands twice"):
        load(None, [("loss.pair", "{name: Hinge, margin: 1, margin: 2}")])


ORDERS = [
    [("loss.name", "Triplet"), ("loss.margin", "0.3")],
    [("loss", "{name: DroTopK, k: 5}"), ("loss.k", "7"), ("loss.pair", "Hinge"), ("loss.pair.margin", "0.3")],
    [("loss.name", "DroTopK"), ("loss.k", "7"), ("loss.pair.name", "Logistic"), ("loss.pair.threshold", "0.25")],
    [("training", "{steps: 5, seed: 3}"), ("training.steps", "7"), ("batches", "Representatives")],
]


@pytest.mark.parametrize("flags", ORDERS)
def test_the_order_of_flags_does_not_matter(flags, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("loss: {name: NTXent, temperature: 0.5}\nbatches: {samples: 8}\n", encoding="utf-8")
    wanted = load(path, flags)
    for order in itertools.permutations(flags):
        assert load(path, order) == wanted
        assert apply_flags(load(path), order) == wanted
    check(wanted)


def test_an_option_of_another_loss_is_refused_in_every_order():
    for order in itertools.permutations([("loss.name", "Triplet"), ("loss.temperature", "0.1")]):
        with pytest.raises(ValueError, match=r"^config: Triplet has no loss\.temperature"):
            check(load(None, order))


def test_a_flag_that_comes_twice_must_say_the_same():
    assert load(None, [("training.steps", "5"), ("training.steps", "5")]).training.steps == 5
    for first, second in (("5", "6"), ("6", "5")):
        with pytest.raises(ValueError, match=rf"--training.steps came twice, as {first} and as {second}; keep one"):
            load(None, [("training.steps", first), ("training.steps", second)])
