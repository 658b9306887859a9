"""Compute the losses of triplets, angles and drawn pairs from gathered positive pairs and the operators."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from nearfar._utils.tensors import over
from nearfar.engines import operators
from nearfar.engines.dense import dense_value
from nearfar.engines.operator_call import SCORES, OperatorCall, bounds, fold_of, group_value
from nearfar.engines.rows import RefusalError
from nearfar.engines.spec import AROUND, BELOW_TOP, REACH
from nearfar.links import Terms
from nearfar.miners import ScoredPairs
from nearfar.pairs import PairForm
from nearfar.relations.layout import ID, NOWHERE, POSITION_THEN_ID

__all__ = ["balanced_triplets", "finish_angles", "finish_drawn", "finish_triplets", "hardest_triplet", "rule_of"]

SUMS = 2**29  # maximum number of entries of the rows x_a + x_p in the angular loss


def finish_triplets(call: OperatorCall) -> Tensor:
    """The mean over all triplets."""
    of, rule = call.product.over_negative, rule_of(call)
    band = {} if rule.keep is None else {"band": 1, "low": -rule.keep.margin, "high": 0.0}
    if call.strips:
        band |= {"half": 0, "full": 1, "one_group": int(torch.is_grad_enabled())}
    spec, form = call.spec(call.product.negative, "negative", drop=int(of.zero == "drop"), **band)
    real = call.positives.measure.to(call.rows.dtype)
    near = real if call.strips else call.near  # strips take the scores of positives from their tiles
    vectors = [*call.pairs, call.positives.place, real]
    total, size, seen, *_ = operators.fold(spec, call.rows, call._columns, form.offset, near, None, vectors)
    call.had["negative"] = seen > 0
    return over(call.gather(total).sum(), call.gather(size).sum() + float(of.zero_member))


def rule_of(call: OperatorCall) -> Any:
    """The grouping's `Rule`: how triplets are scored and which count."""
    return call.product.groups.rule  # type: ignore[attr-defined]


def balanced_triplets(call: OperatorCall) -> Tensor:
    """The mean over triplets of each positive pair and the negative pair of the same rank."""
    if call.given & 4:
        raise RefusalError  # a triplet also has the weight of its negative pair
    of, positive, width = call.product.over_negative, call.positives.measure > 0, call.positives.place.shape[1]
    values, place = _ranked(call, width + 1)
    # equally hard pairs are ranked by their order in the batch
    call.refuse_if(((values[:, 1:] == values[:, :-1]) & (values[:, 1:] > -torch.inf)).any())
    rank = (positive.cumsum(dim=1) - 1).clamp(0, place.shape[1] - 1)
    real = positive & (positive.cumsum(dim=1) <= place.shape[1]) & (values.gather(1, rank) > -torch.inf)
    losses = call.product.negative(call.scores(place.gather(1, rank)) - call.near, -1)
    weight = call.positives.measure.double() * real
    weight = weight * ~(losses.detach() <= 0) if of.zero == "drop" else weight
    top = torch.where(weight > 0, losses * weight, 0.0).sum(dim=1)
    return over(call.gather(top).sum(), call.gather(weight.sum(dim=1)).sum())


def hardest_triplet(call: OperatorCall) -> Tensor:
    """The single worst triplet: the largest s_an - s_ap over all anchors."""
    values, place = _ranked(call, 2)
    if call.given & 4:
        raise RefusalError  # tied pairs share the weight by their measure
    least = torch.where(call.positives.measure > 0, call.near, torch.inf)
    pair = least.detach().sort(dim=1)
    score = call.gather(values[:, 0] - pair.values[:, 0])
    best, row = score.max(dim=0)
    empty = bool(best == -torch.inf)
    twice = (values[:, -1] == values[:, 0]) & (values.shape[1] > 1)
    twice |= (pair.values[:, min(1, least.shape[1] - 1)] == pair.values[:, 0]) & (least.shape[1] > 1)
    tied = bool(call.gather(twice.to(score.dtype))[row] > 0) or int((score == best).sum()) > 1
    form = call.product.negative.form(-1)
    idle = form is not None and form.shape == "power" and float(call.product.negative(best, -1)) == 0
    if tied and not empty and not idle:
        raise RefusalError  # tied triplets share the weight
    mine = call.scores(place[:, :1])[:, 0] - least.gather(1, pair.indices[:, :1])[:, 0]
    there = torch.isfinite(mine.detach()) & (values[:, 0] > -torch.inf)
    losses = call.product.negative(torch.where(there, mine, 0.0), -1)
    return call.gather(torch.where(there, losses, 0.0))[row] * float(not empty)


