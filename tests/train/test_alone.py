"""One process trains without accelerate and gives the same numbers; what only a GPU computes is refused on a CPU."""

from __future__ import annotations

import warnings

import pytest
import torch
from needs import need
from runs import config, tiny, weights

from nearfar.train import _processes as processes
from nearfar.train import fit
from nearfar.train._processes import SingleProcess
from nearfar.train._state import prepare

CPU = torch.device("cpu")
CLIPPED = {"optimizer": {"lr": 0.01, "proximal": 0.1, "max_grad_norm": 0.01}}


@pytest.fixture
def _without_devices(monkeypatch):
    monkeypatch.setattr(processes, "_has_device", lambda: False)


@pytest.mark.usefixtures("_without_devices")
@pytest.mark.parametrize("precision", ["float32", "bf16", "float64"])
def test_one_process_trains_as_accelerate_does(tmp_path, monkeypatch, precision):
    settings = config(training={"precision": precision, "steps": 8}, **CLIPPED)
    fit(settings, tmp_path / "alone", data=tiny())
    need("accelerate")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert type(processes.begin(precision)).__name__ == "Accelerator"
    fit(settings, tmp_path / "launched", data=tiny())
    alone, launched = (weights(tmp_path / name) for name in ("alone", "launched"))
    for name in alone:
        torch.testing.assert_close(alone[name], launched[name], atol=0, rtol=0)


@pytest.mark.usefixtures("_without_devices")
def test_mixed_precision_reaches_the_network():
    data, chosen = tiny(), config(training={"precision": "bf16"})
    state = prepare(chosen, processes.begin("bf16"), data)
    mixed = state.model(data.train.x)
    assert mixed.dtype == torch.float32
    plain = prepare(config(), processes.begin("float32"), data).model(data.train.x)
    assert 1e-5 < (mixed - plain).abs().max() < 0.05


def test_a_scale_of_gradients_changes_neither_their_norm_nor_the_proximal_term(monkeypatch):
    """In fp16 gradients are kept multiplied, which a step must undo once: before the pull, and before the clip."""
    found = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=1024.0)):
        machine, data = SingleProcess(CPU, "float32"), tiny()
        machine.scaler = scaler
        state = prepare(config(**CLIPPED), machine, data)
        state.begin_projection(1)
        for _ in range(3):
            _, scalars = state.step(data.train.x, torch.from_numpy(data.train.labels))
        found.append([scalars["gradient"], *(p.detach() for p in state.model.parameters())])
    for plain, scaled in zip(*found, strict=True):
        torch.testing.assert_close(scaled, plain, atol=1e-7, rtol=1e-6)


def test_gradients_are_scaled_in_fp16_alone():
    """Their exponents are large enough in the others, and a scale that is not needed would change the last digits."""
    assert [SingleProcess(CPU, precision).scaler for precision in ("float32", "float64", "bf16")] == [None] * 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no GPU
        assert SingleProcess(torch.device("cuda"), "fp16").scaler is not None


def test_half_precision_needs_a_device_that_computes_in_it(monkeypatch):
    with pytest.raises(ValueError, match=r"^train: training\.precision fp16 needs a GPU; take float32, or bf16\.$"):
        SingleProcess(CPU, "fp16")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    with pytest.raises(ValueError, match=r"^train: training\.precision bf16 needs a newer GPU"):
        SingleProcess(torch.device("cuda"), "bf16")


@pytest.mark.parametrize(
    ("variables", "launched"),
    [({}, False), ({"RANK": "0", "WORLD_SIZE": "1"}, True), ({"ACCELERATE_MIXED_PRECISION": "no"}, True)],
)
def test_a_launcher_is_known_by_its_variables(variables, launched):
    assert processes._has_launcher(variables) == launched
