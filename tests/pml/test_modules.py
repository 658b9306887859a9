"""Modules and classes of `nearfar.pml` stand where PML's do: paths, base classes, copies, files, index tuples."""

from __future__ import annotations

import copy
import importlib
import inspect
import io
import pickle
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import pytorch_metric_learning as theirs
import torch
from pml_cases import CLASSES, LOSSES, MINERS, batch, check_same, make, mined, slopes
from pytorch_metric_learning import losses as their_losses
from pytorch_metric_learning import miners as their_miners

import nearfar.pml as ours
from nearfar.pml import losses, miners
from nearfar.pml._native import Mined

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
import pml_names

GIVEN = batch(n=18)
PATHS = [each.name.split(".", 1)[1] for each in pkgutil.walk_packages(theirs.__path__, "pytorch_metric_learning.")]


def test_the_version_is_pmls():
    assert ours.__version__ == theirs.__version__


@pytest.mark.parametrize("path", PATHS)
def test_every_module_and_name_of_pml(path):
    """PML's own objects, but for the classes that are ours, which derive from them."""
    there, here = (importlib.import_module(f"{home}.{path}") for home in ("pytorch_metric_learning", "nearfar.pml"))
    assert here is there or path.split(".")[0] in ("losses", "miners")
    for name, wanted in vars(there).items():
        if name.startswith("__") or inspect.ismodule(wanted):
            continue
        found = getattr(here, name)
        if found is not wanted:
            assert found.__module__.startswith(f"nearfar.pml.{path.split('.')[0]}.")
            assert issubclass(found, wanted)
            assert name in {*LOSSES, *CLASSES, *MINERS}
        else:
            assert here is there or name not in {*LOSSES, *CLASSES, *MINERS}
    assert there.__spec__.name == f"pytorch_metric_learning.{path}"


@pytest.mark.parametrize(
    "line",
    [
        "from nearfar.pml.losses.triplet_margin_loss import TripletMarginLoss as found",
        "import nearfar.pml.losses.triplet_margin_loss as m; found = m.TripletMarginLoss",
        "from nearfar.pml import losses; found = losses.triplet_margin_loss.TripletMarginLoss",
        "import nearfar; found = nearfar.pml.losses.TripletMarginLoss",
        "from nearfar.pml.losses import *; found = TripletMarginLoss",
    ],
)
def test_ways_to_import(line):
    space = {}
    exec(line, space)
    assert space["found"] is losses.TripletMarginLoss


@pytest.mark.parametrize("module", ["", ".losses", ".utils", ".utils.inference"])
def test_a_wrong_name_is_an_error(module):
    here = importlib.import_module(f"nearfar.pml{module}")
    with pytest.raises(AttributeError, match="no attribute 'NoSuchThing'"):
        _ = here.NoSuchThing
    with pytest.raises(ModuleNotFoundError, match="no_such_thing"):
        importlib.import_module(f"nearfar.pml{module}.no_such_thing")


def test_names_appear_in_dir():
    assert {*dir(their_losses)} - {"__builtins__"} <= {*dir(losses)}
    assert {*ours.__all__, "__version__"} <= {*dir(ours)}


def test_without_pml_there_is_one_sentence():
    script = (
        "import sys; sys.modules['pytorch_metric_learning'] = None\n"
        "import nearfar\n"
        "try:\n    import nearfar.pml\n"
        "except ImportError as error:\n    print(error)\n"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, encoding="utf-8", check=True).stdout
    assert told == (
        'nearfar.pml needs pytorch_metric_learning, which is not installed; run pip install "nearfar[pml]".\n'
    )


@pytest.mark.parametrize("name", [*LOSSES, *CLASSES, *MINERS])
def test_a_class_of_ours_is_one_of_pmls(name):
    library, other = (miners, their_miners) if name in MINERS else (losses, their_losses)
    mine, wanted = make(getattr(library, name)), make(getattr(other, name))
    mine(GIVEN["rows"], GIVEN["labels"])
    assert isinstance(mine, type(wanted))
    assert repr(mine) == repr(wanted)
    assert list(mine.state_dict()) == list(wanted.state_dict())
    assert inspect.signature(type(mine)) == inspect.signature(type(wanted))
    assert [each for each, _ in mine.named_modules()] == [each for each, _ in wanted.named_modules()]
    shown = list(inspect.signature(mine.forward).parameters.values())
    for one, other_one in zip(shown, inspect.signature(wanted.forward).parameters.values(), strict=False):
        assert (one.name, one.default) == (other_one.name, other_one.default)


