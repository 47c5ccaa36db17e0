"""An LMDB in which bits of values were flipped behind the back of its checksums, and what a Loader must make of it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import lmdb
import numpy as np
from datasets import datum, truth_of

import pario
from pario.commands.screen import screen
from pario.commands.sidecars import checksum

#: pixels of a Datum that is read straight into the batch, and of one that is decoded
STRAIGHT, DECODED = (3, 80, 96), (3, 9, 11)


@dataclass(frozen=True)
class Flipped:
    """path : of the folder; values : before the flips, by record id; bad : ids of the records with a flipped bit"""

    path: str
    values: list[bytes]
    bad: set[int]

    @property
    def file(self) -> str:
        return os.path.join(self.path, "data.mdb")


def written(folder: str, kind: str, n: int) -> list[bytes]:
    """An LMDB of n records, in several commits and in random order; their values by record id."""
    random = np.random.default_rng(3)
    shape = {"straight": STRAIGHT, "decoded": DECODED}.get(kind)
    with lmdb.open(folder, map_size=1 << 30, sync=False) as env:
        for part in np.array_split(random.permutation(n), 4):
            with env.begin(write=True) as txn:
                for i in part.tolist():
                    size = int(random.choice([1 + i % 19, random.integers(1, 700), random.integers(2000, 6000)]))
                    pixels = random.integers(0, 256, size if shape is None else shape, np.uint8)
                    txn.put(b"%06d" % i, pixels.tobytes() if shape is None else datum(pixels, i * 37))
    return [value for _, value in truth_of(folder)]


def checksums(folder: str, db: str | None = None) -> None:
    """What `python -m pario data checksum` does, without a word. Collective."""
    before, screen.rank = screen.rank, 1
    assert checksum.callback(folder, db) == 0
    screen.rank = before


def flip(folder: str, values: list[bytes], bad: list[int]) -> Flipped:
    """Flip one bit in the value of each of these records, as a disk would: the file's times stay what they were."""
    file = os.path.join(folder, "data.mdb")
    before = os.stat(file)
    random = np.random.default_rng(4)
    with pario.Reader(folder, comm="self", save_index=False) as reader:
        offsets, nbytes = reader.index.extents_of(np.arange(len(values)))
    content = np.memmap(file, np.uint8, "r+")
    for i in bad:
        assert content[offsets[i] :][: nbytes[i]].tobytes() == values[i]
        content[offsets[i] + random.integers(nbytes[i])] ^= np.uint8(1 << random.integers(8))
    content.flush()
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    return Flipped(folder, values, set(bad))


def all_found(flipped: Flipped, *, epochs: int = 1, decoder: Any = None, **how: Any) -> dict[str, Any]:
    """Each record that was flipped is left out and counted, all others come once, as they were. Collective; returns the
    loader's counters."""
    found, delivered = 0, []
    with pario.Loader(flipped.path, 7, decoder, on_error="skip", verify=True, **how) as loader:
        for _ in range(epochs):
            for batch in loader:
                found += batch.skipped
                delivered += batch.ids.tolist()
                for row, i in enumerate(batch.ids.tolist()):
                    assert value_of(batch, row, flipped.values[i]) is True
        everyones = [i for theirs in loader.world.allgather(delivered) for i in theirs]
        counted = loader.world.allreduce_sum(sum(loader.stats()["bad"].values()))
        total = loader.world.allreduce_sum(found)
        stats = loader.stats()
    good = sorted(set(range(len(flipped.values))) - flipped.bad)
    assert sorted(everyones) == sorted(good * epochs)
    assert total == counted == epochs * len(flipped.bad)
    return stats


def value_of(batch: pario.Batch, row: int, value: bytes) -> bool:
    """Is this row what was written?"""
    if "offsets" in batch:
        a, b = batch["offsets"][row : row + 2]
        return batch["data"][a:b].tobytes() == value
    data = batch["data"][row]
    return data == value if isinstance(data, bytes) else data.tobytes() in value
