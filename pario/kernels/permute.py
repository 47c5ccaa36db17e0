"""Random numbers and permutations that never change, and the shares of a block-shuffled pool.

This module implements the generator itself, because an order must not change with the version of a library:

* SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014) turns (seed, epoch,
  stream, index) into a key and a key into the state of
* xoshiro256++ (Blackman, Vigna: Scrambled linear pseudorandom number generators, ACM TOMS 47, 2021), and
* Lemire's multiply-and-reject (Fast random integer generation in an interval, ACM TOMACS 29, 2019) makes integers
  below a bound without bias.

A whole-dataset permutation has a table: no permutation without one is exactly uniform.

Signed and unsigned integers must not meet in one expression: Numba would turn both into floats. Hence the conversions,
of arguments, too: a u64 that went through Python returns as i64 if it is below 2^63.
"""

from __future__ import annotations

import numpy as np

from pario.kernels.jit import kernel

_U = np.uint64
_GAMMA = _U(0x9E3779B97F4A7C15)
_MIX1 = _U(0xBF58476D1CE4E5B9)
_MIX2 = _U(0x94D049BB133111EB)
_LOW32 = _U(0xFFFFFFFF)
_ZERO, _ONE = _U(0), _U(1)
_2TO32 = _U(1 << 32)
_S17, _S23, _S27, _S30, _S31, _S32, _S45, _S64 = (_U(i) for i in (17, 23, 27, 30, 31, 32, 45, 64))

#: The purposes of keys; different streams of one (seed, epoch) are independent.
STREAM_TABLE = 1  # the permutation of all records
STREAM_BLOCKS = 2  # the permutation of the blocks
STREAM_RECORDS = 3  # the records inside one block; index = number of the block in the file
STREAM_ROUNDS = 4  # the shift of one round of a pool; indices = pool, round
STREAM_SPLIT = 5  # the permutation of the records that a split cuts
STREAM_MIXED = 6  # one pass through a source of a mixture, in place of the epoch; index = number of the source


@kernel
def mix64(z):
    """The finalizer of SplitMix64: a bijection of u64 in which every input bit moves every output bit."""
    z = _U(z)
    z = (z ^ (z >> _S30)) * _MIX1
    z = (z ^ (z >> _S27)) * _MIX2
    return z ^ (z >> _S31)


@kernel
def absorb(key, word):
    """u64 key of (key, word); different words give different keys."""
    return mix64((_U(key) ^ _U(word)) + _GAMMA)


@kernel
def stream_key(seed, epoch, stream):
    """u64 key of one stream of random numbers."""
    return absorb(absorb(absorb(_ZERO, seed), epoch), stream)


@kernel
def _rotate(x, left):
    return (x << left) | (x >> (_S64 - left))


@kernel
def _start(key):
    """State of xoshiro256++: four outputs of SplitMix64."""
    key = _U(key)
    s0 = mix64(key + _GAMMA)
    s1 = mix64(key + _GAMMA + _GAMMA)
    s2 = mix64(key + _GAMMA + _GAMMA + _GAMMA)
    s3 = mix64(key + _GAMMA + _GAMMA + _GAMMA + _GAMMA)
    return s0, s1, s2, s3


@kernel
def _next(s0, s1, s2, s3):
    """xoshiro256++: (random u64, next state)."""
    out = _rotate(s0 + s3, _S23) + s0
    t = s1 << _S17
    s2 ^= s0
    s3 ^= s1
    s1 ^= s2
    s0 ^= s3
    s2 ^= t
    s3 = _rotate(s3, _S45)
    return out, s0, s1, s2, s3


@kernel
def _below(bound, s0, s1, s2, s3):
    """(uniform u64 in [0, bound), next state); bound >= 1."""
    if bound < _2TO32:
        x, s0, s1, s2, s3 = _next(s0, s1, s2, s3)
        product = (x >> _S32) * bound
        low = product & _LOW32
        if low < bound:
            reject = (_2TO32 - bound) % bound
            while low < reject:
                x, s0, s1, s2, s3 = _next(s0, s1, s2, s3)
                product = (x >> _S32) * bound
                low = product & _LOW32
        return product >> _S32, s0, s1, s2, s3
    # Beyond 32 bits the product needs 128: draw as many bits as the bound has, and again while they are too large.
    mask = bound - _ONE
    for shift in (1, 2, 4, 8, 16, 32):
        mask |= mask >> _U(shift)
    x, s0, s1, s2, s3 = _next(s0, s1, s2, s3)
    x &= mask
    while x >= bound:
        x, s0, s1, s2, s3 = _next(s0, s1, s2, s3)
        x &= mask
    return x, s0, s1, s2, s3


@kernel
def permute(key, out):
    """out int[n] <- a uniformly random permutation of 0..n-1: Fisher and Yates' shuffle, built from the inside out
    (Knuth, TAOCP 2, 3.4.2), so that there is one random access per element and no table to fill before.
    """
    s0, s1, s2, s3 = _start(key)
    for i in range(out.shape[0]):
        j, s0, s1, s2, s3 = _below(_U(i) + _ONE, s0, s1, s2, s3)
        k = np.int64(j)
        out[i] = out[k]
        out[k] = i


