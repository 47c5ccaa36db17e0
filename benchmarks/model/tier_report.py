"""The model of benchmarks/model/tiers.py beside published points, beside pario's measured ones, and where nobody has
measured: the tables of measurements/model-tiers.md. tier_points.json has the points, their set-ups and sources."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.model import calibrate
from benchmarks.model.tiers import WAYS, Job, Rates, Way, hot_spot, seconds, simulate, store_passes

__all__ = ["BAR", "MEASURED", "POINTS", "Point", "model", "predict", "rates", "tables"]

BAR = 0.25
DATA_BYTES = 1e12  # of the predictions
_STORED = json.loads(Path(__file__).with_name("tier_points.json").read_text())


def rates(given: dict[str, Any]) -> Rates:
    """`fits` is the part of the time that three epochs take on a node that keeps all data. An epoch from the store is
    1, so is the first of the three, and the two others share what is left of 3 `fits`, if anything is."""
    given = dict(given)
    left = given.pop("fits", None)
    if left is not None:
        later = max(0.0, (3 * left - 1) / 2)
        given = {"store": 1.0, "compute": 1 / later if later else math.inf, **given}
    return Rates(**given)


@dataclass(frozen=True)
class Point:
    """A published figure.

    figure : a key of `_FIGURES`; published : the ratio; said : as the source has it
    way, against : the model divides the one by the other
    use : "calibration": its rates come from it; "same fact": it follows from the points before it
    """

    source: str
    name: str
    figure: str
    said: str
    published: float
    job: Job
    rates: Rates
    way: Way
    against: Way = "none"
    data_bytes: float = 1.0
    use: str = "held out"


POINTS = [Point(**{**row, "job": Job(**row["job"]), "rates": rates(row.get("rates", {}))}) for row in _STORED["points"]]
MEASURED: list[dict[str, float]] = _STORED["measured"]


def _seconds(point: Point, way: Way) -> list[float]:
    return [seconds(point.job, point.rates, epoch, point.data_bytes) for epoch in simulate(point.job, way)]


def _passes(point: Point, way: Way) -> float:
    return store_passes(point.job, simulate(point.job, way))


def _scaling(point: Point) -> float:
    nodes = point.job.nodes
    job = replace(point.job, nodes=1, quota=1.0, chunks=point.job.chunks // nodes)
    one = replace(point, job=job, data_bytes=point.data_bytes / nodes)
    return _seconds(one, point.way)[-1] / _seconds(point, point.way)[-1]


def _fewest(point: Point) -> float:
    trials = (replace(point, job=replace(point.job, nodes=nodes)) for nodes in range(1, 100))
    return next(trial.job.nodes for trial in trials if _passes(trial, point.way) == 1)


#: figure -> what it is, and the model's
_FIGURES: dict[str, tuple[str, Callable[[Point], float]]] = {
    "time": ("time ÷", lambda p: sum(_seconds(p, p.way)) / sum(_seconds(p, p.against))),
    "later": ("later epoch ÷", lambda p: _seconds(p, p.way)[-1] / _seconds(p, p.against)[-1]),
    "rate": ("rate ÷", lambda p: _seconds(p, p.against)[-1] / _seconds(p, p.way)[-1]),
    "store": ("store ÷", lambda p: _passes(p, p.way) / _passes(p, p.against)),
    "scaling": ("weak scaling", _scaling),
    "passes": ("passes of the store", lambda p: _passes(p, p.way)),
    "fewest": ("fewest nodes", _fewest),
    "hits": ("hits", lambda p: float(simulate(p.job, p.way)[-1].own.sum()) / p.job.chunks),
    "came": ("from others", lambda p: float(simulate(p.job, p.way)[-1].came.sum()) / p.job.chunks),
}
_RATIOS = ("time", "later", "rate", "store", "scaling")  # 1 means that the way changes nothing


def model(point: Point) -> float:
    return _FIGURES[point.figure][1](point)


def _table(head: str, rows: list[list[str]]) -> str:
    lines = [head, *(" | ".join(row) for row in rows)]
    lines.insert(1, " | ".join("---" for _ in head.split(" | ")))
    return "\n".join(f"| {line} |" for line in lines)


def _points() -> dict[str, str]:
    rows, held, near, outside = [], [], [], []
    for point in POINTS:
        value, source = model(point), point.source.split(",")[0]
        over = value / point.published
        within, change = abs(over - 1) <= BAR, ""
        if point.figure in _RATIOS and point.published != 1:
            moved = (value - 1) / (point.published - 1)
            change = f"{round(moved, 2) + 0.0:.2f}"
            near += [abs(moved - 1) <= BAR] if point.use == "held out" else []
        held += [within] if point.use == "held out" else []
        outside += [] if within else [f"{source}, {point.name}, {point.figure} ({over:.2f}, {point.use})"]
        figure, shown = _FIGURES[point.figure][0], f"{over:.2f}" if within else f"**{over:.2f}**"
        values = [f"{point.published:.3g}", f"{value:.3g}", shown, change, point.use]
        if point.use != "calibration":
            rows.append([source, f"{point.name} ({point.said})", figure, *values])
    summary = (
        f"* Within 25 %: {sum(held)} of {len(held)} held-out points. Outside: {'; '.join(outside)}.\n"
        f"* By the change, of held-out points that are ratios: {sum(near)} of {len(near)}."
    )
    head = "source | point | figure | published | model | model ÷ | change ÷ | use"
    return {"points": _table(head, rows), "summary": summary}


def predict(nodes: int, quota: float) -> list[str]:
    """Cells for five epochs. The store and the links are those of measurements/model.md (best set), disks FanStore's
    (678 files of 8 MB per second), the service measurements/tiers.md's (whole chunks, TCP)."""
    machine = calibrate.load()[0].machine
    store = machine.servers * min(machine.disk_rate, machine.net_rate)
    given = Rates(store=store, link=machine.link_rate, serve=1.15e9, tier=678 * 8e6)
    job = Job(nodes, quota=quota, chunks=32_768)
    runs = {way: simulate(job, way) for way in WAYS}
    took = {way: [f"{seconds(job, given, epoch, DATA_BYTES):,.3g}" for epoch in runs[way]] for way in WAYS}
    own, peers, came = (
        float(counts.sum()) / job.chunks
        for counts in (runs["own"][-1].store, runs["peers"][-1].store, runs["peers"][-1].came)
    )
    moved = [
        f"{nodes:,}",
        f"{quota:.3g}",
        f"{own:.3f}",
        f"{peers:.2f}",
        f"{came:.2f}",
        f"{hot_spot(runs['peers']):.2f}",
    ]
    return [*moved, took["none"][-1], took["own"][-1], *took["peers"][:: job.epochs - 1], took["local"][-1]]


