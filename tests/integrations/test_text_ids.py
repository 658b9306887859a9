"""Equal texts have equal numbers, however they are padded; what shares a text shares a label."""

from __future__ import annotations

import pytest
import torch

from nearfar.integrations._text_ids import group_texts, hash_texts


def test_padding_on_either_side_counts_for_nothing():
    right = {"input_ids": torch.tensor([[3, 4, 0], [4, 3, 0], [3, 4, 4]]), "attention_mask": torch.ones(3, 3).long()}
    right["attention_mask"][:2, 2] = 0
    left = {"input_ids": torch.tensor([[9, 9, 3, 4]]), "attention_mask": torch.tensor([[0, 0, 1, 1]])}
    one, other, longer = hash_texts(right).tolist()
    assert hash_texts(left).tolist() == [one]
    assert len({one, other, longer}) == 3


def test_texts_of_a_static_encoder_are_bags():
    found = hash_texts({"input_ids": torch.tensor([3, 4, 4, 3, 5]), "offsets": torch.tensor([0, 2, 4])})
    assert found[0] == found[1]
    assert found[0] != found[2]
    with pytest.raises(ValueError, match="columns without input_ids"):
        hash_texts({"pixel_values": torch.zeros(2, 3)})


def test_labels_reach_over_several_shared_texts():
    anchors = torch.tensor([1, 1, 2, 2, 3, 3, 4])
    positives = torch.tensor([30, 20, 20, 10, 10, 0, 40])  # 30 - 1 - 20 - 2 - 10 - 3 - 0
    negatives = torch.tensor([40, 50, 50, 60, 70, 80, 90])
    mine, others = group_texts(anchors, torch.stack([positives, negatives]))
    assert len({*mine[:6].tolist()}) == 1
    assert mine[6] != mine[0]
    assert torch.equal(others[0], mine)
    assert others[1, 0] == mine[6]  # another anchor's positive
    assert others[1, 1] == others[1, 2]
    assert not {*others[1, 1:].tolist()} & {*mine.tolist()}
