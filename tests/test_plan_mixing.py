"""How random the orders are, in numbers. The README and the documentation quote these.

The dataset stands for 3 KB records: with the default options a block has about 680 of them and a pool 32 blocks.
"""

from __future__ import annotations

import numpy as np
import pytest

from pario.errors import OptionError
from pario.options import Options
from pario.plan.epoch import KeyOrder, dispersion, epoch_order, mixing, records_per_block, serial_correlation

N = 200_000
BATCHES = (64, 256, 1024)
BLOCK = {"block_records": records_per_block(3088, Options().block_bytes), "mix_blocks": Options().mix_blocks}


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
    # much larger than 32 tells no more about what varies along the file than 32 records would.
    order = epoch_order("block", N, seed=6, epoch=1, **BLOCK)
    assert 0.94 < mixing(order, batch) <= 1
    assert dispersion(order, batch) == pytest.approx(inflation, rel=0.35)


def test_more_blocks_mix_more():
    few, some, many = (
        dispersion(epoch_order("block", 4 * N, seed=1, block_records=340, mix_blocks=m), 256) for m in (4, 32, 256)
    )
    assert few == pytest.approx(256 / 4, rel=0.2)  # less where a batch crosses pools
    assert some == pytest.approx(256 / 32, rel=0.15)
    assert many == pytest.approx(1, rel=0.2)


@pytest.mark.parametrize("lag", range(1, 9))
def test_no_serial_correlation(lag):
    assert serial_correlation(epoch_order(False, N), lag) > 0.999
    assert abs(serial_correlation(epoch_order("global", N, seed=6), lag)) < 4 / N**0.5
    # Blocks, not records, are drawn independently: the bound is that of their number, over several epochs.
    blocks = N / BLOCK["block_records"]
    found = [serial_correlation(epoch_order("block", N, seed=6, epoch=e, **BLOCK), lag) for e in range(8)]
    assert abs(np.mean(found)) < 4 / (8 * blocks) ** 0.5


def test_batches_must_fit():
    with pytest.raises(OptionError, match="batch"):
        mixing(epoch_order(False, 10), 10)
