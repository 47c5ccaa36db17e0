"""Records that somebody is about to read: threads look up where they lie, and bring them for all processes of the node.

    will_read(keys) --> leaf pages --> runs of the values --> service of the node: their chunks come into its memory
                                                              no service: ahead.py reads them into memory that this
                                                              process shares with those that it starts

Worker processes then find them there. It is advice: what is wrong with a key or a page, its reader is told.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from pario import machine
from pario.errors import ParioError
from pario.fetch.snapshot import identity_of
from pario.lmdb import abi
from pario.lmdb.ahead import Ahead, Found
from pario.lmdb.errors import Error
from pario.lmdb.served import announce, announced, peers_of_service, tell_children
from pario.lmdb.told import ToldMemory
from pario.threads import Workers

if TYPE_CHECKING:
    from pario.fetch.base import Fetcher
    from pario.lmdb.cursor import Cursor
    from pario.lmdb.database import _Database
    from pario.lmdb.store import Store
    from pario.lmdb.txn import Transaction

_log = logging.getLogger("pario")

#: Keys that are looked up at once for a service.
_KEYS = 64
#: What is announced takes at most this part of the memory that is available, and at most this many bytes: what hundreds
#: of large records need, of which some dozens wait at a time.
_SHARE_OF_MEMORY, _MOST_BYTES = 4, 1 << 30


class Announced:
    """What serves one environment, in the process that announces."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._workers = Workers("pario-announced", 1)
        self._peers: tuple[Store, Any] | None = None
        self._ahead: tuple[Store, Ahead | None] | None = None

    @property
    def is_ours(self) -> bool:
        """False in a forked child, where the threads do not live."""
        return self._pid == os.getpid()

    def bring(self, env: Any, keys: list[Any], db: _Database | None) -> None:
        """Bring these records after those that were announced before. env : the Environment

        Raises lmdb errors, and ParioError if the system refuses the thread.
        """
        txn = env.begin(db=db)
        store = txn._store
        if store.copy is not None:
            if keys:
                self._workers.call(self._bring_to_service, txn, keys)
            return
        if self._ahead is None or self._ahead[0] is not store:
            ahead = _ahead_of(store, self)
            self._leave_ahead(ahead)
            self._ahead = store, ahead
        ahead = self._ahead[1]
        if ahead is not None and keys:
            ahead.tell(keys, _LookUp(txn, ahead))

    @property
    def ahead(self) -> Ahead | None:
        """What reads in this process, if anything does."""
        return self._ahead[1] if self._ahead is not None else None

    def end(self) -> None:
        """Bring no more; does not wait. Idempotent."""
        if self.is_ours:
            self._workers.end(0, cancel=True)
            self._leave_ahead(None)
            self._end_peers()

    def _leave_ahead(self, next_one: Ahead | None) -> None:
        ahead = self._ahead[1] if self._ahead is not None else None
        if ahead is None or ahead is next_one or not ahead.leave(self):
            return
        for identity in [identity for identity, memory in list(announced.items()) if memory is ahead.memory]:
            announced.pop(identity, None)
            _left[identity] = ahead.memory

    def _end_peers(self) -> None:
        if self._peers is not None:
            self._peers[1].close()
            self._peers = None

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _bring_to_service(self, txn: Transaction, keys: list[Any]) -> None:
        left = machine.memory(swap=False)[1] // _SHARE_OF_MEMORY
        store = txn._store
        try:
            cursor = txn.cursor()
            for at in range(0, len(keys), _KEYS):
                begins, nbytes = cursor._runs(keys[at : at + _KEYS])
                left -= int(nbytes.sum())
                if left < 0 or self._workers.has_ended:
                    break
                self._ask(store, begins, nbytes)
            if left < 0:
                _log.info(
                    "%s: of %d records that were announced those from number %d on are not brought: they take more "
                    "than a quarter of the memory that is available. Announce fewer at once",
                    *(store.file.path, len(keys), at),
                )
        except (Error, ParioError, OSError) as e:
            self._end_peers()
            if not self._workers.has_ended:  # else the environment was closed meanwhile
                _log.info("%s: records that were announced are not brought: %s", store.file.path, e)

    def _ask(self, store: Store, begins: np.ndarray, nbytes: np.ndarray) -> None:
        """Let the service bring the chunks of these runs that it has not got."""
        from pario.records import EXTENT  # with the modules of `peers_of_service`

        tier = store.copy
        if tier is None or not len(begins):
            return
        chunks = tier.grid.chunks_at(begins, nbytes)
        chunks = chunks[~tier.held()[chunks]]
        if not len(chunks):
            return
        if self._peers is None or self._peers[0] is not store:
            self._end_peers()
            if (peers := peers_of_service(store)) is None:
                return
            self._peers = store, peers
        first = np.empty(len(chunks), EXTENT)  # the first byte of each shows that it has come
        first["offset"], first["nbytes"] = chunks * tier.grid.chunk_bytes, 1
        self._peers[1].read(first, np.empty(len(first), np.uint8), np.arange(len(first)))


