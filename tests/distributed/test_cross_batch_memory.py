"""`CrossBatchMemory`: past batches as references, exactly; a ring whose state a checkpoint keeps."""

from __future__ import annotations

import io

import pytest
import torch
from engine_cases import larger, on
from table import ROWS

import nearfar as nf

L, M = nf.losses, nf.miners
CLOSE = {"atol": 1e-10, "rtol": 1e-10}
KEPT = [row for row in ROWS if row.reference]
losses = pytest.mark.parametrize("row", KEPT, ids=[row.id for row in KEPT])


def batches(sizes=(20, 41, 13, 30)):
    return [larger(n, seed=n) for n in sizes]


def test_an_empty_memory_is_the_loss_inside():
    embeddings, labels = larger()
    inner = L.DroTopK(k=9).double()
    assert torch.equal(nf.CrossBatchMemory(inner, size=10)(embeddings, labels), inner(embeddings, labels))


@losses
@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_every_loss_is_that_of_the_batch_against_batch_and_ring(row, engine):
    """A ring told by a list: the last rows, against an explicit reference with ids."""
    memory, plain, past = nf.CrossBatchMemory(on(row.loss(), engine, 7), size=50), row.loss(), []
    for step, (embeddings, labels) in enumerate(batches()):
        leaf, again = (embeddings.clone().requires_grad_() for _ in range(2))
        memory(leaf, labels).backward()
        older = past[-50:]
        ids = torch.arange(len(labels))
        reference = torch.stack([x for x, _ in older]) if older else embeddings[:0]
        names = torch.tensor([y for _, y in older], dtype=torch.int64)
        if step:
            more = {"ids": ids, "ref_ids": torch.cat([ids, torch.full((len(older),), -1)])}
            on(plain, "dense")(
                again, labels, None, torch.cat([again, reference]), torch.cat([labels, names]), **more
            ).backward()
        else:
            on(plain, "dense")(again, labels).backward()
        torch.testing.assert_close(leaf.grad, again.grad, **CLOSE)
        past += list(zip(embeddings, labels.tolist(), strict=True))
    for mine, theirs in zip(memory.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, **CLOSE)


def test_the_state_goes_on_where_it_was():
    (first, second, third, last) = batches()
    whole, begun = (nf.CrossBatchMemory(L.SupCon().double(), size=50, max_age=2) for _ in range(2))
    for batch in (first, second, third):
        whole(*batch), begun(*batch)
    file = io.BytesIO()
    torch.save(begun.state_dict(), file)
    file.seek(0)
    resumed = nf.CrossBatchMemory(L.SupCon().double(), size=50, max_age=2)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert resumed.staleness() == whole.staleness()
    assert torch.equal(resumed(*last), whole(*last))
    assert torch.equal(resumed(*first), whole(*first))
    with pytest.raises(
        ValueError, match=r"CrossBatchMemory: the checkpoint remembers 50 rows, but this memory has size=9"
    ):
        nf.CrossBatchMemory(L.SupCon(), size=9).load_state_dict(begun.state_dict())


def test_warm_up_fills_without_use():
    embeddings, labels = larger()
    memory, plain = nf.CrossBatchMemory(L.SupCon().double(), size=99, warmup=2), L.SupCon().double()
    for _ in range(2):
        assert torch.equal(memory(embeddings, labels), plain(embeddings, labels))
    assert not torch.equal(memory(embeddings, labels), plain(embeddings, labels))


def test_old_rows_are_left_out():
    limited, short = (
        nf.CrossBatchMemory(L.SupCon().double(), size=500, max_age=1),
        nf.CrossBatchMemory(L.SupCon().double(), size=500),
    )
    for number, batch in enumerate(batches()):
        value = limited(*batch)
        assert limited.staleness() == nf.distributed.Staleness(len(batch[0]), 1.0, 1)
        if number:  # as if only the batch before had been seen
            assert torch.equal(value, short(*batch))
        short.reset()
        short(*batch)


def test_evaluation_remembers_nothing():
    first, second, *_ = batches()
    memory = nf.CrossBatchMemory(L.SupCon().double(), size=100)
    memory(*first)
    memory.eval()
    assert torch.equal(memory(*second), memory(*second))
    assert memory.staleness().rows == len(first[0])
    assert memory.explain(*second).scores.shape == (len(second[0]), len(second[0]) + len(first[0]))