@kernel
def _reverse(i, bits):
    """The lowest `bits` bits of i in reverse order."""
    out = 0
    for _ in range(bits):
        out = (out << 1) | (i & 1)
        i >>= 1
    return out


# ---------------------------------------------------------------------------------------------------------------------
# One pool of the block order.
#
# `blocks` i64[m] are the numbers (in the file) of the pool's blocks; block k has `block_records` records, only block
# `short` (-1: none) has `short_records`. In each round every block that still has records gives one. The blocks take
# turns in the order reverse(0) ^ shift, reverse(1) ^ shift, … of `bits` bits (skipping numbers without a block), with a
# new random `shift` in each round. This is the van der Corput sequence with a digital shift: any aligned run of 2^j
# turns has one block out of each 2^-j of the pool's blocks (m a power of two).


@kernel
def pool_order(records_key, rounds_key, blocks, block_records, short, short_records, bits, scratch, out):
    """out i64[pool records] <- ordinals of one pool, in order. scratch u32[m, block_records]."""
    m = blocks.shape[0]
    for k in range(m):
        size = short_records if k == short else block_records
        permute(absorb(records_key, blocks[k]), scratch[k, :size])
    at = 0
    for t in range(block_records):
        shift = np.int64(absorb(rounds_key, t) & _U((1 << bits) - 1))
        for i in range(1 << bits):
            k = _reverse(i, bits) ^ shift
            if k < m and not (k == short and t >= short_records):
                out[at] = blocks[k] * block_records + np.int64(scratch[k, t])
                at += 1
    return at


@kernel
def _advance(count, taken, t, i, rounds_key, m, block_records, short, short_records, bits):
    """Advance by `count` records in a pool that is in round t before turn i; taken i32[m] counts each block's records.
    Whole rounds cost one addition per block. Returns the new (t, i)."""
    turns = 1 << bits
    while count > 0:
        alive = m - 1 if short >= 0 and t >= short_records else m
        if i == 0 and count >= alive:
            whole = count // alive
            if short >= 0 and t < short_records:
                whole = min(whole, short_records - t)
            whole = min(whole, block_records - t)
            for k in range(m):
                if not (k == short and t >= short_records):
                    taken[k] += whole
            t += whole
            count -= whole * alive
            continue
        shift = np.int64(absorb(rounds_key, t) & _U(turns - 1))
        while i < turns and count > 0:
            k = _reverse(i, bits) ^ shift
            if k < m and not (k == short and t >= short_records):
                taken[k] += 1
                count -= 1
            i += 1
        if i == turns:
            i = 0
            t += 1
    return t, i


@kernel
def _dealt_row(at, before, taken, pool):
    """The row of record `at` of the node's run of a sorted piece in the node's table; -1 if only another seat's records
    are wanted.

    The rows of a step are dealt in turn: seat k gets rows k, k + seats, k + 2 seats, ... This determines how many of
    the `taken` rows of this piece, which follow `before` rows of others, each seat gets. So a node has one run of the
    sorted piece, which is dealt to its seats in turn: full rounds, and then those that get one more.
    """
    seats, first, size, only = pool[SEATS], pool[NODE_SEAT], pool[NODE_SIZE], pool[ONLY]
    base, extra = before // seats, before % seats
    more, rest = (before + taken) // seats - base, (before + taken) % seats
    rounds = more if extra <= rest else more - 1
    if at < rounds * size:
        seat = first + at % size
        turn = at // size
    else:
        turn, left = rounds, at - rounds * size
        # Seats from `extra` to `rest` get one more; if that goes over the last seat, those at both ends.
        head = 0 if extra <= rest else max(0, min(rest, first + size) - first)
        seat = first + left if left < head else max(extra, first) + left - head
    if only < 0:
        return (seat - first) * pool[BATCH_SIZE] + base + (1 if seat < extra else 0) + turn
    return base + (1 if seat < extra else 0) + turn if seat == only else -1


#: The numbers that describe a pool, and a node's part of its steps. `skip` counts the records of the pool before the
#: first piece, which belongs to step `first_step`. `only`: the one seat of the node whose records are wanted, or -1.
POOL = (
    "block_records", "short", "short_records", "bits", "skip", "first_step", "batch_size", "seats", "node_seat",
    "node_size", "only",
)  # fmt: skip
BLOCK_RECORDS, SHORT, SHORT_RECORDS, BITS, SKIP, FIRST_STEP, BATCH_SIZE, SEATS, NODE_SEAT, NODE_SIZE, ONLY = range(
    len(POOL)
)


