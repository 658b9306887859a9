"""Evaluation on two and three processes (gloo on loopback) equals that of one process to the last bit."""

from __future__ import annotations

import pytest
from processes import together
from ranks_evaluation import cases

from nearfar.evaluation import parallel


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_find_what_one_process_finds(tmp_path, world):
    for same, heard in together("ranks_evaluation", "everything", world, tmp_path):
        assert same == dict.fromkeys(cases(), True)
        assert len(heard) == 2
        assert all("must be finite, but" in sentence for sentence in heard)


def test_shares_are_everything_once():
    for count in range(12):
        for world in range(1, 5):
            dealt = [number for rank in range(world) for number in parallel.share(count, rank, world)]
            assert dealt == list(range(count))


def test_all_ranks_send_equally_many_messages_and_lose_no_piece(monkeypatch):
    monkeypatch.setattr(parallel, "WORK", 100)
    beats: list[int] = []
    for turn, mine in enumerate((4, 5), start=1):
        assert list(parallel.pace(range(mine), 5, 50, lambda: beats.append(0))) == list(range(mine))
        assert len(beats) == 2 * turn
    assert list(parallel.pace(range(3), 3, 1000, lambda: None)) == [0, 1, 2]
