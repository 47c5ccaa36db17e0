"""The bars that pario must reach, each measured beside what it is compared with.

    python -m benchmarks.data DIR
    python -m benchmarks.bars --data DIR [--only NAME ...] [--out results.json]

Every section prints its rows as: met / NOT MET, case, figure (median), spread, bar. Exit status 1 if a bar is not met,
3 if something could not be measured here. A bar is never lowered here; rows without a bar are for information.
"""

from __future__ import annotations

import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import lmdb
import numpy as np

from benchmarks import cache, data
from benchmarks.measure import Row, Section, WorkerError, finish, interleave, parser_of
from benchmarks.sides import (
    BATCH,
    SHUFFLES,
    SMALL,
    UNIT,
    Bench,
    compare,
    epoch_seconds,
    fastest,
    from_cold,
    rate_of,
    records_of,
)
from benchmarks.stores import throttled
from benchmarks.worker_lmdb import BARE, TIGHT
from pario.options import USUAL_INFLIGHT

MB = 1e6
STORE_BYTES_PER_S = 200_000_000  # the slow shared store
SEQUENTIAL_BYTES = 4 << 20  # fio's read size for the long reads
WARM_EPOCHS = "4"  # of one process: the first is shown apart


def content(bench: Bench, section: Section) -> None:
    """Untimed: every record exactly once, every byte right, against py-lmdb."""
    for which, held in bench.sets.items():
        truth = np.empty(held.records, np.uint64)
        env = lmdb.open(held.path, readonly=True, lock=False)
        stop = held.head + held.image_bytes
        with env.begin() as txn:
            for i, value in enumerate(txn.cursor().iternext(keys=False)):
                truth[i] = data.record_digest(memoryview(value)[held.head : stop], value[-1])
        env.close()
        for shuffle, name in SHUFFLES.items():
            for ranks, nodes in ((1, 1), (4, 2)) if bench.quick else ((1, 1), (3, 1), (4, 2)):
                with tempfile.TemporaryDirectory(prefix="pario-check-") as folder:
                    bench.pario(held.path, which, shuffle, "--check", folder, ranks=ranks, nodes=nodes)
                    parts = [np.load(f"{folder}/check-{rank}.npz") for rank in range(ranks)]
                    ids = np.concatenate([part["ids"] for part in parts])
                    hashes = np.concatenate([part["hashes"] for part in parts])
                once = np.bincount(ids, minlength=held.records) if len(ids) else np.zeros(held.records, int)
                wrong = int((once != 1).sum()) + int((hashes != truth[ids]).sum())
                case = f"{held.name}, {name}, {ranks} ranks on {nodes} nodes: records missing, repeated or wrong"
                section.add(Row.of(case, [wrong], "<=", 0, unit="records"))