def _predicted() -> str:
    rows = [predict(nodes, 0.3) for nodes in (1, 4, 16, 64, 256, 1024)]
    rows += [predict(nodes, 0.5 / nodes) for nodes in (4, 64, 1024)]
    head = "nodes | quota | store: own | store: peers | network | hot spot"
    return _table(f"{head} | s: no tiers | own | peers, first | peers, last | all local", rows)


def _measured() -> str:
    rows = []
    for row in MEASURED:
        job = Job(4, quota=float(row["quota"]), chunks=236)
        epochs = simulate(job, "peers")
        passes, spot = store_passes(job, epochs), row.get("hot_spot")
        spots = f"{spot}, {hot_spot(epochs):.3f}" if spot else ""
        rows.append([str(job.quota), f"{row['passes']}, {passes:.3f}", spots, f"{row['time']}, {passes / 5:.3f}"])
    return _table("quota | passes of the store | busiest node ÷ mean | time ÷ without tiers", rows)


def _scaled() -> str:
    """Weak scaling: measured by benchmarks/scale.py, whose nodes train on 200 records of 107 KB per second; the model
    with its links; last, nodes that only read."""
    job = Job(512, epochs=4, chunks=41 * 512)
    tried = Point("pario", "packed", "scaling", "", 1.0, job, Rates(link=25e6, compute=200 * 107e3), "peers")
    rows = []
    for nodes in (2, 4, 16, 64, 512):
        job = Job(nodes, epochs=4, quota=min(1.0, 1.33 / nodes), chunks=41 * nodes)
        point = replace(tried, job=job, data_bytes=nodes * 42.8e6)
        reads = replace(point, rates=Rates(link=12.5e9, tier=678 * 8e6))
        told = [f"{value:.2f}" for value in _STORED["scaled"].get(str(nodes), [])] or [""] * 4
        rows.append([str(nodes), *told, f"{_scaling(point):.2f}", f"{_scaling(reads):.2f}"])
    head = "nodes | Loader, emulated | Loader, hosts | view, emulated | view, hosts"
    return _table(f"{head} | model, hosts | model, only reading", rows)


def tables() -> dict[str, str]:
    """Name -> Markdown, for the markers `<!-- model-tiers: NAME -->`."""
    return {**_points(), "predicted": _predicted(), "measured": _measured(), "scaled": _scaled()}
