"""LMDBs that people published with their data sets and codes: every record as py-lmdb reads it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import lmdb
import numpy as np
import pytest
from shared_data import files, need

from pario.comm.solo import Solo
from pario.commands.verify import verify
from pario.fetch.pool import ReadPool
from pario.fetch.posix import PosixFetcher
from pario.fetch.snapshot import check_snapshot, read_snapshot
from pario.locate.database import Database
from pario.locate.open import open_index
from pario.locate.walk import build

FILES = files("wild", "*")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name or "none")
def test_as_py_lmdb(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need(path)
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path))
    with (
        lmdb.open(os.fspath(path), subdir=False, readonly=True, lock=False) as env,
        env.begin() as txn,
    ):
        expected = [(bytes(k), bytes(v)) for k, v in txn.cursor()]
        stat, info = env.stat(), env.info()
    fetcher = PosixFetcher(os.fspath(path))
    pool = ReadPool(fetcher, 2)
    snapshot = read_snapshot(fetcher)
    assert (snapshot.txnid, snapshot.last_pgno) == (info["last_txnid"], info["last_pgno"])
    # The folder may be read-only or not: its files stay as they are.
    made = open_index(Database(os.fspath(path), snapshot), pool, Solo(), save=False)
    assert made.bytes_read in (0, (stat["branch_pages"] + stat["leaf_pages"]) * stat["psize"])
    raw = path.read_bytes()
    values = [raw[o : o + n] for o, n in made.extents.tolist()]
    assert list(zip(made.keys(np.arange(made.n)), values, strict=True)) == expected
    slow = build(pool, Database(os.fspath(path), snapshot), Solo(), native=False)
    np.testing.assert_array_equal(slow.extents, made.extents)
    check_snapshot(fetcher, snapshot)
    pool.close()
    fetcher.close()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name or "none")
def test_verify_raises_no_false_alarm(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    need(path)
    assert verify(os.fspath(path), None) == 0
    said = capsys.readouterr().out
    assert re.search(r"^pages: [\d,]+ in use, [\d,]+ free$", said, re.MULTILINE), said
    assert "note:" not in said
