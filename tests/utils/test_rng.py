"""Random states are saved for the device of the tensors, not for the current one; devices are stand-ins here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from table import random_batch, tensors

import nearfar as nf
from nearfar._utils.rng import set_states, states
from nearfar.engines import dense_pairs
from nearfar.losses import explanation

OTHER = torch.device("cuda", 1)  # never the current one where there is no GPU


class Elsewhere(torch.Tensor):
    """A matrix that says it lies on `OTHER`; what is computed of it does not."""

    device = property(lambda self: OTHER)
    __torch_function__ = torch._C._disabled_torch_function_impl


def test_an_explanation_saves_and_restores_where_the_scores_are(monkeypatch):
    asked = []
    monkeypatch.setattr(explanation, "states", lambda device: asked.append(device) or "a state")
    monkeypatch.setattr(explanation, "set_states", lambda state, device: asked.append((state, device)))
    embeddings, labels = tensors(*random_batch())
    product = nf.RobustLoss(pair=nf.pairs.Hinge(), over=nf.sets.KL(0.1)).product
    rows, cols = product.similarity.prepared(embeddings, embeddings)
    pairs = dense_pairs(product, rows, cols, nf.Relation.from_labels(labels), None)
    explanation.explain(product, replace(pairs, scores=pairs.scores.detach().as_subclass(Elsewhere)))
    assert asked == [OTHER, ("a state", OTHER)]


class Module:
    """One generator a device."""

    def __init__(self):
        self.kept = {}

    def get_rng_state(self, *which):
        return self.kept.get(which, "untouched")

    def set_rng_state(self, state, *which):
        self.kept[which] = state


@pytest.mark.parametrize(("kind", "which"), [("cuda", (OTHER,)), ("xpu", (torch.device("xpu", 1),)), ("mps", ())])
def test_the_generator_of_that_device_alone(kind, which, monkeypatch):
    module = Module()
    monkeypatch.setattr(torch, kind, module)
    device = torch.device(kind, 0 if kind == "mps" else 1)
    module.kept[which] = "before"
    host, there = saved = states(device)
    wanted = torch.rand(3)
    assert there == "before"
    module.kept[which] = "after"
    set_states(saved, device)
    assert module.kept == {which: "before"}
    assert torch.equal(torch.rand(3), wanted)
    assert torch.equal(states(torch.device("cpu"))[0], torch.get_rng_state())
    assert host.dtype == torch.uint8


@pytest.mark.parametrize("kind", ["cpu", "meta"])
def test_a_device_without_a_generator_of_its_own(kind):
    saved = states(torch.device(kind))
    assert saved[1] is None
    wanted = torch.rand(3)
    set_states(saved, torch.device(kind))
    assert torch.equal(torch.rand(3), wanted)