#: What reads ahead in this process, by the identity of the file's state: one for all environments of it, else each of
#: them would take the other's memory for its own. And memories of those that have ended, while a store reads from
#: there: those who announce anew go on with them.
_running: weakref.WeakValueDictionary[bytes, Ahead] = weakref.WeakValueDictionary()
_left: weakref.WeakValueDictionary[bytes, ToldMemory] = weakref.WeakValueDictionary()
_start = threading.Lock()


def _forked() -> None:
    global _start
    _start = threading.Lock()


os.register_at_fork(after_in_child=_forked)


def _ahead_of(store: Store, user: Announced) -> Ahead | None:
    """What reads ahead of those who read this store, in this process and in those that it starts from now on.

    user : has joined it
    """
    try:
        identity = identity_of(store.file, [store.snapshot])
        if not store.is_newest():  # the identity is that of a newer state
            return None
        with _start:
            ahead = _running.get(identity)
            if ahead is None or not ahead.join(user):
                budget = min(_MOST_BYTES, machine.memory(swap=False)[1] // _SHARE_OF_MEMORY)
                memory = _left.pop(identity, None)
                ours = memory if memory is not None and memory.is_ours else None
                ahead = _running[identity] = Ahead(_traced(store.file), store.snapshot, budget, ours)
                ahead.join(user)
    except (OSError, ParioError) as e:
        _log.info("%s: records that are announced are not brought: %s", store.file.path, e)
        return None
    announce(identity, ahead.memory)
    store.read_announced(ahead.memory)
    tell_children("announced", _paths)
    return ahead


def _traced(file: Fetcher) -> Fetcher:
    """The file; under `python -m pario trace` its requests are in the trace."""
    from pario.stats.tracing import recorder_of  # with what writes files: few processes need it

    recorder = recorder_of(None)
    if recorder is None:
        return file
    from pario.fetch.traced import TracedFetcher

    return TracedFetcher(file, recorder)


def _paths() -> dict[bytes, tuple[str, str]]:
    """Where processes that this one starts find what is announced in it."""
    return {identity: memory.paths for identity, memory in list(announced.items())}


class _LookUp:
    """Where keys lead in a transaction."""

    def __init__(self, txn: Transaction, ahead: Ahead) -> None:
        self._txn, self._ahead = txn, weakref.ref(ahead)

    def __call__(self, keys: Sequence[Any]) -> list[Found]:
        cursor = self._txn.cursor()
        found = []
        for key in keys:
            with suppress(TypeError):  # the reader of such a key is told
                if (one := self._found(cursor, key)) is not None:
                    found.append(one)
        return found

    def _found(self, cursor: Cursor, key: Any) -> Found | None:
        items, jobs = cursor._found([key], abi.ITEM)
        if not items:
            return None
        store = self._txn._store
        header = store.snapshot.layout.header
        offset, nbytes = (jobs[0, 0] * store.snapshot.page_size, jobs[0, 1] + header) if len(jobs) else (0, 0)
        return Found([(page, self._page(store, page)) for page in cursor._path()], int(offset), int(nbytes))

    def _page(self, store: Store, page: int) -> bytes | None:
        """None if it is not needed, or not in the cache any more."""
        ahead = self._ahead()
        return None if ahead is None or ahead.has_page(page) else store.cached_page(page)
