"""Every remedy of the doctor, for every loss: its flags are valid, and the configuration it gives trains."""

from __future__ import annotations

import functools
import io
import itertools
import json
import re

import numpy as np
import pytest
import torch
from rich.console import Console
from runs import config, tiny

from nearfar.data import DataSet, Tensors
from nearfar.doctor import Thresholds, diagnose_journal, diagnose_run, prescribe
from nearfar.doctor import _remedies as remedies
from nearfar.doctor._looks import Look, judge
from nearfar.doctor._prescription import apply_remedy
from nearfar.doctor._remedies import KINDS, Patient, finding
from nearfar.doctor._run import Outcome
from nearfar.runs import _parts as parts
from nearfar.runs._config import apply_flags, to_tree
from nearfar.train import _length as length
from nearfar.train import _processes as processes
from nearfar.train import fit, load
from nearfar.train._state import load_batches, prepare, take_step

QUIET = Console(quiet=True)
CLASSES = 9
"""Of the tiny problem, three of twelve held out."""
NEEDED = {
    "DroTopK": {"k": 8},
    "DroTopKPN": {"k": 8},
    "DroTrimmed": {"top": 2, "k": 8},
    "DroTrimmedPN": {"wrong": 0.2, "k": 8},
    "DroChiSquare": {"rho": 1.0},
    "SpreadFloor": {"loss": {"name": "Triplet", "mining": "hard"}},
    "Ladder": {"loss": {"name": "Triplet", "mining": "hard"}},
    "Nested": {"loss": {"name": "Triplet", "mining": "hard"}, "dims": [2, 4]},
}
LOSSES = {
    **{name: {"name": name, **NEEDED.get(name, {})} for name in parts.LOSSES},
    "hard": {"name": "Triplet", "mining": "hard", "margin": 0.0},
    "annealed": {"name": "Triplet", "mining": "hard", "margin": 0.2, "anneal": 100},
    "hardest": {"name": "Triplet", "mining": "hardest"},
    "semihard": {"name": "Triplet", "mining": "semihard", "margin": 0.2},
    "small share": {"name": "DroTopK", "fraction": 0.001},
    "small gamma": {"name": "DroKL", "gamma": 0.03},
    "small grouped gamma": {"name": "DroKLGrouped", "gamma": 0.01},
    "large rho": {"name": "DroChiSquare", "rho": 50000.0},
    "large K": {"name": "DroTopK", "k": "8B"},
}
OTHERS = {
    "memory": {"training": {"cross_batch_memory": 40}},
    "projections": {"batches": {"name": "Representatives", "batch_size": 12}},
    "decayed": {"optimizer": {"weight_decay": 1.0, "lr": 0.1}},
    "all classes": {"batches": {"name": "MPerClass"}},
}
RUNS = {name: config(loss=loss) for name, loss in LOSSES.items()} | {
    name: config(**changes) for name, changes in OTHERS.items()
}


def groups(text):
    """Flags that stand together in brackets."""
    return [tuple(re.findall(r"--([a-z_.]+) ([^\s)]+)", inside)) for inside in re.findall(r"\((--[^)]*)\)", text)]


@functools.cache
def said(name):
    """kind -> what is said of a run; of no run at all where `name` is None."""
    patient = Patient() if name is None else Patient(RUNS[name], CLASSES, best_step=7, steps=20)
    return {kind: finding("x", "note", "y", kind, patient) for kind in KINDS}


def every_remedy(name):
    """All flags that are said of a run, and those that `--apply-remedy` would follow."""
    found = {flags for each in said(name).values() for flags in (*groups(each.remedy), each.flags) if flags}
    return sorted(found)


@pytest.mark.parametrize("name", RUNS)
def test_what_is_said_of_a_run_changes_it_into_one_that_can_be_trained(name):
    assert all(each.remedy.endswith(".") for each in said(name).values())
    for flags in every_remedy(name):
        cured = apply_flags(RUNS[name], flags)
        parts.check(cured)
        parts.make_loss(cured, classes=CLASSES)
        assert to_tree(cured) != to_tree(RUNS[name]), flags


