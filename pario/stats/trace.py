"""What one rank did and when, in memory: spans of its threads, the requests to its stores, counters. trace_file.py
writes them.

    doors of the rooms --> a track per thread, allocated at once --> at close, exit or an error: one file
                           one thread writes each, so none has a lock

Most spans come from the counters of a rank (traced_stats.py), requests from a fetcher of their own (fetch/traced.py).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from struct import Struct
from typing import Any

import numpy as np

from pario.records import EXTENT
from pario.stats.rank import RankStats

#: One event. `file` is the number of a file, or of a slot; what a, b and c are depends on the kind.
EVENT = np.dtype(
    [("kind", "<u2"), ("file", "<u2"), ("_", "<u4"), ("begin", "<f8"), ("end", "<f8")]
    + [(name, "<i8") for name in "abc"]
)  # fmt: skip
_PACK = Struct("<HHIddqqq").pack_into
_BYTES = EVENT.itemsize

#: field of RankStats -> name of the span that ends when it grows, of the kinds from COUNTED on
SPAN_OF = {
    "open": "the loader opens",
    "loop": "epoch",
    "consumer": "your code",
    "waiting": "next batch",
    "share": "wait for bytes",
    "decode": "decode",
    "locate": "plan reads",
    "turn": "wait for a slot",
    "check": "check",
}
READ, PREAD, OPEN, STAT, PROBE, COUNTED, FILL = 1, 3, 4, 5, 7, 10, 20
#: kind of a span -> its name in the trace. Those of requests have the fields of `request`.
SPANS = {READ: "read", PREAD: "metadata read", OPEN: "open", STAT: "stat", PROBE: "look into the page cache"}
SPANS |= {FILL: "fill", **dict(enumerate(SPAN_OF.values(), COUNTED))}
#: the first kind of a counter, whose value is a; others get kinds as they come
FULL = 40
#: what is shown over time: field of RankStats, summed over all loaders; the kernel's name, for the process
_SUMS = {
    "bytes_read": "bytes read",
    "peer_bytes": "bytes from other nodes",
    "served_bytes": "bytes sent to other nodes",
    "node_bytes": "bytes in batches",
}
_OF_KERNEL = {"rchar": "bytes read by the process (kernel)", "read_bytes": "bytes read from devices (kernel)"}

#: Events of a thread, and single requests of its reads that have several. What is not written takes no memory.
_MOST, _MOST_EXTENTS = 1 << 17, 1 << 18
#: Counters with names of their own.
_MOST_NAMES = 64
#: Counters are looked at this often, and those of the kernel this often, in seconds.
_LOOK_S, _KERNEL_S = 0.1, 0.5


@dataclass
class OpenedFile:
    """A file that requests go to.

    fs, kind : its file system, as `machine.FileSystem`; shared : other nodes see it, too
    rotating : it is on a rotating disk; None: unknown
    """

    path: str
    fs: str = ""
    kind: str = ""
    shared: bool = False
    rotating: bool | None = None


class Track:
    """The events of one thread, which alone adds to it.

    memory : EVENT[_MOST], of which the first `count` are there; extents : EXTENT[_MOST_EXTENTS], the first `known`
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.memory, self.count = np.empty(_MOST, EVENT), 0
        self.extents, self.known = np.empty(_MOST_EXTENTS, EXTENT), 0
        # what had no room
        self.dropped = 0
        self.dropped_reads = self.dropped_bytes = 0

    def events(self) -> np.ndarray:
        """EVENT[n], those so far. Any thread."""
        return self.memory[: self.count]

    def requests(self) -> np.ndarray:
        """EXTENT[m], of all reads of several requests. Any thread."""
        return self.extents[: self.known]


@dataclass
class Use:
    """What a loader tells about itself.

    path : the dataset; options : name -> value, as far as the advice needs them
    so_far : its counters; None when it has closed, after which `stats` has them
    """

    path: str
    options: dict[str, Any]
    so_far: Callable[[], RankStats] | None
    stats: RankStats | None = None

    def now(self) -> RankStats | None:
        return self.stats if self.so_far is None else self.so_far()


