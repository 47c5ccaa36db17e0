"""One tree of the file, looked at page by page and record by record: what is wrong, and which pages it takes.

In Python and NumPy, from the file alone: neither the saved index nor the scanning kernels are believed.
"""

from __future__ import annotations

from array import array
from functools import partial
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from pario.commands.dataset import Dataset, pieces
from pario.commands.screen import screen
from pario.commands.verify_pages import Claim, PageUse
from pario.errors import CorruptedError, FileError, ParioError
from pario.format.layout import F_BIGDATA, F_SUBDATA, MDB_INTEGERKEY, NUM_METAS, P_OVERFLOW
from pario.format.meta import Snapshot
from pario.format.page import Node, Page, SubPage
from pario.format.tree import Tree, check_ascending, clean_name, dup_order
from pario.plan.schedule import even_split

#: Leaf pages between two looks at the progress bar.
STRIDE = 64


class ReadTwice(CorruptedError):
    """A page of duplicates that was read before. `PageUse.twice` tells who uses it."""


class Fault(NamedTuple):
    """record : the id among the rank's own records of this tree, or None for damage of a whole page"""

    error: ParioError
    record: int | None


def leaf_pages(tree: Tree, use: PageUse, words: str, faults: list[Fault]) -> np.ndarray:
    """i64[k], page numbers of the leaves in key order, each once. Damaged branch pages are noted, and passed over."""
    pages = np.array([tree.db.md_root], np.int64)
    for level in range(1, tree.db.md_depth + 1):
        kind = "leaf" if level == tree.db.md_depth else "branch"
        use.claim(Claim(f"a {kind} page of {words}", pages))
        pages = pages[use.mark(pages)]
        if kind == "leaf":
            return pages
        below: list[np.ndarray] = []
        for pgno in pages.tolist():
            try:
                below.append(tree.page(pgno, level).children())
            except FileError as e:
                faults.append(Fault(e, None))
        pages = np.concatenate([np.empty(0, np.int64), *below])
    return pages


