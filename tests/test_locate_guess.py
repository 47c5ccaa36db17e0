"""Records before there is an index: guesses, and what they cost. The oracle is py-lmdb's cursor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import truth_of
from grown_sets import SETS, SLOTS, noise, page_bytes, sidecars, write

import pario
from pario.errors import CorruptedError
from pario.fetch.posix import PosixFetcher

pytestmark = pytest.mark.usefixtures("through_the_ring")


class Counting(PosixFetcher):
    """Counts what reaches the file."""

    bytes_read = 0

    def read(self, reads: np.ndarray, out: np.ndarray, starts: np.ndarray) -> None:
        Counting.bytes_read += int(reads["nbytes"].sum())
        super().read(reads, out, starts)

    def pread(self, offset: int, nbytes: int) -> bytes:
        data = super().pread(offset, nbytes)
        Counting.bytes_read += len(data)
        return data


@pytest.mark.parametrize("recipe", ["auto", "dm", "lmm"])
@pytest.mark.parametrize("name", list(SETS))
def test_an_epoch_reads_little_more_than_the_data(
    grown_set: Callable[[str], str], name: str, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = grown_set(name)
    if recipe != "lmm":  # which reads by a fetcher of its own
        monkeypatch.setattr("pario.dataset.reader.FETCHERS", {"posix": Counting})
    Counting.bytes_read = 0
    expected = [value for _, value in truth_of(path)]
    with pario.Loader(path, 256, recipe=recipe, options=SLOTS) as loader:
        assert not loader.index.sizes_known
        at = 0
        early: dict[str, Any] = {}
        for batch in loader:
            assert batch.ids.tolist() == list(range(at, at + len(batch.ids)))
            offsets = batch["offsets"]
            for k, i in enumerate(batch.ids.tolist()):
                assert batch["data"][offsets[k] : offsets[k + 1]].tobytes() == expected[i], f"record {i}"
            at += len(batch.ids)
            if batch.step == 1:
                early = loader.stats()
        assert at == len(expected)
        stats = loader.stats()
        snapshots = stats["reads"] * 2 * 4096  # at most one look at the meta pages per read
        if recipe != "lmm":
            assert stats["bytes_read"] <= Counting.bytes_read <= stats["bytes_read"] + snapshots + (1 << 20)
        assert stats["bytes_read"] <= 1.05 * page_bytes(path)
        if recipe == "lmm":
            assert stats["guessed"] == 0
        elif name in ("one commit", "commits", "two pages"):
            assert stats["guessed"] > 0.6 * page_bytes(path) / 4096
            # A commit moves a leaf and leaves pages free: a value or two may stand elsewhere.
            assert stats["missed"] - early["missed"] <= (0 if name == "one commit" else 8)
        assert stats["extra"] <= 0.04 * page_bytes(path) / 4096


def test_the_first_batch_comes_before_the_index(grown_set: Callable[[str], str]) -> None:
    path = grown_set("one commit")
    Counting.bytes_read = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pario.dataset.reader.FETCHERS", {"posix": Counting})
        options = pario.Options(slot_bytes=128 << 10, slots=2)
        with pario.Loader(path, 16, options=options) as loader:
            opened = Counting.bytes_read
            batches = iter(loader)
            next(batches)
            growth = loader.index.growth
            assert growth.frontier()[0] < len(growth.leaves) // 2
            # Meta and branch pages, the first leaf and the last one, the first record and the last one.
            assert opened <= 64 << 10
            # Two slots, a third of a leaf's records each.
            assert Counting.bytes_read <= opened + (1 << 20)
            assert not sidecars(path)


def test_the_second_epoch_guesses_nothing(grown_set: Callable[[str], str]) -> None:
    path = grown_set("commits")
    with pario.Loader(path, 100, options=SLOTS, save_index=False) as loader:
        for _ in loader:
            pass
        first = loader.stats()
        for _ in loader:
            pass
        second = loader.stats()
        assert second["guessed"] == first["guessed"] > 0
        assert second["bytes_read"] - first["bytes_read"] <= 1.01 * page_bytes(path)


def test_records_that_do_not_fit_into_the_ring(tmp_path: Path) -> None:
    """Their rank reads them itself: counted, and checked like all others."""
    values = noise(7, [3000] * 2000 + [300_000] * 60 + [3000] * 1000)
    path = write(tmp_path / "giants", values)
    with pario.Loader(path, 32, save_index=False) as loader:
        for batch in loader:
            data, offsets = batch["data"], batch["offsets"]
            for k, i in enumerate(batch.ids.tolist()):
                assert data[offsets[k] : offsets[k + 1]].tobytes() == values[i]
        stats = loader.stats()
        assert stats["spilled"] > 0
        assert stats["bytes_read"] >= sum(map(len, values))
        offset = int(loader.index.extents["offset"][2040])
    with open(f"{path}/data.mdb", "r+b") as file:
        file.seek(offset - 16)
        file.write(b"\xff" * 16)
    with pytest.raises(CorruptedError, match="record 2040"), pario.Loader(path, 32, save_index=False) as loader:
        list(loader)
