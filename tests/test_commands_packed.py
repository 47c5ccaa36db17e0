"""The commands on packed databases."""

from __future__ import annotations

import os
from pathlib import Path

import lmdb
import pytest
from packed_sets import pack_copy, values_like_text, write

import pario
from pario.cli import main
from pario.codec.packing import reserved_key

ITEMS = [(b"%05d" % i, value) for i, value in enumerate(values_like_text(100))]


def said(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """(exit status, what stands on the screen)"""
    capfd.readouterr()
    status = main(list(words))
    out, err = capfd.readouterr()
    return status, out + err


def test_commands_show_values_and_no_entry(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = os.fspath(pack_copy(tmp_path / "p", ITEMS, dictionary=True))
    status, text = said(capfd, "data", "info", path)
    assert status == 0
    assert "100 (ids 0 to 99" in text
    assert "zstd:3 with a dictionary" in text
    assert "pario.decode.Text()" in text
    assert "pario-packed" not in text
    status, text = said(capfd, "data", "head", path, "-n", "98")
    assert status == 0
    assert text.count("\n") == 1 + 99 + 1  # the 98 first ones and the last one
    assert "00099" in text
    assert "pario-packed" not in text
    assert said(capfd, "data", "checksum", path)[0] == 0
    status, text = said(capfd, "data", "verify", path)
    assert status == 0
    assert "packed values; all of them have" in text
    assert "100 records found" in text
    with pario.Loader(path, 9, comm="self", verify=True) as loader:
        assert sum(len(batch.ids) for batch in loader) == 100


def test_verify_of_a_packed_folder_without_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "source/empty").mkdir(parents=True)
    (tmp_path / "source/link").symlink_to("nowhere")
    status, text = said(capfd, "data", "pack", f"{tmp_path}/source", f"{tmp_path}/p.lmdb")
    assert status == 0
    status, text = said(capfd, "data", "verify", f"{tmp_path}/p.lmdb")
    assert (status, "0 records found" in text) == (0, True), text


def test_verify_of_blocks_with_a_named_database_beside_them(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """No pario makes it, and no reader takes it."""
    path = pack_copy(tmp_path / "p", ITEMS, counts=[3])
    write(path, [(b"a", b"b")], b"named")
    status, text = said(capfd, "data", "verify", os.fspath(path))
    assert (status, "blocks of records lie beside named databases" in text) == (1, True), text


@pytest.mark.parametrize("order", ["0123", "0213"])
def test_verify_looks_at_the_keys_in_a_block(tmp_path: Path, capfd: pytest.CaptureFixture[str], order: str) -> None:
    items = [(b"key %d" % k, b"value %d" % k) for k in map(int, order)] + [(b"key 5", b"value"), (b"key 6", b"value")]
    path = pack_copy(tmp_path / "p", items, counts=[4, 2])
    status, text = said(capfd, "data", "verify", os.fspath(path))
    assert (status, "its key does not ascend" in text) == (int(order != "0123"), order != "0123"), text
    assert order == "0123" or "record 2" in text


def test_verify_of_packed_records_with_a_named_database_beside_them(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = pack_copy(tmp_path / "p", ITEMS)
    write(path, ITEMS[:3], db=b"00003 named")
    status, text = said(capfd, "data", "verify", os.fspath(path))
    assert status == 0
    assert "main database: packed values; all of them have" in text
    with lmdb.open(os.fspath(path), readonly=True) as env, env.begin() as txn:
        stored = txn.get(ITEMS[90][0])
    file = path / "data.mdb"
    data = file.read_bytes()
    at = data.index(stored) + len(stored) - 2
    file.write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
    status, text = said(capfd, "data", "verify", os.fspath(path))
    assert status
    assert "record 90" in text


def test_verify_finds_a_damaged_value_and_a_damaged_entry(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = pack_copy(tmp_path / "p", ITEMS)
    file = path / "data.mdb"
    data = file.read_bytes()
    with lmdb.open(os.fspath(path), readonly=True) as env, env.begin() as txn:
        stored, entry = txn.get(ITEMS[4][0]), txn.get(reserved_key(ITEMS[-1][0]))
    for what, at, words in (
        ("value", data.index(stored) + len(stored) - 2, "record 4"),
        ("entry", data.index(entry) + 100, "reserved entry"),
    ):
        file.write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
        status, text = said(capfd, "data", "verify", os.fspath(path))
        assert status == 1, what
        assert words in text
        assert "1 damaged" in text
