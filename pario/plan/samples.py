"""Samples of several records, as numbers: the ordinals 0..n-1 of an order -> record ids, one for each field.

An order, a schedule and a saved position count samples. Before anything is read each sample becomes its records, which
follow each other: item i of a plan becomes the items i * width .. i * width + width - 1.

    samples        0               1               2
    fields     image label     image label     image label
    ids            0    12         1    13         2     -       "-": the sample has no such record
    read           0    12         1    13         2     2       something must stand in its row
"""

from __future__ import annotations

import hashlib

import numpy as np

from pario.errors import OptionError
from pario.plan.selection import Figures, Selection, id_type


class Samples(Selection):
    """n samples of `width` records each, in the order of the ids of their first records, which differ.

    total : records of the database
    columns : width times u[n] of `sample_type`, the record ids of a field; `absent` for a missing one, which no first
        record is
    numbers : i64[n], what the samples are called; None: by their ordinals
    by_place : u[n], ordinals in file order; None: file order is the order of the ids
    figures : mean bytes of a sample, and bytes of the largest record
    """

    def __init__(
        self,
        total: int,
        digest: str,
        columns: list[np.ndarray],
        *,
        numbers: np.ndarray | None = None,
        by_place: np.ndarray | None = None,
        figures: Figures,
    ) -> None:
        super().__init__(total, digest, table=columns[0], by_place=by_place, figures=figures)
        self._columns = columns
        self._numbers = numbers
        self._absent = absent(columns[0].dtype)
        self.width = len(columns)
        #: fields of which records are missing
        self._holes = [j for j in range(1, self.width) if bool((columns[j] == self._absent).any())]

    @property
    def has_gaps(self) -> bool:
        return False

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (*self._columns, self._numbers, self._by_place) if array is not None)

    def ids(self, ordinals: np.ndarray) -> np.ndarray:
        """i64[k * width]: the records of the samples at these ordinals, sample by sample; the first record of a sample
        stands where one is missing."""
        found = np.empty((len(ordinals), self.width), np.int64)
        for j, column in enumerate(self._columns):
            found[:, j] = column[ordinals]
        for j in self._holes:
            found[:, j] = np.where(found[:, j] == self._absent, found[:, 0], found[:, j])
        return found.reshape(-1)

    def ids_of(self, numbers: np.ndarray, space: str) -> np.ndarray:
        if space == "id" or self._by_place is None:
            return self.ids(numbers)
        return self.ids(self._by_place[numbers])

    def numbers_of(self, first: np.ndarray) -> np.ndarray:
        """i64[k]: what the samples with these first records (i64[k]) are called."""
        ordinals = self._ordinals(first)
        return ordinals if self._numbers is None else self._numbers[ordinals]

    def missing(self, first: np.ndarray) -> list[tuple[int, int]]:
        """(index into `first`, field) of the records that the samples with these first records lack."""
        if not self._holes:
            return []
        ordinals = self._ordinals(first)
        gone = {j: np.flatnonzero(self._columns[j][ordinals] == self._absent) for j in self._holes}
        return [(i, j) for j, rows in gone.items() for i in rows.tolist()]

    def records(self, ids: np.ndarray) -> np.ndarray:
        """i64[k]: the first records of the samples that are called so. Raises OptionError for another number."""
        wanted = np.asarray(ids, np.int64)
        if self._numbers is None:
            ordinals = np.clip(wanted, 0, self.n - 1)
            known = ordinals == wanted
        else:
            order = np.argsort(self._numbers, kind="stable")
            ordinals = order[np.minimum(np.searchsorted(self._numbers, wanted, sorter=order), self.n - 1)]
            known = self._numbers[ordinals] == wanted
        if not known.all():
            raise OptionError(f"there is no sample {int(wanted[~known][0])} among those that are selected")
        return self._columns[0][ordinals].astype(np.int64)

    def close(self) -> None:
        super().close()
        self._columns = [column[:0].copy() for column in self._columns]
        self._numbers = None

    def _ordinals(self, first: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._columns[0], np.asarray(first).astype(self._columns[0].dtype))


def widened(rows: np.ndarray, width: int) -> np.ndarray:
    """Row r of a table of samples -> rows r * width ... of the table of their records; same dtype."""
    return (rows[:, None] * width + np.arange(width, dtype=rows.dtype)).reshape(-1)


def sample_type(total: int) -> np.dtype:
    """Of a table of records: holds all record ids of `total` records, and `absent`."""
    return id_type(total + 1)


def absent(dtype: np.dtype) -> int:
    """What stands in a table for a missing record."""
    return int(np.iinfo(dtype).max)


def digest_of_samples(columns: list[np.ndarray], numbers: np.ndarray | None, total: int) -> str:
    """Hex; the same samples of as many records give the same one, whatever named them."""
    shape = len(columns), len(columns[0])
    digest = hashlib.blake2b(f"pario samples 1 {total} {shape}".encode(), digest_size=16)
    for ids in columns:
        digest.update(np.ascontiguousarray(ids, f"<u{ids.dtype.itemsize}").view(np.uint8))
    if numbers is not None:
        digest.update(np.ascontiguousarray(numbers, "<i8").view(np.uint8))
    return digest.hexdigest()
