"""Records that somebody is about to read: threads look up where they lie, and read them into the node's page cache.

    will_read(keys) --> leaf pages --> runs of the values --> reads, as many in flight as the law of the depth says

Any process of the node that asks for one of them finds it there; the kernel lets it wait for one that is being
read, and reads it once. It is advice: what is wrong with a key or a page, its reader is told.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from pario import machine
from pario.errors import ParioError
from pario.fetch.pool import ReadPool
from pario.lmdb.errors import Error
from pario.records import EXTENT
from pario.threads import Workers
from pario.tune.knobs import START_DEPTH, Knob

if TYPE_CHECKING:
    from pario.fetch.base import OneFile
    from pario.lmdb.store import DataFile, Store
    from pario.lmdb.txn import Transaction

_log = logging.getLogger("pario")

#: Keys that one thread looks up at once: few, so that the first reads begin soon.
_KEYS = 8
#: Threads that look keys up: their pages may have to come from the store.
_LOOKERS = 8
#: Reads in flight at most, whatever the law says, and bytes of one: a longer value is read in pieces.
_MOST_READS, _PIECE_BYTES = 64, 1 << 20
#: What one call announces takes at most this part of the memory that is available: the kernel would drop the first
#: records for the last ones.
_SHARE_OF_MEMORY = 4


class Announced:
    """What reads ahead for one environment, in the process that announces. file : its data file"""

    def __init__(self, file: DataFile) -> None:
        self._pid = os.getpid()
        self.file = file
        self._lookers = Workers("pario-announced", _LOOKERS)
        self.pool = ReadPool(_traced(file), Knob("announced values in flight", 1, _MOST_READS, START_DEPTH))
        self._has_read = False
        self.pool.fetcher.cached_share(0, 1)  # compiled now: threads that compile do not end when the script does

    @property
    def is_ours(self) -> bool:
        """False in a forked child, where the threads do not live."""
        return self._pid == os.getpid()

    def bring(self, txn: Transaction, keys: Sequence[Any]) -> None:
        """Read these records after those that were announced before. Raises ParioError if the system refuses the
        thread."""
        budget = _Budget(len(keys), txn._store.file.path)
        for at in range(0, len(keys), _KEYS):
            self._lookers.call(self._bring, txn, keys[at : at + _KEYS], budget)

    def close(self) -> None:
        """Read no more; does not wait. Idempotent."""
        if self.is_ours:
            self._lookers.close(0, cancel=True)
            self.pool.close(0)

    def __del__(self, _over: Callable[[], bool] = sys.is_finalizing) -> None:
        if not _over() and hasattr(self, "pool"):
            self.close()

    # -- in the threads ------------------------------------------------------------------------------------------------

    def _bring(self, txn: Transaction, keys: Sequence[Any], budget: _Budget) -> None:
        cursor = txn.cursor()
        reads: list[tuple[int, int]] = []
        for key in keys:
            if self._lookers.has_ended:
                return
            with suppress(TypeError, Error):  # its reader is told
                for offset, nbytes in zip(*(each.tolist() for each in cursor._runs([key])), strict=True):
                    if budget.take(nbytes) and not self._is_here(txn._store, offset, nbytes):
                        reads += _pieces(offset, nbytes)
        if reads:
            self._read(np.array(reads, EXTENT))

    def _is_here(self, store: Store, offset: int, nbytes: int) -> bool:
        """In the copy of the node's service, or in the page cache."""
        if (tier := store.copy) is not None:
            chunks = tier.grid.chunks_at(np.array([offset]), np.array([nbytes]))
            if tier.held()[chunks].all():
                return True
        return self.pool.fetcher.cached_share(offset, nbytes) == 1.0

    def _read(self, reads: np.ndarray) -> None:
        try:
            # The bytes are nobody's: all reads may go to one place.
            self.pool.read(reads, np.empty(reads["nbytes"].max(), np.uint8), np.zeros(len(reads), np.int64))
            first, self._has_read = not self._has_read, True
            if first and self.pool.fetcher.cached_share(*map(int, reads[0].item())) == 0.0:
                self.close()
                _log.warning(
                    "%s: its file system keeps nothing in the page cache: records that are announced are not read "
                    "ahead. PARIO_TIERS=memory:auto keeps a copy in the node's memory (docs/tiers.md)",
                    self.file.path,
                )
        except (ParioError, OSError) as e:  # its reader meets the error
            if not self._lookers.has_ended:
                _log.info("%s: records that were announced are not read ahead: %s", self.file.path, e)


class _Budget:
    """What the records of one call may take of the memory."""

    def __init__(self, records: int, path: str) -> None:
        self._left = machine.memory()[1] // _SHARE_OF_MEMORY
        self._told = (path, records)

    def take(self, nbytes: int) -> bool:
        """Whether a record of this many bytes is to be read."""
        before, self._left = self._left, self._left - nbytes
        if self._left < 0 <= before:
            _log.info(
                "%s: of %d records that were announced not all are read ahead: they take more than a quarter of the "
                "memory that is available. Announce fewer at once",
                *self._told,
            )
        return self._left >= 0


def _pieces(offset: int, nbytes: int) -> list[tuple[int, int]]:
    end = offset + nbytes
    return [(at, min(_PIECE_BYTES, end - at)) for at in range(offset, end, _PIECE_BYTES)]


def _traced(file: OneFile) -> OneFile:
    """The file; under `python -m pario trace` its requests are in the trace."""
    from pario.fetch.traced import TracedFetcher  # with what writes files: few processes need it
    from pario.stats.tracing import recorder_of

    recorder = recorder_of(None)
    return file if recorder is None else TracedFetcher(file, recorder)
