"""Which node keeps which chunk: the same everywhere, within the quotas, evenly, and stable where a node is lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pario.errors import OptionError
from pario.plan.placement import NOBODY, assign


@settings(max_examples=150, deadline=None)
@given(
    dataset=st.integers(0, 2**64 - 1),
    n=st.integers(0, 200),
    quotas=st.lists(st.integers(0, 250), min_size=1, max_size=9),
    copies=st.none() | st.integers(1, 4),
)
def test_quotas_hold_and_nothing_is_kept_twice_on_a_node(dataset, n, quotas, copies) -> None:
    placed = assign(dataset, np.arange(n), quotas, copies)
    owners = placed.owners
    for node, quota in enumerate(quotas):
        assert len(placed.kept_by(node)) == (owners == node).sum() <= quota
    kept = (owners != NOBODY).sum(axis=1)
    assert owners.max(initial=0) < len(quotas)
    if copies is not None:
        assert kept.max(initial=0) <= copies
    # What has a place somewhere gets one.
    wanted = min(n, sum(min(quota, n) for quota in quotas))
    assert (kept > 0).sum() >= wanted
    assert placed.is_complete == (wanted == n)
    if copies is None and all(quota >= n for quota in quotas):
        assert (kept == len(quotas)).all()


def test_where_not_all_fit_the_first_ones_have_a_node() -> None:
    worth = np.random.default_rng(0).permutation(100)
    placed = assign(7, worth, [20, 30, 10])
    kept = np.flatnonzero((placed.owners != NOBODY).any(axis=1))
    assert set(kept) == set(worth[:60])
    assert not placed.is_complete


@pytest.mark.parametrize(("nodes", "n"), [(4, 100), (16, 1_000), (64, 5_000)])
@pytest.mark.parametrize("copies", [1, 2])
def test_no_node_keeps_much_more_than_another(nodes, n, copies) -> None:
    owners = assign(3, np.arange(n), [n] * nodes, copies).owners
    for copy in range(copies):
        loads = np.bincount(owners[:, copy], minlength=nodes)
        assert loads.max() <= np.ceil(1.1 * np.ceil(n / nodes))
        assert loads.min() >= 0.7 * n / nodes


def test_other_datasets_lie_elsewhere() -> None:
    one, other = (assign(dataset, np.arange(1000), [1000] * 8, 1).owners[:, 0] for dataset in (1, 2))
    assert 0.05 < (one == other).mean() < 0.2


def test_a_lost_node_moves_its_own_chunks_and_few_others() -> None:
    n, nodes, lost = 2000, 10, 4
    before = assign(9, np.arange(n), [n] * nodes, 1).owners[:, 0]
    quotas = [0 if node == lost else n for node in range(nodes)]
    after = assign(9, np.arange(n), quotas, 1).owners[:, 0]
    assert not (after == lost).any()
    others = before != lost
    assert (before[others] != after[others]).mean() < 0.1
    loads = np.bincount(after, minlength=nodes)
    assert loads.max() <= np.ceil(1.1 * np.ceil(n / (nodes - 1)))


def test_who_asks_gets_its_own_copy_first_and_all_copies_serve() -> None:
    placed = assign(5, np.arange(400), [400] * 6, 2)
    served = np.zeros(6, int)
    for chunk in range(400):
        owners = set(placed.owners[chunk])
        for asker in range(6):
            sources = placed.sources(chunk, asker)
            assert set(sources) == owners
            if asker in owners:
                assert sources[0] == asker
            else:
                served[sources[0]] += 1
    assert served.max() <= 1.2 * served.mean()


def test_nobody_to_ask() -> None:
    assert assign(5, np.arange(3), [1, 0]).sources(2, 0) == []


@pytest.mark.parametrize(
    ("chunks", "quotas", "copies"),
    [(np.arange(3), [], 1), (np.arange(3), [-1, 4], 1), (np.arange(3), [4], 0), ([0, 0, 2], [4], 1), ([1, 2], [4], 1)],
)
def test_no_placement(chunks, quotas, copies) -> None:
    with pytest.raises(OptionError):
        assign(1, chunks, quotas, copies)


def test_what_nodes_hold_stays_with_them() -> None:
    """A job with its nodes in another order finds its chunks where they are."""
    before = assign(5, range(100), [30, 30, 30, 30], 1)
    held = np.zeros((4, 100), bool)
    for node in range(4):
        held[(node + 1) % 4, before.kept_by(node)] = True
    after = assign(5, range(100), [30, 30, 30, 30], 1, held=held)
    assert after.is_complete
    for node in range(4):
        assert after.kept_by((node + 1) % 4).tolist() == before.kept_by(node).tolist()
    half = held.copy()
    half[:, 50:] = False
    assert assign(5, range(100), [30, 30, 30, 30], 1, held=half).is_complete
    assert np.array_equal(assign(5, range(100), [30] * 4, 1, held=np.zeros((4, 100), bool)).owners, before.owners)
