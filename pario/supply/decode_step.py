"""Turns a step's records into a batch: memory for the arrays, decoding in one thread or several, unreadable records."""

from __future__ import annotations

import logging
import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pario.buffers import BatchBuffers
from pario.dataset.reader import Reader
from pario.decode.base import Decoder, Draw, Failures
from pario.errors import DecodeError
from pario.records import Batch, Records
from pario.threads import Workers

__all__ = ["DecodeStep", "Parts", "learn"]

_log = logging.getLogger("pario")
_IDS = "\0ids"  # the record ids share a block of memory with the decoder's arrays


class Parts(NamedTuple):
    """One rank's records of one step, decoded: arrays by name, i64[n] record ids, and (row, reason) of each record that
    the decoder could not read."""

    arrays: dict[str, np.ndarray]
    ids: np.ndarray
    failures: Failures


def learn(decoder: Decoder, reader: Reader, first: np.ndarray, tries: int, seed: int) -> None:
    """Let the decoder learn from the first record, or from the first readable one of several. Not collective.

    first : u8[k], the first record
    Raises DecodeError if it can read none of them.
    """
    for record in range(tries):
        try:
            value = reader.read([record])[0] if record else first
            decoder.learn_at(value, record, Draw(seed, 0, reader.keys))
            return
        except DecodeError as e:
            if record + 1 == tries:
                raise e.at(path=reader.path, record=record, key=reader.keys([record])[0]) from None


class DecodeStep:
    """Decodes this rank's records into memory that is reused when nobody refers to it any more.

    decoder : must know its `spec`
    held_bytes : limit of all batches' arrays, see `Options.held_bytes`
    threads : threads for decoders that work record by record
    skip : leave out unreadable records; False: they are errors
    """

    def __init__(self, decoder: Decoder, reader: Reader, *, held_bytes: int, threads: int, skip: bool) -> None:
        self.decoder = decoder
        self.held = BatchBuffers(held_bytes)
        self._reader = reader
        self._skip = skip
        self._threads = threads
        self._workers = Workers("pario-decode", threads) if decoder.parallel else None

    def arrays(self, records: Records, rows: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Memory for a batch of `rows` records, of which `records` are the first: (arrays by name, i64[rows] ids)."""
        shapes = dict(self.decoder.shapes(records))
        if rows != len(records):  # decoder.by_rows: only the first axis differs
            shapes = {name: ((rows, *shape[1:]), dtype) for name, (shape, dtype) in shapes.items()}
        shapes[_IDS] = ((rows,), np.dtype(np.int64))
        arrays = self.held.take(shapes)
        ids = arrays.pop(_IDS)
        return arrays, ids

    def decode(self, records: Records, arrays: dict[str, np.ndarray], draw: Draw) -> Failures:
        """Fill the rows of `arrays`; returns (row, reason) of the records that the decoder could not read."""
        if self._workers is None or len(records) < 2:
            return self.decoder.decode(records, arrays, draw)
        # Several slices per thread, because images differ in cost.
        pieces = min(len(records), 4 * self._threads)
        cuts = [len(records) * k // pieces for k in range(pieces + 1)]
        futures = [
            self._workers.call(
                self.decoder.decode,
                Records(records.ids[a:b], records.data, records.starts[a:b], records.nbytes[a:b]),
                {name: array[a:b] for name, array in arrays.items()},
                draw,
            )
            for a, b in pairwise(cuts)
        ]
        return [(cuts[k] + row, why) for k, f in enumerate(futures) for row, why in f.result()]

    def batch(self, parts: Parts, step: int, epoch: int) -> Batch:
        """The finished batch. Raises DecodeError for an unreadable record, or leaves it out."""
        arrays, ids, failures = parts
        if failures:
            row, why = failures[0]
            record = int(ids[row])
            if not self._skip:
                more = f" (and {len(failures) - 1} more in this batch)" if len(failures) > 1 else ""
                raise DecodeError(
                    why + more,
                    path=self._reader.path,
                    rank=self._reader.world.rank,
                    record=record,
                    key=self._reader.keys([record])[0],
                    hint='Loader(on_error="skip") leaves such records out and counts them.',
                )
            keep = np.ones(len(ids), bool)
            keep[[r for r, _ in failures]] = False
            _log.warning("record %d left out (%d in this batch): %s", record, len(failures), why)
            arrays = {name: array[keep] for name, array in arrays.items()}
            ids = ids[keep]
        arrays = self.decoder.finish(arrays)
        return Batch(arrays, ids, epoch, step, len(failures))

    def close(self, limit_s: float = math.inf) -> bool:
        """End the threads. Returns whether they ended within `limit_s` seconds."""
        return self._workers is None or self._workers.end(limit_s, cancel=True)
