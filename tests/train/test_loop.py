"""The training loop on a tiny problem: what a run keeps, how it resumes, how it fails."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forks import ran
from rich.console import Console
from runs import config, journal, tiny, weights

from nearfar import Relation, train
from nearfar.batches import violations
from nearfar.data import Tensors
from nearfar.evaluation import Vectors, evaluate, mine
from nearfar.report._journal import read_journal
from nearfar.train import NotFiniteError, fit, open_run
from nearfar.train import _loop as loop

PROFS = {
    "batches": {"name": "Representatives", "batch_size": 8, "samples": 2, "rho": 2, "hard_classes": True},
    "loss": {"name": "Margin"},
    "optimizer": {"proximal": 0.1},
}
KINDS = {
    "plain": {},
    "projections": PROFS,
    "converged": {**PROFS, "batches": {**PROFS["batches"], "rho": 1, "steps": "converged"}},
    "proxies": {"loss": {"name": "ProxyNCA"}},
    "workers": {"data": {"workers": 1}},
    "mined": {"batches": {"name": "MinedNegatives", "batch_size": 12, "every": 4, "k": 5}},
    "sgd": {"optimizer": {"name": "sgd", "max_grad_norm": 0.5, "schedule": "constant"}},
    "memory and chunks": {"training": {"cross_batch_memory": 30, "cross_batch_memory_warmup": 2, "chunk": 5}},
}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key].cpu(), b[key].cpu()) for key in a)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "plain"
    return fit(config(), folder, data=tiny())


def test_a_run_folder_holds_what_the_commands_read(run):
    names = {str(path.relative_to(run.folder)) for path in run.folder.rglob("*") if path.is_file()}
    wanted = {"nearfar-run.json", "config.yaml", "journal.jsonl", "embeddings.npz", "scores.json"}
    assert names == wanted | {"checkpoints/last.pt", "checkpoints/best.pt"}
    assert run.finished
    assert run.step == 20


@pytest.mark.parametrize("chunk", [None, 5])
def test_the_journal_of_a_floor_has_the_spread_above_its_bound(tmp_path, chunk):
    loss = {"name": "Triplet", "mining": "hard", "margin": 0.2, "floor": 0.9}
    fit(config(loss=loss, training={"chunk": chunk}), tmp_path / "run", data=tiny())
    lines = [line for line in journal(tmp_path / "run") if "pair spread V" in line]
    assert len(lines) == 20
    for line in lines:
        assert line["pair spread V"] >= line["pair spread bound"] - 1e-6
        assert line["pair spread bound"] == pytest.approx(0.9 * math.exp(-line["loss"]) - 1e-6, abs=1e-6)
    panels = {panel.title: panel for panel in read_journal(tmp_path / "run" / "journal.jsonl").panels}
    assert [one.name for one in panels["Spread of pairs"].series] == ["V", "bound"]


def test_the_scores_of_a_run_are_those_of_its_vectors(run):
    found, written = Vectors.load(run.folder), json.loads((run.folder / "scores.json").read_text(encoding="utf-8"))
    wanted = json.loads(json.dumps(evaluate(found.x, found.y, ks=(1, 2)).to_dict()))
    assert {key: written[key] for key in wanted} == wanted


def test_the_journal_has_every_step_and_every_look(run):
    lines = journal(run.folder)
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 21))
    assert [line["step"] for line in lines if "validation recall@1" in line] == [5, 10, 15, 20]
    assert [line["step"] for line in lines if "effective_pairs" in line] == [4, 8, 12, 16, 20]
    assert all(0 <= line["violation"] <= 1 for line in lines if "violation" in line)


def test_it_learns(run):
    losses = [line["loss"] for line in journal(run.folder) if "loss" in line]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_the_best_weights_are_those_of_the_best_validation_score(run):
    scores = {line["step"]: line["validation recall@1"] for line in journal(run.folder) if "violation" in line}
    assert run.best_step == max(scores, key=lambda step: (scores[step], -step))
    state = torch.load(run.folder / "checkpoints" / "best.pt", weights_only=True)
    assert (state["step"], state["score"]) == (run.best_step, scores[run.best_step])


def test_a_run_opens_with_its_best_weights_and_without_its_data(run):
    opened = open_run(run.folder)
    assert same(opened.model.state_dict(), weights(run.folder, "best"))
    assert not opened.model.training


def test_test_classes_are_touched_once_and_at_the_end(tmp_path, monkeypatch):
    data, touched = tiny(), []
    real = loop.scoring.score

    def spy(model, samples, *args, **kwargs):
        touched.append(samples is data.test)
        return real(model, samples, *args, **kwargs)

    monkeypatch.setattr(loop.scoring, "score", spy)
    told = Console(file=io.StringIO(), width=200)
    fit(config(training={"baselines": False}), tmp_path / "a", data=data, console=told)
    assert touched == [False] * 4 + [True]
    assert ", tested once:" in told.file.getvalue()
    touched.clear()
    fit(config(training={"protocol": "paper", "baselines": False}), tmp_path / "b", data=data, console=told)
    assert all(touched)
    assert ", the best of all evaluations on the test classes, as the papers report it:" in told.file.getvalue()
    assert "test recall@1" in journal(tmp_path / "b")[-1]


def test_recall_is_measured_among_as_many_others_as_there_are(tmp_path):
    data = tiny()
    rows = len(data.test)
    deep = dataclasses.replace(data, ks=(1, rows - 1, rows))
    assert [*fit(config(training={"steps": 1}), tmp_path / "a", data=deep).test.recall] == [1, rows - 1]


def test_validation_classes_are_not_trained_on(tmp_path):
    data, seen = tiny(), set()
    fit(config(training={"steps": 30}), tmp_path / "a", data=data, callbacks=[lambda m: seen.update(m.labels.tolist())])
    assert seen == set(range(9))  # of twelve, a quarter is held out


@pytest.mark.parametrize("kind", KINDS)
def test_killed_and_resumed_equals_uninterrupted(tmp_path, kind):
    """Kill -9 between two checkpoints; the journal is cut to the last one and every number comes out the same."""
    settings, data = config(**KINDS[kind]), tiny()
    fit(settings, tmp_path / "whole", data=data)
    script = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parents[1] / "support")!r})
from pathlib import Path
from runs import config, tiny
from nearfar.train import fit
def die(moment):
    if moment.step == 13:
        os.kill(os.getpid(), signal.SIGKILL)
fit(config(**{KINDS[kind]!r}), Path({str(tmp_path / "cut")!r}), data=tiny(), callbacks=[die])
"""
    ended = ran(script)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert journal(tmp_path / "cut")[-1]["step"] >= 12  # beyond the checkpoint of step 10
    fit(settings, tmp_path / "cut", data=data, resume=True)
    assert journal(tmp_path / "cut") == journal(tmp_path / "whole")
    assert same(weights(tmp_path / "cut"), weights(tmp_path / "whole"))
    assert same(weights(tmp_path / "cut", "best"), weights(tmp_path / "whole", "best"))


