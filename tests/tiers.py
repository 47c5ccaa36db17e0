"""One data file for the tests of the tiers: its chunks, its bytes, and what a tier says of them."""

from __future__ import annotations

import queue

import numpy as np

from pario.tiers.base import AnyTier
from pario.tiers.grid import BLOCK_BYTES, Grid
from pario.tiers.staged import StagedFetcher

CHUNKS = 5
GRID = Grid((CHUNKS - 1) * 8 * BLOCK_BYTES + 1234, 8 * BLOCK_BYTES)
DATA = np.random.default_rng(0).integers(1, 256, GRID.file_bytes, dtype=np.uint8)  # no zeros, which holes hold


def chunk_of(chunk: int, data: np.ndarray = DATA, grid: Grid = GRID) -> np.ndarray:
    offset, nbytes = grid.span(chunk)
    return data[offset : offset + nbytes]


def read(tier: AnyTier, offset: int, nbytes: int) -> bytes | None:
    out = np.full(nbytes, 0xAA, dtype=np.uint8)
    return out.tobytes() if tier.read(offset, out) else None


def brought(fetcher: StagedFetcher, chunk: int) -> None:
    """Bring a chunk, and wait until it is here."""
    arrivals: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    fetcher.bring(chunk, arrivals.put)
    assert arrivals.get(timeout=30) is None
