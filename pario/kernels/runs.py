"""Sorted byte ranges -> runs that are read in one go, and their places in memory."""

from __future__ import annotations

from pario.kernels.jit import kernel

__all__ = ["cut_runs", "merge_runs"]


@kernel
def merge_runs(offsets, nbytes, order, lead, align, unit, gap, page, runs, record_starts):
    """Merge the ranges [offset - lead, offset + nbytes) of the file into runs and lay these out in memory.

    offsets, nbytes i64[k]; order i64[k] (argsort of offsets) or i64[0] if they ascend already.
    lead, align: each range is widened by this many bytes at its front, then to multiples of align.
    unit: a run begins in memory at the same remainder modulo unit as in the file.
    gap: longest gap that is read along. A gap that holds no more than one whole page is; the sum of the others is at
    most 1 % of the pages that hold anything wanted.
    out: runs i64[k, 3] (first byte, byte after the last, place in memory), record_starts i64[k] (places of the values).
    Returns (number of runs, bytes of memory).
    """
    k = offsets.shape[0]
    permuted = order.shape[0] > 0

    budget = 0
    if gap > page:
        seen = 0
        for i in range(k):
            j = order[i] if permuted else i
            first = max(max(0, offsets[j] - lead) // page * page, seen)
            stop = (offsets[j] + nbytes[j] + page - 1) // page * page
            if stop > first:
                budget += stop - first
                seen = stop
        budget //= 100

    count = 0
    run_first = 0
    run_stop = -1
    place = 0
    for i in range(k):
        j = order[i] if permuted else i
        first = max(0, offsets[j] - lead) // align * align
        stop = (offsets[j] + nbytes[j] + align - 1) // align * align
        together = run_stop >= 0 and first <= run_stop
        if not together and run_stop >= 0 and first - run_stop <= gap:
            unwanted = first // page * page - (run_stop + page - 1) // page * page
            if unwanted <= page:
                together = True
            elif unwanted <= budget:
                budget -= unwanted
                together = True
        if together:
            run_stop = max(run_stop, stop)
        else:
            memory = 0
            if run_stop >= 0:
                runs[count, 0] = run_first
                runs[count, 1] = run_stop
                runs[count, 2] = place
                count += 1
                memory = place + run_stop - run_first
            run_first = first
            run_stop = stop
            place = memory + (first - memory) % unit
        record_starts[j] = place + offsets[j] - run_first
    if run_stop >= 0:
        runs[count, 0] = run_first
        runs[count, 1] = run_stop
        runs[count, 2] = place
        count += 1
        return count, place + run_stop - run_first
    return 0, 0


@kernel
def cut_runs(runs, count, read_bytes, offset, nbytes, starts):
    """Cut runs longer than read_bytes at multiples of read_bytes of the file. Empty runs give nothing.

    out: offset, nbytes, starts i64[m], m >= sum over the runs of length // read_bytes + 2. Returns how many."""
    m = 0
    for r in range(count):
        first = runs[r, 0]
        stop = runs[r, 1]
        at = first
        while at < stop:
            end = stop
            if stop - first > read_bytes:
                end = min(stop, (at // read_bytes + 1) * read_bytes)
            offset[m] = at
            nbytes[m] = end - at
            starts[m] = runs[r, 2] + at - first
            m += 1
            at = end
    return m
