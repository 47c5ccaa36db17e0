"""Identifies a database: the file, its state, and the name."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from pario.format.layout import Db
from pario.format.meta import Snapshot


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


def state_digest(snapshot: Snapshot, db: bytes | None, **more: Any) -> str:
    """Hex: which state of which database, what a commit changes and a copy keeps; and what `more` says of the file."""
    what = {
        "format": [snapshot.version, snapshot.word, snapshot.byteorder],
        "page_size": snapshot.page_size,
        "sum_size": snapshot.sum_size,
        "txnid": snapshot.txnid,
        "main": list(snapshot.main),
        "last_pgno": snapshot.last_pgno,
        "db": None if db is None else db.hex(),
        **more,
    }
    return hashlib.blake2b(json.dumps(what, sort_keys=True).encode(), digest_size=16).hexdigest()
