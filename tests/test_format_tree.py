"""Trees against py-lmdb: seeking, stepping both ways, duplicates, named databases, overflow headers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import lmdb
import numpy as np
import pytest
from lmdb_cases import FORMATS, make, oracle

from pario.errors import CorruptedError, DatabaseError
from pario.fetch.posix import PosixFetcher
from pario.fetch.snapshot import read_snapshot
from pario.format.layout import F_BIGDATA
from pario.format.meta import Snapshot
from pario.format.page import Page, SubPage, check_overflow
from pario.format.tree import Tree, database_names, named_database

CHOSEN = ["shuffled_small", "long_keys", "appended", "around_the_limit", "duplicates", "dupfixed_3", "integer_keys",
          "reverse_keys", "integer_duplicates", "one_record"]  # fmt: skip


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cases")


class File:
    """A file in memory and its pages."""

    def __init__(self, path: str) -> None:
        self.raw = Path(path).read_bytes()
        fetcher = PosixFetcher(path)
        self.snapshot: Snapshot = read_snapshot(fetcher)
        fetcher.close()
        self.main = Tree(self.read_page, self.snapshot, self.snapshot.main)

    def read_page(self, pgno: int) -> bytes:
        size = self.snapshot.page_size
        return self.raw[pgno * size : (pgno + 1) * size]

    def tree(self, db: bytes | None) -> Tree:
        return self.main if db is None else Tree(self.read_page, self.snapshot, named_database(self.main, db))

    def values(self, tree: Tree, page: Page, i: int) -> list[bytes]:
        node = page.node(i)
        dups = tree.dups(node)
        if isinstance(dups, SubPage):
            return [dups.key(j) for j in range(dups.n)]
        if dups is not None:
            return [leaf.key(j) for leaf, j in dups.items()]
        if node.flags & F_BIGDATA:
            run = node.overflow()
            check_overflow(self.read_page(run.pgno), run, self.snapshot)
            return [self.raw[run.offset : run.offset + run.nbytes]]
        assert bytes(node.data) == self.raw[node.offset : node.offset + node.nbytes]
        return [bytes(node.data)]


@pytest.mark.parametrize("version", FORMATS)
@pytest.mark.parametrize("name", CHOSEN)
def test_forwards_and_the_last(cases: Path, name: str, version: int) -> None:
    path, db = make(cases, name, version)
    file = File(path)
    tree = file.tree(db)
    expected = oracle(path, db)
    assert [(page.key(i), v) for page, i in tree.items() for v in file.values(tree, page, i)] == expected

    keys = list(dict.fromkeys(key for key, _ in expected))
    there, at = [], tree.first()
    while at:
        there.append(at[-1][0].key(at[-1][1]))
        at = tree.next(at)
    assert there == keys
    page, i = tree.last()[-1]
    assert page.key(i) == keys[-1]


@pytest.mark.parametrize("version", FORMATS)
@pytest.mark.parametrize("name", CHOSEN)
def test_seek_as_set_range(cases: Path, name: str, version: int) -> None:
    path, db = make(cases, name, version)
    tree = File(path).tree(db)
    rng = np.random.default_rng(2)
    keys = list(dict.fromkeys(key for key, _ in oracle(path, db)))
    width = len(keys[0])
    wanted = [keys[i] for i in rng.integers(0, len(keys), 60)] + [keys[0], keys[-1]]
    if "integer" in name:
        wanted += [rng.bytes(width) for _ in range(60)] + [bytes(width), b"\xff" * width]
    else:
        wanted += [rng.bytes(int(rng.integers(1, 12))) for _ in range(60)] + [b"\0", b"\xff" * 20]
        wanted += [key[:-1] or b"0" for key in wanted[:30]] + [key + b"\0" for key in wanted[:30]]
    with lmdb.open(path, subdir=False, readonly=True, lock=False, max_dbs=16) as env:
        handle = env.open_db(db, create=False) if db is not None else None
        with env.begin(db=handle) as txn, txn.cursor() as cursor:
            for key in wanted:
                found = cursor.set_range(key)
                at, exact = tree.seek(key)
                assert bool(at) == found
                assert exact == (found and cursor.key() == key)
                if at:
                    assert at[-1][0].key(at[-1][1]) == cursor.key()


@pytest.mark.parametrize("version", FORMATS)
def test_databases(cases: Path, version: int) -> None:
    path, _ = make(cases, "duplicates", version)
    file = File(path)
    assert list(database_names(file.main)) == [b"d"]
    assert named_database(file.main, b"d").md_entries == len(oracle(path, b"d"))
    with pytest.raises(DatabaseError, match="There are: 'd'"):
        named_database(file.main, b"x")
    path, _ = make(cases, "shuffled_small", version)
    file = File(path)
    assert list(database_names(file.main)) == []
    key = oracle(path)[5][0]
    with pytest.raises(DatabaseError, match="key of a record"):
        named_database(file.main, key)
    with pytest.raises(DatabaseError, match="no database 'x'"):
        named_database(file.main, b"x")


@pytest.mark.parametrize("version", FORMATS)
def test_children_one_by_one_and_together(cases: Path, version: int) -> None:
    path, _ = make(cases, "appended", version)
    file = File(path)
    root = file.main.page(file.main.db.md_root, 1)
    assert root.kind == "branch"
    assert [root.child(i) for i in range(root.n)] == root.children().tolist()
    with pytest.raises(IndexError):
        root.child(root.n)


@pytest.mark.parametrize("version", FORMATS)
def test_overflow_headers(cases: Path, version: int) -> None:
    path, _ = make(cases, "shrunk", version)
    file = File(path)
    page, i = next((page, i) for page, i in file.main.items() if page.node(i).flags & F_BIGDATA)
    run = page.node(i).overflow()
    sound = file.read_page(run.pgno)
    check_overflow(sound, run, file.snapshot)
    header = file.snapshot.header
    damage = {
        "calls itself page 77": (0, (77).to_bytes(8, "little")),
        "flags 0x2": (header - 6, b"\x02\0"),
        "run of 0 pages": (header - 4, bytes(4)),
    }
    if version == 3:
        damage["after our snapshot"] = (8, (1 << 40).to_bytes(8, "little"))
    for words, (at, new) in damage.items():
        broken = sound[:at] + new + sound[at + len(new) :]
        with pytest.raises(CorruptedError, match=words) as caught:
            check_overflow(broken, run, file.snapshot)
        assert caught.value.page == run.pgno
    # Shrunk in place, runs keep their pages: more than the value needs is sound.
    runs = [page.node(i).overflow() for page, i in file.main.items() if page.node(i).flags & F_BIGDATA]
    has = [int.from_bytes(file.raw[run.pgno * 4096 + header - 4 :][:4], "little") for run in runs]
    assert any(n > run.pages for n, run in zip(has, runs, strict=True))


def test_a_tree_with_more_leaves_than_the_file_has_pages(cases: Path) -> None:
    """Branches that share children would keep a reader busy for ever."""
    path, _ = make(cases, "shuffled_small", 1)
    file = File(path)
    leaves = len(list(file.main.leaves()))
    assert leaves > 1
    small = dataclasses.replace(file.snapshot, file_bytes=(leaves - 1) * file.snapshot.page_size)
    with pytest.raises(CorruptedError, match="reaches one of its pages twice"):
        list(Tree(file.read_page, small, small.main).leaves())
