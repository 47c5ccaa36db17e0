"""What was delivered, told from the delivered records alone: each record carries its number.

A raw record begins with its number, u64 little-endian. A picture's first 16 rows are 16 squares, black or white: the
bits of its number, the lowest first, which survive JPEG.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["PIXELS", "Delivered", "Truth", "judge", "mixing", "numbers_of", "stamp"]

PIXELS = 256
_SQUARE = 16
_CELL = 32
#: A mean of 32 x 32 pixels differs by less between decoders; between two pictures some mean differs by far more.
_TOLERANCE = 4.0


def stamp(record: np.ndarray, number: int) -> None:
    """Write the record's number into it. record: u8[n] (raw) or u8[256, 256, 3] (a picture)."""
    if record.ndim == 1:
        record[:8] = np.frombuffer(np.uint64(number).tobytes(), np.uint8)
    else:
        bits = (number >> np.arange(PIXELS // _SQUARE)) & 1
        record[:_SQUARE] = np.repeat(255 * bits, _SQUARE).astype(np.uint8)[None, :, None]


def numbers_of(batch: np.ndarray) -> np.ndarray:
    """i64[b]: the numbers of these records. batch: u8[b, n] or u8[b, 256, 256, 3]."""
    if batch.ndim == 2:
        return np.ascontiguousarray(batch[:, :8]).view("<i8")[:, 0]
    strip = batch[:, 4:12].reshape(len(batch), 8, PIXELS // _SQUARE, _SQUARE, 3)
    bits = strip[:, :, :, 4:12].mean((1, 3, 4)) > 128
    return bits @ (1 << np.arange(PIXELS // _SQUARE))


def _digests(batch: np.ndarray) -> np.ndarray:
    """Raw: u32[b], a checksum of all bytes. Pictures: f32[b, 192], means of squares."""
    if batch.ndim == 2:
        return np.array([zlib.crc32(row) for row in np.ascontiguousarray(batch)], np.uint32)
    cells = batch.reshape(len(batch), PIXELS // _CELL, _CELL, PIXELS // _CELL, _CELL, 3)
    return cells.mean((2, 4), dtype=np.float32).reshape(len(batch), -1)


class Truth:
    """What the records of a set look like. digests: of all records, in the order of their numbers."""

    def __init__(self, digests: np.ndarray) -> None:
        self.digests = digests

    @staticmethod
    def of(records: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([_digests(record[None]) for record in records])

    def right(self, batch: np.ndarray) -> np.ndarray:
        """bool[b]: which records of the batch are, to the byte or the pixel, the ones whose number they bear."""
        numbers = numbers_of(batch)
        known = (numbers >= 0) & (numbers < len(self.digests))
        found, expected = _digests(batch), self.digests[np.where(known, numbers, 0)]
        if batch.ndim == 2:
            return known & (found == expected)
        return known & (np.abs(found - expected).max(1) < _TOLERANCE)


def mixing(numbers: np.ndarray, n: int) -> float:
    """0: batches of neighbours only, 1: as mixed as a uniform permutation; tests/test_plan_mixing.py defines it.

    numbers: i64[batches, b], positions along the data set of n records.
    """
    within = np.var(numbers.astype(np.float64), axis=1, ddof=1).mean()
    return float(min(1.0, within / np.var(np.arange(n), ddof=1)))


@dataclass(frozen=True)
class Delivered:
    """What the ranks got in one epoch.

    missing, repeated : records that nobody got; deliveries beyond the first of a record
    wrong : delivered records whose bytes are not those of the record whose number they bear
    records, batches : per rank
    """

    missing: int
    repeated: int
    wrong: int
    mixing: float | None
    records: list[int]
    batches: list[int]

    @property
    def exactly_once(self) -> bool:
        return not (self.missing or self.repeated or self.wrong)


def judge(ranks: Sequence[Sequence[Sequence[int]]], n: int, wrong: int = 0) -> Delivered:
    """ranks[r][k]: numbers of the records of batch k of rank r."""
    everything = np.array([i for rank in ranks for batch in rank for i in batch], np.int64)
    inside = everything[(everything >= 0) & (everything < n)]
    times = np.bincount(inside, minlength=n)
    whole = min((len(rank) for rank in ranks), default=0)
    steps = [[i for rank in ranks for i in rank[k]] for k in range(whole)]
    full = [step for step in steps if len(step) == max(map(len, steps))]
    mixed = mixing(np.array(full), n) if full and len(full[0]) > 1 else None
    return Delivered(
        int((times == 0).sum()),
        int((times - 1).clip(0).sum()) + len(everything) - len(inside),
        wrong,
        mixed,
        [sum(map(len, rank)) for rank in ranks],
        [len(rank) for rank in ranks],
    )
