"""Threads of decoders: as many as this rank's fair part of the node's cores; and the cores' cache."""

from __future__ import annotations

import os

import pytest

from pario.machine import allowed_cores, fair_threads, last_cache_bytes


@pytest.mark.parametrize(
    ("everyones", "threads"),
    [
        ([[0, 1, 2, 3]], [4]),
        ([list(range(16))] * 4, [4, 4, 4, 4]),  # all may use all cores
        ([[0, 1, 2, 3], [4, 5, 6, 7]], [4, 4]),  # bound, as by srun --cpus-per-task=4
        ([[0], [1], [2]], [1, 1, 1]),
        ([[0, 1]] * 3, [1, 1, 1]),  # more ranks than cores
        ([[0, 1, 2, 3, 4, 5], [4, 5]], [5, 1]),  # two of them shared
        ([list(range(7))] * 7, [1] * 7),  # no loss to rounding
    ],
)
def test_a_fair_part(everyones, threads) -> None:
    assert [fair_threads(mine, everyones) for mine in everyones] == threads


def test_cores_of_this_process() -> None:
    assert len(allowed_cores()) == len(os.sched_getaffinity(0))


def test_a_cache_is_no_larger_than_its_cores_can_have() -> None:
    """A virtual machine may show all that of its host."""
    nbytes = last_cache_bytes()
    assert nbytes is None or 0 < nbytes <= (os.cpu_count() or 1) << 24
