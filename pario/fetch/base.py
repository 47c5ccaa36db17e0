"""The contract of fetchers, with their capabilities: no caller asks which fetcher it has."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from errno import EFAULT

import numpy as np

from pario.errors import ReadError


class Fetcher(ABC):
    """Bytes by their address: the offset in one open data file, or in several that are joined (joined.py). All methods
    may be called from several threads at once.

    path : the data file; several are separated by commas
    files : one fetcher for each file
    nbytes : size in bytes when it was opened; no address is larger
    align : offsets, lengths and memory of `read` must be multiples of this many bytes

    Capabilities
    staged : bytes come from tiers or from the store, which it counts. It compares with the snapshot's meta page what
        it keeps; what it gives away, when it is told to `look`
    limited : a control plane says when it may read
    watched : its requests are recorded, so nobody may send others through its descriptors
    long_bytes : reads may be as long as this, if that is more than `options.READ_BYTES`: fewer of them are in flight
        then, but each costs processor time
    """

    path: str
    nbytes: int
    align: int = 1
    staged: bool = False
    limited: bool = False
    watched: bool = False
    long_bytes: int = 0

    @property
    @abstractmethod
    def files(self) -> tuple[OneFile, ...]: ...

    def file_of(self, addresses: np.ndarray) -> np.ndarray:
        """i64[n], the number of the file in which each of these addresses (i64[n]) lies."""
        return np.zeros(len(addresses), np.int64)

    @abstractmethod
    def pread(self, offset: int, nbytes: int) -> bytes:
        """A few bytes, for metadata; shorter than `nbytes` at the end of the file."""

    @abstractmethod
    def read(self, reads: np.ndarray, out: np.ndarray, starts: np.ndarray) -> None:
        """Fill `out[starts[i] : starts[i] + reads[i].nbytes]` from the file, for every i, without the GIL.

        reads : EXTENT[m]; out : u8[k]; starts : i64[m]
        If `align` makes a read extend beyond the file, the bytes beyond its end stay unchanged.
        Raises ReadError with path and offset if the storage refuses a read or ends it early, IndexError if `out` is too
        short.
        """

    def missed(self, reads: int) -> int:
        """How many of these reads, this thread's last `read`, were no copies out of memory."""
        return reads

    def announce(self, operations: int) -> None:
        """The caller is about to send this many metadata operations to the store by itself. Waits while the store is
        not to be asked for more (limited.py)."""
        return

    def read_now(self, reads: np.ndarray, out: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """`read`, but only what need not be waited for: bool[m], which of these reads were made. The others leave `out`
        undefined."""
        return np.zeros(len(reads), bool)

    def look(self) -> None:
        """If `staged`: raise SnapshotError if a writer may have overwritten what reads took from the store."""
        return

    def cached_share(self, offset: int, nbytes: int) -> float | None:
        """The part of these bytes' pages, at least one, that this node's page cache has; None if unknown."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Idempotent; later calls of other methods raise ClosedError."""


class OneFile(Fetcher):
    """A fetcher that has one file open. path : as it was opened"""

    @property
    def files(self) -> tuple[OneFile, ...]:
        return (self,)

    @abstractmethod
    def fileno(self) -> int:
        """The open file. Raises ClosedError."""

    @abstractmethod
    def status(self) -> os.stat_result:
        """Status of the open file at its opening, whatever its path leads to now. Sends no request to the storage."""

    @abstractmethod
    def is_replaced(self) -> bool:
        """True if the path leads to another file than the open one, or to none. Raises ClosedError."""


class Guarded(OneFile):
    """A fetcher that is asked through this one, which sees its requests. store : is closed with this"""

    watched = True

    def __init__(self, store: OneFile) -> None:
        self._store = store
        self.path, self.nbytes, self.align, self.limited = store.path, store.nbytes, store.align, store.limited

    def fileno(self) -> int:
        return self._store.fileno()

    def status(self) -> os.stat_result:
        return self._store.status()

    def announce(self, operations: int) -> None:
        self._store.announce(operations)

    def close(self) -> None:
        self._store.close()


def read_error(path: str, offset: int, wanted: int, got: int, errno: int) -> ReadError:
    """The error of one failed or short read."""
    if errno == EFAULT:
        return ReadError(
            f"reading {wanted:,} bytes failed: no memory behind their destination (EFAULT)",
            path=path,
            offset=offset,
            hint="Most likely this node's memory is full: ask for more, or use a smaller ring "
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
