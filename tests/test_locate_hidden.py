"""The reserved entry of packed databases is no record of any index: loaded, walked or growing, in order or not."""

from __future__ import annotations

import os
from pathlib import Path

import lmdb
import numpy as np
import pytest
from packed_sets import pack_copy, write

import pario
from pario.errors import EmptyError
from pario.format.layout import MDB_INTEGERKEY, MDB_REVERSEKEY
from pario.locate.hidden import looks_reserved, without_last
from pario.locate.index import Places
from pario.records import EXTENT

BIG = [(b"%05d" % i, np.random.default_rng(i).bytes(3000)) for i in range(400)]


def test_places_without_the_last_record() -> None:
    extents = np.zeros(4, EXTENT)
    extents["offset"], extents["nbytes"] = [40, 10, 20, 30], 5
    places = without_last(Places(extents, np.array([1, 2, 3, 0]), "id", 5.0))
    assert places.extents["offset"].tolist() == [40, 10, 20]
    assert places.by_offset is not None
    assert places.by_offset.tolist() == [1, 2, 0]
    extents["offset"] = [20, 30, 40, 10]
    assert without_last(Places(extents, np.array([3, 0, 1, 2]), "id", 5.0)).by_offset is None


def test_only_the_form_of_the_key_is_looked_at() -> None:
    assert looks_reserved(b"\xff\xff\xff\xffpario-packed", 0)
    assert not looks_reserved(b"\xff\xff\xff\xffpario-packed ", 0)
    assert not looks_reserved(b"pario-packed", 0)
    assert not looks_reserved(b"\xff\xff\xff\xff", 0)
    assert not looks_reserved(b"", 0)
    assert looks_reserved(b"\xff" * 8, MDB_INTEGERKEY)
    assert looks_reserved(b"dekcap-oirap\xff\xff\xff\xff", MDB_REVERSEKEY)
    assert looks_reserved(b"dekcap-oirap\xff\xff\xff\xff", MDB_REVERSEKEY | MDB_INTEGERKEY)  # LMDB reverses bytes
    assert not looks_reserved(b"\xff" * 8, MDB_REVERSEKEY | MDB_INTEGERKEY)


def test_an_index_that_grows(tmp_path: Path) -> None:
    path = os.fspath(pack_copy(tmp_path / "p", BIG))
    for _ in range(2):  # growing, then loaded
        with pario.Loader(path, 50, comm="self") as loader:
            assert loader.records == 400
            got = [batch["data"][a:b].tobytes() for batch in loader for a, b in zip(
                batch["offsets"], batch["offsets"][1:], strict=False)]  # fmt: skip
            assert got == [value for _, value in BIG]
            assert loader.keys([0, 399]) == [BIG[0][0], BIG[399][0]]


def test_nothing_but_the_entry_is_an_empty_database(tmp_path: Path) -> None:
    whole = pack_copy(tmp_path / "p", BIG[:2])
    with lmdb.open(os.fspath(whole), readonly=True) as env, env.begin() as txn:
        entry = list(txn.cursor())[-1]
    with pytest.raises(EmptyError):
        pario.Reader(os.fspath(write(tmp_path / "only", [entry])), comm="self", save_index=False)
