"""Transforms: sizes, crops at their exact place, fair flips, draws within their bounds, mean and std."""

import numpy as np
import pytest
import torch
from PIL import Image

from nearfar.data import transforms
from nearfar.data.transforms import Moved, Photograph, Plain, get, to_tensor

torch.set_num_threads(1)


def generator(seed=0):
    return np.random.default_rng(seed)


def moved(transform, x, generators):
    """Drawings moved together, as a batch is."""
    draws = torch.tensor([transform.draw((x.shape[-1], x.shape[-2]), each) for each in generators])
    return transform.render(x, draws)


def ramp(width, height):
    """A picture whose red channel is x and whose green channel is y."""
    across, down = np.meshgrid(np.arange(width), np.arange(height))
    return Image.fromarray(np.stack([across, down, np.zeros_like(down)], axis=2).astype(np.uint8))


def test_to_tensor():
    x = to_tensor(ramp(5, 3))
    assert x.shape == (3, 3, 5)
    assert x.dtype == torch.float32
    assert x[0, 0, 4].item() == pytest.approx(4 / 255)
    assert to_tensor(Image.new("L", (5, 3))).shape == (1, 3, 5)
    assert to_tensor(torch.full((2, 3, 4), 255, dtype=torch.uint8)).max() == 1
    vector = to_tensor(np.array([1.0, 300.0]))
    assert vector.tolist() == [1.0, 300.0]  # numbers that are no pictures stay


