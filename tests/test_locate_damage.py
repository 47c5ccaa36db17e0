"""Damaged files: each gives the error that names it; never a crash, never a record too few.

LMDB itself dies of SIGBUS for some of these, and reads others without noticing that records are missing.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from lmdb_cases import CASES, FORMATS, located, make, opened, oracle, pairs_of

from pario.errors import CorruptedError, EncryptedError, InvalidError, ParioError, VersionMismatchError
from pario.fetch.posix import PosixFetcher
from pario.fetch.snapshot import read_snapshot
from pario.format.meta import Snapshot
from pario.format.tree import Tree

P = 4096


class Image:
    """The bytes of a sound file, with the places where damage is done. Native layout, formats 1 and 3."""

    def __init__(self, path: str) -> None:
        self.bytes = bytearray(Path(path).read_bytes())
        fetcher = PosixFetcher(path)
        self.snapshot: Snapshot = read_snapshot(fetcher)
        fetcher.close()
        self.header = 16 if self.snapshot.version == 1 else 24
        self.base = 0 if self.snapshot.version == 1 else 24
        tree = Tree(lambda pgno: self.bytes[pgno * P : (pgno + 1) * P], self.snapshot, self.snapshot.main)
        self.root = self.snapshot.main.md_root
        self.leaves = [page.pgno for page in tree.leaves()]

    @property
    def live(self) -> int:
        """Where the live MDB_meta starts."""
        return self.snapshot.meta * P + self.header

    def put(self, code: str, at: int, value: int) -> None:
        struct.pack_into("<" + code, self.bytes, at, value)

    def get(self, code: str, at: int) -> int:
        return int(struct.unpack_from("<" + code, self.bytes, at)[0])

    def page(self, pgno: int, field: str) -> int:
        """Where a field of a page's header lies."""
        after = {"flags": 6, "lower": 4, "upper": 2, "pad": 8}
        return pgno * P + (0 if field == "pgno" else 8 if field == "txnid" else self.header - after[field])

    def node(self, pgno: int, i: int) -> int:
        """Where a node lies."""
        return pgno * P + self.base + self.get("H", pgno * P + self.header + 2 * i)

    def large(self) -> tuple[int, int]:
        """(node, its data) of an F_BIGDATA node."""
        for pgno in self.leaves:
            for i in range((self.get("H", self.page(pgno, "lower")) - self.header + self.base) // 2):
                at = self.node(pgno, i)
                if self.get("H", at + 4) == 1:
                    k = self.get("H", at + 6)
                    return at, at + 8 + k + (k & 1 if self.snapshot.version == 3 else 0)
        raise AssertionError("no large value")


@pytest.fixture(scope="module", params=FORMATS)
def sound(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("sound")
    rng = np.random.default_rng(3)
    with opened(directory, request.param) as env:
        for part in range(3):
            with env.begin(write=True) as txn:
                for i in range(200):
                    txn.put(b"%04d" % (200 * part + i), rng.bytes(6000 if i % 20 == 3 else 150))
    return os.fspath(directory / "data.mdb")


def _whole(value: bytes) -> Callable[[Image], bytes]:
    return lambda image: value


def _meta(offset: int, code: str, value: int, both: bool = True) -> Callable[[Image], None]:
    def damage(image: Image) -> None:
        for number in (0, 1) if both else (image.snapshot.meta,):
            image.put(code, number * P + image.header + offset, value)

    return damage


def _main(offset: int, code: str, value: int | Callable[[Image], int]) -> Callable[[Image], None]:
    """In the live meta page's record of the main tree."""
    return lambda image: image.put(code, image.live + 72 + offset, value(image) if callable(value) else value)


def _leaf(field: str, code: str, value: int) -> Callable[[Image], None]:
    return lambda image: image.put(code, image.page(image.leaves[3], field), value)


def _leaf_bytes(fill: Callable[[], bytes]) -> Callable[[Image], None]:
    def damage(image: Image) -> None:
        start = image.leaves[3] * P
        image.bytes[start : start + P] = fill()

    return damage


def _node(offset: int, code: str, value: int) -> Callable[[Image], None]:
    return lambda image: image.put(code, image.node(image.leaves[3], 2) + offset, value)


def _child(value: Callable[[Image], int]) -> Callable[[Image], None]:
    return lambda image: image.put("I", image.node(image.root, 4), value(image))


def _large(offset: int, code: str, value: int | Callable[[Image], int]) -> Callable[[Image], None]:
    return lambda image: image.put(code, image.large()[1] + offset, value(image) if callable(value) else value)


def _cut_at(where: Callable[[Image], int]) -> Callable[[Image], bytes]:
    return lambda image: bytes(image.bytes[: where(image)])


def _swapped_leaves(image: Image) -> None:
    """A branch whose children stand in the wrong order."""
    a, b = image.node(image.root, 3), image.node(image.root, 4)
    first, second = image.get("I", a), image.get("I", b)
    image.put("I", a, second)
    image.put("I", b, first)


#: name -> (damage, error, words of the message)
DAMAGE: dict[str, tuple[Callable[[Image], bytes | None], type[ParioError], str]] = {
    "empty": (_whole(b""), InvalidError, "file is empty"),
    "junk": (_whole(b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 40), InvalidError, "no magic number.*PNG"),
    "zeros": (_whole(bytes(100_000)), InvalidError, "starts with zeros"),
    "a few bytes": (_whole(b"abc"), InvalidError, "3 bytes are too few"),
    "LFS pointer": (
        _whole(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        InvalidError,
        "git lfs pull",
    ),
    "lock file": (_whole(struct.pack("<II", 0xBEEFC0DE, 0x10001) + bytes(8000)), InvalidError, "lock file.*data.mdb"),
    "less than a meta page": (_cut_at(lambda image: 100), InvalidError, "meta page"),
    "one page": (_cut_at(lambda image: P), InvalidError, "two meta pages"),
    "half": (_cut_at(lambda image: len(image.bytes) // 2 & -P), CorruptedError, "beyond the end of the file"),
    "two pages short": (_cut_at(lambda image: max(image.leaves) * P), CorruptedError, "beyond the end of the file"),
    "in the middle of a leaf": (_cut_at(lambda image: max(image.leaves) * P + 100), CorruptedError, "beyond the end"),
    "magic of meta 0": (
        lambda image: image.put("I", image.header, 0),
        InvalidError,
        "page 0 is not a meta page.*Page 1 seems to hold an intact meta page",
    ),
    "magic of meta 1": (
        lambda image: image.put("I", P + image.header, 0),
        InvalidError,
        "page 1 is not a meta page.*Page 0 holds an intact meta page",
    ),
    "format 7": (_meta(4, "I", 7), VersionMismatchError, "data format 7; pario reads formats 1, 2, 3"),
    "format 999": (_meta(4, "I", 999), VersionMismatchError, "developer"),
    "page size 0": (_meta(24, "I", 0), InvalidError, "power of two.*got 0"),
    "page size 3000": (_meta(24, "I", 3000), InvalidError, "power of two.*got 3000"),
    "page sizes differ": (lambda image: image.put("I", P + image.header + 24, 8192), InvalidError, "8192"),
    "transaction in the wrong meta page": (
        lambda image: image.put("Q", image.live + 128, image.snapshot.txnid + 1),
        InvalidError,
        "belongs to the other one",
    ),
    "transaction in the wrong meta page, the older one": (
        lambda image: image.put("Q", (1 - image.snapshot.meta) * P + image.header + 128, image.snapshot.txnid),
        InvalidError,
        "belongs to the other one",
    ),
    "page number of meta 1": (lambda image: image.put("Q", P, 0), InvalidError, "meta page 1 calls itself page 0"),
    "cut before the root": (_cut_at(lambda image: image.root * P), CorruptedError, "the root of the main database, pa"),
    "one child": (
        lambda image: image.put("H", image.page(image.root, "lower"), image.header - image.base + 2),
        CorruptedError,
        "1 items in a branch page",
    ),
    "root beyond the last page": (_main(40, "Q", 1 << 40), CorruptedError, "root of the main database is page 10995"),
    "root is a meta page": (_main(40, "Q", 1), CorruptedError, "root of the main database is page 1;"),
    "root is a leaf": (_main(40, "Q", lambda image: image.leaves[2]), CorruptedError, "a leaf page at level 1 of 2"),
    "too deep": (_main(6, "H", 40), CorruptedError, "40 levels deep"),
    "depth 3 of 2": (_main(6, "H", 3), CorruptedError, "a leaf page at level 2 of 3"),
    "depth 0": (_main(6, "H", 0), CorruptedError, "depth 0"),
    "entries": (_main(32, "Q", 601), CorruptedError, "600 records.*says 601"),
    "very many entries": (_main(32, "Q", 1 << 60), CorruptedError, "600 records"),
    "no entries": (_main(32, "Q", 0), CorruptedError, "0 entries"),
    "flags of duplicates only": (_main(4, "H", 0x10), CorruptedError, "impossible flags 0x10"),
    "unknown flags": (_main(4, "H", 0x200), CorruptedError, "impossible flags 0x200"),
    "leaf of zeros": (_leaf_bytes(lambda: bytes(P)), CorruptedError, "calls itself page 0"),
    "leaf of noise": (_leaf_bytes(lambda: np.random.default_rng(1).bytes(P)), CorruptedError, "calls itself page"),
    "page number": (_leaf("pgno", "Q", 3), CorruptedError, "calls itself page 3"),
    "page flags": (_leaf("flags", "H", 0x42), CorruptedError, "flags 0x42"),
    "leaf says overflow": (_leaf("flags", "H", 0x04), CorruptedError, "flags 0x4 "),
    "leaf says branch": (_leaf("flags", "H", 0x01), CorruptedError, "a branch page where a leaf page belongs"),
    "leaf says LEAF2": (_leaf("flags", "H", 0x22), CorruptedError, "leaf2|do not fit"),
    "no items": (
        lambda image: image.put("H", image.page(image.leaves[3], "lower"), image.header - image.base),
        CorruptedError,
        "0 items in a leaf page",
    ),
    "mp_lower 0": (_leaf("lower", "H", 0), CorruptedError, "items in a leaf page"),
    "mp_lower above mp_upper": (_leaf("lower", "H", 4000), CorruptedError, "does not hold"),
    "mp_upper beyond the page": (_leaf("upper", "H", 5000), CorruptedError, "does not hold"),
    "pointer": (
        lambda image: image.put("H", image.leaves[3] * P + image.header + 4, 4094),
        CorruptedError,
        "the pointer of item 2 is 4094",
    ),
    "odd pointer": (
        lambda image: image.put(
            "H", image.leaves[3] * P + image.header + 4, image.get("H", image.leaves[3] * P + image.header + 4) + 1
        ),
        CorruptedError,
        "the pointer of item 2",
    ),
    "node flags": (_node(4, "H", 0x80), CorruptedError, "impossible flags 0x80"),
    "BIGDATA with others": (_node(4, "H", 0x03), CorruptedError, "impossible flags 0x3"),
    "key size": (_node(6, "H", 60000), CorruptedError, "ends behind"),
    "data size": (_node(0, "I", 100_000), CorruptedError, "ends behind"),
    "duplicates in a plain database": (_node(4, "H", 0x04), CorruptedError, "no MDB_DUPSORT"),
    "tree of duplicates in a plain database": (_node(4, "H", 0x06), CorruptedError, "no MDB_DUPSORT"),
    "a database of the wrong size": (_node(4, "H", 0x02), CorruptedError, "a database record has 48 bytes"),
    "keys out of order": (
        lambda image: image.put("I", image.node(image.leaves[3], 2) + 8, 0),
        CorruptedError,
        "keys do not ascend",
    ),
    "leaves out of order": (_swapped_leaves, CorruptedError, "keys do not ascend"),
    "branch loop": (_child(lambda image: image.root), CorruptedError, "a branch page where a leaf page belongs"),
    "child is a meta page": (_child(lambda image: 1), CorruptedError, "child 4 is page 1"),
    "child beyond the last page": (_child(lambda image: 1 << 20), CorruptedError, "child 4 is page 1048576"),
    "one child twice": (_child(lambda image: image.leaves[3]), CorruptedError, "two branch entries lead to one page"),
    "child is an overflow page": (
        _child(lambda image: image.get("Q", image.large()[1])),
        CorruptedError,
        "flags 0x4 ",
    ),
    "overflow beyond the last page": (_large(0, "Q", 1 << 33), CorruptedError, "overflow pages 8589934592"),
    "overflow that ends behind the last page": (
        _large(0, "Q", lambda image: image.snapshot.last_pgno),
        CorruptedError,
        "overflow pages",
    ),
    "overflow is a meta page": (_large(0, "Q", 0), CorruptedError, "overflow pages 0"),
    "overflow negative": (_large(0, "Q", (1 << 64) - 2), CorruptedError, "overflow pages 18446744073709551614"),
    "overflow of 2 GiB": (
        lambda image: image.put("I", image.large()[0], 1 << 31),
        CorruptedError,
        "overflow pages|pages, not",
    ),
    "values overlap": (
        lambda image: image.put("Q", image.large()[1], image.leaves[5]),
        CorruptedError,
        "overlap",
    ),
}

FORMAT_3 = {
    "encrypted": (_meta(24 + 4, "H", 0x2008), EncryptedError, "encrypted"),
    "page of the future": (_leaf("txnid", "Q", 1000), CorruptedError, "written by transaction 1000, after our"),
    "overflow of the future": (_large(8, "Q", 1000), CorruptedError, "written by transaction 1000, after our"),
    "overflow pages too few": (_large(16, "Q", 1), CorruptedError, "need 2 pages, not 1"),
}


def damaged(sound: str, tmp_path: Path, damage: Callable[[Image], bytes | None]) -> str:
    image = Image(sound)
    whole = damage(image)
    path = tmp_path / "data.mdb"
    path.write_bytes(image.bytes if whole is None else whole)
    return os.fspath(path)


def opens(path: str, native: bool | None = None) -> None:
    """What every way to the records does first: find them, put them into file order."""
    from pario.locate.index import arrange

    extents = located(path, native=native).extents
    assert extents is not None
    arrange(extents, path)


@pytest.mark.parametrize("name", [*DAMAGE, *FORMAT_3])
def test_damage_is_named(sound: str, tmp_path: Path, name: str) -> None:
    if name in FORMAT_3 and Image(sound).snapshot.version != 3:
        return  # these fields exist in format 3 only; that file runs through this test too
    damage, error, words = {**DAMAGE, **FORMAT_3}[name]
    path = damaged(sound, tmp_path, damage)
    messages = []
    for native in (True, False):
        with pytest.raises(error, match=words) as caught:
            opens(path, native)
        assert type(caught.value) is error
        assert caught.value.path == path
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_a_cut_file_names_the_record(tmp_path: Path) -> None:
    """Caffe-style: values lie in overflow pages, so that the walk itself never meets the end."""
    directory = tmp_path / "whole"
    with opened(directory, 1) as env, env.begin(write=True) as txn:
        for i in range(100):
            txn.put(b"%04d" % i, b"x" * 5000)
    path = os.fspath(directory / "data.mdb")
    found = located(path)
    extents = found.extents
    assert extents is not None
    last = int(np.argmax(extents["offset"]))
    # Cut in the second page of the last value; what the tree needs lies before? Then put it there.
    cut = int(extents["offset"][last]) + 4500
    image = Image(path)
    beyond = [pgno for pgno in [image.root, *image.leaves] if (pgno + 1) * P > cut]
    assert not beyond, "the tree's pages lie before the last value"
    os.truncate(path, cut)
    with pytest.raises(CorruptedError, match=f"of record {last} lies beyond the end of the file") as caught:
        located(path)
    assert caught.value.record == last
    assert caught.value.page == cut // P
    assert caught.value.offset == int(extents["offset"][last])


@pytest.mark.parametrize("version", FORMATS)
def test_unused_tail(tmp_path: Path, version: int) -> None:
    """The file may be longer than the pages in use, and end before the last page number if nothing refers to it."""
    path, _ = make(tmp_path, "shuffled_small", version)
    expected = oracle(path)
    image = Image(path)
    found = located(path)
    extents = found.extents
    assert extents is not None
    ends = int((extents["offset"] + extents["nbytes"]).max())
    used = max(ends, (max(image.root, *image.leaves) + 1) * P)
    with open(path, "ab") as file:
        file.write(b"tail" * 3000)
    assert pairs_of(path, located(path)) == expected
    os.truncate(path, used)
    assert pairs_of(path, located(path)) == expected


FUZZ = """
import sys
import numpy as np
from lmdb_cases import CASES, located
from pario.errors import ParioError

directory, seed, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rng = np.random.default_rng(seed)
errors = kept = 0
names = sorted(CASES.keys() - {"caffe", "around_the_limit"})  # large files take their time
for k in range(rounds):
    name = names[k % len(names)]
    db = CASES[name][1]
    version = 1 + 2 * int(rng.integers(2))
    raw = np.fromfile(f"{directory}/{name}-{version}/data.mdb", np.uint8)
    # Pages of trees are few among overflow pages: damage where a leaf or branch page says it is one.
    header = 16 if version == 1 else 24
    pages = raw[: len(raw) // 4096 * 4096].reshape(-1, 4096)
    own = pages[:, :8].copy().view(np.uint64)[:, 0] == np.arange(len(pages))
    tree = np.flatnonzero(own & np.isin(pages[:, header - 6], [1, 2, 0x22]))
    for _ in range(int(rng.integers(1, 4))):
        page = rng.choice(tree)
        place = int(rng.integers(0, 64) if rng.random() < 0.5 else rng.integers(0, 4096))
        pages[page, place] = rng.integers(256)
    path = f"{directory}/fuzzed"
    raw.tofile(path)
    results = []
    for native in (True, False):
        try:
            found = located(path, db, native)
            results.append([found.extents.tobytes(), found.key_data.tobytes(), found.key_nbytes.tobytes()])
        except ParioError as e:
            results.append(str(e))
    assert results[0] == results[1], (name, version, k, results)
    errors += isinstance(results[0], str)
    kept += not isinstance(results[0], str)
print(errors, kept)
"""


@pytest.mark.full
def test_random_damage(tmp_path: Path) -> None:
    """Kernel and Python agree about every damaged file, and the kernel never looks outside its arrays."""
    for name in CASES:
        for version in FORMATS:
            make(tmp_path, name, version)
    here = os.path.dirname(os.path.abspath(__file__))
    env = {**os.environ, "PARIO_BOUNDSCHECK": "1", "PYTHONPATH": os.pathsep.join([here, os.path.dirname(here)])}
    env.pop("PARIO_NUMBA_CACHE", None)
    job = subprocess.run(
        [sys.executable, "-c", FUZZ, os.fspath(tmp_path), "5", "96"],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert job.returncode == 0, job.stderr
    errors, kept = map(int, job.stdout.split())
    assert errors > 30  # damage that was noticed
    assert kept > 10  # damage in values and unused bytes
