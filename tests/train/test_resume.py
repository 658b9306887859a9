"""What a resumed run uses: sound checkpoints, its own configuration, every good line of its journal."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from needs import need
from runs import config, journal, tiny, weights

from nearfar._utils import checkpoint
from nearfar._utils.files import check_seal, read_arrays
from nearfar._utils.journal import LONGEST, read_lines, to_line
from nearfar.doctor import diagnose_run
from nearfar.report._journal import read_journal
from nearfar.runs._config import flat, save, to_tree
from nearfar.runs.changes import MAY_CHANGE
from nearfar.train import fit, open_run

BASE = {"training": {"steps": 8, "evaluate_every": 2, "checkpoint_every": 4, "diagnose_every": 0, "explain_every": 4}}


def settings(**changes):
    merged = {name: {**BASE.get(name, {}), **values} for name, values in changes.items()}
    return config(**{**BASE, **merged})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of eight steps, to be copied."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    fit(settings(), folder, data=tiny())
    return folder


@pytest.fixture
def run(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "run"))


def go_on(folder: Path, steps: int = 12, **changes):
    changes.setdefault("training", {})
    return fit(
        settings(**{**changes, "training": {"steps": steps, **changes["training"]}}), folder, data=tiny(), resume=True
    )


def refused(folder: Path, word: str) -> None:
    """One sentence, and nothing in the folder is changed by it."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises((ValueError, FileNotFoundError), match=word) as caught:
        go_on(folder)
    assert "\n" not in str(caught.value)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def rewritten(path: Path, change) -> None:
    """A checkpoint with other contents and a right seal, as somebody might make it who means harm."""
    state = torch.load(path, weights_only=True)
    change(state)
    state.pop("format", None)
    checkpoint.save(path, state)


# checkpoints


@pytest.mark.parametrize("name", ["last", "best"])
def test_no_flipped_bit_and_no_zeroed_block_passes(run, name):
    path = run / f"checkpoints/{name}.pt"
    check_seal("test", path, needed=True)
    good, draw = path.read_bytes(), random.Random(0)
    for _ in range(60):
        bad = bytearray(good)
        place = draw.randrange(len(good))
        if draw.random() < 0.5:
            bad[place] ^= 1 << draw.randrange(8)
        else:
            bad[place : place + 512] = bytes(len(bad[place : place + 512]))
        if bytes(bad) == good:
            continue
        path.write_bytes(bad)
        with pytest.raises(ValueError, match="cannot be read"):
            checkpoint.load(path, checkpoint.LAST if name == "last" else checkpoint.BEST)
    for size in (0, 1, 100, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:size])
        with pytest.raises(ValueError, match="cannot be read"):
            checkpoint.load(path, checkpoint.BEST)


def test_no_flipped_bit_of_the_end_is_anything_but_a_sentence(run):
    """Of the directory of the archive, its end and the seal: zipfile itself raises at some of them."""
    path = run / "checkpoints/best.pt"
    good = path.read_bytes()
    for bit in range(8 * (len(good) - 256), 8 * len(good), 3):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        with pytest.raises(ValueError, match="cannot be read"):
            checkpoint.load(path, checkpoint.BEST)
        with pytest.raises(ValueError, match=r"write it again|numpy\.savez"):
            read_arrays("test", path)