@pytest.mark.parametrize("name", RUNS)
def test_what_is_said_without_a_configuration_fits_every_run(name):
    for flags in every_remedy(None):
        if name == "memory" and flags == remedies.NEAR_CLASSES:
            continue  # the configuration's own sentence says why these exclude each other
        if name == "small share" and "loss.k" in dict(flags):
            continue  # likewise, of k and fraction
        if dict(flags).keys() == {"loss.margin"}:
            continue  # said of triplets alone: `run.risk` asks first
        cured = apply_flags(RUNS[name], flags)
        parts.check(cured)
        parts.make_loss(cured, classes=CLASSES)


def test_every_remedy_trains():
    """Each different configuration that any remedy leads to, two steps; of mere rates and lengths those of one loss."""
    seen = {}
    for name, run in RUNS.items():
        for flags in every_remedy(name):
            if name == "DroTopK" or not all(flag.startswith(("optimizer.", "training.", "data.")) for flag, _ in flags):
                cured = apply_flags(run, flags)
                seen[json.dumps(to_tree(cured), sort_keys=True)] = cured
    assert len(seen) > 80
    machine, data = processes.begin("float32"), tiny()
    for cured in seen.values():
        setting = prepare(cured, machine, data)
        moments = [take_step(setting, *drawn) for drawn in itertools.islice(load_batches(setting), 2)]
        assert all(bool(torch.isfinite(moment.scalars["loss"])) for moment in moments)


def test_semihard_mining_is_said_to_triplets_alone():
    for name, run in RUNS.items():
        bare = any("(--loss.mining semihard" in each.remedy for each in said(name).values())
        assert bare == (run.loss.name == "Triplet" and name != "semihard"), name
        if run.loss.name != "Triplet":
            assert "semi-hard triplets (--loss.name Triplet " in said(name)["collapse"].remedy, name


WIDER = {
    "DroTopK": (("loss.k", "8B"),),
    "DroTrimmed": (("loss.k", "8B"),),
    "small share": (("loss.fraction", "null"), ("loss.k", "8B")),
    "small gamma": (("loss.gamma", "0.3"),),
    "small grouped gamma": (("loss.gamma", "0.1"),),
    "DroKLGrouped": remedies.OTHER,  # large enough by default
    "large rho": (("loss.rho", "40B"),),
    "DroWorst": remedies.TOP_K,
    "hardest": (("loss.mining", "semihard"), ("loss.margin", "0.2")),
    "large K": remedies.OTHER,
    "hard": remedies.OTHER,
    "SupCon": remedies.OTHER,
}


@pytest.mark.parametrize("name", WIDER)
def test_too_few_pairs_are_cured_by_the_run_s_own_set_where_it_has_one(name):
    found = said(name)["too few"]
    assert found.flags == WIDER[name]
    assert (remedies.enlarge_set(Patient(RUNS[name], CLASSES)) is None) == (found.flags == remedies.OTHER)


def test_a_collapse_of_a_top_k_loss_is_told_what_it_has():
    looks = [Look(0, 0.8, 9.0, 0.5, 0.5), Look(10, 0.01, 9.0, 0.1, 0.1)]
    (found,) = judge(looks, Thresholds(), Patient(RUNS["DroTopK"], CLASSES))
    assert found.name == "total collapse"
    assert "--loss.mining semihard" not in found.remedy.replace("--loss.name Triplet --loss.mining semihard", "")


@pytest.mark.parametrize("suspect", ["lr", "weight_decay"])
def test_a_rate_or_decay_is_suspected_above_its_limit_alone(suspect):
    usual = {"lr": 1e-4, "weight_decay": 0.0}
    for value, wanted in ((1e-3, ["loss.margin"]), (1.1e-3, ["loss.margin", f"optimizer.{suspect}"])):
        run = config(
            loss={"name": "Triplet", "mining": "semihard", "margin": 0.05},
            optimizer=usual | {suspect: value},
            batches={"name": "MPerClass", "classes": 9, "samples": 4},
        )
        assert [name for name, _ in remedies.against_collapse(run, CLASSES)] == wanted


