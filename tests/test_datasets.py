"""The makers of test data make what they say: the other tests stand on them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import lmdb
import numpy as np
import pytest
from datasets import MAKERS, Made, datum

NO_RECORDS = {"empty"}


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_truth_is_what_get_returns(name: str, dataset: Callable[[str], Made]) -> None:
    made = dataset(name)
    with lmdb.open(made.path, readonly=True, lock=False, max_dbs=8) as env:
        db = env.open_db(made.db, create=False) if made.db else None
        with env.begin(db=db) as txn:
            assert txn.stat(db)["entries"] == len(made.truth) if db else env.stat()["entries"] == len(made.truth)
            for key, _ in made.truth[:: max(1, len(made.truth) // 50)]:
                first = next(value for other, value in made.truth if other == key)
                assert txn.get(key) == first
    assert bool(made.truth) == (name not in NO_RECORDS)


@pytest.mark.parametrize("name", ["variable_sizes", "deletions"])
def test_same_bytes_every_time(name: str, dataset: Callable[[str], Made], tmp_path: Path) -> None:
    again = MAKERS[name](tmp_path / name)
    assert again.truth == dataset(name).truth

    def digest(made: Made) -> str:
        return hashlib.sha256(Path(made.file).read_bytes()).hexdigest()

    assert digest(again) == digest(dataset(name))


def test_kinds(dataset: Callable[[str], Made]) -> None:
    """Each maker reaches the corner of the format that it is there for."""

    def stat(name: str) -> dict[str, int]:
        made = dataset(name)
        with lmdb.open(made.path, readonly=True, lock=False, max_dbs=8) as env, env.begin() as txn:
            return txn.stat(env.open_db(made.db, txn, create=False)) if made.db else env.stat()

    assert stat("caffe_datum")["overflow_pages"] == len(dataset("caffe_datum").truth)
    assert stat("small_records")["overflow_pages"] == 0
    assert stat("variable_sizes")["overflow_pages"] > 0
    sizes = {len(value) for _, value in dataset("one_giant").truth}
    assert max(sizes) == 100 * min(sizes)
    # The version follows the magic number, which follows the page header: 16 bytes in format 1, 24 in format 3.
    assert Path(dataset("caffe_datum").file).read_bytes()[16:24].hex() == "dec0efbe01000000"
    assert Path(dataset("format_3").file).read_bytes()[24:32].hex() == "dec0efbe03000000"


def test_datum_by_hand() -> None:
    """The encoder against bytes written down from the protocol buffers' specification."""
    image = np.arange(8, dtype=np.uint8).reshape(2, 2, 2)
    assert datum(image, 300) == bytes.fromhex("0802 1002 1802 2208 0001020304050607 28ac02".replace(" ", ""))
    assert datum(image, -1).endswith(b"\x28" + b"\xff" * 9 + b"\x01")
