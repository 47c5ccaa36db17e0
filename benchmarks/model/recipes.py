"""The recipes as what they ask of the machine in one iteration: LMDBIO's six, plain LMDB, and pario's default.

An iteration takes the next `batch` consecutive records; of R readers (one per node), number k reads the k-th share of
them. Iterations of a recipe repeat themselves, 75 MB further on in the file; so a few are simulated and their mean
stands for all (`ROUNDS`), and of long reads at most `BLOCKS` blocks of all readers together. The barrier at an
iteration's end is where the simulation of a round ends. What the ranks of a node do is added up.

A training run then is: computing, which divides by the ranks; reading; and the exchange of gradients, whose time per
iteration grows with the logarithm of the ranks (`Training`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from benchmarks.model.engine import Extent, Link, Machine, Store

__all__ = [
    "RECIPES",
    "Training",
    "Workload",
    "coalesced_iterations",
    "ior",
    "one_client",
    "pread_s",
    "reading_s",
    "stagger_sizes",
]

PAGE = 4096
ROUNDS = 6  # simulated iterations, after one that warms up
BLOCKS = 6000  # of long reads by all readers together; what is longer is extrapolated
WINDOWS = 4  # at least so many times what a reader has under way
KEYS_PER_LEAF = 142
COALESCED = 2_500_000_000  # bytes per node of one coalesced read (the paper's rule)


@dataclass(frozen=True)
class Workload:
    """What is read, and by whom.

    batch : records per iteration over all ranks; record : bytes of a record in the file; iterations of the run
    ranks, nodes : as started
    """

    ranks: int
    nodes: int
    batch: int = 18_432
    iterations: int = 512
    record: int = 4096

    @property
    def round_bytes(self) -> int:
        return self.batch * self.record

    @property
    def bytes(self) -> int:
        return self.round_bytes * self.iterations

    def share(self, node: int, iteration: int, merged: int = 1) -> Extent:
        """What node's reader reads for `merged` iterations from `iteration` on, as one run of records."""
        records = self.batch * merged
        first, stop = records * node // self.nodes, records * (node + 1) // self.nodes
        return (iteration * self.batch + first) * self.record, (stop - first) * self.record

    def leaf_of(self, node: int, iteration: int) -> int:
        """Offset of the leaf page of a reader's first record: among the records of its predecessor."""
        record = iteration * self.batch + self.batch * node // self.nodes
        return max(0, record - KEYS_PER_LEAF // 2) * self.record


def pread_s(machine: Machine, request: int) -> float:
    """Seconds of the node per byte, by read calls of `request` bytes."""
    return machine.call_s / request + 1 / machine.link_rate


def _mmap_s(machine: Machine) -> float:
    """Seconds of the node per byte, by page faults."""
    return machine.fault_s / PAGE + 1 / machine.link_rate


Round = Callable[[Store, list[Link], Workload, int, Callable[[], None]], None]


@lru_cache(maxsize=64)
def _rounds(machine: Machine, work: Workload, one: Round) -> float:
    """Seconds of all iterations, from a few: `one` starts an iteration and calls back for each node that is done."""
    store, links = Store(machine), [Link() for _ in range(work.nodes)]
    begun: list[float] = []

    def begin() -> None:
        begun.append(store.clock.now)
        if len(begun) <= ROUNDS + 1:
            left = work.nodes

            def done() -> None:
                nonlocal left
                left -= 1
                if not left:
                    store.clock.at(store.clock.now, begin)

            one(store, links, work, len(begun) - 1, done)

    begin()
    store.clock.run()
    assert store.asked == store.delivered
    return work.iterations * (begun[-1] - begun[1]) / ROUNDS


def _explicit(store: Store, links: list[Link], work: Workload, iteration: int, done: Callable[[], None]) -> None:
    """Every reader: its share by one long read."""
    machine = store.machine
    for node, link in enumerate(links):
        extent = work.share(node, iteration)
        store.read(link, extent, done, window=machine.depth, byte_s=pread_s(machine, extent[1]))


def _through(store: Store, links: list[Link], work: Workload, iteration: int, done: Callable[[], None]) -> None:
    """Every node walks its cursor through the whole batch from its own first record on, and the read-ahead of the
    mapping drags in all that lies between the leaf pages.
    """
    machine = store.machine
    for node, link in enumerate(links):
        offset, _ = work.share(node, iteration)
        store.read(link, (offset, work.round_bytes), done, window=machine.ahead, byte_s=1 / machine.link_rate)


def _touched(store: Store, links: list[Link], work: Workload, iteration: int, done: Callable[[], None]) -> None:
    """DM: every reader touches the pages of its share; the cursor goes from reader to reader, each moves it over its
    records, for which it needs a leaf page that was not in its share.
    """
    machine, clock = store.machine, store.clock
    ready = [False] * work.nodes
    cursor = 0  # reader that has the cursor, or waits for it
    waiting = True

    def touched(node: int) -> None:
        ready[node] = True
        go_on()

    def go_on() -> None:
        nonlocal waiting
        if waiting and cursor < work.nodes and ready[cursor]:
            waiting = False
            store.read(links[cursor], (work.leaf_of(cursor, iteration), PAGE), walk, window=1, byte_s=_mmap_s(machine))

    def walk() -> None:
        clock.at(clock.now + work.batch / work.nodes * machine.next_s, hand_on)

    def hand_on() -> None:
        nonlocal cursor, waiting
        cursor += 1
        waiting = True
        done()
        go_on()

    for node, link in enumerate(links):
        extent = work.share(node, iteration)
        store.read(link, extent, lambda n=node: touched(n), window=machine.ahead, byte_s=_mmap_s(machine))


def lmdb(machine: Machine, work: Workload) -> float:
    """Plain LMDB: every rank walks. The pages of its own records it faults in one by one, and so do the other ranks of
    the node, which wake each other in vain; the pages are handed out one at a time.
    """
    faults = work.bytes / work.nodes / PAGE
    return reading_s(machine, work, "lmm") + faults * machine.wake_s * (work.ranks / work.nodes - 1)


def lmm(machine: Machine, work: Workload) -> float:
    """One rank per node walks, nobody wakes it in vain."""
    faults = work.bytes / work.nodes / PAGE
    steps = work.batch * work.iterations
    return _rounds(machine, work, _through) + faults * machine.fault_s + steps * machine.next_s


def dm(machine: Machine, work: Workload) -> float:
    return _rounds(machine, work, _touched)


def prov(machine: Machine, work: Workload) -> float:
    return _rounds(machine, work, _explicit)


def dio(machine: Machine, work: Workload) -> float:
    """As prov, after one rank has walked through everything to find the places."""
    return prov(machine, work) + work.batch * work.iterations * machine.next_s


def coalesced_iterations(work: Workload) -> int:
    """Iterations per read: what fits into the memory of a node, a power of two, at most all."""
    fit = COALESCED * work.nodes // work.round_bytes
    return min(work.iterations, 1 << max(0, fit.bit_length() - 1))


@lru_cache(maxsize=64)
def _long_reads(machine: Machine, work: Workload, group: int) -> float:
    """Seconds of the run by long reads of several iterations each, at most `group` readers at once: reader k begins
    when k - group is done.
    """
    merged = coalesced_iterations(work)
    shares = [work.share(node, 0, merged) for node in range(work.nodes)]

    def simulated(part: float) -> tuple[float, int]:
        """Seconds and bytes, if every read ends after this part of it."""
        store, links = Store(machine), [Link() for _ in range(work.nodes)]

        def start(node: int) -> None:
            if node < work.nodes:
                offset, nbytes = shares[node]
                first = (offset, max(PAGE, int(nbytes * part) // PAGE * PAGE))
                byte_s = pread_s(machine, nbytes)
                store.read(links[node], first, lambda: start(node + group), window=machine.depth, byte_s=byte_s)

        for node in range(min(group, work.nodes)):
            start(node)
        store.clock.run()
        assert store.asked == store.delivered
        return store.clock.now, store.delivered

    whole = work.round_bytes * merged
    # no shorter than some windows of blocks under way: a beginning is more orderly than what follows
    part = max(BLOCKS, WINDOWS * machine.depth * work.nodes) * machine.block / whole
    if part >= 1:
        once = simulated(1.0)[0]
    else:  # beginnings, which every read has once, and the rate from then on: a line through two points
        (half_s, half), (part_s, read) = simulated(part / 2), simulated(part)
        once = part_s + (whole - read) * (part_s - half_s) / (read - half)
    return once * work.iterations / merged


def coal(machine: Machine, work: Workload) -> float:
    return _long_reads(machine, work, work.nodes)


def stagger_sizes(work: Workload) -> list[int]:
    return sorted({min(work.nodes, size) for size in (8, 16, 32, work.nodes)})


def stag(machine: Machine, work: Workload) -> float:
    """With the best size of a group: it is chosen by trying in the original, too."""
    return min(_long_reads(machine, work, group) for group in stagger_sizes(work))


def one_client(machine: Machine, request: int, mapped: bool = False) -> float:
    """Bytes/s of one node that reads a file in order, by calls of `request` bytes or by page faults."""
    store, link = Store(machine), Link()
    nbytes = BLOCKS // 10 * machine.block
    byte_s = _mmap_s(machine) if mapped else pread_s(machine, request)
    store.read(link, (0, nbytes), lambda: None, window=machine.depth, byte_s=byte_s)
    store.clock.run()
    return store.delivered / store.clock.now


def ior(machine: Machine, nodes: int, per_node: int, transfer: int = 1 << 20, each: int = 8) -> float:
    """Bytes/s of IOR: every process reads its own region of a file in order, one transfer under way."""
    store, links = Store(machine), [Link() for _ in range(nodes)]
    region = 1 << 30
    byte_s = pread_s(machine, transfer)

    def go_on(link: Link, offset: int, left: int) -> None:
        if left:
            more = lambda: go_on(link, offset + transfer, left - 1)  # noqa: E731
            store.read(link, (offset, transfer), more, window=1, byte_s=byte_s)

    for process in range(nodes * per_node):
        go_on(links[process // per_node], process * region, each)
    store.clock.run()
    return store.delivered / store.clock.now


RECIPES: dict[str, Callable[[Machine, Workload], float]] = {
    "lmdb": lmdb,
    "lmm": lmm,
    "dm": dm,
    "dio": dio,
    "prov": prov,
    "coal": coal,
    "stag": stag,
}


def reading_s(machine: Machine, work: Workload, recipe: str) -> float:
    """Seconds that the whole run's reading takes."""
    if recipe != "lmdb":
        machine = replace(machine, wake_s=0.0)  # they know nothing of it, so one simulation serves all its values
    return RECIPES[recipe](machine, work)


@dataclass(frozen=True)
class Training:
    """What a run does besides reading.

    compute_s : seconds of one rank alone; crowded : how much longer they are where all cores of a node compute
    exchange_s : seconds per iteration and doubling of the ranks
    """

    compute_s: float
    crowded: float
    exchange_s: float

    def seconds(self, work: Workload) -> float:
        compute = self.compute_s / work.ranks * (self.crowded if work.ranks > work.nodes else 1)
        return compute + self.exchange_s * math.log2(work.ranks) * work.iterations
