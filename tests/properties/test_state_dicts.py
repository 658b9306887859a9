"""State dicts of all our modules hold plain, contiguous tensors without shared memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file, save_model
from table import ROWS

import nearfar as nf
from nearfar import models, pml
from nearfar.losses.annealing import Anneal

L = nf.losses
WIDTH = 4
draw = torch.Generator().manual_seed(0)
X, Y = torch.randn(12, WIDTH, generator=draw), torch.arange(12) // 3
LATER = torch.randn(12, WIDTH, generator=draw)


@dataclass(frozen=True)
class Subject:
    """A module, how it is used once before it is saved, and what it then says of later rows."""

    id: str
    make: Callable[[], torch.nn.Module]
    use: Callable[[torch.nn.Module], Any] = lambda loss: loss(X, Y)
    say: Callable[[torch.nn.Module], Any] = lambda loss: (loss(LATER, Y), loss(X, Y))


def annealed() -> torch.nn.Module:
    return L.Triplet(mining="hard", margin=0.2, anneal=Anneal(3))


LOSSES = (
    *(Subject(row.id, row.make) for row in ROWS),
    Subject("Triplet-annealed", annealed, lambda loss: loss.step()),
    Subject("Margin-two", lambda: nf.RobustLoss(pair=(nf.pairs.Hinge(learn=True), nf.pairs.Hinge(learn=True)),
                                                over=nf.sets.Mean())),
    Subject("CrossBatchMemory", lambda: nf.CrossBatchMemory(L.Margin(), size=20)),
    Subject("Memory-new", lambda: nf.CrossBatchMemory(L.Margin(), size=20), lambda loss: None),
    Subject("Memory-annealed", lambda: nf.CrossBatchMemory(annealed(), size=20),
            lambda loss: (loss(X, Y), loss.loss.step())),
    Subject("Memory-named", lambda: nf.CrossBatchMemory(L.SupCon(), size=20, max_age=2), lambda loss: loss(X, Y, ids=Y),
            lambda loss: (loss(LATER, Y, ids=Y), loss.staleness())),
    Subject("Distributed", lambda: nf.Distributed(L.Margin())),
    Subject("Distributed-memory", lambda: nf.Distributed(nf.CrossBatchMemory(L.Margin(), size=20))),
    Subject("pml-boundary", lambda: pml.losses.MarginLoss(learn_beta=True)),
)  # fmt: skip


def network(name: str, size: tuple[int, ...], **options: Any) -> Subject:
    x = torch.rand(3, *size, generator=torch.Generator().manual_seed(1))

    def trained(model: torch.nn.Module) -> None:
        move = torch.optim.SGD(model.parameters(), lr=0.01)
        model.train()(x).square().sum().backward()
        move.step()

    make = lambda: models.build(name, inputs=size, embedding_dim=WIDTH, pretrained=False, **options)  # noqa: E731
    return Subject("-".join([name, *options]), make, trained, lambda model: model.eval()(x))


def grouped() -> torch.nn.Module:
    model = models.build("small", inputs=(3, 16, 16), embedding_dim=WIDTH)
    models.group_norms(model)
    return model


PICTURES = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(2))
NETWORKS = (
    network("small", (1, 16, 16)),
    network("small", (3, 16, 16), hidden=8, bn_neck=True),
    network("linear", (7,)),
    network("mlp", (7,), hidden=8),
    network("lite0", (3, 33, 33), pool="both"),
    Subject("group_norms", grouped, lambda model: model(PICTURES), lambda model: model(PICTURES)),
)
ALL = (*LOSSES, *NETWORKS)


def flat(said: Any) -> list[Any]:
    return [part for each in said for part in flat(each)] if isinstance(said, tuple | list) else [said]


def same(first: Any, second: Any) -> bool:
    pairs = zip(flat(first), flat(second), strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


@pytest.mark.parametrize("subject", ALL, ids=lambda each: each.id)
def test_a_state_is_plain_tensors_that_any_format_takes(subject, tmp_path):
    torch.manual_seed(3)
    module = subject.make()
    subject.use(module)
    state = module.state_dict()
    assert all(isinstance(value, torch.Tensor) and value.is_contiguous() for value in state.values())
    places = [value.untyped_storage().data_ptr() for value in state.values() if value.numel()]
    assert len(set(places)) == len(places)
    save_file(state, tmp_path / "state.safetensors")
    save_model(module, str(tmp_path / "model.safetensors"))
    again, third = subject.make(), subject.make()
    again.load_state_dict(load_file(tmp_path / "state.safetensors"))
    if state:
        load_model(third, str(tmp_path / "model.safetensors"))
    wanted = subject.say(module)
    assert same(subject.say(again), wanted)
    assert not state or same(subject.say(third), wanted)


@pytest.mark.parametrize(
    "subject", [each for each in LOSSES if "CrossBatchMemory" in each.id], ids=lambda each: each.id
)
def test_what_was_used_differs_from_what_is_new(subject):
    """Else the test above could not fail: the state must matter to what is said."""
    module, new = subject.make(), subject.make()
    subject.use(module)
    assert same(subject.say(module), subject.say(new)) == subject.id.endswith("new")


def test_a_shared_pair_loss_is_one_module_of_two_names():
    loss = L.Margin()
    assert list(loss.state_dict()) == ["pair_positive.offset"]
    assert loss.pair_negative is loss.pair_positive
    with torch.no_grad():
        loss.pair_positive.offset.fill_(0.25)
    assert loss.beta.item() == pytest.approx(0.95)
