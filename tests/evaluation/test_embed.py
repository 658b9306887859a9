"""`embed`: order, modes, dtypes; an interrupted embedding resumes to the same bytes."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
import torch
from forks import ran, start
from torch import nn

from nearfar.evaluation import Vectors, embed
from nearfar.evaluation._embed import CHUNK


class ScoredPairs(torch.utils.data.Dataset):
    """Items (sample, label, name) or fewer."""

    def __init__(self, n=10, fields=3):
        self.x, self.fields = torch.arange(n * 2.0).reshape(n, 2), fields

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return (self.x[i], torch.tensor(i // 2), f"sample {i}")[: self.fields] if self.fields > 1 else self.x[i]


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x.flatten(1).float()


@pytest.mark.parametrize("batch_size", [1, 3, 10, 256])
@pytest.mark.parametrize("kind", ["tensor", "array", "dataset", "list"])
def test_order_is_kept(kind, batch_size):
    x = torch.randn(10, 2, 3)
    data = {"tensor": x, "array": x.numpy(), "dataset": torch.utils.data.TensorDataset(x), "list": list(x)}[kind]
    assert torch.equal(embed(Doubled(), data, batch_size=batch_size), 2 * x.flatten(1))


def test_labels_and_names_come_along():
    found = embed(Doubled(), ScoredPairs(), batch_size=4)
    assert isinstance(found, Vectors)
    assert found.y.tolist() == [i // 2 for i in range(10)]
    assert found.name == tuple(f"sample {i}" for i in range(10))
    assert embed(Doubled(), ScoredPairs(fields=2)).name is None
    assert isinstance(embed(Doubled(), ScoredPairs(fields=1)), torch.Tensor)


def test_evaluation_mode_without_gradients_and_modes_put_back():
    seen = []

    class Spy(nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen, self.live = nn.BatchNorm1d(2), nn.BatchNorm1d(2)

        def forward(self, x):
            seen.append((self.training, self.live.training, torch.is_grad_enabled()))
            return self.live(x)

    model = Spy().train()
    model.frozen.eval()
    embed(model, torch.randn(5, 2), batch_size=5)
    assert seen == [(False, False, False)]
    assert (model.training, model.live.training, model.frozen.training) == (True, True, False)
    assert torch.is_grad_enabled()
    assert model.live.num_batches_tracked == 0


def test_modes_are_put_back_after_a_failure():
    class Fails(nn.Module):
        def forward(self, x):
            raise RuntimeError("no")

    model = Fails().train()
    with pytest.raises(RuntimeError):
        embed(model, torch.randn(5, 2))
    assert model.training


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
def test_vectors_are_float32(kind):
    found = embed(lambda x: x.to(kind), torch.eye(3))
    assert found.dtype == torch.float32
    assert torch.equal(found, torch.eye(3))


def test_a_callable_that_gives_arrays():
    assert torch.equal(embed(lambda x: x.numpy() + 1, torch.zeros(4, 2)), torch.ones(4, 2))


def test_no_bar_where_nobody_looks(capfd):
    embed(Doubled(), torch.eye(3))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("model", "data", "words"),
    [
        (Doubled(), torch.zeros(0, 2), "no samples"),
        (Doubled(), iter([1]), "must have a length"),
        (lambda x: x[:1], torch.eye(3), "[3, d] for 3 samples, but gave torch.float32 of shape [1, 3]"),
        (lambda x: x[0], torch.eye(3), "shape [3]"),
        (lambda x: (x, x), torch.eye(3), "but gave tuple"),
        (lambda x: x.long(), torch.eye(3), "torch.int64"),
        (lambda x: x.log(), torch.eye(3) + torch.tensor([0.0, 0, 1]), "samples 0, 1, 2"),
        (Doubled(), [torch.zeros(2), torch.zeros(3)], "one shape"),
    ],
)
def test_errors(model, data, words):
    with pytest.raises((ValueError, TypeError)) as error:
        embed(model, data)
    assert words in str(error.value)


def test_nan_is_named_by_its_place_in_the_data():
    x = torch.zeros(20, 2)
    x[13] = torch.nan
    with pytest.raises(ValueError, match="samples 13"):
        embed(Doubled(), x, batch_size=4)


@pytest.mark.parametrize("batch_size", [0, -1, 2.5])
def test_a_bad_batch_size(batch_size):
    with pytest.raises(ValueError, match="batch_size"):
        embed(Doubled(), torch.eye(3), batch_size=batch_size)


class Counted(nn.Module):
    """Counts the samples it has seen; fails after some."""

    def __init__(self, limit=None):
        super().__init__()
        self.linear, self.seen, self.limit = nn.Linear(3, 4), 0, limit

    def forward(self, x):
        if self.limit is not None and self.seen >= self.limit:
            raise RuntimeError("killed")
        self.seen += len(x)
        return self.linear(x)


def twins(limit):
    torch.manual_seed(0)
    first = Counted(limit)
    second = Counted()
    second.load_state_dict(first.state_dict())
    return first, second


@pytest.mark.parametrize("labels", [False, True])
def test_resumes_after_the_last_whole_chunk(tmp_path, labels):
    n = 5 * CHUNK * 2 + 3
    x = torch.randn(n, 3)
    data = [(row, i % 4, f"n{i}") for i, row in enumerate(x)] if labels else x
    first, second = twins(limit=2 * CHUNK * 2 + 6)  # within the third chunk
    with pytest.raises(RuntimeError, match="killed"):
        embed(first, data, batch_size=2, resume=tmp_path / "parts")
    assert sorted(p.name for p in (tmp_path / "parts").iterdir()) == [
        "chunk-000000.npz",
        "chunk-000001.npz",
        "plan.json",
    ]
    found = embed(second, data, batch_size=2, resume=tmp_path / "parts")
    assert second.seen == n - 2 * CHUNK * 2
    whole = embed(twins(None)[1], data, batch_size=2)
    if labels:
        assert torch.equal(found.y, whole.y)
        assert found.name == whole.name
        found, whole = found.x, whole.x
    assert torch.equal(found, whole)
    third = twins(None)[1]
    again = embed(third, data, batch_size=2, resume=tmp_path / "parts")
    assert third.seen == 0
    assert torch.equal(again.x if labels else again, whole)


def test_a_damaged_chunk_is_made_again(tmp_path):
    x = torch.randn(3 * CHUNK, 3)
    first, second = twins(None)
    whole = embed(first, x, batch_size=1, resume=tmp_path)
    (tmp_path / "chunk-000001.npz").write_bytes(b"half")
    assert torch.equal(embed(second, x, batch_size=1, resume=tmp_path), whole)
    assert second.seen == CHUNK


def test_another_plan_is_refused(tmp_path):
    x, model = torch.randn(8, 3), twins(None)[0]
    embed(model, x, batch_size=2, resume=tmp_path)
    for data, size in ((x[:7], 2), (x, 4)):
        with pytest.raises(ValueError, match=r"8 samples in batches of 2.*delete this one"):
            embed(model, data, batch_size=size, resume=tmp_path)
    with torch.no_grad():
        model.linear.weight[0, 0] += 1
    with pytest.raises(ValueError, match="weights"):
        embed(model, x, batch_size=2, resume=tmp_path)


SCRIPT = """
import sys, time, torch
from pathlib import Path
from nearfar.evaluation import Vectors, embed
torch.manual_seed(0)
torch.set_num_threads(1)
linear = torch.nn.Linear(8, 5)
x = torch.randn(40 * 16 * 4, 8)
def model(batch):
    time.sleep(float(sys.argv[3]))
    with torch.no_grad():
        return linear(batch)
