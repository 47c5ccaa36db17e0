"""What bandwidth over threads says: the knee, what limits the rate, which settings follow. Arithmetic on the rows; and
what the device itself gives, which fio measures."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.cache import Unavailable
from benchmarks.stores.throttled import fio_jobs, require_fio
from pario.text import counted, decimal_bytes, seconds

#: bytes of a long read, and of a block
_LONG, _BLOCK = 4 << 20, 4096
#: reads in flight: of long ones, of those of an item's size
_JOBS_LONG, _JOBS = 8, 64

#: way, shuffled, decode
Key = tuple[str, bool, bool]

Rows = Sequence[Mapping[str, Any]]

#: The knee is the fewest threads that give this part of the best bandwidth.
_NEAR = 0.9
#: From this part of the device's own rate on the device is the limit; from this part of the cores on they are.
_FULL, _BUSY = 0.8, 0.8
#: Python threads that only read take turns: this many cores' time is all they can use.
_TURNS = 0.9
#: A read takes this much longer than alone, at most: then nothing queues.
_ALONE = 1.6


class Finding(NamedTuple):
    """Of one case. rate, alone : bytes per second at the best number of threads, and with one thread
    knee, most : fewest threads that come within 10 % of the best; the largest number that was tried
    limit : "device", "request", "latency", "queue", "processor" or "interpreter"
    slower : how many times longer a read takes at the best than alone
    """

    rate: float
    alone: float
    best: int
    knee: int
    most: int
    limit: str
    latency: float
    slower: float
    cpu: float


def find(rows: Rows, ceiling: Mapping[str, float] | None) -> Finding:
    """rows : of one case, by number of threads
    ceiling : {"sequential", "at_size"} bytes per second of the device; None: unknown
    """
    rates = {row["threads"]: statistics.median(row["bytes_per_s"]) for row in rows}
    by_threads = {row["threads"]: row for row in rows}
    best = max(rates, key=lambda threads: rates[threads])
    knee = min(threads for threads, rate in rates.items() if rate >= _NEAR * rates[best])
    row, first = by_threads[best], by_threads[min(rates)]
    slower = row["latency"] / first["latency"] if first["latency"] else 0.0
    limit = _limit(rates[best], row, slower, ceiling)
    return Finding(
        rates[best], rates[min(rates)], best, knee, max(rates), limit, first["latency"], slower, row["cpu"]
    )


def _limit(rate: float, row: Mapping[str, Any], slower: float, ceiling: Mapping[str, float] | None) -> str:
    if row["cpu"] >= _BUSY:
        return "processor"
    if ceiling is not None and rate >= _FULL * ceiling["sequential"]:
        return "device"
    if ceiling is not None and rate >= _FULL * ceiling["at_size"]:
        return "request"
    if row["way"] != "pario" and not row["decode"] and row["cpu"] * row["cores"] >= _TURNS:
        return "interpreter"
    return "latency" if 0 < slower <= _ALONE else "queue"


def why(found: Finding) -> str:
    """What limits the rate, in a few words."""
    return {
        "processor": f"the processor: {found.cpu:.0%} of the cores are busy",
        "interpreter": "one core: Python's threads take turns, and the items are small",
        "device": "the device's bandwidth",
        "request": "the device at this size of reads",
        "latency": f"the store's latency: a read takes {seconds(found.latency)} alone, and hardly longer beside "
        f"{counted(found.best - 1, 'other')}, so that more at once would give more",
        "queue": f"the store: reads queue there, one takes {found.slower:.1f} × as long as alone"
        if found.slower
        else "the store, or the way to it",
    }[found.limit]


def sentence(case: str, found: Finding, ceiling: Mapping[str, float] | None) -> str:
    """One sentence about one case."""
    gain = f", {found.rate / found.alone:.1f} × one thread's" if found.alone else ""
    beside = (
        f" (the device itself: {decimal_bytes(ceiling['sequential'])}/s in long reads, "
        f"{decimal_bytes(ceiling['at_size'])}/s in reads of this size)"
        if ceiling is not None
        else ""
    )
    return (
        f"{case}: {decimal_bytes(found.rate)}/s{gain}{beside}, of which {counted(found.knee, 'thread')} "
        f"{'gives' if found.knee == 1 else 'give'} at least 90 %; the limit is {why(found)}."
    )


def main_case(keys: Sequence[Key]) -> Key:
    """Which case stands for a store: plain reads, and shuffled, as a training reads, if that was measured."""
    return min(keys, key=lambda key: (key[2], key[0] == "pario", not key[1]))


def advice(findings: Mapping[Key, Finding]) -> list[str]:
    """Settings that follow, a line each. findings : by (way, shuffled, decode)"""
    said = []
    for way, setting in (("records", "Options(inflight={})"), ("files", "{} reading threads or workers")):
        found = findings.get((way, True, False)) or findings.get((way, False, False))
        if found is not None:
            more = ", or more: the rate still grows" if found.limit == "latency" and found.best == found.most else ""
            auto = '; "auto", the default, finds the number by itself' if way == "records" else ""
            said.append(f"{way}: {setting.format(found.knee)}{more}{auto}")
    for shuffled in (False, True):
        mine, theirs = findings.get(("files", shuffled, False)), findings.get(("pario", shuffled, False))
        if mine and theirs and theirs.rate >= 1.5 * mine.rate:
            times = f"{theirs.rate / mine.rate:.1f} ×"
            order = "in a shuffled order" if shuffled else "in order"
            said.append(f"pack the files into an LMDB (python -m pario data pack): pario reads {times} as fast {order}")
    for way in ("pario", "records"):
        ordered, shuffled_ = findings.get((way, False, False)), findings.get((way, True, False))
        if ordered and shuffled_ and ordered.rate >= 1.5 * shuffled_.rate:
            times = f"{ordered.rate / shuffled_.rate:.1f} ×"
            said.append(f'shuffle="block" instead of "global": order brings {times} the rate of single records')
            break
    for (way, _, decode), found in findings.items():
        if decode and found.limit == "processor":
            said.append(f"more cores per rank, smaller images, or fast=True: decoding ({way}) takes all cores")
            break
    return said



class Ceiling(NamedTuple):
    """What the device itself gives: fio, past the page cache. Bytes per second.

    sequential : long reads, each job through a stretch of its own
    at_size : reads of `read_bytes`, at random
    """

    sequential: float
    at_size: float
    read_bytes: int


def measure_ceiling(files: Sequence[str], read_bytes: float, seconds: float) -> Ceiling:
    """Read the files with fio, without writing to them. Raises Unavailable if fio is not there, or cannot.

    files : one, which is divided among the reads in flight, or several, each read again and again
    read_bytes : of one item; rounded up to whole blocks
    seconds : each of the two measurements may take
    """
    require_fio()
    least = min(os.path.getsize(file) for file in files) // _BLOCK * _BLOCK
    if not least:
        raise Unavailable(f"the files are too small for fio: less than {_BLOCK} bytes")
    block = min(-(-int(read_bytes) // _BLOCK) * _BLOCK, least)
    if len(files) > 1:
        long = _run([("--rw=read", f"--bs={min(_LONG, least)}", f"--size={least}")], files, seconds)
        return Ceiling(long, _run([("--rw=randread", f"--bs={block}")], files, seconds), block)
    jobs = max(1, min(_JOBS_LONG, least // _LONG))
    stretch = least // jobs // _BLOCK * _BLOCK
    parts = [
        ("--rw=read", f"--bs={min(_LONG, stretch)}", f"--size={stretch}", f"--offset={k * stretch}")
        for k in range(jobs)
    ]
    jobs = max(1, min(_JOBS, least // block))
    return Ceiling(
        _run(parts, list(files) * len(parts), seconds),
        _run([("--rw=randread", f"--bs={block}", "--norandommap")] * jobs, list(files) * jobs, seconds),
        block,
    )


def _run(how: Sequence[tuple[str, ...]], files: Sequence[str], seconds: float) -> float:
    """Bytes per second of jobs that read these files at once. how : of each, or of all"""
    words = ["--ioengine=psync", "--group_reporting", "--time_based", f"--runtime={max(1, round(seconds))}"]
    for number, file in enumerate(files):
        name = file.replace("\\", "\\\\").replace(":", "\\:")
        words += [f"--name=job{number}", f"--filename={name}", *how[number % len(how)]]
    jobs = fio_jobs(words, files, timeout_s=60 + 10 * seconds)
    nbytes = sum(job["read"]["io_bytes"] for job in jobs)
    return float(nbytes) / max(max(job["read"]["runtime"] for job in jobs) / 1000, 1e-3)
