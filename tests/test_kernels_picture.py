"""Pictures to rows, against matrices of weights; what is drawn, against what torchvision draws."""

from __future__ import annotations

import numpy as np
import pytest

from pario.decode import Draw, Image
from pario.kernels.picture import F16, F32, RANDOM, U8, draw_picture, picture_row, work_floats, work_numbers

GUARD = 64  # elements behind each array that nobody may write


def weights(begin: float, length: float, n: int) -> np.ndarray:
    """f64[n, pixels]: a triangle as wide as what a new pixel covers, at least one pixel to each side."""
    first, last = int(np.floor(begin)), int(np.ceil(begin + length))
    scale = length / n
    centres = begin + (np.arange(n)[:, None] + 0.5) * scale
    pixels = np.arange(first, last) + 0.5
    w = np.maximum(0, 1 - np.abs(pixels - centres) / max(scale, 1))
    return w / w.sum(axis=1, keepdims=True)


def guarded(n: int, dtype: type) -> tuple[np.ndarray, np.ndarray]:
    whole = np.full(n + GUARD, 77, dtype)
    return whole, whole[:n]


def row_of(picture, window, size, colors, kind, planar) -> np.ndarray:
    """A row as [h, w, c]; fails if the kernel writes behind an array."""
    height, width, channels = picture.shape
    held = [guarded(size[0] * size[1] * channels, dtype) for dtype in (np.uint8, np.float32, np.uint16)]
    work = guarded(work_floats(height, width, *size, False), np.float32)
    numbers = guarded(work_numbers(*size), np.int64)
    jitter = np.array([1, 1, 1, 0], np.float32)
    out = tuple(row for _, row in held)
    picture_row(
        picture.reshape(-1), picture.shape, np.array(window, float), size, jitter, colors, kind, planar, work[1],
        numbers[1], out,
    )  # fmt: skip
    for whole, _ in (*held, work, numbers):
        assert (whole[-GUARD:] == 77).all()
    for other in {U8, F32, F16} - {kind}:
        assert (held[other][0] == 77).all()
    row = out[kind].view(np.float16) if kind == F16 else out[kind]
    if planar:
        return row.reshape(channels, *size).transpose(1, 2, 0)
    return row.reshape(*size, channels)


@pytest.mark.parametrize("kind", [U8, F32, F16])
def test_rows_are_what_the_weights_make(kind: int) -> None:
    rng = np.random.default_rng(kind)
    factors, summands = (1, 1, 1), (0, 0, 0)
    if kind != U8:
        factors, summands = (0.02, -0.5, 3.0), (1, 2, -3)
    colors = np.array([*factors, *summands, 0.3, 0.6, 0.1], np.float32)
    for _ in range(120):
        channels = int(rng.choice([1, 3]))
        height, width = (int(k) for k in rng.integers(1, 40, 2))
        picture = rng.integers(0, 256, (height, width, channels), dtype=np.uint8)
        size = tuple(int(k) for k in rng.integers(1, 40, 2))
        h, w = rng.uniform(1, height), rng.uniform(1, width)
        if rng.random() < 0.7:  # as they are, unless the picture was scaled
            h, w = int(h), int(w)
        top, left = (rng.uniform(0, height - h), rng.uniform(0, width - w)) if h % 1 else (
            int(rng.integers(0, height - h + 1)), int(rng.integers(0, width - w + 1)))  # fmt: skip
        flip = bool(rng.random() < 0.5)
        got = row_of(picture, (top, left, h, w, flip), size, colors, kind, bool(rng.random() < 0.5))
        down, across = weights(top, h, size[0]), weights(left, w, size[1])
        cut = picture[int(top) :, int(left) :][: down.shape[1], : across.shape[1]]
        right = np.einsum("yi,xj,ijc->yxc", down, across, cut)
        if flip:
            right = right[:, ::-1]
        right = right * np.array(factors[:channels]) + np.array(summands[:channels])
        near = {U8: 0.51, F32: 1e-3, F16: 0.5}[kind]  # half a level; rounding at 255 and at 765
        np.testing.assert_allclose(got.astype(float), right, atol=near, rtol=0 if kind == U8 else 1e-3)


