"""Leaf pages -> extents and keys, in key order: with the kernel where the file is native, else page by page in Python.

Both ways give the same arrays. Pages that the kernel declines (trees of duplicates, named databases, damage) take the
slow way, which knows all cases and all messages.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pario.errors import CorruptedError
from pario.fetch.snapshot import file_words
from pario.format import layout
from pario.format.meta import Snapshot
from pario.format.page import Node, Page
from pario.format.tree import check_ascending, clean_name, dup_order, key_order
from pario.kernels import scan
from pario.kernels.nodes import FILE
from pario.records import EXTENT

#: nodes of one page with trees of duplicates -> EXTENT[m] of each one's duplicates
Expand = Callable[[list[Node]], list[np.ndarray]]


class LeafScan:
    """Collects what leaf pages say. Feed it pages in key order, then take the arrays.

    Parameters
    ----------
    snapshot : the state of the file
    flags : of the database; for `dups`, of the DUPSORT database whose duplicates are scanned
    dups : the pages are leaves of trees of duplicates: records without keys
    named : the database is a named one, which cannot hold databases itself
    records : how many to expect (arrays grow when needed)
    native : use the kernel; False: Python. None: as the file is.
    expand : reads the trees of duplicates of a page's nodes

    Attributes
    ----------
    names : named databases found in a main database
    slow_pages : pages that went through Python
    page_records : i64[m], records per page of the last `add`
    """

    def __init__(
        self,
        snapshot: Snapshot,
        flags: int,
        *,
        dups: bool = False,
        named: bool = False,
        records: int = 0,
        native: bool | None = None,
        expand: Expand | None = None,
    ) -> None:
        self.snapshot = snapshot
        self.names: list[bytes] = []
        self.slow_pages = 0
        self.page_records = np.empty(0, np.int64)
        self._named = named
        self._expand = expand
        self._native = snapshot.native if native is None else native
        self._mode = scan.MODE_DUPS if dups else scan.MODE_DUPSORT if flags & layout.MDB_DUPSORT else scan.MODE_PLAIN
        self._key_order = key_order(flags, snapshot.layout)
        self._dup_order = dup_order(flags, snapshot.layout)
        key_back = flags & (layout.MDB_REVERSEKEY | layout.MDB_INTEGERKEY)
        dup_back = flags & (layout.MDB_REVERSEDUP | layout.MDB_INTEGERDUP)
        values = {
            **dict(zip(FILE, file_words(snapshot), strict=True)),
            "mode": self._mode,
            # Little-endian integers of one width compare like bytes from the end.
            "key_way": scan.WAY_BACKWARD if key_back else scan.WAY_FORWARD,
            "dup_way": scan.WAY_BACKWARD if dup_back else scan.WAY_FORWARD,
        }
        self._geometry = np.array([values[name] for name in scan.GEOMETRY], np.int64)
        #: pages of the current call that are done, records, keys, key bytes
        self._state = np.zeros(4, np.int64)
        keys = 0 if dups else records
        self._extents = np.empty((records, 2), np.int64)
        self._key_data = np.empty(16 * keys, np.uint8)
        self._key_nbytes = np.empty(keys, np.uint16)
        self._key_counts = np.empty(keys if self._mode == scan.MODE_DUPSORT else 0, np.int64)

    @property
    def n(self) -> int:
        """Records so far."""
        return int(self._state[1])

    @property
    def extents(self) -> np.ndarray:
        """EXTENT[n]"""
        return self._extents[: self.n].reshape(-1).view(EXTENT)

    @property
    def key_data(self) -> np.ndarray:
        """u8[...], all keys one after the other; a key with several duplicates once."""
        return self._key_data[: self._state[3]]

    @property
    def key_nbytes(self) -> np.ndarray:
        """u16[k], bytes of each key."""
        return self._key_nbytes[: self._state[2]]

    @property
    def key_counts(self) -> np.ndarray | None:
        """i64[k], records of each key; None where every key has one."""
        return self._key_counts[: self._state[2]] if self._mode == scan.MODE_DUPSORT else None

    def end_keys(self) -> tuple[bytes, bytes] | None:
        """The first and the last key, if there are any."""
        _, _, keys, end = self._state.tolist()
        if not keys:
            return None
        first, last = int(self._key_nbytes[0]), int(self._key_nbytes[keys - 1])
        return self._key_data[:first].tobytes(), self._key_data[end - last : end].tobytes()

    def keys(self) -> list[bytes]:
        """All keys; one with several duplicates once."""
        data, ends = self.key_data.tobytes(), np.cumsum(self.key_nbytes.astype(np.int64)).tolist()
        return [data[end - n : end] for end, n in zip(ends, self.key_nbytes.tolist(), strict=True)]

    def add(self, buf: np.ndarray, at: np.ndarray, pgnos: np.ndarray, pads: np.ndarray | None = None) -> None:
        """Scan pages that follow, in key order, on those before.

        buf : u8[...] that holds the pages; at, pgnos : i64[m], where each starts in `buf`, and its number
        pads : i64[m], for `dups`: bytes of an item where the page must be LEAF2, else 0
        Raises CorruptedError.
        """
        m = len(at)
        pads = np.zeros(m, np.int64) if pads is None else pads
        self.page_records = np.zeros(m, np.int64)
        state = self._state
        state[0] = 0
        while state[0] < m:
            status = scan.ODD
            if self._native:
                status = scan.scan_leaves(
                    buf,
                    at,
                    pgnos,
                    pads,
                    self._geometry,
                    self._extents,
                    self._key_data,
                    self._key_nbytes,
                    self._key_counts,
                    self.page_records,
                    state,
                )
            if status == scan.FULL:
                self._grow(records=2 * len(self._extents) + 256, key_bytes=2 * len(self._key_data) + 70000)
            elif status == scan.ODD:
                i = int(state[0])
                before = self.n
                start = int(at[i])
                self._slow(buf[start : start + self.snapshot.page_size], int(pgnos[i]), int(pads[i]))
                self.slow_pages += 1
                self.page_records[i] = self.n - before
                state[0] = i + 1

    def _slow(self, buf: np.ndarray, pgno: int, pad: int) -> None:
        page = Page(buf, pgno, self.snapshot)
        expected = "leaf2" if pad else "leaf"
        if page.kind != expected or (pad and page.pad != pad):
            found = f"{page.kind} page" + (f" of {page.pad}-byte items" if page.kind == "leaf2" else "")
            raise page.fault(f"a {found} where a {expected} page belongs")
        if self._mode == scan.MODE_DUPS:
            self._append(self._duplicates(page), None)
            return
        nodes = [page.node(i) for i in range(page.n)]
        trees = [node for node in nodes if node.flags == layout.F_DUPDATA | layout.F_SUBDATA]
        if trees and self._mode != scan.MODE_DUPSORT:
            raise page.fault(f"item {trees[0].i} has duplicates in a database without (no MDB_DUPSORT)")
        expanded = iter(self._expand(trees) if trees and self._expand else [])
        ends = self.end_keys()
        before = ends[1] if ends else None
        for node in nodes:
            key = node.key
            if before is not None:
                check_ascending(self._key_order, before, key, page)
            before = key
            if node.flags == layout.F_SUBDATA:
                if self._named:
                    raise page.fault(f"item {node.i} is a database inside a named database")
                node.db()
                self.names.append(clean_name(key, self.snapshot))
            elif node.flags == layout.F_DUPDATA | layout.F_SUBDATA:
                self._append(next(expanded), key)
            elif node.flags == layout.F_DUPDATA:
                if self._mode != scan.MODE_DUPSORT:
                    raise page.fault(f"item {node.i} has duplicates in a database without (no MDB_DUPSORT)")
                self._append(self._duplicates(node.sub_page()), key)
            elif node.flags == layout.F_BIGDATA:
                run = node.overflow()
                self._append(np.array([(run.offset, run.nbytes)], EXTENT), key)
            else:
                self._append(np.array([(node.offset, node.nbytes)], EXTENT), key)

    def _duplicates(self, page: Page) -> np.ndarray:
        """EXTENT[n], the items of a page of duplicates, which are all key."""
        extents = np.empty(page.n, EXTENT)
        before = None
        for i in range(page.n):
            if page.kind == "leaf":
                node = page.node(i)
                if node.nbytes or node.flags:
                    raise page.fault(
                        f"duplicate {i} has flags {node.flags:#x} and {node.nbytes} bytes of data", node.key_start
                    )
            start, stop = page.key_span(i)
            extents[i] = page.offset + start, stop - start
            value = bytes(page.buf[start:stop])
            if before is not None:
                check_ascending(self._dup_order, before, value, page)
            before = value
        return extents

    def _append(self, extents: np.ndarray, key: bytes | None) -> None:
        _, records, keys, key_bytes = self._state.tolist()
        m = len(extents)
        k = len(key) if key is not None else 0
        if records + m > len(self._extents) or keys + 1 > len(self._key_nbytes) or key_bytes + k > len(self._key_data):
            self._grow(records=2 * (records + m) + 256, key_bytes=2 * (key_bytes + k) + 256)
        self._extents[records : records + m] = extents.view(np.int64).reshape(m, 2)
        self._state[1] += m
        if key is None:
            return
        self._key_data[key_bytes : key_bytes + k] = np.frombuffer(key, np.uint8)
        self._key_nbytes[keys] = k
        if self._mode == scan.MODE_DUPSORT:
            self._key_counts[keys] = m
        self._state[2] += 1
        self._state[3] += k

    def _grow(self, records: int, key_bytes: int) -> None:
        _, n, keys, used = self._state.tolist()
        self._extents = _longer(self._extents, n, records)
        if self._mode != scan.MODE_DUPS:
            self._key_data = _longer(self._key_data, used, key_bytes)
            self._key_nbytes = _longer(self._key_nbytes, keys, records)
            if self._mode == scan.MODE_DUPSORT:
                self._key_counts = _longer(self._key_counts, keys, records)


def _longer(a: np.ndarray, used: int, length: int) -> np.ndarray:
    grown = np.empty((max(length, len(a)), *a.shape[1:]), a.dtype)
    grown[:used] = a[:used]
    return grown


def check_inside(extents: np.ndarray, first_id: int, snapshot: Snapshot, path: str) -> None:
    """Raises CorruptedError for the first extent that passes the end of the file.

    extents : EXTENT[n]; first_id : record id of the first
    """
    beyond = extents["offset"] + extents["nbytes"] > snapshot.file_bytes
    if not beyond.any():
        return
    i = int(np.argmax(beyond))
    offset, nbytes = int(extents["offset"][i]), int(extents["nbytes"][i])
    page = max(offset, min(offset + nbytes, snapshot.file_bytes)) // snapshot.page_size
    raise CorruptedError(
        f"page {page} of record {first_id + i} lies beyond the end of the file: its {nbytes:,} bytes need "
        f"{offset + nbytes:,} bytes, the file has {snapshot.file_bytes:,}",
        path=path,
        page=page,
        offset=offset,
        record=first_id + i,
        hint="The file was cut off, or its copy is incomplete",
    )
