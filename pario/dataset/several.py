"""Several LMDBs opened as one dataset: one index, one space of addresses, the checks of each file."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import closing

from pario.comm.base import AnyWorld
from pario.dataset.file import DataFile
from pario.errors import OptionError, ParioError
from pario.fetch.base import Fetcher
from pario.fetch.checked import Checked
from pario.fetch.joined import JoinedChecked, bases_of
from pario.fetch.pool import STOP_S, ReadPool
from pario.format.layout import MDB_DUPSORT, Db
from pario.format.meta import Snapshot
from pario.format.tree import Tree, named_database
from pario.locate.base import Index
from pario.locate.database import Database
from pario.locate.open import open_joined
from pario.locate.walk import PageReader
from pario.options import Recipe

_log = logging.getLogger("pario")


def open_several(
    file: DataFile,
    world: AnyWorld,
    snapshots: Sequence[Snapshot],
    db: bytes | None,
    recipe: Recipe,
    *,
    save: bool,
    progress: Callable[[int, int], None] | None,
) -> tuple[Index, Checked]:
    """The index of all files, and the checks of their records. Collective; raises on all ranks.

    file : has been shared; snapshots : of its files, the same on all ranks
    save, progress : see `open_joined`
    """
    wrong: ParioError | None = None
    if recipe.source == "per_rank":
        wrong = OptionError("this recipe reads one LMDB with py-lmdb", path=file.path, hint="Use another one.")
    world.agree(wrong, "opening several files")
    if world.rank == 0:
        _tell(file)
    bases = bases_of([snapshot.file_bytes for snapshot in snapshots])
    # LMDBIO's readers get the extents from one process.
    alone = recipe.locate == "walk" and world.rank != 0
    is_open = file.opened is not None and not alone
    with closing(_pools(file) if is_open else _none(len(snapshots))) as pools:
        index = open_joined(
            [Database(path, snapshot, db) for path, snapshot in zip(file.paths, snapshots, strict=True)],
            pools,
            bases,
            world,
            save=save,
            progress=progress,
        )
    checks = [checks_of(file, index, number, one.bytes_read > 0) for number, one in enumerate(index.files.stretches)]
    return index, JoinedChecked(checks, bases)


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


def checks_of(file: DataFile, index: Index, number: int, trusted: bool) -> Checked:
    """The checks of the records in one of the files.

    trusted : whether this job took the places of its records from the file itself
    """
    database = index.files.stretches[number].database
    record = database.record
    dups = record is not None and bool(record.md_flags & MDB_DUPSORT)
    several = len(index.files) > 1
    nodes = not trusted and database.snapshot.has_pages

    def fetcher() -> Fetcher:
        pool = file.pool  # opens the files
        return file.fetchers[number] if several else pool.fetcher

    return Checked(fetcher, database.path, database.snapshot, nodes=nodes, dups=dups)


def trees_of(file: DataFile, index: Index) -> list[Db]:
    """The entry of the database's tree in each file, with its page counts. Reads a few pages if the database is a
    named one; not collective."""
    return [_tree(file, number, stretch.database) for number, stretch in enumerate(index.files.stretches)]


def _tree(file: DataFile, number: int, database: Database) -> Db:
    if database.record is not None:
        return database.record
    assert database.name is not None  # the record of the main database is in the snapshot
    snapshot, pool = database.snapshot, file.pool
    if len(file.paths) > 1:
        pool = ReadPool(file.fetchers[number], file.knob)
    pages = PageReader(lambda: pool, snapshot)
    return named_database(Tree(pages.one, snapshot, snapshot.main), database.name)
