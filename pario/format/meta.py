"""The meta pages: which kind of file this is, and which state of it is the newest.

`sniff` finds the layout from the first bytes, `newest` makes a Snapshot of both meta pages, `explain` says why a file
is not an LMDB. All work on bytes. The caller must read these until two reads agree, because a writer may be changing
them.
"""

from __future__ import annotations

import shlex
from contextlib import suppress
from dataclasses import dataclass, field

from pario.errors import CorruptedError, EncryptedError, InvalidError, VersionMismatchError
from pario.format.layout import (
    KNOWN_VERSIONS,
    MAGIC_AT,
    MAX_DEPTH,
    MAX_PAGE_SIZE,
    MAX_PAGE_SIZE_V1,
    MDB_DB_FLAGS,
    MDB_DUPFIXED,
    MDB_DUPSORT,
    MDB_ENCRYPT,
    MDB_INTEGERDUP,
    MDB_INTEGERKEY,
    MDB_MAGIC,
    MDB_REVERSEDUP,
    MIN_PAGE_SIZE,
    NUM_METAS,
    P_META,
    Db,
    Layout,
    layout_of,
)

#: Bytes from the start of the file that `sniff` and `page_size` need: header and meta of the largest layout.
SNIFF_BYTES = 160
#: Bytes that `explain` needs: a second meta page may begin after the largest page.
EXPLAIN_BYTES = MAX_PAGE_SIZE + SNIFF_BYTES

_INTACT_HINT = "LMDB refuses such a file, too, because more may be damaged: restore it from its source"


@dataclass(frozen=True)
class Snapshot:
    """One committed state of one file: everything that reading its pages needs. Plain numbers; can be pickled.

    version, word, byteorder : the kind of file, see `Layout`
    page_size : P, bytes
    sum_size : bytes of the checksum at the end of every page and overflow run (format 2 and 3, mostly 0)
    flags : `mm_flags`
    mapsize : bytes
    last_pgno : the last page in use
    txnid : the transaction that committed this state
    meta : 0 or 1, the meta page that it comes from
    main, free : the records of the main tree and of the list of free pages
    file_bytes : of the file when it was opened, up to the end of the last page of this state: a file may be as long as
        its map, and mostly a hole
    stamp : the meta page that it comes from, header and MDB_meta, byte by byte
    """

    version: int
    word: int
    byteorder: str
    page_size: int
    sum_size: int
    flags: int
    mapsize: int
    last_pgno: int
    txnid: int
    meta: int
    main: Db
    free: Db
    file_bytes: int
    stamp: bytes = field(repr=False)

    @property
    def layout(self) -> Layout:
        return layout_of(self.version, self.word, self.byteorder)

    @property
    def header(self) -> int:
        """H, bytes of a page header; an overflow run's value starts H bytes after the start of its first page."""
        return self.layout.header

    @property
    def base(self) -> int:
        """B, the base of node pointers."""
        return self.layout.base

    @property
    def limit(self) -> int:
        """End of the space for a page's nodes, in bytes from its start."""
        return self.page_size - self.sum_size

    @property
    def native(self) -> bool:
        """Written by a 64-bit little-endian machine, as nearly all files are."""
        return self.word == 8 and self.byteorder == "little"

    @property
    def has_pages(self) -> bool:
        """False of a tar (tar.py): nothing beside a value says that it is one, and the file's status says its state."""
        return True

    @property
    def value_bytes(self) -> tuple[int, int]:
        """[begin, end) of the file's bytes among which values lie."""
        return NUM_METAS * self.page_size, (self.last_pgno + 1) * self.page_size

    @property
    def said(self) -> str:
        """The state in words."""
        return f"transaction {self.txnid} with {self.main.md_entries} entries"

    @property
    def txnid_words(self) -> tuple[int, int]:
        """File offsets of `mm_txnid` in both meta pages."""
        layout = self.layout
        at = layout.header + _offset(layout, "mm_txnid")
        return at, self.page_size + at


def sniff(head: bytes) -> Layout | None:
    """The layout of the file that starts with `head` (SNIFF_BYTES), or None if this is not an LMDB data file.

    Raises VersionMismatchError for an unknown data format.
    """
    strange = None
    for at, versions in MAGIC_AT.items():
        for byteorder in ("little", "big"):
            magic = int.from_bytes(head[at : at + 4], byteorder)  # type: ignore[arg-type]
            if magic != MDB_MAGIC or len(head) < at + 8:
                continue
            version = int.from_bytes(head[at + 4 : at + 8], byteorder)  # type: ignore[arg-type]
            if version in versions:
                return layout_of(version, versions[version], byteorder)
            strange = version, at
    if strange is None:
        return None
    version, at = strange
    known = ", ".join(map(str, KNOWN_VERSIONS))
    if version in KNOWN_VERSIONS:
        raise InvalidError(f"an LMDB data file of format {version} cannot have its magic number at byte {at}", page=0)
    raise VersionMismatchError(
        f"LMDB data format {version}; pario reads formats {known}",
        page=0,
        hint="999 is a developer's build of LMDB" if version == 999 else "A newer pario may read it",
    )