def test_ctrl_c_saves_and_resumes(tmp_path, capsys):
    settings, data = config(), tiny()

    def press(moment):
        if moment.step == 7:
            os.kill(os.getpid(), signal.SIGINT)

    stopped = fit(settings, tmp_path / "a", data=data, callbacks=[press])
    assert (stopped.step, stopped.finished, stopped.test) == (7, False, None)
    assert "--resume" in " ".join(capsys.readouterr().out.split())
    fit(settings, tmp_path / "a", data=data, resume=True)
    fit(settings, tmp_path / "b", data=data)
    assert journal(tmp_path / "a") == journal(tmp_path / "b")
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))


def test_a_run_can_be_made_longer(tmp_path):
    short = config(training={"steps": 10}, optimizer={"schedule": "constant"})
    fit(short, tmp_path / "a", data=tiny())
    longer = replace(short, training=replace(short.training, steps=20))
    fit(longer, tmp_path / "a", data=tiny(), resume=True)
    fit(longer, tmp_path / "b", data=tiny())
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))


def test_without_validation_the_last_weights_are_the_best_also_when_a_run_is_made_longer(tmp_path):
    short = config(training={"steps": 5}, data={"validation": 0.0})
    assert fit(short, tmp_path / "a", data=tiny()).best_step == 5
    longer = replace(short, training=replace(short.training, steps=10))
    assert fit(longer, tmp_path / "a", data=tiny(), resume=True).best_step == 10
    assert same(weights(tmp_path / "a", "best"), weights(tmp_path / "a"))


def test_a_loss_that_is_not_finite_stops_with_the_step_and_the_checkpoint(tmp_path):
    data = tiny()

    def poison(moment):
        if moment.step == 12:
            with torch.no_grad():
                next(iter(moment.state.bare_model.parameters())).fill_(1e30)
                moment.state.bare_model.normalize = False

    settings = config(loss={"name": "NPair"})
    with pytest.raises(NotFiniteError, match=r"at step 13 \(finite up to 12\).*last\.pt \(step 10\)"):
        fit(settings, tmp_path / "a", data=data, callbacks=[poison])
    assert torch.load(tmp_path / "a/checkpoints/last.pt", weights_only=True)["step"] == 10


