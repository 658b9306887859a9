"""Files are complete, checksummed and of the size they claim, or refused in one sentence."""

from __future__ import annotations

import io
import zipfile

import numpy as np
import pytest
import torch

from nearfar._utils.files import LIMIT, check_seal, read_arrays, sealed, write_arrays


def archive(tmp_path):
    path = tmp_path / "a.npz"
    write_arrays(path, {"x": np.arange(600.0).reshape(30, 20), "name": np.array(["a", "bc"])})
    return path


def refused(path, *, needed=False):
    """Whether reading says no; any other error fails the test."""
    said = None
    try:
        if needed:
            check_seal("test", path, needed=True)
        else:
            read_arrays("test", path)
    except ValueError as error:
        said = str(error)
    assert said is None or (said.startswith("test: ") and "\n" not in said)
    return said is not None


def test_numpy_reads_a_sealed_archive(tmp_path):
    with np.load(archive(tmp_path)) as found:
        assert found["x"].sum() == 600 * 599 / 2


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_reads_a_sealed_checkpoint(tmp_path, mmap):
    path = tmp_path / "a.pt"
    with sealed(path) as temporary:
        torch.save({"w": torch.arange(1000.0)}, temporary)
    check_seal("test", path, needed=True)
    assert torch.load(path, weights_only=True, mmap=mmap)["w"].sum() == 1000 * 999 / 2


@pytest.mark.parametrize("kind", ["npz", "pt"])
def test_every_flipped_bit_is_noticed(tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    if kind == "npz":
        path = archive(tmp_path)
    else:
        with sealed(path) as temporary:
            torch.save({"w": torch.arange(100.0)}, temporary)
    good = path.read_bytes()
    for at in sorted({*range(0, len(good), 37), *range(len(good) - 110, len(good))}):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :])
        assert refused(path, needed=kind == "pt"), f"bit {at % 8} of byte {at} of {len(good)}"
    path.write_bytes(good)
    assert not refused(path, needed=kind == "pt")


def test_every_cut_and_every_zeroed_block_is_noticed(tmp_path):
    path = archive(tmp_path)
    good = path.read_bytes()
    for at in range(0, len(good), 64):
        path.write_bytes(good[:at])
        assert refused(path), f"cut at {at}"
        path.write_bytes(good[:at] + bytes(len(good[at : at + 64])) + good[at + 64 :])
        if path.read_bytes() != good:
            assert refused(path), f"zeroed at {at}"


def test_an_archive_of_another_program_is_read(tmp_path):
    np.savez(tmp_path / "b.npz", x=np.ones(3))
    assert read_arrays("test", tmp_path / "b.npz")["x"].sum() == 3
    with pytest.raises(ValueError, match="no intact seal"):
        check_seal("test", tmp_path / "b.npz", needed=True)


def member(text: str) -> bytes:
    header = text.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(32)


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<f8', 'fortran_order': False, 'shape': (2000000, 1000000), }",
        "{'descr': '<U100000000', 'fortran_order': False, 'shape': (9,), }",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (3,), }",
        "{'descr': '<f8', 'fortran_order': False}",
        "{'descr': '<f8', 'fortran_order': False, 'shape': 'x'}",
        "((((((((((",
    ],
)
def test_a_header_that_claims_another_size_is_refused_before_memory_is_taken(tmp_path, header):
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("x.npy", member(header))
    assert refused(path)


def test_an_archive_that_grows_is_refused_by_a_limit_that_can_be_raised(tmp_path, monkeypatch):
    path, stream = tmp_path / "a.npz", io.BytesIO()
    np.savez_compressed(stream, x=np.zeros(200_000))
    path.write_bytes(stream.getvalue())
    monkeypatch.setattr("nearfar._utils.files.ROOM", 100_000)
    with pytest.raises(
        ValueError, match=rf"would unpack to 1,600,128 bytes, and 100,000 are allowed; .* {LIMIT}=1600128"
    ):
        read_arrays("test", path)
    monkeypatch.setenv(LIMIT, "1600128")
    assert len(read_arrays("test", path)["x"]) == 200_000


def test_an_array_of_objects_is_refused_and_no_file_is_left(tmp_path):
    """NumPy would pickle it, and a pickle is never read."""
    with pytest.raises(ValueError, match=r"cannot hold name, an array of objects; give numbers or text\.$"):
        write_arrays(tmp_path / "v.npz", {"x": np.ones(2), "name": np.array(["a", None])})
    assert list(tmp_path.iterdir()) == []
