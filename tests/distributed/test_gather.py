"""Two and three real processes give one process's numbers: value, every gradient, what a memory holds."""

from __future__ import annotations

import pytest
import torch
from engine_cases import larger
from gathered_cases import Share, cases, same
from processes import together

import nearfar as nf
from nearfar._utils.process_group import ProcessGroup, cuts


@pytest.mark.filterwarnings("ignore::nearfar.DegenerateBatchWarning")
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_equal_one_process(world, tmp_path):
    """All cases in one start of the processes, which takes longer than they do."""
    found, wrong = together("gathered_cases", "all_cases", world, tmp_path), {}
    for name, case in cases(world).items():
        try:
            same([of_rank[name] for of_rank in found], case(Share()), name)
        except AssertionError as problem:
            wrong[name] = str(problem)
    assert not wrong, f"{len(wrong)} cases, first: {next(iter(wrong.items()))}; all: {list(wrong)}"


def test_alone_it_is_the_loss_inside():
    embeddings, labels = larger()
    loss = nf.losses.DroTopK(k=9).double()
    assert torch.equal(nf.Distributed(loss)(embeddings, labels), loss(embeddings, labels))
    assert torch.equal(
        nf.Distributed(loss).explain(embeddings, labels).weights, loss.explain(embeddings, labels).weights
    )

    class Doubled(nf.losses.SupCon):
        def forward(self, *args, **options):
            return 2 * super().forward(*args, **options)

    assert torch.equal(nf.Distributed(Doubled())(embeddings, labels), 2 * nf.losses.SupCon()(embeddings, labels))
    with pytest.raises(TypeError, match=r"Distributed: loss must be a nearfar loss, but came as Linear"):
        nf.Distributed(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="finite"):
        nf.Distributed(loss)(embeddings * torch.nan, labels)


def test_losses_of_pml():
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    embeddings, labels = larger()
    loss = losses.ArcFaceLoss(11, embeddings.shape[1]).double()
    gathered = nf.Distributed(loss)
    assert torch.equal(gathered(embeddings, labels), loss(embeddings, labels))
    with pytest.raises(ValueError, match="ArcFaceLoss: PML computes this loss, which takes no ids; leave them out"):
        gathered(embeddings, labels, ids=labels)
    with pytest.raises(ValueError, match="ArcFaceLoss: PML computes this loss, which has no pair weights to explain"):
        gathered.explain(embeddings, labels)


@pytest.mark.parametrize(("rows", "tall", "world"), [(8, 1, 3), (100, 7, 2), (4096, 512, 8), (5, 99, 5), (301, 64, 4)])
def test_strips_are_dealt_out_evenly(rows, tall, world):
    """Each row once, and no rank much more than its part, of rows as of what lies behind them in a triangle."""

    class Rank(ProcessGroup):
        def __init__(self, rank: int) -> None:
            self.rank, self.world = rank, world

    dealt = [cuts(rows, tall, Rank(rank)) for rank in range(world)]
    assert sorted(i for mine in dealt for here in mine for i in range(here.start, here.stop)) == list(range(rows))
    most = max(here.stop - here.start for mine in dealt for here in mine)
    counts = [sum(here.stop - here.start for here in mine) for mine in dealt]
    assert max(counts) - min(counts) <= len(dealt[0]) + most * (rows < world * 2)
    assert min(counts) > 0
    if tall * world * 2 <= rows and rows >= 100:
        triangle = [sum(rows - i for here in mine for i in range(here.start, here.stop)) for mine in dealt]
        assert max(triangle) < 1.35 * rows**2 / 2 / world
