"""Keys by the pages of a B+-tree: what a forged one makes of a search."""

from __future__ import annotations

import os
from pathlib import Path

from packed_sets import pack_copy

from pario.codec.registry import make
from pario.fetch.posix import PosixFetcher
from pario.fetch.snapshot import read_snapshot
from pario.files.database import Database
from pario.files.keys import Keys


def _keys(path: Path) -> Keys:
    fetcher = PosixFetcher(os.fspath(path))
    snapshot = read_snapshot(fetcher)
    return Database(fetcher, snapshot, snapshot.main).keys


def test_a_branch_page_that_promises_too_much(tmp_path: Path) -> None:
    """Of blocks, it says that the second page begins behind that page's last record: a search for what lies between
    ends on it, where there is nothing."""
    items = [(b"m%02d" % i, bytes([i]) * 900) for i in range(12)]
    path = pack_copy(tmp_path / "p", items, [make("raw")], counts=[2]) / "data.mdb"
    keys = _keys(path)
    branch = keys.first()[0][0]
    last = keys.at(branch.below[1]).keys[-1]
    forged = b"m%02d" % (int(last[1:]) + 1)
    assert keys.find(forged) is not None
    assert branch.keys[1] <= last < forged < branch.keys[2], "the branch stays in order"
    file = bytearray(path.read_bytes())
    at = file.index(branch.keys[1], branch.offset)
    assert at < branch.offset + 4096
    file[at : at + 3] = forged
    path.write_bytes(file)
    assert _keys(path).find(last + b"+") is None
    assert _keys(path).find(items[0][0]) is not None
