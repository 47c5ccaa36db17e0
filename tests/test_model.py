"""benchmarks/model: the machine keeps its books, one client is as published, the stored results are the code's."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # benchmarks/ is a folder of the repository, not of the installed package

from benchmarks.model import calibrate, here, paper, recipes, report  # noqa: E402
from benchmarks.model.auto import auto_s, sidecar_s, walk_s  # noqa: E402
from benchmarks.model.engine import Clock, Link, Machine, Store  # noqa: E402
from benchmarks.model.recipes import Workload, ior, one_client, reading_s  # noqa: E402

MIB = 1 << 20
MACHINE = Machine(block=2 * MIB, disk_rate=500e6, net_rate=600e6)


@pytest.fixture(scope="module")
def stored() -> dict:
    return json.loads(calibrate.STORED.read_text())


@pytest.fixture(scope="module")
def best() -> calibrate.Fit:
    return calibrate.load()[0]


def read_all(store: Store, extents: list[tuple[int, int]]) -> list[Link]:
    links, done = [Link() for _ in extents], []
    for link, extent in zip(links, extents, strict=True):
        store.read(link, extent, lambda e=extent: done.append(e), window=4, byte_s=1e-9)
    store.clock.run()
    assert sorted(done) == sorted(extents)
    return links


def test_clock_runs_in_order() -> None:
    clock, seen = Clock(), []
    for when in (3.0, 1.0, 2.0, 1.0):
        clock.at(when, seen.append, when)
    clock.at(1.5, lambda: clock.at(1.7, seen.append, 1.7))
    clock.run()
    assert seen == [1.0, 1.0, 1.7, 2.0, 3.0]
    assert clock.now == 3.0


def test_every_byte_arrives_once() -> None:
    store = Store(MACHINE)
    extents = [(0, 5 * MIB), (5 * MIB, 12345), (5 * MIB + 12345, 7 * MIB)]
    links = read_all(store, extents)
    assert [link.bytes for link in links] == [nbytes for _, nbytes in extents]
    assert store.asked == store.delivered == store.disk_bytes == 12 * MIB + 12345


def test_what_one_node_has_read_comes_out_of_memory_for_the_others() -> None:
    store = Store(MACHINE)
    read_all(store, [(0, 8 * MIB)] * 5)
    assert store.disk_bytes == 8 * MIB
    assert store.delivered == 40 * MIB


def test_cut_keeps_blocks_and_bytes() -> None:
    store = Store(MACHINE)
    cuts = store.cut((MIB, 4 * MIB))
    assert cuts == [(0, MIB, 2 * MIB), (1, 0, 2 * MIB), (2, 0, MIB)]


@pytest.mark.parametrize("nodes", [1, 3, 8, 256])
@pytest.mark.parametrize("merged", [1, 4])
def test_shares_tile_the_batch(nodes: int, merged: int) -> None:
    work = Workload(nodes, nodes)
    at = 7 * work.round_bytes
    for node in range(nodes):
        offset, nbytes = work.share(node, 7, merged)
        assert offset == at
        at += nbytes
    assert at == (7 + merged) * work.round_bytes


def test_one_client_reads_as_published(best: calibrate.Fit) -> None:
    rates = [one_client(best.machine, request) / 1e6 for request in paper.PREAD]
    assert rates == sorted(rates)
    assert rates == pytest.approx(list(paper.PREAD.values()), rel=0.15)
    mapped = [one_client(best.machine, request, mapped=True) / 1e6 for request in paper.MMAP]
    assert mapped == pytest.approx(list(paper.MMAP.values()), rel=0.05)


def test_more_streams_than_a_server_knows_cost_seeks() -> None:
    many = ior(MACHINE, 32, 16)
    assert ior(replace(MACHINE, segments=1000), 32, 16) > 1.05 * many
    assert ior(replace(MACHINE, seek_s=0.0), 32, 16) > 2 * many
    few = Workload(1152, 32)
    assert reading_s(replace(MACHINE, segments=8), few, "coal") > 1.3 * reading_s(MACHINE, few, "coal")


@pytest.mark.parametrize("recipe", paper.NAMES)
def test_a_better_machine_is_not_slower(recipe: str) -> None:
    work = Workload(288, 8, iterations=8)
    base = reading_s(MACHINE, work, recipe)
    assert base > 0
    link = {"link_rate": 27e9, "fault_s": 0.0, "call_s": 0.0}
    for better in ({"disk_rate": 5e9}, {"net_rate": 6e9, "request_s": 0.0}, link):
        assert reading_s(replace(MACHINE, **better), work, recipe) <= base * 1.02, better


def test_the_mechanisms_are_there() -> None:
    def seconds(recipe: str, nodes: int) -> float:
        return reading_s(MACHINE, Workload(36 * nodes, nodes, iterations=32), recipe)

    assert seconds("lmm", 64) > 1.7 * seconds("lmm", 32)  # every node drags in everything
    assert seconds("lmdb", 1) > 10 * seconds("lmm", 1)  # ranks of a node wake each other in vain
    assert seconds("dm", 128) > 1.5 * seconds("dm", 32)  # the cursor goes from hand to hand
    assert seconds("coal", 32) < seconds("prov", 32)  # long reads keep all servers busy
    many = Workload(2304, 64)  # all 512 iterations: reads long enough to get in each other's way
    assert reading_s(MACHINE, many, "stag") < 0.8 * reading_s(MACHINE, many, "coal")


def test_the_same_every_time() -> None:
    work = Workload(288, 8, iterations=8)

    def all_of_them() -> list[float]:
        recipes._rounds.cache_clear()
        recipes._long_reads.cache_clear()
        return [reading_s(MACHINE, work, recipe) for recipe in paper.NAMES]

    assert all_of_them() == all_of_them()


def test_default_hides_reading_behind_computing() -> None:
    work = Workload(72, 2, batch=1024, iterations=40)
    assert auto_s(MACHINE, work, 1.0) == pytest.approx(40.0, rel=0.02)
    alone = auto_s(MACHINE, work, 0.0)
    assert 0 < alone < 2.0
    assert max(alone, 4.0) <= auto_s(MACHINE, work, 0.1) <= alone + 4.1
    assert 0 < sidecar_s(MACHINE, work, 10**6) < walk_s(MACHINE, work, 10**6)


def test_stored_points_are_what_the_code_says(stored: dict, best: calibrate.Fit) -> None:
    ranks = (36, 288, 1152, 2304)
    for point in stored["points"]:
        if point["ranks"] in ranks:
            again = calibrate.training_s(best, point["ranks"], point["recipe"])
            assert again == pytest.approx(point["model"], rel=1e-6)
        assert point["error"] == pytest.approx(point["model"] / point["paper"] - 1)
        assert point["paper"] == paper.TRAINING[point["ranks"]][paper.NAMES.index(point["recipe"])]
        assert point["held_out"] == (point["ranks"] > paper.CALIBRATION_RANKS)


def test_stored_parameters_come_from_the_calibration_points_alone(
    stored: dict, best: calibrate.Fit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Solved again with the held-out rows taken away; half the seek time fits worse."""
    monkeypatch.setattr(paper, "TRAINING", {ranks: row for ranks, row in paper.TRAINING.items() if ranks <= 1152})
    assert calibrate.direct() == pytest.approx(stored["direct"])
    assert {name: getattr(best.machine, name) for name in stored["direct"]} == pytest.approx(stored["direct"])
    again = calibrate.solve(replace(best.machine, wake_s=0.0))
    assert again.rms == pytest.approx(best.rms, rel=1e-4)
    assert again.training.compute_s == pytest.approx(best.training.compute_s, rel=1e-3)
    assert again.machine.wake_s == pytest.approx(best.machine.wake_s, rel=1e-3)
    other = replace(best.machine, wake_s=0.0, seek_s=best.machine.seek_s / 2)
    assert calibrate.solve(other).rms > best.rms


