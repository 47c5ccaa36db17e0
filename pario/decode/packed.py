"""The decoder of packed values: it unpacks them, and another one decodes.

    ring, page cache, tier   packed values
    here                     slice by slice: unpack into this thread's memory, which stays in the core's cache, and let
                             the inner decoder read it there into the batch
                             or, if that only copies whole values, or a row out of each: unpack straight into the batch

The parts of a batch go to several threads, as with any decoder that works record by record
(feed/decode_step.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from pario.decode.base import Around, ArraySpec, Decoder, Draw, Failures, Parts, Verbatim, flat
from pario.decode.unpacking import Unpacking, laid_out
from pario.errors import DecodeError
from pario.records import Records

#: Bytes of values that are unpacked at once, before the inner decoder sees them: a part of a core's second cache. Each
#: slice costs some 0.1 ms of the interpreter. (Records of 3 KB, zstd:3, us of a core each: the codec alone 6.4,
#: slices of 197 KB 9.9, of 790 KB 7.5.)
_SLICE_BYTES = 1 << 20
#: Values with at most this many bytes behind their row are unpacked straight into the batch.
_TAIL_BYTES = 64
#: A thread gets at least this many packed bytes at once: below, the hand-over shows.
_PIECE_BYTES = 256 << 10

_NOTHING = np.empty(0, np.uint8)


class _Scratch(threading.local):
    """Memory of each thread."""

    _memory = _NOTHING

    def at_least(self, nbytes: int) -> np.ndarray:
        """u8[nbytes or more], with whatever is in it."""
        if len(self._memory) < nbytes:
            self._memory = np.empty(max(nbytes, 2 * _SLICE_BYTES), np.uint8)
        return self._memory


class Packed(Around):
    """Unpacks values, and lets `inner` decode them. Of one loader: it cannot be pickled.

    unpacking : of the loader's files
    count : count(seconds, bytes in, bytes out) is called for what was unpacked; from any thread
    """

    def __init__(self, inner: Decoder, unpacking: Unpacking, count: Callable[[float, int, int], None]) -> None:
        self.inner = inner
        self._unpacking = unpacking
        self._count = count
        self._scratch = _Scratch()
        self._is_odd = False  # most values are not as `verbatim` says
        # Decoders that take a batch as a whole, and do more than to copy values one after the other, get it whole.
        self.parallel = inner.by_rows or self._straight() is not None
        self.by_rows, self.records_per_row, self.lead = inner.by_rows, inner.records_per_row, inner.lead

    def __repr__(self) -> str:
        return repr(self.inner)

    @property
    def users(self) -> Decoder:
        return self.inner

    def _straight(self) -> Verbatim | None:
        """Where whole values are copied to by the inner decoder, if that is all that it does."""
        layout = self.inner.verbatim() if self.inner.copies else None
        return layout if layout is not None and layout.head == 0 else None

    def _within(self) -> Verbatim | None:
        """Where a row out of each value is copied to by the inner decoder, if that is nearly all that it does."""
        layout = self.inner.verbatim() if self.inner.copies and self.inner.by_rows and not self._is_odd else None
        return layout if layout is not None and layout.head > 0 else None

    # -- learning ----------------------------------------------------------------------------------------------------

    def learn(self, record: np.ndarray) -> Any:
        raise NotImplementedError("which file a record lies in decides how it is unpacked: learn_from")

    def learn_from(self, records: Records, draw: Draw) -> Any:
        values, failures = self._unpacking.unpacked(records)
        for _, why in failures:
            raise DecodeError(why)
        return self.inner.learn_from(values, draw)

    # -- batches -----------------------------------------------------------------------------------------------------

    def shapes(self, records: Records) -> dict[str, ArraySpec]:
        """As the inner decoder says, which sees sizes but no bytes.

        records : without bytes (data u8[0]) only if the shapes of rows do not depend on their sizes
        """
        if not len(records.data):
            return self.inner.shapes(Records(records.ids, _NOTHING, records.starts, np.zeros(len(records), np.int64)))
        raw = np.maximum(self._unpacking.raw_nbytes(records), 0)
        return self.inner.shapes(Records(records.ids, _NOTHING, np.zeros(len(raw), np.int64), raw))

    def pieces(self, records: Records, threads: int) -> int:
        rows = len(records) // self.records_per_row
        each = min(4, int(records.nbytes.sum()) // (threads * _PIECE_BYTES))
        return min(rows, threads * max(1, each))

    def parts(self, records: Records, arrays: dict[str, np.ndarray], cuts: list[int]) -> Parts:
        if self.by_rows:
            return super().parts(records, arrays, cuts)
        # Values of variable size one after the other: where each begins follows from the headers.
        layout, raw = self._straight(), np.maximum(self._unpacking.raw_nbytes(records), 0)
        assert layout is not None  # else not parallel
        self.inner.decode_rest(Records(records.ids, _NOTHING, records.starts, raw), arrays)
        ends = [0, *np.cumsum(raw).tolist()]
        whole = arrays[layout.name]
        return [(records.part(a, b), {layout.name: whole[ends[a] : ends[b]]}) for a, b in pairwise(cuts)]

    def decode(self, records: Records, out: dict[str, np.ndarray], draw: Draw) -> Failures:
        if not len(records):
            return self.inner.decode(records, out, draw)
        within = self._within()
        if within is not None:
            return self._into_rows(records, out, within, draw)
        raw = self._unpacking.raw_nbytes(records)
        layout = self._straight()
        if layout is not None and not self.by_rows:
            return self._one_after_the_other(records, raw, out, layout)
        if layout is not None:
            rows = out[layout.name]
            size = rows[:1].nbytes
            if (raw == size).all():
                return self._unpack(records, raw, flat(rows), np.arange(len(rows)) * size)
        if not self.by_rows or int(raw.sum()) <= _SLICE_BYTES:
            return self._decode(records, raw, out, draw)
        failures: Failures = []
        width = self.records_per_row
        through = np.cumsum(np.maximum(raw, 0).reshape(-1, width).sum(axis=1)) // _SLICE_BYTES
        cuts = [0, *(np.flatnonzero(np.diff(through)) + 1).tolist(), len(raw) // width]
        for a, b in pairwise(cuts):
            arrays = {name: array[a:b] for name, array in out.items()}
            part = records.part(a * width, b * width)
            failures += [(a + row, why) for row, why in self._decode(part, raw[a * width : b * width], arrays, draw)]
        return failures

    def _into_rows(
        self, records: Records, out: dict[str, np.ndarray], layout: Verbatim, draw: Draw
    ) -> Failures:
        """Values that contain their row: the rest of each the inner decoder sees by itself, as it does where rows are
        read straight into a batch. (Few steps: the interpreter's own code is not in the caches after a batch.)"""
        begin = time.perf_counter()
        rows = out[layout.name]
        n, row, width = len(rows), rows[:1].nbytes, layout.head + _TAIL_BYTES
        edges, kept = np.empty((n, width), np.uint8), np.zeros(n, np.int64)
        form = np.array((layout.head, row, _TAIL_BYTES), np.int64)
        spare = self._scratch.at_least(row + width)
        failures, others = self._unpacking.unpack_rows(records, form, flat(rows), edges, kept, spare)
        self._count(time.perf_counter() - begin, int(records.nbytes.sum()), n * row + int(kept.sum()))
        rest = Records(records.ids, edges.reshape(-1), np.arange(n) * width, kept)  # none of those that failed
        odd = self.inner.decode_rest(rest, out)
        if not odd and not failures:
            return []
        bad = {row for row, _ in failures}
        again = sorted({*odd, *others} - bad)
        if 2 * len(again) > n:  # written by another program: do not try again with the next ones
            self._is_odd = True
        for i in again:
            part, one = records.part(i, i + 1), {name: array[i : i + 1] for name, array in out.items()}
            failures += [(i, why) for _, why in self._decode(part, self._unpacking.raw_nbytes(part), one, draw)]
        return sorted(failures)

    def _one_after_the_other(
        self, records: Records, raw: np.ndarray, out: dict[str, np.ndarray], layout: Verbatim
    ) -> Failures:
        nbytes = np.maximum(raw, 0)
        if len(out) > 1:  # a whole batch, not one of `parts`
            self.inner.decode_rest(Records(records.ids, _NOTHING, records.starts, nbytes), out)
        return self._unpack(records, raw, flat(out[layout.name]), np.cumsum(nbytes) - nbytes)

    def _decode(self, records: Records, raw: np.ndarray, out: dict[str, np.ndarray], draw: Draw) -> Failures:
        """Through this thread's memory."""
        nbytes = np.maximum(raw, 0)
        starts, total = laid_out(nbytes)
        memory = self._scratch.at_least(total)
        width, bad = self.records_per_row, dict[int, str]()
        for record, why in self._unpack(records, raw, memory, starts):
            of_several = f" (record {records.ids[record]})" if width > 1 else ""
            bad.setdefault(record // width, why + of_several)
        values = Records(records.ids, memory, starts, nbytes)
        if not bad:
            return self.inner.decode(values, out, draw)
        if not self.by_rows:
            nbytes[list(bad)] = 0
            rest = self.inner.decode(values, out, draw)
            return sorted({**dict(rest), **bad}.items())
        failures = [*bad.items()]
        for a, b in pairwise([-1, *sorted(bad), len(raw) // width]):
            if a + 1 < b:
                part = values.part((a + 1) * width, b * width)
                arrays = {name: array[a + 1 : b] for name, array in out.items()}
                failures += [(a + 1 + row, why) for row, why in self.inner.decode(part, arrays, draw)]
        return sorted(failures)

    def _unpack(self, records: Records, raw: np.ndarray, out: np.ndarray, starts: np.ndarray) -> Failures:
        begin = time.perf_counter()
        failures = self._unpacking.unpack(records, raw, out, starts)
        self._count(time.perf_counter() - begin, int(records.nbytes.sum()), int(np.maximum(raw, 0).sum()))
        return failures

    # -- what only the inner decoder knows ---------------------------------------------------------------------------

    def row_ids(self, ids: np.ndarray) -> np.ndarray:
        return self.inner.row_ids(ids)

    def picked(self, arrays: dict[str, np.ndarray], rows: np.ndarray) -> dict[str, np.ndarray]:
        return self.inner.picked(arrays, rows)
