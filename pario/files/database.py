"""One database of an open LMDB: its keys, and the sizes and bytes of its records. Any thread."""

from __future__ import annotations

import errno
import logging
import os
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from pario.errors import CorruptedError, DatabaseError, ParioError, SnapshotError
from pario.fetch.base import read_error
from pario.fetch.posix import PosixFetcher
from pario.fetch.snapshot import check_snapshot, read_snapshot
from pario.files.keys import Inside, Keys, Leaf
from pario.format.layout import F_BIGDATA, F_SUBDATA, MDB_DUPSORT, MDB_INTEGERKEY, Db
from pario.format.meta import Snapshot
from pario.format.page import Node, OverflowRun, check_overflow
from pario.format.tree import clean_name
from pario.locate.hidden import is_entry, looks_reserved
from pario.machine import file_system_of
from pario.records import Records

if TYPE_CHECKING:
    from pario.codec.packing import Packing
    from pario.files.listed import Listed
    from pario.tiers.served import ServedCopy

_log = logging.getLogger("pario")

#: Header of a packed value: slot, checksum, size (codec/packing.py).
_FIXED, _MOST_HEAD = 5, 15


class Packed(NamedTuple):
    """How the values are packed. key : of the reserved entry, the last one, which nobody sees"""

    key: bytes
    packing: Packing


#: What programs learn of errors that have no number of their own.
_ERRNOS = {SnapshotError: errno.ESTALE, FileNotFoundError: errno.ENOENT, NotADirectoryError: errno.ENOTDIR}
_ERRNOS[MemoryError] = errno.ENOMEM

#: What sendfile says where a file system has no splicing.
_CANNOT_SEND = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


