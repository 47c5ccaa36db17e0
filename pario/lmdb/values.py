"""Keys and values as Python objects: short ones out of their page, long ones read straight into a bytes object, one by
one or many at once. All of it compiled.
"""

from __future__ import annotations

import numpy as np
from numba import types

from pario.format.layout import F_BIGDATA, F_DUPDATA, P_OVERFLOW
from pario.kernels import nodes
from pario.kernels.calls import as_bytes
from pario.kernels.jit import inner
from pario.kernels.nodes import BIG, FILE_BYTES, HEADER, PAGE_SIZE, VERSION, WORD, u16, u32
from pario.lmdb import abi, capi
from pario.lmdb.capi import as_words, intc, intp, pages_of, uintp
from pario.lmdb.moves import dup_path, dup_tree, enter, node_of
from pario.lmdb.pages import (
    check_snapshot,
    data_at,
    error,
    fail,
    from_copy,
    moved,
    page_at,
    pass_gate,
    read_failed,
    read_of_snapshot,
    read_waiting,
    try_now,
)

#: Values with at most this many bytes between them are read by one call, of at most this many bytes and vectors.
GAP_BYTES = 16 << 10
RUN_BYTES = 4 << 20
VECTORS = 1024


@inner
def _run_of(g, at, nbytes, pgno):  # type: ignore[no-untyped-def]
    """First page of the overflow run whose place stands at pool[at], inside the file; -1: an error is noted."""
    run = nodes.check_run(pages_of(g), at, nbytes, g)
    if run < 0:
        fail(g, abi.DAMAGED, pgno, pgno * g[PAGE_SIZE], 0, 0, 0)
        return np.int64(-1)
    start = run * g[PAGE_SIZE]
    if start + g[HEADER] + nbytes > g[FILE_BYTES]:
        fail(g, abi.SHORT, run, start, g[HEADER] + nbytes, max(g[FILE_BYTES] - start, 0), 0)
        return np.int64(-1)
    return run


@inner
def _stamp_of(g, at):  # type: ignore[no-untyped-def]
    """(transaction, pages) of the overflow run whose place stands at pool[at]; zeros where formats have none."""
    if g[VERSION] != 3:
        return np.int64(0), np.int64(0)
    pool = pages_of(g)
    return nodes.word(pool, at + g[WORD], g), nodes.word(pool, at + 2 * g[WORD], g)


@inner
def _right_header(g, header, at, run, nbytes, txnid, pages):  # type: ignore[no-untyped-def]
    """Does an overflow run for `nbytes`, with this stamp, begin with these bytes?"""
    h = at + g[HEADER]
    if nodes.word(header, at, g) != run or u16(header, h - 6, g[BIG]) != P_OVERFLOW:
        return False
    if u32(header, h - 4, g[BIG]) * g[PAGE_SIZE] < g[HEADER] + nbytes:
        return False
    return g[VERSION] != 3 or (nodes.word(header, at + g[WORD], g) == txnid and u32(header, h - 4, g[BIG]) == pages)


@inner
def _bytes_of(g, start, nbytes):  # type: ignore[no-untyped-def]
    """A bytes object with what stands at this place of the pool; 0: an error is raised."""
    return capi.bytes_new(uintp(g[abi.POOL] + start), intp(nbytes))


@inner
def _long_value(g, run, nbytes, txnid, pages):  # type: ignore[no-untyped-def]
    """A bytes object with the value of an overflow run: one read, straight into it. 0: an error is noted or raised."""
    value = capi.bytes_new(uintp(0), intp(nbytes))
    if value == 0:
        g[abi.ERROR] = abi.OK
        return value
    scratch = capi.scratch_memory()
    vectors = as_words(scratch, 4)
    vectors[0], vectors[1] = scratch + 32, g[HEADER]
    vectors[2], vectors[3] = intp(capi.bytes_start(value)), nbytes
    status = read_of_snapshot(g, scratch, 2, g[HEADER] + nbytes, run * g[PAGE_SIZE])
    if status == abi.OK and not _right_header(g, as_bytes(scratch + 32, 32), 0, run, nbytes, txnid, pages):
        status = fail(g, abi.BAD_RUN, run, run * g[PAGE_SIZE], nbytes, txnid, pages)
    if status != abi.OK:
        capi.decref(value)
        return uintp(0)
    return value


@inner
def node_value(g, at, pgno, job):  # type: ignore[no-untyped-def]
    """The value of the node at this place of the pool, of leaf page `pgno`; 0: an error is noted or raised.

    job : address of i64[JOB_WORDS]: a long value is not read, but noted there; 0: it is read
    """
    pool = pages_of(g)
    nbytes, flags = u32(pool, at, g[BIG]), u16(pool, at + 4, g[BIG])
    data = data_at(pool, at, g)
    if not flags & F_BIGDATA:
        return _bytes_of(g, data, nbytes)
    run = _run_of(g, data, nbytes, pgno)
    if run < 0:
        return uintp(0)
    txnid, pages = _stamp_of(g, data)
    if job == 0:
        return _long_value(g, run, nbytes, txnid, pages)
    value = capi.bytes_new(uintp(0), intp(nbytes))
    if value == 0:
        g[abi.ERROR] = abi.OK
    else:
        noted = as_words(job, abi.JOB_WORDS)
        noted[0], noted[1], noted[2], noted[3], noted[4] = run, nbytes, intp(capi.bytes_start(value)), txnid, pages
    return value