@dataclass
class Recorder:
    """The trace of one process, for all its loaders.

    path : where it is to be written; of several ranks each writes a file of its own beside it
    rank, size, node : of the process in its job, when it has joined
    """

    path: str
    rank: int = 0
    size: int = 1
    node: int = 0
    pid: int = field(default_factory=os.getpid)
    files: list[OpenedFile] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    dirty: bool = False

    def __post_init__(self) -> None:
        self.began = time.perf_counter()
        self.day = time.time() - time.perf_counter()  # what to add to all times for seconds of the day's clock
        self.tracks: list[Track] = []
        self._joined = False
        self.names = {FULL: "full slots"}  # kind of a counter -> its name
        self._owners: dict[str, threading.Thread] = {}
        self._mine = threading.local()
        self._lock = threading.Lock()
        self._kinds: dict[str, int] = {}  # of the other counters, and what was recorded last
        self._seen: dict[str, float] = {}
        self._gauges: list[Callable[[], Mapping[str, float]]] = []
        self._looking = threading.Lock()
        self.next_look = self._next_kernel = 0.0  # when `look` is to be called again
        self.kernel_before = _read_io()

    # -- who is traced -------------------------------------------------------------------------------------------------

    def join(self, rank: int, size: int, node: int) -> bool:
        """The rank of this process, and the number of ranks; what is said first holds, but for the node, which the
        launcher does not tell. Returns whether this is the first time."""
        if self._joined:
            if (rank, size) == (self.rank, self.size):
                self.node = node
            return False
        self._joined = True
        self.rank, self.size, self.node = rank, size, node
        return True

    def add(self, use: Use, gauges: Callable[[], Mapping[str, float]]) -> None:
        """gauges : now and then called, in any thread: name -> value"""
        self.uses.append(use)
        self._gauges.append(gauges)
        self.dirty = True

    def leave(self, so_far: Callable[[], RankStats]) -> bool:
        """A loader ends: keep its counters, and nothing of it. Returns whether it was the last one that is open."""
        self.next_look = self._next_kernel = 0.0
        self.look(time.perf_counter())
        for k, use in enumerate(self.uses):
            if use.so_far == so_far:
                use.stats, use.so_far = so_far(), None
                self._gauges[k] = dict
        return all(use.so_far is None for use in self.uses)

    def file(self, opened: OpenedFile) -> int:
        """The number of a file for events."""
        with self._lock:
            if opened not in self.files:
                if len(self.files) >= 1 << 15:
                    return 0
                self.files.append(opened)
            return self.files.index(opened)

    def kernel(self) -> dict[str, int]:
        """What the kernel has counted for this process since the trace began: requests, bytes, bytes from devices."""
        now = _read_io()
        return {name: now[name] - self.kernel_before[name] for name in now if name in self.kernel_before}

    # -- in the threads ------------------------------------------------------------------------------------------------

    def event(self, kind: int, begin: float, end: float, a: int = 0, b: int = 0, c: int = 0, file: int = 0) -> bool:
        """Keep an event of this thread, and now and then the counters. One too many is only counted, and the result
        False."""
        try:
            track: Track = self._mine.track
        except AttributeError:
            track = self._begin_track()
        k = track.count
        if k == _MOST:
            track.dropped += 1
            return False
        _PACK(track.memory, k * _BYTES, kind, file, 0, begin, end, a, b, c)
        track.count = k + 1
        if end >= self.next_look:
            self.look(end)
        return True

    def request(self, kind: int, begin: float, reads: int, nbytes: int, file: int) -> None:
        """Requests to a file, made since `begin`, whose extents nobody tells."""
        now = time.perf_counter()
        if not self.event(kind, begin, now, -1, reads, nbytes, file):
            self._drop(kind, reads, nbytes)

    def reads(self, begin: float, reads: np.ndarray, file: int) -> None:
        """Requests of these extents (EXTENT[n]), made one after the other since `begin`."""
        now = time.perf_counter()
        n = len(reads)
        if n == 1:
            offset, nbytes = reads[0].item()
            kept = self.event(READ, begin, now, offset, 1, nbytes, file)
        else:
            first = self._keep(reads, n)
            # The sum would take longer than all the rest; trace_file.py makes it.
            kept = self.event(READ, begin, now, first, n, -1 if first >= 0 else int(reads["nbytes"].sum()), file)
        if not kept:
            self._drop(READ, n, int(reads["nbytes"].sum()))

    def _drop(self, kind: int, reads: int, nbytes: int) -> None:
        if kind in (READ, PREAD):
            self._mine.track.dropped_reads += reads
            self._mine.track.dropped_bytes += nbytes

    def look(self, now: float) -> None:
        """Keep the values of the counters, if it is time and no other thread does."""
        if now < self.next_look or not self._looking.acquire(blocking=False):
            return
        try:
            self.next_look = now + _LOOK_S
            for gauges in (self._totals, *self._gauges):
                with suppress(Exception):  # of a loader that is closing
                    self._note(now, gauges())
            if now >= self._next_kernel:
                self._next_kernel = now + _KERNEL_S
                self._note(now, {_OF_KERNEL[name]: n for name, n in self.kernel().items() if name in _OF_KERNEL})
        finally:
            self._looking.release()

    def _totals(self) -> dict[str, float]:
        stats = [found for use in self.uses if (found := use.now()) is not None]
        totals = {name: sum(getattr(each, field) for each in stats) for field, name in _SUMS.items()}
        return {name: total for name, total in totals.items() if total}

    def _note(self, now: float, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            kind = self._kinds.setdefault(name, FULL + 1 + len(self._kinds))
            if kind <= FULL + _MOST_NAMES and value != self._seen.get(name):
                self.names[kind] = name
                self._seen[name] = value
                self.event(kind, now, now, int(value))

    def _keep(self, reads: np.ndarray, n: int) -> int:
        """Keep extents; returns the number of the first, or -1 if there is no room."""
        track: Track = getattr(self._mine, "track", None) or self._begin_track()
        first = track.known
        if first + n > _MOST_EXTENTS:
            return -1
        track.extents[first : first + n] = reads
        track.known = first + n
        return first

    def _begin_track(self) -> Track:
        """This thread's track: a new one, or that of a thread of the same name that has ended."""
        thread = threading.current_thread()
        with self._lock:
            name, number = thread.name, 1
            while (owner := self._owners.get(name)) is not None and owner is not thread and owner.is_alive():
                number += 1
                name = f"{thread.name} ({number})"
            self._owners[name] = thread
            found = [track for track in self.tracks if track.name == name]
            if not found:
                found = [Track(name)]
                self.tracks += found
                self.dirty = True
        self._mine.track = found[0]
        return found[0]


def _read_io() -> dict[str, int]:
    """What the kernel counts for this process: name -> number; {} where it does not tell."""
    try:
        with open("/proc/self/io") as file:
            found = dict(line.split(": ") for line in file)
        return {name: int(found[name]) for name in ("rchar", "syscr", "read_bytes")}
    except (OSError, ValueError, KeyError):
        return {}
