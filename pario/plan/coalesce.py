"""Byte ranges of the file -> few, long, aligned reads, and where each of them goes in memory.

What is read together is decided here and nowhere else. The rule is `pario.kernels.runs.together`; reads that are
planned and made in one go (kernels/reads.py) inline it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from pario.errors import CorruptedError, OptionError, ParioError
from pario.kernels.runs import PAGE, cut_runs, merge_runs
from pario.records import EXTENT

#: A value's address is congruent to its file offset modulo at least this: LMDB aligns large values to 8 bytes, and
#: arrays that are views of records need that alignment.
_LEAST_UNIT = 8
#: A span is one read, up to the most that one pread returns.
_LONGEST_READ = 1 << 30


@dataclass(frozen=True, slots=True)
class Reads:
    """Reads, and their offsets in the slot.

    reads : EXTENT[m], byte ranges of the file, ascending, without duplicates
    starts : i64[m], offset of read i in memory; starts[i] and reads[i] agree modulo the alignment
    record_starts : i64[k], offsets of the ranges in memory, in the order of the input
    nbytes : bytes of memory in use
    """

    reads: np.ndarray
    starts: np.ndarray
    record_starts: np.ndarray
    nbytes: int

    def behind(self, lead: np.ndarray) -> Reads:
        """With places `lead` (i64[k]) bytes further in each range: of the values behind what is read with them."""
        return Reads(self.reads, self.starts, self.record_starts + lead, self.nbytes)


def coalesce(
    begins: np.ndarray,
    nbytes: np.ndarray,
    *,
    align: int,
    gap_bytes: int,
    read_bytes: int,
    file_bytes: int,
    capacity: int | None = None,
    gap_percent: int = 1,
) -> Reads:
    """Plan the reads of ranges in any order, which may overlap.

    Parameters
    ----------
    begins, nbytes : i64[k], ranges of the file
    align : offsets and lengths of reads are multiples of this, a power of two (1: any)
    gap_bytes : one read covers two ranges with a gap of at most this many bytes if the gap contains at most one whole
        page of 4 KiB, or if all larger gaps together are at most `gap_percent` of the wanted pages. 0: it covers only
        ranges that touch or overlap.
    read_bytes : longest read; longer ones are cut at file offsets that are multiples of this
    file_bytes : size of the file; reads end there, or at the next multiple of `align`
    capacity : bytes of memory. If a plan does not fit, a new one has only gaps inside pages, and a third one none.

    Raises
    ------
    CorruptedError : a range outside of the file
    ParioError : the ranges do not fit into `capacity` even without gaps
    """
    if align < 1 or align & (align - 1):
        raise OptionError(f"align must be a power of two, got {align!r}")
    if gap_bytes < 0:
        raise OptionError(f"gap_bytes must be at least 0, got {gap_bytes!r}")
    if read_bytes < align:
        raise OptionError(f"read_bytes must be at least align = {align}, got {read_bytes!r}")
    read_bytes -= read_bytes % align
    begins = np.ascontiguousarray(begins, np.int64)
    nbytes = np.ascontiguousarray(nbytes, np.int64)
    k = len(begins)
    if not k:
        return Reads(np.empty(0, EXTENT), np.empty(0, np.int64), np.empty(0, np.int64), 0)
    # No sum here: it could overflow on a damaged extent.
    if int(begins.min()) < 0 or int(nbytes.min()) < 0 or bool((nbytes > file_bytes - begins).any()):
        bad = int(np.flatnonzero((begins < 0) | (nbytes < 0) | (nbytes > file_bytes - begins))[0])
        raise CorruptedError(
            f"{int(nbytes[bad])} bytes, a value and what stands before it, end outside of the file's {file_bytes}",
            offset=int(begins[bad]),
        )

    ascending = bool((begins[1:] >= begins[:-1]).all())
    order = np.empty(0, np.int64) if ascending else np.argsort(begins)
    unit = max(align, _LEAST_UNIT)
    runs = np.empty((k, 3), np.int64)
    record_starts = np.empty(k, np.int64)
    # If the plan does not fit, plan again, first only with gaps inside wanted pages (shorter than a page).
    count = used = 0
    for gap in (gap_bytes, min(gap_bytes, PAGE - 1), 0):
        count, used = merge_runs(begins, nbytes, order, align, unit, gap, gap_percent, runs, record_starts)
        if capacity is None or used <= capacity:
            break
    else:
        raise ParioError(
            f"internal error: {k} ranges need {used} of {capacity} bytes of memory",
            hint="Please report this with the options you used",
        )
    most = 2 * count + used // read_bytes
    reads = np.empty(most, EXTENT)
    starts = np.empty(most, np.int64)
    m = cut_runs(runs, count, read_bytes, reads["offset"], reads["nbytes"], starts)
    return Reads(reads[:m], starts[:m], record_starts, used)


def span_reads(
    begins: np.ndarray,
    nbytes: np.ndarray,
    runs: np.ndarray,
    *,
    align: int,
    gap_bytes: int,
    read_bytes: int,
    file_bytes: int,
    capacity: int | None = None,
) -> Reads:
    """Like `coalesce`, but one read for each run of ranges, from its first byte to its last with all that lies between,
    as LMDBIO reads: right for values that lie in the file in the order in which they are wanted.

    A run is cut where a gap is longer than all its ranges together; a part whose gaps together are still longer than
    its ranges (values in random places) is read as `coalesce` would, and so is everything if it does not fit otherwise.

    runs : i64[k], which run each range belongs to, ascending; the others as for `coalesce`
    """
    merged = partial(coalesce, align=align, file_bytes=file_bytes)
    plain = partial(merged, begins, nbytes, gap_bytes=gap_bytes, read_bytes=read_bytes, capacity=capacity)
    k = len(begins)
    if k < 2 or bool((nbytes > file_bytes - begins).any()) or int(begins.min()) < 0:
        return plain()
    if _is_dense(begins, nbytes, runs):
        # The usual case, at a fraction of the cost: one run, in the order of the file, with hardly anything between.
        first = np.array([begins[0]])
        whole = merged(first, begins[-1:] + nbytes[-1:] - first, gap_bytes=0, read_bytes=_LONGEST_READ)
        if capacity is None or whole.nbytes <= capacity:
            return Reads(whole.reads, whole.starts, whole.record_starts[0] + begins - first, whole.nbytes)
    order = np.lexsort((begins, runs))
    at, size, run = begins[order], nbytes[order], runs[order]
    # Whole pages: those of neighbouring values may be the same one. Ends so far, run by run.
    first = at // PAGE * PAGE
    stop = -(-(at + size) // PAGE) * PAGE
    high = int(stop.max()) + 1
    numbers = np.cumsum(np.diff(run, prepend=run[0]) != 0)  # 0, 1, ...
    seen = np.maximum.accumulate(stop + numbers * high) - numbers * high
    before = np.concatenate([first[:1], seen[:-1]])
    before = np.where(np.diff(numbers, prepend=-1) != 0, first, before)
    gap = np.maximum(first - before, 0)
    wanted = np.maximum(stop - np.maximum(first, before), 0)
    cut = (np.diff(numbers, prepend=-1) != 0) | (gap > np.bincount(numbers, wanted)[numbers])
    heads = np.flatnonzero(cut)
    part = np.cumsum(cut) - 1
    gap[heads] = 0
    dense = np.bincount(part, gap) <= np.bincount(part, wanted)
    # A dense part is one range to `coalesce`, from the first one's begin to the last one's end.
    end = np.maximum.reduceat(at + size, heads)
    single = np.flatnonzero(~dense[part])
    ranges = np.concatenate([at[heads[dense]], at[single]])
    lengths = np.concatenate([(end - at[heads])[dense], size[single]])
    for gaps in (gap_bytes, 0):
        reads = merged(ranges, lengths, gap_bytes=gaps, read_bytes=_LONGEST_READ)
        if capacity is None or reads.nbytes <= capacity:
            break
    else:
        return plain()
    head_starts = np.zeros(len(heads), np.int64)  # of each dense part's first value
    dense_parts = np.flatnonzero(dense)
    head_starts[dense_parts] = reads.record_starts[: len(dense_parts)]
    starts = np.empty(k, np.int64)
    starts[:] = head_starts[part] + at - at[heads][part]
    starts[single] = reads.record_starts[len(dense_parts) :]
    record_starts = np.empty(k, np.int64)
    record_starts[order] = starts
    return Reads(reads.reads, reads.starts, record_starts, reads.nbytes)


def _is_dense(begins: np.ndarray, nbytes: np.ndarray, runs: np.ndarray) -> bool:
    """One run, ascending, apart, with less between its values than they have themselves."""
    if runs[0] != runs[-1] or not bool((begins[:-1] + nbytes[:-1] <= begins[1:]).all()):
        return False
    return 2 * int(nbytes.sum()) >= int(begins[-1] + nbytes[-1] - begins[0])
