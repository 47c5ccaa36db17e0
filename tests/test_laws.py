"""What benchmarks tell of the law of the depth: the figures of its runs, and the design that compares with the best by
hand."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from benchmarks import design, law_runs, worker_laws
from pario.tune.knobs import START_DEPTH
from pario.tune.tuner import FastProbe, Window

QUIET = Window(1, 0.25, latency=0.02, nbytes=1e5, most=64, in_flight=64, rate=1000)


# -- the figures of the comparison -------------------------------------------------------------------------------------


def test_the_smallest_depth() -> None:
    rates = {1: 10.0, 2: 20.0, 4: 40.0, 8: 100.0, 16: 96.0}
    assert law_runs.smallest(rates) == pytest.approx(4 + 4 * 55 / 60)
    assert law_runs.smallest({1: 96.0, 2: 100.0}) == 1


def test_time_to_a_rate() -> None:
    bins = [(10, 1, 0.1)] * 10 + [(100, 1, 0.1)] * 10  # bytes per tenth of a second
    assert law_runs.rate(bins, 1.0, 2.0) == pytest.approx(1000)
    assert law_runs.time_to(bins, 999, 0.0) == pytest.approx(1.5)
    assert law_runs.time_to(bins, 999, 1.2) == pytest.approx(0.5)
    assert law_runs.time_to(bins, 1001, 0.0) is None


def test_means_over_time() -> None:
    assert law_runs.mean_depth([(1.0, 4), (3.0, 8)], 0.0, 4.0) == pytest.approx((2 + 8 + 8) / 4)
    assert law_runs.latency([(1, 2, 0.2), (1, 2, 0.6)], 0.0, 0.2) == pytest.approx(0.2)
    assert law_runs.jain([1, 1, 1, 1]) == 1
    assert law_runs.jain([1, 0, 0, 0]) == 0.25


def test_what_the_worker_notes() -> None:
    ends = [(10.01, 0.02, 1, 100), (10.05, 0.04, 2, 300), (10.25, 0.1, 1, 100), (9.9, 1.0, 1, 1), (10.31, 1.0, 1, 1)]
    assert worker_laws.bins(ends, 10.0, 0.3) == [(400, 3, 0.1), (0, 0, 0.0), (100, 1, 0.1)]


def test_a_recorded_law_says_what_it_says_otherwise() -> None:
    alone, recorder = FastProbe(), worker_laws.Recorder(FastProbe())
    depth = START_DEPTH
    for number in range(40):
        window = replace(QUIET, number=number, latency=max(0.02, depth / 970) * (1 + 1e-7 * number))
        said = recorder.step(depth, window)
        assert said == alone.step(depth, window)
        assert (recorder.hurried, recorder.drains) == (alone.hurried, alone.drains)
        depth = min(64, said.value)
        assert [value for _, value in recorder.settings][number:] == [said.value]


# -- the design --------------------------------------------------------------------------------------------------------


def test_every_pair_of_levels_meets() -> None:
    found = design.cells()
    assert len(found) <= 36
    assert found == design.cells()
    rows = [(c.store, c.shuffle, c.compute_s, 4 if c.ranks == 4 else 1, c.nodes) for c in found]
    for a, b in itertools.combinations(range(5), 2):
        seen = {(row[a], row[b]) for row in rows}
        assert seen == set(itertools.product(design.FACTORS[a], design.FACTORS[b]))
    assert all(cell.ranks >= cell.nodes for cell in found)
    assert len({cell.name for cell in found}) == len(found)


def test_an_interval() -> None:
    """Against SciPy: mean 0 of logarithms, standard deviation 0.1, n = 5: t = 2.776."""
    logs = [-0.1, -0.1, 0.0, 0.1, 0.1]
    middle, least, most = design.interval([math.exp(value) for value in logs])
    assert middle == pytest.approx(1.0)
    assert math.log(most) == pytest.approx(2.776 * 0.1 / math.sqrt(5), rel=1e-3)
    assert least == pytest.approx(1 / most)
    assert design.interval([1.1])[1:] == (0.0, math.inf)


def test_the_table_says_which_cell_is_above() -> None:
    run = {"hand": [{"seconds": [1.0, 0.5]}] * 3, "auto": [{"seconds": [1.2, 0.5]}] * 3}
    text = design.summary({"a cell": {"runs": run, "hand": 8}})
    assert "1.20 (1.20 … 1.20) **above** | 1.00 (1.00 … 1.00) |" in text
    assert "first epoch: geometric mean 1.200 over 1 cells; the interval is wholly above 1.05 in 1." in text
