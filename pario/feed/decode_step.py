"""Turns a step's records into a batch: memory for the arrays, decoding in one thread or several, unreadable records."""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections import Counter
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pario.buffers import BatchBuffers
from pario.dataset.reader import Reader
from pario.decode.base import Decoder, Draw, Failures
from pario.errors import ChecksumError, DecodeError, ParioError
from pario.locate.base import key_of
from pario.locate.sums import MISMATCH
from pario.options import Policy
from pario.records import Batch, Records
from pario.stats.rank import RankStats
from pario.threads import Workers
from pario.tune.decoding import DecodeTuner, Loop

_log = logging.getLogger("pario")
_I64 = np.dtype(np.int64)
_IDS = "\0ids"  # the record ids share a block of memory with the decoder's arrays


#: Bytes of values that are compared with their checksums before they are decoded: a part of a core's second cache.
_CHECKED_BYTES = 1 << 20
#: Kinds of reasons that are counted apart, and the length of one.
_KINDS, _LONGEST = 50, 160


class Parts(NamedTuple):
    """One rank's records of one step or several, decoded: arrays by name, i64[n] record ids (of samples: of their first
    records), and (row, reason) of each row that the decoder could not read."""

    arrays: dict[str, np.ndarray]
    ids: np.ndarray
    failures: Failures

    def rows(self, first: int, stop: int) -> Parts:
        """Of several steps: the one that has these rows."""
        failures = [(row - first, why) for row, why in self.failures if first <= row < stop]
        return Parts({name: array[first:stop] for name, array in self.arrays.items()}, self.ids[first:stop], failures)


def learn(decoder: Decoder, reader: Reader, first: Records, ids: np.ndarray, seed: int) -> None:
    """Let the decoder learn from the first row, or from the first readable one of several. Not collective.

    first : the records of the first row; ids : i64[m * records per row], those of the rows to try, the first included
    Raises DecodeError if it can read none of them, ChecksumError if the last one is not what it was.
    """
    for tried, row in enumerate(ids.reshape(-1, decoder.records_per_row)):
        try:
            if not tried and reader.sums is not None:
                reader.sums.check(first)
            decoder.learn_from(reader.read_stored(row) if tried else first, Draw(seed, 0, reader.keys))
            return
        except (DecodeError, ChecksumError) as e:
            if (tried + 1) * decoder.records_per_row == len(ids):
                record = int(row[0])
                where = reader.index.files.path_of(record)
                raise e.at(path=where, record=record, key=key_of(reader.index, record)) from None


