"""Two processes (gloo on loopback) train as one: coherent batches, one journal, a common stop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from needs import need
from processes import HERE, ended, start
from runs import DATA, config, journal, tiny, weights

from nearfar.train import fit

need("accelerate")

SCRIPT = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from runs import DATA, config
from nearfar._utils.process_group import close
from nearfar.train import fit
settings, folder, data = json.loads(sys.argv[2]), Path(sys.argv[3]), DATA[sys.argv[4]]
seen = []
look = lambda moment: seen.append(moment.indices.tolist())
try:
    fit(config(**settings), folder, data=data(), callbacks=[look], **json.loads(sys.argv[5]))
    folder.with_name(f"{folder.name}-{os.environ['RANK']}.json").write_text(json.dumps(seen), encoding="utf-8")
finally:
    close()
"""


def launch(settings: dict, folder: Path, world: int = 2, data: str = "tiny", **more: Any) -> list[list[list[int]]]:
    """Train in `world` processes; gives each rank's batches."""
    ranks = start(SCRIPT, str(HERE), json.dumps(settings), str(folder), data, json.dumps(more), world=world)
    errors = ended(ranks, 200)
    assert [process.returncode for process in ranks] == [0] * world, errors
    return [json.loads(folder.with_name(f"{folder.name}-{r}.json").read_text(encoding="utf-8")) for r in range(world)]


PROFS = {
    "batches": {"name": "Representatives", "batch_size": 8, "samples": 2, "rho": 2},
    "loss": {"name": "Contrastive"},
    "optimizer": {"proximal": 0.1},
}


CONVERGED = {**PROFS, "batches": {**PROFS["batches"], "rho": 1, "steps": "converged"}}
GLYPHS = {"model": {"name": "small", "embedding_dim": 4}}


@pytest.mark.parametrize(
    ("settings", "data"),
    [(GLYPHS, "letters"), (PROFS, "tiny"), (CONVERGED, "tiny")],
    ids=["MPerClass, glyphs", "Representatives", "Representatives, converged"],
)
def test_ranks_draw_the_batches_of_one_process(tmp_path, settings, data):
    alone: list[list[int]] = []
    look = [lambda moment: alone.append(moment.indices.tolist())]
    fit(config(**settings), tmp_path / "one", data=DATA[data](), callbacks=look)
    first, second = launch(settings, tmp_path / "two", data=data)
    assert [a + b for a, b in zip(first, second, strict=True)] == alone
    assert [line["step"] for line in journal(tmp_path / "two") if "loss" in line] == list(range(1, 21))


MINED = {"batches": {"name": "MinedNegatives", "batch_size": 12, "every": 4, "k": 5}}


@pytest.mark.parametrize("hard", [{**PROFS, "batches": {**PROFS["batches"], "hard_classes": True}}, MINED])
def test_hard_classes_and_mined_negatives_agree_on_all_ranks(tmp_path, hard):
    first, second = launch(hard, tmp_path / "two")
    state = torch.load(tmp_path / "two/checkpoints/last.pt", weights_only=True)
    assert state["step"] == 20
    labels = tiny().train.labels  # the held-out classes come off first, so compare through the rows themselves
    assert len(labels) > max(max(map(max, first)), max(map(max, second)))
    for mine, theirs in zip(first, second, strict=True):
        assert not set(mine) & set(theirs)  # a batch holds a row once, so ranks share none


def test_a_run_of_two_ranks_goes_on_with_one(tmp_path):
    launch({"training": {"steps": 10}}, tmp_path / "run")
    alone: list[list[int]] = []
    fit(config(), tmp_path / "run", data=tiny(), resume=True, callbacks=[lambda m: alone.append(m.indices.tolist())])
    whole: list[list[int]] = []
    fit(config(), tmp_path / "one", data=tiny(), callbacks=[lambda m: whole.append(m.indices.tolist())])
    assert alone == whole[10:]


