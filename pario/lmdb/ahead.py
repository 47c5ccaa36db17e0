"""Records that somebody is about to read: a thread looks up where they lie, and lets this node bring them.

    will_read(keys) --> leaf pages --> runs of the values --> service of the node: their chunks come into its memory
                                                              no service: readahead(2) brings them into the page cache

Worker processes then find them there. It is advice: what is wrong with a key or a page, whoever reads it is told.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from pario import machine
from pario.errors import ParioError
from pario.lmdb.errors import Error
from pario.lmdb.served import peers_of_service
from pario.threads import Workers

if TYPE_CHECKING:
    from pario.lmdb.database import _Database
    from pario.lmdb.store import Store

__all__ = ["Announced"]

_log = logging.getLogger("pario")

#: Keys that are looked up at once.
_KEYS = 64
#: One call brings at most this part of the memory that is available: the rest would drive out what came first.
_SHARE_OF_MEMORY = 4
#: Values with so many bytes between them are one request.
_GAP_BYTES = 16 << 10


class Announced:
    """The thread that serves one environment, in the process that announces."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._workers = Workers("pario-ahead", 1)

    @property
    def is_ours(self) -> bool:
        """False in a forked child, where the thread does not live."""
        return self._pid == os.getpid()

    def bring(self, env: Any, keys: list[Any], db: _Database | None) -> None:
        """Begin when what was announced before has been asked for. env : the Environment

        Raises ParioError if the system refuses the thread.
        """
        self._workers.call(_bring, env, keys, db, self._workers)

    def end(self) -> None:
        """Bring no more; does not wait. Idempotent."""
        if self.is_ours:
            self._workers.end(0, cancel=True)


def _bring(env: Any, keys: list[Any], db: _Database | None, workers: Workers) -> None:
    left = machine.memory(swap=False)[1] // _SHARE_OF_MEMORY
    try:
        with env.begin(db=db) as txn:
            store, peers = txn._store, peers_of_service(txn._store)
            try:
                cursor = txn.cursor()
                for at in range(0, len(keys), _KEYS):
                    begins, nbytes = cursor._runs(keys[at : at + _KEYS])
                    left -= int(nbytes.sum())
                    if left < 0 or workers.has_ended:
                        break
                    if peers is None:
                        store.file.advise(begins, nbytes, _GAP_BYTES)
                    else:
                        _ask(store, peers, begins, nbytes)
            finally:
                if peers is not None:
                    peers.close()
        if left < 0:
            _log.info(
                "%s: of %d records that were announced those from number %d on are not brought: they take more than a "
                "quarter of the memory that is available. Announce fewer at once",
                *(env.path(), len(keys), at),
            )
    except (Error, ParioError, OSError) as e:
        if not workers.has_ended:  # else the environment was closed meanwhile
            _log.info("%s: records that were announced are not brought: %s", env.path(), e)


def _ask(store: Store, peers: Any, begins: np.ndarray, nbytes: np.ndarray) -> None:
    """Let the service bring the chunks of these runs that it has not got."""
    from pario.records import EXTENT  # with the modules of `peers_of_service`

    tier = store.copy
    if tier is None or not len(begins):
        return
    chunks = tier.grid.chunks_at(begins, nbytes)
    chunks = chunks[~tier.held()[chunks]]
    first = np.empty(len(chunks), EXTENT)  # the first byte of each shows that it has come
    first["offset"], first["nbytes"] = chunks * tier.grid.chunk_bytes, 1
    peers.read(first, np.empty(len(first), np.uint8), np.arange(len(first)))