def test_the_same_sample_is_not_paired_with_its_own_past():
    embeddings, labels = larger(20)
    named, unnamed = (nf.CrossBatchMemory(L.Contrastive().double(), size=20) for _ in range(2))
    ids = torch.arange(20)
    named(embeddings, labels, ids=ids), unnamed(embeddings, labels)
    moved = embeddings + 0.5
    assert not torch.equal(named(moved, labels, ids=ids), unnamed(moved, labels))
    found = nf.CrossBatchMemory(L.Contrastive().double(), size=20)
    found(embeddings, labels, ids=ids)
    drift = found.drift(moved, ids)
    unit = torch.nn.functional.normalize
    torch.testing.assert_close(drift, (unit(moved) - unit(embeddings)).norm(dim=1))
    assert found.drift(embeddings, ids).max() < 1e-7


def test_a_batch_larger_than_the_ring_leaves_its_last_rows():
    embeddings, labels = larger()
    memory = nf.CrossBatchMemory(L.SupCon().double(), size=5)
    memory(embeddings, labels)
    assert torch.equal(memory.embeddings, embeddings[-5:])
    assert torch.equal(memory.labels, labels[-5:])


def test_a_failed_call_leaves_the_memory_as_it_was():
    embeddings, labels = larger()
    memory = nf.CrossBatchMemory(L.SupCon().double(), size=60)
    memory(embeddings, labels)
    before = memory.staleness(), memory.embeddings.clone()
    for bad in (embeddings * torch.nan, embeddings[:, :2]):
        with pytest.raises(ValueError, match=r"finite|as wide as those remembered"):
            memory(bad, labels)
    assert memory.staleness() == before[0]
    assert torch.equal(memory.embeddings, before[1])


def test_an_empty_batch_changes_nothing():
    embeddings, labels = larger()
    memory = nf.CrossBatchMemory(L.SupCon().double(), size=60)
    memory(embeddings, labels)
    with pytest.warns(nf.DegenerateBatchWarning, match="it is empty"):
        assert memory(embeddings[:0], labels[:0]) == 0
    assert memory.staleness().rows == len(labels)


def test_miners_go_with_a_memory():
    """A triplet loss and its miner: what breaks elsewhere."""
    memory = nf.CrossBatchMemory(L.Triplet(mining="semihard", margin=0.4).double(), size=64)
    mined = nf.CrossBatchMemory(L.MultiSimilarity(miner=M.MultiSimilarity()).double(), size=64)
    for batch in batches():
        assert torch.isfinite(memory(*batch))
        assert torch.isfinite(mined(*batch))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nf.CrossBatchMemory(L.ProxyNCA(3, 2), size=4), r"proxies are a reference already"),
        (lambda: nf.CrossBatchMemory(nf.Distributed(L.SupCon()), size=4), r"Distributed goes around a memory"),
        (lambda: nf.CrossBatchMemory(torch.nn.Linear(2, 2), size=4), r"must be a nearfar loss .* came as Linear"),
        (lambda: nf.CrossBatchMemory(L.SupCon(), size=0), r"CrossBatchMemory: size must be a whole number above zero"),
        (
            lambda: nf.CrossBatchMemory(L.SupCon(), size=4, warmup=-1),
            r"CrossBatchMemory: warmup must be a whole number from 0 on",
        ),
        (
            lambda: nf.CrossBatchMemory(L.SupCon(), size=4, max_age=0),
            r"CrossBatchMemory: max_age must be a whole number above zero",
        ),
    ],
)
def test_what_makes_no_memory_is_refused(make, words):
    with pytest.raises((TypeError, ValueError), match=words):
        make()


def test_calls_that_cannot_be_remembered_are_refused():
    embeddings, labels = larger()
    memory = nf.CrossBatchMemory(L.SupCon().double(), size=4)
    with pytest.raises(ValueError, match=r"brings its own reference rows"):
        memory(embeddings, labels, None, embeddings, labels)
    with pytest.raises(TypeError, match=r"labels must be a 1-D integer tensor, which it can remember"):
        memory(embeddings, nf.Relation.from_labels(labels))
    memory(embeddings, labels)
    with pytest.raises(ValueError, match=r"ids came with this call but not with earlier ones"):
        memory(embeddings, labels, ids=torch.arange(len(labels)))
    with pytest.raises(ValueError, match=r"drift needs to know which row is which sample"):
        memory.drift(embeddings, torch.arange(len(labels)))
