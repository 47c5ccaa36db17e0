"""Reading, and the cache of checked pages. All of it compiled; see engine.py for the rules."""

from __future__ import annotations

from errno import EINTR, EINVAL, ENOSYS, EOPNOTSUPP

import numpy as np
from numba import carray, types

from pario.format.layout import F_DUPDATA, NUM_METAS, P_BRANCH, P_LEAF, P_LEAF2
from pario.kernels import nodes, reads
from pario.kernels.calls import as_bytes
from pario.kernels.fence import full_fence
from pario.kernels.jit import inner
from pario.kernels.pack import copy_bytes
from pario.lmdb import abi, capi
from pario.lmdb.capi import as_words, intc, intp, pages_of, uintp

#: A place of the cache without a page.
EMPTY_PAGE = -1
#: A page in the cache survives this many turns of the clock without use.
LIVES_LEAF, LIVES_BRANCH = 1, 8
#: Reads of up to this many bytes are tried with the interpreter's lock held (some 5 us of copying).
SHORT_READ = 32 << 10


@inner
def fail(g, code, page, offset, a, b, c):  # type: ignore[no-untyped-def]
    """Noted in the store, and taken from there before the interpreter's lock is released again."""
    g[abi.ERROR], g[abi.ERROR + 1], g[abi.ERROR + 2] = code, page, offset
    g[abi.ERROR + 3], g[abi.ERROR + 4], g[abi.ERROR + 5] = a, b, c
    return code


@inner
def error(g):  # type: ignore[no-untyped-def]
    """A new bytearray with the noted error."""
    return capi.bytearray_new(uintp(g.ctypes.data + 8 * abi.ERROR), intp(8 * abi.ERROR_WORDS))


@inner
def plain_error(code):  # type: ignore[no-untyped-def]
    words = as_words(capi.scratch_memory(), abi.ERROR_WORDS)
    words[:] = 0
    words[0] = code
    return capi.bytearray_new(uintp(words.ctypes.data), intp(8 * abi.ERROR_WORDS))


@inner
def _errno():  # type: ignore[no-untyped-def]
    return np.int64(carray(reads.errno_location(), 1)[0])


@inner
def try_now(g, vectors, m, nbytes, offset):  # type: ignore[no-untyped-def]
    """Read if all of it is in the page cache, without waiting. vectors : (address, bytes) x m

    With limits such a read must not start another one, which a fast disk may have ended before the kernel looks."""
    if g[abi.GATE] != 0:
        there = reads.cached_whole(g[abi.FD], offset, nbytes, as_words(vectors, 1)[0])
        g[abi.NOWAIT] = there >= 0
        if there <= 0:
            return False
    got = reads.preadv2(intc(g[abi.FD]), uintp(vectors), intc(m), types.int64(offset), intc(capi.RWF_NOWAIT))
    if got < 0:
        errno = _errno()
        if errno in (EOPNOTSUPP, ENOSYS, EINVAL):
            g[abi.NOWAIT] = 0
    return got == nbytes


@inner
def pass_gate(g, nbytes):  # type: ignore[no-untyped-def]
    """Returns when a read of this may be asked of the store, with or without the interpreter's lock. False: a signal's
    handler has raised."""
    if g[abi.GATE] == 0:
        return True
    lock = capi.take_lock()
    arguments = as_words(capi.scratch_memory(), 1)
    size, done, may = capi.int_new(intp(nbytes)), uintp(0), True
    if size != 0:
        arguments[0] = intp(size)
        done = capi.vectorcall(uintp(g[abi.GATE]), uintp(arguments.ctypes.data), uintp(1), uintp(0))
        capi.decref(size)
    if done != 0:
        may = capi.is_true(done) != 0
        capi.decref(done)
    else:  # no memory, say, for the call: then it is not counted
        capi.clear()
    capi.give_lock(lock)
    return may