def test_asking_for_a_remedy_draws_nothing():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    finding("x", "note", "y", "collapse", Patient(RUNS["ProxyAnchor"], CLASSES))
    assert torch.equal(torch.get_rng_state(), before)


# ------------------------------------------------------------------------------ over-fitting, slow, and neither


def losses(start, end, steps=200):
    return [{"step": i + 1, "loss": start * (end / start) ** (i / steps)} for i in range(steps)]


def look(step, skill):
    return {"step": step, "spread": 0.9, "effective_rank": 9.0, "probe recall@1": skill, "probe skill": skill}


def held_out(*values):
    return [{"step": 50 * (i + 1), "validation recall@1": value} for i, value in enumerate(values)]


def severities(entries, **more):
    return {each.name: each.severity for each in diagnose_journal(entries, **more).findings}


def test_over_fitting_is_named():
    entries = [look(0, 0.4), *losses(0.5, 0.01), look(200, 1.0), *held_out(0.833, 0.82, 0.767)]
    found = diagnose_journal(entries, config=config())
    (finding,) = found.findings
    assert (finding.name, finding.severity) == ("over-fitting", "warning")
    assert "was 83.3% at step 50 and is 76.7%" in finding.evidence
    assert "100.0% of the training samples" in finding.evidence
    assert finding.flags == (("training.steps", "50"),)
    slight = [look(0, 0.4), *losses(0.5, 0.01), look(200, 1.0), *held_out(0.833, 0.82, 0.80)]
    assert severities(slight) == {"over-fitting": "note"}
    half = [look(0, 0.4), *losses(0.5, 0.01), look(200, 0.6), *held_out(0.833, 0.82, 0.70)]
    assert severities(half) == {"past its best": "note"}


def test_only_slow_is_said_only_where_more_could_help():
    rising = [look(0, 0.4), *losses(0.5, 0.01), look(200, 0.8), *held_out(0.5, 0.6, 0.7)]
    assert severities(rising) == {"only slow": "note"}
    (found,) = diagnose_journal(rising, config=config()).findings
    assert found.flags == (("training.steps", "400"),)
    assert severities([*losses(0.5, 0.01)]) == {"only slow": "note"}
    assert severities([look(0, 0.4), *losses(0.5, 0.01), look(200, 1.0)]) == {}  # all is learnt, nobody else is asked
    assert severities([*losses(0.5, 1e-6)]) == {}  # a loss of .0000
    assert severities([*losses(1000.0, 0.004)]) == {}  # likewise, beside what it was
    assert severities([*losses(1000.0, 0.4)]) == {"only slow": "note"}


def test_an_early_best_is_not_told_to_train_longer():
    falling = [{"step": i + 1, "loss": 2.0 / (i + 1)} for i in range(400)]

    def of(*values):
        return [look(0, 0.1), *falling, look(400, 0.6), *held_out(*values)]

    found = diagnose_journal(of(0.50, 0.49, 0.48, 0.49, 0.48, 0.49, 0.48, 0.49), config=config())
    (early,) = found.findings
    assert (early.name, early.severity) == ("past its best", "note")
    assert "was 50.0% at step 50 and is 49.0% at step 400" in early.evidence
    assert "train longer" not in str(early)
    shorter, slower, decayed = groups(early.remedy)
    assert shorter == early.flags == (("training.steps", "50"),)
    assert (slower, decayed) == ((("optimizer.lr", "0.001"),), (("optimizer.weight_decay", "0.0001"),))
    assert severities(of(0.4, 0.45, 0.49, 0.48, 0.50, 0.49, 0.48, 0.49)) == {}  # in the middle, and hardly fallen
    assert severities(of(0.5, 0.5, 0.5, 0.5)) == {}  # no more than at the first evaluation
    assert severities(of(0.4, 0.45, 0.49, 0.5)) == {"only slow": "note"}


