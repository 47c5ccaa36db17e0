"""Several LMDBs opened as one dataset: one index, one space of addresses, the checks of each file."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import closing

from pario.comm.base import AnyWorld
from pario.dataset.file import DataFile
from pario.fetch.base import Fetcher
from pario.fetch.checked import Checked
from pario.fetch.joined import JoinedChecked, bases_of
from pario.fetch.pool import STOP_S, ReadPool
from pario.format.layout import MDB_DUPSORT
from pario.locate.base import Index, Stretch
from pario.locate.database import Database
from pario.locate.hidden import counts_of
from pario.locate.open import open_joined

_log = logging.getLogger("pario")


def open_several(
    databases: Sequence[Database],
    file: DataFile,
    world: AnyWorld,
    *,
    reads: bool,
    save: bool,
    progress: Callable[[int, int], None] | None,
) -> Index:
    """The index of all files. Collective; raises on all ranks.

    databases : one in each file of `file`, which has been shared
    reads : this rank has the files open, and reads its share of their pages
    save, progress : see `open_joined`
    """
    if world.rank == 0:
        _tell(file)
    bases = bases_of([database.snapshot.file_bytes for database in databases])
    with closing(_pools(file) if reads else _none(len(databases))) as pools:
        return open_joined(databases, pools, bases, world, save=save, progress=progress)


def _tell(file: DataFile) -> None:
    """Say what a folder stands for, in which there may be other sets than the user has in mind."""
    for given, count in zip(file.given, file.counts, strict=True):
        if count > 1 and os.path.isdir(given):
            _log.warning("%s: the %d LMDBs in this folder are one dataset: %s", given, count, file.path)


def _pools(file: DataFile) -> Generator[ReadPool]:
    """One file after the other, with threads that end before the next one."""
    for fetcher in file.fetchers:
        pool = ReadPool(fetcher, file.knob)
        try:
            yield pool
        finally:
            pool.close(STOP_S)


def _none(count: int) -> Generator[None]:
    yield from [None] * count


def checks_of(file: DataFile, index: Index) -> Checked:
    """The checks of all records: whether this job took their places from the files themselves, each file's index says.
    """
    stretches = index.files.stretches
    checks = [_checks(file, number, stretch) for number, stretch in enumerate(stretches)]
    bases = bases_of([stretch.database.snapshot.file_bytes for stretch in stretches])
    return checks[0] if len(checks) == 1 else JoinedChecked(checks, bases)


def _checks(file: DataFile, number: int, stretch: Stretch) -> Checked:
    """Of the records in one of the files."""
    database = stretch.database
    nodes = not stretch.bytes_read and database.snapshot.has_pages
    # Several records of one key, or in one block: their ids do not say which node of a page holds them.
    dups = bool(stretch.record.md_flags & MDB_DUPSORT) or counts_of(stretch.entry, database.path) is not None

    def fetcher() -> Fetcher:
        pool = file.pool  # opens the files
        return file.fetchers[number] if len(file.paths) > 1 else pool.fetcher

    return Checked(fetcher, database.path, database.snapshot, nodes=nodes, dups=dups)
