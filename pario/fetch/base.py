"""What brings bytes: the contract, the path of a dataset, and the pool that keeps several reads in flight."""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from errno import EFAULT
from itertools import pairwise
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any, Protocol, TypeVar

import numpy as np

from pario.errors import ClosedError, FileError, MissingError, OptionError, ReadError

__all__ = ["STOP_S", "Fetcher", "ReadPool", "open_dataset", "resolve"]

#: After an error: seconds for reads under way. A store that stalls keeps them; they end with the process at the latest.
STOP_S = 1.0


class Fetcher(Protocol):
    """One open data file. All methods may be called from several threads at once.

    path : the data file
    nbytes : its size in bytes when it was opened
    align : offsets, lengths and memory of `read` must be multiples of this many bytes
    reads_ahead : the kernel brings what lies behind the last read, so that it is there when it is asked for
    """

    path: str
    nbytes: int
    align: int
    reads_ahead: bool

    def let_read_ahead(self, on: bool) -> None:
        """Switch `reads_ahead`, for a while in which all of this file is read in order."""

    def pread(self, offset: int, nbytes: int) -> bytes:
        """A few bytes, for metadata; shorter than `nbytes` at the end of the file."""

    def read(self, reads: np.ndarray, out: np.ndarray, starts: np.ndarray) -> None:
        """Fill `out[starts[i] : starts[i] + reads[i].nbytes]` from the file, for every i, without the GIL.

        reads : EXTENT[m]; out : u8[k]; starts : i64[m]
        Bytes beyond the end of the file are left as they are where `align` made a read longer than the file.
        Raises ReadError with path and offset when the storage refuses or ends a read early.
        """

    def fileno(self) -> int:
        """The open file."""

    def status(self) -> os.stat_result:
        """Of the file when it was opened; whatever its path leads to now. Asks the storage nothing."""

    def is_replaced(self) -> bool:
        """Does the path lead to another file than the open one (or to none)?"""

    def close(self) -> None: ...


F = TypeVar("F", bound=Fetcher)


def open_dataset(path: str | os.PathLike[str], fetcher: Callable[[str], F]) -> F:
    """Open the data file of an LMDB environment (see `resolve`). Raises FileError, MissingError among them.

    With one open and no stat where `path` is a directory that holds data.mdb: on a parallel file system each of them
    is a question to the one server that everybody asks.
    """
    try:
        return fetcher(os.path.join(os.path.expanduser(os.fspath(path)), "data.mdb"))
    except FileError as e:
        if not isinstance(e.__cause__, (NotADirectoryError, FileNotFoundError)):
            raise
    return fetcher(resolve(path))


def resolve(path: str | os.PathLike[str]) -> str:
    """The data file of an LMDB environment: `path` itself, or `data.mdb` in it when it is a directory."""
    place = Path(os.fspath(path)).expanduser()
    try:
        mode = place.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        parent = place.parent
        hint = (
            "Check the spelling and the mount on this node." if parent.is_dir() else f"{parent} does not exist either."
        )
        raise MissingError("no such file or directory", path=str(place), hint=hint) from None
    except OSError as e:
        raise FileError(f"cannot look at it: {e.strerror}", path=str(place), hint="Check owner and mode.") from e
    if S_ISDIR(mode):
        file = place / "data.mdb"
        if not file.exists():
            names = sorted(p.name for p in place.iterdir())[:5]
            found = f"it holds {', '.join(names)}" if names else "it is empty"
            raise MissingError(f"the directory has no data.mdb; {found}", path=str(place), hint="Is this an LMDB?")
        return str(file)
    if not S_ISREG(mode):
        raise MissingError("not a regular file", path=str(place))
    return str(place)