EXACT = {
    "model": {"name": "small", "embedding_dim": 8, "group_norms": True},
    "batches": {"name": "MPerClass", "classes": 4, "samples": 3},
    "training": {"steps": 50, "precision": "float64", "evaluate_every": 50, "explain_every": 0, "diagnose_every": 0},
}
CASES = {
    "top-k over the batch": {"loss": {"name": "DroTopK", "k": 20}},
    "learnt threshold": {"loss": {"name": "Margin"}},
    "lifted, with a memory and chunks": {
        "loss": {"name": "LiftedStructure"},
        "training": {**EXACT["training"], "cross_batch_memory": 40, "cross_batch_memory_warmup": 5, "chunk": 4},
    },
}


@pytest.mark.parametrize("case", CASES)
def test_fifty_steps_of_two_ranks_are_those_of_one(tmp_path, case):
    """Glyphs, each sample moved by its own seed, a network without batch statistics, in float64."""
    settings = {**EXACT, **CASES[case]}
    fit(config(**settings), tmp_path / "one", data=DATA["letters"]())
    launch(settings, tmp_path / "two", data="letters")
    one, two = ([line["loss"] for line in journal(tmp_path / name) if "loss" in line] for name in ("one", "two"))
    assert len(one) == 50
    assert one[0] != one[-1]
    assert two == pytest.approx(one, rel=0, abs=1e-8)
    one, two = (weights(tmp_path / name) for name in ("one", "two"))
    for name in one:
        torch.testing.assert_close(two[name].cpu(), one[name].cpu(), atol=1e-8, rtol=0)


FAILING = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from datetime import timedelta
import torch
import torch.distributed as dist
dist.init_process_group("gloo", timeout=timedelta(seconds=15))
from runs import DATA, config
from nearfar.train import fit

def fail(moment):
    if moment.step != 13 or os.environ["RANK"] != "1":
        return
    if sys.argv[3] == "killed":
        os._exit(9)  # no word, no goodbye
    if sys.argv[3] == "raises":
        raise KeyError("of this rank alone")
    with torch.no_grad():
        next(moment.state.bare_model.parameters()).fill_(torch.nan)

try:
    fit(config(), Path(sys.argv[2]), data=DATA["tiny"](), callbacks=[fail])
except (KeyError, RuntimeError, ValueError) as problem:
    print(problem, file=sys.stderr, flush=True)
    os._exit(1)  # at once: gloo's threads may abort a rank that is taken apart while another one's connection closes
"""


@pytest.mark.parametrize(("how", "then"), [("killed", 1), ("raises", 3), ("NaN", None)])
def test_when_a_rank_fails_the_others_stop_and_another_number_of_ranks_goes_on(tmp_path, how, then):
    """No hang, one sentence, and the run goes on from its checkpoint as if it had never been stopped."""
    ranks = start(FAILING, str(HERE), str(tmp_path / "run"), how, world=2)
    first, second = ended(ranks, 100)
    assert [process.returncode for process in ranks] == [1, 9 if how == "killed" else 1], (first, second)
    if how == "NaN":
        assert "DroTopK: embeddings must be finite, but 6 of 6 rows hold NaN" in second
        assert (
            f"Distributed: rank 1 brought what its loss cannot take, which stops all of them: {second.strip()}" in first
        )
        return
    assert "rank 0 of 2 lost touch with the others" in first
    assert "go on from the last checkpoint" in first
    state = torch.load(tmp_path / "run/checkpoints/last.pt", weights_only=True)
    assert state["step"] == 10
    launch({}, tmp_path / "run", world=then, resume=True)
    fit(config(), tmp_path / "whole", data=tiny())
    found, wanted = ([line["loss"] for line in journal(tmp_path / name) if "loss" in line] for name in ("run", "whole"))
    assert found == pytest.approx(wanted, abs=1e-5)  # ranks add in another order, in float32
