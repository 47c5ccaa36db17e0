"""The counters of one rank: the code that does the work increments them, reports read them."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, fields, replace
from typing import Any

#: Guards fields that the reading thread and the thread that takes the batches may both increment.
_COUNTING = threading.Lock()


@dataclass
class RankStats:
    """What one rank did in its loops so far, or in one of them.

    One thread at a time increments each field, except those of `count`. The seconds of different fields overlap:
    reading goes on in the background and, with `ahead`, so does decoding.
    """

    rank: int = 0
    node: int = 0
    reader: bool = False  # this rank reads for its node
    ahead: bool = False  # batches are prepared while the caller works, so decoding alone does not delay it
    depth: int = 0  # prefetch depth: reads that this rank may have in flight now (Options.inflight)
    depth_reason: str = ""  # why it is not another one
    tuned: bool = False  # it follows what is measured
    copies: bool = False  # decoding only copies bytes into the batch

    staged: bool = False  # this rank reads through tiers, which count what they ask of the store
    #: of each option that may change while epochs run, and acts here: its value now, the reason, its bounds
    knobs: dict[str, dict[str, Any]] = field(default_factory=dict)

    # seconds of the thread that takes the batches
    open: float = 0.0  # the constructor
    loop: float = 0.0  # in loops, from their start to their end
    consumer: float = 0.0  # the caller's own time between two batches
    computed: float = 0.0  # the part of it in which the caller's thread had a processor
    waiting: float = 0.0  # for the next batch, for any reason
    compiled: float = 0.0  # of the loops, on any thread: until a kernel was compiled

    # seconds of the thread that prepares the batches: the same one, or those that work ahead, two at once counted once
    share: float = 0.0  # waiting for bytes in the node's ring, or reading them into it
    stalled: float = 0.0  # the part of `share` after the first bytes of a loop
    decode: float = 0.0  # bytes to arrays
    unpack: float = 0.0  # the part of it that unpacked packed values: the sum over the threads that did

    # seconds of the reading thread, on ranks that read (with a synchronous recipe they are part of `share`)
    locate: float = 0.0  # which records, their extents, which reads
    turn: float = 0.0  # waiting for a slot of the ring, or for this rank's turn to read
    read: float = 0.0  # with at least one read in flight, also between loops, for the next one
    check: float = 0.0  # snapshot and page headers
    reading: float = 0.0  # sum over all reads of the time that each was in flight, or held
    held: float = 0.0  # of this process: sum over all reads of the time that each waited for the control plane's share

    batches: int = 0
    records: int = 0
    skipped: int = 0  # records left out or substituted
    node_bytes: int = 0  # of the records taken from memory of this rank's node
    groups: int = 0  # slots of the ring taken from
    ready: int = 0  # slots that were full and unused, summed over the moments when this rank began one
    stalls: int = 0  # how often the next slot was not full when needed, not counting the first of a loop
    reads: int = 0  # on ranks that read: from the store
    bytes_read: int = 0
    guessed: int = 0  # pages read on a guess, while there was no index
    missed: int = 0  # pages that such guesses missed
    extra: int = 0  # pages that such guesses read in vain
    spilled: int = 0  # records that did not fit into the ring, so that this rank read them itself
    peer_bytes: int = 0  # came from tiers of other nodes
    served_bytes: int = 0  # sent to other processes out of this node's tiers
    packed_bytes: int = 0  # of packed values, before they were unpacked, headers included
    unpacked_bytes: int = 0  # and afterwards

    def count(self, reads: int, nbytes: int) -> None:
        """Count reads that this rank sent to the store, and their bytes; nothing if it sent them to its tiers.

        Any thread may call this."""
        if not self.staged:
            self.count_store(reads, nbytes)

    def count_store(self, reads: int, nbytes: int) -> None:
        """Count them in any case. Any thread may call this."""
        self.add(reads=reads, bytes_read=nbytes)

    def add(self, **counted: float) -> None:
        """To these counters. Any thread may call this."""
        with _COUNTING:
            for name, more in counted.items():
                setattr(self, name, getattr(self, name) + more)

    # Not fields: the reads under way, and up to when `read` counts them.
    _under_way = 0
    _counted_to = 0.0

    def begin_reads(self) -> float:
        """Reads begin that one `end_reads` will end. Any thread may call this. Returns the time."""
        now = time.perf_counter()
        with _COUNTING:
            if not self._under_way:
                self._counted_to = now
            self._under_way += 1
        return now

    def end_reads(self, seconds: float) -> None:
        """seconds : the sum over the threads of the time in these reads. Any thread may call this."""
        now = time.perf_counter()
        with _COUNTING:
            self._under_way -= 1
            self.read += max(0.0, now - self._counted_to)
            self.reading += seconds
            self._counted_to = now

    def count_unpacked(self, seconds: float, packed: int, unpacked: int) -> None:
        """Count bytes of values that were unpacked, before and after. Any thread may call this."""
        self.add(unpack=seconds, packed_bytes=packed, unpacked_bytes=unpacked)

    def slot_filled(self, slot: int, group: int, begin: float, nbytes: int) -> None:
        """A group has come into this slot of the ring, since `begin`. Only a trace keeps it (trace.py)."""

    def plus(self, other: RankStats) -> RankStats:
        """With the work of another loader of the same rank."""
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in COUNTED})

    def __sub__(self, earlier: RankStats) -> RankStats:
        """The difference to an earlier state."""
        return replace(self, **{name: getattr(self, name) - getattr(earlier, name) for name in COUNTED})

    @property
    def lost(self) -> float:
        """Seconds that the caller had no batch because bytes were missing."""
        return min(self.share, self.waiting)

    @property
    def busy(self) -> float:
        """Seconds of this rank's slowest part: between two batches it decodes and works, or both at once."""
        return max(self.consumer, self.decode) if self.ahead else self.consumer + self.decode

    @property
    def ready_mean(self) -> float:
        """Full slots ahead of this rank, mean."""
        return self.ready / self.groups if self.groups else 0.0

    @property
    def rate(self) -> float:
        """Bytes per second from the store, over the time with a read in flight."""
        return self.bytes_read / self.read if self.read else 0.0

    @property
    def in_flight(self) -> float:
        """Reads in flight at once, mean over the time with any."""
        return self.reading / self.read if self.read else 0.0


_NAMES = tuple(each.name for each in fields(RankStats))
#: the fields that add up
COUNTED = _NAMES[_NAMES.index("open") :]
