"""The kernels alone, against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from pario.decode.base import Draw, _mix
from pario.kernels.convert import MEAN_CHANNEL, MEAN_ONE, MEAN_PIXEL, crop_f32, crop_u8, draw_window, hwc_to_chw, mix
from pario.kernels.pack import pack_rows, pack_spans

RNG = np.random.default_rng(3)
GUARD = 17


def guarded(nbytes: int, dtype: type) -> np.ndarray:
    return np.full(nbytes + 2 * GUARD, 99, dtype)


def inner(out: np.ndarray, right: np.ndarray) -> None:
    np.testing.assert_array_equal(out[GUARD:-GUARD].reshape(right.shape), right)
    assert (out[:GUARD] == 99).all()
    assert (out[-GUARD:] == 99).all()


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 8, 5), (2, 33, 70), (4, 3, 257)])
@pytest.mark.parametrize("flip", [False, True])
def test_crop(shape: tuple[int, int, int], flip: bool) -> None:
    channels, height, width = shape
    pixels = RNG.integers(0, 256, shape, dtype=np.uint8)
    src = np.concatenate([np.zeros(5, np.uint8), pixels.reshape(-1)])
    floats = src.astype(np.float32) * 0.7
    means = {
        MEAN_ONE: np.float32([5]),
        MEAN_CHANNEL: RNG.random(channels).astype(np.float32),
        MEAN_PIXEL: RNG.random(pixels.size).astype(np.float32),
    }
    scale = np.float32(0.3)
    for _ in range(6):
        oh, ow = int(RNG.integers(1, height + 1)), int(RNG.integers(1, width + 1))
        top, left = int(RNG.integers(0, height - oh + 1)), int(RNG.integers(0, width - ow + 1))
        window = (top, left, oh, ow, flip)
        inside = np.s_[:, top : top + oh, left : left + ow]
        turn = np.s_[:, :, ::-1] if flip else np.s_[:]
        out = guarded(channels * oh * ow, np.uint8)
        crop_u8(src, 5, shape, out, GUARD, window, False)
        inner(out, pixels[inside][turn])
        for kind, mean in means.items():
            full = np.broadcast_to(mean.reshape({MEAN_PIXEL: shape}.get(kind, (-1, 1, 1))), shape)
            for source in (src, floats):
                out = guarded(channels * oh * ow, np.float32)
                crop_f32(source, 5, shape, out, GUARD, window, mean, kind, scale)
                right = (source[5:].reshape(shape).astype(np.float32) - full) * scale
                inner(out, right[inside][turn])


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("pixels", [0, 1, 31, 1000])
def test_hwc_to_chw(channels: int, pixels: int) -> None:
    image = RNG.integers(0, 256, (pixels, channels), dtype=np.uint8)
    out = np.empty(pixels * channels, np.uint8)
    hwc_to_chw(image.reshape(-1), channels, out)
    np.testing.assert_array_equal(out.reshape(channels, pixels), image.T)


def test_the_draw_is_one_arithmetic_in_python_and_in_the_kernel() -> None:
    # Splitmix64 of seed 0 begins with this number (Vigna's reference code).
    assert _mix(0) == 0xE220A8397B1DCDAF
    for x in (0, 1, 2**63, 2**64 - 1, 0x123456789ABCDEF):
        assert int(mix(np.uint64(x))) == _mix(x)
    draw = Draw(seed=-3, epoch=7)
    assert draw == Draw(-3, 7)
    assert -(2**63) <= draw.key < 2**63
    assert len({Draw(s, e).key for s in range(40) for e in range(40)}) == 1600


def test_windows_stay_inside() -> None:
    for record in range(3000):
        top, left, flip = draw_window(-5, record, 40, 31, 33, 31, True, True)
        assert 0 <= top <= 7
        assert left == 0
        assert flip in (True, False)
    assert draw_window(-5, 1, 40, 31, 33, 30, False, False) == (3, 0, False)


def test_neighbouring_records_draw_independently() -> None:
    flips = np.array([draw_window(9, i, 4, 4, 4, 4, False, True)[2] for i in range(4000)]) * 2.0 - 1
    assert abs(flips.mean()) < 0.08
    for lag in (1, 2, 3, 8):
        assert abs((flips[lag:] * flips[:-lag]).mean()) < 0.08


def test_rows_past_the_caches() -> None:
    """Of any length, from and to any address: the same bytes, and none beside them."""
    data = RNG.integers(0, 256, 5000, dtype=np.uint8)
    failed = np.empty(9, np.int64)
    for nbytes in (*range(0, 300, 7), 31, 32, 33, 127, 128, 129, 160, 4096):
        for shift in (0, 1, 13, 31):
            starts = RNG.integers(0, 5000 - nbytes, 3)
            out = guarded(shift + 3 * nbytes, np.uint8)
            rows = out[GUARD + shift : len(out) - GUARD]
            assert pack_rows(data, starts, np.full(3, nbytes), rows, nbytes, failed, True) == 0
            right = [np.full(shift, 99, np.uint8), *(data[at : at + nbytes] for at in starts)]
            inner(out, np.concatenate(right))


def test_pack_rows_and_spans_keep_inside_their_bounds() -> None:
    data = RNG.integers(0, 256, 100, dtype=np.uint8)
    data.flags.writeable = False
    starts = np.array([0, 90, 91, -1, 50, 2**62])
    nbytes = np.array([10, 10, 10, 10, 9, 10])
    out, failed = guarded(60, np.uint8), np.empty(6, np.int64)
    assert pack_rows(data, starts, nbytes, out[GUARD:-GUARD], 10, failed, False) == 4
    assert failed[:4].tolist() == [2, 3, 4, 5]
    right = np.full((6, 10), 99, np.uint8)
    right[0], right[1] = data[:10], data[90:]
    inner(out, right)
    offsets = np.empty(7, np.int64)
    out = guarded(25, np.uint8)
    assert pack_spans(data, starts, nbytes, out[GUARD:-GUARD], offsets, failed) == 4
    assert failed[:4].tolist() == [2, 3, 4, 5], "record 4 has no room"
    assert offsets.tolist() == [0, 10, 20, 20, 20, 20, 20]
    inner(out, np.concatenate([data[:10], data[90:], np.full(5, 99, np.uint8)]))
