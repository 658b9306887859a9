"""Relations without labels (several labels a row, matrices, weights of pairs) give dense values on the fast paths."""

from __future__ import annotations

import math

import pytest
import torch
from engine_cases import MINERS, check
from table import DIM, some
from ways import takes_operators

import nearfar as nf
from tests.relations.test_layout import LISTS

L, P, R, S = nf.losses, nf.pairs, nf.Relation, nf.sets
anyway = pytest.mark.filterwarnings("ignore::nearfar.DegenerateBatchWarning")
TIED = torch.eye(DIM, dtype=torch.float64)[torch.arange(12) % 3]


def rows(count, seed=0):
    return torch.randn(count, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def check_list(make, relation, x, tiles=(5, 64)):
    n, m = relation.shape
    more = {} if relation.square else {"ref_emb": (x if m <= n else torch.cat([x, rows(m - n, 1)]))[:m] + 0.25}
    check(make, tiles, x, relation, **more)


@anyway
@some(lambda row: not row.composed)
@pytest.mark.parametrize("name", LISTS)
def test_every_loss_equals_dense(row, name):
    relation = LISTS[name]()
    for x in (rows(12), TIED):
        check_list(row.loss, relation, x)


@anyway
@pytest.mark.parametrize("miner", [name for name in MINERS if name != "drawn"])
@pytest.mark.parametrize("name", LISTS)
def test_every_miner_equals_dense(miner, name):
    for kind in (L.MultiSimilarity, L.Contrastive, L.SupCon):
        check_list(lambda kind=kind: kind(miner=MINERS[miner]).double(), LISTS[name](), rows(12))


OVER = (S.Mean(), S.KL(0.3), S.KL(0.3, zero="drop"), S.TopK(3), S.ChiSquare(0.4), S.Worst())
GROUPED = [(groups, over) for groups in ("batch", "sign", "anchor", "anchor_sign") for over in OVER]
GROUPED.append(("balanced", S.TopK(3)))  # which takes no other set


@anyway
@pytest.mark.parametrize(("groups", "over"), GROUPED)
def test_every_grouping_equals_dense(groups, over):
    for make in LISTS.values():
        check_list(lambda: nf.RobustLoss(pair=P.Hinge(0.4, 0.3), over=over, groups=groups), make(), rows(12))


def test_hundreds_of_rows_equal_dense():
    hot = torch.rand(300, 200, generator=torch.Generator().manual_seed(2)) < 0.01
    relation = R.from_multilabel(hot)
    makes = L.Contrastive, L.MultiSimilarity, L.SupCon, L.DroKL, L.LiftedStructure, L.Triplet, lambda: L.DroTopK(k=9)
    for make in makes:
        assert takes_operators(make().product, relation)
        check_list(make, relation, rows(300), tiles=(None, 64))


def test_a_list_follows_a_matrix_that_is_written_to():
    same = torch.zeros(12, 12, dtype=torch.bool)
    relation = R.from_matrix(same)
    assert not relation.sorted_layout().listed.positive.any()
    same[0, 1] = True
    assert relation.sorted_layout().listed.positive.sum() == 1


@pytest.mark.parametrize("name", ["several labels", "matrix, marks", "a sample of two labels"])
def test_broken_rows_show(name):
    relation = LISTS[name]()
    x = rows(12)
    x[0] = x[0] * 1e200
    value = L.Contrastive(engine="tiled", similarity=nf.similarity.Dot())
    more = {} if relation.square else {"ref_emb": rows(relation.shape[1], 1)}
    found = value(x, relation, **more)
    assert math.isnan(found) or math.isinf(found)