@pytest.mark.parametrize("values", [(0.5, 0.6, 0.7), (0.7, 0.65, 0.66)])
def test_below_the_input_longer_is_a_remedy_only_where_recall_still_rises(values):
    entries = [BEFORE, *losses(0.5, 0.4), *held_out(*values)]
    found = diagnose_journal(entries, config=config(), tested=Outcome(0.57, 0.5, 0.68)).findings[0]
    assert found.name == "below its baseline"
    assert ("train longer" in found.remedy) == (values[-1] == max(values))


def test_chance_is_not_healthy():
    entries = losses(0.5, 0.01)
    found = diagnose_journal(entries, config=config(), tested=Outcome(0.0, 0.0, 0.0, chance=0.023))
    (none,) = found.findings
    assert (none.name, none.severity) == ("no better than chance", "alarm")
    assert "R@1 on the test classes is 0.0, by luck it would be 2.3." in none.evidence
    assert none.flags == (("optimizer.lr", "0.001"),)
    assert severities(entries, tested=Outcome(0.03, 0.02, 0.04, chance=0.023)) == {"no better than chance": "alarm"}
    few = Outcome(0.5, 0.1, 0.9, chance=0.2)  # a handful of test classes
    assert severities(entries, tested=few) == {"only slow": "note"}
    assert severities(entries, tested=Outcome(0.03, 0.026, 0.04, chance=0.02)) == {"only slow": "note"}
    assert severities(entries, tested=Outcome(0.0, 0.0, 0.0)) == {"no better than chance": "alarm"}  # of an older run
    assert severities(entries, tested=Outcome(0.03, 0.0, 0.06)) == {"only slow": "note"}
    assert severities(entries, tested=Outcome(1.0, 1.0, 1.0, chance=1.0)) == {"only slow": "note"}  # one class
    assert severities([*entries, *held_out(0.0, 0.0)]) == {"no better than chance": "alarm"}  # not tested yet
    assert severities([*entries, *held_out(0.0, 0.1)]) == {"only slow": "note"}


# ------------------------------------------------------------------------------------------------- baselines


BEFORE = {"step": 0, "baselines": {"input": 0.973, "untrained": 0.9}}


def test_a_run_below_its_baseline_is_not_healthy():
    entries = [BEFORE, *losses(0.5, 0.4)]
    bad = diagnose_journal(entries, config=config(), tested=Outcome(0.57, 0.5, 0.68))
    (found,) = bad.findings
    assert (found.name, found.severity) == ("below its baseline", "warning")
    assert "57.0 [50.0, 68.0]" in found.evidence
    assert "97.3 for the input vectors themselves" in found.evidence
    assert found.flags == (("model.embedding_dim", "null"), ("optimizer.lr", "0.0033"))
    told = [{**BEFORE, "baselines": {"untrained": 0.9}}, *losses(0.5, 0.4)]  # pictures: the input has no score
    pictures = diagnose_journal(told, config=config(), tested=Outcome(0.57, 0.5, 0.68)).findings[0]
    assert pictures.flags == (("optimizer.lr", "0.001"),)
    square = config(model={"embedding_dim": None})
    begun = diagnose_journal(entries, config=square, tested=Outcome(0.57, 0.5, 0.68)).findings[0]
    assert begun.flags == (("optimizer.lr", "0.001"),)
    assert severities(entries, tested=Outcome(0.96, 0.93, 0.98)) == {"below its baseline": "note"}
    assert severities(entries, tested=Outcome(0.973, 0.95, 1.0)) == {}  # as good is not below
    assert severities(entries, tested=Outcome(0.98, 0.95, 1.0)) == {}
    assert severities(entries) == {}


def misleading():
    """Vectors whose test classes lie apart in just those dimensions that are noise among the training classes."""
    random = np.random.default_rng(0)

    def samples(classes, told, noise):
        labels = np.repeat(np.arange(classes), 6)
        x = 0.15 * random.normal(size=(len(labels), 16))
        x[:, noise] *= 4
        x[:, told] += random.normal(size=(classes, 8))[labels]
        return Tensors(torch.from_numpy(x).float(), labels)

    first, second = slice(0, 8), slice(8, 16)
    return DataSet("misleading", samples(12, first, second), samples(30, second, first))


