"""The order of an epoch: a pure function of (seed, epoch, n), the same for every number of ranks.

An order is a sequence of n numbers at positions 0..n-1. Its `space` says what the numbers are:

    "id"     record ids, in key order        shuffle=False, "global"
    "place"  ordinals of records in the file  shuffle="block"; `index.by_offset[ordinal]` is the record id

Every number appears exactly once.

    False     position p -> record id p
    "global"  an exactly uniform permutation of the record ids
    "block"   blocks of neighbouring ordinals are permuted; `mix_blocks` consecutive blocks form a pool; inside a pool
              each block's records come in random order and the blocks take turns (kernels/permute.py draws the turns)

Pools of the block order for mix_blocks = 4 and 11 blocks, of which block 10 is short (its position is random, too):

    blocks in the file   | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | 9 |10|
    permuted             | 6 | 1 | 9 | 4 | 0 |10| 8 | 3 | 5 | 7 | 2 |
    pools                |------ 0 ------|------ 1 -----|---- 2 ----|

A tail of less than half a pool is divided evenly between the last two pools, because a pool of one block would not mix.
If there are several pools, the first one is cut into smaller ones that grow: a batch waits for its whole pool, and the
first batch of an epoch should not wait for 32 blocks. For mix_blocks = 32 and 100 blocks:

    pools in blocks      4 12 16 | 32 | 18 | 18
The short block runs out before the others of its pool: its records lie in the pool's first rounds.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pario.errors import OptionError
from pario.kernels import permute as kernels
from pario.options import ORDERS

#: The first pool of several begins with one of this fraction of `mix_blocks`, but no fewer than these blocks: fewer mix
#: too little, and take little less time. Every pool more costs a batch of the epoch, on average, 1 / blocks of its
#: mixing. (200,000 records of 3 KB, 294 blocks, batch 256: one whole pool 0.977, 4 12 16 0.976, 4 4 8 16 0.966.)
_FIRST_PART = 8
_FIRST_BLOCKS = 4


def records_per_block(mean_record_bytes: float, block_bytes: int) -> int:
    """Records of one block of about `block_bytes` bytes; at least one."""
    if not mean_record_bytes > 0:
        raise OptionError(f"mean_record_bytes must be above 0, got {mean_record_bytes!r}")
    return max(1, round(block_bytes / mean_record_bytes))


@dataclass(frozen=True)
class Pools:
    """The bounds of a block order's pools, by arithmetic without a table.

    Whole pools have `mix_blocks` blocks, except the last two; the first of several is cut into pools that grow. All
    blocks have `block_records` records, except the last one of the file; `short_at` is its position among the
    permuted blocks.
    """

    n: int
    block_records: int
    mix_blocks: int
    short_at: int

    @cached_property
    def blocks(self) -> int:
        return -(-self.n // self.block_records)

    @cached_property
    def short_records(self) -> int:
        """Records of the file's last block, 1..block_records."""
        return self.n - (self.blocks - 1) * self.block_records

    @cached_property
    def _whole(self) -> int:
        """Number of whole pools."""
        return -(-self.blocks // self.mix_blocks)

    @property
    def count(self) -> int:
        return len(self._cuts) + self._whole

    @property
    def most_records(self) -> int:
        """The most records that a pool can have."""
        return min(self.n, self.mix_blocks * self.block_records)

    @cached_property
    def _last_first_block(self) -> int:
        """First permuted block of the last pool."""
        first = (self._whole - 1) * self.mix_blocks
        tail = self.blocks - first
        if self._whole > 1 and 2 * tail < self.mix_blocks:
            first = self.blocks - (self.mix_blocks + tail) // 2
        return first

    @cached_property
    def _cuts(self) -> tuple[int, ...]:
        """Blocks at which the first whole pool is cut: each is four times the one before, and at most half of the pool.
        """
        if self._whole < 2:
            return ()
        first = max(_FIRST_BLOCKS, self.mix_blocks // _FIRST_PART)
        size = min(self.mix_blocks, self._last_first_block)
        return tuple(first << 2 * k for k in range((size // first).bit_length() // 2))

    @property
    def cut_first(self) -> int:
        """How many pools the first whole pool was cut into; 1 if it was not."""
        return len(self._cuts) + 1

    def first_of(self, records: int) -> int:
        """How many of those together have at least this many records, as has each one that follows. If not even all of
        them have: all of them."""
        for k, cut in enumerate(self._cuts):
            if (cut - 1) * self.block_records + self.short_records >= records:
                return k + 1
        return self.cut_first

    def block_bounds(self, pool: int) -> tuple[int, int]:
        """Permuted blocks [first, stop) of a pool."""
        if not 0 <= pool < self.count:
            raise IndexError(f"pool {pool} of {self.count}")
        cuts, whole, last = self._cuts, max(0, pool - len(self._cuts)), self._whole - 1
        first = self._last_first_block if whole == last else whole * self.mix_blocks
        if whole == last:
            return first, self.blocks
        stop = self._last_first_block if whole == last - 1 else first + self.mix_blocks
        return cuts[pool - 1] if 0 < pool <= len(cuts) else first, cuts[pool] if pool < len(cuts) else stop

    def _position_of_block(self, block: int) -> int:
        return block * self.block_records - (self.block_records - self.short_records) * (self.short_at < block)

    def bounds(self, pool: int) -> tuple[int, int]:
        """Positions [start, stop) of a pool."""
        first, stop = self.block_bounds(pool)
        return self._position_of_block(first), self._position_of_block(stop)

    def pool_of(self, position: int) -> int:
        """The pool that holds a position."""
        if not 0 <= position < self.n:
            raise IndexError(f"position {position} of {self.n}")
        short = self._position_of_block(self.short_at)
        if position < short + self.short_records:
            block = min(position // self.block_records, self.short_at)
        else:
            block = (position + self.block_records - self.short_records) // self.block_records
        if block >= self._last_first_block:
            return self.count - 1
        whole = min(block // self.mix_blocks, self._whole - 2)
        return len(self._cuts) + whole if whole else bisect_right(self._cuts, block)


class Order:
    """The contract of the three orders: `n`, `space` ("id" or "place"), `pools` (None without blocks), `ids`,
    `take`."""

    n: int
    space: str
    pools: Pools | None = None

    def ids(self, start: int, stop: int) -> np.ndarray:
        """i64[stop - start], the numbers at positions [start, stop)."""
        raise NotImplementedError

    def take(self, positions: np.ndarray) -> np.ndarray:
        """i64[k], the numbers at positions i64[k]."""
        raise NotImplementedError

    def _check(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.n:
            raise IndexError(f"positions [{start}, {stop}) of {self.n}")


class KeyOrder(Order):
    """shuffle=False: the records in key order."""

    space = "id"

    def __init__(self, n: int) -> None:
        self.n = n

    def ids(self, start: int, stop: int) -> np.ndarray:
        self._check(start, stop)
        return np.arange(start, stop, dtype=np.int64)

    def take(self, positions: np.ndarray) -> np.ndarray:
        return np.asarray(positions, np.int64)


class GlobalOrder(Order):
    """shuffle="global": each of the n! orders with the same probability (up to the 2^64 keys).

    Holds a table of 4 bytes per record (8 from 2^32 records on).
    """

    space = "id"

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        self.n = n
        self.table = np.empty(n, np.uint32 if n < 1 << 32 else np.uint64)
        kernels.permute(_key(seed, epoch, kernels.STREAM_TABLE), self.table)
        self.table.flags.writeable = False

    def ids(self, start: int, stop: int) -> np.ndarray:
        self._check(start, stop)
        return self.table[start:stop].astype(np.int64)

    def take(self, positions: np.ndarray) -> np.ndarray:
        return self.table[positions].astype(np.int64)


class BlockOrder(Order):
    """shuffle="block": blocks of neighbouring ordinals, permuted, and mixed in pools.

    Holds the permutation of the blocks and the most recent pool.

    blocks : i64[number of blocks], read-only: the file's block numbers in permuted order
    records_key, rounds_key : u64, keys of the random streams inside the pools
    """

    space = "place"

    def __init__(self, n: int, seed: int, epoch: int, block_records: int, mix_blocks: int) -> None:
        self.n = n
        count = -(-n // block_records)
        table = np.empty(count, np.uint32 if count < 1 << 32 else np.uint64)
        kernels.permute(_key(seed, epoch, kernels.STREAM_BLOCKS), table)
        self.blocks = table.astype(np.int64)
        self.blocks.flags.writeable = False
        short_at = int(np.flatnonzero(self.blocks == count - 1)[0]) if count else 0
        self.pools: Pools = Pools(n, block_records, mix_blocks, short_at)
        self.records_key = _key(seed, epoch, kernels.STREAM_RECORDS)
        self._rounds = _key(seed, epoch, kernels.STREAM_ROUNDS)
        self._last: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    def rounds_key(self, pool: int) -> np.uint64:
        """u64 key of the pool's rounds."""
        return np.uint64(kernels.absorb(self._rounds, pool))

    def layout(self, pool: int) -> tuple[np.ndarray, int, int]:
        """(block numbers i64[m] of a pool, index of the short one or -1, bits that number them)."""
        first, stop = self.pools.block_bounds(pool)
        short = self.pools.short_at - first
        if not 0 <= short < stop - first or self.pools.short_records == self.pools.block_records:
            short = -1
        return self.blocks[first:stop], short, max(0, stop - first - 1).bit_length()

    def _pool(self, pool: int) -> np.ndarray:
        """i64[records of the pool], its ordinals in order."""
        known, places = self._last  # one tuple, so that threads never see one pool's number with another's ordinals
        if known == pool:
            return places
        start, stop = self.pools.bounds(pool)
        blocks, short, bits = self.layout(pool)
        size = self.pools.block_records
        places = np.empty(stop - start, np.int64)
        scratch = np.empty((len(blocks), size), np.uint32)
        short_records = self.pools.short_records
        kernels.pool_order(
            self.records_key, self.rounds_key(pool), blocks, size, short, short_records, bits, scratch, places
        )
        self._last = (pool, places)
        return places

    def ids(self, start: int, stop: int) -> np.ndarray:
        self._check(start, stop)
        out = np.empty(stop - start, np.int64)
        at = start
        while at < stop:
            pool = self.pools.pool_of(at)
            first, last = self.pools.bounds(pool)
            end = min(stop, last)
            out[at - start : end - start] = self._pool(pool)[at - first : end - first]
            at = end
        return out

    def take(self, positions: np.ndarray) -> np.ndarray:
        # Computes all pools between the first and the last position: meant for positions close together.
        positions = np.asarray(positions, np.int64)
        if not len(positions):
            return np.empty(0, np.int64)
        low = int(positions.min())
        return self.ids(low, int(positions.max()) + 1)[positions - low]


def _key(seed: int, epoch: int, stream: int) -> np.uint64:
    # Always np.uint64: a plain int below 2^63 would compile a second version of every kernel.
    return np.uint64(kernels.stream_key(np.uint64(seed), np.uint64(epoch), np.uint64(stream)))


def epoch_order(
    shuffle: bool | str, n: int, *, seed: int = 0, epoch: int = 0, block_records: int = 1, mix_blocks: int = 1
) -> Order:
    """The order of one epoch.

    Parameters
    ----------
    shuffle : False, "global" or "block"
    n : records
    seed, epoch : integers in [0, 2**64)
    block_records : records of one block (only "block")
    mix_blocks : blocks of one pool, a power of two (only "block")
    """
    if not (shuffle is False or (isinstance(shuffle, str) and shuffle in ORDERS)):
        raise OptionError(f'shuffle must be False, "global" or "block", got {shuffle!r}')
    for name, value in (("seed", seed), ("epoch", epoch)):
        try:
            good = 0 <= operator.index(value) < 1 << 64
        except TypeError:
            good = False
        if not good:
            raise OptionError(f"{name} must be an integer of at least 0 and below 2**64, got {value!r}")
    if n < 0:
        raise OptionError(f"n must be at least 0, got {n!r}")
    if shuffle is False:
        return KeyOrder(n)
    if shuffle == "global":
        return GlobalOrder(n, seed, epoch)
    if block_records < 1:
        raise OptionError(f"block_records must be at least 1, got {block_records!r}")
    if mix_blocks < 1 or mix_blocks & (mix_blocks - 1):
        raise OptionError(f"mix_blocks must be a power of two, got {mix_blocks!r}")
    return BlockOrder(n, seed, epoch, block_records, mix_blocks)
