"""Orders: published values of the generators, uniformity, and the block order from its definition."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from pario.errors import OptionError
from pario.kernels import permute as kernels
from pario.plan.epoch import Pools, epoch_order, records_per_block

MASK = (1 << 64) - 1
SETTINGS = settings(max_examples=80, deadline=None, derandomize=True)


# The generators ------------------------------------------------------------------------------------------------------


@njit
def run_xoshiro(state, out):
    """out u64[k] <- the next k numbers of state u64[4]."""
    s0, s1, s2, s3 = state[0], state[1], state[2], state[3]
    for i in range(out.shape[0]):
        out[i], s0, s1, s2, s3 = kernels._next(s0, s1, s2, s3)


@njit
def bounded(key, bound, out):
    """out u64[k] <- uniform integers in [0, bound) of the stream `key`."""
    s0, s1, s2, s3 = kernels._start(key)
    for i in range(out.shape[0]):
        out[i], s0, s1, s2, s3 = kernels._below(bound, s0, s1, s2, s3)


def mix64(z):
    """SplitMix64's finalizer in Python's integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


class Xoshiro:
    """xoshiro256++ in Python's integers, seeded as in kernels/permute.py."""

    def __init__(self, key):
        self.s = [mix64((key + i * 0x9E3779B97F4A7C15) & MASK) for i in range(1, 5)]

    def next(self):
        s = self.s
        out = (self.left(s[0] + s[3] & MASK, 23) + s[0]) & MASK
        t = s[1] << 17 & MASK
        s[2] ^= s[0]
        s[3] ^= s[1]
        s[1] ^= s[2]
        s[0] ^= s[3]
        s[2] ^= t
        s[3] = self.left(s[3], 45)
        return out

    @staticmethod
    def left(x, k):
        return (x << k | x >> (64 - k)) & MASK

    def below(self, bound):
        if bound < 1 << 32:
            while True:
                product = (self.next() >> 32) * bound
                if product % (1 << 32) >= (1 << 32) % bound:
                    return product >> 32
        while True:
            x = self.next() & ((1 << (bound - 1).bit_length()) - 1)
            if x < bound:
                return x


def key_of(*words):
    key = 0
    for word in words:
        key = mix64(((key ^ word) + 0x9E3779B97F4A7C15) & MASK)
    return key


def test_splitmix64_gives_the_published_numbers():
    gamma = 0x9E3779B97F4A7C15
    outs = [int(kernels.mix64(np.uint64(1234567 + i * gamma & MASK))) for i in range(1, 6)]
    assert outs == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_xoshiro256_gives_the_published_numbers():
    state, out = np.array([1, 2, 3, 4], np.uint64), np.empty(10, np.uint64)
    run_xoshiro(state, out)
    assert out.tolist() == [
        41943041,
        58720359,
        3588806011781223,
        3591011842654386,
        9228616714210784205,
        9973669472204895162,
        14011001112246962877,
        12406186145184390807,
        15849039046786891736,
        10450023813501588000,
    ]


@pytest.mark.parametrize("bound", [1, 2, 3, 1000, 2**31 + 1, 2**32 - 1, 2**32, 2**32 + 1, 2**63 - 1, 2**63 + 3, MASK])
@pytest.mark.parametrize("key", [0, 5, MASK])
def test_bounded_integers_against_python(bound, key):
    out = np.empty(200, np.uint64)
    bounded(np.uint64(key), np.uint64(bound), out)
    random = Xoshiro(key)
    assert out.tolist() == [random.below(bound) for _ in range(200)]


