"""The doctor names each problem of a space, finds none in a healthy one, and its remedies are options that exist."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import typer
from runs import config, tiny
from typer.testing import CliRunner

from nearfar import losses
from nearfar.cli.commands import diagnosis
from nearfar.cli.commands.command import Command
from nearfar.doctor import Thresholds, diagnose, diagnose_journal
from nearfar.doctor import _remedies as remedies
from nearfar.doctor._embeddings import margin_of
from nearfar.train import fit
from nearfar.train._length import FEWEST_CLASSES, SHARE

LABELS = torch.arange(400) // 10


def blobs(width=32, noise=0.5, seed=0):
    """Forty classes around random means."""
    draw = torch.Generator().manual_seed(seed)
    means = torch.randn(40, width, generator=draw)
    return means[LABELS] + noise * torch.randn(400, width, generator=draw)


def point(seed=0):
    """Every row nearly the same."""
    return torch.ones(400, 16) + 1e-3 * torch.randn(400, 16, generator=torch.Generator().manual_seed(seed))


def severity(found, name):
    return next(finding.severity for finding in found.findings if finding.name == name)


HEALTHY = {
    "none": None,
    "triplet": losses.Triplet(margin=0.2),
    "hard": losses.Triplet(margin=0.2, mining="hard"),
    "semihard": losses.Triplet(margin=0.2, mining="semihard"),
    "topk": losses.DroTopK(k=160),
    "multi": losses.MultiSimilarity(),
}


@pytest.mark.parametrize("loss", HEALTHY.values(), ids=HEALTHY)
@pytest.mark.parametrize("seed", [0, 1])
def test_health_is_left_in_peace(loss, seed):
    found = diagnose(blobs(seed=seed), LABELS, loss=loss)
    assert found.healthy, found
    assert repr(found).startswith("Healthy")


def test_total_collapse_and_a_pinned_loss():
    found = diagnose(point(), LABELS, loss=losses.Triplet(margin=0.2, mining="hard"))
    assert not found.healthy
    assert severity(found, "total collapse") == "alarm"
    assert severity(found, "loss pinned at its margin") == "alarm"
    assert "no active pairs" not in found
    assert repr(found).startswith("Not healthy: ")


def test_a_narrow_cone_with_its_classes_apart_is_a_note():
    """Hard mining at a high rate shrinks a space to a cosine of .998 and keeps its recall: no collapse."""
    x = torch.nn.functional.normalize(blobs(), dim=1) + torch.tensor([200.0] + 31 * [0.0])
    found = diagnose(x, LABELS, loss=losses.Triplet(margin=0.2, mining="hard"))
    assert severity(found, "narrow cone") == "note"
    assert severity(found, "loss pinned at its margin") == "note"
    assert found.healthy


def test_exact_collapse_is_named_too():
    found = diagnose(torch.ones(400, 16), LABELS)
    assert severity(found, "total collapse") == "alarm"
    assert "dimensional collapse" not in found


def test_a_collapse_on_the_way_is_a_warning():
    x = torch.nn.functional.normalize(blobs(width=16, noise=2.0), dim=1)
    shifted = x + torch.tensor([6.0] + 15 * [0.0])
    assert severity(diagnose(shifted, LABELS), "total collapse") == "warning"
    assert "total collapse" not in diagnose(x, LABELS)


def test_euclidean_spaces_are_judged_by_their_margin():
    x = 1e-3 * blobs(noise=2.0)
    assert "total collapse" not in diagnose(x, LABELS, metric="euclidean")
    found = diagnose(x, LABELS, metric="euclidean", margin=1.0)
    assert severity(found, "total collapse") == "alarm"


def test_class_collapse():
    draw = torch.Generator().manual_seed(0)
    found = diagnose(torch.randn(400, 32, generator=draw), LABELS)
    assert severity(found, "class collapse") == "alarm"
    assert "total collapse" not in found


def test_dimensional_collapse():
    draw = torch.Generator().manual_seed(0)
    line = torch.randn(40, 1, generator=draw)[LABELS] + 0.01 * torch.randn(400, 1, generator=draw)
    x = line @ torch.randn(1, 32, generator=draw) + 0.01 * torch.randn(400, 32, generator=draw)
    assert severity(diagnose(x, LABELS, metric="euclidean"), "dimensional collapse") == "alarm"
    assert "dimensional collapse" not in diagnose(blobs(width=2), LABELS)


def test_no_active_pairs():
    x = torch.eye(40)[LABELS]
    assert severity(diagnose(x, LABELS, loss=losses.Triplet(margin=0.1)), "no active pairs") == "warning"
    assert severity(diagnose(x, LABELS, margin=0.1), "no active pairs") == "warning"
    assert severity(diagnose(x, LABELS), "classes are points") == "note"
    assert diagnose(x, LABELS).healthy


def test_a_gradient_on_few_pairs_names_the_rows():
    found = diagnose(blobs(), LABELS, loss=losses.DroWorst())
    finding = next(each for each in found.findings if each.name == "gradient on few pairs")
    assert finding.severity == "warning"
    why = losses.DroWorst().explain(blobs(), LABELS)
    assert len(finding.rows) == 3
    assert why.active_positives + why.active_negatives == 2


def test_mislabeled_rows_are_listed():
    wrong = LABELS.clone()
    rows = torch.arange(3, 400, 40)
    wrong[rows] = (wrong[rows] + 7) % 40
    found = diagnose(blobs(noise=0.3), wrong)
    finding = next(each for each in found.findings if each.name == "mislabeled suspects")
    assert set(finding.rows) == set(rows.tolist())
    assert finding.severity == "note"
    assert "mislabeled suspects" not in diagnose(blobs(noise=0.3), LABELS)


def test_rows_keep_their_numbers_in_a_sample():
    wrong = LABELS.clone()
    wrong[::20] = (wrong[::20] + 7) % 40
    found = diagnose(blobs(noise=0.3), wrong, rows=200)
    rows = {row for each in found.findings if each.name == "mislabeled suspects" for row in each.rows}
    assert rows
    assert all(row % 20 == 0 for row in rows)


def test_norms_and_values_that_are_not_finite():
    x = blobs()
    x[3, 0], x[7, 1] = float("nan"), float("inf")
    x[5] *= 1000
    found = diagnose(x, LABELS)
    assert severity(found, "non-finite values") == "alarm"
    assert found.findings[0].rows == (3, 7)
    assert next(each for each in found.findings if each.name == "norm explosion").rows == (5,)
    assert severity(diagnose(1e6 * blobs(), LABELS), "norm explosion") == "alarm"
    assert not diagnose(torch.full((4, 2), torch.nan), torch.arange(4)).healthy


def test_few_rows_of_which_none_is_right_are_not_healthy():
    x = torch.eye(8).repeat_interleave(2, 0) + 0.01 * torch.arange(16)[:, None]
    y = torch.arange(16) % 8  # the neighbors are of two classes
    assert severity(diagnose(x, y), "class collapse") == "alarm"
    y = torch.arange(16) // 2
    assert "class collapse" not in diagnose(x, y)


def test_two_rows_find_each_other():
    found = diagnose(torch.eye(2), torch.zeros(2).long())
    assert found.healthy
    assert found.measures["recall@1"] == found.measures["chance"] == 1


def test_a_row_is_long_beyond_twenty_times_the_median():
    x = torch.eye(32)[torch.arange(400) % 32]
    x[5] *= 20
    assert not [each for each in diagnose(x, LABELS).findings if each.name == "norm explosion"]
    x[6] *= 21
    (found,) = [each for each in diagnose(x, LABELS).findings if each.name == "norm explosion"]
    assert (found.severity, found.rows) == ("warning", (6,))


def test_imbalance_is_a_note():
    sizes = torch.cat([torch.zeros(200).long(), 1 + torch.arange(100) // 2])
    x = torch.randn(51, 16, generator=torch.Generator().manual_seed(0))[sizes] + 0.1 * torch.randn(300, 16)
    found = diagnose(x, sizes)
    assert severity(found, "imbalance") == "note"
    assert "alone" in str(diagnose(blobs(), torch.arange(400)).findings)
    for lone, told in ((80, False), (82, True)):  # of 400
        y = torch.cat([torch.arange(lone), lone + torch.arange(400 - lone) // 2])
        assert (f"{lone} of 400 rows are alone" in str(diagnose(blobs(), y).findings)) == told


def test_thresholds_may_be_moved():
    assert not diagnose(blobs(), LABELS, thresholds=Thresholds(spread_warning=2.0, skill_kept=2.0)).healthy


def test_the_margin_of_a_loss():
    assert margin_of(losses.Triplet(margin=0.3)) == 0.3
    assert margin_of(losses.Triplet(margin=0.4, mining="hard")) == 0.4
    assert margin_of(losses.DroTopK(k=3)) is None


def run_of(losses_, **more):
    return [{"step": i + 1, "loss": float(loss), **more} for i, loss in enumerate(losses_)]


TRIPLET = {"loss": {"name": "Triplet", "mining": "hard", "margin": 0.2}}


def test_a_journal_pinned_at_its_margin():
    noise = 0.002 * np.random.default_rng(0).normal(size=200)
    falling = np.linspace(0.6, 0.3, 60)
    entries = run_of(np.concatenate([falling, 0.2 + noise]))
    found = diagnose_journal(entries, config=config(**TRIPLET))
    assert severity(found, "loss pinned at its margin") == "alarm"
    assert ("optimizer.lr", "0.001") in found.findings[0].flags
    assert "stalled" not in found
    assert "loss pinned at its margin" not in diagnose_journal(entries)  # nobody knows the margin
    kept = [{"step": step, "validation recall@1": 0.9} for step in (100, 260)]
    assert diagnose_journal([*entries, *kept], config=config(**TRIPLET)).healthy
    for place, there in ((-27, True), (-26, False)):  # a larger loss before the last tenth, and in it
        other = run_of([0.2] * (260 + place) + [0.35] + [0.2] * (-place - 1))
        found = diagnose_journal(other, config=config(**TRIPLET))
        assert ("loss pinned at its margin" in found) == there
    passing = run_of(np.linspace(0.4, 0.02, 200))
    assert "loss pinned at its margin" not in diagnose_journal(passing, config=config(**TRIPLET))


def test_a_journal_of_a_lost_recall():
    entries = run_of(np.linspace(1, 0.5, 100))
    entries += [{"step": 20 * i, "validation recall@1": r} for i, r in enumerate([0.54, 0.5, 0.4, 0.2, 0.2, 0.19])]
    assert severity(diagnose_journal(entries), "recall lost") == "alarm"
    entries = run_of(np.linspace(1, 0.5, 100))
    entries += [{"step": 20 * i, "validation recall@1": r} for i, r in enumerate([0.54, 0.7, 0.65, 0.6])]
    found = diagnose_journal(entries)
    assert severity(found, "past its best") == "note"
    assert found.healthy


def scored(*scores, every=20):
    """A journal whose held-out MAP@R is evaluated every so many steps; recall is full throughout."""
    entries = run_of(np.full(every * len(scores), 0.5))
    both = [{"validation recall@1": 0.99, "validation map_at_r": score} for score in scores]
    return [*entries, *({"step": every * (i + 1), **each} for i, each in enumerate(both))]


def test_a_length_that_was_wrong_is_named_by_map_at_r():
    many = [{"step": 0, "training classes": 60}]
    short = diagnose_journal([*many, *scored(0.3, 0.4, 0.46, 0.5)], config=config())
    assert severity(short, "under-trained") == "warning"
    (found,) = (each for each in short.findings if each.name == "under-trained")
    assert found.flags == (("training.steps", "auto"),)
    assert "from 40.0% in the first half to 50.0%" in found.evidence
    assert severity(diagnose_journal(scored(0.3, 0.46, 0.48, 0.5)), "under-trained") == "note"
    long = diagnose_journal([*many, *scored(0.4, 0.5, 0.46, 0.44)], config=config())
    assert severity(long, "over-trained") == "warning"
    (found,) = (each for each in long.findings if each.name == "over-trained")
    assert "--training.steps 40" in found.remedy  # the best point
    assert severity(diagnose_journal(scored(0.4, 0.5, 0.48, 0.47)), "over-trained") == "note"
    for right in (
        (0.3, 0.498, 0.499, 0.5),
        (0.3, 0.5, 0.499, 0.495),
        (0.3, 0.4, 0.5),
    ):  # the last has three evaluations
        found = diagnose_journal(scored(*right))
        assert "under-trained" not in found
        assert "over-trained" not in found


def test_few_classes_are_given_a_number_of_steps():
    found = diagnose_journal([{"step": 0, "training classes": 39}, *scored(0.3, 0.4, 0.46, 0.5)], config=config())
    (short,) = (each for each in found.findings if each.name == "under-trained")
    assert short.flags == (("training.steps", "160"),)
    assert round(FEWEST_CLASSES / SHARE * (1 - SHARE)) == remedies.FEWEST_CLASSES  # fewer would not be searched


def test_stalled_or_only_slow():
    noise = 0.01 * np.random.default_rng(0).normal(size=200)
    assert severity(diagnose_journal(run_of(1 + noise)), "stalled") == "warning"
    slow = diagnose_journal(run_of(np.linspace(1, 0.2, 200)))
    assert severity(slow, "only slow") == "note"
    assert slow.healthy
    learning = [*run_of(1 + noise), {"step": 1, "validation recall@1": 0.3}, {"step": 200, "validation recall@1": 0.5}]
    assert diagnose_journal(learning).healthy  # the loss of the hardest pairs may stay where it is


def test_looks_at_the_weights():
    looks = [{"step": i, "active_positives": 0, "active_negatives": 0, "effective_pairs": 0.0} for i in (50, 100, 150)]
    assert severity(diagnose_journal(looks), "no active pairs") == "warning"
    looks = [{"step": i, "active_positives": 1, "active_negatives": 1, "effective_pairs": 2.0} for i in (50, 100, 150)]
    assert severity(diagnose_journal(looks), "gradient on few pairs") == "warning"


def look_at(step, spread, rank, skill):
    line = {"step": step, "spread": spread, "effective_rank": rank}
    return line if skill is None else line | {"probe recall@1": skill, "probe skill": skill}


def test_what_the_callback_wrote_is_read():
    entries = [look_at(0, 0.9, 9.0, 0.6), *run_of(np.linspace(1, 0.9, 30)), look_at(20, 0.01, 1.1, 0.1)]
    found = diagnose_journal(entries)
    assert severity(found, "total collapse") == "alarm"
    assert severity(found, "dimensional collapse") == "alarm"
    kept = diagnose_journal([*entries[:-1], look_at(20, 0.01, 8.0, 0.9)])
    assert severity(kept, "narrow cone") == "note"
    assert kept.healthy
    entries[-1] = look_at(20, 0.7, 8.0, 0.1)
    assert severity(diagnose_journal(entries), "class collapse") == "alarm"
    entries[-1] = look_at(20, 0.01, 8.0, 0.4)
    assert severity(diagnose_journal(entries), "total collapse") == "warning"


def test_what_was_kept_is_only_a_note():
    """A run whose classes are told apart better than at first may rest: nothing is active, or few pairs pull."""
    quiet = {"active_positives": 0, "active_negatives": 0, "effective_pairs": 0.0}
    looks = [look_at(0, 0.9, 9.0, 0.6), *({"step": i, **quiet} for i in (50, 100, 150)), look_at(150, 0.9, 9.0, 0.99)]
    assert severity(diagnose_journal(looks), "no active pairs") == "note"
    looks[-1] = look_at(150, 0.9, 9.0, 0.5)
    assert severity(diagnose_journal(looks), "no active pairs") == "warning"


def test_one_evaluation_is_no_course_so_the_looks_decide():
    once = [look_at(0, 0.9, 9.0, 0.6), {"step": 100, "validation recall@1": 0.3}]
    few = [{"step": i, "active_positives": 1, "active_negatives": 1, "effective_pairs": 2.0} for i in (50, 100, 150)]
    for skill, wanted in ((0.99, "note"), (0.5, "warning")):
        found = diagnose_journal([*once, *few, look_at(150, 0.9, 9.0, skill)])
        assert severity(found, "gradient on few pairs") == wanted


def test_a_spread_at_the_limit_is_not_narrow():
    limits = Thresholds()
    for spread, wanted in ((limits.spread_alarm, {}), (0.99 * limits.spread_alarm, {"narrow cone"})):
        found = diagnose_journal([look_at(0, 0.9, 9.0, 0.6), look_at(20, spread, 9.0, 0.9)])
        assert {each.name for each in found.findings} == {*wanted}


def test_risks_and_values_that_are_not_finite():
    risky = {"loss": {"name": "Triplet", "mining": "hard", "margin": 0.0}}
    found = diagnose_journal(run_of(np.linspace(1, 0.9, 30)), config=config(**risky))
    assert severity(found, "margin of zero") == "note"
    assert severity(found, "many rows, few dimensions") == "note"
    for dim in (None, 500):
        wide = config(**risky, model={"name": "mlp", "embedding_dim": dim})
        assert "many rows, few dimensions" not in diagnose_journal(run_of(np.linspace(1, 0.9, 30)), config=wide)
    assert severity(diagnose_journal(run_of([1.0, float("nan")])), "non-finite values") == "alarm"
    assert diagnose_journal([]).healthy


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("watched") / "run"
    fit(config(training={"diagnose_every": 5}), folder, data=tiny())
    return folder


def command():
    app = typer.Typer()
    app.command(cls=Command)(diagnosis.diagnose)
    return app


def test_the_command_reads_a_run(watched, tmp_path):
    out = CliRunner().invoke(command(), [str(watched), "--json", str(tmp_path / "found.json")])
    assert "The run: " in out.output
    assert "The space: " in out.output
    record = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    healthy = record["The run"]["healthy"] and record["The space"]["healthy"]
    assert out.exit_code == (0 if healthy else 2)


def test_the_command_reads_vectors(tmp_path):
    np.savez(tmp_path / "good.npz", x=blobs().numpy(), y=LABELS.numpy())
    np.savez(tmp_path / "bad.npz", x=point().numpy(), y=LABELS.numpy())
    np.savez(tmp_path / "none.npz", x=point().numpy())
    run = CliRunner()
    assert run.invoke(command(), [str(tmp_path / "good.npz")]).exit_code == 0
    bad = run.invoke(command(), [str(tmp_path / "bad.npz")])
    assert bad.exit_code == 2
    assert "alarm: total collapse" in bad.output
    assert run.invoke(command(), [str(tmp_path / "none.npz")]).exit_code == 1
    assert run.invoke(command(), [str(tmp_path)]).exit_code == 1