class TreeCheck:
    """One rank's share of the records of one tree.

    Parameters
    ----------
    dataset : the file
    tree : of a database
    words : what messages call it: "the main database"
    use : takes the pages that are seen
    sums : also sum up the values

    Attributes
    ----------
    offsets, sizes : of the values in the file, in key order; bytes
    runs : of the values on overflow pages, their ids among this rank's records
    sums : of the values, XXH3 of 64 bits, by their ids among this rank's records; None if nobody asked for them
    names, named_rows : of databases among the records, and their ids among this rank's
    faults : what is damaged
    """

    def __init__(self, dataset: Dataset, tree: Tree, words: str, use: PageUse, *, sums: bool = False) -> None:
        self.offsets, self.sizes, self.runs = array("q"), array("q"), array("q")
        self.sums = array("Q") if sums else None
        self.names: list[bytes] = []
        self.named_rows: list[int] = []
        self.faults: list[Fault] = []
        self._dataset = dataset
        self._tree = tree
        self._words = words
        self._use = use
        #: its trees of duplicates are read page by page, each page once
        self._dups = Tree(self._read_dup_page, tree.snapshot, tree.db)
        self._dup_pages, self._dup_records = array("q"), array("q")

    @property
    def records(self) -> int:
        return len(self.offsets)

    def walk(self, leaves: np.ndarray) -> None:
        """Look at this rank's share of the leaves (i64[k], all of the tree, in key order)."""
        world = self._dataset.world
        start, stop = even_split(len(leaves), world.size, world.rank)
        last = self._key_before(leaves, start)
        bar = screen.bar(stop - start, "leaf pages", "page")
        for k, pgno in enumerate(leaves[start:stop].tolist(), 1):
            try:
                last = self._leaf(self._tree.page(pgno, self._tree.db.md_depth), last)
            except FileError as e:
                self.faults.append(Fault(e, None))
                last = None
            if k % STRIDE == 0:
                bar.update(STRIDE)
        screen.end_bar()

    def _key_before(self, leaves: np.ndarray, start: int) -> bytes | None:
        if start == 0:
            return None
        try:
            before = self._tree.page(int(leaves[start - 1]), self._tree.db.md_depth)
            return before.key(before.n - 1)
        except FileError:
            return None  # the rank before says it

    def _leaf(self, leaf: Page, last: bytes | None) -> bytes | None:
        """Look at all items; returns the last key. `last` is the one before the first."""
        for i in range(leaf.n):
            try:
                key = leaf.key(i)
                if last is not None:
                    check_ascending(self._tree.order, last, key, leaf)
                last = key
                self._item(leaf, i)
            except ReadTwice:
                pass
            except FileError as e:
                self.faults.append(Fault(e, self.records))
        return last

    def _item(self, leaf: Page, i: int) -> None:
        node = leaf.node(i)
        if node.flags == F_SUBDATA:  # a named database among records: looked at for itself
            node.db()
            self.named_rows.append(self.records)
            self._record(node.offset, 0)
            self.names.append(clean_name(node.key, leaf.snapshot))
            return
        dups = self._dups.dups(node)
        if dups is not None:
            self._duplicates(node, dups)
        elif node.flags & F_BIGDATA:
            run = node.overflow()
            self.runs.append(self.records)
            self._record(run.offset, run.nbytes)
        else:
            self._record(node.offset, node.nbytes, node.data)

    def _record(self, offset: int, nbytes: int, value: bytes | memoryview = b"") -> None:
        """value : empty where it is read later"""
        self.offsets.append(offset)
        self.sizes.append(nbytes)
        if self.sums is not None:
            self.sums.append(xxh3_64_intdigest(value))

    def _duplicates(self, node: Node, dups: SubPage | Tree) -> None:
        """Look at the duplicates of one key."""
        order = dup_order(self._tree.flags, node.page.snapshot.layout)
        before: bytes | None = None
        first = self.records
        for page, k in dups.items():
            start, stop = page.key_span(k)
            value = bytes(page.buf[start:stop])
            if before is not None:
                check_ascending(order, before, value, page)
            before = value
            self._record(page.offset + start, len(value), value)
        found = self.records - first
        if node.flags & F_SUBDATA and (said := node.db().md_entries) != found:
            raise node.page.fault(f"key {node.key!r} has {found:,} duplicates, its entry says {said:,}")

    def _read_dup_page(self, pgno: int) -> bytes:
        self._dup_pages.append(pgno)
        self._dup_records.append(self.records)
        if not self._use.mark(np.array([pgno], np.int64))[0]:
            raise ReadTwice(f"page {pgno} is used more than once")
        return self._dataset.read_page(pgno)

    def read_values(self, first: int) -> int:
        """Read all values that lie on overflow pages, in file order, and look at the page header before each.

        first : id of this rank's first record
        Returns how many overflow pages their headers claim. Keeps the claims of this rank's records.
        """
        s = self._dataset.snapshot
        ids = np.array(self.runs, np.int64)
        pages = np.array(self.offsets, np.int64)[ids] // s.page_size
        order = np.argsort(pages, kind="stable")
        ids, pages = ids[order], pages[order]
        sizes = np.array(self.sizes, np.int64)[ids]
        needs = _pages_of(s, sizes)
        counts = needs.copy()
        for part in pieces(sizes + s.header, "values"):
            self._read_chunk(ids[part], pages[part], sizes[part], counts[part])
        self._use.mark_runs(pages, counts)
        self._use.claim(Claim(f"the value of record {{}} of {self._words}", pages, counts, needs, first + ids))
        dup_records = first + np.array(self._dup_records, np.int64)
        dup_pages = np.array(self._dup_pages, np.int64)
        self._use.claim(Claim(f"the duplicates from record {{}} of {self._words} on", dup_pages, records=dup_records))
        return int(counts.sum())

    def _read_chunk(self, ids: np.ndarray, pages: np.ndarray, sizes: np.ndarray, counts: np.ndarray) -> None:
        """Fills in `counts`, i64[k]: how many pages each run takes by its header."""
        sums = np.zeros(len(ids), np.uint64) if self.sums is not None else None
        read = partial(read_runs, self._dataset, pages, sizes, counts, sums=sums)
        try:
            faults = read(slice(None))
        except FileError:
            # One of them: which? Each for itself.
            faults = []
            for k in range(len(ids)):
                try:
                    faults += [(k, error) for _, error in read(slice(k, k + 1))]
                except FileError as e:
                    faults.append((k, e.at(page=int(pages[k]))))
        self.faults += [Fault(error, int(ids[k])) for k, error in faults]
        if self.sums is not None and sums is not None:
            for record, each in zip(ids.tolist(), sums.tolist(), strict=True):
                self.sums[record] = each


