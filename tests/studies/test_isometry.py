"""The study of Xu et al. 2022: its pictures are drawn, its numbers are those of the definitions."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import nearfar.geometry as G
from nearfar.geometry.constraints import Program, settle
from nearfar.studies import isometry


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    return folder, isometry.reproduce(folder, quick=True)


def test_everything_is_written(study):
    folder, found = study
    pictures = {f"isometry-{name}.png" for name in ("toy", "collapse", "shrink", "descent")}
    assert {path.name for path in folder.iterdir()} == pictures | {"isometry.json"}
    assert json.loads((folder / "isometry.json").read_text(encoding="utf-8")) == json.loads(json.dumps(found))
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in pictures)


def test_the_toy_set(study):
    toy = study[1]["toy"]
    assert toy["hardness"] == pytest.approx(1.146290, abs=1e-6)
    assert toy["d_haus"] == pytest.approx(0.737747, abs=1e-4)
    x, y = torch.tensor(toy["f"]), torch.tensor(toy["labels"])
    moved = torch.tensor(toy["haus_map"])
    assert G.is_triplet_separated(moved, y, tolerance=1e-6)
    assert float((moved - x).norm(dim=1).max()) <= 1.01 * toy["d_haus"]
    assert toy["longest"] == [1, 2, 3]
    assert toy["binding"] == ["02", "12", "23", "34"]  # 24 may bind, but does not in every nearest map
    assert toy["separated"]["hardness"] == 0


def test_a_pair_that_binds_in_one_nearest_map_alone_is_not_binding():
    x, y = torch.tensor(isometry.TOY, dtype=torch.float64), torch.tensor(isometry.TOY_LABELS)
    found = G.isometric_error(x, y, starts=12)
    program = Program("iso", x.numpy(), y.numpy())
    pair = 8  # of rows 2 and 4

    def stretch(g):
        apart, slopes = program.differences(g)
        return -apart[pair], -slopes[pair].reshape(g.shape)

    other = settle(program, found.map.numpy(), (1 + 1e-5) * found.upper, stretch)
    assert program.differences(other)[0][pair] > 0.999 * found.upper
    assert isometry.binding_pairs(x, y, replace(found, map=torch.from_numpy(other))) == ["02", "12", "23", "34"]


def test_the_nearest_maps_keep_a_range_of_the_spread(study):
    cells = [cell for line in study[1]["moved"]["table"].values() for cell in line.values()]
    for cell in [*cells, study[1]["collapse"]]:
        least, largest = cell["least"], cell["largest"]
        assert least["total"] < largest["total"] - 0.2
        assert all(end["within"] < end["total"] for end in (least, largest))
    x, y = torch.tensor(study[1]["collapse"]["f"]), torch.tensor(study[1]["collapse"]["labels"])
    for name in ("least", "largest"):
        g = torch.tensor(study[1]["collapse"][name]["map"])
        assert G.is_triplet_separated(g, y, tolerance=1e-6)
        assert float((g - x).norm(dim=1).max()) <= 1.011 * study[1]["collapse"]["d_haus"]


def test_maps_that_keep_the_spread_are_hardly_farther(study):
    """Discussion of Xu et al. 2022: F_TS without collapsed maps. H/2 and d_iso/2 bound it too, as it is a subset."""
    found = study[1]["collapse"]
    x, y = torch.tensor(found["f"]), torch.tensor(found["labels"])
    assert found["restricted"]["total"] >= 0.999
    assert found["d_haus"] * 0.999 <= found["restricted"]["d_haus"] <= 1.05 * found["d_haus"]
    assert found["restricted"]["d_haus"] >= G.hardness(x, y) / 4


def test_more_dimensions_collapse_less(study):
    for line in study[1]["shrink"]["table"].values():
        assert line["8"]["shrink"] < line["1"]["shrink"]
