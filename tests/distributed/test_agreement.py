"""Ranks that bring different things, or fail: all ranks raise one sentence, and none waits forever."""

from __future__ import annotations

import pytest
import torch
from engine_cases import larger
from processes import together
from torch import nn

import nearfar as nf

L = nf.losses

DIFFER = {
    "width": ("embeddings of width 4", "embeddings of width 3"),
    "type": ("embeddings of type torch.float64", "embeddings of type torch.float32"),
    "relation": ("labels as integers", "labels as _Labels"),
    "gradient": ("embeddings without a gradient", "embeddings with a gradient"),
    "no gradient": ("embeddings with a gradient", "embeddings without a gradient"),
    "reference": ("reference rows none", "reference rows torch.float64[4]"),
    "weights": ("a relation with weights = None", "a relation with weights as torch.float64"),
    "types of weights": ("a relation with weights as torch.float64", "a relation with weights as torch.float32"),
    "ignored": ("a relation with _ignore = None", "a relation with _ignore = 3"),
    "ids": ("ids as none", "ids as integers"),
    "k": ("Distributed.loss.k = 5", "Distributed.loss.k = 7"),
    "k, many rows": ("Distributed.loss.k = 5", "Distributed.loss.k = 7000"),
    "class": ("Distributed.loss is NTXent", "Distributed.loss is SupCon"),
    "inner": ("Distributed.loss.pair.margin = 0.2", "Distributed.loss.pair.margin = 0.3"),
    "shape": ("Distributed.loss.classes = 60", "Distributed.loss.classes = 61"),
    "averaged": ("Distributed.averaged = False", "Distributed.averaged = True"),
    "mode": ("Distributed.training = True", "Distributed.training = False"),
    "memory": ("loss after 0 calls, at place 0 of the ring", "loss after 1 calls, at place 12 of the ring"),
}
BROUGHT = {
    "labels": "5 came for 12 rows",
    "NaN": "rows hold NaN",
    "NaN explained": "rows hold NaN",
    "list": "came as list",
    "few ids": "one per row, but came as [5]",
}
ON_ALL = {
    "indices": "an index tuple knows one rank's rows only",
    "matrix": "says nothing of rows on other ranks",
    "pair weights": "give sample weights [n] instead",
    "second": "no second derivative",
    "labels of proxies": "labels must lie in 0..4",
    "tuple of PML": "an index tuple knows one rank's rows only",
    "reference of PML": "LiftedStructureLoss: takes no reference inside nf.Distributed; wrap the native loss",
}


@pytest.fixture(scope="module")
def heard(tmp_path_factory):
    """All that two ranks heard: one start of the processes for all tests of this file."""
    return together("ranks_cases", "complaints", 2, tmp_path_factory.mktemp("heard"))


@pytest.mark.parametrize("name", DIFFER)
def test_both_ranks_hear_who_differs_in_what(heard, name):
    ours, theirs = DIFFER[name]
    wanted = f"rank 0 and rank 1 differ: {ours} on rank 0, {theirs} on rank 1; make them the same on every rank."
    for of_rank in heard:
        assert of_rank[name] == f"Distributed: ranks must make the same call, but {wanted}"


@pytest.mark.parametrize("name", ["values", "values later"])
def test_parameters_seeded_apart_are_noticed_and_roundings_are_not(heard, name):
    for of_rank in heard:
        assert "rank 0 and rank 1 differ: loss.proxies with values of length" in of_rank[name]
    assert heard[0][name] == heard[1][name]


@pytest.mark.parametrize("name", BROUGHT)
def test_what_one_rank_brought_stops_all(heard, name):
    first, second = (of_rank[name] for of_rank in heard)
    assert BROUGHT[name] in second
    assert first == f"Distributed: rank 1 brought what its loss cannot take, which stops all of them: {second}"


@pytest.mark.parametrize("name", ON_ALL)
def test_what_no_rank_may_bring(heard, name):
    for of_rank in heard:
        assert ON_ALL[name] in of_rank[name]


def test_a_rank_without_rows_and_labels_of_other_types_are_taken(heard):
    embeddings, labels = larger(12)
    rows = embeddings.detach().requires_grad_()
    value = L.DroTopK(k=5)(rows, labels)
    value.backward()
    contrast = L.SupCon()(embeddings, labels)
    encoder = nn.Linear(4, 3, dtype=torch.float64)
    with torch.no_grad():
        encoder.weight.copy_(torch.eye(3, 4))
        encoder.bias.zero_()
    step = L.SupCon()(encoder(embeddings), labels)
    step.backward()
    for rank, of_rank in enumerate(heard):
        torch.testing.assert_close(of_rank["empty"], value.detach())
        torch.testing.assert_close(of_rank["gradient of empty"], rows.grad if rank == 0 else rows.grad[:0])
        for kind in ("int8", "int32"):
            torch.testing.assert_close(of_rank[kind], contrast.detach())
        torch.testing.assert_close(of_rank["cached"], step.detach())
        torch.testing.assert_close(of_rank["slope of cached"], encoder.weight.grad)


def test_the_trainer_refuses_processes_that_accelerate_does_not_see(heard):
    for of_rank in heard:
        assert (
            "on rank 0 torch.distributed counts 2 (rank 0), accelerate counts 1 (rank 0), the environment counts "
            "nothing; start several with: torchrun --nproc_per_node 2 your_script.py"
        ) in of_rank["worlds"]


def test_a_rank_that_fails_shows_its_error_and_is_not_aborted(tmp_path):
    with pytest.raises(AssertionError, match="of every rank") as caught:
        together("ranks_cases", "broken", 2, tmp_path)
    assert str(caught.value).startswith("exit codes [1, 1]\n")


def test_when_one_rank_fails_alone_the_others_stop_in_time(tmp_path):
    """The group's timeout is five seconds; between gathers, with a memory, and before and after the loss of a step."""
    first, second = together("ranks_cases", "silences", 2, tmp_path)
    assert set(second.values()) == {"of this rank alone"}
    for name, owner in {
        "loss": "Distributed",
        "memory": "Distributed",
        "before the loss": "Distributed",
        "after the loss": "cached_step",
    }.items():
        assert first[name].startswith(f"{owner}: rank 0 of 2 lost touch with the others, because one of them died"), (
            name
        )
