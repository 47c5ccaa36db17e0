"""The laws that benchmarks compare: what each does on a simulated store, and recorded runs of all, replayed."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import design, law_runs, worker_laws
from benchmarks.laws import LAWS, Held, Prisma, line, replayed, told
from pario.tune.knobs import START_DEPTH, Setting
from pario.tune.tuner import FastProbe, Window

TRACES = sorted((Path(__file__).parent / "data" / "traces").glob("*.jsonl"))


# -- traces ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", TRACES, ids=[file.stem for file in TRACES])
def test_a_recorded_run_replayed(file: Path) -> None:
    """Real runs on real (emulated) stores: the same windows give the same depths, with the same reasons. (FAST's
    windows are those of an earlier law; what it says to them was written anew on 2026-11-25.)"""
    name = next(name for name in LAWS if file.stem.endswith(name.replace(" ", "_")))
    pairs = list(replayed(LAWS[name](), file.read_text().splitlines()))
    assert len(pairs) >= 10
    assert [now for now, _ in pairs] == [then for _, then in pairs]
    assert len({then.value for _, then in pairs}) > 2, "this trace says nothing about the law"


def test_every_law_has_a_trace_on_every_store() -> None:
    stems = {file.stem for file in TRACES}
    for law, store in itertools.product(LAWS, design.STORES):
        assert f"steady {store} {law}".replace(" ", "_") in stems


def test_a_window_survives_its_line() -> None:
    window = told(Held(7, 0.25, 1 / 3, 1e5 / 7, 9, 2 / 3, 1e3 / 3, full=True, samples=5, held=200 / 3, deviation=0.1))
    noted = json.loads(line(1.23456, 4, window, Setting(5, "why not")))
    assert Held(**noted["window"]) == window
    assert (noted["when"], noted["depth"], noted["said"], noted["why"]) == (1.235, 4, 5, "why not")
    assert window.latency == pytest.approx(1 / 3, rel=1e-5)


QUIET = Window(1, 0.25, latency=0.02, nbytes=1e5, most=64, in_flight=64, rate=1000)


# -- PRISMA's rule -----------------------------------------------------------------------------------------------------


def buffer(held: float, deviation: float, samples: int = 12) -> Held:
    return Held(1, 0.12, latency=0.02, nbytes=1e5, most=2, in_flight=2, rate=100, samples=samples, held=held,
                deviation=deviation)  # fmt: skip


def prisma() -> Prisma:
    law = Prisma()
    for _ in range(9):
        assert law.step(2, buffer(0, 0)).reason == "too early"
    return law


@pytest.mark.parametrize(
    ("held", "deviation", "value"),
    [(10, 40, 3), (30, 40, 3), (50, 10, 3), (50, 20, 3), (50, 21, 2), (79, 5, 3), (80, 20, 2), (90, 30, 2)],
)
def test_prismas_rule_as_published(held, deviation, value) -> None:
    assert prisma().step(2, buffer(held, deviation)).value == value


def test_prisma_stops_for_good() -> None:
    law = prisma()
    assert law.step(5, buffer(85, 10)).reason.startswith("optimal")
    assert law.step(5, buffer(0, 0)) == (5, "tuning has ended")


def test_prisma_waits_for_samples() -> None:
    law = prisma()
    assert law.step(2, buffer(0, 0, samples=9)).value == 2
    assert law.step(2, buffer(0, 0, samples=1)).value == 3
    # Half the samples at 100 %, half at 0: mean 50, deviation 50, although each window is calm.
    law.step(3, buffer(100, 0, samples=5))
    assert "larger buffer" in law.step(3, buffer(0, 0, samples=5)).reason


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
    buffer = worker_laws.Buffer(1000)
    buffer.begun = 600
    buffer.look()
    buffer.taken = 200
    buffer.look()
    seen = buffer.window(QUIET)
    assert (seen.samples, seen.held, seen.deviation, seen.rate) == (2, 50.0, 10.0, QUIET.rate)
    assert buffer.window(QUIET).samples == 0


def test_a_recorded_law_hears_what_the_trace_says() -> None:
    recorder = worker_laws.Recorder(FastProbe(), worker_laws.Buffer(1))
    depth = START_DEPTH
    for number in range(40):
        window = replace(QUIET, number=number, latency=max(0.02, depth / 970) * (1 + 1e-7 * number))
        depth = min(64, recorder.step(depth, window).value)
        assert len(recorder.settings) == number + 1
    pairs = list(replayed(FastProbe(), recorder.trace))
    assert [now for now, _ in pairs] == [then for _, then in pairs]
    assert (recorder.hurried, recorder.drains) == (recorder._law.hurried, recorder._law.drains)


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


def test_fast_is_the_users() -> None:
    assert LAWS["FAST + probe"] is FastProbe