def test_mean_and_std():
    transform = get("none", train=False, mean=(0.5, 0.0, 0.0), std=(2.0, 1.0, 0.5))
    x = transform(Image.new("RGB", (2, 2), (255, 51, 255)), generator())
    torch.testing.assert_close(x[:, 0, 0], torch.tensor([0.25, 0.2, 2.0]))
    torch.testing.assert_close(Plain((1.0,), (2.0,))(torch.tensor([3.0, 5.0]), generator()), torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize(("name", "side"), [("qi2020", 227), ("can2019", 224), ("photographs", 224)])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("size", [(300, 200), (64, 500), (256, 256)])
def test_photographs_have_one_shape(name, side, train, size):
    assert get(name, train)(ramp(*size), generator()).shape == (3, side, side)


def test_the_middle_is_exact():
    x = get("qi2020", train=False)(ramp(256, 256), generator()) * 255
    assert x[0, 0].round().tolist() == list(range(14, 14 + 227))  # (256 - 227) // 2 = 14
    assert x[1, :, 0].round().tolist() == list(range(14, 14 + 227))
    x = get("can2019", train=False)(ramp(256, 256), generator()) * 255
    assert x[0, 0].round().tolist() == list(range(16, 16 + 224))
    wide = get("qi2020", train=False)(ramp(300, 256), generator()) * 255  # the short side is 256 already
    assert wide[0, 0].round().tolist() == [min(v, 255) if v < 256 else v - 256 for v in range(36, 36 + 227)]


def test_can2019_gives_up_the_aspect_and_qi2020_does_not():
    bars = Image.fromarray(np.repeat(np.repeat([[0, 255]], 512, axis=1), 512, axis=0).astype(np.uint8))  # 1024 x 512
    middle_can2019 = get("can2019", train=False)(bars, generator())
    assert middle_can2019[0, 0, :110].max() == 0
    assert middle_can2019[0, 0, 114:].min() == 1  # the edge stays in the middle in both
    tall = ramp(128, 256)
    assert get("can2019", train=False)(tall, generator())[0].max() * 255 > 118  # nearly all of the width is there
    assert get("qi2020", train=False)(tall, generator())[1].max() * 255 < 190  # the ends of the height are not


def test_draws_repeat_and_vary():
    for name in ("qi2020", "can2019", "glyphs"):
        transform, picture = get(name, train=True), ramp(300, 280)
        assert torch.equal(transform(picture, generator(1)), transform(picture, generator(1)))
        assert not torch.equal(transform(picture, generator(1)), transform(picture, generator(2)))
    for name in transforms.NAMED:
        transform = get(name, train=False)
        assert torch.equal(transform(ramp(300, 280), generator(1)), transform(ramp(300, 280), generator(2)))


def test_flips_are_fair_and_crops_go_everywhere():
    transform = Photograph(crop=6, side=8, square=True, train=True)
    flips, corners = 0, set()
    for seed in range(400):
        x = (transform(ramp(8, 8), generator(seed)) * 255).round()
        flips += bool(x[0, 0, 0] > x[0, 0, -1])
        corners.add((int(x[0].min()), int(x[1].min())))
    assert 160 <= flips <= 240  # four standard deviations
    assert corners == {(left, top) for left in range(3) for top in range(3)}


def test_areas_of_random_crops():
    """A share of .16 to 1 of the area, an aspect of 3:4 to 4:3, inside the picture; small and large ones occur."""
    transform = Photograph(crop=227, train=True, area=(0.16, 1.0))
    shares = []
    for seed in range(500):
        left, top, wide, high, _ = transform.draw((340, 256), generator(seed))
        assert 0 <= left <= 340 - wide
        assert 0 <= top <= 256 - high
        assert 0.74 <= wide / high <= 1.35
        shares.append(wide * high / (340 * 256))
    assert min(shares) >= 0.15
    assert min(shares) < 0.2
    assert max(shares) > 0.9


def test_the_name_of_a_cache_says_the_size_of_its_pictures():
    """Caches of other versions are found by it."""
    assert [transforms.get(name, False).storage for name in transforms.CROPS] == [
        "short side 256",
        "256 x 256",
        "short side 256",
    ]


def test_a_strip_gets_the_largest_square():
    assert Photograph(crop=8, train=True, area=(0.9, 1.0)).draw((1000, 10), generator())[2:4] == [10, 10]


def test_moved_by_nothing_is_the_picture():
    x = torch.rand(3, 1, 9, 9)
    still = moved(Moved(shift=0, scale=0, turn=0, slant=0), x, [generator(i) for i in range(3)])
    torch.testing.assert_close(still, x, atol=1e-5, rtol=0)


def test_moves_stay_within_their_bounds():
    """A point in the middle moves by the shift at most, and reaches it nearly."""
    x = torch.zeros(300, 1, 17, 17)
    x[:, :, 8, 8] = 1
    out = moved(Moved(shift=2, scale=0, turn=0, slant=0), x, [generator(i) for i in range(300)])
    places = torch.arange(17.0)
    for axis in (2, 3):
        center = (out.sum(dim=(1, 5 - axis)) * places).sum(dim=1) / out.sum(dim=(1, 2, 3))
        assert (center - 8).abs().max() <= 2 + 1e-4
        assert (center - 8).max() > 1.8
        assert (center - 8).min() < -1.8


def test_turn_and_slant_and_scale():
    x = torch.zeros(1, 1, 33, 33)
    x[:, :, 4:29, 16] = 1  # an upright stroke

    def leaning(**bounds):
        out = moved(Moved(**{"shift": 0, "scale": 0, "turn": 0, "slant": 0} | bounds), x, [generator(3)])[0, 0]
        tops = [(out[row] * torch.arange(33.0)).sum() / out[row].sum() for row in (8, 24)]
        return float(tops[0] - tops[1]), int((out.sum(dim=1) > 0.05).sum())

    assert leaning() == (0.0, 25)
    assert abs(leaning(turn=30)[0]) > 1
    assert abs(leaning(slant=0.5)[0]) > 1
    assert leaning(scale=0.5)[1] != 25


def test_errors():
    with pytest.raises(ValueError, match=r"name must be one of .* did you mean 'glyphs'"):
        get("glyph", train=True)
    with pytest.raises(TypeError, match="picture must be a PIL image, but came as Tensor"):
        get("qi2020", train=True)(torch.zeros(3, 256, 256), generator())


def test_drawings_are_moved_as_far_as_asked_in_training_alone():
    usual, twice = Moved(), get("glyphs", train=True, move=2)
    assert get("glyphs", train=True) == usual
    assert get("glyphs", train=False, move=2) == Plain()
    names = ("shift", "scale", "turn", "slant")
    assert [getattr(twice, name) for name in names] == [2 * getattr(usual, name) for name in names]
    for name in ("none", "photographs"):
        with pytest.raises(ValueError, match=f"'{name}' moves no drawings, but move=2 came; take 'glyphs'"):
            get(name, train=True, move=2)


def test_the_share_of_the_short_side_that_evaluation_takes():
    whole, usual = (transforms.get("photographs", False, size=40, crop_pct=share) for share in (1.0, None))
    assert (whole.crop, whole.side, usual.crop, usual.side) == (40, 40, 40, 46)
    assert transforms.get("photographs", False, crop_pct=0.5).side == 448
    drawn = whole.draw((60, 40), np.random.default_rng(0))
    assert drawn == [10, 0, 40, 40, 0]  # the whole height
    for share in (0.0, 1.1):
        with pytest.raises(ValueError, match=f"crop_pct must be above 0 and at most 1, but came as {share}"):
            transforms.get("photographs", False, crop_pct=share)
    with pytest.raises(ValueError, match="leaves pictures as they are, but crop_pct"):
        transforms.get("none", False, crop_pct=1.0)


def test_another_size_in_training_alone():
    """Both take the same stored picture, so that a cache serves both."""
    train, plain = (transforms.get("photographs", train, size=32, train_size=20) for train in (True, False))
    assert (train.crop, plain.crop) == (20, 32)
    assert train.storage == plain.storage
    with pytest.raises(ValueError, match="train_size=64"):
        transforms.get("photographs", True, size=32, train_size=64)
    with pytest.raises(ValueError, match="train_size"):
        transforms.get("none", True, train_size=20)