class Database:
    """Records of one database.

    name : of a named one, else None
    flat : keys are in no order in which those that begin alike are neighbours: there are no folders
    copy : what the node's service has of the file

    Raises DatabaseError for a database with duplicates, CorruptedError, SnapshotError, ReadError; so do all methods.
    """

    def __init__(
        self,
        fetcher: PosixFetcher,
        snapshot: Snapshot,
        db: Db,
        name: bytes | None = None,
        copy: ServedCopy | None = None,
    ) -> None:
        if db.md_flags & MDB_DUPSORT:
            which = "the main database" if name is None else f"database {name.decode(errors='backslashreplace')!r}"
            raise DatabaseError(
                f"{which} keeps several values per key (DUPSORT), and a file has one content",
                path=fetcher.path,
                hint="Read it with pario.lmdb, or copy its records to keys of their own.",
            )
        self.name = name
        self.number = 0  # the tree's, of its folder
        self._entries = Keys(self._read_page, snapshot, db, fetcher.path)
        order = self._entries.order
        self.flat = order is not bytes
        self.integers = bool(db.md_flags & MDB_INTEGERKEY) and isinstance(order(b""), int)
        self.byteorder: Literal["little", "big"] = "big" if snapshot.byteorder == "big" else "little"
        self.mtime_ns = fetcher.files[0].status().st_mtime_ns
        self._fetcher = fetcher
        self._snapshot = snapshot
        self._copy = copy

    @cached_property
    def keys(self) -> Keys:
        """Of the records, which may lie in blocks."""
        if self.packed is None or self.packed.packing.counts is None:
            return self._entries
        db = self._entries.db
        return Keys(self._read_page, self._snapshot, db, self._fetcher.path, partial(_unblock, self))

    @cached_property
    def packed(self) -> Packed | None:
        """None: the values are not packed. Looks at the last record."""
        path = self._entries.last()
        if not path:
            return None
        leaf, i = path[-1]
        key, node = leaf.key(i), leaf.node(i)
        if node.flags & ~F_BIGDATA or not looks_reserved(key, self._entries.flags):
            return None
        entry = bytearray(node.nbytes)
        self._read(node, memoryview(entry))
        if not is_entry(bytes(entry[:_MOST_HEAD])):
            return None
        from pario.codec.packing import Packing  # not before it is wanted: it brings the C libraries of codecs

        try:
            return Packed(key, Packing.from_entry(entry))
        except ParioError as e:
            raise e.at(path=self._fetcher.path) from None

    @cached_property
    def listed(self) -> Listed | None:
        """The names of the folder or tar that the database was packed from; None: the keys are all there is."""
        if self.name is not None or self.packed is None or "source" not in self.packed.packing.more:
            return None
        if self.packed.packing.entries > self._fetcher.nbytes >> 4:  # an entry is a node of a page: it has more bytes
            return None
        from pario.codec.listing import rows_of
        from pario.files.listed import Listed

        rows = rows_of(self.packed.packing, self._fetcher.path)
        return None if rows is None else Listed(rows, self.packed.packing.sizes)

    @property
    def path(self) -> str:
        return self._fetcher.path

    def is_hidden(self, key: bytes) -> bool:
        """Whether this is the reserved entry of a packed database."""
        return self.packed is not None and key == self.packed.key

    def size(self, node: Node | Inside) -> int:
        """Bytes of the record, as they come out of a packed one. Raises CorruptedError."""
        if isinstance(node, Inside):
            return len(node.value)
        if self.packed is None:
            return node.nbytes
        head = bytearray(min(node.nbytes, _MOST_HEAD))
        self._read(node, memoryview(head))
        return _raw_size(bytes(head), node, self._fetcher.path)

    def read(self, node: Node | Inside, out: memoryview) -> None:
        """Fill `out`, of as many bytes as `size` says."""
        if isinstance(node, Inside):
            out[:] = node.value
            return
        packed = self.packed
        if packed is None:
            self._read(node, out)
            return
        stored = np.empty(node.nbytes, np.uint8)
        self._read(node, stored.data)
        zero = np.zeros(1, np.int64)
        records = Records(zero, stored, zero, np.array([len(stored)], np.int64))
        failures = packed.packing.unpack(records, np.asarray(out), zero, np.array([out.nbytes], np.int64))
        if failures:
            raise _damaged(failures[0][1], node, self.path)

    def send(self, node: Node | Inside, fd: int) -> bool:
        """Let the kernel copy the record into `fd`, an empty file. False: it must be read, over what is there now."""
        if self.packed is not None or isinstance(node, Inside) or not node.flags & F_BIGDATA:
            return False
        try:
            run = node.overflow()
            if self._copy is not None and (lent := self._copy.tier.lend(run.offset, node.nbytes)) is not None:
                sent = self._send(fd, lent.fd, lent.offset, node.nbytes)
                return sent and (lent.still is None or lent.still())
            head = self._quick_head(run, node.nbytes)
            if head is None:
                return False
            check_overflow(head, run, self._snapshot)
            if not self._send(fd, self._fetcher.fileno(), run.offset, node.nbytes):
                return False
        except ParioError as e:
            raise e.at(path=self._fetcher.path, key=node.key) from None
        check_snapshot(self._fetcher, self._snapshot)
        return True

    @cached_property
    def _in_memory(self) -> bool:
        path = self._fetcher.path
        return file_system_of(path, self._fetcher.files[0].status().st_dev).kind == "memory"

    def _quick_head(self, run: OverflowRun, nbytes: int) -> bytes | None:
        """The header of a value whose ends are in memory. None: the kernel would ask the storage for it in pieces of
        64 KiB, one after the other, where one read asks for the whole."""
        size = self._snapshot.header
        if self._in_memory:
            return self._fetcher.pread(run.offset - size, size)
        fd, head, end = self._fetcher.fileno(), bytearray(size), bytearray(1)
        try:
            for buffer, offset in ((head, run.offset - size), (end, run.offset + nbytes - 1)):
                if os.preadv(fd, [buffer], offset, os.RWF_NOWAIT) < len(buffer):
                    return None
        except (OSError, AttributeError):
            return None
        return bytes(head)

    def _send(self, fd: int, source: int, offset: int, nbytes: int) -> bool:
        done = 0
        while done < nbytes:
            try:
                got = os.sendfile(fd, source, offset + done, nbytes - done)
            except OSError as e:
                if not done and e.errno in _CANNOT_SEND:
                    return False
                raise
            if not got:
                raise read_error(self._fetcher.path, offset, nbytes, done, 0)
            done += got
        return True

    def read_part(self, node: Node | Inside, offset: int, nbytes: int) -> bytes:
        """Bytes [offset, offset + nbytes) of the record, or up to its end. Of a packed record all of it is unpacked."""
        size = self.size(node)
        nbytes = max(0, min(nbytes, size - offset))
        if self.packed is None and not isinstance(node, Inside) and node.flags & F_BIGDATA and nbytes:
            run = node.overflow()
            if offset == 0:
                out = bytearray(nbytes)
                self._read(node, memoryview(out))
                return bytes(out)
            data = self._pread(run.offset + offset, nbytes)
            if len(data) < nbytes:
                raise read_error(self._fetcher.path, run.offset + offset, nbytes, len(data), 0)
            return data
        whole = bytearray(size)
        self.read(node, memoryview(whole))
        return bytes(whole[offset : offset + nbytes])

    def below(self, leaf: Leaf, i: int) -> Database:
        """The named database whose record is item i of a leaf page of the main one."""
        name = clean_name(leaf.key(i), self._snapshot)
        return Database(self._fetcher, self._snapshot, leaf.node(i).db(), name, self._copy)

    def named(self, name: bytes) -> tuple[Leaf, int] | None:
        """Where the record of a named database lies, if there is one."""
        if self.name is not None or self.flat:
            return None
        key = name + b"\0" if self._snapshot.version > 1 else name
        found = self.keys.find(key)
        return found if found and found[0].node(found[1]).flags == F_SUBDATA else None

    def clean(self, key: bytes) -> bytes:
        """The name of a named database, from its key."""
        return clean_name(key, self._snapshot)

    # -- bytes of the file ---------------------------------------------------------------------------------------------

    def _read_page(self, pgno: int) -> bytes:
        return self._pread(pgno * self._snapshot.page_size, self._snapshot.page_size)

    def _pread(self, offset: int, nbytes: int) -> bytes:
        """Bytes of the file, out of the service's copy if it has them; fewer at its end."""
        if self._copy is not None:
            copied = bytearray(nbytes)
            if self._copy.read(offset, memoryview(copied)):
                return bytes(copied)
        data = self._fetcher.pread(offset, nbytes)
        check_snapshot(self._fetcher, self._snapshot)
        return data

    def _read(self, node: Node, out: memoryview) -> None:
        """The first bytes of what is stored."""
        if out.nbytes > node.nbytes:
            raise ValueError(f"{out.nbytes} bytes for a value of {node.nbytes}")
        if not node.flags & F_BIGDATA:
            out[:] = node.data[: out.nbytes]
            return
        try:
            self._read_run(node.overflow(), out)
        except ParioError as e:
            raise e.at(path=self._fetcher.path, key=node.key) from None

    def _read_run(self, run: OverflowRun, out: memoryview) -> None:
        """One read of header and value, and further ones where the storage stops early."""
        head = bytearray(self._snapshot.header)
        begin = run.offset - len(head)
        if self._copy is not None and self._copy.read(begin, memoryview(head)) and self._copy.read(run.offset, out):
            check_overflow(bytes(head), run, self._snapshot)
            return
        fd = self._fetcher.fileno()
        wanted = len(head) + out.nbytes
        try:
            got = os.preadv(fd, [head, out], begin)
            while got < wanted:
                left = [out[got - len(head) :]] if got >= len(head) else [memoryview(head)[got:], out]
                more = os.preadv(fd, left, begin + got)
                if not more:
                    raise read_error(self._fetcher.path, begin, wanted, got, 0)
                got += more
        except ParioError:  # ReadError is an OSError
            raise
        except OSError as e:
            raise read_error(self._fetcher.path, begin, wanted, 0, e.errno or 0) from e
        check_overflow(bytes(head), run, self._snapshot)
        check_snapshot(self._fetcher, self._snapshot)


