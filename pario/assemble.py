"""A step's records become a batch: memory for the arrays, decoding on one thread or several, unreadable records."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np

from pario.buffers import BatchBuffers
from pario.decode.base import Decoder, Draw
from pario.errors import DecodeError
from pario.feed import Tap
from pario.records import Batch, Records
from pario.stats.rank import RankStats

__all__ = ["Assembler", "Parts", "allowed_cores", "fair_threads"]

_log = logging.getLogger("pario")
_IDS = "\0ids"  # the record ids travel in the same block of memory as the decoder's arrays

#: arrays by name, i64[n] record ids, (row, why) of each record that could not be decoded
Parts = tuple[dict[str, np.ndarray], np.ndarray, list[tuple[int, str]]]


def allowed_cores() -> list[int]:
    """The cores on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def fair_threads(mine: list[int], everyones: list[list[int]]) -> int:
    """One thread per core that this rank may use; a core that several ranks of the node may use is divided.

    mine : this rank's cores; everyones : those of every rank of its node, this one's among them
    """
    users = Counter(core for cores in everyones for core in cores)
    return max(1, int(sum(1 / users[core] for core in mine) + 1e-6))


class Assembler:
    """Decodes this rank's records.

    held : memory of the batches
    threads : of decoders that work record by record
    on_error : "raise" or "skip"
    path, rank, key_of : for the DecodeError; key_of(record id) -> key
    stats : of this rank; its `decode` grows
    """

    def __init__(
        self,
        decoder: Decoder,
        held: BatchBuffers,
        *,
        threads: int,
        on_error: str,
        path: str,
        rank: int,
        key_of: Callable[[int], bytes],
        stats: RankStats,
    ) -> None:
        self._decoder = decoder
        self._held = held
        self._on_error = on_error
        self._path = path
        self._rank = rank
        self._key_of = key_of
        self._stats = stats
        self._executor: ThreadPoolExecutor | None = None
        if decoder.parallel:
            self._threads = threads
            self._executor = ThreadPoolExecutor(self._threads, thread_name_prefix="pario-decode")

    def parts(self, tap: Tap, step: int, draw: Draw, check: Callable[[], None]) -> Parts:
        """One step's records, decoded; waits for their bytes and calls `check` meanwhile, which may raise."""
        stats = self._stats
        waited_before = stats.share
        begin = time.perf_counter()
        arrays: dict[str, np.ndarray] = {}
        ids = np.empty(0, np.int64)
        failures: list[tuple[int, str]] = []
        for piece in range(tap.pieces):
            first, records = tap.take(step, piece, check)
            if piece == 0:
                arrays, ids = self._arrays(records, tap.rows(step))
            if tap.pieces == 1:
                ids[:] = records.ids
                failures = self._decode(records, arrays, draw)
            else:
                part = slice(first, first + len(records))
                ids[part] = records.ids
                pieces = {name: array[part] for name, array in arrays.items()}
                failures += [(first + row, why) for row, why in self._decode(records, pieces, draw)]
            tap.release(step, piece)
        stats.decode += time.perf_counter() - begin - (stats.share - waited_before)
        return arrays, ids, failures

    def _arrays(self, records: Records, rows: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Memory for a batch of `rows` records, of which `records` are the first."""
        shapes = dict(self._decoder.shapes(records))
        if rows != len(records):  # by rows, so that only the first axis differs
            shapes = {name: ((rows, *shape[1:]), dtype) for name, (shape, dtype) in shapes.items()}
        shapes[_IDS] = ((rows,), np.dtype(np.int64))
        arrays = self._held.take(shapes)
        ids = arrays.pop(_IDS)
        return arrays, ids

    def _decode(self, records: Records, arrays: dict[str, np.ndarray], draw: Draw) -> list[tuple[int, str]]:
        if self._executor is None or len(records) < 2:
            return self._decoder.decode(records, arrays, draw)
        # Several pieces per thread, since images differ in cost.
        pieces = min(len(records), 4 * self._threads)
        cuts = [len(records) * k // pieces for k in range(pieces + 1)]
        futures = [
            self._executor.submit(
                self._decoder.decode,
                Records(records.ids[a:b], records.data, records.starts[a:b], records.nbytes[a:b]),
                {name: array[a:b] for name, array in arrays.items()},
                draw,
            )
            for a, b in pairwise(cuts)
        ]
        return [(cuts[k] + row, why) for k, f in enumerate(futures) for row, why in f.result()]

    def batch(self, parts: Parts, step: int, epoch: int) -> Batch:
        """Raises DecodeError for a record that could not be decoded, or leaves it out."""
        arrays, ids, failures = parts
        if failures:
            row, why = failures[0]
            record = int(ids[row])
            if self._on_error == "raise":
                more = f" (and {len(failures) - 1} more in this batch)" if len(failures) > 1 else ""
                raise DecodeError(
                    why + more,
                    path=self._path,
                    rank=self._rank,
                    record=record,
                    key=self._key_of(record),
                    hint='Loader(on_error="skip") leaves such records out and counts them.',
                )
            keep = np.ones(len(ids), bool)
            keep[[r for r, _ in failures]] = False
            _log.warning("record %d left out (%d in this batch): %s", record, len(failures), why)
            arrays = {name: array[keep] for name, array in arrays.items()}
            ids = ids[keep]
        return Batch(arrays, ids, epoch, step, len(failures))

    def end(self, wait: bool) -> None:
        """End the threads; returns when they have ended, unless `wait` is False."""
        if self._executor is not None:
            self._executor.shutdown(wait=wait, cancel_futures=True)