found = embed(model, x, batch_size=4, resume=Path(sys.argv[1]))
Vectors(found).save(sys.argv[2])
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system cannot kill -9")
def test_kill_minus_nine_in_the_middle(tmp_path):
    parts, output = tmp_path / "parts", tmp_path / "killed.npz"
    running = start(SCRIPT, str(parts), str(output), "0.003")
    deadline = time.monotonic() + 100
    while len(list(parts.glob("chunk-*.npz"))) < 5 and time.monotonic() < deadline:
        assert running.poll() is None, running.communicate(timeout=10)
        time.sleep(0.01)
    os.kill(running.pid, signal.SIGKILL)
    running.communicate(timeout=100)
    assert running.returncode == -signal.SIGKILL
    done = len(list(parts.glob("chunk-*.npz")))
    assert 5 <= done < 40
    assert not output.exists()
    stamps = {p.name: p.stat().st_mtime_ns for p in parts.glob("chunk-*.npz")}
    for folder, result in ((parts, output), (tmp_path / "fresh", tmp_path / "fresh.npz")):
        again = ran(SCRIPT, str(folder), str(result), "0")
        assert again.returncode == 0, again.stderr
    assert all((parts / name).stat().st_mtime_ns == stamp for name, stamp in stamps.items())
    assert output.read_bytes() == (tmp_path / "fresh.npz").read_bytes()
    assert np.load(output)["x"].shape == (2560, 5)