@inner
def read_waiting(g, vectors, m, nbytes, offset, failure):  # type: ignore[no-untyped-def]
    """Read, whatever it takes; touches no Python object. failure : i64[3], (offset, bytes there, errno)"""
    fd = intc(g[abi.FD])
    got = capi.preadv(fd, uintp(vectors), intc(m), types.int64(offset))
    if got == nbytes:
        return True
    # Interrupted, cut short, or refused: piece by piece, to see which.
    pairs = as_words(vectors, 2 * m)
    at = np.int64(offset)
    for i in range(m):
        done = np.int64(0)
        while done < pairs[2 * i + 1]:
            got = reads.pread(fd, uintp(pairs[2 * i] + done), uintp(pairs[2 * i + 1] - done), types.int64(at + done))
            if got > 0:
                done += got
                continue
            errno = _errno() if got < 0 else 0
            if errno != EINTR:
                failure[0], failure[1], failure[2] = offset, at + done - offset, errno
                return False
        at += done
    return True


@inner
def read(g, vectors, m, nbytes, offset):  # type: ignore[no-untyped-def]
    """Read with the interpreter's lock held, releasing it where that may take long. OK, SHORT or FAILED."""
    if nbytes <= SHORT_READ and g[abi.NOWAIT] and try_now(g, vectors, m, nbytes, offset):
        return abi.OK
    failure = as_words(capi.scratch_memory(), 3)
    thread = capi.save_thread()
    # What memory holds does not count.
    done = g[abi.GATE] != 0 and nbytes > SHORT_READ and g[abi.NOWAIT] != 0 and try_now(g, vectors, m, nbytes, offset)
    may = done or pass_gate(g, nbytes)
    if may and not done:
        done = read_waiting(g, vectors, m, nbytes, offset, failure)
    capi.restore_thread(thread)
    if not may:
        return fail(g, abi.INTERRUPTED, 0, offset, 0, 0, 0)
    if done:
        return abi.OK
    return read_failed(g, failure, nbytes)


@inner
def copy_state(g, offset, nbytes):  # type: ignore[no-untyped-def]
    """A number that stays the same as long as the node's copy holds these bytes; 0: it does not hold all of them."""
    if g[abi.COPY_STATES] == 0 or offset < 0 or offset + nbytes > g[nodes.FILE_BYTES]:
        return np.int64(0)
    first, last = offset >> g[abi.CHUNK_BITS], (offset + nbytes - 1) >> g[abi.CHUNK_BITS]
    states = as_words(g[abi.COPY_STATES], last + 1)
    full_fence()
    total = np.int64(0)
    for chunk in range(first, last + 1):
        if states[chunk] & 1 == 0:
            return np.int64(0)
        total += states[chunk]
    full_fence()
    return total


@inner
def from_copy(g, vectors, m, nbytes, offset):  # type: ignore[no-untyped-def]
    """Read from the node's copy, which was compared with our snapshot when it was made. False: it does not hold all."""
    state = copy_state(g, offset, nbytes)
    if state == 0:
        return False
    got = capi.preadv(intc(g[abi.COPY_FD]), uintp(vectors), intc(m), types.int64(offset))
    return got == nbytes and copy_state(g, offset, nbytes) == state


