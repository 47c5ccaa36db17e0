"""End to end over every kind of LMDB: the Loader delivers what py-lmdb's cursor reads, each record once, each byte."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from datasets import Made

import pario
from pario.errors import EmptyError


@pytest.mark.parametrize("shuffle", [False, "global", "block"])
def test_every_record_once(any_dataset: Made, shuffle: bool | str) -> None:
    found: dict[int, tuple[bytes, bytes]] = {}
    order: list[int] = []
    with pario.Loader(any_dataset.path, 37, shuffle=shuffle, seed=3, db=any_dataset.db, save_index=False) as loader:
        for batch in loader:
            data, offsets = batch["data"].tobytes(), batch["offsets"].tolist()
            ids = batch.ids.tolist()
            order += ids
            for row, (record, key) in enumerate(zip(ids, loader.keys(batch.ids), strict=True)):
                found[record] = (key, data[offsets[row] : offsets[row + 1]])
    assert len(order) == len(any_dataset.truth) == len(found)
    assert [found[record] for record in sorted(found)] == any_dataset.truth
    assert (order == sorted(order)) == (shuffle is False)


def test_an_empty_database_is_an_error(dataset: Callable[[str], Made]) -> None:
    with pytest.raises(EmptyError):
        pario.Loader(dataset("empty").path, 4, save_index=False)