class DecodeStep:
    """Decodes this rank's records into memory that is reused when nobody refers to it any more.

    decoder : must know its `spec`
    held_bytes : limit of all batches' arrays, see `Options.held_bytes`
    tuner : turns the number of threads for decoders that work record by record, and of batches prepared ahead
    policy : "raise": unreadable records are errors; "skip": they are left out; "substitute": the next readable record
        of their batch, after the last one the first, takes their row
    max_bad : the most unreadable records of this rank; None: no limit
    """

    def __init__(
        self,
        decoder: Decoder,
        reader: Reader,
        *,
        held_bytes: int,
        tuner: DecodeTuner,
        policy: Policy = "raise",
        max_bad: int | None = None,
    ) -> None:
        self.decoder = decoder
        self.sums = reader.sums
        self.held = BatchBuffers(held_bytes, decoder.lead)
        self._reader = reader
        self._policy = policy
        self._max_bad = math.inf if max_bad is None else max_bad
        self.substitutes = policy == "substitute"
        #: why records could not be read, without the numbers in the reason -> how many
        self.reasons: Counter[str] = Counter()
        self.tuner = tuner
        #: threads for decoders that work record by record, else None
        self.workers = Workers("pario-decode", tuner.threads.value, computes=True) if decoder.parallel else None
        self._counting = threading.Lock()
        self._decoded = 0.0  # seconds of the threads
        self._batch_bytes = 1  # of the largest batch

    def arrays(self, records: Records, rows: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Memory for a batch of `rows` rows, of which `records` are the first: (arrays by name, i64[rows] ids)."""
        shapes = self.decoder.shapes(records)
        if rows * self.decoder.records_per_row != len(records):  # decoder.by_rows: only the first axis differs
            shapes = {name: ((rows, *shape[1:]), dtype) for name, (shape, dtype) in shapes.items()}
        arrays = self.held.take({**shapes, _IDS: ((rows,), _I64)})
        if self.workers is not None:
            self._batch_bytes = max(self._batch_bytes, sum(array.nbytes for array in arrays.values()))
        ids = arrays.pop(_IDS)
        return arrays, ids

    def decode(self, records: Records, arrays: dict[str, np.ndarray], draw: Draw) -> Failures:
        """Fill the rows of `arrays`; returns (row, reason) of the records that the decoder could not read, or whose
        values are not those of their checksums."""
        rows = len(records) // self.decoder.records_per_row
        if self.workers is None or rows < 2:
            return self.decode_here(records, arrays, draw)
        threads = self.tuner.threads.value
        pieces = self.decoder.pieces(records, threads)
        cuts = [rows * k // pieces for k in range(pieces + 1)]
        parts = self.decoder.parts(records, arrays, cuts)
        # This thread works, too, where there is one core; else it goes for the next batch's records. (Packed records of
        # 3 KB on two cores, with two threads that prepare: 200,000/s if they decode a part themselves, 240,000 if not.)
        own = int(self.tuner.cores == 1)
        futures = [self.workers.call(self._decode_part, *part, draw) for part in parts[own:]]
        found = [self._decode_part(*part, draw) for part in parts[:own]]
        found += [future.result() for future in futures]
        return [(cuts[k] + row, why) for k, failures in enumerate(found) for row, why in failures]

    def _decode_part(self, records: Records, arrays: dict[str, np.ndarray], draw: Draw) -> Failures:
        begin = time.perf_counter()
        try:
            return self.decode_here(records, arrays, draw)
        finally:
            with self._counting:
                self._decoded += time.perf_counter() - begin

    def taken(self, now: float, prepared: float, stats: RankStats, room: int | None) -> None:
        """The loop has taken a batch that took this many seconds to prepare: turn the knobs, if it is time.

        room : batches that may be prepared ahead; 0: nothing is; None: as many as memory permits
        """
        tuner, workers = self.tuner, self.workers
        if room == 0 or tuner.is_pinned or not tuner.taken(now, prepared):
            return
        loop = Loop(stats.consumer, stats.waiting, stats.share, stats.batches)
        room = self._room() if room is None else room
        if tuner.turn(now, loop, self._decoded, time.process_time(), room) and workers is not None:
            workers.resize(tuner.threads.value)

    def _room(self) -> int:
        """Batches that may be prepared ahead: in a quarter of the memory for batches, and only while half of it is
        free, because the caller may keep some."""
        held, ahead = self.held, self.tuner.ahead.value
        quarter = held.held_bytes // 4 // self._batch_bytes
        free = (held.held_bytes // 2 - held.allocated_bytes) // self._batch_bytes
        return max(2, min(quarter, ahead + free))

    def decode_here(self, records: Records, arrays: dict[str, np.ndarray], draw: Draw) -> Failures:
        """`decode`, in this thread. A value that is not what it was is not decoded, unless it is packed with others."""
        if self.sums is None:
            return self.decoder.decode(records, arrays, draw)
        if int(records.nbytes.sum()) <= _CHECKED_BYTES or not self.decoder.by_rows:
            return self._decode_checked(records, arrays, draw)
        # Decoded from the processor's cache, into which the check has brought them.
        failures: Failures = []
        nbytes = records.nbytes.reshape(-1, self.decoder.records_per_row).sum(axis=1)
        cuts = (np.flatnonzero(np.diff(np.cumsum(nbytes) // _CHECKED_BYTES)) + 1).tolist()
        for a, b in pairwise([0, *cuts, len(nbytes)]):
            failures += [(a + row, why) for row, why in self._decode_checked(*self._part(records, arrays, a, b), draw)]
        return failures

    def _decode_checked(self, records: Records, arrays: dict[str, np.ndarray], draw: Draw) -> Failures:
        assert self.sums is not None  # the caller has looked
        width = self.decoder.records_per_row
        bad: dict[int, str] = {}
        for record, why in self.sums.failures(records):
            of_several = f" (record {records.ids[record]})" if width > 1 else ""
            bad.setdefault(record // width, why + of_several)
        if not bad:
            return self.decoder.decode(records, arrays, draw)
        if not self.decoder.by_rows:
            rest = self.decoder.decode(records, arrays, draw)
            return [*bad.items(), *((row, why) for row, why in rest if row not in bad)]
        failures = [*bad.items()]
        for a, b in pairwise([-1, *bad, len(records) // width]):
            if a + 1 < b:
                part = self._part(records, arrays, a + 1, b)
                failures += [(a + 1 + row, why) for row, why in self.decoder.decode(*part, draw)]
        return sorted(failures)

    def _part(
        self, records: Records, arrays: dict[str, np.ndarray], a: int, b: int
    ) -> tuple[Records, dict[str, np.ndarray]]:
        """Rows [a, b), and their records."""
        width = self.decoder.records_per_row
        return records.part(a * width, b * width), {name: array[a:b] for name, array in arrays.items()}

    def batch(self, parts: Parts, step: int, epoch: int) -> Batch:
        """The finished batch. An unreadable record is left out, substituted, or raises DecodeError."""
        arrays, ids, failures = parts
        if failures:
            arrays, ids = self._without(arrays, ids, failures)
        return Batch(self.decoder.finish(arrays), self.decoder.row_ids(ids), epoch, step, len(failures))

    def _without(
        self, arrays: dict[str, np.ndarray], ids: np.ndarray, failures: Failures
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """The batch without its unreadable records. Which records it has depends on the epoch's order alone."""
        row, why = failures[0]
        record = int(ids[row])
        more = f" (and {len(failures) - 1} more in this batch)" if len(failures) > 1 else ""
        if self._policy == "raise":
            hint = 'Loader(on_error="skip") leaves such records out and counts them.'
            raise self._bad(record, why + more, hint)
        for _, each in failures:
            self.reasons[_kind(each) if len(self.reasons) < _KINDS else "other reasons"] += 1
        if self.reasons.total() > self._max_bad:
            said = ", ".join(f"{n} x {kind}" for kind, n in self.reasons.most_common(5))
            raise self._bad(record, f"{why}{more}; more than max_bad={self._max_bad} records: {said}", None)
        keep = np.ones(len(ids), bool)
        keep[[r for r, _ in failures]] = False
        if not self.substitutes:
            _log.warning("record %d left out (%d in this batch): %s", record, len(failures), why)
            return self.decoder.picked(arrays, np.flatnonzero(keep)), ids[keep]
        good, bad = np.flatnonzero(keep), np.flatnonzero(~keep)
        if not len(good):
            raise self._bad(record, f"{why}{more}; no record of the batch can take its row", None)
        instead = good[np.searchsorted(good, bad) % len(good)]
        _log.warning("record %d substituted (%d in this batch): %s", record, len(failures), why)
        if not self.decoder.by_rows:
            rows = np.arange(len(ids))
            rows[bad] = instead
            return self.decoder.picked(arrays, rows), ids[rows]
        for array in (*arrays.values(), ids):
            array[bad] = array[instead]
        return arrays, ids

    def _bad(self, record: int, what: str, hint: str | None) -> ParioError:
        reader = self._reader
        if self.sums is not None and what.startswith(MISMATCH):
            return self.sums.error(record, what, hint)
        key = key_of(reader.index, record)
        where, rank = reader.index.files.path_of(record), reader.world.rank
        return DecodeError(what, path=where, rank=rank, record=record, key=key, hint=hint)

    def close(self, limit_s: float = math.inf) -> bool:
        """End the threads. Returns whether they ended within `limit_s` seconds."""
        return self.workers is None or self.workers.close(limit_s, cancel=True)


def _kind(why: str) -> str:
    """The reason without its numbers, so that equal ones are counted together."""
    return re.sub(r"0x[0-9a-f]+|\d+([.,]\d+)*", "n", why)[:_LONGEST]