def read_runs(
    dataset: Dataset,
    pages: np.ndarray,
    sizes: np.ndarray,
    counts: np.ndarray,
    part: slice,
    sums: np.ndarray | None = None,
) -> list[tuple[int, ParioError]]:
    """Read the overflow runs `pages[part]` with values of `sizes` bytes; returns those that are damaged, and why.

    counts : i64[k]; becomes how many pages each run takes, by its header
    sums : u64[k] or None; becomes the XXH3 of each value
    """
    s = dataset.snapshot
    pages, sizes, counts = pages[part], sizes[part], counts[part]
    data, starts = dataset.read(pages * s.page_size, sizes + s.header)
    if sums is not None:
        begins = starts + s.header
        values = (data[at : at + n] for at, n in zip(begins.tolist(), sizes.tolist(), strict=True))
        sums[part] = [xxh3_64_intdigest(value) for value in values]
    heads = data[starts[:, None] + np.arange(s.header)]
    fields = heads.view(s.layout.page)[:, 0]
    at = s.layout.pages_at
    order = "<" if s.byteorder == "little" else ">"
    claimed = np.ascontiguousarray(heads[:, at : at + 4]).view(f"{order}u4")[:, 0].astype(np.int64)
    needs = _pages_of(s, sizes)
    strange = (fields["mp_pgno"].astype(np.int64) != pages) | (fields["mp_flags"] != P_OVERFLOW)
    beyond = pages + claimed - 1 > s.last_pgno
    sound = ~strange & ~beyond & (claimed >= needs)
    counts[sound] = claimed[sound]
    if s.version == 3:
        sound &= fields["mp_txnid"] <= s.txnid
    faults: list[tuple[int, ParioError]] = []
    for k in np.flatnonzero(~sound).tolist():
        head = fields[k]
        said = f"page {head['mp_pgno']}, flags {head['mp_flags']:#x}, {claimed[k]:,} pages"
        wanted = f"page {pages[k]}, flags {P_OVERFLOW:#x}, {needs[k]:,} pages or a few more"
        if s.version == 3:
            said += f", transaction {head['mp_txnid']:,}"
            wanted += f", no transaction after {s.txnid:,}"
        last = f"; the last page in use is {s.last_pgno:,}" if beyond[k] else ""
        error = CorruptedError(
            f"the overflow page of this record says: {said}; expected: {wanted}{last}",
            page=int(pages[k]),
            offset=int(pages[k]) * s.page_size,
        )
        faults.append((k, error))
    return faults


def _pages_of(s: Snapshot, sizes: np.ndarray) -> np.ndarray:
    """i64[k], pages that overflow runs with values of these sizes need."""
    return (s.header - 1 + sizes + s.sum_size) // s.page_size + 1


