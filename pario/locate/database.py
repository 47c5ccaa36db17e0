"""Identifies a database: the file, its state, and the name."""

from __future__ import annotations

from dataclasses import dataclass

from pario.format.layout import Db
from pario.format.meta import Snapshot

__all__ = ["Database"]


@dataclass(frozen=True, slots=True)
class Database:
    """Which database an index is of.

    path : the data file; snapshot : the state of it that is read
    name : of a named database; None is the main one

    Found when it is opened:
    record : the entry of the database's tree in the file; None where a side-car made it unnecessary to look for it
    fingerprint : hex, of the file and its state (size, mtime, inode, transaction, ...): what a side-car must repeat
    """

    path: str
    snapshot: Snapshot
    name: bytes | None = None
    record: Db | None = None
    fingerprint: str = ""