def test_a_run_measures_its_baselines_once_and_follows_the_remedy_to_a_better_score(tmp_path):
    data = misleading()
    settings = config(
        model={"name": "linear", "embedding_dim": 8},
        optimizer={"lr": 0.03, "warmup": 0},
        training={"steps": 60, "diagnose_every": 10, "evaluate_every": 20},
        data={"validation": 0.0},
    )
    shown = Console(record=True, width=200, file=io.StringIO())
    first = fit(settings, tmp_path / "ill", data=data, console=shown)
    lines = [json.loads(line) for line in (tmp_path / "ill/journal.jsonl").read_text(encoding="utf-8").splitlines()]
    (before,) = [line for line in lines if "baselines" in line]
    assert before["step"] == 0
    assert before["baselines"]["input"] > 0.95
    text = shown.export_text()
    assert re.search(r"R@1 on the test classes: input vectors \d+\.\d, untrained network \d+\.\d\n", text)
    assert re.search(r"input vectors \d+\.\d, untrained network \d+\.\d, trained network \d+\.\d\n", text)
    assert "below its baseline" in diagnose_run(tmp_path / "ill")
    assert not diagnose_run(tmp_path / "ill").healthy
    remedy = prescribe(tmp_path / "ill")
    second = fit(remedy.config, tmp_path / "cured", data=data, console=QUIET)
    assert second.test.recall[1] > first.test.recall[1] + 0.1


def test_baselines_change_nothing_and_are_not_measured_again(tmp_path):
    settings, data = config(training={"steps": 10}), tiny()
    fit(settings, tmp_path / "with", data=data, console=QUIET)
    fit(apply_flags(settings, [("training.baselines", "false")]), tmp_path / "without", data=data, console=QUIET)
    first, second = (
        torch.load(tmp_path / name / "checkpoints/last.pt", weights_only=True) for name in ("with", "without")
    )
    assert all(torch.equal(first["model"][key], second["model"][key]) for key in first["model"])
    assert torch.equal(first["random"][0]["torch"], second["random"][0]["torch"])
    written = (tmp_path / "with/journal.jsonl").read_text(encoding="utf-8")
    fit(apply_flags(settings, [("training.steps", "15")]), tmp_path / "with", data=data, resume=True, console=QUIET)
    again = (tmp_path / "with/journal.jsonl").read_text(encoding="utf-8")
    assert again.count("baselines") == written.count("baselines") == 1


def test_the_page_shows_them(tmp_path):
    from nearfar import report

    fit(config(training={"steps": 5}), tmp_path / "run", data=tiny(), console=QUIET)
    page = report.build(tmp_path / "run", queries=4, points=20)
    assert "<dt>Input vectors</dt>" in page
    assert "<dt>Untrained network</dt>" in page


def noisy(classes=60):
    """Classes that differ in four coordinates of sixteen, the others hold noise, which takes long to leave out."""
    random, labels = np.random.default_rng(0), np.repeat(np.arange(classes), 6)
    x = random.normal(size=(len(labels), 16)) * np.repeat([0.3, 2.0], [4, 12])
    x[:, :4] += random.normal(size=(classes, 4))[labels]
    samples = Tensors(torch.from_numpy(x).float(), labels)
    return DataSet("noisy", samples, samples)


def test_the_remedy_for_a_short_run_finds_a_longer_one(tmp_path, monkeypatch):
    monkeypatch.setattr(length, "PLAIN", 90)
    model = {"name": "linear", "embedding_dim": 8}
    short = config(training={"steps": 120, "evaluate_every": 30}, loss={"name": "SupCon"}, model=model)
    before = fit(short, tmp_path / "short", data=noisy(), console=QUIET)
    (found,) = (each for each in diagnose_run(tmp_path / "short").findings if each.name == "under-trained")
    cured = apply_remedy(found, load(tmp_path / "short" / "config.yaml"))
    assert cured.changes == ("training.steps: 120 -> auto",)
    after = fit(cured.config, tmp_path / "cured", data=noisy(), console=QUIET)
    assert after.step > 160
    assert after.test.map_at_r > before.test.map_at_r + 0.05
