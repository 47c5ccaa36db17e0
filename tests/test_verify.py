"""`verify` knows whom every page belongs to: damage that leaves each page sound by itself, and files that are sound."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import lmdb
import numpy as np
import pytest

pytest.importorskip("click")
pytest.importorskip("tqdm")

from launch import run_job
from lmdb_cases import FORMATS, make, opened

from pario.commands.screen import screen
from pario.commands.verify import verify
from pario.commands.verify_pages import PageSet
from pario.commands.verify_tree import spelt_out
from pario.fetch.posix import PosixFetcher
from pario.fetch.snapshot import read_snapshot
from pario.format.layout import F_BIGDATA, F_DUPDATA, F_SUBDATA, MDB_INTEGERKEY
from pario.format.page import Page
from pario.format.tree import Tree, named_database

ROOT = Path(__file__).parents[1]
P = 4096


class Image:
    """The bytes of a sound file, with the places where damage is done. Native layout, formats 1 and 3."""

    def __init__(self, path: str) -> None:
        self.bytes = bytearray(Path(path).read_bytes())
        fetcher = PosixFetcher(path)
        self.snapshot = read_snapshot(fetcher)
        fetcher.close()
        self.main = self.tree()

    def tree(self, name: bytes | None = None) -> Tree:
        db = self.snapshot.main if name is None else named_database(self.main, name)
        return Tree(lambda pgno: bytes(self.bytes[pgno * P : (pgno + 1) * P]), self.snapshot, db)

    def nodes(self, tree: Tree, flags: int) -> list[int]:
        """Where the data of all items of this kind lies in the file, in key order."""
        return [leaf.node(i).offset for leaf, i in tree.items() if leaf.node(i).flags == flags]

    def runs(self, name: bytes) -> list[tuple[int, int]]:
        """(where the page number of an overflow run stands, the page number)"""
        return [(at, self.get("Q", at)) for at in self.nodes(self.tree(name), F_BIGDATA)]

    def children(self, name: bytes) -> tuple[Page, list[int]]:
        """The root of a database, a branch page, and where its children's page numbers stand."""
        tree = self.tree(name)
        root = tree.page(tree.db.md_root, 1)
        assert root.kind == "branch"
        return root, [root.offset + root._at(i) for i in range(root.n)]

    def free_list(self) -> tuple[int, int]:
        """Where the count of an entry stands, and the count."""
        db = self.snapshot.free._replace(md_flags=MDB_INTEGERKEY)
        at = self.nodes(Tree(self.main.read_page, self.snapshot, db), 0)[-1]
        return at, self.get("Q", at)

    def pages_field(self, pgno: int) -> int:
        return pgno * P + self.snapshot.header - 4

    def get(self, code: str, at: int) -> int:
        return int(struct.unpack_from("<" + code, self.bytes, at)[0])

    def put(self, code: str, at: int, value: int) -> None:
        struct.pack_into("<" + code, self.bytes, at, value)


