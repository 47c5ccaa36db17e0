"""Copies the chunks of a file on this node into the memory tier, behind the ranks that read it.

    pario-copy threads   page cache, or the disk past it --> memory tier     (kernels/fill.py, beside the interpreter)
    pario-order thread   which chunks, in the order of their first use; how many the tier has room for

Nobody waits for a chunk whose copy has not begun, unless the fill ends soon (fill_end.py): a rank reads what is absent
by itself. The threads take what others leave of the cores (nice 19); some of them, which limit themselves, take at
least a tenth of the node's cores, so that a fill also ends where the ranks leave little.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import numpy as np

from pario.buffers import large_pages
from pario.errors import ParioError
from pario.fetch.base import Fetcher, read_error
from pario.fetch.snapshot import check_snapshot
from pario.format.meta import Snapshot
from pario.kernels import fill as kernels
from pario.kernels.fence import full_fence
from pario.machine import allowed_cores, open_files
from pario.stats.rank import RankStats
from pario.threads import start_thread
from pario.tiers.memory import MemoryTier

#: Chunks for which the tier is asked for room at first; it counts those as held. Bytes of chunks that wait for the
#: threads, at least and at most.
_QUANTUM, _AHEAD, _FURTHEST = 32, 128 << 20, 512 << 20
#: How often the thread that asks looks, in seconds.
_LOOK_S = 0.02
#: The part of the node's cores that a fill takes if it must.
_SHARE = 0.1


def can_compare(fetchers: Sequence[Fetcher], snapshots: Sequence[Snapshot]) -> bool:
    """Whether the kernel sees the state of each file: that of one without pages the system must tell."""
    return all(
        state.has_pages or kernels.has_status(fetcher.files[0].fileno(), np.frombuffer(state.stamp, np.uint8))
        for fetcher, state in zip(fetchers, snapshots, strict=True)
    )


class LocalFill:
    """One fill, from its construction until `cancel`.

    files : of each file a fetcher, the snapshot, and the address at which it begins
    memory : the tier; nobody else puts chunks into it meanwhile
    chunks : i64[n] each, the chunks that are absent, each once, in the order in which they are needed
    used : i64[n], all that hold records
    threads : how many copy, at least; fewer if there are fewer reads
    counts : the stats that count the time of the reads, and count(reads, bytes), called now and then
    failed(error) : called once, by a thread, if a chunk cannot be read
    """

    def __init__(
        self,
        files: Sequence[tuple[Fetcher, Snapshot, int]],
        memory: MemoryTier,
        chunks: Iterator[np.ndarray],
        used: np.ndarray,
        *,
        threads: int,
        counts: tuple[RankStats, Callable[[int, int], None]],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._sources, self._memory = files, memory
        (self._stats, self._count), self._counted, self._counted_at = counts, np.zeros(3, np.int64), 0.0
        self._chunks, self._group, self._failed = chunks, used[:0], failed
        self._order = np.empty(len(used), np.int64)
        self._words = np.zeros(kernels.WORDS, np.int64)
        self.error: BaseException | None = None
        self._fds: list[int] = []
        longest = max(len(snapshot.stamp) for _, snapshot, _ in files)
        stamps = b"".join(snapshot.stamp.ljust(longest, b"\0") for _, snapshot, _ in files)
        self._stamps = np.frombuffer(stamps, np.uint8).reshape(len(files), longest)
        self._threads: list[threading.Thread] = []
        share = _SHARE * (os.cpu_count() or 1)
        steady = math.ceil(share)
        shares = [share / steady] * steady + [0.0] * max(1, threads - steady)
        absent_bytes = int((~memory.held()[used]).sum()) * memory.grid.chunk_bytes
        del shares[max(1, -(-absent_bytes // kernels.RUN_BYTES)) :]  # no more than there are reads
        self._words[kernels.THREADS] = len(shares)
        self._words[kernels.CORES] = min(len(shares), len(allowed_cores()))
        try:
            self._files = self._opened()
            self._data = os.dup(memory.fd)
            self._fds.append(self._data)
            closed = np.zeros(kernels.WORDS, np.int64)
            closed[kernels.CLOSED] = 1
            self._copy(closed, 1.0)  # loads the kernel: threads that wait for that start one after another
            memory.states.expect(len(used))
            with suppress(ParioError):  # fewer do the work
                for each in shares:
                    self._threads.append(start_thread("pario-copy", self._copy, self._words, each, stop=None))
            self._leader = start_thread("pario-order", self._run, stop=partial(self.cancel, 0))
        except BaseException:  # nobody would tell the others that there is nothing to copy
            self._words[kernels.STOP] = 1
            for thread in self._threads:
                thread.join()
            self._close()
            raise

    def _opened(self) -> np.ndarray:
        """`files` of `fill_chunks`; the descriptors are this object's."""
        rows = []
        # Half of the process's descriptors are for the script, and each file has two already.
        few = 6 * len(self._sources) < open_files()
        for fetcher, state, base in self._sources:
            fd = os.dup(fetcher.files[0].fileno())
            self._fds.append(fd)
            direct = -1
            if few:
                with suppress(OSError):
                    direct = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
                    self._fds.append(direct)
            stamp_at = state.meta * state.page_size if state.has_pages else -1
            rows.append((fd, direct, base, state.file_bytes, stamp_at, len(state.stamp)))
        return np.array(rows, np.int64)

    def _copy(self, words: np.ndarray, share: float) -> None:
        chunk_bytes = self._memory.grid.chunk_bytes
        run_bytes = max(chunk_bytes, kernels.RUN_BYTES)
        buffer, data = large_pages(run_bytes)[:run_bytes], (self._data, self._memory.pages, self._memory.large)
        fixed = *self._memory.states.words, self._files, self._stamps, chunk_bytes, data, buffer
        kernels.fill_chunks(self._order, words, *fixed, share, _SHARE)

    def _run(self) -> None:
        words, memory = self._words, self._memory
        asked, self._counted_at = 0, self._stats.begin_reads()
        least, most = _AHEAD // memory.grid.chunk_bytes, _FURTHEST // memory.grid.chunk_bytes
        quantum, ahead, taken = _QUANTUM, least, 0
        try:
            while any(thread.is_alive() for thread in self._threads):
                over = words[kernels.STOP] or words[kernels.STATUS]
                if not over and not words[kernels.CLOSED] and asked - int(words[kernels.NEXT]) < ahead:
                    more = self._next(asked, quantum)
                    asked, quantum = asked + more, min(2 * quantum, max(_QUANTUM, least // 4))
                    full_fence()  # after the order
                    words[kernels.LIMIT], words[kernels.CLOSED] = asked, not more
                else:
                    time.sleep(_LOOK_S)
                    if over:  # nobody takes the rest
                        promised, asked = asked, int(words[kernels.NEXT])
                        memory.settle(promised - asked, 0, 0)
                    # Between two looks the threads must not run out of chunks. (With 32 of them, whatever the threads
                    # take: 1.65 GB/s, cached or not, on two idle cores that copy 2.1 to 2.6.)
                    before, taken = taken, int(words[kernels.NEXT])
                    ahead = min(max(least, 2 * (taken - before)), most)
                self._tell()
        except BaseException as e:
            self._fail(e)
            words[kernels.STOP] = 1
        for thread in self._threads:
            thread.join()
        self._tell()
        self._stats.end_reads(0.0)
        memory.settle(asked - int(words[kernels.DONE]), 0, 0)
        if words[kernels.STATUS] not in (0, kernels.NO_MEMORY):
            self._fail(self._found(int(words[kernels.STATUS]), int(words[kernels.WHERE])))
        if not words[kernels.STOP]:  # else the next epoch's fill may already have said what it will bring
            memory.states.expect(0)
        self._close()

    def _tell(self) -> None:
        done, now = self._words[[kernels.READS, kernels.DONE, kernels.BYTES]], time.perf_counter()
        (reads, chunks, nbytes), seconds = (done - self._counted).tolist(), now - self._counted_at
        self._counted, self._counted_at = done, now
        if reads or chunks or nbytes:  # the kernel counts them one after another
            self._memory.settle(chunks, chunks, nbytes)
            self._count(reads, nbytes)
            self._stats.end_reads(seconds)
            self._stats.begin_reads()

    def _next(self, asked: int, most: int) -> int:
        """Put the next chunks into the order, as many as the tier has room for; returns how many."""
        while not len(self._group):
            if (group := next(self._chunks, None)) is None:
                return 0
            self._group = group
        count = self._memory.reserve(min(most, len(self._group)))
        self._order[asked : asked + count] = self._group[:count]
        self._group = self._group[count:]
        return count

    def _found(self, status: int, chunk: int) -> BaseException:
        offset, nbytes = self._memory.grid.span(chunk)
        number = int(np.searchsorted(self._files[:, 2], offset, side="right")) - 1
        fetcher, snapshot, base = self._sources[number]
        if status == kernels.SNAPSHOT:
            try:
                check_snapshot(fetcher, snapshot)
            except ParioError as e:
                return e
        return read_error(fetcher.path, offset - base, nbytes, 0, max(0, status))

    def _fail(self, error: BaseException) -> None:
        if self.error is None and not self._words[kernels.STOP] and not isinstance(error, MemoryError):
            self.error = error
            self._failed(error)

    def cancel(self, limit_s: float = math.inf) -> bool:
        """Copy no more. Does not wait for the chunks under way: a thread that takes what others leave may take long
        for its last one, and all that it needs is its own. Idempotent; takes no lock."""
        self._words[kernels.STOP] = 1
        for thread in self._threads:
            if thread.is_alive() and thread.native_id is not None:
                with suppress(OSError):  # root may, and anyone who has RLIMIT_NICE
                    os.setpriority(os.PRIO_PROCESS, thread.native_id, os.getpriority(os.PRIO_PROCESS, os.getpid()))
        return True

    def _close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())
