"""The model with the parameters of the machine that pario's own measurements were made on, beside these measurements.

Not calibrated: every parameter is a property of the disk or of the emulated store that was measured or set by itself.
`compare` does the same for a study (`python -m benchmarks.study`), cell by cell.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.model.auto import auto_s
from benchmarks.model.engine import Link, Machine, Store
from benchmarks.model.recipes import Workload, ior, reading_s
from pario.options import RECIPES, USUAL_INFLIGHT, Options

__all__ = ["STORES", "Row", "compare", "known"]

MB = 1e6
KIB, MIB = 1 << 10, 1 << 20
CORES = 2
COPY_RATE = 5e9  # bytes/s of one core that takes bytes in and puts them into a batch
STEP_S = 0.4e-3  # seconds per step and rank of the loop around it, on one core

#: One server, no heads to move. 1.2 GB/s and 52 us per request: bare preads of 4 MiB and of 4 KiB, cold, no read-ahead.
_DISK = Machine(
    servers=1,
    block=MIB,
    disk_rate=1.2e9,
    seek_s=0.0,
    net_rate=15e9,
    request_s=0.0,
    wire_s=52e-6,
    link_rate=15e9,
    call_s=0.5e-6,
    fault_s=0.25e-6,
    wake_s=0.0,
    depth=4,
    ahead=8,
)
#: The FUSE store as it was set up: 20 ms per request, one token clock of 200 MB/s.
_LATE = replace(_DISK, disk_rate=1e12, net_rate=1e12, wire_s=0.020, shared_rate=200e6)

STORES = {
    "disk": _DISK,
    "throttled": replace(_DISK, shared_rate=200e6),
    # read calls reach the store in requests of 1 MiB
    "latency": replace(_LATE, depth=USUAL_INFLIGHT, ahead=1),
    # the kernel asks for 128 KiB, and for the next 128 KiB when half of it is used; of a mount it has so few requests
    # under way that 16 preads at once got 35 MB/s
    "latency-cached": replace(_LATE, block=128 * KIB, depth=2, ahead=2, shared_rate=35e6),
}


@dataclass(frozen=True)
class Row:
    """One measured figure beside the model's."""

    case: str
    measured: float  # MB/s
    model: float  # MB/s

    @property
    def error(self) -> float:
        return self.model / self.measured - 1


def _faults(machine: Machine, processes: int, pages: int = 64) -> float:
    """MB/s of processes that fault in single pages anywhere, one after the other."""
    store = Store(machine)
    stride = 16 * machine.block

    def go_on(process: int, number: int) -> None:
        if number < pages:
            extent = ((process * pages + number) * stride, 4096)
            more = lambda: go_on(process, number + 1)  # noqa: E731
            store.read(Link(), extent, more, window=1, byte_s=machine.fault_s / 4096)

    for process in range(processes):
        go_on(process, 0)
    store.clock.run()
    return store.delivered / store.clock.now / MB


def _run(machine: Machine, work: Workload, recipe: str) -> float:
    """MB/s of a whole run without computing."""
    copies = work.bytes / (COPY_RATE * min(CORES, work.ranks))
    loop = STEP_S * work.iterations * math.ceil(work.ranks / CORES)
    if recipe == "auto":
        shared = replace(machine, link_rate=machine.link_rate * min(1.0, CORES / work.nodes))
        return work.bytes / auto_s(shared, work, (copies + loop) / work.iterations, Options()) / MB
    return work.bytes / (reading_s(machine, work, recipe) + copies + loop) / MB


def known() -> list[Row]:
    """What plain readers and LMDBIO's own code were measured to get."""
    disk, late = STORES["disk"], STORES["latency-cached"]
    rows = [
        Row(f"disk, pread of {size}, cold, no read-ahead", measured, ior(disk, 1, 1, transfer, 64) / MB)
        for size, transfer, measured in (("4 KiB", 4096, 74), ("64 KiB", 65536, 608), ("1 MiB", MIB, 1174))
    ]
    rows.append(Row("disk, page faults, no read-ahead", 79, _faults(disk, 1)))
    work = Workload(1, 1, batch=64, iterations=79, record=102_400)
    four = replace(work, ranks=4, batch=256, iterations=20)
    rows += [
        Row("latency store, page cache, py-lmdb cursor, 1 rank", 11, _run(late, work, "lmdb")),
        Row("latency store, page cache, py-lmdb cursor, 4 ranks", 11, _run(late, four, "lmdb")),
        Row(
            "latency store, page cache, C cursors, 4 ranks, each its own part",
            36,
            _run(late, replace(four, nodes=4), "coal"),
        ),
        Row("latency store, page cache, py-lmdb random get, 1 rank", 0.2, _faults(late, 1)),
        Row("latency store, page cache, py-lmdb random get, 4 ranks", 0.7, _faults(late, 4)),
        Row("latency store, page cache, LMDBIO LMM, 4 ranks", 11.8, _run(late, four, "lmm")),
        Row("latency store, page cache, LMDBIO DIO, 4 ranks", 11.8, _run(late, four, "dio")),
        Row("latency store, page cache, LMDBIO DIO-PROV-COAL, 4 ranks", 11.8, _run(late, four, "coal")),
    ]
    return rows


def compare(study: dict[str, Any]) -> list[Row]:
    """The cold cells of a study in key order, index saved: median of the measured rates, and the model's.

    study : the JSON of `python -m benchmarks.study`; cells with "store", "dataset", "ranks", "nodes", "state",
        "order", "batch" (records per rank), "runs" (recipe -> runs with "page_rate" in bytes/s and "records")
    """
    rows = []
    for cell in study["cells"]:
        if cell["state"] != "cold" or cell["order"] != "none" or cell["store"] not in STORES:
            continue
        made = study["sets"][cell["dataset"]]
        record = max(4096, round(made["page_bytes"] / made["records"] / 4096) * 4096)
        for recipe, runs in cell["runs"].items():
            if runs and recipe in RECIPES:  # the study's loops written by hand are not modelled
                batch = cell["batch"] * cell["ranks"]
                steps = max(1, round(statistics.median(run["records"] for run in runs) / batch))
                work = Workload(cell["ranks"], cell["nodes"], batch, steps, record)
                # on the latency store the recipes that map the file have a mount with the page cache
                mapped = recipe in ("plain", "lmm", "dm")
                store = "latency-cached" if cell["store"] == "latency" and mapped else cell["store"]
                model = _run(STORES[store], work, {"plain": "lmdb"}.get(recipe, recipe))
                case = f"{cell['store']}, {cell['dataset']}, {cell['ranks']} ranks on {cell['nodes']} nodes, {recipe}"
                rows.append(Row(case, statistics.median(run["page_rate"] / MB for run in runs), model))
    return rows