@pytest.fixture(scope="module", params=FORMATS)
def sound(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two plain databases of small and large values, one with trees of duplicates, and free pages."""
    directory = tmp_path_factory.mktemp("verify")
    rng = np.random.default_rng(5)
    with opened(directory, request.param) as env:
        for name in (b"a", b"b"):
            db = env.open_db(name)
            with env.begin(write=True, db=db) as txn:
                for i in range(200):
                    txn.put(b"%04d" % i, rng.bytes(6000 if i % 10 == 3 else 150))
        db = env.open_db(b"d", dupsort=True)
        with env.begin(write=True, db=db) as txn:
            for i in range(600):
                txn.put(b"one", b"%020d" % i)
                txn.put(b"two", b"%020d" % i)
        for round_ in range(3):
            with env.begin(write=True, db=env.open_db(b"a")) as txn:
                for i in range(round_, 60, 3):
                    txn.delete(b"%04d" % i)
    return os.fspath(directory / "data.mdb")


def checked(path: str, capsys: pytest.CaptureFixture[str], db: str | None = None) -> tuple[int, str]:
    """(exit status, what was said)"""
    screen.running = False
    status = verify(path, db)
    return status, capsys.readouterr().out


def longer(pages: int | Callable[[Image], int]) -> Callable[[Image], None]:
    """The header of an overflow run claims more pages than it has."""

    def damage(image: Image) -> None:
        run = image.runs(b"b")[4][1]
        image.put("I", image.pages_field(run), pages if isinstance(pages, int) else pages(image))

    return damage


def shared_run(image: Image) -> None:
    """Two records with one value."""
    runs = image.runs(b"b")
    image.put("Q", runs[3][0], runs[7][1])


def shared_leaf(image: Image) -> None:
    """Two branch entries lead to one page."""
    at = image.children(b"b")[1]
    image.put("I", at[2], image.get("I", at[3]))


def shared_root(image: Image) -> None:
    """Two named databases with one tree."""
    at = image.nodes(image.main, F_SUBDATA)
    image.bytes[at[0] : at[0] + 48] = image.bytes[at[1] : at[1] + 48]


def shared_duplicates(image: Image) -> None:
    """Two keys with one tree of duplicates."""
    at = image.nodes(image.tree(b"d"), F_SUBDATA | F_DUPDATA)
    image.bytes[at[0] : at[0] + 48] = image.bytes[at[1] : at[1] + 48]


def used_and_free(image: Image) -> None:
    """The list of free pages holds a leaf of a database, in the right order."""
    at, count = image.free_list()
    free = [image.get("Q", at + 8 * k) for k in range(1, count + 1)]
    used = [leaf.pgno for leaf in image.tree(b"b").leaves()]
    mixed = sorted([*free[:-1], next(pgno for pgno in used if pgno not in free)], reverse=True)
    for k, pgno in enumerate(mixed, 1):
        image.put("Q", at + 8 * k, pgno)


def free_list(k: int, value: Callable[[int], int]) -> Callable[[Image], None]:
    """Changes the count (k = 0) or a number of an entry."""

    def damage(image: Image) -> None:
        at, count = image.free_list()
        image.put("Q", at + 8 * k, value(count))

    return damage


RECORD = r"\[path '.*data.mdb', page \d+, offset \d+, record {}\]"
#: name -> (damage, the line that tells of it)
DAMAGE: dict[str, tuple[Callable[[Image], None], str]] = {
    "overflow run of a page more": (
        longer(3),
        r"pages: page \d+ used more than once: by the value of record 43 of the database \"b\" \(pages \d+ to \d+, "
        r"though 2 would do\), and by .*" + RECORD.format(43),
    ),
    "overflow run of many pages more": (
        longer(12),
        r"pages: pages \d+ to \d+ used more than once: by the value of record 43 of .*, and by \d+ more",
    ),
    "overflow run that passes the last page": (
        longer(65537),
        r"database \"b\": the overflow page of this record says: .* 65,537 pages.*; expected: .* 2 pages or a few "
        r"more.*the last page in use is \d+ " + RECORD.format(43),
    ),
    "overflow run of no page": (longer(0), r"database \"b\": .* 0 pages.*; expected: .*" + RECORD.format(43)),
    "one value of two records": (
        shared_run,
        r"used more than once: by the value of record 33 of the database \"b\" \(pages \d+ to \d+\), and by the value "
        r"of record 73 of the database \"b\"",
    ),
    "one leaf below two branch entries": (
        shared_leaf,
        r"page \d+ used more than once: by a leaf page of the database \"b\", and by a leaf page of the database \"b\"",
    ),
    "one tree of two databases": (
        shared_root,
        r"page \d+ used more than once: by a (leaf|branch) page of the database \"a\", and by a (leaf|branch) page of "
        r"the database \"b\"",
    ),
    "one tree of two keys": (
        shared_duplicates,
        r"page \d+ used more than once: by the duplicates from record 0 of the database \"d\" on, and by the "
        r"duplicates from record 600 of",
    ),
    "a page that is used and free": (
        used_and_free,
        r"page \d+ used more than once: by a leaf page of the database \"b\", and by the list of free pages",
    ),
    "a free page twice": (
        lambda image: [image.put("Q", image.free_list()[0] + 16, image.get("Q", image.free_list()[0] + 8))],
        r"list of free pages: item \d+ of the list of free pages holds numbers that do not descend",
    ),
    "a free page that is not there": (free_list(1, lambda _: 1 << 40), r"list of free pages: .* not in 2\.\."),
    "more free pages than there is room": (
        free_list(0, lambda count: count + 1),
        r"list of free pages: item \d+ .* a count of \d+",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_it_names_the_damage(sound: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    image = Image(sound)
    before = bytes(image.bytes)
    damage, words = DAMAGE[name]
    damage(image)
    assert image.bytes != before
    path = tmp_path / "data.mdb"
    path.write_bytes(image.bytes)
    status, said = checked(os.fspath(path), capsys)
    assert status == 1
    assert re.search(words, said), said
    assert "damaged in" in said
    for line in said.splitlines():
        assert "[path" not in line or f"path '{path}'" in line


def test_a_sound_file_and_its_pages(sound: str, capsys: pytest.CaptureFixture[str]) -> None:
    image = Image(sound)
    free = image.free_list()[1]
    assert free >= 5
    status, said = checked(sound, capsys)
    assert status == 0
    used, listed = re.search(r"^pages: (\d+) in use, (\d+) free$", said, re.MULTILINE).groups()  # type: ignore[union-attr]
    assert int(used) + int(listed) == image.snapshot.last_pgno + 1
    assert int(listed) >= free
    assert "note:" not in said


def test_one_database_alone(sound: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pages of other databases are not known, so that none is called lost; the free ones are."""
    status, said = checked(sound, capsys, "b")
    assert (status, "lost" in said) == (0, False)
    image = Image(sound)
    used_and_free(image)
    path = tmp_path / "data.mdb"
    path.write_bytes(image.bytes)
    assert checked(os.fspath(path), capsys, "b")[0] == 1


def test_lost_pages_are_no_damage(sound: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = Image(sound)
    at, count = image.free_list()
    image.put("Q", at, count - 3)
    path = tmp_path / "data.mdb"
    path.write_bytes(image.bytes)
    status, said = checked(os.fspath(path), capsys)
    assert status == 0
    assert "; 3 neither used nor free: lost to LMDB, and harmless" in said


def test_a_run_that_takes_a_lost_page_is_a_note(sound: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No value is hurt by it, but the statistics of the database tell."""
    image = Image(sound)
    at, count = image.free_list()
    free = [image.get("Q", at + 8 * k) for k in range(1, count + 1)]
    last = {run + 1: run for _, run in image.runs(b"b")}
    image.put("Q", at, 0)
    lost = next((page for page in free if page - 1 in last), None)
    if lost is None:  # no run of "b" lies before a free page: take one of "a"
        last = {run + 1: run for _, run in image.runs(b"a")}
        lost = next(page for page in free if page - 1 in last)
    image.put("I", image.pages_field(last[lost - 1]), 3)
    path = tmp_path / "data.mdb"
    path.write_bytes(image.bytes)
    status, said = checked(os.fspath(path), capsys)
    assert status == 0
    assert re.search(r"note: its statistics say \d+ leaf pages and (\d+) overflow pages; found: \d+ and ", said), said


@pytest.mark.parametrize("version", FORMATS)
@pytest.mark.parametrize("name", ["shuffled_small", "shrunk", "duplicates", "dupfixed_8"])
def test_no_false_alarm(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, version: int) -> None:
    """Every page is accounted for, those of overflow runs longer than their values among them."""
    status, said = checked(make(tmp_path, name, version)[0], capsys)
    assert status == 0, said
    assert re.search(r"^pages: [\d,]+ in use, [\d,]+ free$", said, re.MULTILINE), said
    assert "note:" not in said


def test_a_free_list_on_overflow_pages_and_pages_never_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file ends before the last page in use: those pages were freed in the transaction that took them."""
    with opened(tmp_path, 1) as env:
        with env.begin(write=True) as txn:
            for i in range(900):
                txn.put(b"%04d" % i, bytes(9000))
        with env.begin(write=True) as txn:
            for i in range(900):
                txn.delete(b"%04d" % i)
        with env.begin(write=True) as txn:
            txn.put(b"k", b"v")
        with env.begin(write=True) as txn:
            txn.put(b"much", bytes(20_000_000))
            txn.delete(b"much")
    image = Image(os.fspath(tmp_path / "data.mdb"))
    assert len(image.bytes) < (image.snapshot.last_pgno + 1) * P
    assert image.snapshot.free.md_overflow_pages > 0
    status, said = checked(os.fspath(tmp_path), capsys)
    assert status == 0, said
    assert re.search(r"^pages: \d+ in use, [\d,]+ free$", said, re.MULTILINE), said


def test_the_saved_index_is_compared_record_by_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A side-car that swaps two small values inside a leaf page."""
    from pario.locate.open import open_index

    def lying(*words: object, **named: object) -> object:
        index = open_index(*words, **named)  # type: ignore[arg-type]
        extents = index.extents.copy()
        extents[[3, 4]] = extents[[4, 3]]
        index._places = replace(index._places, extents=extents)
        return index

    with lmdb.open(os.fspath(tmp_path), map_size=1 << 24) as env, env.begin(write=True) as txn:
        for i in range(50):
            txn.put(b"%04d" % i, b"%040d" % i)
    monkeypatch.setattr("pario.commands.verify.open_index", lying)
    status, said = checked(os.fspath(tmp_path), capsys)
    assert status == 1
    assert re.search(r"the index says that this record has .* \(first of 2 records\) .*record 3\]", said), said


def test_three_ranks_find_what_one_finds(tmp_path: Path) -> None:
    """A lost leaf, and a page that is used by the first and by the last rank."""
    with opened(tmp_path, 1) as env, env.begin(write=True, db=env.open_db(b"b")) as txn:
        for i in range(400):
            txn.put(b"%0100d" % i, bytes(3000))
    path = tmp_path / "data.mdb"
    image = Image(os.fspath(path))
    runs = image.runs(b"b")
    image.put("Q", runs[0][0], runs[-1][1])
    leaf = list(image.tree(b"b").leaves())[2]
    image.put("Q", leaf.offset, 0)
    path.write_bytes(image.bytes)
    done = run_job(3, ["-m", "pario", "data", "verify", os.fspath(path)], limit_s=100, env={"PYTHONPATH": str(ROOT)})
    assert done.status == 1, done.output
    last = 399 - leaf.n
    both = rf"by the value of record 0 of .*, and by the value of record {last} of "
    assert re.search(both, done.output), done.output
    assert f"page {leaf.pgno}, offset {leaf.offset}]" in done.output
    assert "damaged in 2 places" in done.output
    assert done.output.count("damaged in") == 1


def test_sets_of_pages() -> None:
    rng = np.random.default_rng(1)
    for n in (1, 8, 9, 1000, 12345):
        pages = rng.integers(0, n, n)
        some = PageSet(n)
        seen: set[int] = set()
        for part in np.array_split(pages, 3):
            expected = []
            for page in part.tolist():
                expected.append(page not in seen)
                seen.add(page)
            assert some.add(part).tolist() == expected
        assert some.count() == len(seen)
        assert some.has(np.arange(n)).tolist() == [page in seen for page in range(n)]
        held = [page for low, high in some.ranges().tolist() for page in range(low, high)]
        assert held == sorted(seen)
        assert (np.diff(some.ranges().reshape(-1)) > 0).all()


@pytest.mark.parametrize(
    ("said", "pages"),
    [
        ([0, 0, -2, 574, 0, 9, -3, 5], [574, 575, 9, 5, 6, 7]),
        ([], []),
        ([35, 36, 2], [35, 36, 2]),
        ([-5], []),
    ],
)
def test_free_pages_as_lmdb_js_lists_them(said: list[int], pages: list[int]) -> None:
    assert spelt_out(np.array(said, np.int64), 1000).tolist() == pages


@pytest.mark.parametrize("said", [[-1001, 5], [-600, 3, -600, 4], [-(1 << 63), 3]])
def test_free_pages_that_are_more_than_there_are_take_no_memory(said: list[int]) -> None:
    found = spelt_out(np.array(said, np.int64), 1000)
    assert len(found) <= len(said)
    assert (found < 0).any(), "no numbers of pages"