class ReadPool:
    """Threads that keep up to `inflight` reads of one fetcher under way.

    A job is cut into units of neighbouring reads: each unit runs in one nogil call, so that thousands of small reads
    cost no interpreter time and a few long ones still spread over all threads.
    """

    #: What the hand-over to a thread (some 10 us) and the way to the storage cost, in bytes.
    UNIT_BYTES = 256 << 10
    #: So many reads, of what the kernel has probably brought already, need no other threads.
    INLINE_READS = 64

    def __init__(self, fetcher: Fetcher, inflight: int) -> None:
        if inflight < 1:
            raise OptionError(f"inflight must be at least 1, got {inflight!r}")
        self.fetcher = fetcher
        self.inflight = inflight
        self._units: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._urgent: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._callers: list[threading.Thread] = []
        self._under_way = 0  # calls that have not ended

    def submit(
        self,
        reads: np.ndarray,
        out: np.ndarray,
        starts: np.ndarray,
        done: Callable[[BaseException | None, float], None],
        urgent: bool = False,
    ) -> None:
        """Start a job; `done(error or None, seconds)` is called once, by the thread that finishes last.

        seconds : that the threads spent in its reads, added up
        urgent : before all others that wait for a thread
        Raises ClosedError after `close`.
        """
        m = len(reads)
        units: list[Callable[[], None]] = []
        if m == 0:
            units.append(lambda: done(None, 0.0))
        else:
            # Each read counts as if it were longer: where the way to the storage is long, a few short ones must not
            # stand in line behind each other.
            cost = np.cumsum(reads["nbytes"] + self.UNIT_BYTES)
            aim = max(self.UNIT_BYTES, int(cost[-1]) // self.inflight)
            # Reads are cut where the running sum passes a multiple of the aim.
            ends = np.flatnonzero(np.diff(cost // aim)) + 1
            cuts = [0, *ends.tolist(), m]
            job = _Job(len(cuts) - 1, done)
            for first, last in pairwise(cuts):
                units.append(_unit(self.fetcher, reads[first:last], out, starts[first:last], job))
        with self._lock:
            self._start()
            for unit in units:
                if urgent:
                    self._urgent.append(unit)
                    unit = _nothing  # a thread that waits wakes; one that is busy looks there first
                self._units.put(unit)

    def read(self, reads: np.ndarray, out: np.ndarray, starts: np.ndarray) -> None:
        """Like `Fetcher.read`, spread over the threads; returns when all bytes are there."""
        if len(reads) <= (self.INLINE_READS if self.fetcher.reads_ahead else 1):
            self.fetcher.read(reads, out, starts)
            return
        finished = threading.Event()
        errors: list[BaseException] = []

        def done(error: BaseException | None, seconds: float) -> None:
            if error is not None:
                errors.append(error)
            finished.set()

        self.submit(reads, out, starts, done)
        finished.wait()
        if errors:
            raise errors[0]

    def call(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call `function` in a thread: for work that reads by itself. It may wait for reads of this pool, whose threads
        therefore do none of it. `inflight` calls at once at most. Raises ClosedError after `close`."""
        future: Future[Any] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    result = function(*arguments)
                except BaseException as e:
                    future.set_exception(e)
                else:
                    future.set_result(result)
            with self._lock:
                self._under_way -= 1

        with self._lock:
            self._check_open()
            self._under_way += 1
            if len(self._callers) < min(self._under_way, self.inflight):
                self._callers.append(self._thread(f"pario-call-{len(self._callers)}", self._calls))
            self._calls.put(run)
        return future

    def close(self, limit_s: float = math.inf) -> bool:
        """Let queued units finish, then end the threads and take no more. The fetcher stays open.

        Returns whether they have ended within `limit_s`: a store that stalls keeps them.
        """
        with self._lock:
            self._closed = True
            threads = self._threads + self._callers
            for _ in self._threads:
                self._units.put(None)
            for _ in self._callers:
                self._calls.put(None)
            self._threads, self._callers = [], []
        end = time.monotonic() + limit_s
        for thread in threads:
            thread.join(max(0.0, min(end - time.monotonic(), threading.TIMEOUT_MAX)))
        return not any(thread.is_alive() for thread in threads)

    def _start(self) -> None:
        """Start the threads, late: opening a file for its metadata alone costs none."""
        self._check_open()
        if not self._threads:
            self._threads = [self._thread(f"pario-read-{i}", self._units) for i in range(self.inflight)]

    def _thread(self, name: str, units: queue.SimpleQueue[Callable[[], None] | None]) -> threading.Thread:
        thread = threading.Thread(target=self._work, args=(units,), name=name, daemon=True)
        thread.start()
        return thread

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the read threads have ended", path=self.fetcher.path)

    def _next_urgent(self) -> Callable[[], None] | None:
        with suppress(IndexError):
            return self._urgent.popleft()
        return None

    def _work(self, units: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        while (unit := units.get()) is not None:
            while units is self._units and (urgent := self._next_urgent()) is not None:
                urgent()
                del urgent
            unit()
            del unit  # it refers to who submitted it, and the next one may never come


def _nothing() -> None:
    pass


class _Job:
    """Counts the units of one submission down."""

    def __init__(self, units: int, done: Callable[[BaseException | None, float], None]) -> None:
        self._left = units
        self._seconds = 0.0
        self._done = done
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def unit_finished(self, error: BaseException | None, seconds: float) -> None:
        with self._lock:
            self._seconds += seconds
            self._error = self._error or error
            self._left -= 1
            last = self._left == 0
        if last:
            self._done(self._error, self._seconds)


def _unit(fetcher: Fetcher, reads: np.ndarray, out: np.ndarray, starts: np.ndarray, job: _Job) -> Callable[[], None]:
    def run() -> None:
        error: BaseException | None = None
        begin = time.perf_counter()
        try:
            fetcher.read(reads, out, starts)
        except BaseException as e:
            error = e
        job.unit_finished(error, time.perf_counter() - begin)

    return run


def read_error(path: str, offset: int, wanted: int, got: int, errno: int) -> ReadError:
    """The error of one failed or short read."""
    if errno == EFAULT:
        return ReadError(
            f"reading {wanted:,} bytes failed: no memory behind their destination (EFAULT)",
            path=path,
            offset=offset,
            hint="Most likely this node's /dev/shm is full: enlarge it, or use a smaller ring "
            "(Options.slots, slot_bytes).",
        )
    if errno:
        return ReadError(
            f"reading {wanted:,} bytes failed: {os.strerror(errno)} (errno {errno})",
            path=path,
            offset=offset,
            hint="The storage refused it; see the system log of this node.",
        )
    return ReadError(
        f"the file ended early: {got:,} of {wanted:,} bytes",
        path=path,
        offset=offset,
        hint="It was truncated while it was read, or its copy is incomplete.",
    )