def _unblock(db: Database, node: Node) -> tuple[list[bytes], list[bytes]] | None:
    assert db.packed is not None  # there are blocks
    if node.flags & ~F_BIGDATA or node.key == db.packed.key:
        return None
    stored = bytearray(node.nbytes)
    db._read(node, memoryview(stored))
    try:
        return db.packed.packing.block(stored, node.key) if db.packed.packing.is_block(stored) else None
    except ParioError as e:
        raise _damaged(e.what, node, db.path) from e


def _damaged(why: str, node: Node, path: str) -> CorruptedError:
    return CorruptedError(f"a packed value is damaged: {why}", path=path, page=node.page.pgno, key=node.key)


def _raw_size(head: bytes, node: Node, path: str) -> int:
    """Of a packed value that begins with `head` (_MOST_HEAD bytes)."""
    if len(head) >= _FIXED and head[0] == 0:
        return node.nbytes - _FIXED
    size = shift = 0
    for byte in head[_FIXED:]:
        size |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            if size <= _MOST_RAW:
                return size
            break
    raise CorruptedError("the header of a packed value is damaged", path=path, page=node.page.pgno, key=node.key)


#: The largest value that LMDB holds.
_MOST_RAW = (1 << 32) - 1


def errno_of(error: BaseException) -> int:
    """By which programs learn of an error."""
    told = getattr(error, "errno", None)
    if isinstance(told, int) and told > 0:
        return told
    return next((number for kind, number in _ERRNOS.items() if isinstance(error, kind)), errno.EIO)


def as_bytes(out: Any, nbytes: int) -> memoryview:
    """A writable, contiguous buffer of this many bytes. Raises ValueError, TypeError."""
    view = memoryview(out)
    if view.readonly or not view.contiguous or view.nbytes != nbytes:
        kind = "read-only " if view.readonly else ""
        raise ValueError(f"a {kind}buffer of {view.nbytes} bytes for a record of {nbytes}")
    return view.cast("B") if nbytes else memoryview(bytearray())


def served_copy(file: PosixFetcher, snapshot: Snapshot) -> ServedCopy | None:
    """None without PARIO_SERVICE, and where its service cannot serve this state of the file, which a warning says."""
    folder = os.environ.get("PARIO_SERVICE")
    if not folder:
        return None
    from pario.tiers import served  # not before it is wanted: a view begins faster than this module is imported

    return served.served_copy(folder, file, snapshot, lambda: read_snapshot(file).txnid == snapshot.txnid)
