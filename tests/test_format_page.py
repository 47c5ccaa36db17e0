"""Each check of a page, by a page that is sound but for one thing, and by the nearest one that passes."""

from __future__ import annotations

from pathlib import Path

import lmdb
import pytest

from pario.errors import CorruptedError
from pario.fetch.posix import PosixFetcher
from pario.fetch.snapshot import read_snapshot
from pario.format.meta import Snapshot
from pario.format.page import Page, check_overflow
from pario.format.tree import Tree

P = 4096
#: of format 1: where a page's header has these, and how long it is
PGNO, FLAGS, LOWER, UPPER, HEADER = 0, 10, 12, 14, 16


class File:
    """A small file of format 1; the page of its root (a branch), of its first leaf, and of its one long value."""

    def __init__(self, folder: Path) -> None:
        with lmdb.open(str(folder), map_size=1 << 24) as env, env.begin(write=True) as txn:
            txn.put(b"000", bytes(3 * P - HEADER))  # fills its pages to the last byte
            for i in range(1, 200):
                txn.put(b"%03d" % i, bytes(100))
        path = folder / "data.mdb"
        self.raw = path.read_bytes()
        fetcher = PosixFetcher(str(path))
        self.snapshot: Snapshot = read_snapshot(fetcher)
        fetcher.close()
        self.root = self.snapshot.main.md_root
        self.leaf = self.page(self.root).child(0)
        self.long = self.page(self.leaf).node(0).overflow()

    def bytes_of(self, pgno: int) -> bytes:
        return self.raw[pgno * P : (pgno + 1) * P]

    def page(self, pgno: int, changes: dict[int, int] | None = None) -> Page:
        """The page, with other 16-bit words at some of its bytes."""
        raw = bytearray(self.bytes_of(pgno))
        for at, word in (changes or {}).items():
            raw[at : at + 2] = word.to_bytes(2, "little")
        return Page(bytes(raw), pgno, self.snapshot)

    def word(self, pgno: int, at: int) -> int:
        return int.from_bytes(self.bytes_of(pgno)[at : at + 2], "little")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> File:
    return File(tmp_path_factory.mktemp("page"))


@pytest.mark.parametrize("by", [-1, 1])
def test_a_page_in_another_ones_place(file: File, by: int) -> None:
    with pytest.raises(CorruptedError, match=f"calls itself page {file.leaf + by}: a misdirected"):
        file.page(file.leaf, {PGNO: file.leaf + by})
    with pytest.raises(CorruptedError, match=f"calls itself page {file.long.pgno + by}: a misdirected"):
        check_overflow(bytes([file.long.pgno + by]) + file.bytes_of(file.long.pgno)[1:], file.long, file.snapshot)


def test_a_branch_has_two_children_and_a_leaf_one_item(file: File) -> None:
    one = {LOWER: HEADER + 2}
    assert file.page(file.root, {LOWER: HEADER + 4}).n == 2
    with pytest.raises(CorruptedError, match="1 items in a branch page"):
        file.page(file.root, one)
    assert file.page(file.leaf, one).n == 1
    with pytest.raises(CorruptedError, match="0 items in a leaf page"):
        file.page(file.leaf, {LOWER: HEADER})


@pytest.mark.parametrize("pointer", [P - 6, P - 2, P, 1 << 15])
def test_a_node_whose_header_passes_the_end_of_the_page(file: File, pointer: int) -> None:
    assert file.page(file.leaf, {HEADER: P - 8})._at(0) == P - 8
    for call in (lambda page: page.node(0), lambda page: page.key(0)):
        with pytest.raises(CorruptedError, match=f"the pointer of item 0 is {pointer}; nodes lie in"):
            call(file.page(file.leaf, {HEADER: pointer}))
    for call in (lambda page: page.child(0), lambda page: page.children()):
        with pytest.raises(CorruptedError, match=f"the pointer of item 0 is {pointer}; nodes lie in"):
            call(file.page(file.root, {HEADER: pointer}))


def test_a_node_before_the_others_or_at_an_odd_byte(file: File) -> None:
    upper = file.word(file.leaf, UPPER)
    for pointer in (upper - 2, upper + 1):
        with pytest.raises(CorruptedError, match=f"the pointer of item 1 is {pointer}"):
            file.page(file.leaf, {HEADER + 2: pointer}).node(1)


def test_a_node_that_ends_behind_its_page(file: File) -> None:
    """The last node of a page ends with it; a byte more of its key or of its value does not fit."""
    last = max(range(1, file.page(file.leaf).n), key=lambda i: file.word(file.leaf, HEADER + 2 * i))
    at = file.word(file.leaf, HEADER + 2 * last)
    node = file.page(file.leaf).node(last)
    room = P - node.data_stop
    assert file.page(file.leaf, {at: node.nbytes + room}).node(last).data_stop == P
    with pytest.raises(CorruptedError, match=f"node {last} .* ends behind byte {P} of the page"):
        file.page(file.leaf, {at: node.nbytes + room + 1}).node(last)
    with pytest.raises(CorruptedError, match=f"node {last} .* ends behind byte {P} of the page"):
        file.page(file.leaf, {at: 0, at + 6: P - node.key_start + 1}).node(last)
    with pytest.raises(CorruptedError, match=f"the key of item {last} ends at byte {P + 1} of {P}"):
        file.page(file.leaf, {at + 6: P - node.key_start + 1}).key(last)


def test_a_value_that_fills_its_pages(file: File) -> None:
    assert file.long.pages == 3
    at = file.word(file.leaf, HEADER)
    longer = file.page(file.leaf, {at: 3 * P - HEADER + 1}).node(0).overflow()
    assert longer.pages == 4
    with pytest.raises(CorruptedError, match="an overflow run of 3 pages where 4 are needed"):
        check_overflow(file.bytes_of(longer.pgno), longer, file.snapshot)
    check_overflow(file.bytes_of(file.long.pgno), file.long, file.snapshot)
    fewer = file.long._replace(pages=2)
    check_overflow(file.bytes_of(file.long.pgno), fewer, file.snapshot)  # LMDB writes shorter values in place


def test_an_overflow_run_that_passes_the_last_page(file: File) -> None:
    node = file.page(file.leaf).node(0)
    last = file.snapshot.last_pgno
    assert file.page(file.leaf, {node.data_start: last - 2}).node(0).overflow().pgno == last - 2
    for pgno in (last - 1, last + 1, 1):
        with pytest.raises(CorruptedError, match=f"overflow pages {pgno}..{pgno + 2}; pages in use are"):
            file.page(file.leaf, {node.data_start: pgno}).node(0).overflow()


def test_a_child_that_is_no_page_in_use(file: File) -> None:
    at = file.word(file.root, HEADER)
    last = file.snapshot.last_pgno
    for pgno in (1, last + 1):
        for call in (lambda page: page.child(0), lambda page: page.children()):
            with pytest.raises(CorruptedError, match=f"child 0 is page {pgno}; pages in use are 2..{last}"):
                call(file.page(file.root, {at: pgno}))
    with pytest.raises(CorruptedError, match="page numbers in use"):
        Tree(file.bytes_of, file.snapshot, file.snapshot.main).page(last + 1, 1)
