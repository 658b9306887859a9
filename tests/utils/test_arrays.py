"""Labels and rows that come as arrays: unsigned labels beyond int64, and another byte order, wherever they enter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import nearfar as nf
from nearfar import batches, doctor, evaluation, report

N = 8
X = np.random.default_rng(0).standard_normal((N, 4)).astype(np.float32)
Y = np.arange(N) % 2
LARGE = Y.astype(np.uint64) + np.uint64(2**63)
LABELS = {
    "evaluate": lambda y: nf.evaluate(X, y, ks=(1,), resamples=0).recall,
    "evaluate's gallery": lambda y: nf.evaluate(X, Y, ref_emb=X, ref_labels=y, ks=(1,), resamples=0).recall,
    "diagnose": lambda y: doctor.diagnose(X, y).to_dict(),
    "Vectors": lambda y: evaluation.Vectors(X, y).y.tolist(),
    "MPerClass": lambda y: next(iter(batches.MPerClass(y, classes=2, samples=2))),
    "Representatives": lambda y: next(iter(batches.Representatives(y, batch_size=4))),
    "Tensors": lambda y: nf.data.Tensors(X, y).labels.tolist(),
    "embed": lambda y: evaluation.embed(torch.nn.Identity(), list(zip(X, y, strict=True))).y.tolist(),
}
ROWS = {
    "evaluate": lambda x: nf.evaluate(x, Y, ks=(1,), resamples=0).recall,
    "diagnose": lambda x: doctor.diagnose(x, Y).to_dict(),
    "Vectors": lambda x: evaluation.Vectors(x).x,
    "Index": lambda x: evaluation.Index(evaluation.Vectors(x)).search(torch.from_numpy(X), 2).scores,
    "Tensors": lambda x: nf.data.Tensors(x, Y).x,
    "embed": lambda x: evaluation.embed(torch.nn.Identity(), x),
    "embed a dataset": lambda x: evaluation.embed(torch.nn.Identity(), list(x)),
    "embed, from a model": lambda x: evaluation.embed(lambda rows: x, torch.from_numpy(X)),
}


@pytest.mark.parametrize("where", LABELS)
@pytest.mark.parametrize("large", [LARGE, torch.from_numpy(LARGE), LARGE.tolist()], ids=["NumPy", "torch", "list"])
def test_labels_that_int64_cannot_hold_are_refused(where, large):
    with pytest.raises(
        ValueError, match=r"(labels|y) must be integers below 2\^63, but \d+ came; number the classes\.$"
    ):
        LABELS[where](large)


@pytest.mark.parametrize("where", LABELS)
@pytest.mark.parametrize("kind", [">i4", ">i8", ">u8", "<u8", "u2", "Q"])
def test_labels_of_every_kind_are_the_same_labels(where, kind):
    assert LABELS[where](Y.astype(kind)) == LABELS[where](Y)


def test_large_labels_can_be_numbered():
    for large in (LARGE, torch.from_numpy(LARGE), LARGE.tolist()):
        labels, names = nf.data.numbered(large)
        assert labels.tolist() == Y.tolist()
        assert names == (str(2**63), str(2**63 + 1))


@pytest.mark.parametrize("where", ROWS)
@pytest.mark.parametrize("kind", [">f4", ">f8", "longdouble"])
def test_rows_of_every_kind_are_the_same_rows(where, kind):
    found, wanted = ROWS[where](X.astype(kind)), ROWS[where](X)
    if isinstance(wanted, torch.Tensor):
        torch.testing.assert_close(found, wanted, check_dtype=False)
    else:
        assert found == wanted


def test_large_unsigned_rows_stay_positive():
    assert (evaluation.Vectors(np.full((2, 2), 2**63 + 5, dtype=np.uint64)).x == 2.0**63).all()


def test_files_in_another_byte_order(tmp_path):
    path = tmp_path / "vectors.npz"
    np.savez(path, x=X.astype(">f4"), y=Y.astype(">i8"))
    found = evaluation.Vectors.load(path)
    assert np.array_equal(found.x.numpy(), X)
    assert found.y.tolist() == Y.tolist()
    assert report.write(tmp_path / "page.html", path).is_file()
    from nearfar.cli.commands.inputs import Assumed, read_samples

    assert np.array_equal(read_samples(str(path), assumed=Assumed(8), thumbnails=0).raw.numpy(), X)
