"""Annealed hard mining: soft at the start, exactly the plain loss at the end, restored from a checkpoint."""

from __future__ import annotations

import pytest
import torch
from runs import config, journal, tiny, weights

import nearfar as nf
from nearfar.losses import Triplet
from nearfar.losses.annealing import Anneal, Annealing, advance
from nearfar.runs import _parts as parts
from nearfar.sets import KL, Worst
from nearfar.train import fit

LABELS = torch.arange(24) // 4
ENGINES = ("dense", "tiled", "auto")


def rows(seed=0, dtype=torch.float64):
    return torch.randn(24, 6, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def after(steps, **options):
    loss = Triplet(**{"mining": "hard", "margin": 0.2, "anneal": 10} | options)
    for _ in range(steps):
        loss.step()
    return loss


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("steps", [10, 11, 40])
def test_at_its_end_it_is_the_plain_loss(engine, steps):
    x, y = rows().requires_grad_(), rows().requires_grad_()
    ended = after(steps, engine=engine)(x, LABELS)
    plain = Triplet(mining="hard", margin=0.2, engine=engine)(y, LABELS)
    assert ended == plain
    ended.backward()
    plain.backward()
    assert torch.equal(x.grad, y.grad)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("steps", "gamma"), [(0, 1.0), (5, 0.1), (9, 10**-1.8)])
def test_on_the_way_it_is_a_softmax_of_distances(engine, steps, gamma):
    """Per anchor: [ γ log mean e^{d_ap/γ} + γ log mean e^{-d_an/γ} + m ]₊, by a loop over anchors."""
    x = torch.nn.functional.normalize(rows(), dim=1)
    far = torch.cdist(x, x)
    terms = []
    for i, label in enumerate(LABELS):
        positive = (label == LABELS) & (torch.arange(24) != i)
        up = gamma * torch.logsumexp(far[i, positive] / gamma, 0) - gamma * positive.sum().double().log()
        negative = label != LABELS
        down = gamma * torch.logsumexp(-far[i, negative] / gamma, 0) - gamma * negative.sum().double().log()
        terms.append((up + down + 0.2).clamp(min=0))
    found = after(steps, engine=engine)(rows(), LABELS)
    assert found.item() == pytest.approx(torch.stack(terms).mean().item(), abs=1e-6)


def test_with_a_large_start_it_begins_as_the_mean():
    loss = after(0, anneal=Anneal(10, start=1e6))
    mean = nf.RobustLoss(
        pair=loss.pair_positive,
        over=nf.sets.Mean(),
        groups="anchor_sign",
        link=nf.links.HingeLink(0.2),
        similarity=nf.similarity.NegEuclidean(),
    )
    assert loss(rows(), LABELS).item() == pytest.approx(mean(rows(), LABELS).item(), abs=1e-6)


def test_it_grows_harder_with_every_step():
    values = [after(steps)(rows(), LABELS).item() for steps in range(11)]
    assert values == sorted(values)
    assert values[0] < 0.5 * values[-1]


@pytest.mark.parametrize("steps", [0, 5, 10])
def test_gradients(steps):
    loss = after(steps, engine="dense")
    assert torch.autograd.gradcheck(lambda x: loss(x, LABELS), (rows(3).requires_grad_(),))


def test_explain_reads_the_same_set():
    weights_of = [after(steps).explain(rows(), LABELS).effective_pairs for steps in (0, 5, 10)]
    assert weights_of == sorted(weights_of, reverse=True)
    assert after(10).explain(rows(), LABELS).effective_pairs == pytest.approx(
        Triplet(mining="hard", margin=0.2).explain(rows(), LABELS).effective_pairs
    )


def test_its_place_is_in_the_state():
    loss, other = after(7), after(0)
    assert list(Triplet(mining="hard").state_dict()) == []
    other.load_state_dict(loss.state_dict())
    assert other.annealing.done == 7
    assert other(rows(), LABELS) == loss(rows(), LABELS)


def test_the_set_of_a_step():
    plan = Anneal(4, start=1.0, end=0.0001)
    assert [plan.over(step).gamma for step in range(4)] == pytest.approx([1.0, 0.1, 0.01, 0.001])
    assert isinstance(plan.over(3), KL)
    assert isinstance(plan.over(4), Worst)


def test_advance_finds_it_inside_another_module():
    around = torch.nn.Sequential(after(0), Triplet())
    advance(around)
    assert around[0].annealing.done == 1
    Triplet().step()  # nothing to do, no error


def test_wrong_arguments_are_one_sentence():
    for mining in ("semihard", "hardest", "all"):
        with pytest.raises(ValueError, match=f"Triplet: anneal .* mining must be \"hard\", but came as '{mining}'"):
            Triplet(mining=mining, anneal=10)
    with pytest.raises(ValueError, match="Triplet: anneal must be a whole number above zero, but came as 0"):
        Triplet(mining="hard", anneal=0)
    with pytest.raises(ValueError, match="Anneal: end must not exceed start"):
        Anneal(10, start=0.1, end=1.0)
    with pytest.raises(ValueError, match="Anneal: steps must be a whole number above zero"):
        Anneal(0)
    assert "Anneal(steps=10" in repr(Annealing(Anneal(10)))


@pytest.mark.parametrize("anneal", [12, {"name": "Anneal", "steps": 12, "start": 0.5}])
def test_a_configuration_names_it(anneal):
    settings = config(loss={"name": "Triplet", "mining": "hard", "anneal": anneal})
    parts.check(settings)
    assert parts.make_loss(settings, classes=9).annealing.plan.steps == 12
    with pytest.raises(ValueError, match=r"loss\.anneal"):
        parts.check(config(loss={"name": "Triplet", "mining": "hard", "anneal": {"name": "Anneal", "stesp": 3}}))


def test_a_run_advances_it_and_resumes_bit_for_bit(tmp_path):
    settings, data = config(loss={"name": "Triplet", "mining": "hard", "margin": 0.2, "anneal": 12}), tiny()

    def die(moment):
        if moment.step == 8:
            raise RuntimeError("the lights went out")

    seen = []
    fit(settings, tmp_path / "whole", data=data, callbacks=[lambda m: seen.append(m.state.loss.annealing.done)])
    assert seen == list(range(1, 21))
    with pytest.raises(RuntimeError, match="lights"):
        fit(settings, tmp_path / "cut", data=data, callbacks=[die])
    fit(settings, tmp_path / "cut", data=data, resume=True)
    assert journal(tmp_path / "cut") == journal(tmp_path / "whole")
    first, second = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert all(torch.equal(first[key], second[key]) for key in first)
    state = torch.load(tmp_path / "cut/checkpoints/last.pt", weights_only=True)
    assert {name: int(value) for name, value in state["loss"].items()} == {"annealing._extra_state": 20}
