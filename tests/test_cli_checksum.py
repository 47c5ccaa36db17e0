"""`data checksum`, and `verify` with what it saved; the oracle is the xxhash package on py-lmdb's values."""

from __future__ import annotations

import os
from pathlib import Path

import lmdb
import numpy as np
import pytest
from flips import flip, written
from launch import run_job
from lmdb_cases import FORMATS, make
from xxhash import xxh3_64_intdigest

import pario
from pario.cli import main

ROOT = Path(__file__).parents[1]


def said(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """(exit status, what stands on the screen)"""
    capfd.readouterr()
    status = main(list(words))
    out, err = capfd.readouterr()
    return status, out + err


def test_made_compared_and_found(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "set")
    values = written(path, "packed", 60)
    status, text = said(capfd, "verify", path)
    assert status == 0
    assert "no checksums; `python -m pario data checksum`" in text
    status, text = said(capfd, "checksum", path)
    assert status == 0
    assert "60 records read in" in text
    assert f"checksums saved as {path}/data.mdb.pario.sums" in text
    with pario.Reader(path, comm="self", verify=True) as reader:
        assert reader.sums is not None
        assert reader.sums.values.tolist() == [xxh3_64_intdigest(value) for value in values]
    status, text = said(capfd, "verify", path)
    assert status == 0
    assert "every value was compared with the checksums in" in text
    small, large = int(np.argmin(list(map(len, values)))), int(np.argmax(list(map(len, values))))
    flip(path, values, [small, large])
    status, text = said(capfd, "verify", path)
    assert status == 1
    assert text.count("the value is not the one whose checksum was saved: expected 0x") == 2
    assert f"{xxh3_64_intdigest(values[large]):#018x}" in text
    assert f"record {small}]" in text
    assert f"record {large}]" in text
    assert "damaged in 2 places" in text


def test_stale_ones_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "set")
    written(path, "packed", 20)
    assert said(capfd, "checksum", path)[0] == 0
    with lmdb.open(path) as env, env.begin(write=True) as txn:
        txn.put(b"one more", b"x")
    status, text = said(capfd, "verify", path)
    assert status == 0
    assert "no checksums fit" in text
    assert "another state of the data file" in text


def test_a_damaged_tree_is_not_compared_record_by_record(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "set")
    written(path, "decoded", 20)
    assert said(capfd, "checksum", path)[0] == 0
    with pario.Reader(path, comm="self") as reader:
        root = reader.index.database.snapshot.main.md_root
    with open(os.path.join(path, "data.mdb"), "r+b") as file:
        file.seek(root * 4096 + 10)
        file.write(b"\xff")
    status, text = said(capfd, "verify", path)
    assert status == 1
    assert "the values were not compared with the checksums" in text


def test_a_missing_database(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "set")
    written(path, "decoded", 5)
    with pytest.raises(pario.DatabaseError, match="there is no database 'none'"):
        said(capfd, "checksum", path, "--db", "none")


@pytest.mark.parametrize("version", FORMATS)
@pytest.mark.parametrize("case", ["duplicates", pytest.param("dupfixed_3", marks=pytest.mark.full)])
def test_duplicates_and_formats(case: str, version: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Values of one key lie in sub-pages and in trees of their own; `verify` numbers them as the index does."""
    path, db = make(tmp_path, case, version)
    assert db is not None
    assert said(capfd, "checksum", path, "--db", db.decode())[0] == 0
    status, text = said(capfd, "verify", path, "--db", db.decode())
    assert status == 0, text
    assert "every value was compared" in text


@pytest.mark.full  # by default the ranks of tests/test_mpi_verify.py do the same
@pytest.mark.parametrize("ranks", [2, 3])
def test_by_several_ranks(ranks: int, tmp_path: Path) -> None:
    path = str(tmp_path / "set")
    values = written(path, "packed", 60)
    job = run_job(ranks, ["-m", "pario", "data", "checksum", path], limit_s=100, env={"PYTHONPATH": str(ROOT)})
    assert job.status == 0, job.output
    assert f"on {ranks} ranks" in job.output
    with pario.Reader(path, comm="self", verify=True) as reader:
        assert reader.sums is not None
        assert reader.sums.values.tolist() == [xxh3_64_intdigest(value) for value in values]
    flip(path, values, [3, 50])
    job = run_job(ranks, ["-m", "pario", "data", "verify", path], limit_s=100, env={"PYTHONPATH": str(ROOT)})
    assert job.status == 1
    assert job.output.count("whose checksum was saved") == 2