def check_free_list(dataset: Dataset, use: PageUse) -> list[Fault]:
    """Look at the tree that says which pages are free; returns what is damaged. On rank 0."""
    s = dataset.snapshot
    faults: list[Fault] = []
    db = s.free
    empty = db.md_root < 0
    if empty != (db.md_depth == 0) or empty != (db.md_entries == 0):
        root = "no root" if empty else f"root page {db.md_root}"
        what = f"the list of free pages has {db.md_entries} entries, depth {db.md_depth} and {root}"
        return [Fault(CorruptedError(what, page=s.meta), None)]
    if empty:
        return faults
    # Its record in the meta page holds other things in place of flags and item size.
    tree = dataset.tree(db._replace(md_flags=MDB_INTEGERKEY, md_pad=0))
    entries = 0
    last: bytes | None = None
    for pgno in leaf_pages(tree, use, "the list of free pages", faults).tolist():
        try:
            leaf = tree.page(pgno, db.md_depth)
            for i in range(leaf.n):
                node = leaf.node(i)
                if last is not None:
                    check_ascending(tree.order, last, node.key, leaf)
                last = node.key
                use.free(_free_pages(dataset, node, use))
                entries += 1
        except FileError as e:
            faults.append(Fault(e, None))
            last = None
    if not faults and entries != db.md_entries:
        what = f"the list of free pages has {entries:,} entries, but says it has {db.md_entries:,}"
        faults.append(Fault(CorruptedError(what, page=db.md_root), None))
    return faults


def _free_pages(dataset: Dataset, node: Node, use: PageUse) -> np.ndarray:
    """i64[k], the pages that one transaction left free: a count, then page numbers from the highest to the lowest (in
    format 2, of which there was no release, in the order of lmdb-js: `spelt_out`)."""
    s = dataset.snapshot
    word = s.word
    if node.flags & F_BIGDATA:
        run = node.overflow()
        counts = np.array([run.pages])
        pages = np.array([run.pgno])
        faults = read_runs(dataset, pages, np.array([run.nbytes]), counts, slice(None))
        use.mark_runs(pages, counts)
        use.claim(Claim("an entry of the list of free pages", pages, counts, np.array([run.pages])))
        if faults:
            raise faults[0][1]
        value: bytes | memoryview = dataset.fetcher.pread(run.offset, run.nbytes)
    elif node.flags == 0:
        value = node.data
    else:
        raise node.page.fault(f"item {node.i} of the list of free pages has flags {node.flags:#x}", node.key_start)
    numbers = np.frombuffer(value, f"{'<' if s.byteorder == 'little' else '>'}u{word}", count=len(value) // word)
    # LMDB reserves entries before it knows how many pages they will hold: some are longer than their count says.
    count = int(numbers[0]) if len(numbers) else -1
    if node.key_stop - node.key_start != word or len(value) % word or not 0 <= count < len(numbers):
        raise node.page.fault(
            f"item {node.i} of the list of free pages has a key of {node.key_stop - node.key_start} bytes, "
            f"{len(value)} bytes and a count of {count:,}",
            node.key_start,
        )
    said = numbers[1 : count + 1].astype(np.int64)
    pages = spelt_out(said, s.last_pgno) if s.version == 2 else said
    descend = s.version == 2 or not (pages[1:] >= pages[:-1]).any()
    if ((pages < NUM_METAS) | (pages > s.last_pgno)).any() or not descend:
        raise node.page.fault(
            f"item {node.i} of the list of free pages holds numbers that do not descend, or that are not in "
            f"{NUM_METAS}..{s.last_pgno}",
            node.key_start,
        )
    return pages


def spelt_out(said: np.ndarray, last: int) -> np.ndarray:
    """i64[m], the pages of a list as lmdb-js keeps it, in any order: 0 is an empty place, -k stands before the first of
    k pages. last : the highest page"""
    firsts = said > 0
    counts = np.ones(len(said), np.int64)
    counts[1:][said[:-1] < 0] = -said[:-1][said[:-1] < 0]
    first, count = said[firsts], counts[firsts]
    if (count < 1).any() or (count > last).any() or count.sum() > last:  # more pages than there are
        return np.full(1, -1)
    return np.repeat(first, count) + np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