def test_kept_sets_fit_about_as_well() -> None:
    fits = calibrate.load()
    assert 2 <= len(fits) <= calibrate.KEPT
    assert all(fits[0].rms <= fit.rms <= calibrate.ALMOST * fits[0].rms for fit in fits)
    for name, (low, high) in calibrate.RANGES.items():
        assert all(low <= getattr(fit.machine, name) <= high for fit in fits), name


def test_page_is_filled_from_the_stored_results(stored: dict) -> None:
    page = (ROOT / "measurements" / "model.md").read_text()
    assert report.fill(page, stored) == page
    for name in report.tables(stored):
        assert f"<!-- model: {name} -->" in page


def test_this_machine() -> None:
    rows = here.known()
    assert all(row.model > 0 for row in rows)
    # latency sets the pace there, and the model has it in the right place
    assert all(abs(row.error) < 0.5 for row in rows), [(row.case, row.error) for row in rows]


def test_study_hook() -> None:
    run = {"page_rate": 150e6, "records": 8000}
    cell = {
        "store": "throttled",
        "dataset": "3k",
        "ranks": 4,
        "nodes": 2,
        "batch": 64,
        "state": "cold",
        "order": "none",
    }
    study = {
        "sets": {"3k": {"page_bytes": 4096 * 8000, "records": 8000}},
        "cells": [
            {**cell, "runs": {"plain": [run], "auto": [run, run], "stag": []}},
            {**cell, "state": "warm", "runs": {"plain": [run]}},
            {**cell, "store": "latency", "runs": {"auto": [run]}},
        ],
    }
    rows = here.compare(study)
    assert [row.case.split(", ")[-1] for row in rows] == ["plain", "auto", "auto"]
    assert all(row.measured == pytest.approx(150) and 0 < row.model <= 201 for row in rows)