def test_a_full_disk_is_a_sentence_and_the_last_checkpoint_stays(tmp_path):
    script = f"""
import resource, signal, sys
sys.path.insert(0, {str(Path(__file__).parents[1] / "support")!r})
from pathlib import Path
from runs import config, tiny
from nearfar.train import fit
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
def fill(moment):
    if moment.step == 8:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    fit(config(), Path({str(tmp_path / "a")!r}), data=tiny(), callbacks=[fill])
except OSError as error:
    print("SAID", error)
"""
    ended = ran(script)
    assert "SAID train: cannot write" in ended.stdout, ended.stderr
    assert "(step 5)" in ended.stdout
    assert torch.load(tmp_path / "a/checkpoints/last.pt", weights_only=True)["step"] == 5
    assert not [p for p in (tmp_path / "a" / "checkpoints").iterdir() if p.name.endswith(".part")]


def test_folders_that_cannot_serve_are_refused(tmp_path):
    with pytest.raises(OSError, match="train: cannot make /proc/nearfar"):
        fit(config(), Path("/proc/nearfar"), data=tiny())
    with pytest.raises(ValueError, match=r"batches\.classes is 500, more than there are to draw from .* 9 to learn"):
        fit(config(batches={"classes": 500}), tmp_path / "wrong", data=tiny())
    assert not (tmp_path / "wrong").exists()
    with pytest.raises(FileNotFoundError, match="holds no run to resume"):
        fit(config(), tmp_path / "none", data=tiny(), resume=True)
    fit(config(training={"steps": 5}), tmp_path / "a", data=tiny())
    with pytest.raises(FileExistsError, match="already holds a run"):
        fit(config(), tmp_path / "a", data=tiny())


def test_a_damaged_checkpoint_is_named(tmp_path):
    fit(config(training={"steps": 5}), tmp_path / "a", data=tiny())
    path = tmp_path / "a/checkpoints/last.pt"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"last\.pt cannot be read"):
        fit(config(), tmp_path / "a", data=tiny(), resume=True)


def test_parameters_of_the_loss_learn_at_their_own_rate_and_are_kept(tmp_path):
    settings = config(loss={"name": "Margin"}, optimizer={"loss_lr_mult": 5.0, "head_lr_mult": 10.0})
    rates = []
    look = [lambda m: rates.append([group["lr"] for group in m.state.step.optimizer.param_groups])]
    fit(settings, tmp_path / "a", data=tiny(), callbacks=look)
    rate = settings.optimizer.lr
    assert rates[3] == pytest.approx([rate, rate, 10 * rate, 10 * rate, 5 * rate])
    state = torch.load(tmp_path / "a/checkpoints/last.pt", weights_only=True)
    assert set(state["loss"]) == {"pair_positive.offset"}  # one parameter, under one name
    assert float(state["loss"]["pair_positive.offset"].abs()) > 0  # it moved from 0


def test_a_projection_anchors_the_proximal_term_when_it_begins(tmp_path):
    settings, moved = config(**PROFS, training={"steps": 12}), []

    def look(moment):
        sampler, proximal = moment.state.sampler, moment.state.step.proximal
        moved.append((sampler.is_new_projection(moment.step - 1), float(proximal.penalty())))

    fit(settings, tmp_path / "a", data=tiny(), callbacks=[look])
    steps = [i for i, (new, _) in enumerate(moved) if new]
    assert steps[:2] == [0, 5]  # M = ceil(2 * 9 / 4)
    one_step = [penalty for new, penalty in moved if new]
    assert max(one_step) < min(
        penalty for (new, penalty), (was, _) in zip(moved[1:], moved[:-1], strict=True) if not new and not was
    )


def test_a_projection_lasts_until_the_largest_violation_stops_falling(tmp_path):
    options = {**PROFS["batches"], "rho": 1, "steps": "converged", "hard_classes": False}
    seen = []

    def look(moment):
        sampler, plan = moment.state.sampler, moment.state.config.training
        bounds = {"max_positive_distance": plan.max_positive_distance, "min_negative_distance": 1.2}
        found = violations(moment.embeddings, moment.target, **bounds)
        seen.append((sampler.is_new_projection(moment.step - 1), found.largest))

    fit(config(**{**PROFS, "batches": options}, training={"steps": 24}), tmp_path / "a", data=tiny(), callbacks=[look])
    new, largest = zip(*seen, strict=True)
    means = [sum(largest[i : i + 3]) / 3 for i in range(0, 24, 3)]  # M = ceil(9 / 4)
    expected, begun = [0], 0
    for k in range(7):
        if k > begun and means[k] >= means[k - 1]:
            begun = k + 1
            expected.append(3 * begun)
    assert [step for step, first in enumerate(new) if first] == expected
    assert 1 < len(expected) < 8  # neither all parts nor none