@pytest.mark.parametrize("name", LOSSES)
def test_copies_and_files(name, monkeypatch):
    monkeypatch.setattr(getattr(losses, name), "least", (0, 0))
    loss = getattr(losses, name)()
    wanted = slopes(loss, GIVEN)
    file = io.BytesIO()
    torch.save(loss, file)
    file.seek(0)
    for twin in (
        copy.deepcopy(loss),
        copy.copy(loss),
        pickle.loads(pickle.dumps(loss)),
        torch.load(file, weights_only=False),
    ):
        check_same(slopes(twin, GIVEN), wanted)
        for key in ("margin", "temperature", "alpha", "pos_margin", "gamma"):
            if hasattr(twin, key):
                setattr(twin, key, getattr(twin, key) + 1)
        check_same(slopes(loss, GIVEN), wanted)


def test_copies_of_a_loss_with_a_boundary(monkeypatch):
    monkeypatch.setattr(losses.MarginLoss, "least", (0, 0))
    loss = losses.MarginLoss(learn_beta=True)
    slopes(loss, GIVEN)
    plain = losses.MarginLoss()
    slopes(plain, GIVEN)
    twin, shallow = copy.deepcopy(loss), copy.copy(plain)
    with torch.no_grad():
        twin.beta.fill_(0.5)
    shallow.beta = torch.tensor([0.5])
    wanted = slopes(their_losses.MarginLoss(beta=0.5), GIVEN)
    check_same(slopes(twin, GIVEN)[:2], wanted)
    check_same(slopes(shallow, GIVEN), wanted)
    check_same(slopes(loss, GIVEN)[:2], slopes(their_losses.MarginLoss(), GIVEN))


@pytest.mark.parametrize("name", MINERS)
def test_an_index_tuple_is_a_tuple(name, monkeypatch):
    monkeypatch.setattr(miners.TripletMarginMiner, "least", 0)
    found, wanted = (mined(name, GIVEN, library=library) for library in (miners, their_miners))
    assert isinstance(found, tuple)
    assert type(found) is Mined
    assert len(found) == len(wanted)
    a, p, *_ = found
    assert torch.equal(torch.cat([a, p]), torch.cat(found[:2]))
    assert {x.dtype for x in found} == {torch.int64}
    for twin in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert all(map(torch.equal, twin, found))
        check_same(slopes(losses.ContrastiveLoss(), GIVEN, twin), slopes(losses.ContrastiveLoss(), GIVEN, found))


@pytest.mark.parametrize("name", LOSSES)
def test_a_tuple_that_was_changed_in_place(name, monkeypatch):
    """The masks that a tuple remembers are read only while its indices are those that were mined."""
    monkeypatch.setattr(getattr(losses, name), "least", (0, 0))
    loss, other = getattr(losses, name)(), getattr(their_losses, name)()
    for miner in MINERS:
        found = mined(miner, GIVEN, library=miners)
        check_same(slopes(loss, GIVEN, found), slopes(other, GIVEN, tuple(found)))
        check_same(
            slopes(losses.TripletMarginLoss(), GIVEN, found), slopes(their_losses.TripletMarginLoss(), GIVEN, found)
        )
        for part in found if len(found) == 3 else found[:2]:  # the second pair takes the place of the first
            part[0] = part[1].clone()
        check_same(slopes(loss, GIVEN, found), slopes(other, GIVEN, tuple(found)), (name, miner))
        half = {**GIVEN, "rows": GIVEN["rows"].flip(0)}
        check_same(slopes(loss, half, found), slopes(other, half, tuple(found)), (name, miner))


def test_the_page_lists_the_classes_that_are_ours():
    assert pml_names.shown(pml_names.PAGE.read_text(encoding="utf-8")) == pml_names.table(), (
        "run python scripts/pml_names.py"
    )
