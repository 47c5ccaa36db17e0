"""How random the orders are, in numbers. The README and the documentation quote these.

The dataset stands for 3 KB records: with the default options a block has about 680 of them and a pool 32 blocks.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pario.options import Options
from pario.plan.epoch import KeyOrder, Order, epoch_order, records_per_block
from pario.plan.schedule import Schedule, node_share

N = 200_000
BATCHES = (64, 256, 1024)
BLOCK = {"block_records": records_per_block(3088, Options().block_bytes), "mix_blocks": Options().mix_blocks}


# Measures of randomness. All three take the order's numbers as distances along the file (for record ids: along the
# keys), use whole batches of `batch` positions, and cost O(n).


def mixing(order: Order, batch: int) -> float:
    """How much of the dataset's variety a batch of all ranks together has: 0 (neighbours only) to 1 (as much as a batch
    from a uniform permutation).

    The variance of the numbers within a batch (divisor batch - 1), averaged over the batches, divided by the variance
    of all numbers (divisor n - 1); for samples drawn without replacement the expectation of this ratio is exactly 1.
    """
    numbers = _batches(order, batch).astype(np.float64)
    return float(min(1.0, np.var(numbers, axis=1, ddof=1).mean() / np.var(np.arange(order.n), ddof=1)))


def dispersion(order: Order, batch: int, parts: int = 10) -> float:
    """How unevenly batches draw from the parts of the dataset: 1 = like a uniform permutation, less = more evenly,
    up to `batch` (each batch from one part only). A batch is as informative about the dataset as batch / dispersion
    records that are drawn independently.

    Pearson's chi-square of the batch's counts in `parts` equal parts, averaged over the batches, divided by its
    expectation (parts - 1) (n - batch) / (n - 1) for samples drawn without replacement.
    """
    numbers = _batches(order, batch)
    edges = np.arange(parts + 1) * order.n // parts
    share = np.diff(edges) / order.n
    part = np.searchsorted(edges, numbers, side="right") - 1
    counts = np.stack([(part == i).sum(axis=1) for i in range(parts)], axis=1)
    chi2 = ((counts - batch * share) ** 2 / (batch * share)).sum(axis=1)
    return float(chi2.mean() / ((parts - 1) * (order.n - batch) / (order.n - 1)))


def serial_correlation(order: Order, lag: int) -> float:
    """Correlation of the numbers `lag` positions apart: 1 in key order, within about 3 / sqrt(n) of 0 if uniform."""
    numbers = order.ids(0, order.n).astype(np.float64)
    numbers -= numbers.mean()
    return float((numbers[:-lag] @ numbers[lag:]) / (numbers @ numbers))


def _batches(order: Order, batch: int) -> np.ndarray:
    """i64[whole batches, batch]."""
    whole = order.n // batch
    return order.ids(0, whole * batch).reshape(whole, batch)


class Drawn(KeyOrder):
    """An order from numpy's own shuffle: what "like a uniform permutation" means."""

    def __init__(self, n, seed):
        super().__init__(n)
        self.numbers = np.random.default_rng(seed).permutation(n)

    def ids(self, start, stop):
        return self.numbers[start:stop]


@pytest.mark.parametrize("batch", BATCHES)
def test_key_order_does_not_mix(batch):
    order = epoch_order(False, N)
    assert mixing(order, batch) < 0.0001
    assert dispersion(order, batch) > 0.98 * batch


@pytest.mark.parametrize("batch", BATCHES)
def test_global_mixes_like_numpys_permutation(batch):
    for order in (epoch_order("global", N, seed=6, epoch=1), Drawn(N, 6)):
        assert mixing(order, batch) > 0.995
        assert dispersion(order, batch) == pytest.approx(1, abs=0.12)


@pytest.mark.parametrize(("batch", "inflation"), [(32, 1.25), (64, 2.0), (256, 8.0), (1024, 32.0)])
def test_block_order_mixes_up_to_its_pools(batch, inflation):
    # A batch has equally many records of each of 32 blocks, whatever its size: mixing goes to 1 - 1/32, and a batch
    # much larger than 32 tells no more about what varies along the file than 32 records would. (The small pools at the
    # beginning add to both: 4 of 294 blocks are mixed with each other, then 12.)
    order = epoch_order("block", N, seed=6, epoch=1, **BLOCK)
    assert 0.94 < mixing(order, batch) <= 1
    assert dispersion(order, batch) == pytest.approx(inflation, rel=0.35)


def test_more_blocks_mix_more():
    few, some, many = (
        dispersion(epoch_order("block", 4 * N, seed=1, block_records=340, mix_blocks=m), 256) for m in (4, 32, 256)
    )
    assert few == pytest.approx(256 / 4, rel=0.2)  # less where a batch crosses pools
    assert some == pytest.approx(256 / 32, rel=0.15)
    assert many == pytest.approx(1.2, rel=0.2)  # the first pools are smaller


@pytest.mark.parametrize("lag", range(1, 9))
def test_no_serial_correlation(lag):
    assert serial_correlation(epoch_order(False, N), lag) > 0.999
    assert abs(serial_correlation(epoch_order("global", N, seed=6), lag)) < 4 / N**0.5
    # Blocks, not records, are drawn independently: the bound is that of their number, over several epochs.
    blocks = N / BLOCK["block_records"]
    found = [serial_correlation(epoch_order("block", N, seed=6, epoch=e, **BLOCK), lag) for e in range(8)]
    assert abs(np.mean(found)) < 4 / (8 * blocks) ** 0.5


def mixing_of_ranks(order: Order, batch: int, ranks: int, nodes: int) -> float:
    """`mixing` of the batches of each rank, not cut off at 1."""
    size, steps = ranks // nodes, order.n // (batch * ranks)
    schedule = Schedule(order.n, batch, ranks, pools=order.pools)
    numbers = np.full((steps, ranks * batch), np.nan)
    for group, node in itertools.product(range(schedule.groups), range(nodes)):
        found, step, row = node_share(schedule, order, group, node * size, size)
        full = step < steps
        numbers[step[full], row[full] + node * size * batch] = found[full]
    within = np.var(numbers.reshape(steps * ranks, batch), axis=1, ddof=1)
    return float(within.mean() / np.var(np.arange(order.n), ddof=1))


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("batch", [64, 256])
def test_a_ranks_batch_is_as_mixed_as_that_of_all(ranks: int, batch: int) -> None:
    """The bar: 0.97 of a uniform draw, for the ranks of one node."""
    order = epoch_order("block", N, seed=2, epoch=1, **BLOCK)
    alone = mixing_of_ranks(order, batch, ranks, 1)
    assert alone >= 0.97
    assert alone == pytest.approx(mixing_of_ranks(order, batch * ranks, 1, 1), abs=0.02)


def test_on_several_nodes_a_rank_has_the_blocks_of_its_node() -> None:
    order = epoch_order("block", N, seed=2, epoch=1, **BLOCK)
    assert mixing_of_ranks(order, 256, 8, 8) == pytest.approx(1 - 1 / 4, abs=0.05)  # 4 blocks each
    assert mixing_of_ranks(order, 256, 8, 2) == pytest.approx(1 - 1 / 16, abs=0.03)
    more = epoch_order("block", 4 * N, seed=2, epoch=1, **{**BLOCK, "mix_blocks": 256})
    assert mixing_of_ranks(more, 64, 8, 8) >= 0.96
