"""benchmarks/model: tiers and peers. Bytes are conserved, the counts are arithmetic's and measurements/tiers.md's."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # benchmarks/ is a folder of the repository, not of the installed package

from benchmarks.marked import fill_marked  # noqa: E402
from benchmarks.model import tier_report, tiers  # noqa: E402
from benchmarks.model.tiers import WAYS, Job, Rates, hot_spot, seconds, simulate, store_passes  # noqa: E402
from pario.plan.placement import NOBODY, assign  # noqa: E402


@pytest.fixture(scope="module")
def tables() -> dict[str, str]:
    return tier_report.tables()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("copies", [None, 1, 2])
@pytest.mark.parametrize(("nodes", "quota", "readers"), [(1, 0.4, 1), (5, 0.1, 1), (5, 0.5, 1), (5, 0.5, 3), (8, 1, 8)])
def test_every_chunk_that_is_read_comes_from_somewhere(way, copies, nodes, quota, readers) -> None:
    job = Job(nodes, 4, quota, readers, 200, copies)
    wanted = job.readers * job.chunks
    for number, epoch in enumerate(simulate(job, way)):
        taken = epoch.store.sum() + epoch.came.sum() + epoch.own.sum()
        assert epoch.came.sum() == epoch.served.sum()
        assert epoch.store.sum() <= wanted
        if number or way != "peers":
            assert taken == wanted
        elif readers == 1:  # its owner has read from the store what came from another node
            assert taken == wanted + epoch.came.sum()
        else:
            assert wanted <= taken <= wanted + job.chunks


@pytest.mark.parametrize(("nodes", "quota"), [(2, 0.5), (4, 0.3), (7, 1 / 7), (16, 1 / 16), (64, 1.0)])
@pytest.mark.parametrize("readers", [1, 2])
def test_quotas_that_hold_the_data_ask_the_store_once(nodes, quota, readers) -> None:
    job = Job(nodes, 5, quota, readers, 1024)
    first, *later = simulate(job, "peers")
    assert first.store.sum() == job.chunks
    for epoch in later:
        assert epoch.store.sum() == 0
        assert epoch.own.sum() + epoch.came.sum() == readers * job.chunks


@pytest.mark.parametrize("nodes", [1, 4])
@pytest.mark.parametrize("quota", [0.0, 0.25, 0.6, 1.0])
@pytest.mark.parametrize("epochs", [1, 3, 10])
def test_nodes_that_read_everything_without_peers(nodes, quota, epochs) -> None:
    """Each of them E - (E - 1) q times; and with peers all of them together once, if they can hold the data."""
    job = Job(nodes, epochs, quota, readers=nodes, chunks=400)
    assert store_passes(job, simulate(job, "own")) == pytest.approx(nodes * (epochs - (epochs - 1) * quota))
    assert store_passes(job, simulate(job, "none")) == nodes * epochs
    assert store_passes(job, simulate(job, "local")) == 0
    if quota * nodes >= 1:
        assert store_passes(job, simulate(job, "peers")) == 1


@pytest.mark.parametrize("together", [0.25, 0.5, 0.75])
def test_what_nobody_has_room_for_is_read_in_every_epoch(together) -> None:
    job = Job(8, 5, together / 8, chunks=1024)
    assert store_passes(job, simulate(job, "peers")) == pytest.approx(5 - 4 * together)


def test_four_nodes_are_as_measured() -> None:
    """The bytes and the hot spots that measurements/tiers.md has for four emulated nodes."""
    page = (ROOT / "measurements" / "tiers.md").read_text()
    page = page[page.index("### Four nodes") : page.index("### Four jobs")]
    rows = re.findall(r"(?m)^\| datum-\S+, \S+, quota ([\d.]+)(: busiest node ÷ mean)? \| ([\d.]+) × .*\| *\|$", page)
    passes = [(float(quota), float(figure)) for quota, busiest, figure in rows if not busiest and float(figure) >= 1]
    spots = [(float(quota), float(figure)) for quota, busiest, figure in rows if busiest]
    assert len(passes) >= 24
    assert len(spots) >= 12
    for quota, measured in passes:
        job = Job(4, 5, quota, chunks=236)
        modelled = store_passes(job, simulate(job, "peers"))
        assert modelled == pytest.approx(measured, rel=0.02 if quota >= 0.3 else 0.2), quota
    for quota, measured in spots:
        assert hot_spot(simulate(Job(4, 5, quota, chunks=236), "peers")) == pytest.approx(measured, rel=0.25), quota


@pytest.mark.parametrize(("nodes", "quota", "copies"), [(6, 0.7, None), (6, 0.9, None), (5, 0.5, 2), (5, 0.15, None)])
def test_peers_are_asked_as_the_placement_says(nodes, quota, copies) -> None:
    """The same job, chunk by chunk, in the words of pario/dataset/staging.py and pario/tiers/peers.py."""
    job = Job(nodes, 4, quota, 1, 150, copies)
    placed = assign(tiers._DATASET, np.arange(150), [job.room] * nodes, copies or 4)
    keeps = [set(placed.kept_by(node).tolist()) for node in range(nodes)]
    for kept in keeps if copies is None else []:
        kept.update([chunk for chunk in range(150) if chunk not in kept][: job.room - len(kept)])
    has: list[set[int]] = [set() for _ in range(nodes)]
    random = np.random.default_rng(1)
    for epoch in simulate(job, "peers"):
        store, served, own = np.zeros((3, nodes))
        for chunk, asker in enumerate(random.permutation(150) % nodes):
            owners = [node for node in placed.owners[chunk].tolist() if node != NOBODY]
            if chunk in has[asker]:
                own[asker] += 1
                continue
            if not owners:
                store[asker] += 1
                continue
            if chunk not in has[owners[0]]:
                store[owners[0]] += 1
                has[owners[0]].add(chunk)
            if asker != owners[0]:
                source = owners[0] if chunk in keeps[asker] else placed.sources(chunk, int(asker))[0]
                served[source if chunk in has[source] else owners[0]] += 1
            if chunk in keeps[asker]:
                has[asker].add(chunk)
        for ours, theirs in ((epoch.store, store), (epoch.served, served), (epoch.own, own)):
            assert ours.tolist() == theirs.tolist()
    assert all(len(held) <= job.room for held in has)


@pytest.mark.parametrize("nodes", [16, 256])
def test_no_node_serves_much_more_than_another(nodes) -> None:
    assert 1 <= hot_spot(simulate(Job(nodes, 3, 0.3, chunks=32 * nodes), "peers")) < 1.2


def test_the_slowest_flow_sets_the_time() -> None:
    job = Job(4, 2, 0.25, chunks=400, copies=1)
    first, later = simulate(job, "peers")
    for name in ("store", "link", "serve", "tier", "compute"):
        slow = Rates(**{name: 1.0})
        for epoch in (first, later):
            assert seconds(job, replace(slow, **{name: 2.0}), epoch, 1e9) * 2 == seconds(job, slow, epoch, 1e9)
    assert seconds(job, Rates(store=1e6), first, 1e9) == 1000
    assert seconds(job, Rates(store=1e6), later, 1e9) == 0
    assert seconds(job, Rates(compute=1e6), first, 1e9) == 250
    assert seconds(job, Rates(store=1e6, compute=1e6, prefetch=False), first, 1e9) == 1250
    busiest = float(np.max(later.own + later.served)) / job.chunks
    assert seconds(job, Rates(tier=1e6), later, 1e9) == pytest.approx(1000 * busiest)


def test_calibration_points_are_met_where_they_can_be() -> None:
    used = [point for point in tier_report.POINTS if point.use == "calibration"]
    wrong = [point for point in used if tier_report.model(point) != pytest.approx(point.published, rel=1e-3)]
    assert len(used) == 7
    # 1/3 is the least that three epochs can take if the first one is as slow as without tiers
    assert [point.name for point in wrong] == ["PyTorch, LeNet, 100 GiB", "PyTorch, AlexNet, 100 GiB"]
    assert all(point.published < 1 / 3 for point in wrong)


def test_the_page_tells_what_the_close_points_depend_on() -> None:
    """With room for exactly its part on each node no node is busier than another."""
    points = [point for point in tier_report.POINTS if point.name.startswith("ResNet-50")]
    for point in points:
        tight = replace(point, job=replace(point.job, quota=1 / point.job.nodes))
        assert tier_report.model(tight) == pytest.approx(1)
        assert tier_report.model(point) == pytest.approx(0.9, abs=0.01)
    assert len(points) == 2


def test_page_is_what_the_code_says(tables: dict[str, str]) -> None:
    page = (ROOT / "measurements" / "model-tiers.md").read_text()
    assert fill_marked(page, "model-tiers", tables) == page
    for name in tables:
        assert f"<!-- model-tiers: {name} -->" in page