@pytest.mark.parametrize("every", [False, True])
def test_hard_classes_run_without_projections(every, tmp_path):
    """With `all_pairs` the loss gets labels, and the table of hard classes is still that of the representatives."""
    options = {**PROFS["batches"], "hard_classes": True, "steps": 1, "all_pairs": every}
    seen = []

    def look(moment):
        table, mask = moment.state.sampler.hard_classes, moment.state.mask
        near = torch.cdist(moment.embeddings[mask].float(), table.embeddings.float()).amin(dim=1)
        seen.append((isinstance(moment.target, Relation), float(near.max())))

    fit(config(**{**PROFS, "batches": options}, training={"steps": 3}), tmp_path / "a", data=tiny(), callbacks=[look])
    assert {projected for projected, _ in seen} == {not every}
    assert max(far for _, far in seen) < 1e-6


def test_bf16(tmp_path):
    settings = config(training={"precision": "bf16"})
    assert fit(settings, tmp_path / "a", data=tiny()).finished


def test_the_package_says_what_it_has():
    assert set(train.__all__) <= set(dir(train))


def test_pictures_are_kept_with_the_vectors(tmp_path):
    data = tiny()
    pictures = (torch.rand(len(data.test), 9, 9, generator=torch.Generator().manual_seed(0)) * 255).to(torch.uint8)
    shown = Tensors(pictures, data.test.labels)
    small = config(model={"name": "linear", "embedding_dim": 4}, data={"validation": 0.0, "transform": "none"})
    fit(small, tmp_path / "a", data=replace(data, train=shown, test=shown))
    from nearfar.evaluation import Vectors

    assert Vectors.load(tmp_path / "a" / "embeddings.npz").images.shape == (len(shown), 9, 9)


def test_chunks_change_nothing_but_rounding(tmp_path):
    """The network sees five samples at a time; the gradient is that of the batch."""
    exact = {"training": {"precision": "float64"}}
    fit(config(**exact), tmp_path / "whole", data=tiny())
    fit(config(training={"precision": "float64", "chunk": 5}), tmp_path / "chunks", data=tiny())
    whole, chunks = (weights(tmp_path / name) for name in ("whole", "chunks"))
    for name in whole:
        torch.testing.assert_close(chunks[name], whole[name], atol=1e-10, rtol=0)


def test_a_memory_goes_with_plain_batches_only(tmp_path):
    fit(config(training={"cross_batch_memory": 20}), tmp_path / "a", data=tiny())
    plain, kept = journal(tmp_path / "a"), torch.load(tmp_path / "a/checkpoints/last.pt", weights_only=True)["loss"]
    fit(config(), tmp_path / "b", data=tiny())
    assert journal(tmp_path / "b") != plain
    assert kept["embeddings"].shape == (20, 4)
    with pytest.raises(ValueError, match=r"data\.workers does not go with batches MinedNegatives"):
        fit(config(data={"workers": 1}, batches={"name": "MinedNegatives"}), data=tiny())
    with pytest.raises(ValueError, match=r"training\.cross_batch_memory does not go with batches Representatives"):
        fit(
            config(training={"cross_batch_memory": 20}, batches={"name": "Representatives", "batch_size": 8}),
            tmp_path / "c",
        )


def test_batch_norms_and_chunks_exclude_each_other(tmp_path):
    with pytest.raises(ValueError, match=r"normalizes by its batch"):
        fit(config(training={"chunk": 4}, model={"bn_neck": True}), tmp_path / "a", data=tiny())
    fit(
        config(training={"chunk": 4, "steps": 2}, model={"bn_neck": True, "group_norms": True}),
        tmp_path / "b",
        data=tiny(),
    )


def test_negatives_are_mined_anew_with_the_network_of_that_moment(tmp_path):
    """After every fourth step the table is that of the weights then, and later batches take their rows from it."""
    tables, batches = {}, {}

    def look(moment):
        batches[moment.step] = moment.indices.tolist()
        with torch.no_grad():
            x = moment.state.bare_model(moment.state.train.x.float())  # linear: the same in training and evaluation
        tables[moment.step] = mine(x, moment.state.train.labels, k=5, ranks=(1, 10), margin=0.0).places

    settings = config(**KINDS["mined"], model={"name": "linear", "embedding_dim": 4})
    fit(settings, tmp_path / "run", data=tiny(), callbacks=[look])
    saved = torch.load(tmp_path / "run/checkpoints/last.pt", weights_only=True)["sampler"]["table"]
    assert torch.equal(saved, tables[20])
    assert not torch.equal(tables[4], tables[16])
    for step in (5, 8, 20):
        for group in torch.tensor(batches[step]).reshape(3, 4):
            assert set(group[2:].tolist()) & set(tables[4 * ((step - 1) // 4)][group[0]].tolist())