def page_size(head: bytes, layout: Layout) -> int:
    """P, from the first meta page; raises InvalidError if it is impossible."""
    at = layout.header + _offset(layout, "mm_dbs")
    if len(head) < at + 4:
        raise InvalidError(f"the file ends inside its first meta page, after {len(head)} bytes", page=0)
    size = int(layout.unpack_u32(head, at)[0])
    largest = MAX_PAGE_SIZE_V1 if layout.version == 1 else MAX_PAGE_SIZE
    if not MIN_PAGE_SIZE <= size <= largest or size & (size - 1):
        raise InvalidError(f"the page size must be a power of two in {MIN_PAGE_SIZE}..{largest}, got {size}", page=0)
    return size


def newest(pages: bytes, layout: Layout, file_bytes: int) -> Snapshot:
    """The state in the newer of both meta pages, checked.

    pages : the first 2 P bytes of the file
    Raises InvalidError (EncryptedError among them) or CorruptedError.
    """
    size = page_size(pages, layout)
    if len(pages) < NUM_METAS * size:
        raise InvalidError(
            f"the file has {file_bytes:,} bytes, but its two meta pages alone need {NUM_METAS * size:,}",
            hint="It was truncated, or its copy is incomplete",
        )
    metas: list[Snapshot] = []
    faults: list[InvalidError] = []
    for number in range(NUM_METAS):
        try:
            metas.append(_meta(pages, number, size, layout, file_bytes))
        except InvalidError as e:
            faults.append(e)
    if faults:
        fault = faults[0]
        if metas:
            good = metas[0]
            fault.hint = f"Page {good.meta} holds an intact meta page of transaction {good.txnid}. {_INTACT_HINT}"
        raise fault
    # Page 0 on a tie: a fresh file has txnid 0 in both.
    chosen = metas[1] if metas[1].txnid > metas[0].txnid else metas[0]
    if chosen.version > 1 and chosen.flags & MDB_ENCRYPT:
        raise EncryptedError(
            "the pages of this file are encrypted (MDB_ENCRYPT) by the program that wrote it",
            hint="Export it with that program; without its key nobody can read it",
        )
    if not NUM_METAS - 1 <= chosen.last_pgno < (1 << 63) // chosen.page_size:  # offsets are of 63 bits
        raise CorruptedError(f"the last page in use cannot be {chosen.last_pgno}", page=chosen.meta)
    for name, db in (("list of free pages", chosen.free), ("main database", chosen.main)):
        _check_root(db, chosen, f"the {name}", page=chosen.meta)
    check_db(chosen.main, chosen, "the main database", page=chosen.meta)
    return chosen


def check_db(db: Db, snapshot: Snapshot, what: str, *, page: int, dup_tree: bool = False) -> None:
    """Raises CorruptedError if the record of a tree contradicts itself or points outside the file.

    page : the page of the record, for the message
    dup_tree : it is the tree of one key's duplicates
    """
    _check_root(db, snapshot, what, page=page)
    flags = db.md_flags
    if dup_tree:
        sound = flags in (0, MDB_DUPFIXED, MDB_DUPFIXED | MDB_INTEGERKEY)
    else:
        only_dup = MDB_DUPFIXED | MDB_INTEGERDUP | MDB_REVERSEDUP
        sound = not flags & ~MDB_DB_FLAGS and (bool(flags & MDB_DUPSORT) or not flags & only_dup)
    if not sound:
        raise CorruptedError(f"{what} has impossible flags {flags:#x}", page=page)
    empty = db.md_root < 0
    if empty != (db.md_depth == 0) or empty != (db.md_entries == 0):
        root = "no root" if empty else f"root page {db.md_root}"
        raise CorruptedError(f"{what} has {db.md_entries} entries, depth {db.md_depth} and {root}", page=page)
    if not empty and (db.md_root + 1) * snapshot.page_size > snapshot.file_bytes:
        raise CorruptedError(
            f"the root of {what}, page {db.md_root}, lies beyond the end of the file ({snapshot.file_bytes:,} bytes)",
            page=db.md_root,
            offset=db.md_root * snapshot.page_size,
            hint="The file was truncated, or its copy is incomplete",
        )


#: Beginnings of gzip's, bzip2's, xz', zstd's and LZ4's files; and of tables.
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18")
_TABLES = {b"PAR1": "a Parquet", b"\x89HDF\r\n": "an HDF5"}


