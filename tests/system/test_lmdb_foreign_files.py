"""Files written by liblmdb on other machines, read by pario.lmdb: every record as liblmdb itself reported it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from test_foreign_files import hashed, parse, unpacked

import pario.lmdb as ours

__all__ = ["unpacked"]  # the fixture


def test_as_liblmdb_reported(unpacked: Path) -> None:
    path = os.fspath(unpacked)
    if "encrypt" in unpacked.name:
        with pytest.raises(ours.EnvEncryptionError, match="encrypted"):
            ours.open(path, readonly=True)
        return
    expected = parse((unpacked / "expected.txt").read_text())
    with ours.open(path, readonly=True, max_dbs=100) as env:
        assert env.dbs() == sorted(line.name.encode() for line in expected if line.name != "(main)")
        for line in expected:
            db = None if line.name == "(main)" else env.open_db(line.name.encode(), create=False)
            with env.begin(db=db) as txn:
                records = list(txn.cursor())
                assert list(txn.cursor().iterprev()) == records[::-1]
                assert list(txn.cursor().iternext(values=False)) == [key for key, _ in records]
                firsts = dict(reversed(records))
                assert {key: txn.get(key) for key in firsts} == firsts
                assert txn.cursor().getmulti(firsts) == list(firsts.items())
                cursor = txn.cursor()
                assert all(cursor.set_range(key) and cursor.item() == (key, firsts[key]) for key in firsts)
                if db is not None and db.flags()["dupsort"]:
                    assert all(cursor.set_key_dup(k, v) and cursor.item() == (k, v) for k, v in records)
                stat = txn.stat()
            if db is None:
                records = [pair for pair in records if pair[0].startswith(b"~")]
            assert len(records) == line.listed
            assert hashed(records) == line.hash, line
            assert stat["entries"] == line.entries
            names = {"depth": "depth", "branch": "branch_pages", "leaf": "leaf_pages", "ovf": "overflow_pages"}
            assert {name: stat[mine] for name, mine in names.items()} == line.counters
