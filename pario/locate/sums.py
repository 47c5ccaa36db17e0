"""The checksums of all records: a side-car of their own, beside the data or in the user's cache directory (its format:
stored.py).

What it says
    sums ("xxh3_64"), state (which state of which database), made_of (size, mtime and inode of the data file when they
    were made), and for people: data_file, database, txnid
Its array
    values       u64[n]: the XXH3 of each record's value, by record id

It is believed only if everything fits: its owner and mode (`sidecar.Trustees`), its own checksums, and the state.
Unlike that of an index, the state knows no inode and no time: what was copied to another disk is to be compared with
its checksums, too. A database that was made anew with records of the same sizes is found by them; `Sums.hint` then says
that the file is another one.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np

from pario.comm.base import AnyWorld, together
from pario.errors import ChecksumError, FileError, MissingError, OptionError
from pario.fetch.pool import ReadPool
from pario.kernels.sums import check_sums, sum_values
from pario.locate.base import Index, key_of
from pario.locate.database import Database, state_digest
from pario.locate.sidecar import Trustees, open_trusted, save_first, sidecar_places, those_that_fit
from pario.locate.stored import read_stored
from pario.records import Records

#: How the reason begins why a record is not delivered.
MISMATCH = "the value is not the one whose checksum was saved"

_ENDING = ".sums"
_KIND = "xxh3_64"

_NONE = np.empty(0, np.uint64)


class Sums:
    """The checksums of one database, and what was compared with them. Any thread.

    index : of the database; rank : of this process, for errors
    values : u64[n], by record id, shared by the ranks of a node
    sidecar : where they were saved
    moved : the data file was written or copied since they were made, for all that its status says
    """

    def __init__(self, index: Index, rank: int, values: np.ndarray, sidecar: str, *, moved: bool) -> None:
        self._index = index
        self._rank = rank
        self.values = values
        self.sidecar = sidecar
        self.moved = moved

    @property
    def hint(self) -> str:
        """How to go on after a mismatch."""
        again = f"make its checksums anew: python -m pario data checksum {self._index.database.path}"
        if self.moved:
            return f"The file was written or copied since {self.sidecar} was made. If it was made anew, {again}"
        return f"Restore the file from a copy. If it was changed on purpose, {again}"

    def failures(self, records: Records) -> list[tuple[int, str]]:
        """(row, reason) of the values that are not what they were. Without the GIL."""
        n = len(records)
        bad, found = np.empty(n, np.int64), np.empty(n, np.uint64)
        starts, nbytes, ids = (np.ascontiguousarray(a) for a in (records.starts, records.nbytes, records.ids))
        wrong = check_sums(records.data, starts, nbytes, ids, self.values, found, bad)
        rows = zip(bad[:wrong].tolist(), found[:wrong].tolist(), strict=True)
        return [(row, self.said(int(ids[row]), mine)) for row, mine in rows]

    def said(self, record: int, found: int) -> str:
        """The reason of a mismatch."""
        expected = int(self.values[record]) if record < len(self.values) else 0
        return f"{MISMATCH}: expected {expected:#018x}, found {found:#018x}"

    def check(self, records: Records) -> None:
        """Raises ChecksumError for the first value that is not what it was."""
        for row, why in self.failures(records):
            raise self.error(int(records.ids[row]), why)

    def error(self, record: int, why: str, hint: str | None = None) -> ChecksumError:
        """The error of one record. hint : comes before what the checksums advise"""
        wanted = np.array([record])
        offset, size = int(self._index.extents_of(wanted)[0][0]), self._index.page_size
        return ChecksumError(
            why,
            path=self._index.database.path,
            rank=self._rank,
            page=(offset - 1) // size,
            offset=offset,
            record=record,
            key=key_of(self._index, record),
            hint=self.hint if hint is None else f"{hint} {self.hint}",
        )

    def close(self) -> None:
        self.values = _NONE  # so that the memory that holds them goes back


def sums_of(records: Records) -> np.ndarray:
    """u64[n], the checksums of these values."""
    out = np.empty(len(records), np.uint64)
    outside = sum_values(records.data, records.starts, records.nbytes, out)
    assert outside < 0  # records lie inside their data
    return out


class Found(NamedTuple):
    """Saved checksums that fit. values : u64[n]; sidecar, moved : as of `Sums`"""

    values: np.ndarray
    sidecar: str
    moved: bool


def find_sums(database: Database, status: os.stat_result, n: int) -> tuple[Found | None, list[str]]:
    """(the saved checksums that fit, or None; those that are there and do not, with why). Not collective.

    Those that were made of this very file come before those of the file that it may be a copy of.
    status : of the open data file; n : records of the database
    """
    unfit: list[str] = []
    of_another: Found | None = None
    state = state_digest(database.snapshot, database.name)
    places = sidecar_places(database.path, database.name, _ENDING)
    for found in those_that_fit(places, lambda sidecar: _load(sidecar, status, state, n), unfit):
        if not found.moved:
            return found, unfit
        of_another = of_another or found
    return of_another, unfit


def open_sums(index: Index, pool: ReadPool | None, world: AnyWorld) -> Sums:
    """The saved checksums, in memory that the ranks of a node share. Collective: raises MissingError on all ranks.

    pool : of the open file, on rank 0
    """
    if len(index.files.paths) > 1:
        raise world.raised_by_all(
            OptionError(
                f"verify=True reads one LMDB, and {len(index.files.paths)} files were given",
                path=index.database.path,
                rank=world.rank,
            )
        )
    found: Found | None = None
    unfit: list[str] = []
    database = index.database
    with together(world, "reading the checksums"):
        if world.rank == 0:
            assert pool is not None  # rank 0 has one
            (file,) = pool.fetcher.files
            found, unfit = find_sums(database, file.status(), index.n)
    about, unfit = world.bcast((found[1:] if found is not None else None, unfit))
    if about is None:
        what = f"no checksums fit this file: {'; '.join(unfit)}" if unfit else "this file has no checksums"
        option = "" if database.name is None else f" --db {database.name.decode(errors='backslashreplace')}"
        hint = f"verify=True compares with them. Make them: python -m pario data checksum {database.path}{option}"
        raise world.raised_by_all(MissingError(what, path=database.path, rank=world.rank, hint=hint))
    values = world.share_array(found.values if found is not None else None)
    return Sums(index, world.rank, values, about[0], moved=about[1])


def save_sums(database: Database, status: os.stat_result, sums: np.ndarray) -> str:
    """Save them at the first place that takes them, and return it.

    status : of the open data file; sums : u64[n]
    Raises FileError.
    """
    says = {
        "sums": _KIND,
        "state": state_digest(database.snapshot, database.name),
        "made_of": _file_of(status),
        "data_file": os.path.basename(database.path),
        "database": None if database.name is None else database.name.hex(),
        "txnid": database.snapshot.txnid,
    }
    try:
        return save_first(sidecar_places(database.path, database.name, _ENDING), says, {"values": sums})[0]
    except FileError as e:
        raise FileError(f"the checksums cannot be saved ({e.what})", path=database.path) from None


def _file_of(status: os.stat_result) -> list[int]:
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def _load(sidecar: str, status: os.stat_result, state: str, n: int) -> Found:
    """Raises OSError, SnapshotError, and ValueError that says why these must not be believed."""
    with open_trusted(sidecar, Trustees.of(status)) as file:
        said, arrays = read_stored(file)
        if said.get("state") != state or "values" not in arrays or arrays["values"].n != n:
            raise ValueError("it is of another state of the data file")
        if said.get("sums") != _KIND or arrays["values"].dtype != np.uint64:
            kind = f"{said.get('sums')!r} ({arrays['values'].dtype})"
            raise ValueError(f"its checksums are of the kind {kind}, not {_KIND!r} ({_NONE.dtype})")
        values = arrays["values"][:]
    return Found(values, sidecar, moved=said.get("made_of") != _file_of(status))
