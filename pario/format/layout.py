"""An LMDB data file, drawn; its numbers and tables, with the names of LMDB's own source (mdb.c).

    data.mdb = pages of P bytes, page k at byte k*P; every page number is such a k

    +--------+--------+--------+--------+--------+--------+---
    | meta 0 | meta 1 | page 2 | page 3 |   ...  | last_pg| perhaps more: preallocated, or never truncated
    +--------+--------+--------+--------+--------+--------+---
       |        |
       |        +-- transaction N writes meta N & 1; the larger txnid is the live one
       +-- header, then MDB_meta: magic, version, ..., page size, roots of the free and the main tree, last_pg, txnid

    a branch or leaf page (H = header bytes, B = 0 in format 1, H in formats 2 and 3)

    0            H                  B+lower          B+upper                  P-sum    P
    +------------+---------+--------+................+-----------------------+--------+
    | MDB_page   | u16 ptr | ...    |   free         | nodes, in any order   |checksum|
    +------------+---------+--------+................+-----------------------+--------+
                   ptr i: node i lies at B + ptr i; the pointers are in key order

    a node
    0           4         6         8
    +-----------+---------+---------+---------+------+
    | data size | flags   | key size| key     | data |      leaf; data = the value, or by the flags:
    +-----------+---------+---------+---------+------+        F_BIGDATA  the page number of an overflow run
    | child page, 48 bit  | key size| key     |  branch       F_SUBDATA  MDB_db of a named database
    +-----------+---------+---------+---------+               F_DUPDATA  a sub-page that holds the duplicates
                                                              both       MDB_db of the tree of the duplicates
    an overflow run: one value, contiguous
    +----------+-------------------------------------+-----------------+---
    | MDB_page | value ...        (no second header) |     ...         |
    +----------+-------------------------------------+-----------------+---

    LEAF2: no pointers and no nodes, item i at H + i * (item size); sub-page: a small leaf page inside a node's data.

Integers have the byte order and the word size of the machine that wrote the file. Formats: 1 = LMDB 0.9; 2 = unreleased
sources of 2017-2025, shipped with lmdb-js; 3 = LMDB 1.0.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import NamedTuple

import numpy as np

MDB_MAGIC = 0xBEEFC0DE
#: Offset of the magic -> {format version: word size in bytes}. `mm_magic` follows the page header, so its offset
#: gives the header's size; (16, version) tells a 64-bit file of format 1 from 32-bit files of formats 2 and 3.
MAGIC_AT = {12: {1: 4}, 16: {1: 8, 2: 4, 3: 4}, 24: {2: 8, 3: 8}}
KNOWN_VERSIONS = (1, 2, 3)

MIN_PAGE_SIZE = 256
MAX_PAGE_SIZE = 65536
#: Format 1 keeps `mp_upper` relative to the page start in 16 bits.
MAX_PAGE_SIZE_V1 = 32768
#: CURSOR_STACK: the maximum depth of a tree.
MAX_DEPTH = 32
NUM_METAS = 2

P_BRANCH = 0x01
P_LEAF = 0x02
P_OVERFLOW = 0x04
P_META = 0x08
P_DIRTY = 0x10
P_LEAF2 = 0x20
P_SUBP = 0x40

F_BIGDATA = 0x01
F_SUBDATA = 0x02
F_DUPDATA = 0x04

MDB_REVERSEKEY = 0x02
MDB_DUPSORT = 0x04
MDB_INTEGERKEY = 0x08
MDB_DUPFIXED = 0x10
MDB_INTEGERDUP = 0x20
MDB_REVERSEDUP = 0x40
#: lmdb-js (`useVersions`): each value begins with 8 bytes, its version.
MDB_VERSIONS = 0x100
MDB_DB_FLAGS = 0x7E | MDB_VERSIONS
#: In `mm_dbs[0].md_flags`, formats 2 and 3.
MDB_ENCRYPT = 0x2000

NODE_HEADER = 8

# Field tables: name, struct code; W = one word of the writer. None of these structures has padding.
_PAGE = (("mp_pgno", "W"), ("mp_pad", "H"), ("mp_flags", "H"), ("mp_lower", "H"), ("mp_upper", "H"))
_PAGE_TXNID = (_PAGE[0], ("mp_txnid", "W"), *_PAGE[1:])
_NODE = (("mn_dsize", "I"), ("mn_flags", "H"), ("mn_ksize", "H"))
_DB = (
    ("md_pad", "I"),
    ("md_flags", "H"),
    ("md_depth", "H"),
    ("md_branch_pages", "W"),
    ("md_leaf_pages", "W"),
    ("md_overflow_pages", "W"),
    ("md_entries", "W"),
    ("md_root", "W"),
)
_META = (("mm_magic", "I"), ("mm_version", "I"), ("mm_address", "W"), ("mm_mapsize", "W"))
_META_TAIL = (("mm_last_pg", "W"), ("mm_txnid", "W"))


class Db(NamedTuple):
    """MDB_db: the record of one tree. `md_root` is -1 for an empty tree."""

    md_pad: int
    md_flags: int
    md_depth: int
    md_branch_pages: int
    md_leaf_pages: int
    md_overflow_pages: int
    md_entries: int
    md_root: int


class Layout:
    """Sizes, offsets and tables of one kind of file: (format version, word size, byte order).

    version : 1, 2 or 3
    word : bytes of a page number, a txnid or a counter: 8 or 4
    byteorder : "little" or "big"
    header : H, bytes of a page header
    base : B, added to `mp_lower`, `mp_upper` and every node pointer
    page, node, db, meta : np.dtype of MDB_page, MDB_node, MDB_db and MDB_meta
    """

    def __init__(self, version: int, word: int, byteorder: str) -> None:
        self.version = version
        self.word = word
        self.byteorder = byteorder
        self._order = "<" if byteorder == "little" else ">"
        fields = _PAGE if version == 1 else _PAGE_TXNID
        self.page = self._dtype(fields)
        self.node = self._dtype(_NODE)
        self.db = self._dtype(_DB)
        meta = [(name, self._code(code)) for name, code in _META]
        tail = [(name, self._code(code)) for name, code in _META_TAIL]
        self.meta = np.dtype([*meta, ("mm_dbs", self.db, (2,)), *tail])
        self.header = self.page.itemsize
        self.base = 0 if version == 1 else self.header
        self.unpack_page = self._struct(fields).unpack_from
        self.unpack_node = self._struct(_NODE).unpack_from
        self.unpack_word = struct.Struct(self._order + self._plain("W")).unpack_from
        self.unpack_words3 = struct.Struct(self._order + 3 * self._plain("W")).unpack_from
        self.unpack_u32 = struct.Struct(self._order + "I").unpack_from
        self.unpack_u16 = struct.Struct(self._order + "H").unpack_from
        self._unpack_db = self._struct(_DB).unpack_from
        #: np.dtype of a node pointer (indx_t)
        self.indx = np.dtype(self._order + "u2")
        #: `mp_pages` of an overflow page overlays `mp_lower` and `mp_upper`.
        self.pages_at = self.header - 4
        #: All ones: the root of an empty tree (P_INVALID).
        self.invalid = (1 << (8 * word)) - 1
        #: Bytes in an F_BIGDATA node's data: pgno, or {pgno, txnid, pages}.
        self.bigdata = word if version == 1 else 3 * word

    def __reduce__(self) -> tuple[object, ...]:
        return (layout_of, (self.version, self.word, self.byteorder))

    def __repr__(self) -> str:
        return f"Layout(format {self.version}, {8 * self.word}-bit, {self.byteorder}-endian)"

    def data_after(self, key_nbytes: int) -> int:
        """Start of a leaf node's data, in bytes from the node: even in format 3."""
        if self.version == 3:
            key_nbytes += key_nbytes & 1
        return NODE_HEADER + key_nbytes

    def read_db(self, buf: bytes | memoryview, at: int) -> Db:
        """The MDB_db at byte `at`; an empty tree's root becomes -1."""
        values = self._unpack_db(buf, at)
        root = -1 if values[-1] == self.invalid else values[-1]
        return Db._make((*values[:-1], root))

    def _plain(self, code: str) -> str:
        return ("Q" if self.word == 8 else "I") if code == "W" else code

    def _code(self, code: str) -> str:
        return self._order + {"H": "u2", "I": "u4", "Q": "u8"}[self._plain(code)]

    def _dtype(self, fields: tuple[tuple[str, str], ...]) -> np.dtype:
        return np.dtype([(name, self._code(code)) for name, code in fields])

    def _struct(self, fields: tuple[tuple[str, str], ...]) -> struct.Struct:
        return struct.Struct(self._order + "".join(self._plain(code) for _, code in fields))


@cache
def layout_of(version: int, word: int, byteorder: str) -> Layout:
    """The one Layout object of this kind of file."""
    return Layout(version, word, byteorder)
