"""Which byte ranges of the file are read together, and their places in memory.

All reads are merged by `together`, inlined where they are planned (`merge_runs`).
"""

from __future__ import annotations

from pario.kernels.jit import inner, kernel

#: Bytes that the page cache reads at least. Those beside a record in its page come anyway, and cost nothing.
PAGE = 4096


@inner
def unwanted_bytes(stop, first):  # type: ignore[no-untyped-def]
    """Bytes of whole pages between byte `stop` of the file, where a range ends, and `first`, where the next begins."""
    return first // PAGE * PAGE - (stop + PAGE - 1) // PAGE * PAGE


@inner
def together(stop, first, gap):  # type: ignore[no-untyped-def]
    """Are a range that ends at `stop` and one that begins at `first`, behind it, read together?

    If they touch, and across a gap of at most `gap` bytes that holds no more than one whole page: to copy a page takes
    half a microsecond, another call takes one, and another request to a store much longer. A leaf page stands alone
    between overflow pages, so that this is the usual gap.
    """
    return first - stop <= gap and unwanted_bytes(stop, first) <= PAGE


@kernel
def merge_runs(begins, nbytes, order, align, unit, gap, percent, runs, starts):
    """Merge ranges of the file into runs, in the order of the file, and lay these out in memory.

    begins, nbytes i64[k]; order i64[k] (argsort of begins) or i64[0] if they ascend already.
    align: each range is widened to multiples of this many bytes.
    unit: a run begins in memory at the same remainder modulo unit as in the file.
    gap: longest gap that is read along. One that `together` declines is still read along while the whole pages of all
    such gaps are at most `percent` of the pages that hold anything wanted.
    out: runs i64[k, 3] (first byte, byte after the last, place in memory), starts i64[k] (places of the ranges).
    Returns (number of runs, bytes of memory).
    """
    k = begins.shape[0]
    permuted = order.shape[0] > 0

    budget = 0
    if gap > PAGE:
        seen = 0
        for i in range(k):
            j = order[i] if permuted else i
            first = max(begins[j] // PAGE * PAGE, seen)
            stop = (begins[j] + nbytes[j] + PAGE - 1) // PAGE * PAGE
            if stop > first:
                budget += stop - first
                seen = stop
        budget = budget * percent // 100

    count = 0
    run_first = 0
    run_stop = -1
    at = 0
    for i in range(k):
        j = order[i] if permuted else i
        first = begins[j] // align * align
        stop = (begins[j] + nbytes[j] + align - 1) // align * align
        joined = run_stop >= 0 and (first <= run_stop or together(run_stop, first, gap))
        if not joined and run_stop >= 0 and first - run_stop <= gap:
            unwanted = unwanted_bytes(run_stop, first)
            if unwanted <= budget:
                budget -= unwanted
                joined = True
        if joined:
            run_stop = max(run_stop, stop)
        else:
            memory = 0
            if run_stop >= 0:
                runs[count, 0], runs[count, 1], runs[count, 2] = run_first, run_stop, at
                count += 1
                memory = at + run_stop - run_first
            run_first = first
            run_stop = stop
            at = memory + (first - memory) % unit
        starts[j] = at + begins[j] - run_first
    if run_stop >= 0:
        runs[count, 0], runs[count, 1], runs[count, 2] = run_first, run_stop, at
        return count + 1, at + run_stop - run_first
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
