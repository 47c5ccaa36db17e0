"""Bandwidth over reading threads, with cold caches: how a store answers one, two, ... 64 reads at once.

The way of the study (Chien et al., "Characterizing Deep-Learning I/O Workloads in TensorFlow", PDSW-DISCS 2018,
section 5.2): whole files or records, read by this many threads, with decoding and without, no prefetching. Besides the
plain reads a `Loader` reads the same records with as many reads in flight.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.micro.items import Decoding, Items
from pario import machine
from pario.decode.base import Decoder
from pario.loader.loader import Loader
from pario.options import Options, Shuffle
from pario.threads import start_thread

THREADS = (1, 2, 4, 8, 16, 32, 64)
#: records per batch of the Loader
_BATCH = 64


@dataclass(frozen=True)
class Case:
    """way : "files", "records" (one read each), or "pario" (a Loader with this many reads in flight)"""

    way: str
    shuffled: bool
    decode: bool

    @property
    def words(self) -> str:
        return f"{self.way}, {'shuffled' if self.shuffled else 'in order'}{', decoded' if self.decode else ''}"


@dataclass(frozen=True)
class Run:
    """seconds : of the run; cpu : processor seconds of this process meanwhile
    latency : median seconds of one read, opening the file included; 0: unknown
    """

    items: int
    bytes: int
    seconds: float
    cpu: float
    latency: float = 0.0


@dataclass(frozen=True)
class Sweep:
    """What to measure.

    seconds : a run takes no longer; it ends earlier when each item has been read once
    decoder : None: nothing is decoded
    """

    threads: Sequence[int] = THREADS
    rounds: int = 3
    seconds: float = 2.0
    orders: Sequence[bool] = (False, True)
    decoder: Decoder | None = None
    seed: int = 0

    def cases(self, ways: Sequence[str]) -> list[Case]:
        decodes = (False, True) if self.decoder is not None else (False,)
        return [Case(way, order, decode) for way in ways for decode in decodes for order in self.orders]


def sweep(
    sources: Sequence[Items],
    what: Sweep,
    *,
    loaded: str | None = None,
    db: str | None = None,
    tick: Callable[[Case, int], object] = lambda case, threads: None,
) -> list[dict[str, Any]]:
    """One row per case and number of threads: {"way", "shuffled", "decode", "threads", "bytes_per_s": [one per round],
    "items_per_s", "latency", "cpu" (of all cores)}. All cases run in turns, each with cold caches.

    loaded : the LMDB that a Loader reads, too; None: no Loader
    tick : called after each run
    Raises ParioError.
    """
    by_way = {items.kind: items for items in sources}
    cases = what.cases([*by_way, *(["pario"] if loaded else [])])
    decodings = {way: Decoding(what.decoder, items) for way, items in by_way.items()} if what.decoder else {}
    found: dict[tuple[Case, int], list[Run]] = {}
    if loaded:  # compiles what is not compiled yet
        for case in cases[-len(what.orders) * (1 + bool(decodings)) :]:
            _by_loader(loaded, db, case, 2, replace(what, seconds=0.0))
    for number, case, threads in itertools.product(range(what.rounds), cases, what.threads):
        for items in sources:
            items.drop()
        if case.way == "pario":
            assert loaded is not None
            run = _by_loader(loaded, db, case, threads, what)
        else:
            items = by_way[case.way]
            items.tell_order(case.shuffled)
            order = items.draw(case.shuffled, what.seed + number)
            run = read_once(items, order, threads, decodings[case.way] if case.decode else None, what.seconds)
        found.setdefault((case, threads), []).append(run)
        tick(case, threads)
    return [_row(case, threads, runs) for (case, threads), runs in found.items()]


def read_once(
    items: Items, order: np.ndarray, threads: int, decoding: Decoding | None = None, seconds: float = float("inf")
) -> Run:
    """Read the items in this order, each thread one after the other, until all are read or the time is over.

    Raises what the first failing thread raised.
    """
    size = int(items.nbytes.max())
    draws = itertools.count()  # next() of it is atomic
    start = threading.Barrier(threads + 1)
    numbers = order.tolist()
    totals = [(0, 0)] * threads
    waits: list[list[float]] = [[] for _ in range(threads)]
    wrong: list[BaseException] = []
    clock = time.perf_counter

    def work(me: int) -> None:
        done = nbytes = 0
        try:
            try:
                buffer = memoryview(bytearray(size))
            finally:
                start.wait()  # also without memory: the others wait for all
            while clock() < until and not wrong and (k := next(draws)) < len(numbers):
                begin = clock()
                got = items.read(numbers[k], buffer)
                waits[me].append(clock() - begin)
                if decoding is not None:
                    decoding(buffer[:got])
                done, nbytes = done + 1, nbytes + got
        except BaseException as e:  # the caller raises it
            wrong.append(e)
        totals[me] = done, nbytes

    until = float("inf")
    try:
        workers = [start_thread(f"reads {me}", work, me, stop=None) for me in range(threads)]
    except BaseException:
        start.abort()  # those that wait there end
        raise
    until = clock() + seconds
    cpu, begin = time.process_time(), clock()
    start.wait()
    for worker in workers:
        worker.join()
    took, cpu = clock() - begin, time.process_time() - cpu
    if wrong:
        raise wrong[0]
    latency = statistics.median(itertools.chain.from_iterable(waits)) if any(waits) else 0.0
    return Run(sum(n for n, _ in totals), sum(n for _, n in totals), took, cpu, latency)


def _by_loader(path: str, db: str | None, case: Case, inflight: int, what: Sweep) -> Run:
    """The same, by a Loader with this many reads in flight, through the node's ring."""
    options = Options(inflight=inflight, tiers=(), once=True)
    decoder = what.decoder if case.decode else None
    shuffle: Shuffle = "global" if case.shuffled else False
    given: dict[str, Any] = {"shuffle": shuffle, "seed": what.seed, "db": db, "recipe": "ring", "options": options}
    with Loader(path, _BATCH, decoder, comm="self", **given) as loader:
        sizes = loader.index.extents["nbytes"]
        items = nbytes = 0
        cpu, begin = time.process_time(), time.perf_counter()
        for batch in loader:
            items += len(batch.ids)
            nbytes += int(sizes[batch.ids].sum())
            if time.perf_counter() - begin > what.seconds:
                break
        return Run(items, nbytes, time.perf_counter() - begin, time.process_time() - cpu)


def _row(case: Case, threads: int, runs: Sequence[Run]) -> dict[str, Any]:
    cores = len(machine.allowed_cores())
    return {
        "way": case.way,
        "shuffled": case.shuffled,
        "decode": case.decode,
        "threads": threads,
        "bytes_per_s": [run.bytes / run.seconds for run in runs],
        "items_per_s": [run.items / run.seconds for run in runs],
        "latency": statistics.median(run.latency for run in runs),
        "cpu": statistics.median(run.cpu / run.seconds / cores for run in runs),
        "cores": cores,
    }
