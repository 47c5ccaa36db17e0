"""Pages, nodes and overflow runs: read-only views of one page's bytes that check every bound before they read.

A Page has no file. It rejects a wrong page number (a misdirected or stale write), impossible flags, a page without
items, and pointers and items outside the page. LMDB itself accepts some of these and loses records.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from pario.errors import CorruptedError
from pario.format.layout import (
    F_BIGDATA,
    F_DUPDATA,
    F_SUBDATA,
    NODE_HEADER,
    NUM_METAS,
    P_BRANCH,
    P_DIRTY,
    P_LEAF,
    P_LEAF2,
    P_OVERFLOW,
    P_SUBP,
    Db,
)
from pario.format.meta import Snapshot, check_db

_KINDS = {P_BRANCH: "branch", P_LEAF: "leaf", P_LEAF | P_LEAF2: "leaf2"}
_NODE_FLAGS = (0, F_BIGDATA, F_SUBDATA, F_DUPDATA, F_DUPDATA | F_SUBDATA)


class OverflowRun(NamedTuple):
    """The extent of a large value: `nbytes` from byte `offset` of the file, in `pages` pages from page `pgno`."""

    pgno: int
    pages: int
    offset: int
    nbytes: int


class Page:
    """A branch or leaf page.

    Parameters
    ----------
    buf : the page's bytes: bytes, memoryview or u8 array
    pgno : its number, which its header must repeat
    snapshot : the state of the file that is read

    Attributes
    ----------
    kind : "branch", "leaf" or "leaf2"
    n : items
    pad : bytes of one item of a LEAF2 page
    offset : byte of the file where the page starts

    Raises CorruptedError.
    """

    __slots__ = ("_first", "_layout", "_limit", "buf", "kind", "n", "offset", "pad", "pgno", "snapshot", "upper")

    def __init__(self, buf: Any, pgno: int, snapshot: Snapshot) -> None:
        self.buf = memoryview(buf)
        self.pgno = pgno
        self.snapshot = snapshot
        self.offset = pgno * snapshot.page_size
        self._layout = layout = snapshot.layout
        self._limit = snapshot.limit
        self._first = layout.base
        if not NUM_METAS <= pgno <= snapshot.last_pgno:
            raise self.fault(f"page numbers in use are {NUM_METAS}..{snapshot.last_pgno}")
        if len(self.buf) != snapshot.page_size:
            raise self.fault(f"only {len(self.buf)} of {snapshot.page_size} bytes are there: the file ends too early")
        header = layout.unpack_page(self.buf, 0)
        pad, flags, lower, upper = header[-4:]
        if header[0] != pgno:
            raise self.fault(f"the page calls itself page {header[0]}: a misdirected or stale write")
        if flags not in _KINDS:
            raise self.fault(f"flags {flags:#x} are neither those of a branch nor of a leaf page")
        if layout.version == 3 and header[1] > snapshot.txnid:
            raise self.fault(f"the page was written by transaction {header[1]}, after our snapshot {snapshot.txnid}")
        self.kind = _KINDS[flags]
        self._take(lower, upper, pad, least=2 if flags & P_BRANCH else 1)

    def _take(self, lower: int, upper: int, pad: int, least: int) -> None:
        """Check the header's bounds."""
        layout = self._layout
        self.n = n = (lower - (layout.header - layout.base)) >> 1
        self.pad = pad
        self.upper = upper
        if n < least:
            raise self.fault(f"{n} items in a {self.kind} page (mp_lower {lower})")
        if self.kind == "leaf2":
            # mp_upper is useless here: with 1-byte items it legitimately exceeds the end.
            if pad == 0 or layout.header + n * pad > self._limit:
                raise self.fault(f"{n} items of {pad} bytes do not fit {self._limit} bytes")
        elif lower > upper or upper > self._limit - layout.base:
            raise self.fault(f"mp_lower {lower} <= mp_upper {upper} <= {self._limit - layout.base} does not hold")

    def fault(self, what: str, at: int = 0) -> CorruptedError:
        """The error for damage at byte `at` of this page."""
        return CorruptedError(what, page=self.pgno, offset=self.offset + at)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.pgno}, {self.kind}, {self.n} items)"

    def _at(self, i: int) -> int:
        """Start of node i in `buf`; checks that its header lies inside the page."""
        if not 0 <= i < self.n:
            raise IndexError(f"item {i} of {self.n} of page {self.pgno}")
        layout = self._layout
        pointer = layout.unpack_u16(self.buf, layout.header + 2 * i)[0]
        at = self._first + pointer
        if pointer < self.upper or pointer & 1 or at + NODE_HEADER > self._limit:
            raise self.fault(f"the pointer of item {i} is {pointer}; nodes lie in {self.upper}..{self._limit}")
        return at

    def key_span(self, i: int) -> tuple[int, int]:
        """(start, stop) of item i's key in `buf`."""
        if self.kind == "leaf2":
            if not 0 <= i < self.n:
                raise IndexError(f"item {i} of {self.n} of page {self.pgno}")
            start = self._layout.header + i * self.pad
            return start, start + self.pad
        at = self._at(i)
        start = at + NODE_HEADER
        stop = start + self._layout.unpack_u16(self.buf, at + 6)[0]
        if stop > self._limit:
            raise self.fault(f"the key of item {i} ends at byte {stop} of {self._limit}", at)
        return start, stop

    def key(self, i: int) -> bytes:
        """The key of item i; in the tree of a key's duplicates, the duplicate."""
        start, stop = self.key_span(i)
        return bytes(self.buf[start:stop])

    def node(self, i: int) -> Node:
        """Node i of a leaf page (not LEAF2, which has none)."""
        return Node(self, i, self._at(i))

    def child(self, i: int) -> int:
        """Page number of child i of a branch page."""
        low, high, _ = self._layout.unpack_node(self.buf, self._at(i))
        pgno = int(low) | (int(high) << 32 if self._layout.word == 8 else 0)
        if not NUM_METAS <= pgno <= self.snapshot.last_pgno:
            raise self._bad_child(i, pgno)
        return pgno

    def children(self) -> np.ndarray:
        """i64[n], page numbers of all children of a branch page, in key order."""
        layout = self._layout
        whole = np.frombuffer(self.buf, np.uint8)
        pointers = np.frombuffer(self.buf, layout.indx, self.n, layout.header).astype(np.int64)
        at = pointers + layout.base
        wrong = (pointers < self.upper) | (pointers & 1 != 0) | (at + NODE_HEADER > self._limit)
        if wrong.any():
            self._at(int(np.argmax(wrong)))
        nodes = whole[at[:, None] + np.arange(NODE_HEADER)].view(layout.node)[:, 0]
        pgnos = nodes["mn_dsize"].astype(np.int64)
        if layout.word == 8:
            pgnos |= nodes["mn_flags"].astype(np.int64) << 32
        wrong = (pgnos < NUM_METAS) | (pgnos > self.snapshot.last_pgno)
        if wrong.any():
            i = int(np.argmax(wrong))
            raise self._bad_child(i, int(pgnos[i]))
        return pgnos

    def _bad_child(self, i: int, pgno: int) -> CorruptedError:
        return self.fault(f"child {i} is page {pgno}; pages in use are {NUM_METAS}..{self.snapshot.last_pgno}")


