"""The data that rooms pass to each other: extents down, records and batches up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

__all__ = ["EXTENT", "Batch", "Records"]

#: Where a record's value lies in the data file. `offset` and `nbytes` are bytes.
EXTENT = np.dtype([("offset", "<i8"), ("nbytes", "<i8")])


@dataclass(frozen=True, slots=True)
class Records:
    """The bytes of several records, as views: record i is `data[starts[i] : starts[i] + nbytes[i]]`.

    ids : i64[n], record ids (key order)
    data : u8[...], memory that holds the values, not packed and not in order
    starts, nbytes : i64[n], bytes

    Records from a ring are valid until the step is released; copy what you keep.
    """

    ids: np.ndarray
    data: np.ndarray
    starts: np.ndarray
    nbytes: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> np.ndarray:
        """u8[nbytes[i]], a view."""
        start = int(self.starts[i])
        return self.data[start : start + int(self.nbytes[i])]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[i] for i in range(len(self)))


class Batch(Mapping[str, np.ndarray]):
    """Named arrays of one step on one rank, first axis = records.

    `batch["data"]` and the like are the decoder's arrays. `batch.ids` i64[b] are the record ids, `batch.epoch` and
    `batch.step` the batch's position. `batch.skipped` counts the records that the decoder could not read (policy
    "skip"). An array stays valid as long as you refer to it.
    """

    __slots__ = ("_arrays", "epoch", "ids", "skipped", "step")

    def __init__(self, arrays: dict[str, np.ndarray], ids: np.ndarray, epoch: int, step: int, skipped: int = 0) -> None:
        self._arrays = arrays
        self.ids = ids
        self.epoch = epoch
        self.step = step
        self.skipped = skipped

    def __getitem__(self, name: str) -> np.ndarray:
        try:
            return self._arrays[name]
        except KeyError:
            raise KeyError(f"no array {name!r} in this batch; it has {', '.join(map(repr, self._arrays))}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        """Number of named arrays; the number of records is `len(batch.ids)`."""
        return len(self._arrays)

    def __repr__(self) -> str:
        arrays = ", ".join(f"{name}: {a.dtype}{list(a.shape)}" for name, a in self._arrays.items())
        return f"Batch(epoch={self.epoch}, step={self.step}, records={len(self.ids)}, {arrays})"
