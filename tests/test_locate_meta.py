"""Meta records are recognised by their keys alone, alike in every kind of index, without reads worth mentioning. The
oracle is what was written, in the order of py-lmdb's cursor."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import lmdb
import numpy as np
import pytest
import sidecars

import pario
from pario.locate.growing import GrowingIndex
from pario.locate.meta import NAMES

pytestmark = pytest.mark.usefixtures("grows")

N = 120
DIGITS = [b"%08d" % i for i in range(N)]
#: as LSUN's: names on both sides of "_" and of all words
HEX = sorted(hashlib.sha1(b"%d" % i).hexdigest().encode() for i in range(N))
WORDS = sorted({bytes(word) for word in np.random.default_rng(2).integers(97, 123, (N, 5), np.uint8)})


def write(folder: Path, keys: Sequence[bytes], nbytes: int = 1500, **flags: bool) -> str:
    """Values of 1,500 bytes: two records per leaf page, so that an index may grow."""
    with lmdb.open(os.fspath(folder), map_size=1 << 24, max_dbs=1, sync=False) as env:
        db = env.open_db(b"d", **flags) if flags else None
        with env.begin(write=True, db=db) as txn:
            for i, key in enumerate(keys):
                txn.put(key, b"120" if key in NAMES else bytes([i % 251]) * nbytes)
    return os.fspath(folder)


def in_order(path: str) -> list[bytes]:
    with lmdb.open(path, readonly=True, lock=False) as env, env.begin() as txn:
        return [bytes(key) for key in txn.cursor().iternext(values=False)]


def opened(path: str, grow: bool) -> tuple[dict[int, bytes], bool]:
    """(meta records, whether the index grows)"""
    with pario.Reader(path, save_index=False, grow=grow) as reader:
        return reader.index.meta, isinstance(reader.index, GrowingIndex)


CASES = {
    "none": (DIGITS, [], []),
    "behind digits": (DIGITS, [b"__len__", b"__keys__"], [b"__len__", b"__keys__"]),
    "words behind digits": (DIGITS, [b"length", b"nextid", b"metadata"], [b"length", b"nextid", b"metadata"]),
    "many behind digits": (
        DIGITS,
        [b"created_at", b"id_to_idx", b"keys", b"length", b"num_examples"],
        [b"created_at", b"id_to_idx", b"keys", b"length", b"num_examples"],
    ),
    "among names": (HEX, [b"__len__", b"deleted_ids"], [b"__len__", b"deleted_ids"]),
    "behind names": (HEX, [b"num-samples"], [b"num-samples"]),
    "before names": (WORDS, [b"__len__", b"__keys__"], [b"__len__", b"__keys__"]),
    "words among words": (WORDS, [b"length", b"keys", b"metadata"], []),
    "a sure name among words": (WORDS, [b"length", b"num_samples"], [b"num_samples"]),
    "almost": (DIGITS, [b"length ", b"__LEN__", b"num-samples2", b"Length"], []),
}


@pytest.mark.parametrize("case", CASES)
def test_alike_in_a_complete_and_in_a_growing_index(case: str, tmp_path: Path) -> None:
    samples, more, expected = CASES[case]
    path = write(tmp_path / "x", [*samples, *more])
    keys = in_order(path)
    right = {i: key for i, key in enumerate(keys) if key in expected}
    assert opened(path, grow=False) == (right, False)
    meta, grows = opened(path, grow=True)
    assert meta == right
    # Only a meta record between the first and the last leaf page keeps an index from growing.
    assert grows == (case not in ("among names", "a sure name among words"))


def test_a_saved_index_knows_them(tmp_path: Path) -> None:
    path = write(tmp_path / "x", [*HEX, b"__len__", b"num_samples"])
    right = {i: key for i, key in enumerate(in_order(path)) if key in NAMES}
    for saved in (False, True):
        with pario.Reader(path) as reader:
            assert (reader.index.bytes_read == 0) == saved
            assert reader.index.meta == right


def test_a_grown_index_saves_them(tmp_path: Path) -> None:
    path = write(tmp_path / "x", [*DIGITS, b"__len__"])
    for _ in range(2):
        with pario.Loader(path, 32) as loader:
            assert sum(len(batch.ids) for batch in loader) == loader.records == N
            assert loader.index.meta == {N: b"__len__"}
    assert sidecars.read(f"{path}/data.mdb.pario.index")[0]["meta"] == [N]


@pytest.mark.parametrize("said", [[5], [0, N], [N + 1], [-1], list(range(100))])
def test_a_side_car_that_names_others_is_made_anew(
    said: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "x", [*DIGITS, b"__len__"])
    with pario.Reader(path):
        pass
    sidecars.edit(f"{path}/data.mdb.pario.index", lambda about, _: about.update(meta=said))
    with caplog.at_level(logging.INFO), pario.Reader(path) as reader:
        assert reader.index.meta == {N: b"__len__"}
        assert reader.index.bytes_read > 0
    assert "its meta records" in caplog.text


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"integerkey": True}, []),
        ({"reverse_key": True}, [b"__keys__", b"keys"]),
        ({"dupsort": True}, [b"__keys__", b"keys"]),
    ],
)
def test_other_kinds_of_databases(flags: dict[str, bool], expected: list[bytes], tmp_path: Path) -> None:
    if "integerkey" in flags:
        path = write(tmp_path / "x", [*(i.to_bytes(8, "little") for i in range(60)), b"__keys__", b"metadata"], **flags)
    else:
        path = write(tmp_path / "x", [*DIGITS[:60], b"keys", b"__keys__"], nbytes=200, **flags)
    with pario.Reader(path, db="d", save_index=False) as reader:
        assert sorted(reader.index.meta.values()) == expected
        assert reader.keys(list(reader.index.meta)) == list(reader.index.meta.values())


def test_a_key_with_several_values_is_none(tmp_path: Path) -> None:
    with lmdb.open(os.fspath(tmp_path), map_size=1 << 24, max_dbs=1, sync=False) as env:
        db = env.open_db(b"d", dupsort=True)
        with env.begin(write=True, db=db) as txn:
            for key in (b"1", b"2", b"keys", b"__len__"):
                txn.put(key, b"value")
            txn.put(b"keys", b"another")
    with pario.Reader(tmp_path, db="d", save_index=False) as reader:
        assert reader.index.meta == {2: b"__len__"}


def test_a_dataset_of_nothing_else_keeps_them(tmp_path: Path) -> None:
    path = write(tmp_path / "x", [b"length", b"keys"])
    assert opened(path, grow=False) == ({}, False)
    with pario.Loader(path, 2) as loader:
        assert [batch.ids.tolist() for batch in loader] == [[0, 1]]


def test_a_growing_index_reads_no_page_more_where_no_name_lies_between_its_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bytes_read(path: str) -> int:
        with pario.Reader(path, save_index=False, grow=True) as reader:
            assert isinstance(reader.index, GrowingIndex)
            return reader.index.bytes_read

    behind, among = write(tmp_path / "a", [*DIGITS, b"__len__"]), write(tmp_path / "b", HEX)
    counted: Callable[[str], int] = bytes_read
    with monkeypatch.context() as patch:
        patch.setattr("pario.locate.walk.Walk.meta_between", lambda *_: False)
        before = counted(behind), counted(among)
    assert counted(behind) == before[0]
    # Names of LSUN's kind: "__..." and "_type" stand between digits and letters, three words among the letters.
    assert counted(among) - before[1] <= 4 * 4096


def test_a_damaged_leaf_in_which_a_name_would_stand_is_said_with_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "x", HEX)
    file = Path(path) / "data.mdb"
    data = bytearray(file.read_bytes())
    last_digit = max(key for key in HEX if key < b"__keys__")
    at = data.index(last_digit) // 4096 * 4096
    data[at + 10 : at + 12] = b"\xff\xff"  # the flags of the page
    file.write_bytes(data)
    with pytest.raises(pario.CorruptedError, match=r"data\.mdb"):
        opened(path, grow=True)
