"""Extents -> few, long, aligned reads, and where each of them goes in a slot."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from pario.errors import CorruptedError, OptionError, ParioError
from pario.kernels.runs import cut_runs, merge_runs
from pario.records import EXTENT

__all__ = ["Reads", "coalesce", "span_reads"]

#: What the page cache reads at least. Unwanted bytes are counted in whole pages: those beside a record come anyway.
_PAGE = 4096
#: Memory is laid out so that a value lies at its file offset modulo this at least: LMDB puts large values at multiples
#: of 8, and arrays that are views of records want that.
_LEAST_UNIT = 8
#: A span is one read, up to what one pread of the kernel brings.
_LONGEST_READ = 1 << 30


@dataclass(frozen=True, slots=True)
class Reads:
    """What to read and where it goes.

    reads : EXTENT[m], byte ranges of the file, ascending, none twice
    starts : i64[m], where read i begins in the slot; starts[i] and reads[i] agree modulo the alignment
    record_starts : i64[k], where the values begin in the slot, in the order of the input
    nbytes : bytes of the slot that are used
    """

    reads: np.ndarray
    starts: np.ndarray
    record_starts: np.ndarray
    nbytes: int


def coalesce(
    offsets: np.ndarray,
    nbytes: np.ndarray,
    *,
    lead_bytes: int,
    align: int,
    gap_bytes: int,
    read_bytes: int,
    file_bytes: int,
    capacity: int | None = None,
) -> Reads:
    """Plan the reads of some values, in any order, the same one more than once if you like.

    Parameters
    ----------
    offsets, nbytes : i64[k], where the values lie in the file
    lead_bytes : read this much before each value (its page header)
    align : offsets and lengths of reads are multiples of this, a power of two (1: any)
    gap_bytes : two ranges with a gap of at most this many bytes are read together if the gap holds no more than one
        whole page of 4 KiB, or if all such larger gaps together are at most 1 % of the pages that are wanted.
        0: only ranges that touch or overlap.
    read_bytes : longest read; longer ones are cut at multiples of this in the file
    file_bytes : size of the file; reads end there, or at the next multiple of `align`
    capacity : bytes of the slot. A plan that does not fit is made again with gaps inside pages only, then without.

    Raises
    ------
    CorruptedError : a value outside of the file
    ParioError : the values do not fit into `capacity` even without gaps
    """
    if align < 1 or align & (align - 1):
        raise OptionError(f"align must be a power of two, got {align!r}")
    if lead_bytes < 0 or gap_bytes < 0:
        raise OptionError(f"lead_bytes and gap_bytes must be at least 0, got {lead_bytes!r} and {gap_bytes!r}")
    if read_bytes < align:
        raise OptionError(f"read_bytes must be at least align = {align}, got {read_bytes!r}")
    read_bytes -= read_bytes % align
    offsets = np.ascontiguousarray(offsets, np.int64)
    nbytes = np.ascontiguousarray(nbytes, np.int64)
    k = len(offsets)
    if not k:
        return Reads(np.empty(0, EXTENT), np.empty(0, np.int64), np.empty(0, np.int64), 0)
    # Compared without a sum, which could overflow on a damaged extent.
    if int(offsets.min()) < 0 or int(nbytes.min()) < 0 or bool((nbytes > file_bytes - offsets).any()):
        bad = int(np.flatnonzero((offsets < 0) | (nbytes < 0) | (nbytes > file_bytes - offsets))[0])
        raise CorruptedError(
            f"a value of {int(nbytes[bad])} bytes ends outside of the file's {file_bytes} bytes",
            offset=int(offsets[bad]),
        )

    ascending = bool((offsets[1:] >= offsets[:-1]).all())
    order = np.empty(0, np.int64) if ascending else np.argsort(offsets)
    unit = max(align, _LEAST_UNIT)
    runs = np.empty((k, 3), np.int64)
    record_starts = np.empty(k, np.int64)
    # What does not fit is planned again, first with the gaps inside wanted pages only (less than a page long).
    count = used = 0
    for gap in (gap_bytes, min(gap_bytes, _PAGE - 1), 0):
        count, used = merge_runs(offsets, nbytes, order, lead_bytes, align, unit, gap, _PAGE, runs, record_starts)
        if capacity is None or used <= capacity:
            break
    else:
        raise ParioError(
            f"internal error: {k} records need {used} bytes of a slot of {capacity}",
            hint="Please report this with the options you used",
        )
    most = 2 * count + used // read_bytes
    reads = np.empty(most, EXTENT)
    starts = np.empty(most, np.int64)
    m = cut_runs(runs, count, read_bytes, reads["offset"], reads["nbytes"], starts)
    return Reads(reads[:m], starts[:m], record_starts, used)


def span_reads(
    offsets: np.ndarray,
    nbytes: np.ndarray,
    runs: np.ndarray,
    *,
    lead_bytes: int,
    align: int,
    gap_bytes: int,
    read_bytes: int,
    file_bytes: int,
    capacity: int | None = None,
) -> Reads:
    """Like `coalesce`, but one read for each run of values, from its first byte to its last with all that lies between,
    as LMDBIO reads: right for values that lie in the file in the order in which they are wanted.

    A run is cut where a gap is longer than all its values together; a part whose gaps together are still longer than
    its values (values in random places) is read as `coalesce` would, and so is everything if it does not fit otherwise.

    runs : i64[k], which run each value belongs to, ascending; the others as for `coalesce`
    """
    merged = partial(coalesce, lead_bytes=lead_bytes, align=align, file_bytes=file_bytes)
    plain = partial(merged, offsets, nbytes, gap_bytes=gap_bytes, read_bytes=read_bytes, capacity=capacity)
    k = len(offsets)
    if k < 2 or bool((nbytes > file_bytes - offsets).any()) or int(offsets.min()) < 0:
        return plain()
    if _is_dense(offsets, nbytes, runs):
        # The usual case, at a fraction of the cost: one run, in the order of the file, with hardly anything between.
        first = np.array([offsets[0]])
        whole = merged(first, offsets[-1:] + nbytes[-1:] - first, gap_bytes=0, read_bytes=_LONGEST_READ)
        if capacity is None or whole.nbytes <= capacity:
            return Reads(whole.reads, whole.starts, whole.record_starts[0] + offsets - first, whole.nbytes)
    order = np.lexsort((offsets, runs))
    at, size, run = offsets[order], nbytes[order], runs[order]
    # Whole pages: those of neighbouring values may be the same one. Ends so far, run by run.
    first = np.maximum(at - lead_bytes, 0) // _PAGE * _PAGE
    stop = -(-(at + size) // _PAGE) * _PAGE
    high = int(stop.max()) + 1
    numbers = np.cumsum(np.diff(run, prepend=run[0]) != 0)  # 0, 1, ...
    seen = np.maximum.accumulate(stop + numbers * high) - numbers * high
    before = np.concatenate([first[:1], seen[:-1]])
    before = np.where(np.diff(numbers, prepend=-1) != 0, first, before)
    gap = np.maximum(first - before, 0)
    wanted = np.maximum(stop - np.maximum(first, before), 0)
    cut = (np.diff(numbers, prepend=-1) != 0) | (gap > np.bincount(numbers, wanted)[numbers])
    begins = np.flatnonzero(cut)
    part = np.cumsum(cut) - 1
    gap[begins] = 0
    dense = np.bincount(part, gap) <= np.bincount(part, wanted)
    # A dense part is one value to `coalesce`, from the first one's place to the last one's end.
    end = np.maximum.reduceat(at + size, begins)
    single = np.flatnonzero(~dense[part])
    ranges = np.concatenate([at[begins[dense]], at[single]])
    lengths = np.concatenate([(end - at[begins])[dense], size[single]])
    for gaps in (gap_bytes, 0):
        reads = merged(ranges, lengths, gap_bytes=gaps, read_bytes=_LONGEST_READ)
        if capacity is None or reads.nbytes <= capacity:
            break
    else:
        return plain()
    place = np.zeros(len(begins), np.int64)  # of each dense part's first value
    dense_parts = np.flatnonzero(dense)
    place[dense_parts] = reads.record_starts[: len(dense_parts)]
    starts = np.empty(k, np.int64)
    starts[:] = place[part] + at - at[begins][part]
    starts[single] = reads.record_starts[len(dense_parts) :]
    record_starts = np.empty(k, np.int64)
    record_starts[order] = starts
    return Reads(reads.reads, reads.starts, record_starts, reads.nbytes)


def _is_dense(offsets: np.ndarray, nbytes: np.ndarray, runs: np.ndarray) -> bool:
    """One run, ascending, apart, with less between its values than they have themselves."""
    if runs[0] != runs[-1] or not bool((offsets[:-1] + nbytes[:-1] <= offsets[1:]).all()):
        return False
    return 2 * int(nbytes.sum()) >= int(offsets[-1] + nbytes[-1] - offsets[0])