@kernel
def pool_rows(keys, pool, blocks, ascending, pieces, perm, mark, taken, cursor, numbers, step, row):
    """The records of one pool that belong to one node, by ordinal.

    keys u64[2] of the records in blocks and of the rounds; pool i64[11]: POOL names its numbers.
    blocks i64[m], ascending i64[m] (argsort of blocks).
    pieces i64[s, 4]: for each step that takes from this pool (in order): records taken, rows of the step before them,
    first and last + 1 row of the node among them (counted from the beginning of the step).
    scratch: perm u32[block_records], mark i32[block_records], taken i32[s + 1, m], cursor i32[s, m].
    out: numbers i64, step i64, row i32; returns their number.

    Work: s * m, plus a few operations per record of the blocks in which the node has records. No sort: walking a block
    by ordinal and giving each record to its step leaves every step's records in ordinal order.
    """
    records_key, rounds_key = keys[0], keys[1]
    block_records, short, short_records, bits = pool[BLOCK_RECORDS], pool[SHORT], pool[SHORT_RECORDS], pool[BITS]
    skip, first_step = pool[SKIP], pool[FIRST_STEP]
    m = blocks.shape[0]
    count = pieces.shape[0]
    for k in range(m):
        taken[0, k] = 0
    t, i = _advance(skip, taken[0], 0, 0, rounds_key, m, block_records, short, short_records, bits)
    for c in range(count):
        for k in range(m):
            taken[c + 1, k] = taken[c, k]
        t, i = _advance(pieces[c, 0], taken[c + 1], t, i, rounds_key, m, block_records, short, short_records, bits)
        at = pieces[c, 1]
        for k in range(m):
            cursor[c, k] = at
            at += taken[c + 1, k] - taken[c, k]

    written = 0
    for b in range(m):
        k = ascending[b]
        mine = False
        for c in range(count):
            first = cursor[c, k]
            last = first + taken[c + 1, k] - taken[c, k]
            if first < pieces[c, 3] and last > pieces[c, 2] and last > first:
                mine = True
                break
        if not mine:
            continue
        size = short_records if k == short else block_records
        permute(absorb(records_key, blocks[k]), perm[:size])
        for j in range(taken[0, k]):
            mark[perm[j]] = -1
        for c in range(count):
            for j in range(taken[c, k], taken[c + 1, k]):
                mark[perm[j]] = c
        for j in range(taken[count, k], size):
            mark[perm[j]] = -1
        first_record = blocks[k] * block_records
        for j in range(size):
            c = mark[j]
            if c < 0:
                continue
            r = cursor[c, k]
            cursor[c, k] = r + 1
            if r >= pieces[c, 2] and r < pieces[c, 3]:
                at = _dealt_row(r - pieces[c, 2], pieces[c, 1], pieces[c, 0], pool)
                if at >= 0:
                    numbers[written] = first_record + j
                    step[written] = first_step + c
                    row[written] = at
                    written += 1
    return written


@kernel
def pool_rows_small(keys, pool, blocks, ascending, pieces, perm, step_of, row_of, piece, numbers, step, row):
    """Like `pool_rows`, for steps shorter than a round, where its table of s * m counts would outgrow the pool.

    scratch: perm u32[m, block_records], step_of i64[m, block_records], row_of i32[m, block_records],
    piece i64[longest piece]. Work: a few operations per record of the pool, and an insertion sort of each piece.
    """
    records_key, rounds_key = keys[0], keys[1]
    block_records, short, short_records, bits = pool[BLOCK_RECORDS], pool[SHORT], pool[SHORT_RECORDS], pool[BITS]
    skip, first_step = pool[SKIP], pool[FIRST_STEP]
    m = blocks.shape[0]
    for k in range(m):
        size = short_records if k == short else block_records
        permute(absorb(records_key, blocks[k]), perm[k, :size])
        for j in range(size):
            row_of[k, j] = -1

    turns = 1 << bits
    c = 0
    filled = 0
    for t in range(block_records):
        if c >= pieces.shape[0]:
            break
        shift = np.int64(absorb(rounds_key, t) & _U(turns - 1))
        for i in range(turns):
            k = _reverse(i, bits) ^ shift
            if k >= m or (k == short and t >= short_records):
                continue
            if skip > 0:
                skip -= 1
                continue
            if c >= pieces.shape[0]:
                break
            value = k * block_records + np.int64(perm[k, t])
            at = filled
            while at > 0 and piece[at - 1] > value:
                piece[at] = piece[at - 1]
                at -= 1
            piece[at] = value
            filled += 1
            if filled == pieces[c, 0]:
                for r in range(filled):
                    in_step = pieces[c, 1] + r
                    if in_step >= pieces[c, 2] and in_step < pieces[c, 3]:
                        owner = piece[r] // block_records
                        j = piece[r] - owner * block_records
                        step_of[owner, j] = first_step + c
                        row_of[owner, j] = _dealt_row(in_step - pieces[c, 2], pieces[c, 1], pieces[c, 0], pool)
                filled = 0
                c += 1

    written = 0
    for b in range(m):
        k = ascending[b]
        size = short_records if k == short else block_records
        first_record = blocks[k] * block_records
        for j in range(size):
            if row_of[k, j] >= 0:
                numbers[written] = first_record + j
                step[written] = step_of[k, j]
                row[written] = row_of[k, j]
                written += 1
    return written
