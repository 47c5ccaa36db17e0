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

from pario.comm.solo import Solo
from pario.commands.screen import screen
from pario.commands.verify import verify
from pario.commands.verify_pages import PageUse
from pario.fetch.posix import PosixFetcher
from pario.fetch.snapshot import read_snapshot
from pario.format.layout import F_BIGDATA, F_DUPDATA, F_SUBDATA
from pario.format.meta import Snapshot
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


RECORD = r"\[path '.*data.mdb', page \d+, offset \d+, record {}\]"
#: name -> (damage, the line that tells of it)
DAMAGE: dict[str, tuple[Callable[[Image], None], str]] = {
    "overflow run of a page more": (
        longer(3),
        r"pages: it is used more than once: by .* \[path '.*', page \d+, offset \d+\]\n",
    ),
    "overflow run of many pages more": (
        longer(12),
        r"(pages: it is used more than once: .*\n){5}",
    ),
    "overflow run that passes the last page": (
        longer(65537),
        r"database \"b\": the overflow page of this record says: .* 65,537 pages.*; expected: .* 2 pages or a few "
        r"more.*the last page in use is \d+ " + RECORD.format(43),
    ),
    "overflow run of no page": (longer(0), r"database \"b\": .* 0 pages.*; expected: .*" + RECORD.format(43)),
    "one value of two records": (
        shared_run,
        r"(pages: it is used more than once: .*\n){2}",
    ),
    "one leaf below two branch entries": (
        shared_leaf,
        r"pages: it is used more than once: ",
    ),
    "one tree of two databases": (
        shared_root,
        r"pages: it is used more than once: ",
    ),
    "one tree of two keys": (
        shared_duplicates,
        r"pages: it is used more than once: ",
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


def test_a_sound_file(sound: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = checked(sound, capsys)
    assert status == 0
    assert "note:" not in said
    assert checked(sound, capsys, "b")[0] == 0


def test_a_run_that_takes_a_free_page_is_a_note(sound: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No value is hurt by it, but the statistics of the database tell."""
    image = Image(sound)
    runs = sorted(run for name in (b"a", b"b") for _, run in image.runs(name))
    used = {leaf.pgno for name in (b"a", b"b", b"d") for leaf in image.tree(name).leaves()} | {*runs}
    used |= {run + 1 for run in runs} | {image.tree(name).db.md_root for name in (b"a", b"b", b"d")}
    run = next(run for run in runs if run + 2 not in used and run + 2 <= image.snapshot.last_pgno)
    image.put("I", image.pages_field(run), 3)
    path = tmp_path / "data.mdb"
    path.write_bytes(image.bytes)
    status, said = checked(os.fspath(path), capsys)
    assert status == 0, said
    assert re.search(r"note: its statistics say \d+ leaf pages and (\d+) overflow pages; found: \d+ and ", said), said


@pytest.mark.parametrize("version", FORMATS)
@pytest.mark.parametrize("name", ["shuffled_small", "shrunk", "duplicates", "dupfixed_8"])
def test_no_false_alarm(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, version: int) -> None:
    """Not by overflow runs that are longer than their values either."""
    status, said = checked(make(tmp_path, name, version)[0], capsys)
    assert status == 0, said
    assert "note:" not in said


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
    assert "pages: it is used more than once" in done.output, done.output
    assert f"page {image.get('Q', runs[0][0])}, offset" in done.output, done.output
    assert f"page {leaf.pgno}, offset {leaf.offset}]" in done.output
    assert "damaged in 2 places" in done.output
    assert done.output.count("damaged in") == 1


def test_pages_that_are_marked_again(tmp_path: Path) -> None:
    snapshot = Image(os.fspath(make(tmp_path, "shrunk", 1)[0])).snapshot
    rng = np.random.default_rng(1)
    for n in (1, 8, 9, 1000, 12345):
        use = PageUse(replace_pages(snapshot, n))
        seen: set[int] = set()
        again: set[int] = set()
        for part in np.array_split(rng.integers(0, n, n), 3):
            expected = []
            for page in part.tolist():
                expected.append(page not in seen)
                again |= {page} & seen
                seen.add(page)
            assert use.mark(part).tolist() == expected
        count, errors = use.twice(Solo())
        assert count == len(again)
        assert [error.page for error in errors] == sorted(again)[:20]


def replace_pages(snapshot: Snapshot, n: int) -> Snapshot:
    return replace(snapshot, last_pgno=n - 1, file_bytes=n * snapshot.page_size)
