"""Chunks and blocks of a file."""

from __future__ import annotations

import numpy as np
import pytest

from pario.errors import OptionError
from pario.tiers.grid import BLOCK_BYTES, Grid


@pytest.mark.parametrize("file_bytes", [1, BLOCK_BYTES, BLOCK_BYTES + 1, 10 * BLOCK_BYTES, 10 * BLOCK_BYTES + 7])
@pytest.mark.parametrize("chunk_blocks", [1, 3, 16])
def test_chunks_and_blocks_cover_the_file_once(file_bytes: int, chunk_blocks: int) -> None:
    grid = Grid(file_bytes, chunk_blocks * BLOCK_BYTES).checked()
    spans = [grid.span(chunk) for chunk in range(grid.chunks)]
    assert [offset for offset, _ in spans] == [i * grid.chunk_bytes for i in range(grid.chunks)]
    assert sum(nbytes for _, nbytes in spans) == file_bytes
    blocks = [block for chunk in range(grid.chunks) for block in range(*grid.blocks_of(chunk))]
    assert blocks == list(range(grid.blocks))
    for chunk in (-1, grid.chunks):
        with pytest.raises(IndexError):
            grid.span(chunk)


def test_chunks_of_extents() -> None:
    grid = Grid(10 * BLOCK_BYTES, 2 * BLOCK_BYTES)
    offsets = np.array([0, 2 * BLOCK_BYTES - 1, 9 * BLOCK_BYTES, 5 * BLOCK_BYTES])
    nbytes = np.array([1, 2, BLOCK_BYTES, 0])
    random_ = np.random.default_rng(0)
    assert grid.chunks_at(offsets, nbytes).tolist() == [0, 1, 2, 4]
    assert grid.chunks_at(offsets[:0], nbytes[:0]).tolist() == []
    # An extent that ends with its chunk does not touch the next one, which may not exist.
    assert [each.tolist() for each in grid.ends_of(offsets, nbytes)] == [[0, 0, 4, 2], [0, 1, 4, 2]]
    assert [each.tolist() for each in grid.ends_of(np.array([grid.file_bytes]), np.array([0]))] == [[4], [4]]
    whole = np.array([grid.chunk_bytes, 0]), np.array([grid.chunk_bytes, 2 * grid.chunk_bytes])
    assert [each.tolist() for each in grid.ends_of(*whole)] == [[1, 0], [1, 1]], "what ends with a chunk needs no other"
    begins = random_.integers(0, grid.file_bytes, 40)
    sizes = np.minimum(random_.integers(1, 3 * BLOCK_BYTES, 40), grid.file_bytes - begins)
    for i in range(1, 40):
        expected = {at // grid.chunk_bytes for b, n in zip(begins[:i], sizes[:i], strict=True) for at in (b, b + n - 1)}
        middle = {c for b, n in zip(begins[:i], sizes[:i], strict=True)
                  for c in range(b // grid.chunk_bytes, (b + n - 1) // grid.chunk_bytes + 1)}  # fmt: skip
        assert set(grid.chunks_at(begins[:i], sizes[:i])) == expected | middle


@pytest.mark.parametrize(("file_bytes", "chunk_bytes"), [(0, BLOCK_BYTES), (5, 0), (5, BLOCK_BYTES + 1), (5, -4)])
def test_no_grid(file_bytes: int, chunk_bytes: int) -> None:
    with pytest.raises(OptionError):
        Grid(file_bytes, chunk_bytes).checked()