class SubPage(Page):
    """The small leaf page inside an F_DUPDATA node's data; its keys are the duplicates.

    `buf` and `offset` start at the sub-page: spans and bounds count from there.
    """

    __slots__ = ()

    def __init__(self, outer: Page, start: int, stop: int) -> None:
        layout = outer._layout
        self.buf = outer.buf[start:stop]
        self.pgno = outer.pgno
        self.snapshot = outer.snapshot
        self.offset = outer.offset + start
        self._layout = layout
        self._limit = stop - start
        self._first = layout.base
        if self._limit < layout.header:
            raise self.fault(f"a sub-page of {self._limit} bytes is shorter than its header")
        pad, flags, lower, upper = layout.unpack_page(self.buf, 0)[-4:]
        # Its page number is that of the page where it was created, which may be gone: no check.
        if flags & ~(P_DIRTY | P_LEAF2) != P_LEAF | P_SUBP:
            raise self.fault(f"flags {flags:#x} are not those of a sub-page")
        self.kind = "leaf2" if flags & P_LEAF2 else "leaf"
        self._take(lower, upper, pad, least=1)

    def items(self) -> Iterator[tuple[Page, int]]:
        """(page, index) of all duplicates in their order, as of a tree's items."""
        for i in range(self.n):
            yield self, i

    def last(self) -> list[tuple[Page, int]]:
        """The path to the last duplicate, as of a tree."""
        return [(self, self.n - 1)]


