"""The codes of GIFs are counted as an encoder in plain Python has written them."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hostile import codes, gif, gif_frame

from pario.decode.measured import BadImage, check
from pario.kernels.gif import gif_codes


def encoded(pixels: list[int], size: int, *, most: int | None = None) -> tuple[bytes, int, int]:
    """(LZW data, clear codes, other codes). size : bits of a pixel; most : codes between two clears; None: as many as
    fill the table, out of which longer and longer strings come"""
    clear = 1 << size
    bits, at, clears, others = 0, 0, 0, 0
    table: dict[tuple[int, ...], int] = {}
    width, count = size + 1, 0

    def put(code: int) -> None:
        nonlocal bits, at
        bits |= code << at
        at += width

    k = 0
    while k < len(pixels):
        if not clears or count == most or clear + 2 + len(table) == 4096:
            put(clear)
            clears, width, count, table = clears + 1, size + 1, 0, {}
        string = (pixels[k],)
        while most is None and k + len(string) < len(pixels) and (*string, pixels[k + len(string)]) in table:
            string = (*string, pixels[k + len(string)])
        put(table.get(string, string[0]))
        others, count = others + 1, count + 1
        if count > 1 and clear + 2 + len(table) < 4096 and clear + 1 + count == 1 << width:
            width += 1  # the reader's table has one string fewer than the writer's
        k += len(string)
        if k < len(pixels):
            table[(*string, pixels[k])] = clear + 1 + count
    put(clear + 1)
    return bits.to_bytes(at // 8 + 1, "little"), clears, others


def image(data: bytes, size: int, *, before: bytes = b"", local: bool = False) -> np.ndarray:
    frame = bytearray(gif_frame(64, 64, data))
    frame[10] = size
    if local:
        frame[9] = 0x80 | 2
        frame[10:10] = bytes(24)
    return np.frombuffer(gif(64, 64, before, bytes(frame)), np.uint8)


@pytest.mark.parametrize("size", range(2, 9))
def test_codes_are_counted(size: int) -> None:
    rng = random.Random(size)
    for case in range(6):
        few = rng.randrange(1, 1 << size)
        pixels = [rng.randrange(few) for _ in range((64 * 64, 700, 1)[case % 3])]
        most = None if case < 3 else (1 << size) - 2
        data, clears, others = encoded(pixels, size, most=most)
        before = b"!\xf9\x04\0\0\0\0\0" + b"!\xfe\x02hi\0" if case % 2 else b""
        file = image(data, size, before=before, local=case == 5)
        assert gif_codes(file) == (clears, others)
        check(file)  # encoders that do not compress are none that are hostile
        for cut in rng.sample(range(len(file)), min(40, len(file))):
            found = gif_codes(file[:cut])
            assert found[0] <= clears
            assert found[1] <= others + 1


def test_codes_that_clear_too_often_are_refused() -> None:
    for data in (codes(3, 4) * 10_001, codes(3, 4, 0, 1) * 10_001):
        with pytest.raises(BadImage, match=r"80,008 of [0-9,]+ codes clear the codec's table"):
            check(image(data, 2))
    assert gif_codes(image(codes(3, 4, 0, 1) * 50, 2)) == (400, 800)
    check(image(codes(3, 4, 0, 1) * 10_000, 2))
