"""A fetcher that asks the control plane's token bucket before every request to the store.

It counts what it asks for, bytes and operations: reads, and the opening of files and looks at them as operations. It
cannot know which bytes the page cache holds, so those count, too. What would read without being asked, the kernel's
read-ahead, is switched off.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Protocol

import numpy as np

from pario.errors import FileError
from pario.fetch.base import Guarded, OneFile


class Gate(Protocol):
    """What stands before the store: `control.agent.Agent`."""

    @property
    def grain_bytes(self) -> int: ...

    def take(self, nbytes: int, operations: int) -> None: ...

    def hold(self) -> bool: ...

    def release(self) -> None: ...


#: Operations of a look at a path that did not lead to a data file (resolve.py).
_LOOKS = 2


def open_limited(make: Callable[[], OneFile], gate: Gate | None) -> OneFile:
    """The fetcher that `make` opens, behind the gate; as it is without one. Raises what `make` raises."""
    if gate is None:
        return make()
    gate.take(0, 1)
    try:
        store = make()
    except FileError:
        gate.take(0, _LOOKS)
        raise
    return LimitedFetcher(store, gate)


class LimitedFetcher(Guarded):
    """Reads behind a gate, which is held, and released when nobody needs this any more."""

    #: Seconds that reads of this process, whose fetchers have one gate, have waited for it: the sum over all threads.
    waited_s = 0.0

    def __init__(self, store: OneFile, gate: Gate) -> None:
        super().__init__(store)
        self._gate, self.limited = gate, True
        gate.hold()
        self._release = weakref.finalize(self, gate.release)
        self._release.atexit = False

    def pread(self, offset: int, nbytes: int) -> bytes:
        self._gate.take(nbytes, 1)
        return self._store.pread(offset, nbytes)

    def read(self, reads: np.ndarray, out: np.ndarray, starts: np.ndarray) -> None:
        sizes, grain = reads["nbytes"], self._gate.grain_bytes
        total = int(sizes[0] if len(sizes) == 1 else sizes.sum())  # a sum costs more than the bucket
        if total <= grain or len(sizes) == 1:
            self._wait(total, len(reads))
            self._store.read(reads, out, starts)
            return
        ends = np.cumsum(sizes)
        # Where the sum passes a multiple of the grain; each part is at least one read.
        cuts = [0, *(np.flatnonzero(np.diff(ends // grain)) + 1).tolist(), len(reads)]
        sums = [0, *ends.tolist()]
        for first, last in pairwise(cuts):
            self._wait(sums[last] - sums[first], last - first)
            self._store.read(reads[first:last], out, starts[first:last])

    def _wait(self, nbytes: int, operations: int) -> None:
        begin = time.perf_counter()
        self._gate.take(nbytes, operations)
        LimitedFetcher.waited_s += time.perf_counter() - begin

    def announce(self, operations: int) -> None:
        self._gate.take(0, operations)

    def is_replaced(self) -> bool:
        self._gate.take(0, 1)
        return self._store.is_replaced()

    def close(self) -> None:
        super().close()
        self._release()