@inner
def failed(g):  # type: ignore[no-untyped-def]
    """What to return after a 0: the noted error, or 0 again where Python has raised one (out of memory)."""
    return error(g) if g[abi.ERROR] != abi.OK else uintp(0)


@inner
def _key_of(g, handle, c):  # type: ignore[no-untyped-def]
    """The key where the cursor stands, as a bytes object; 0: an error is noted or raised."""
    at = node_of(g, handle, c)
    if at < 0:
        return uintp(0)
    pool = pages_of(g)
    return _bytes_of(g, at + 8, u16(pool, at + 6, g[BIG]))


@inner
def value_of(g, handle, c, job):  # type: ignore[no-untyped-def]
    """The value where the cursor stands, as a bytes object; 0: an error is noted or raised. job : see `node_value`"""
    if not c[abi.C_DUPS]:
        at = node_of(g, handle, c)
        return node_value(g, at, c[abi.C_PATH + handle[abi.DEPTH] - 1], job) if at >= 0 else uintp(0)
    tree, path = dup_tree(c), dup_path(c)
    level = tree[abi.DEPTH] - 1
    o = page_at(g, path[level], level, tree)
    item = path[abi.LEVELS + level]
    if o < 0:
        return uintp(0)
    pool = pages_of(g)
    if not 0 <= item < nodes.count(pool, o, g):
        moved(g)
        return uintp(0)
    start, nbytes = nodes.key_span(pool, o, item, g)
    return _bytes_of(g, start, nbytes)


@inner
def _plan_run(g, jobs, first, headers, junk, vectors):  # type: ignore[no-untyped-def]
    """Vectors for the values from `first` on that one call reads. Returns (the one after, vectors, bytes)."""
    size, header = g[PAGE_SIZE], g[HEADER]
    start = jobs[first, 0] * size
    end = start
    i, m = first, 0
    while i < len(jobs):
        run_at, nbytes = jobs[i, 0] * size, jobs[i, 1]
        gap = run_at - end
        after = run_at + header + nbytes
        if i > first and (gap < 0 or gap > GAP_BYTES or m + 3 > VECTORS or after - start > RUN_BYTES):
            break
        if gap > 0:
            vectors[2 * m], vectors[2 * m + 1] = junk, gap
            m += 1
        vectors[2 * m], vectors[2 * m + 1] = headers + 32 * i, header
        vectors[2 * m + 2], vectors[2 * m + 3] = jobs[i, 2], nbytes
        m += 2
        end = after
        i += 1
    return i, m, end - start


@inner
def fill_values(g, jobs, failure):  # type: ignore[no-untyped-def]
    """Read values to where they belong, neighbours by one call. Needs no lock, touches no Python object.

    jobs : i64[m, JOB_WORDS], ascending by page
    failure : i64[4] = (offset, bytes there, errno, bytes wanted); otherwise (of a BAD_RUN its job, whether the file was
        read, -, -)

    What is in the node's copy or in the page cache is read first. Then the kernel is asked for all the rest at once, so
    that the storage has many reads to work on, and the rest is read. Returns OK, SHORT, FAILED or BAD_RUN.
    """
    n = len(jobs)
    size = g[PAGE_SIZE]
    headers = np.empty(32 * n, np.uint8)
    junk = np.empty(GAP_BYTES, np.uint8)
    vectors = np.empty(2 * VECTORS, np.int64)
    late = np.empty(n, np.int64)
    m_late = 0
    headers_at, junk_at, vectors_at = headers.ctypes.data, junk.ctypes.data, vectors.ctypes.data
    first = 0
    file_read = 0
    while first < n:
        after, m, nbytes = _plan_run(g, jobs, first, headers_at, junk_at, vectors)
        start = jobs[first, 0] * size
        if not from_copy(g, vectors_at, m, nbytes, start):
            file_read = 1
            # To ask for it would already start its read: behind a gate run by run.
            if g[abi.GATE] != 0 or not (g[abi.NOWAIT] and try_now(g, vectors_at, m, nbytes, start)):
                late[m_late] = first
                m_late += 1
        first = after
    if m_late > 1 and g[abi.GATE] == 0:
        for i in range(m_late):
            after, m, nbytes = _plan_run(g, jobs, late[i], headers_at, junk_at, vectors)
            start = jobs[late[i], 0] * size
            capi.fadvise(intc(g[abi.FD]), types.int64(start), types.int64(nbytes), intc(capi.WILLNEED))
    for i in range(m_late):
        after, m, nbytes = _plan_run(g, jobs, late[i], headers_at, junk_at, vectors)
        start = jobs[late[i], 0] * size
        if g[abi.GATE] != 0 and g[abi.NOWAIT] and try_now(g, vectors_at, m, nbytes, start):
            continue
        g[abi.WAITED] += 1
        if not pass_gate(g, nbytes):
            return abi.INTERRUPTED
        if not read_waiting(g, vectors_at, m, nbytes, start, failure):
            failure[3] = nbytes
            return abi.FAILED if failure[2] else abi.SHORT
    failure[1] = file_read
    # Numba frees an array after its last use, and does not count its address: until here the system has written to it.
    failure[2] = 0 * len(junk)
    for i in range(n):
        if not _right_header(g, headers, 32 * i, jobs[i, 0], jobs[i, 1], jobs[i, 3], jobs[i, 4]):
            failure[0] = i
            return abi.BAD_RUN
    return abi.OK