def redundancy(bench: Bench, section: Section) -> None:
    """Bytes at the device of a disk that holds nothing but the data file and its index."""
    shapes = [(1, 1), (3, 1)] if bench.quick else [(1, 1), (2, 1), (3, 1), (8, 1), (2, 2), (4, 2), (8, 2), (8, 4)]
    section.note("emulated nodes share one page cache, so what the ranks ask the kernel for is bounded as well")
    for which, held in bench.sets.items():
        with throttled.throttled_disk(bench.folder, held.file_bytes + held.file_bytes // 20 + (64 << 20)) as disk:
            path = disk.copy(held.path)
            file = f"{path}/data.mdb"
            bench.index(path)
            for shuffle in ("none", "block"):
                for ranks, nodes in shapes:
                    cache.drop_file(file)
                    with throttled.Group(disk.device) as group:
                        run = bench.cold(path, which, shuffle, ranks=ranks, nodes=nodes, group=group)
                        device = group.bytes_read()
                    asked = sum(rank["epochs"][0]["asked"] for rank in run["ranks"])
                    section.raw.setdefault("runs", []).append(
                        {"set": which, "shuffle": shuffle, "nodes": nodes, "device": device, "asked": asked, "run": run}
                    )
                    case = f"{held.name}, {SHUFFLES[shuffle]}, {ranks} ranks on {nodes} nodes"
                    words = f"{device / MB:.1f} MB at the device, {asked / MB:.1f} MB asked for"
                    worst = max(device, asked) / held.record_bytes
                    section.add(Row.of(case, [worst], "<=", 1.02, ours=words))


def index(bench: Bench, section: Section) -> None:
    """Bytes at the device while the index is built from a cold file; nothing saved before."""
    for which, held in bench.sets.items():
        with throttled.throttled_disk(bench.folder, held.file_bytes + held.file_bytes // 20 + (64 << 20)) as disk:
            path = disk.copy(held.path)
            for ranks, nodes in ((1, 1),) if bench.quick else ((1, 1), (4, 1), (4, 2)):
                for side in Path(path).glob("*"):
                    if side.name not in ("data.mdb", "set.json"):
                        side.unlink()
                cache.drop_file(f"{path}/data.mdb")
                with throttled.Group(disk.device) as group:
                    run = bench.pario(path, which, "none", "--index-only", ranks=ranks, nodes=nodes, group=group)
                    device = group.bytes_read()
                seconds = max(rank["construct"] for rank in run["ranks"])
                tree = held.tree_pages * held.page_size
                section.raw.setdefault("runs", []).append({"set": which, "ranks": ranks, "device": device, "run": run})
                case = f"{held.name}, {ranks} ranks on {nodes} nodes"
                words = f"{device / MB:.2f} MB at the device, {seconds:.2f} s"
                ratio = device / tree
                section.add(Row(f"{case}: ÷ tree pages", ratio, ratio, ratio, "<=", 1.2, ours=words))
                part = device / held.file_bytes * 100
                section.add(Row(f"{case}: of the file", part, part, part, "<=", 1.0, unit="%"))


def cold_long(bench: Bench, section: Section) -> None:
    """Sequential and block-shuffled epochs against fio's long sequential reads, interleaved."""
    section.note("rates are bytes of the records' pages per second, so that both sides count the same bytes")
    for which, held in bench.sets.items():
        _cold_long(bench, section, which, held.path, None, "bare disk")
        with throttled.throttled_disk(bench.folder, held.file_bytes + held.file_bytes // 20 + (64 << 20)) as disk:
            _cold_long(bench, section, which, disk.copy(held.path), disk.device, "200 MB/s store")


def _cold_long(bench: Bench, section: Section, which: str, path: str, device: str | None, where: str) -> None:
    held = bench.sets[which]
    file = f"{path}/data.mdb"
    bench.index(path)

    cap = None if device is None else STORE_BYTES_PER_S

    def by_fio(depth: int) -> Callable[[], float]:
        def run(group: throttled.Group | None) -> tuple[float, float]:
            found = throttled.fio(file, random=False, read_bytes=SEQUENTIAL_BYTES, depth=depth, group=group)
            return found["bytes"], found["seconds"]

        return lambda: from_cold(file, run, cap)

    def by_pario(shuffle: str) -> Callable[[], float]:
        def run(group: throttled.Group | None) -> tuple[float, float]:
            return held.record_bytes, epoch_seconds(bench.cold(path, which, shuffle, group=group))

        return lambda: from_cold(file, run, cap)

    sides = {"fio 1": by_fio(1), "none": by_pario("none"), "fio 8": by_fio(8), "block": by_pario("block")}
    rounds = bench.rounds if device is None else min(bench.rounds, 5)
    found = interleave(sides, rounds)
    section.raw[f"{which}, {where}"] = found
    for shuffle in ("none", "block"):
        case = f"{held.name}, {SHUFFLES[shuffle]}, {where}"
        compare(section, case, found[shuffle], found["fio 1"], 0.95, "fio 4 MiB")
        compare(section, f"{case}, fio with 8 reads in flight", found[shuffle], found["fio 8"], None, "fio")


def cold_random(bench: Bench, section: Section) -> None:
    """Globally shuffled large records: against fio of the same size and depth, and against py-lmdb."""
    which = "197k"
    if which not in bench.sets:
        return
    held = bench.sets[which]
    size = held.record_bytes // held.records
    depth = USUAL_INFLIGHT
    limit = 400 if bench.quick else 2000
    for ranks in (1, 4):
        with bench.order(which, "global", ranks) as order:

            def by_fio(group: throttled.Group | None) -> tuple[float, float]:
                run = throttled.fio(held.file, random=True, read_bytes=size, depth=depth, group=group)
                return run["bytes"], run["seconds"]

            def by_pario(group: throttled.Group | None, ranks: int = ranks) -> tuple[float, float]:
                run = bench.cold(held.path, which, "global", ranks=ranks, group=group)
                return held.record_bytes, epoch_seconds(run)

            def by_lmdb(group: throttled.Group | None, ranks: int = ranks, order: str = order) -> tuple[float, float]:
                run = bench.py_lmdb(which, "--order", order, "--limit", str(limit), ranks=ranks, group=group)
                return records_of(run) * size, epoch_seconds(run)

            bench.index(held.path)
            sides = {"fio": by_fio, "pario": by_pario, "py-lmdb": by_lmdb}
            runs = {name: lambda side=side: from_cold(held.file, side) for name, side in sides.items()}
            found = interleave(runs, bench.rounds)
        section.raw[f"{ranks} ranks"] = found
        name = f"fio random {size >> 10} KiB, depth {depth}"
        bar = 0.9 if ranks == 1 else None
        compare(section, f"{held.name}, {ranks} ranks ÷ fio", found["pario"], found["fio"], bar, name)
        what = "py-lmdb get, readahead=False"
        compare(section, f"{held.name}, {ranks} ranks ÷ py-lmdb", found["pario"], found["py-lmdb"], 8.0, what)


def warm(bench: Bench, section: Section) -> None:
    """One rank, everything in the page cache: pario against the bare py-lmdb loop in the same order."""
    section.note(
        "later epochs of one process count (py-lmdb has then mapped every page, its best case); the first epoch of a "
        "fresh process is shown as well"
    )
    section.note(
        "the bar is held against the loop of training scripts, batch[i] = np.frombuffer(txn.get(key), ...), with "
        "buffers=True or without, whichever is faster here; the tightest loop over one array is a row of its own"
    )
    bars = {("3k", "global"): 1.5, ("3k", "block"): 2.5, ("197k", "global"): 0.9, ("197k", "block"): 0.9}
    for which, held in bench.sets.items():
        bench.index(held.path)
        cache.warm_file(held.file)
        for shuffle in ("global", "block"):
            with bench.order(which, shuffle) as order:
                how = ("--epochs", WARM_EPOCHS, "--tiers", "default")
                sides = {"pario": partial(bench.pario, held.path, which, shuffle, *how)}
                for variant in (*BARE, *TIGHT):
                    more = ("--order", order, "--variant", variant, "--epochs", WARM_EPOCHS)
                    sides[variant] = partial(bench.py_lmdb, which, *more)
                found = interleave(sides, bench.rounds)
            section.raw[f"{which}, {shuffle}"] = found
            later = {name: [rate_of(run) for run in runs] for name, runs in found.items()}
            first = {name: [rate_of(run, first=True) for run in runs] for name, runs in found.items()}
            case = f"{held.name}, {SHUFFLES[shuffle]}"
            for name, rates, among, bar in (
                (case, later, BARE, bars[which, shuffle]),
                (f"{case}, first epoch of a process", first, BARE, None),
                (f"{case}, tightest loop", later, TIGHT, None),
            ):
                best = fastest(rates, among)
                compare(section, name, rates["pario"], rates[best], bar, f"py-lmdb {best}", **UNIT)


def first_batch(bench: Bench, section: Section) -> None:
    """From calling Loader(...) to the first batch, in a fresh process; modules imported, kernels compiled before."""
    for which, held in bench.sets.items():
        bench.index(held.path)
        bench.pario(held.path, which, "global", "--steps", "1")  # kernels into the cache
        for state in ("cold", "warm"):
            for ranks in (1,) if bench.quick else (1, 2):
                runs = []
                for _ in range(bench.rounds):
                    cache.drop_file(held.file) if state == "cold" else cache.warm_file(held.file)
                    runs.append(bench.pario(held.path, which, "global", "--steps", "1", ranks=ranks))
                total = [max(r["construct"] + r["epochs"][0]["first_batch"] for r in run["ranks"]) for run in runs]
                imports = [max(r["import"] for r in run["ranks"]) for run in runs]
                section.raw[f"{which}, {state}, {ranks}"] = runs
                words = f"and import {statistics.median(imports):.2f} s"
                case = f"{held.name}, global, {ranks} ranks, {state} file"
                section.add(Row.of(case, total, "<=", 1.0, unit="s", ours=words))


def memory(bench: Bench, section: Section) -> None:
    """Sum of the ranks' PSS (shared pages counted once) after each of 20 epochs."""
    epochs = 4 if bench.quick else 20
    section.note("growth: the last epoch's memory less the most of epochs 2 to 5; 1 MiB a rank is the allocator's")
    for which, held in bench.sets.items():
        bench.index(held.path)
        cache.warm_file(held.file)
        for shuffle in ("global", "block"):
            ranks = 2
            run = bench.pario(held.path, which, shuffle, "--epochs", str(epochs), ranks=ranks)
            nodes = [sum(r["epochs"][e]["memory"]["pss"] for r in run["ranks"]) for e in range(epochs)]
            shared = sum(r["epochs"][-1]["memory"]["pss_shmem"] for r in run["ranks"])
            section.raw[f"{which}, {shuffle}"] = {"pss_of_node": nodes, "run": run}
            settled = max(nodes[1:5])
            growth = (nodes[-1] - settled) / (1 << 20)
            words = f"node {nodes[-1] / MB:.0f} MB, of it shared windows {shared / MB:.0f} MB"
            case = f"{held.name}, {SHUFFLES[shuffle]}, {ranks} ranks, growth over {epochs} epochs"
            section.add(Row(case, growth, growth, growth, "<=", float(ranks), "MiB", ours=words))


SECTIONS: dict[str, tuple[Callable[[Bench, Section], None], str, str]] = {
    "content": (content, "Every record exactly once, every byte right", "any"),
    "redundancy": (redundancy, "Bytes at the device per epoch ÷ bytes of the records' pages", "cold"),
    "index": (index, "Bytes to build the index", "cold"),
    "cold_long": (cold_long, "Cold epochs in long reads ÷ fio O_DIRECT sequential 4 MiB", "cold"),
    "cold_random": (cold_random, "Cold, shuffle='global', 197 KB records", "cold"),
    "warm": (warm, "Warm, one rank ÷ the bare py-lmdb loop", "warm"),
    "first_batch": (first_batch, "Time from Loader(...) to the first batch", "index and kernels cached"),
    "memory": (memory, "Memory of a node", "warm"),
}


def main() -> int:
    parser = parser_of("bars", __doc__, 7)
    parser.add_argument("--only", action="append", choices=list(SECTIONS), help="may be given several times")
    parser.add_argument("--sets", choices=sorted(data.SETS), action="append", help="default: both")
    options = parser.parse_args()
    # An orderly end on SIGTERM too: mounts, loop devices and control groups must go.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    bench = Bench.of(options)
    bench.make({which: few for which, few in SMALL.items() if which in (options.sets or data.SETS)}, {})
    sections: list[Section] = []
    failed = False
    for name in options.only or SECTIONS:
        run, title, state = SECTIONS[name]
        section = Section(name, title, state)
        print(f"{name}: {title} [{state}]", flush=True)
        begin = time.monotonic()
        try:
            run(bench, section)
        except (cache.Unavailable, WorkerError) as problem:
            failed = True
            section.note(f"NOT MEASURED: {problem}")
        section.seconds = time.monotonic() - begin
        sections.append(section)
        sets = {which: vars(held) for which, held in bench.sets.items()}
        bad = finish("bars", options, sections, batch=BATCH, sets=sets)
    lost = [(s.name, row.case) for s in sections for row in s.rows if row.met is False]
    met = sum(row.met is True for s in sections for row in s.rows)
    print(f"{met} bars met, {len(lost)} not met" + (", some not measured" if failed else ""))
    for name, case in lost:
        print(f"  not met: {name}: {case}")
    if options.smoke:  # figures of tiny data say nothing; wrong records do
        bad = any(name == "content" for name, _ in lost)
    return 1 if bad else 3 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
