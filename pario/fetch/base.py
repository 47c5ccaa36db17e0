"""The contract of fetchers, with their capabilities: no caller asks which fetcher it has."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from errno import EFAULT
from typing import NamedTuple

import numpy as np

from pario.errors import ReadError

__all__ = ["Compare", "Fetcher", "Form", "OpenFile", "RowReader", "read_error"]


class OpenFile(ABC):
    """A file that a fetcher has open. Any thread.

    path : as it was opened
    """

    path: str

    @abstractmethod
    def fileno(self) -> int:
        """The open file. Raises ClosedError."""

    @abstractmethod
    def status(self) -> os.stat_result:
        """Status of the open file at its opening, whatever its path leads to now. Sends no request to the storage."""

    @abstractmethod
    def is_replaced(self) -> bool:
        """True if the path leads to another file than the open one, or to none. Raises ClosedError."""


class Fetcher(ABC):
    """Bytes by their address: the offset in one open data file, or in several that are joined (joined.py). All methods
    may be called from several threads at once.

    path : the data file; several are separated by commas
    files : what is open
    nbytes : size in bytes when it was opened; no address is larger
    align : offsets, lengths and memory of `read` must be multiples of this many bytes

    Capabilities
    read_ahead_bytes : how far the kernel can prefetch; 0 if the file is not on a block device of this node, so that the
        page cache may not be the better way to read, and if the fetcher bypasses the page cache
    staged : bytes come from tiers or from the store; what comes from the store, the fetcher itself compares with the
        snapshot's meta page, and counts
    rows : reads records from the page cache straight to their destination; None: not possible, or no gain
    long_bytes : reads may be as long as this, where `Options.read_bytes` is less: fewer of them are in flight then, but
        each costs processor time
    """

    path: str
    nbytes: int
    align: int = 1
    read_ahead_bytes: int = 0
    staged: bool = False
    rows: RowReader | None = None
    long_bytes: int = 0

    @property
    @abstractmethod
    def files(self) -> tuple[OpenFile, ...]: ...

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

    def announce(self, operations: int) -> None:
        """The caller is about to send so many metadata operations to the store by itself. Waits while the store is not
        to be asked for more (limited.py)."""
        return

    def advise(self, begins: np.ndarray, nbytes: np.ndarray, gap: int) -> None:
        """Hints that these bytes will be read soon. Blocks only while the device queue is full. Reports no errors: the
        reads will. No effect if the fetcher bypasses the page cache.

        begins, nbytes : i64[n], contiguous; neighbours are one request as `plan/coalesce.py` says
        gap : the most unwanted bytes between two neighbours of one request
        """
        return

    def cached_share(self, offsets: np.ndarray, enough: float = 0.0) -> float | None:
        """The fraction of these file offsets (i64[n]) whose page is in this node's page cache; None if unknown. Stops
        when the fraction can no longer reach `enough`."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Idempotent; later calls of other methods raise ClosedError."""


class Form(NamedTuple):
    """How the bytes of values are distributed: `lead` bytes before a value and its first `head` bytes are edge, the
    next `row` bytes (or all, if negative) are the row, and at most `tail` bytes after them are edge again."""

    lead: int
    head: int
    row: int
    tail: int


class Compare(NamedTuple):
    """Checksums to compare values with: `wrong` bool[n] becomes True where the checksum of value i is not
    sums[ids[i]]. ids : i64[n]; sums : u64[m]"""

    ids: np.ndarray
    sums: np.ndarray
    wrong: np.ndarray


class RowReader(ABC):
    """Reads from the page cache in the caller's thread, without the GIL: one call plans and makes all reads.

    Neighbours are merged into one read as `plan/coalesce.py` says; `gap` is the most unwanted bytes between two of
    them.
    """

    @abstractmethod
    def read_ranges(
        self, begins: np.ndarray, nbytes: np.ndarray, gap: int, out: np.ndarray
    ) -> tuple[np.ndarray, int, int] | None:
        """Ranges of the file in any order, read in this order: (starts i64[n] in `out`, reads, bytes read); None if
        `out` is too short for them and the bytes between them.

        begins, nbytes : i64[n], contiguous; out : u8[k], contiguous
        Raises ReadError.
        """

    @abstractmethod
    def read_split(
        self,
        begins: np.ndarray,
        nbytes: np.ndarray,
        form: Form,
        gap: int,
        edges: np.ndarray,
        out: np.ndarray,
        compare: Compare | None = None,
    ) -> tuple[int, int] | None:
        """Read values with their rows straight into `out`: (number of reads, their bytes), or None if a value has
        another form; the content of `out` is then undefined.

        begins, nbytes : i64[n], contiguous: where each value's lead begins in the file, and the value's bytes
        out : u8[k], contiguous; gets the rows, one after the other
        edges : u8[n or more, at least lead + head + tail]; edges[i] gets the bytes before and after row i, joined
        compare : the values' checksums, with which they are compared; None: with none
        Raises ReadError, IndexError if `out` or `edges` is too short.
        """


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
