"""Copies of an environment, page by page."""

from __future__ import annotations

from pario.errors import ParioError
from pario.fetch.snapshot import check_snapshot
from pario.format.layout import NUM_METAS
from pario.lmdb import errors
from pario.lmdb.store import Store

_PIECE_BYTES = 4 << 20


def copy_to(fd: int, store: Store) -> None:
    """Write a copy of the snapshot to an open file. Raises BadTxnError if a writer overtakes the copy."""
    snapshot, size = store.snapshot, store.snapshot.page_size
    at, end = NUM_METAS * size, (snapshot.last_pgno + 1) * size
    try:
        first = bytearray(store.file.pread(0, at))
        # Page 1 may have been written again since the snapshot was taken.
        first[store.metas_at : store.metas_at + len(store.metas)] = store.metas
        with open(fd, "wb", closefd=False) as out:
            out.write(first)
            while at < end:
                piece = store.file.pread(at, min(_PIECE_BYTES, end - at))
                if not piece:
                    break  # pages that were allocated and freed again may never have been written
                check_snapshot(store.file, snapshot)
                out.write(piece)
                at += len(piece)
    except ParioError as e:
        raise errors.translated(e.at(path=store.file.path), "copy") from e  # type: ignore[arg-type]
    except OSError as e:
        cls = errors.DiskError if e.errno == errors.DiskError.code else errors.Error
        raise cls(f"copy: {e.strerror}", e.errno or 0) from e
