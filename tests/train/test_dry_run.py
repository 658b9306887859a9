"""A dry run: everything up to the first step, what it would need, the first batch as a picture, and no run."""

from __future__ import annotations

import io
import random
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont
from runs import config, journal, tiny
from shell import run

from nearfar.data import DataSet, Labeled, Tensors
from nearfar.runs._config import apply_flags
from nearfar.train import _cost as cost
from nearfar.train import fit
from nearfar.train._checkpoints import random_state
from nearfar.train._cost import copy_state, measure_peak, measure_seconds
from nearfar.train._dry_run import CAPTION, GAP, TILE, _cut, contact_sheet, dry_run
from nearfar.train._processes import begin
from nearfar.train._state import prepare, take_step

CPU = torch.device("cpu")


def drawings(side: int = 12) -> DataSet:
    """Gray pictures: each class has a brightness of its own, so that a picture tells which it is."""
    labels = np.repeat(np.arange(8), 6)
    x = torch.from_numpy(30 * labels + 20).to(torch.uint8)[:, None, None].expand(-1, side, side).clone()
    samples = Tensors(x, labels, classes=[f"class \u03c9{label}" for label in range(8)])
    return DataSet("drawings", samples, samples)


def small(**changes):
    return config(data={"transform": "none", "validation": 0.0}, model={"name": "small", "embedding_dim": 4}, **changes)


def test_it_says_what_a_run_would_take_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = dry_run(config(), tmp_path / "r", data=tiny())
    said = "\n".join(found.lines)
    for words in (
        "train: 54 samples [8] of 9 classes, 6 in each",
        "validation: 18 samples [8] of 3 classes, 6 in each",
        "test: 36 samples [8] of 6 classes, 6 in each",
        "network mlp on 8: 212 parameters, 68 of them in the head",
        "loss DroTopK: 0 parameters of its own",
        "batch: 4 classes x 3 samples, [12, 8] of float32",
        "steps: 20 of 12 samples, 4.4 epochs of 54",
        "memory: about ",
        "time on this machine: about ",
    ):
        assert words in said
    assert re.fullmatch(r".*: about [\d hmins]+ for 20 steps of [\d.e-]+ s, without evaluations", found.lines[-1])
    assert found.picture is None
    assert not list(tmp_path.iterdir())


def test_the_same_run_is_trained_as_without_it(tmp_path):
    dry_run(config(), tmp_path / "a", data=tiny())
    for name in ("a", "b"):
        fit(config(), tmp_path / name, data=tiny())
    assert journal(tmp_path / "a") == journal(tmp_path / "b")


def test_it_leaves_random_generators_and_the_store_of_pictures_as_they_were(tmp_path):
    paths = []
    for number in range(24):
        paths.append(tmp_path / "pictures" / f"{number % 8}" / f"{number}.png")
        paths[-1].parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (80, 80), (10 * number, 90, 60)).save(paths[-1])
    spec = {"name": "folder", "path": str(tmp_path / "pictures"), "cache": "disk", "validation": 0.0}
    store = {"cache_folder": str(tmp_path / "store")}
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002
    found = dry_run(config(data=spec | store, model={"name": "small", "embedding_dim": 4}), tmp_path / "r")
    assert found.lines[-1].endswith("s, without evaluations and decoding")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pictures", "r-first-batch.png"]
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[:2]  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), before[2])


def _snapshot(state) -> bytes:
    """Everything that training changes in a run."""
    step, kept = state.step, io.BytesIO()
    parts = (state.model, state.loss, step.optimizer, step.proximal, step.average)
    torch.save([part.state_dict() for part in parts if part is not None], kept)
    torch.save([state.sampler.state_dict(), random_state()], kept)
    return kept.getvalue()


KEEPING = {
    "memory": {"training": {"cross_batch_memory": 30, "average": 0.9}},
    "proxies": {"loss": {"name": "ProxyAnchor"}},
    "annealed": {"loss": {"name": "Triplet", "mining": "hard", "anneal": 9}, "model": {"name": "small"}},
    "projections": {
        "batches": {"name": "Representatives", "batch_size": 12, "hard_classes": True},
        "optimizer": {"proximal": 1.0},
    },
    "mined negatives": {"batches": {"name": "MinedNegatives", "batch_size": 12}},
    "projections that converge": {"batches": {"name": "Representatives", "batch_size": 12, "steps": "converged"}},
}