@inner
def read_values(g, jobs):  # type: ignore[no-untyped-def]
    """Fill the noted values, ascending by page, with the interpreter's lock held before and after.
    jobs : i64[m, JOB_WORDS]"""
    if len(jobs) == 0:
        return abi.OK
    if np.any(jobs[1:, 0] < jobs[:-1, 0]):
        jobs = jobs[np.argsort(jobs[:, 0])]
    failure = as_words(capi.scratch_memory(), 4)
    thread = capi.save_thread()
    status = fill_values(g, jobs, failure)
    capi.restore_thread(thread)
    return values_read(g, jobs[failure[0] if status == abi.BAD_RUN else 0], status, failure)


@inner
def values_read(g, job, status, failure):  # type: ignore[no-untyped-def]
    """The status of a reading of values, after the look at the snapshot. job : what a BAD_RUN is about"""
    if status == abi.INTERRUPTED:
        return fail(g, abi.INTERRUPTED, 0, 0, 0, 0, 0)
    if status in (abi.FAILED, abi.SHORT):
        return read_failed(g, failure, failure[3])
    if failure[1] != 0 and check_snapshot(g) != abi.OK:
        return g[abi.ERROR]
    if status == abi.BAD_RUN:
        return fail(g, abi.BAD_RUN, job[0], job[0] * g[PAGE_SIZE], job[1], job[3], job[4])
    return abi.OK


@inner
def _pair(g, key, value):  # type: ignore[no-untyped-def]
    """(key, value), which are given away; 0 if one of them is 0."""
    pair = uintp(0)
    if key != 0 and value != 0:
        pair = capi.tuple_new(intp(2))
        if pair == 0:
            g[abi.ERROR] = abi.OK
    if pair == 0:
        if key != 0:
            capi.decref(key)
        if value != 0:
            capi.decref(value)
        return pair
    capi.tuple_set(pair, intp(0), key)
    capi.tuple_set(pair, intp(1), value)
    return pair


@inner
def node_item(g, at, pgno, what, job):  # type: ignore[no-untyped-def]
    """Key, value or both of the node at this place of the pool, of leaf page `pgno`. job : see `node_value`"""
    if what == abi.VALUE:
        return node_value(g, at, pgno, job)
    key = _bytes_of(g, at + 8, u16(pages_of(g), at + 6, g[BIG]))
    if what == abi.KEY or key == 0:
        return key
    return _pair(g, key, node_value(g, at, pgno, job))


@inner
def item_of(g, handle, c, what, job):  # type: ignore[no-untyped-def]
    """The key, the value or both where the cursor stands; 0: an error is noted or raised."""
    if what == abi.KEY:
        return _key_of(g, handle, c)
    if what == abi.VALUE:
        return value_of(g, handle, c, job)
    key = _key_of(g, handle, c)
    if key == 0:
        return key
    return _pair(g, key, value_of(g, handle, c, job))


@inner
def item_in_leaf(g, handle, o, i, what, job):  # type: ignore[no-untyped-def]
    """Key, value (the first duplicate) or both of item i of the leaf that starts here in the pool; 0: an error is noted
    or raised. job : see `node_value`"""
    pool = pages_of(g)
    at, pgno = nodes.node_at(pool, o, i, g), nodes.word(pool, o, g)
    if u16(pool, at + 4, g[BIG]) & F_DUPDATA:
        return _first_dup(g, handle, pgno, i, what, job)
    return node_item(g, at, pgno, what, job)


@inner
def _first_dup(g, handle, pgno, i, what, job):  # type: ignore[no-untyped-def]
    """As `item_in_leaf`, of a key with duplicates."""
    c = as_words(capi.scratch_memory(), abi.CURSOR_WORDS)
    level = handle[abi.DEPTH] - 1
    c[abi.C_PATH + level], c[abi.C_PATH + abi.LEVELS + level] = pgno, i
    return item_of(g, handle, c, what, job) if enter(g, handle, c, False) == abi.OK else uintp(0)