def test_bounded_integers_are_uniform():
    for bound in (3, 10, 3 * 2**62):  # the last one goes through the 64-bit way
        out = np.empty(30_000, np.uint64)
        bounded(np.uint64(9), np.uint64(bound), out)
        parts = min(bound, 12)
        counts = np.bincount([int(x) * parts // bound for x in out.tolist()], minlength=parts)
        assert chi2(counts) < CRITICAL[parts - 1]


#: 99.9 % points of the chi-square distribution, by degrees of freedom (tables).
CRITICAL = {2: 13.82, 9: 27.88, 11: 31.26, 23: 49.73, 119: 172.7}


def chi2(counts):
    expected = counts.sum() / len(counts)
    return float(((counts - expected) ** 2 / expected).sum())


# Uniformity ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "draws"), [(4, 24_000), (5, 60_000)])
def test_every_permutation_is_as_likely_as_any_other(n, draws):
    number = {p: i for i, p in enumerate(itertools.permutations(range(n)))}
    for dtype in (np.uint32, np.uint64):
        out = np.empty(n, dtype)
        counts = np.zeros(len(number), np.int64)
        for epoch in range(draws // 2):
            key = kernels.stream_key(np.uint64(3), np.uint64(epoch), np.uint64(1))
            kernels.permute(np.uint64(key), out)
            counts[number[tuple(out.tolist())]] += 1
        assert chi2(counts) < CRITICAL[len(number) - 1]


@pytest.mark.parametrize("shuffle", ["global", "block"])
def test_small_orders_are_uniform_over_epochs_and_seeds(shuffle):
    # A block order of one block is a permutation; of blocks of one record, pools of one block too.
    for options in ({"block_records": 4}, {"block_records": 1}):
        for vary in ("seed", "epoch"):
            number = {p: i for i, p in enumerate(itertools.permutations(range(4)))}
            counts = np.zeros(24, np.int64)
            for i in range(2400):
                order = epoch_order(shuffle, 4, **{"seed": 11, "epoch": 4, vary: i}, **options)
                counts[number[tuple(order.ids(0, 4).tolist())]] += 1
            assert chi2(counts) < CRITICAL[23]


def test_every_record_comes_anywhere_in_a_block_order():
    n, draws = 12, 6000
    counts = np.zeros((n, n), np.int64)
    for epoch in range(draws):
        numbers = epoch_order("block", n, seed=2, epoch=epoch, block_records=3, mix_blocks=2).ids(0, n)
        counts[numbers, np.arange(n)] += 1
    assert abs(counts - draws / n).max() < 4.5 * (draws / n) ** 0.5


# Determinism ---------------------------------------------------------------------------------------------------------


GOLDEN_GLOBAL = [1, 5, 6, 3, 8, 4, 2, 7, 0, 9]
GOLDEN_BLOCK = [1, 5, 0, 3, 2, 4, 9, 7, 10, 6, 8]
GOLDEN_DIGESTS = {("global", 100_000): "914244650b390ad6", ("block", 100_001): "8cb408143697960c"}


def test_orders_stay_the_same_for_ever():
    # If this fails, the order has changed: then pario.loader.state.VERSION must change too.
    assert epoch_order("global", 10, seed=1, epoch=2).ids(0, 10).tolist() == GOLDEN_GLOBAL
    order = epoch_order("block", 11, seed=1, epoch=2, block_records=3, mix_blocks=2)
    assert order.ids(0, 11).tolist() == GOLDEN_BLOCK
    for (shuffle, n), digest in GOLDEN_DIGESTS.items():
        order = epoch_order(shuffle, n, seed=2**64 - 1, epoch=7, block_records=100, mix_blocks=8)
        assert hashlib.sha256(order.ids(0, n).astype("<i8").tobytes()).hexdigest()[:16] == digest


def test_global_order_against_python():
    for n, seed, epoch in ((1, 0, 0), (7, 0, 1), (1000, 2**64 - 1, 3)):
        random = Xoshiro(key_of(seed, epoch, 1))
        out = []
        for i in range(n):
            j = random.below(i + 1)
            out.append(i)
            out[i], out[j] = out[j], i
        assert epoch_order("global", n, seed=seed, epoch=epoch).ids(0, n).tolist() == out


def block_order(n, seed, epoch, size, mix):
    """The block order from its definition, with Python's integers."""

    def permutation(key, count):
        random, out = Xoshiro(key), []
        for i in range(count):
            j = random.below(i + 1)
            out.append(i)
            out[i], out[j] = out[j], i
        return out

    blocks = permutation(key_of(seed, epoch, 2), -(-n // size))
    cuts = [*range(0, len(blocks), mix), len(blocks)]
    if len(cuts) > 2:
        if 2 * (cuts[-1] - cuts[-2]) < mix:
            both = cuts[-1] - cuts[-3]
            cuts[-2] = cuts[-3] + (both + 1) // 2
        first = max(4, mix // 8)  # the first pool begins small, and grows
        cuts[1:1] = [first * 4**k for k in range(9) if 2 * first * 4**k <= cuts[1]]
    out = []
    for pool, (a, b) in enumerate(itertools.pairwise(cuts)):
        mine = blocks[a:b]
        left = [
            [block * size + i for i in permutation(key_of(seed, epoch, 3, block), min(size, n - block * size))]
            for block in mine
        ]
        bits = (len(mine) - 1).bit_length()
        for t in range(size):
            shift = key_of(seed, epoch, 4, pool, t) % (1 << bits)
            for i in range(1 << bits):
                k = int(f"{i:0{bits}b}"[::-1], 2) ^ shift if bits else 0
                if k < len(mine) and t < len(left[k]):
                    out.append(left[k][t])
    return out, cuts


@SETTINGS
@given(st.integers(1, 200), st.integers(0, MASK), st.integers(0, 9), st.integers(1, 30), st.sampled_from([1, 4, 8, 32]))
def test_block_order_against_python(n, seed, epoch, size, mix):
    expected, cuts = block_order(n, seed, epoch, size, mix)
    order = epoch_order("block", n, seed=seed, epoch=epoch, block_records=size, mix_blocks=mix)
    assert order.ids(0, n).tolist() == expected
    assert [order.pools.block_bounds(j) for j in range(order.pools.count)] == list(itertools.pairwise(cuts))


# What every order does -----------------------------------------------------------------------------------------------


@SETTINGS
@given(
    st.sampled_from([False, "global", "block"]),
    st.integers(1, 500),
    st.integers(1, 60),
    st.sampled_from([1, 2, 4, 16]),
    st.data(),
)
def test_once_each_from_any_position(shuffle, n, size, mix, data):
    options = {"seed": 8, "epoch": 1, "block_records": size, "mix_blocks": mix}
    order = epoch_order(shuffle, n, **options)
    numbers = order.ids(0, n)
    assert numbers.dtype == np.int64
    assert sorted(numbers.tolist()) == list(range(n))
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, n))
    fresh = epoch_order(shuffle, n, **options)
    assert fresh.ids(start, stop).tolist() == numbers[start:stop].tolist()
    positions = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=5)), np.int64)
    assert fresh.take(positions).tolist() == numbers[positions].tolist()
    assert order.space == ("place" if shuffle == "block" else "id")


@SETTINGS
@given(st.integers(1, 400), st.integers(1, 50), st.sampled_from([1, 2, 4, 16]), st.data())
def test_pool_arithmetic_against_a_running_sum(n, size, mix, data):
    blocks = -(-n // size)
    pools = Pools(n, size, mix, data.draw(st.integers(0, blocks - 1)))
    sizes = [size] * blocks
    sizes[pools.short_at] = n - (blocks - 1) * size
    at = 0
    for pool in range(pools.count):
        a, b = pools.block_bounds(pool)
        assert a < b
        small = min(4, mix / 2) if pool < pools.cut_first else mix / 2
        assert pools.count == 1 or b - a >= small  # never a pool that does not mix
        assert b - a <= mix
        assert pools.bounds(pool) == (at, at + sum(sizes[a:b]))
        assert {pools.pool_of(p) for p in range(at, at + sum(sizes[a:b]))} == {pool}
        at += sum(sizes[a:b])
        assert at - pools.bounds(pool)[0] <= pools.most_records
    assert at == n
    for wrong in (-1, n):
        with pytest.raises(IndexError):
            pools.pool_of(wrong)


@pytest.mark.parametrize(("blocks", "mix", "pools"), [
    (100, 32, [4, 12, 16, 32, 18, 18]),
    (32, 32, [32]),  # a single pool stays whole
    (33, 32, [4, 13, 16]),
    (300, 256, [32, 118, 150]),
    (24, 8, [4, 4, 8, 8]),
    (12, 4, [4, 4, 4]),
])  # fmt: skip
def test_the_first_pool_begins_small(blocks: int, mix: int, pools: list[int]) -> None:
    found = Pools(10 * blocks, 10, mix, 0)
    assert [stop - first for first, stop in map(found.block_bounds, range(found.count))] == pools


def test_first_pools_that_hold_a_step() -> None:
    pools = Pools(995, 10, 32, 1)  # 4, 12, 16 ... blocks of 10 records, one of 5
    assert [pools.first_of(records) for records in (1, 35, 36, 155, 156, 10**9)] == [1, 1, 2, 2, 3, 3]


def test_an_aligned_run_takes_evenly_from_the_blocks_of_its_pool():
    size, mix = 10, 16
    order = epoch_order("block", size * mix * 3, seed=4, block_records=size, mix_blocks=mix)
    assert order.pools.count == 4
    for pool in (2, 3):  # the whole ones
        first, stop = order.pools.bounds(pool)
        blocks = order.layout(pool)[0].tolist()
        k = np.array([blocks.index(place // size) for place in order.ids(first, stop).tolist()])
        for run in (2, 4, 8, 16, 32):
            parts = k.reshape(-1, run) * min(run, mix) // mix
            counts = np.apply_along_axis(np.bincount, 1, parts, minlength=min(run, mix))
            assert (counts == max(1, run // mix)).all()


def test_other_seeds_and_epochs_are_other_orders():
    for shuffle in ("global", "block"):
        seen = set()
        for seed, epoch in itertools.product((0, 1, 2, 2**63, 2**64 - 1), (0, 1, 2)):
            order = epoch_order(shuffle, 100, seed=seed, epoch=epoch, block_records=7, mix_blocks=4)
            seen.add(tuple(order.ids(0, 100).tolist()))
        assert len(seen) == 15


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"shuffle": "random"}, "shuffle"),
        ({"shuffle": True}, "shuffle"),
        ({"shuffle": None}, "shuffle"),
        ({"shuffle": 0}, "shuffle"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 1.0}, "seed"),
        ({"epoch": -1}, "epoch"),
        ({"n": -1}, "n must"),
        ({"block_records": 0}, "block_records"),
        ({"mix_blocks": 3}, "mix_blocks"),
        ({"mix_blocks": 0}, "mix_blocks"),
    ],
)
def test_wrong_arguments_are_named(change, name):
    options = {"shuffle": "block", "n": 10, **change}
    with pytest.raises(OptionError, match=name):
        epoch_order(options.pop("shuffle"), options.pop("n"), **options)


def test_positions_outside_of_the_epoch():
    for shuffle in (False, "global", "block"):
        order = epoch_order(shuffle, 10)
        for start, stop in ((-1, 2), (5, 11), (6, 5)):
            with pytest.raises(IndexError):
                order.ids(start, stop)


def test_records_per_block():
    assert records_per_block(3088, 2 << 20) == 679
    assert records_per_block(10_000_000, 2 << 20) == 1
    with pytest.raises(OptionError):
        records_per_block(0, 1)