@pytest.mark.parametrize("name", KEEPING)
def test_measured_steps_leave_no_trace_in_the_run(name):
    plan, pictures = config(**KEEPING[name]), name == "annealed"
    plan = replace(plan, data=small().data) if pictures else plan
    state = prepare(plan, begin("float32"), drawings() if pictures else tiny())
    before = _snapshot(state)
    assert measure_seconds(copy_state(state)) > 0
    assert _snapshot(state) == before
    measure_seconds(state)
    assert _snapshot(state) != before  # it would be seen


def test_reading_counts_as_the_workers_share_it(monkeypatch):
    state, now = prepare(config(), begin("float32"), tiny()), [0.0]

    def passing(seconds, work):
        def slow(*args, **options):
            now[0] += seconds
            return work(*args, **options)

        return slow

    monkeypatch.setattr(cost.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(cost, "take_step", passing(2.0, take_step))
    monkeypatch.setattr(type(state.view), "__getitems__", passing(6.0, type(state.view).__getitems__))
    assert measure_seconds(state) == 8.0
    assert measure_seconds(state, cached=True) == 2.0
    for workers, each in ((2, 3.0), (4, 2.0)):
        loaded = apply_flags(state.config, [("data.workers", str(workers))])
        assert measure_seconds(replace(state, config=loaded)) == each


def test_memory_of_parameters_is_exact(tmp_path):
    memory = dry_run(config(), tmp_path / "r", data=tiny()).memory
    assert (memory.weights, memory.gradients, memory.optimizer) == (848, 848, 2 * 848)
    sgd = config(optimizer={"name": "sgd", "proximal": 1.0}, loss={"name": "ProxyNCA"})
    memory = dry_run(sgd, tmp_path / "r", data=tiny()).memory
    assert memory.gradients == 848 + 9 * 4 * 4  # nine proxies
    assert memory.optimizer == 2 * memory.gradients
    assert memory.total == sum((memory.weights, memory.optimizer, memory.gradients, memory.network, memory.loss))


def test_memory_of_activations_grows_with_the_batch_and_shrinks_with_chunks(tmp_path):
    batches = {"name": "MPerClass", "classes": 8, "samples": 4}
    groups = {"name": "small", "embedding_dim": 4, "group_norms": True}
    settings = replace(small(batches=batches), model=config(model=groups).model)
    whole = dry_run(settings, tmp_path / "r", data=drawings()).memory
    half = dry_run(small(batches={**batches, "classes": 4}), tmp_path / "r", data=drawings()).memory
    assert 1.5 < whole.network / half.network < 2.5
    assert whole.loss > half.loss
    chunked = replace(settings, training=replace(settings.training, chunk=8))
    few = dry_run(chunked, tmp_path / "r", data=drawings()).memory
    assert 3 < whole.network / few.network < 5
    assert few.loss == whole.loss


def test_the_first_batch_is_drawn_beside_the_run(tmp_path):
    found = dry_run(small(batches={"name": "MPerClass", "classes": 4, "samples": 3}), tmp_path / "r", data=drawings())
    assert found.picture == tmp_path / "r-first-batch.png"
    assert list(tmp_path.iterdir()) == [found.picture]
    sheet = np.array(Image.open(found.picture).convert("RGB"))
    assert sheet.shape == (GAP + TILE + CAPTION + GAP, 12 * (TILE + GAP) + GAP, 3)
    middles = sheet[GAP + TILE // 2, GAP + TILE // 2 :: TILE + GAP, 0].tolist()
    classes = [(shade - 20) // 30 for shade in middles]
    assert all((shade - 20) % 30 == 0 for shade in middles)
    assert classes[::3] == classes[1::3] == classes[2::3]  # the samples of a class lie side by side
    assert len(set(classes)) == 4
    assert (sheet[GAP + TILE + 1 :] < 128).any()  # names


def test_colors_come_back_as_they_were(tmp_path):
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.1, 0.3)
    color = torch.tensor([1.0, 0.0, 0.2]).view(3, 1, 1).expand(2, 3, 200, 100)
    x = (color - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    sheet = np.array(Image.open(contact_sheet(tmp_path / "s.png", x, ["a" * 99, "\x1b[2J\u2603"], mean=mean, std=std)))
    assert sheet[GAP + 5, GAP + 5].tolist() == [255, 0, 51]
    assert sheet[GAP + 5, GAP + TILE - 5].tolist() == [255, 255, 255]  # upright pictures keep their shape


def test_a_name_is_cut_where_its_tile_ends():
    draw, font = ImageDraw.Draw(Image.new("RGB", (9, 9))), ImageFont.load_default()
    found = _cut(draw, "name " * 30, font)
    assert draw.textlength(found, font) <= TILE < draw.textlength(("name " * 30)[: len(found) + 1], font)
    assert _cut(draw, "short", font) == "short"


def test_what_training_refuses_is_refused_in_the_same_words(tmp_path):
    fit(config(training={"steps": 1}), tmp_path / "run", data=tiny())
    cases = [
        (config(loss={"name": "SupConn"}), "n", "did you mean 'SupCon'"),
        (
            config(batches={"name": "MPerClass", "classes": 40, "samples": 3}),
            "n",
            "write --batches.classes 9, or fewer",
        ),
        (config(), "run", "already holds a run"),
        (small(training={"chunk": 4}), "n", "normalizes by its batch"),
    ]
    for settings, name, words in cases:
        data = drawings() if settings.model.name == "small" else tiny()
        errors = []
        for act in (dry_run, fit):
            with pytest.raises((ValueError, OSError), match=words) as caught:
                act(settings, tmp_path / name, data=data)
            errors.append(str(caught.value))
        assert errors[0] == errors[1]
        assert name == "run" or not (tmp_path / f"{name}-first-batch.png").exists()


def test_a_head_that_depends_on_the_size_refuses_another_one_in_training(tmp_path):
    labels = np.repeat(np.arange(8), 3)
    photographs = Labeled([Image.new("RGB", (40, 40), (30 * int(label), 90, 60)) for label in labels], labels)
    data = DataSet("photographs", photographs, photographs)
    model = {"name": "small", "embedding_dim": 4}
    plan = {"steps": 1, "evaluate_every": 1, "checkpoint_every": 1}
    for act in (dry_run, fit):
        settings = config(data={"validation": 0.0, "size": 32, "train_size": 16}, model=model, training=plan)
        with pytest.raises(
            ValueError,
            match=r"^train: data.train_size must fit the network small, whose head is made for 32 pixels a side, but "
            r"came as 16; write --data.train_size null, or name a network that pools its feature maps, such as "
            r"--model.name lite0\.$",
        ):
            act(settings, tmp_path / act.__name__, data=data)
        assert not (tmp_path / act.__name__).exists()
    near = config(data={"validation": 0.0, "size": 32, "train_size": 28}, model=model, training=plan)
    assert fit(near, tmp_path / "near", data=data).finished  # its map has as many places


def test_the_command(tmp_path):
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(16), 5)
    np.savez(tmp_path / "v.npz", x=rng.normal(size=(80, 8)), y=labels)
    words = ("train", "--data", "{name: vectors, path: v.npz}", "--batches", "{classes: 4}", "--dry-run", "--run", "r")
    said = run(tmp_path, *words)
    assert "batch: 4 classes x 4 samples" in said
    assert said.endswith("nothing was trained; leave --dry-run out to begin\n")
    assert [path.name for path in tmp_path.iterdir()] == ["v.npz"]
    assert "--resume came; leave one out" in run(tmp_path, "train", "--dry-run", "--resume", "--run", "r", code=1)


def test_the_peak_counts_what_is_alive_at_once():
    def forgetful():
        for _ in range(5):
            torch.ones(1000).mul_(2)

    def keeping():
        kept = [torch.ones(1000) for _ in range(5)]
        return [each.view(10, 100) for each in kept]  # a view takes nothing

    def backward():
        x = torch.ones(1000, requires_grad=True)
        (x.exp() * 2).sum().backward()

    assert measure_peak(forgetful, CPU)[1] == 4000
    assert measure_peak(keeping, CPU)[1] == 20_000
    assert 12_000 <= measure_peak(backward, CPU)[1] <= 20_100
