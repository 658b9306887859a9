"""`QueryPairs`: queries, then their documents; every record once an epoch; ranks cut one batch."""

import numpy as np
import pytest

from nearfar.batches import QueryPairs

RECORDS = np.array([[3 * i, 3 * i + 1, 3 * i + 2] for i in range(10)])
LABELS = np.array([2 * (i // 3) + (i % 3 == 2) for i in range(30)])


def test_a_batch_holds_queries_then_their_documents():
    sampler = QueryPairs(LABELS, RECORDS, batch_size=4, seed=3)
    seen = []
    for batch in sampler:
        columns = np.array(batch).reshape(3, 4)
        assert (columns[0] % 3 == 0).all()
        assert (columns[1] == columns[0] + 1).all()
        assert (columns[2] == columns[0] + 2).all()
        assert len(set(LABELS[columns[0]])) == 4
        seen += columns[0].tolist()
    assert set(seen) == set(range(0, 30, 3))
    assert sampler.documents == 2


def test_ranks_share_the_batch_of_one_process():
    whole = list(QueryPairs(LABELS, RECORDS, batch_size=5, seed=1))
    parts = [list(QueryPairs(LABELS, RECORDS, batch_size=5, seed=1, rank=rank, world=2)) for rank in (0, 1)]
    for batch, first, second in zip(whole, *parts, strict=True):
        cut = [np.array(each).reshape(3, -1) for each in (first, second)]
        assert np.concatenate(cut, axis=1).reshape(-1).tolist() == batch


def test_a_state_continues_the_same_batches():
    sampler, again = (QueryPairs(LABELS, RECORDS, batch_size=3, seed=1) for _ in range(2))
    batches = list(sampler)
    again.load_state_dict({**sampler.state_dict(step=2)})
    assert next(iter(again)) == batches[2]
    with pytest.raises(ValueError, match="other labels or settings"):
        QueryPairs(LABELS, RECORDS[:, :2], batch_size=3, seed=1).load_state_dict(sampler.state_dict())


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="batch_size must be from 2 to 10"):
        QueryPairs(LABELS, RECORDS, batch_size=11)
    with pytest.raises(ValueError, match="records must be the rows"):
        QueryPairs(LABELS, RECORDS[:, :1], batch_size=2)