def _ranked(call: OperatorCall, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest negative scores of each row [n, count], and their columns."""
    form = PairForm("line", 1.0, 0.0)
    spec, _ = call.spec(call.product.negative, "negative", form=form, half=0, full=1)
    found: tuple[Tensor, Tensor] = call.work(spec).largest(min(count, len(call.cols)))
    return found


def finish_angles(call: OperatorCall) -> Tensor:
    """The angular loss: each positive pair (a, p) becomes one row x_a + x_p, and its negatives are folded.

    l_n = slope·(4t⟨x_a + x_p, x_n⟩ - 2(1+t)⟨x_a, x_p⟩) + zero            n·P rows of m products
    """
    place, measure = call.positives.place, call.positives.measure
    alone = call.strips or not (call.itself == POSITION_THEN_ID or call.given & 4)
    if not alone or call.product.reduction == "none":
        raise RefusalError  # a row's values are put together by the plain definition
    call.refuse_if(place.numel() * call.rows.shape[1] > SUMS)
    of, tan2, form = call.product.over_negative, rule_of(call).angle, call.product.negative.form(-1)
    fold = fold_of(of)
    assert form is not None  # noqa: S101 - see plan.py
    row = torch.arange(len(place), device=place.device).repeat_interleave(place.shape[1])
    col, real = place.flatten(), measure.flatten()
    if call.strips:  # padding would cost a row of products each
        row, col, real = row[real > 0], col[real > 0], real[real > 0]
    rows = call.rows[row] + call.cols[col]
    keep = call.learns and not torch.compiler.is_compiling()
    more: dict[str, Any] = {"sums": BELOW_TOP, "flat": int(fold.normalized), "keep": int(keep)}
    sums = replace(form, a=4 * tan2 * form.a, b=0.0)
    if call.strips:
        taken = call.sorted.take(row)
        pairs, more["given"] = taken.tensors(), taken.given
        least, most = bounds(sums, *(2 * s for s in SCORES[0]))
        if call.product.similarity.normalize and most - least <= 2 * REACH * fold.gamma:
            more |= {"sums": AROUND, "level": 0.5 * (least + most)}
        else:
            more |= {"full": 1}
    else:
        more |= {"itself": ID if call.itself == ID else NOWHERE}
        pairs = [x if at % 2 else x[row] for at, x in enumerate(call.pairs)]
    spec, _ = call.spec(call.product.negative, "negative", form=sums, gamma=fold.gamma, half=0, **more)
    t, size, *_ = operators.fold(spec, rows, call.cols, None, None, None, pairs)
    near = call.near.flatten()[measure.flatten() > 0] if call.strips else call.near.flatten()
    shift = form.scale * (form.b - 2 * (1 + tan2) * form.a * near)
    t = torch.where(size > 0, t + shift, t)
    values = group_value(of, fold, None, None, t[:, None], size[:, None])
    return call.reduce(Terms(values, real))


# ---------------------------------------------------------------- sampled negative pairs


def finish_drawn(call: OperatorCall) -> Tensor:
    """Losses of a miner that draws as many negatives per anchor as there are positives: a matrix [n, P + K]."""
    product, miner, gathered = call.product, call.product.miner, call.gathered
    if gathered is None or miner is None or call.ranks.world > 1 or product.reduction == "none":
        raise RefusalError
    wanted = gathered.measure.to(call.rows.dtype).sum(dim=1, keepdim=True)
    most = min(len(call.layout.labels[1]), max(1, math.ceil(float(wanted.amax()))))
    # one draw per row of the whole batch, as in the dense engine
    spots = torch.rand(call.size, most, dtype=torch.float64, device=call.rows.device)
    spots = spots if call.at is None else spots[call.at]

    def chance(scores: Tensor) -> Tensor:
        found = miner.log_odds(product.similarity.distance(scores), call.rows.shape[1])
        assert found is not None  # noqa: S101 - see plan.py
        return found

    spec, _ = call.spec(product.negative, "negative", form=PairForm("line", 1.0, 0.0), half=0, full=1)
    place, has = call.work(spec).draw(chance, spots)
    counted = (torch.arange(most, device=spots.device) < wanted) & has[:, None]
    scores = call.scores(torch.cat([gathered.place, place], dim=1))
    measure = torch.cat([gathered.measure, torch.zeros_like(counted, dtype=gathered.measure.dtype)], dim=1)
    drawn = torch.cat([torch.zeros_like(call.near), counted.to(scores.dtype)], dim=1)
    had, relation = (call.had["positive"], call.has_negative()), cast(Any, SimpleNamespace(orders=call.orders))
    pairs = ScoredPairs(
        scores, measure, drawn, *had, relation, product.similarity, call.rows, call.cols, strip=True, mined=True
    )  # fmt: skip
    return dense_value(product, pairs)