class Node:
    """One item of a leaf page.

    flags : 0 or F_*
    nbytes : bytes of the value; for F_DUPDATA and F_SUBDATA, of its description
    key_start, key_stop, data_start, data_stop : offsets in the page's `buf`

    Raises CorruptedError if any part lies outside the page.
    """

    __slots__ = ("data_start", "data_stop", "flags", "i", "key_start", "key_stop", "nbytes", "page")

    def __init__(self, page: Page, i: int, at: int) -> None:
        layout = page._layout
        nbytes, flags, key_nbytes = layout.unpack_node(page.buf, at)
        if page.kind != "leaf":
            raise page.fault(f"a node of a {page.kind} page has no data", at)
        if flags not in _NODE_FLAGS:
            raise page.fault(f"node {i} has impossible flags {flags:#x}", at)
        self.page = page
        self.i = i
        self.flags = flags
        self.nbytes = nbytes
        self.key_start = at + NODE_HEADER
        self.key_stop = self.key_start + key_nbytes
        self.data_start = at + layout.data_after(key_nbytes)
        self.data_stop = self.data_start + (layout.bigdata if flags & F_BIGDATA else nbytes)
        if max(self.key_stop, self.data_stop) > page._limit:
            raise page.fault(
                f"node {i} (a key of {key_nbytes} and {self.data_stop - self.data_start:,} bytes of data) ends behind "
                f"byte {page._limit} of the page",
                at,
            )

    @property
    def key(self) -> bytes:
        return bytes(self.page.buf[self.key_start : self.key_stop])

    @property
    def data(self) -> memoryview:
        """The bytes in the page: the value, or its description."""
        return self.page.buf[self.data_start : self.data_stop]

    @property
    def offset(self) -> int:
        """Byte of the file where `data` starts."""
        return self.page.offset + self.data_start

    def overflow(self) -> OverflowRun:
        """The run that holds the value of an F_BIGDATA node. Does not read the run's own header; see
        `check_overflow`."""
        page, layout, snapshot = self.page, self.page._layout, self.page.snapshot
        need = (layout.header - 1 + self.nbytes + snapshot.sum_size) // snapshot.page_size + 1
        if layout.version == 1:
            pgno = layout.unpack_word(page.buf, self.data_start)[0]
        else:
            pgno, txnid, pages = layout.unpack_words3(page.buf, self.data_start)
            # More pages than needed are valid: LMDB overwrites a shrinking value in place.
            if pages < need:
                raise page.fault(
                    f"item {self.i}: {self.nbytes:,} bytes need {need} pages, not {pages}", self.data_start
                )
            if layout.version == 3 and txnid > snapshot.txnid:
                raise page.fault(
                    f"item {self.i} was written by transaction {txnid}, after our snapshot", self.data_start
                )
        if pgno < NUM_METAS or pgno + need - 1 > snapshot.last_pgno:
            raise page.fault(
                f"item {self.i}: overflow pages {pgno}..{pgno + need - 1}; pages in use are "
                f"{NUM_METAS}..{snapshot.last_pgno}",
                self.data_start,
            )
        return OverflowRun(pgno, need, pgno * snapshot.page_size + layout.header, self.nbytes)

    def sub_page(self) -> SubPage:
        """The duplicates of an F_DUPDATA node."""
        return SubPage(self.page, self.data_start, self.data_stop)

    def db(self) -> Db:
        """The tree of an F_SUBDATA node: a named database or, with F_DUPDATA, the duplicates of this key."""
        layout, page = self.page._layout, self.page
        if self.nbytes != layout.db.itemsize:
            raise page.fault(f"item {self.i}: a database record has {layout.db.itemsize} bytes, not {self.nbytes}")
        db = layout.read_db(page.buf, self.data_start)
        dup_tree = bool(self.flags & F_DUPDATA)
        what = f"the tree of duplicates of key {self.key!r}" if dup_tree else f"the database {self.key!r}"
        check_db(db, page.snapshot, what, page=page.pgno, dup_tree=dup_tree)
        if dup_tree and db.md_root < 0:
            raise page.fault(f"{what} is empty")
        return db


def check_overflow(first: bytes | memoryview, run: OverflowRun, snapshot: Snapshot) -> None:
    """Raises CorruptedError unless `first`, the bytes at the start of page `run.pgno`, begins the overflow run `run`.

    A reader of large values passes the header that it has read with the value.
    """
    layout = snapshot.layout
    header = layout.unpack_page(first, 0)
    pages = layout.unpack_u32(first, layout.pages_at)[0]
    where: dict[str, Any] = {"page": run.pgno, "offset": run.pgno * snapshot.page_size}
    if header[0] != run.pgno:
        raise CorruptedError(f"the overflow page calls itself page {header[0]}: a misdirected or stale write", **where)
    flags = header[-3]
    if flags != P_OVERFLOW:
        raise CorruptedError(f"flags {flags:#x} instead of an overflow page's ({P_OVERFLOW:#x})", **where)
    if pages < run.pages:
        raise CorruptedError(f"an overflow run of {pages} pages where {run.pages} are needed", **where)
    if layout.version == 3 and header[1] > snapshot.txnid:
        raise CorruptedError(f"written by transaction {header[1]}, after our snapshot {snapshot.txnid}", **where)
