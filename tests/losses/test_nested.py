"""`Nested`: the sum of a loss over prefixes, wherever a loss can stand."""

from __future__ import annotations

import pytest
import torch
from table import random_batch, some, tensors
from torch import nn
from ways import lower_thresholds

import nearfar as nf

L = nf.losses
DIMS, WEIGHTS = (2, 4, 3), (0.5, 2.0, 1.0)


def measure(loss, leaves, *call, **more):
    value = loss(*call, **more)
    return [value.detach(), *torch.autograd.grad(value, leaves, allow_unused=True)]


def summed(loss, rows, labels, ref=None, **more):
    def cut(dim):
        return {"ref_emb": ref[:, :dim], **more} if ref is not None else more

    return sum(weight * loss(rows[:, :dim], labels, **cut(dim)) for dim, weight in zip(DIMS, WEIGHTS, strict=True))


@pytest.mark.parametrize("engine", ["auto", "dense", "tiled"])
@some(lambda row: row.reference and not row.label)
def test_value_and_gradient_are_those_of_the_sum(row, engine, monkeypatch):
    lower_thresholds(monkeypatch, 1, 1)
    loss, (rows, labels) = row.loss(), tensors(*random_batch())
    loss.engine, loss.tile = engine, 4
    nested = nf.Nested(loss, dims=DIMS, weights=WEIGHTS).double()
    leaves = [rows, *loss.parameters()]
    for _ in range(5):  # small batches are recorded
        found = measure(nested, leaves, rows, labels)
    torch.testing.assert_close(found, measure(lambda *x: summed(loss, *x), leaves, rows, labels))
    other, names = tensors(*random_batch(1))
    more = {"ids": torch.arange(10), "ref_ids": torch.arange(5, 15), "ref_labels": names}
    found = measure(nested, [rows, other], rows, labels, ref_emb=other, **more)
    torch.testing.assert_close(found, measure(lambda *x: summed(loss, *x, **more), [rows, other], rows, labels, other))


def test_one_prefix_as_wide_as_the_rows_is_the_loss():
    rows, labels = tensors(*random_batch())
    loss = L.MultiSimilarity()
    assert torch.equal(nf.Nested(loss, dims=(4,))(rows, labels), loss(rows, labels))


def test_index_tuples_relations_and_memories_pass_through():
    rows, labels = tensors(*random_batch())
    loss = L.Contrastive()
    nested = nf.Nested(loss, dims=DIMS, weights=WEIGHTS)
    pairs = tuple(torch.tensor(x) for x in ([0, 1], [2, 3], [4, 5], [6, 7]))
    wanted = sum(w * loss(rows[:, :k], None, pairs) for k, w in zip(DIMS, WEIGHTS, strict=True))
    assert torch.equal(nested(rows, None, pairs), wanted)
    relation = nf.Relation.from_labels(labels, ignore=0)
    assert torch.equal(nested(rows, relation), summed(loss, rows, relation))
    memory = nf.CrossBatchMemory(nested, size=20)
    memory(rows.detach() + 1, labels)
    relation = nf.Relation.from_labels(labels, torch.cat([labels, labels]), reference_starts_with_batch=True)
    both = torch.cat([rows, rows.detach() + 1])
    torch.testing.assert_close(memory(rows, labels), summed(loss, rows, relation, both))


def test_an_explanation_has_the_prefixes_side_by_side():
    rows, labels = tensors(*random_batch())
    loss = L.SupCon()
    found = nf.Nested(loss, dims=DIMS, weights=WEIGHTS).explain(rows, labels)
    each = [loss.explain(rows[:, :k], labels) for k in DIMS]
    assert torch.equal(found.value, nf.Nested(loss, dims=DIMS, weights=WEIGHTS)(rows, labels).detach())
    assert torch.equal(found.weights, torch.cat([x.weights for x in each], dim=1))
    pulls = torch.cat([w * x.pull for w, x in zip(WEIGHTS, each, strict=True)], dim=1)
    assert torch.equal(found.pull, pulls)
    assert found.weighted_loss == pytest.approx(sum(w * x.weighted_loss for w, x in zip(WEIGHTS, each, strict=True)))
    assert found.effective_pairs > max(x.effective_pairs for x in each)
    triplets = nf.Nested(L.Triplet(), dims=(2, 4)).explain(rows, labels)
    one = L.Triplet().explain(rows, labels)
    there = one.positives.shape[1]
    assert torch.equal(triplets.positives[:, there:], one.positives + 10)
    assert "Explanation" in repr(triplets)


def test_its_state_is_that_of_the_loss_and_a_cached_step_equals_a_plain_one():
    rows, labels = tensors(*random_batch(), grad=False)
    torch.manual_seed(0)
    encoder = nn.Linear(4, 4).double()
    loss = nf.Nested(L.CLIP(learn=True), dims=(2, 4)).double()
    assert list(loss.state_dict()) == ["loss.log_scale"]
    loss(encoder(rows), labels).backward()
    wanted = [x.grad.clone() for x in (*encoder.parameters(), *loss.parameters())]
    encoder.zero_grad()
    loss.zero_grad()
    nf.cached_step(encoder, rows, labels, loss, 3)
    torch.testing.assert_close([x.grad for x in (*encoder.parameters(), *loss.parameters())], wanted)


def test_it_anneals_with_its_loss():
    loss = nf.Nested(L.Triplet(mining="hard", anneal=3), dims=(2,))
    loss.step()
    assert loss.loss.annealing.done == 1


WRONG = [
    ({"loss": "NTXent"}, TypeError, "Nested: loss must be a Loss, such as nf.losses.Triplet"),
    ({"loss": L.NTXent(reduction="none")}, ValueError, "the loss must be one number"),
    ({"loss": L.ProxyNCA(3, 4)}, TypeError, "Nested: the proxies of ProxyNCA are as wide as the embeddings"),
    ({"dims": ()}, ValueError, "Nested: dims must be a list of widths"),
    ({"dims": 4}, ValueError, "Nested: dims must be a list of widths"),
    ({"dims": (2, 0)}, ValueError, "dims must be a whole number above zero"),
    ({"dims": (2, 4), "weights": (1,)}, ValueError, "Nested: dims must be a list of widths, and weights one number"),
    ({"weights": (1, -1, 1)}, ValueError, "Nested: weights must be"),
]


@pytest.mark.parametrize(("bad", "kind", "words"), WRONG)
def test_wrong_arguments_are_named(bad, kind, words):
    with pytest.raises(kind, match=words):
        nf.Nested(**{"loss": L.NTXent(), "dims": DIMS, **bad})


def test_rows_that_are_too_short_are_an_error():
    rows, labels = tensors(*random_batch())
    with pytest.raises(ValueError, match=r"dims of Nested must not exceed the width of the embeddings \(4\), but came"):
        nf.Nested(L.NTXent(), dims=(2, 8))(rows, labels)
