"""The sampler that announces: what it gives, and when it has said so."""

from __future__ import annotations

import pickle
from itertools import chain
from typing import Any

import pytest

from pario.adapters.sampling import prefetching
from pario.errors import OptionError


class Env:
    def __init__(self) -> None:
        self.told: list[bytes] = []

    def will_read(self, keys: list[bytes], db: object = None) -> None:
        assert db == "db"
        self.told += keys


class Shuffled:
    batch_size = 4

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Any:
        return iter([7 * i % 101 + self.epoch for i in range(101)])

    def __len__(self) -> int:
        return 101

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def key(i: int) -> bytes:
    return b"%04d" % i


@pytest.mark.parametrize("records", [1, 2, 10, 1000])
def test_indices_come_as_ever_and_are_announced_before(records: int) -> None:
    env = Env()
    sampler = prefetching(Shuffled(), env, key, records=records, db="db")
    for epoch in range(2):
        sampler.set_epoch(epoch)
        env.told.clear()
        seen: list[int] = []
        for i in sampler:
            seen.append(i)
            assert len(seen) <= len(env.told) <= len(seen) + records
            assert min(101, len(seen) - 1 + records // 2) <= len(env.told), "half of them are always told ahead"
        assert seen == list(Shuffled()) if not epoch else [i + 1 for i in Shuffled()]
        assert env.told == [key(i) for i in seen]


def test_batches_of_indices() -> None:
    env, batches = Env(), [[1, 2, 3], [4, 5], [6]]
    assert list(prefetching(batches, env, key, records=4, db="db")) == batches
    assert env.told == [key(i) for i in chain(*batches)]


def test_whatever_else_the_sampler_has() -> None:
    sampler = prefetching(Shuffled(), Env(), key, db="db")
    assert (len(sampler), sampler.batch_size) == (101, 4)
    with pytest.raises(AttributeError):
        _ = sampler.nothing
    again = pickle.loads(pickle.dumps(prefetching([1, 2], Env(), key, db="db")))
    assert list(again) == [1, 2]


@pytest.mark.parametrize(("env", "records", "words"), [(object(), 5, "pario.lmdb.Environment"), (Env(), 0, "records")])
def test_what_cannot_be_meant(env: Any, records: int, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        prefetching([1], env, key, records=records)