def test_a_window_that_is_rounded_over_the_edge_reads_nothing_behind_it() -> None:
    """Lines behind the picture hold 255, and the picture 0."""
    over = np.nextafter(5.0, 6.0)
    whole = np.full((8, 8, 3), 255, np.uint8)
    memory = whole.reshape(-1)
    memory[: 5 * 5 * 3] = 0
    colors = np.array([1, 1, 1, 0, 0, 0, 0.3, 0.6, 0.1], np.float32)
    picture = memory[:75].reshape(5, 5, 3)
    for size in ((2, 2), (5, 5), (11, 11)):
        for window in ((0, 0, over, over, 0), (2.2, 2.2, over - 2.2, over - 2.2, 1), (2, 2, over - 2, over - 2, 0)):
            assert (row_of(picture, window, size, colors, F32, False) == 0).all()


def test_halves_are_numpys() -> None:
    """Float16 of all sizes, the middles between neighbours, and the next float32 on either side of these."""
    exact = np.arange(0, 1 << 16, 7, dtype=np.uint16).view(np.float16)
    exact = exact[np.isfinite(exact)]
    above = np.nextafter(exact, np.float16(np.inf)).astype(np.float32)
    middles = (exact.astype(np.float32) + np.where(np.isfinite(above), above, np.float32(65536))) / 2
    beside = [np.nextafter(middles, np.float32(to)) for to in (-np.inf, np.inf)]
    values = np.concatenate([exact, middles, *beside, [65519.996, 65520, -1e9, 1e-30]]).astype(np.float32)
    work, numbers = np.empty(work_floats(1, 1, 1, 1, False), np.float32), np.empty(work_numbers(1, 1), np.int64)
    window, jitter = np.array([0, 0, 1, 1, 0.0]), np.array([1, 1, 1, 0], np.float32)
    colors, row = np.zeros(9, np.float32), np.empty(3, np.uint16)
    black, out = np.zeros(3, np.uint8), (np.empty(0, np.uint8), np.empty(0, np.float32), row)
    got = np.empty(len(values) // 3 * 3, np.float16)
    for i in range(0, len(got), 3):
        colors[3:6] = values[i : i + 3]
        picture_row(black, (1, 1, 3), window, (1, 1), jitter, colors, F16, False, work, numbers, out)
        got[i : i + 3] = row.view(np.float16)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(got, values[: len(got)].astype(np.float16))


def test_windows_are_drawn_as_torchvision_does() -> None:
    """Shares of the area are uniform, ratios uniform in their logarithm, positions uniform; all within bounds."""
    decoder = Image(8, crop="random", scale=(0.1, 0.5), ratio=(0.5, 2.0), flip=True)
    assert decoder.augment is not None
    size, n = (3000, 3000), 4000
    found = np.empty((n, 5))
    jitter = np.empty(4, np.float32)
    for i in range(n):
        draw_picture(Draw(1, 0).key, i, size, RANDOM, decoder.augment.chance, found[i], jitter)
    top, left, height, width, flip = found.T
    assert min(top.min(), left.min()) >= 0
    assert max((top + height).max(), (left + width).max()) <= 3000
    for drawn, low, high in (
        (height * width / 9e6, 0.1, 0.5),
        (np.log(width / height), -np.log(2), np.log(2)),
        (top / (3000 - height), 0, 1),
        (left / (3000 - width), 0, 1),
    ):
        # Kolmogorov's distance; 1.95 / sqrt(n) is passed once in 1,000 times, and the seed is fixed.
        ranks = np.sort((drawn - low) / (high - low))
        assert np.abs(ranks - (np.arange(n) + 0.5) / n).max() < 1.95 / np.sqrt(n) + 1e-3
    assert abs(flip.mean() - 0.5) < 0.04
    # A strip has no window of these ratios: the largest one in the middle.
    draw_picture(0, 0, (10, 1000), RANDOM, decoder.augment.chance, found[0], jitter)
    assert found[0][:4].tolist() == [0, 490, 10, 20]
