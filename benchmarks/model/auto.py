"""pario's default on the modelled machine: long reads in the background, several under way per node, no barrier.

    node k      group j (steps that fill a slot): one read per step, none longer than READ_BYTES, `inflight` at once
                |--- read j ---|--- read j+1 ---| ...   up to `slots` groups that are not used up yet
    training       |-- step --|-- step --| ...           begins when every node has the step's group (the exchange of
                                                         gradients holds all ranks together, not the reader)

The whole run is simulated: nodes drift apart in it, so that its beginning tells too little.

In key order a node's records of one step are one run of the file, and those of the next step lie a whole batch
further on: at 9,216 ranks reads of 302 KB, which only the servers' elevators join. Nothing is known of the places until
there is an index: either a saved one is loaded and broadcast (`sidecar_s`), or the leaf pages are read first
(`walk_s`).
"""

from __future__ import annotations

import math

from benchmarks.model.engine import Link, Machine, Store
from benchmarks.model.recipes import KEYS_PER_LEAF, PAGE, Workload, pread_s
from pario.options import READ_BYTES, Options

__all__ = ["auto_s", "sidecar_s", "walk_s"]

INDEX_BYTES = 16  # per record
LEAVES = 6000  # read in a simulated walk, all readers together


def auto_s(machine: Machine, work: Workload, step_s: float, options: Options | None = None) -> float:
    """Seconds of a run whose steps take `step_s` without reading, from the first read to the last step's end."""
    options = options or Options()
    unit = work.share(0, 0)[1]
    per_group = max(1, options.slot_bytes // unit)
    steps = work.iterations
    groups = -(-steps // per_group)
    store, links = Store(machine), [Link() for _ in range(work.nodes)]
    clock = store.clock
    missing = [work.nodes] * groups  # nodes whose group is still under way
    ends: list[float] = []  # of the steps
    used_up = 0  # groups

    class Feed:
        def __init__(self, node: int) -> None:
            self.node, self.link = node, links[node]
            self.group, self.under_way = 0, 0
            self.reads: list[tuple[int, int, int]] = []  # group, offset, bytes
            self.left: dict[int, int] = {}

        def go_on(self) -> None:
            while self.under_way < options.usual_inflight:
                if not self.reads:
                    if self.group >= min(groups, used_up + options.slots):
                        return
                    self._plan()
                group, offset, nbytes = self.reads.pop(0)
                self.under_way += 1
                store.read(
                    self.link,
                    (offset, nbytes),
                    lambda g=group: self._landed(g),
                    window=machine.depth,
                    byte_s=pread_s(machine, nbytes),
                )

        def _plan(self) -> None:
            group, self.group = self.group, self.group + 1
            for step in range(group * per_group, min(steps, (group + 1) * per_group)):
                offset, nbytes = work.share(self.node, step)
                for at in range(0, nbytes, READ_BYTES):
                    self.reads.append((group, offset + at, min(READ_BYTES, nbytes - at)))
            self.left[group] = len(self.reads)

        def _landed(self, group: int) -> None:
            self.under_way -= 1
            self.left[group] -= 1
            if not self.left[group]:
                missing[group] -= 1
                if not missing[group] and group == len(ends) // per_group:
                    train()
            self.go_on()

    feeds = [Feed(node) for node in range(work.nodes)]
    training = False

    def train() -> None:
        nonlocal training
        if not training and len(ends) < steps and not missing[len(ends) // per_group]:
            training = True
            clock.at(clock.now + step_s, trained)

    def trained() -> None:
        nonlocal training, used_up
        training = False
        ends.append(clock.now)
        if len(ends) % per_group == 0:
            used_up += 1
            for feed in feeds:
                feed.go_on()
        train()

    for feed in feeds:
        feed.go_on()
    clock.run()
    assert len(ends) == steps
    assert store.asked == store.delivered
    return ends[-1]


def sidecar_s(machine: Machine, work: Workload, records: int) -> float:
    """One rank reads the saved index, a broadcast brings it to every node (pipelined: one pass over a link each)."""
    nbytes = records * INDEX_BYTES
    servers_s = nbytes / (machine.servers * min(machine.disk_rate, machine.net_rate))
    read = max(nbytes / machine.link_rate, servers_s) + machine.seek_s
    return read + (nbytes / machine.link_rate if work.nodes > 1 else 0.0)


def walk_s(machine: Machine, work: Workload, records: int, options: Options | None = None) -> float:
    """All leaf pages of the file, which lie between the records, divided among the readers; several reads each."""
    options = options or Options()
    leaves = math.ceil(records / KEYS_PER_LEAF)
    each = max(1, min(leaves, LEAVES) // work.nodes)
    store, links = Store(machine), [Link() for _ in range(work.nodes)]

    def go_on(node: int, number: int) -> None:
        if number < each:
            leaf = node * leaves // work.nodes + number
            more = lambda: go_on(node, number + options.usual_inflight)  # noqa: E731
            offset = leaf * KEYS_PER_LEAF * work.record
            store.read(links[node], (offset, PAGE), more, window=1, byte_s=pread_s(machine, PAGE))

    for node in range(work.nodes):
        for number in range(options.usual_inflight):
            go_on(node, number)
    store.clock.run()
    return store.clock.now * leaves / (each * work.nodes)
