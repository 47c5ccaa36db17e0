"""PRISMA's experiment: records of 112 KiB in random order from a slow store, a consumer that sleeps in place of
computing, and whoever reads for it.

    python -m benchmarks.prisma --data DIR [--rounds 5] [--compute MS,MS] [--sides NAME,NAME]
                                [--python PYTHON with torch and tensorflow] [--out DIR/prisma.json]

Each round runs every side once, in turn; each run is a new process, and its time begins with its first epoch. Printed
are medians, (least to most), the part of the time of plain synchronous reading that is saved, the time ÷ the larger of
computing, one read ÷ 16 and the store's bandwidth, the most reads that the store saw at once, and the depth, as a mean
over the batches and at the end; after two rounds or more also the time ÷ that of each rival of the same round, as a
geometric mean with its 95 % interval. Needs root, fuse3 and mfusepy.
"""

from __future__ import annotations

import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.design import interval
from benchmarks.measure import Section, finish, interleave, launch, parser_of
from benchmarks.stores.latency import LatencyStore, latency_store

RECORDS, NBYTES = 512, 112 << 10
READ_S, BYTES_PER_S = 0.005, 100e6
#: Threads of "brute force".
MOST = 16
#: Milliseconds of computing per record -> records, epochs: some seconds of each.
RUNS = {2: (512, 4), 6: (512, 2), 12: (256, 2), 40: (128, 1)}

#: name -> front, side, workers of the DataLoader. `lmdb` needs a store with a page cache.
SIDES: dict[str, tuple[str, str, int]] = {
    "plain loop": ("plain", "{plain}", 0),
    "Loader": ("loader", "ours", 0),
    **{f"DataLoader {n} + will_read": ("torch", "ours", n) for n in (0, 2, 4, 8)},
    **{f"DataLoader {n}": ("torch", "{plain}", n) for n in (2, 4, 8, 16)},
    "tf.data AUTOTUNE": ("tf", "{plain}", 0),
}
#: What the others are compared with, round by round.
RIVALS = ("plain loop", "DataLoader 4", "tf.data AUTOTUNE")
#: name -> is there a page cache?
STORES = {"no page cache": False, "page cache": True}


def make(folder: Path) -> Path:
    """The set, its records' places in the file and their sums, once."""
    path = folder / "prisma-1" / "set"
    if not (path.parent / "sums.npy").exists():
        import lmdb

        path.mkdir(parents=True, exist_ok=True)
        records = np.random.default_rng(12).integers(0, 1 << 63, (RECORDS, NBYTES // 8), np.uint64)
        with lmdb.open(str(path), map_size=1 << 28) as env, env.begin(write=True) as txn:
            for i in np.random.default_rng(13).permutation(RECORDS).tolist():
                txn.put(b"%08d" % i, records[i].tobytes())
        content = (path / "data.mdb").read_bytes()
        extents = [(content.index(record[:4].tobytes()), NBYTES) for record in records]
        np.save(path.parent / "extents.npy", np.array(extents))
        np.save(path.parent / "sums.npy", records.sum(axis=1, dtype=np.uint64))
    return path


def run(
    store: LatencyStore, side: tuple[str, str, int], ms: int, plain: str, python: str, epochs: int | None = None
) -> dict[str, Any]:
    front, source, workers = side
    records, of_run = RUNS[ms]
    store.reset()
    arguments = [f"{store.folder}/set", "--front", front, "--side", source.format(plain=plain)]
    arguments += ["--workers", str(workers), "--records", str(records), "--epochs", str(epochs or of_run)]
    found = launch("benchmarks.worker_prisma", [*arguments, "--compute", str(ms / 1000)], python=python, timeout_s=120)
    if found["wrong"] or found["records"] != records * (epochs or of_run):
        raise SystemExit(f"{side}: {found['wrong']} of {found['records']} records are wrong")
    counts = store.counts().get("/set/data.mdb", {})
    return {**found, "at_once": counts.get("most", 0), "reads": counts.get("read", 0), "bytes": counts.get("bytes", 0)}


def one_read(path: Path, cached: bool) -> float:
    """Seconds of one record, alone."""
    import os
    import time

    with latency_store(path.parent, read_s=READ_S, bytes_per_s=BYTES_PER_S, page_cache=cached) as store:
        extents = np.load(path.parent / "extents.npy")
        fd = os.open(f"{store.folder}/set/data.mdb", os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        times = []
        for offset, nbytes in np.random.default_rng(3).permutation(extents)[:100].tolist():
            begin = time.perf_counter()
            os.pread(fd, nbytes, offset)
            times.append(time.perf_counter() - begin)
        os.close(fd)
    return statistics.median(times)


def main() -> int:
    parser = parser_of("prisma", __doc__, 5)
    parser.add_argument("--compute", default="2,6,12,40")
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--python", default=sys.executable)
    options = parser.parse_args()
    path = make(Path(options.data))
    names = ["plain loop", "Loader"] if options.smoke else options.sides.split(",")
    sections = []
    for store, cached in STORES.items():
        r = one_read(path, cached)
        for ms in [40] if options.smoke else map(int, options.compute.split(",")):
            sections.append(Section(f"{store}, {ms} ms", f"{ms} ms of computing, one read {r * 1e3:.1f} ms", store))
            sides = {name: partial(measured, path, cached, ms, SIDES[name], options.python) for name in names}
            sections[-1].raw = {"r": r, "runs": interleave(sides, 1 if options.smoke else options.rounds)}
            show(sections[-1], r, ms)
            finish("prisma", options, sections)
    return 0


def measured(path: Path, cached: bool, ms: int, side: tuple[str, str, int], python: str) -> dict[str, Any]:
    """A store of its own, so that no run finds what another has left in the page cache. Epochs after the first would
    find all of it."""
    with latency_store(path.parent, read_s=READ_S, bytes_per_s=BYTES_PER_S, page_cache=cached) as store:
        return run(store, side, ms, "lmdb" if cached else "pread", python, 1 if cached else None)


def show(section: Section, r: float, ms: int) -> None:
    print(f"\n{section.title} ({section.state})", flush=True)
    runs = section.raw["runs"]
    base = statistics.median([one["seconds"] / one["records"] for one in runs.get("plain loop", [])] or [0.0])
    least = max(ms / 1e3, r / MOST, NBYTES / BYTES_PER_S)
    for name, of_side in runs.items():
        times = [one["seconds"] / one["records"] for one in of_side]
        middle = statistics.median(times)
        print(
            f"  {name:28} {middle * 1e3:6.2f} ms per record ({min(times) * 1e3:.2f} to {max(times) * 1e3:.2f})  "
            f"saves {100 * (1 - middle / base) if base else 0:5.1f} %  ÷ best possible {middle / least:5.2f}  "
            f"at once {max(one['at_once'] for one in of_side):3}  epochs "
            + " ".join(f"{t:.2f}" for t in of_side[-1]["epochs"])
            + "".join(f"  depth {one['depth']:.1f}, last {one['last_depth']}" for one in of_side if "depth" in one)
            + (f"  {of_side[-1].get('counts')} {of_side[-1].get('most')}" if "counts" in of_side[-1] else ""),
            flush=True,
        )
        for rival in RIVALS:
            theirs = [one["seconds"] / one["records"] for one in runs.get(rival, [])]
            if rival != name and len(times) > 1 and len(theirs) == len(times):
                mean, low, high = interval([ours / its for ours, its in zip(times, theirs, strict=True)])
                print(f"    ÷ {rival}: {mean:.3f} ({low:.3f} … {high:.3f})", flush=True)


if __name__ == "__main__":
    sys.exit(main())