def explain(head: bytes, file_bytes: int, path: str = "SRC") -> InvalidError:
    """An error that says why a file that `sniff` rejects is not an LMDB data file, and what makes a dataset of it.

    head : the first EXPLAIN_BYTES of the file, or all of it
    """
    if head[257:262] == b"ustar" or head.startswith(_COMPRESSED):
        what = "a tar" if head[257:262] == b"ustar" else "a compressed file, perhaps a tar"
        line = shlex.join(["python", "-m", "pario", "data", "pack", path, f"{path}.lmdb"])
        return InvalidError(f"this is {what}, and no LMDB", hint=f"Make a dataset of it: {line}")
    for magic, kind in _TABLES.items():
        if head.startswith(magic):
            hint = "Write its rows into an LMDB (docs/your-dataset.md). `pario data pack` takes folders and tars"
            return InvalidError(f"this is {kind} file, and no LMDB", hint=hint)
    if file_bytes == 0:
        return InvalidError("the file is empty", hint="No transaction was ever committed, or a copy failed")
    if head.startswith(b"version https://git-lfs"):
        return InvalidError("this is a Git LFS pointer, not the data", hint="Fetch the data with: git lfs pull")
    start = head[:4]
    if MDB_MAGIC in (int.from_bytes(start, "little"), int.from_bytes(start, "big")):
        return InvalidError("this is an LMDB lock file", hint="The data is in data.mdb beside it")
    size = MIN_PAGE_SIZE
    while size <= MAX_PAGE_SIZE:
        layout = None
        with suppress(InvalidError):
            layout = sniff(head[size : size + SNIFF_BYTES])
        if layout is not None:
            txnid = _number(head, size + layout.header, layout, "mm_txnid")
            return InvalidError(
                "page 0 is not a meta page",
                page=0,
                hint=f"Page 1 seems to hold an intact meta page of transaction {txnid}. {_INTACT_HINT}",
            )
        size *= 2
    if file_bytes < NUM_METAS * MIN_PAGE_SIZE:
        return InvalidError(f"{file_bytes} bytes are too few for an LMDB data file", hint="Its copy is incomplete")
    if not any(head[:4096]):
        return InvalidError(
            "the file starts with zeros instead of a meta page",
            hint="An interrupted copy or download leaves such files",
        )
    return InvalidError(
        f"not an LMDB data file: no magic number; it starts with {head[:8]!r}", hint="Check the path, or fetch it again"
    )


def _meta(pages: bytes, number: int, size: int, layout: Layout, file_bytes: int) -> Snapshot:
    """Meta page `number`, checked by itself."""
    start = number * size
    fields = dict(zip(layout.page.names or (), layout.unpack_page(pages, start), strict=True))
    at = start + layout.header
    magic, version = layout.unpack_u32(pages, at)[0], layout.unpack_u32(pages, at + 4)[0]
    if magic != MDB_MAGIC or version != layout.version or not fields["mp_flags"] & P_META:
        raise InvalidError(
            f"page {number} is not a meta page: magic {magic:#x}, format {version}, flags {fields['mp_flags']:#x}",
            page=number,
            offset=start,
        )
    if fields["mp_pgno"] != number:
        raise InvalidError(f"meta page {number} calls itself page {fields['mp_pgno']}", page=number, offset=start)
    dbs = at + _offset(layout, "mm_dbs")
    free = layout.read_db(pages, dbs)
    main = layout.read_db(pages, dbs + layout.db.itemsize)
    if free.md_pad != size:
        raise InvalidError(f"meta page {number} says page size {free.md_pad}, meta page 0 {size}", page=number)
    txnid = _number(pages, at, layout, "mm_txnid")
    if txnid >> 63:
        raise InvalidError(f"meta page {number} claims transaction {txnid}; nobody commits so often", page=number)
    # Transaction N writes meta N & 1; both are 0 in a file without any commit.
    if txnid and txnid & 1 != number:
        raise InvalidError(
            f"meta page {number} claims transaction {txnid}, which belongs to the other one", page=number
        )
    last_pgno, sum_size = _number(pages, at, layout, "mm_last_pg"), 0
    if layout.version > 1:
        sum_size = int(layout.unpack_u16(pages, size - 2)[0])
        if sum_size > size // 2:
            raise InvalidError(f"checksums of {sum_size} bytes do not fit pages of {size}", page=0, offset=size - 2)
    return Snapshot(
        version=layout.version,
        word=layout.word,
        byteorder=layout.byteorder,
        page_size=size,
        sum_size=sum_size,
        flags=free.md_flags,
        mapsize=_number(pages, at, layout, "mm_mapsize"),
        last_pgno=last_pgno,
        txnid=txnid,
        meta=number,
        main=main,
        free=free,
        file_bytes=min(file_bytes, (last_pgno + 1) * size),
        stamp=bytes(pages[start : at + layout.meta.itemsize]),
    )


def _check_root(db: Db, snapshot: Snapshot, what: str, page: int) -> None:
    if db.md_root >= 0 and not NUM_METAS <= db.md_root <= snapshot.last_pgno:
        raise CorruptedError(
            f"the root of {what} is page {db.md_root}; pages in use are {NUM_METAS}..{snapshot.last_pgno}", page=page
        )
    if db.md_depth > MAX_DEPTH:
        raise CorruptedError(f"{what} is {db.md_depth} levels deep; LMDB's limit is {MAX_DEPTH}", page=page)


def _offset(layout: Layout, name: str) -> int:
    """Offset of a field in MDB_meta."""
    return int(layout.meta.fields[name][1])  # type: ignore[index]


def _number(pages: bytes, at: int, layout: Layout, name: str) -> int:
    return int(layout.unpack_word(pages, at + _offset(layout, name))[0])
