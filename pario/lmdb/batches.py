"""Many items by one call: lists of what a cursor passes, and the values of many keys. Compiled; see engine.py."""

from __future__ import annotations

import numpy as np

from pario.format.layout import F_DUPDATA
from pario.kernels.calls import as_bytes
from pario.kernels.jit import inner, kernel
from pario.kernels.nodes import BIG, PAGE_SIZE, count, node_at, u16
from pario.lmdb import abi, capi
from pario.lmdb.capi import as_words, intp, pages_of
from pario.lmdb.engine import argument, find_in_leaf, opened
from pario.lmdb.moves import go
from pario.lmdb.pages import error, fail, moved, page_at, plain_error
from pario.lmdb.values import failed, fill_values, item_in_leaf, item_of, node_item, read_values, values_read


@inner
def _kept(g, found, thing):  # type: ignore[no-untyped-def]
    """Give an object to a list; CLOSED: it is 0, an error is noted or raised."""
    if thing == 0:
        return abi.CLOSED
    refused = capi.list_append(found, thing)
    capi.decref(thing)
    if refused:
        g[abi.ERROR] = abi.OK
    return abi.CLOSED if refused else abi.OK


def collect(cursor_at, op, started, most, most_bytes, what):  # type: ignore[no-untyped-def]
    """The next items as a list, at most `most`, stopping after `most_bytes` of values; [] at the end. Or an error.

    started : 0 = the first is the one where the cursor stands; nothing comes if that is nowhere
    The cursor stands on the last item returned. After an error its place is undefined.
    """
    g, handle, c = opened(cursor_at)
    if len(g) == 0:
        return plain_error(abi.CLOSED)
    found = capi.list_new(intp(0))
    if found == 0:
        return found
    c[abi.C_SCAN] = most > 1
    jobs = np.full((most if what & abi.VALUE else 0, abi.JOB_WORDS), -1, np.int64)
    jobs_at = jobs.ctypes.data
    n, m, total = 0, 0, 0
    status = abi.OK
    level = handle[abi.DEPTH] - 1
    step = 1 if op in (abi.NEXT, abi.NEXT_DUP, abi.NEXT_NODUP) else -1
    pgno, o, items, at = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    pool = pages_of(g)
    while n < most and total < most_bytes:
        if n == 0 and not c[abi.C_VALID]:
            break
        if n > 0 or started:
            # Without duplicates, the items of one leaf are one step apart. Its page stays where it is, unless the
            # making of a tuple set off a garbage collection, and that a destructor that reads.
            i = c[abi.C_PATH + abi.LEVELS + level] + step
            if o and 0 <= i < items and as_words(g[abi.PAGE_OF], g[abi.SLOTS])[o // g[PAGE_SIZE]] == pgno:
                c[abi.C_PATH + abi.LEVELS + level] = i
            else:
                o = np.int64(0)
                end = c[abi.C_END]
                status = go(g, handle, c, op)
                if status != abi.OK:
                    if n > 0:
                        c[abi.C_END] = end  # nobody has asked for what comes after the last item yet
                    break
        if not handle[abi.DUPSORT]:
            if o == 0:
                pgno = c[abi.C_PATH + level]
                o = page_at(g, pgno, level, handle)
                if o < 0:
                    status = abi.CLOSED
                    break
                items = count(pool, o, g)
                if not 0 <= c[abi.C_PATH + abi.LEVELS + level] < items:
                    moved(g)
                    status = abi.CLOSED
                    break
                # The first page of the pool starts at 0, which here means "none": then each item takes the long way.
            at = node_at(pool, o, c[abi.C_PATH + abi.LEVELS + level], g)
            if u16(pool, at + 4, g[BIG]) & F_DUPDATA:
                status = fail(g, abi.DAMAGED, pgno, pgno * g[PAGE_SIZE], 0, 0, 0)
                break
            thing = node_item(g, at, pgno, what, jobs_at + 8 * abi.JOB_WORDS * m)
        else:
            thing = item_of(g, handle, c, what, jobs_at + 8 * abi.JOB_WORDS * m)
        status = _kept(g, found, thing)
        if status != abi.OK:
            break
        if what & abi.VALUE and jobs[m, 1] >= 0:
            total += jobs[m, 1]
            m += 1
        n += 1
    c[abi.C_SCAN] = 0
    if status <= abi.MISSING:
        c[abi.C_VALID] = n > 0
        status = read_values(g, jobs[:m])
    if status > abi.MISSING:
        c[abi.C_VALID] = 0
        capi.decref(found)
        return failed(g)
    return found


def find_many(cursor_at, keys, what, jobs_at):  # type: ignore[no-untyped-def]
    """[(key, value) or key, ...] of those of a list of keys that there are; long values are not read, but noted.

    jobs_at : address of i64[1 + JOB_WORDS * keys]: how many are noted, and they
    An error if something is wrong or a key is not a bytes object. The cursor stays where it is.
    """
    g, handle, _ = opened(cursor_at)
    if len(g) == 0:
        return plain_error(abi.CLOSED)
    n = capi.list_size(keys)
    found = capi.list_new(intp(0))
    if found == 0:
        return found
    noted = as_words(jobs_at, 1 + abi.JOB_WORDS * n)
    noted[0] = m = 0
    status = abi.OK
    for i in range(n):
        key_at, nbytes = argument(capi.list_item(keys, intp(i)))
        if nbytes < 0:
            status = fail(g, abi.NOT_BYTES, 0, 0, 0, 0, 0)
            break
        status, o, item = find_in_leaf(g, handle, as_bytes(key_at, nbytes))
        if status == abi.MISSING:
            continue
        if status != abi.OK:
            break
        job = 1 + abi.JOB_WORDS * m
        noted[job + 1] = -1
        status = _kept(g, found, item_in_leaf(g, handle, o, item, what, jobs_at + 8 * job))
        if status != abi.OK:
            break
        if noted[job + 1] >= 0:
            m += 1
    if status > abi.MISSING:
        capi.decref(found)
        return failed(g)
    noted[0] = m
    return found


def after_values(store_at, jobs_at, status, failure_at):  # type: ignore[no-untyped-def]
    """None of other threads' readings of values (`fill`) found something wrong: True. Or an error."""
    g = as_words(store_at, abi.STORE_WORDS)
    failure = as_words(failure_at, 4)
    which = failure[0] if status == abi.BAD_RUN else 0
    job = as_words(jobs_at + 8 * abi.JOB_WORDS * which, abi.JOB_WORDS)
    return capi.bool_new(1) if values_read(g, job, status, failure) == abi.OK else error(g)


@kernel
def fill(store_at, jobs, failure):  # type: ignore[no-untyped-def]
    """`fill_values` for Python's threads: runs without the interpreter's lock."""
    return fill_values(as_words(store_at, abi.STORE_WORDS), jobs, failure)