@inner
def read_failed(g, failure, nbytes):  # type: ignore[no-untyped-def]
    if failure[2]:
        return fail(g, abi.FAILED, failure[0] // g[nodes.PAGE_SIZE], failure[0], nbytes, failure[2], 0)
    return fail(g, abi.SHORT, failure[0] // g[nodes.PAGE_SIZE], failure[0], nbytes, failure[1], 0)


@inner
def check_snapshot(g):  # type: ignore[no-untyped-def]
    """OK while no writer can have touched a page of our snapshot."""
    scratch = capi.scratch_memory()
    nbytes = g[abi.META_BYTES]
    # With the lock held if reads do not wait: nothing is as surely in the page cache as this page.
    got = intp(-1)
    if g[abi.NOWAIT]:
        got = reads.pread(intc(g[abi.FD]), uintp(scratch + 16), uintp(nbytes), types.int64(g[abi.META_AT]))
    if got != nbytes:
        vectors = as_words(scratch, 2)
        vectors[0], vectors[1] = scratch + 16, nbytes
        status = read(g, scratch, 1, nbytes, g[abi.META_AT])
        if status != abi.OK:
            return status
    if capi.memcmp(uintp(scratch + 16), uintp(g[abi.META]), uintp(nbytes)) != 0:
        return fail(g, abi.OVERTAKEN, 0, g[abi.META_AT], 0, 0, 0)
    return abi.OK


@inner
def read_of_snapshot(g, vectors, m, nbytes, offset):  # type: ignore[no-untyped-def]
    """Read bytes that are those of our snapshot: from the node's copy, or like `read`, and then the look at the
    snapshot. OK, SHORT, FAILED or OVERTAKEN."""
    if g[abi.COPY_STATES] != 0:
        if nbytes <= SHORT_READ:
            done = from_copy(g, vectors, m, nbytes, offset)
        else:
            thread = capi.save_thread()
            done = from_copy(g, vectors, m, nbytes, offset)
            capi.restore_thread(thread)
        if done:
            return abi.OK
    status = read(g, vectors, m, nbytes, offset)
    return check_snapshot(g) if status == abi.OK else status


@inner
def _hash(pgno, mask):  # type: ignore[no-untyped-def]
    return ((pgno * 0x9E3779B1) >> 12) & mask


@inner
def cached(g, pgno):  # type: ignore[no-untyped-def]
    """Slot of a page, or -1."""
    mask = g[abi.MASK]
    table, page_of = as_words(g[abi.TABLE], mask + 1), as_words(g[abi.PAGE_OF], g[abi.SLOTS])
    i = _hash(pgno, mask)
    while table[i] != 0:
        slot = table[i] - 1
        if page_of[slot] == pgno:
            return slot
        i = (i + 1) & mask
    return np.int64(-1)


@inner
def _forget(g, slot):  # type: ignore[no-untyped-def]
    """Take a page out of the table; what stood behind it in its chain moves up."""
    mask = g[abi.MASK]
    table, page_of = as_words(g[abi.TABLE], mask + 1), as_words(g[abi.PAGE_OF], g[abi.SLOTS])
    i = _hash(page_of[slot], mask)
    while table[i] != slot + 1:
        i = (i + 1) & mask
    page_of[slot] = EMPTY_PAGE
    hole = i
    while True:
        i = (i + 1) & mask
        if table[i] == 0:
            break
        home = _hash(page_of[table[i] - 1], mask)
        if ((i - home) & mask) >= ((i - hole) & mask):
            table[hole] = table[i]
            hole = i
    table[hole] = 0


@inner
def _keep(g, pgno, page):  # type: ignore[no-untyped-def]
    """Copy a sound page into the cache; returns its slot."""
    slot = cached(g, pgno)
    if slot >= 0:
        return slot
    page_of, lives = as_words(g[abi.PAGE_OF], g[abi.SLOTS]), as_bytes(g[abi.LIVES], g[abi.SLOTS])
    while True:
        slot = g[abi.HAND]
        g[abi.HAND] = slot + 1 if slot + 1 < g[abi.SLOTS] else 0
        if page_of[slot] == EMPTY_PAGE:
            break
        if lives[slot] == 0:
            _forget(g, slot)
            break
        lives[slot] -= 1
    mask = g[abi.MASK]
    table = as_words(g[abi.TABLE], mask + 1)
    i = _hash(pgno, mask)
    while table[i] != 0:
        i = (i + 1) & mask
    table[i] = slot + 1
    page_of[slot] = pgno
    copy_bytes(pages_of(g), slot * g[nodes.PAGE_SIZE], page, 0, g[nodes.PAGE_SIZE])
    return slot


@inner
def _page(g, pgno, rules):  # type: ignore[no-untyped-def]
    """Where branch or leaf page `pgno` starts in the pool, checked; read if need be. -1: an error is noted.

    rules : what the pages of its tree must obey
    What an earlier call returned is void after this one.
    """
    slot = cached(g, pgno)
    if slot < 0:
        size = g[nodes.PAGE_SIZE]
        if pgno < NUM_METAS or pgno > g[nodes.LAST_PGNO]:
            fail(g, abi.DAMAGED, pgno, pgno * size, 0, 0, 0)
            return np.int64(-1)
        if (pgno + 1) * size > g[nodes.FILE_BYTES]:
            fail(g, abi.SHORT, pgno, pgno * size, size, max(g[nodes.FILE_BYTES] - pgno * size, 0), 0)
            return np.int64(-1)
        page = np.empty(size, np.uint8)
        scratch = capi.scratch_memory()
        vectors = as_words(scratch, 2)
        vectors[0], vectors[1] = page.ctypes.data, size
        if read_of_snapshot(g, scratch, 1, size, pgno * size) != abi.OK:
            return np.int64(-1)
        found = nodes.check_page(page, 0, pgno, rules, g)
        if found != nodes.SOUND:
            fail(g, abi.DAMAGED, pgno, pgno * size, found, 0, 0)
            return np.int64(-1)
        slot = _keep(g, pgno, page)
    o = slot * g[nodes.PAGE_SIZE]
    branch = pages_of(g)[o + g[nodes.HEADER] - (5 if g[nodes.BIG] else 6)] & P_BRANCH
    as_bytes(g[abi.LIVES], g[abi.SLOTS])[slot] = LIVES_BRANCH if branch else LIVES_LEAF
    return o


@inner
def data_at(pool, at, g):  # type: ignore[no-untyped-def]
    """Where the data of the leaf node at `at` starts in the pool."""
    k = nodes.u16(pool, at + 6, g[nodes.BIG])
    return at + 8 + k + (k & 1 if g[nodes.VERSION] == 3 else 0)


@inner
def moved(g):  # type: ignore[no-untyped-def]
    """The cursor's numbers contradict its page: two threads move it at once."""
    fail(g, abi.UNPOSITIONED, 0, 0, 0, 0, 0)
    return np.int64(-1)


@inner
def _sub_page(g, pgno, tree):  # type: ignore[no-untyped-def]
    """Where the sub-page of an item of this leaf page starts in the pool; -1: an error is noted."""
    o = _page(g, pgno, tree[abi.RULES])
    if o < 0:
        return o
    pool = pages_of(g)
    if tree[abi.SUB_OF] >= nodes.count(pool, o, g):
        return moved(g)
    at = nodes.node_at(pool, o, tree[abi.SUB_OF], g)
    return np.int64(data_at(pool, at, g)) if nodes.u16(pool, at + 4, g[nodes.BIG]) == F_DUPDATA else moved(g)


@inner
def page_at(g, pgno, level, tree):  # type: ignore[no-untyped-def]
    """Like `_page`, and it is of the kind that belongs at this level (0 = root) of a tree (abi.TREE_WORDS)."""
    if pgno < 0:
        return _sub_page(g, -1 - pgno, tree)
    depth, pad = tree[abi.DEPTH], tree[abi.PAD]
    o = _page(g, pgno, tree[abi.RULES])
    if o < 0:
        return o
    pool = pages_of(g)
    flags = nodes.u16(pool, o + g[nodes.HEADER] - 6, g[nodes.BIG])
    if level < depth - 1:
        fits = flags == P_BRANCH
    elif pad:
        fits = flags == P_LEAF | P_LEAF2 and nodes.u16(pool, o + g[nodes.HEADER] - 8, g[nodes.BIG]) == pad
    else:
        fits = flags == P_LEAF
    if not fits:
        fail(g, abi.MISPLACED, pgno, pgno * g[nodes.PAGE_SIZE], level, depth, pad)
        return np.int64(-1)
    return o
