"""Files written by liblmdb on other machines (formats 1 to 3, 32 and 64 bits, both byte orders, page sizes from 512 B
to 16 KiB, with checksums, encrypted): every database as liblmdb itself reported it."""

from __future__ import annotations

import os
import re
import struct
import tarfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from shared_data import files, need
from tars import SAFE

from pario.comm.solo import Solo
from pario.commands.verify import verify
from pario.errors import DatabaseError, EmptyError, EncryptedError
from pario.fetch.pool import ReadPool
from pario.fetch.posix import PosixFetcher
from pario.fetch.snapshot import read_snapshot
from pario.format.layout import F_BIGDATA, F_SUBDATA
from pario.format.page import SubPage, check_overflow
from pario.format.tree import Tree, database_names, named_database
from pario.kernels.jit import kernel
from pario.locate.database import Database
from pario.locate.open import open_index

ARCHIVES = files("foreign", "*.tar.xz")


class Expected(NamedTuple):
    """A line of expected.txt; `listed` records went into the hash."""

    name: str
    flags: int
    entries: int
    listed: int
    hash: str
    counters: dict[str, int]


def parse(text: str) -> list[Expected]:
    lines = [line.split() for line in text.splitlines()]
    return [
        Expected(w[0], int(w[1]), int(w[2]), int(w[3]), w[4], {k: int(v) for k, v in (x.split("=") for x in w[5:])})
        for w in lines
    ]


@kernel(cache=False)
def fnv(data, h):  # type: ignore[no-untyped-def]
    for byte in data:
        h = (h ^ np.uint64(byte)) * np.uint64(0x100000001B3)
    return h


def hashed(records: list[tuple[bytes, bytes]]) -> str:
    """FNV-1a over every record as u32le key length, u32le value length, key, value."""
    whole = b"".join(struct.pack("<II", len(k), len(v)) + k + v for k, v in records)
    # The start value that the oracle's program used.
    return f"{int(fnv(np.frombuffer(whole, np.uint8), np.uint64(1469598103934665603))):016x}"


@pytest.fixture(scope="module", params=ARCHIVES, ids=lambda path: path.name.removesuffix(".tar.xz") or "none")
def unpacked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    need(request.param)
    place = tmp_path_factory.mktemp("foreign")
    with tarfile.open(request.param) as archive:
        archive.extractall(place, **SAFE)
    (data,) = place.rglob("data.mdb")
    return data.parent


def test_as_liblmdb_reported(unpacked: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path))
    path = os.fspath(unpacked / "data.mdb")
    fetcher = PosixFetcher(path)
    if "encrypt" in unpacked.name:
        with pytest.raises(EncryptedError, match="encrypted") as caught:
            read_snapshot(fetcher)
        assert caught.value.path == path
        return
    snapshot = read_snapshot(fetcher)
    version, word = int(unpacked.name[1]), 4 if "32-" in unpacked.name else 8
    byteorder = "big" if "-be" in unpacked.name else "little"
    assert (snapshot.version, snapshot.word, snapshot.byteorder) == (version, word, byteorder)
    assert snapshot.native == (word == 8 and byteorder == "little")
    assert (snapshot.sum_size > 0) == ("checksum" in unpacked.name)
    pool = ReadPool(fetcher, 2)
    raw = Path(path).read_bytes()
    main = Tree(lambda pgno: raw[pgno * snapshot.page_size : (pgno + 1) * snapshot.page_size], snapshot, snapshot.main)
    expected = parse((unpacked / "expected.txt").read_text())
    assert len(expected) > 10
    names = [line.name.encode() for line in expected if line.name != "(main)"]
    assert list(database_names(main)) == sorted(names)
    for line in expected:
        if line.name == "(main)":
            with pytest.raises(DatabaseError, match=f"{len(names)} named databases: 'dups'"):
                open_index(Database(path, snapshot), pool, Solo())
            records = [pair for pair in walked(main, raw) if pair[0].startswith(b"~")]
            db = snapshot.main
        else:
            name = line.name.encode()
            db = named_database(main, name)
            if line.entries == 0:
                with pytest.raises(EmptyError):
                    open_index(Database(path, snapshot, name), pool, Solo())
                continue
            index = open_index(Database(path, snapshot, name), pool, Solo())
            keys = index.keys(np.arange(index.n))
            records = [(k, raw[o : o + n]) for k, (o, n) in zip(keys, index.extents.tolist(), strict=True)]
            assert index.n == line.entries
            assert records == walked(Tree(main.read_page, snapshot, db), raw)
            again = open_index(Database(path, snapshot, name), pool, Solo())
            assert again.bytes_read == 0
            assert again.content_id == index.content_id
        assert len(records) == line.listed, line
        assert hashed(records) == line.hash, line
        assert (db.md_flags, db.md_entries) == (line.flags, line.entries)
        counters = dict(zip(("depth", "branch", "leaf", "ovf"), db[2:6], strict=True))
        assert counters == line.counters
    pool.close()
    fetcher.close()


def test_verify_accounts_for_every_page(unpacked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """liblmdb's own files: every page is used once or free, and the statistics are right."""
    if "encrypt" in unpacked.name:
        with pytest.raises(EncryptedError, match="encrypted"):
            verify(os.fspath(unpacked), None)
        return
    assert verify(os.fspath(unpacked), None) == 0
    said = capsys.readouterr().out
    assert re.search(r"^pages: [\d,]+ in use, [\d,]+ free$", said, re.MULTILINE), said
    assert "note:" not in said


def walked(tree: Tree, raw: bytes) -> list[tuple[bytes, bytes]]:
    """All records through `Tree`, without the index."""
    found = []
    for page, i in tree.items():
        node = page.node(i)
        dups = tree.dups(node)
        if isinstance(dups, SubPage):
            found += [(node.key, dups.key(j)) for j in range(dups.n)]
        elif dups is not None:
            found += [(node.key, leaf.key(j)) for leaf, j in dups.items()]
        elif node.flags & F_BIGDATA:
            run = node.overflow()
            check_overflow(raw[run.pgno * tree.snapshot.page_size :][:64], run, tree.snapshot)
            found.append((node.key, raw[run.offset : run.offset + run.nbytes]))
        elif not node.flags & F_SUBDATA:
            found.append((node.key, bytes(node.data)))
    return found