@pytest.mark.parametrize("name", ["last", "best"])
def test_every_reader_refuses_a_damaged_checkpoint(run, name):
    path = run / f"checkpoints/{name}.pt"
    bad = bytearray(path.read_bytes())
    bad[len(bad) // 2] ^= 16
    path.write_bytes(bad)
    refused(run, rf"{name}\.pt cannot be read")
    if name == "best":
        with pytest.raises(ValueError, match="cannot be read"):
            open_run(run)


def test_an_older_format_is_refused(run):
    path = run / "checkpoints/last.pt"
    state = torch.load(path, weights_only=True)
    torch.save({**state, "format": 1}, path)
    refused(run, "of an older version of nearfar")
    rewritten(path, lambda state: None)
    with zipfile.ZipFile(path) as archive:
        assert archive.comment
    go_on(run)


@pytest.mark.parametrize("key", checkpoint.LAST)
def test_a_checkpoint_without_a_key_is_a_sentence(run, key):
    rewritten(run / "checkpoints/last.pt", lambda state: state.pop(key))
    refused(run, f"lacks {key}")


@pytest.mark.parametrize("key", checkpoint.BEST)
def test_best_weights_without_a_key_are_a_sentence(run, key):
    rewritten(run / "checkpoints/best.pt", lambda state: state.pop(key))
    refused(run, f"lacks {key}")
    with pytest.raises(ValueError, match=f"lacks {key}"):
        open_run(run)


@pytest.mark.parametrize(
    ("key", "value"),
    [("step", "4"), ("best", 3), ("model", {}), ("optimizer", {}), ("sampler", None), ("random", [{}]), ("config", 1)],
)
def test_a_checkpoint_of_nonsense_is_a_sentence(run, key, value):
    rewritten(run / "checkpoints/last.pt", lambda state: state.__setitem__(key, value))
    refused(run, r"last\.pt (does not fit this run|has no whole step)")


def test_best_weights_are_those_of_the_best_step(run):
    best = torch.load(run / "checkpoints/last.pt", weights_only=True)["best"][1]
    rewritten(run / "checkpoints/best.pt", lambda state: state.__setitem__("step", best + 100))
    refused(run, rf"is of step {best + 100}, but the best of this run was step {best}")
    (run / "checkpoints/best.pt").unlink()
    refused(run, r"there is no .*best\.pt")


def test_a_better_step_that_is_never_reached_again_is_forgotten(tmp_path):
    """Killed after a better evaluation, then made shorter: the best weights are those that last.pt speaks of."""
    plan = {"training": {"steps": 4, "evaluate_every": 2, "checkpoint_every": 4}}
    fit(settings(**plan), tmp_path / "short", data=tiny())

    class Killed(BaseException):
        pass

    def die(moment):
        if moment.step == 7:
            raise Killed

    shutil.copytree(tmp_path / "short", tmp_path / "cut")
    path = tmp_path / "cut/checkpoints/last.pt"
    rewritten(path, lambda state: state["best"].__setitem__(0, -1.0))  # so that step 6 is better for certain
    longer = {"training": {**plan["training"], "steps": 8, "checkpoint_every": 8}}
    with pytest.raises(Killed):
        fit(settings(**longer), tmp_path / "cut", data=tiny(), resume=True, callbacks=[die])
    assert torch.load(tmp_path / "cut/checkpoints/best.pt", weights_only=True)["step"] == 6
    found = fit(settings(**plan), tmp_path / "cut", data=tiny(), resume=True)
    assert found.best_step == torch.load(tmp_path / "short/checkpoints/best.pt", weights_only=True)["step"]
    a, b = weights(tmp_path / "cut", "best"), weights(tmp_path / "short", "best")
    assert all(torch.equal(a[name], b[name]) for name in b)
    assert not (tmp_path / "cut/checkpoints/best-before.pt").exists()


# the configuration

REFUSED = {
    "loss.k": {"loss": {"k": 9}},
    "loss.name": {"loss": {"name": "Contrastive"}},
    "loss.pair": {"loss": {"pair": "Hinge"}},
    "batches.samples": {"batches": {"samples": 2}},
    "model.embedding_dim": {"model": {"embedding_dim": 5}},
    "model.normalize": {"model": {"normalize": False}},
    "model.pretrained": {"model": {"pretrained": False}},
    "model.weights": {"model": {"weights": "file.pt"}},
    "optimizer.name": {"optimizer": {"name": "sgd", "lr": 0.01, "warmup": 3}},
    "optimizer.proximal": {"optimizer": {"proximal": 0.1}},
    "training.seed": {"training": {"seed": 1}},
    "training.precision": {"training": {"precision": "float64"}},
    "training.cross_batch_memory": {"training": {"cross_batch_memory": 20}},
    "training.protocol": {"training": {"protocol": "paper"}},
    "data.labels": {"data": {"labels": "cls"}},
    "data.inputs": {"data": {"inputs": "png"}},
    "data.validation": {"data": {"validation": 0.5}},
    "data.validation_classes": {"data": {"validation_classes": ["1*"]}},
    "data.move": {"data": {"move": 2.0}},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_may_not_change_is_refused_by_name(run, name):
    with pytest.raises(ValueError, match=rf"{name} was .* and is now .*; put it back") as caught:
        go_on(run, **REFUSED[name])
    assert "optimizer.lr" in str(caught.value)  # it says what may
    assert journal(run)[-1]["step"] == 8


def test_fewer_steps_than_were_taken_are_refused(run):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=r"training.steps is 6, but the run has taken 8 steps already; leave it out"):
        go_on(run, steps=6)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert go_on(run, steps=8).finished


def test_baselines_that_were_not_scored_cannot_be_asked_for_later(tmp_path):
    fit(settings(training={"steps": 2, "baselines": False}), tmp_path / "run", data=tiny())
    for steps in (2, 4):
        with pytest.raises(ValueError, match=r"training.baselines are scored before the first step"):
            go_on(tmp_path / "run", steps=steps, training={"baselines": True})
    assert go_on(tmp_path / "run", steps=4, training={"baselines": False}).finished


ALLOWED = {
    "data.path": "elsewhere",
    "data.cache": "disk",
    "data.cache_folder": "elsewhere",
    "data.workers": 1,
    "data.on_corrupt": "skip",
    "optimizer.lr": 0.002,
    "optimizer.head_lr_mult": 3.0,
    "optimizer.loss_lr_mult": 2.0,
    "optimizer.betas": [0.8, 0.9],
    "optimizer.momentum": 0.5,
    "optimizer.weight_decay": 0.1,
    "optimizer.warmup": 11,
    "optimizer.schedule": "constant",
    "optimizer.max_grad_norm": 0.01,
    "training.steps": 10,
    "training.chunk": 5,
    "training.compile": "kernels",
    "training.threads": 1,
    "training.evaluate_every": 3,
    "training.checkpoint_every": 3,
    "training.explain_every": 0,
    "training.diagnose_every": 2,
    "training.baselines": False,
    "training.max_positive_distance": 0.1,
    "training.min_negative_distance": 1.9,
    "training.trackers": ["tensorboard"],
}
RATES = [name for name in ALLOWED if name.startswith("optimizer.") and name not in ("optimizer.momentum",)]


def test_the_list_of_what_may_change_is_whole():
    assert set(ALLOWED) == set(MAY_CHANGE)
    assert set(MAY_CHANGE) <= set(flat(to_tree(config())))


def changes(name: str):
    section, key = name.split(".")
    return {section: {key: ALLOWED[name]}}


@pytest.mark.parametrize("name", [name for name in ALLOWED if name not in RATES])
def test_what_may_change_does(run, name, monkeypatch):
    if name == "training.trackers":
        need("tensorboard")
    monkeypatch.setattr(torch, "compile", lambda trunk, **how: trunk)  # new kernels would take a minute
    assert go_on(run, **changes(name)).finished


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """A run whose loss learns too, and what becomes of it where nothing is changed."""
    folder = tmp_path_factory.mktemp("learnt")
    fit(settings(loss={"name": "Margin"}), folder / "run", data=tiny())
    for name in ("same", "again"):
        shutil.copytree(folder / "run", folder / name)
        go_on(folder / name, loss={"name": "Margin"})
    return folder


def learned(folder: Path) -> list[torch.Tensor]:
    """Everything that was learnt, of network and loss."""
    state = torch.load(folder / "checkpoints/last.pt", weights_only=True)
    return [*state["model"].values(), *state["loss"].values()]


@pytest.mark.parametrize("name", RATES)
def test_a_changed_rate_takes_effect(learnt, tmp_path, name):
    """The next steps differ from those of the unchanged run; where nothing is changed they are the same."""
    run = Path(shutil.copytree(learnt / "run", tmp_path / "run"))
    go_on(run, loss={"name": "Margin"}, **changes(name))
    same = learned(learnt / "same")
    assert all(map(torch.equal, same, learned(learnt / "again")))
    assert not all(map(torch.equal, same, learned(run)))


def test_weights_of_another_network_are_refused(run):
    for name, change in (("embedding_dim", {"embedding_dim": 5}), ("normalize", {"normalize": False})):
        save(replace(settings(), model=replace(settings().model, **change)), run / "config.yaml")
        with pytest.raises(ValueError, match=rf"model\.{name} was .* and is now"):
            open_run(run)


# the journal


def test_good_lines_stay_and_the_damaged_one_is_told_of(run):
    path = run / "journal.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if json.loads(line)["step"] == 3 and "loss" in line)
    torn = lines[at][:20] + "\n"
    path.write_text("".join([*lines[:at], torn, *lines[at + 1 :]]), encoding="utf-8")
    with pytest.warns(UserWarning, match=r"damaged|holds") as told:
        go_on(run)
    said = " | ".join(str(warning.message) for warning in told)
    assert f"1 damaged line (line {at + 1}), kept in" in said
    assert f"holds {len(lines) - 1} of the {len(lines)} lines that were written up to step 8" in said
    assert (run / "journal.damaged").read_text(encoding="utf-8") == torn
    assert [line["step"] for line in journal(run) if "loss" in line] == [1, 2, *range(4, 13)]


def test_a_torn_last_line_is_nothing_to_speak_of(run):
    path = run / "journal.jsonl"
    path.write_text(path.read_text(encoding="utf-8") + '{"step": 9, "lo', encoding="utf-8")
    go_on(run)
    assert not (run / "journal.damaged").exists()


def test_a_journal_cut_short_between_lines_is_told_of(run):
    path = run / "journal.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[:-1]), encoding="utf-8")
    with pytest.warns(UserWarning, match=f"holds {len(lines) - 1} of the {len(lines)} lines that were written"):
        go_on(run)
    go_on(run, 14)  # it is told of once


def test_no_flipped_bit_of_a_journal_passes(run):
    path, draw = run / "journal.jsonl", random.Random(0)
    good = path.read_bytes()
    lines = read_lines(path).entries
    for _ in range(300):
        bad = bytearray(good)
        bad[draw.randrange(len(good) - 1)] ^= 1 << draw.randrange(8)
        path.write_bytes(bad)
        found = read_lines(path)
        assert found.damaged
        assert [entry for entry in lines if entry not in found.entries]
        assert all(entry in lines for entry in found.entries)


def test_lines_that_are_no_entries(tmp_path):
    path = tmp_path / "journal.jsonl"
    bad = [
        "[1]",
        "7",
        '"step"',
        "null",
        '{"loss": 1}',
        '{"step": "1"}',
        '{"step": 1.5}',
        '{"step": true}',
        '{"step": -1}',
    ]
    bad += ["[" * 100_000, '{"step": ' + "9" * 5000 + "}", "\u2028"]
    path.write_text('{"step": 1, "loss": 2.0}\n' + "\n".join(bad) + '\n\n{"step": 2, "loss": 1.0}\n', encoding="utf-8")
    with path.open("ab") as stream:
        stream.write(b"\xff\xfe\n")
    found = read_lines(path)
    assert [entry["step"] for entry in found.entries] == [1, 2]
    assert [line.number for line in found.damaged] == [*range(2, 2 + len(bad)), 4 + len(bad)]
    assert read_journal(path).notes == (f"{len(bad) + 1} unreadable lines of the journal passed over.",)
    assert diagnose_run(tmp_path).measures["steps"] == 2


def test_a_line_of_a_hundred_megabytes_takes_no_memory(tmp_path):
    path = tmp_path / "journal.jsonl"
    with path.open("wb") as stream:
        stream.write(to_line({"step": 1, "loss": 2.0}).encode())
        stream.write(b'{"step": 2, "x": "' + b"a" * LONGEST)
        for _ in range(100):
            stream.write(b"a" * (1 << 20))
        stream.write(b'"}\n' + to_line({"step": 3, "loss": 1.0}).encode())
    script = f"""
import resource, sys
from pathlib import Path
from nearfar._utils.journal import read_lines
now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (32 << 20), now + (32 << 20)))
found = read_lines(Path({str(path)!r}))
print([entry["step"] for entry in found.entries], [line.number for line in found.damaged])
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, encoding="utf-8", timeout=60)
    assert ended.stdout == "[1, 3] [2]\n", ended.stderr
