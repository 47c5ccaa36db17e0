"""The part that must be fast: keys in, Python objects out, in one call each.

A call from Python to a compiled function costs 0.1 us, and so does every Python object that is made on the way. So the
functions at the end of this file are compiled once and called with the interpreter's lock held: they search cached
pages, read what is missing with libc's pread, and make the bytes objects themselves, into which the values are read
directly. Nothing is copied twice.

* The lock is released around every read that may wait for the storage. Short reads are first tried with RWF_NOWAIT,
  which returns at once when the bytes are not in the kernel's page cache: a warm read keeps the lock, a cold one does
  not.
* While the lock was released, other threads may have moved pages in the cache: no place in the cache is used across
  a read.
* After every read, and before anything of it is trusted, the meta page of our snapshot is compared with what it was
  when the snapshot was taken: transaction S + 2 is the first to write it, S + 3 the first to reuse a page of S. A page
  that passed is a page of the snapshot for good and may stay in the cache.

The arrays of words (i64) that describe a file, a database, a transaction and a cursor are drawn below. Errors travel as
a bytearray of ERROR_WORDS words, which no other result is.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import NativeValue, box, intrinsic, models, register_model, unbox

from pario.kernels.jit import c_function, entry, inner, kernel
from pario.kernels.nodes import (
    BIG,
    FILE,
    FILE_BYTES,
    HEADER,
    LAST_PGNO,
    PAGE_SIZE,
    SOUND,
    VERSION,
    WORD,
    check_page,
    check_run,
    child,
    compare,
    count,
    key_span,
    node_at,
    search_branch,
    search_leaf,
    u16,
    u32,
    word,
)
from pario.kernels.pack import copy_bytes

# -- the words ---------------------------------------------------------------------------------------------------------

#: A store: one open file at one snapshot, and its cached pages. The first words are nodes.FILE.
_F = len(FILE)
FD, OPEN, NOWAIT, AHEAD = _F, _F + 1, _F + 2, _F + 3
META_AT, META_BYTES, META = _F + 4, _F + 5, _F + 6
POOL, SLOTS, TABLE, MASK, PAGE_OF, LIVES, HAND = _F + 7, _F + 8, _F + 9, _F + 10, _F + 11, _F + 12, _F + 13
ERROR = _F + 14
ERROR_WORDS = 6
#: Reads, their bytes, and how many of those of values had to wait for the storage.
READS, READ_BYTES, WAITED = ERROR + ERROR_WORDS, ERROR + ERROR_WORDS + 1, ERROR + ERROR_WORDS + 2
#: The other meta page: where it stands in the file, and its bytes when the snapshot was taken (as many as META_BYTES).
OTHER_AT, OTHER = WAITED + 1, WAITED + 2
STORE_WORDS = OTHER + 1
#: A long value to be read: first page of its overflow run, bytes, address; and what the run's header must repeat in
#: format 3, its transaction and pages.
JOB_WORDS = 5

#: A database in a snapshot.
ROOT, DEPTH, DUPSORT, KEY_WAY, KEY_INTEGER, DUP_WAY, DUP_INTEGER = range(7)
RULES, DUP_RULES = 7, 8  # what nodes.check_page is to expect of its pages, and of those of trees of duplicates
HANDLE_WORDS = 9

#: A transaction.
ALIVE, STORE, MAIN = range(3)
TXN_WORDS = 3

#: A cursor: where it stands in its tree, and in the duplicates of the key where it stands.
C_TXN, C_HANDLE = 0, 1
C_SET = 2  # it stands somewhere; else the next move is to the first or last item
C_VALID = 3  # the last move succeeded: there is a key and a value
C_DUPS = 4  # NO_DUPS, SUB_PAGE or DUP_TREE
C_SUB_I = 5  # sub-page: which item
C_END = 6  # a move beyond the last key was tried: the moves to next items fail until the cursor goes elsewhere
C_DUP_ROOT, C_DUP_DEPTH, C_DUP_PAD, C_DUP_ENTRIES = 7, 8, 9, 10
C_SCAN, C_AHEAD_PAGE, C_AHEAD_I = 11, 12, 13  # scanning: leaves below this page are asked for up to here
_LEVELS = 32
C_PAGES, C_ITEMS, C_DUP_PAGES, C_DUP_ITEMS = 16, 16 + _LEVELS, 16 + 2 * _LEVELS, 16 + 3 * _LEVELS
CURSOR_WORDS = 16 + 4 * _LEVELS
NO_DUPS, SUB_PAGE, DUP_TREE = range(3)

#: Bytes of a Python object before its first slot: count of references and type.
OBJECT_BYTES = object.__basicsize__

#: Moves.
(
    FIRST, LAST, NEXT, PREV, NEXT_DUP, PREV_DUP, NEXT_NODUP, PREV_NODUP, FIRST_DUP, LAST_DUP,
    SET_KEY, SET_RANGE, SET_KEY_DUP, SET_RANGE_DUP,
) = range(14)  # fmt: skip

#: What an item is made of.
KEY, VALUE, ITEM = 1, 2, 3

#: Statuses of the functions below; from CLOSED on they are errors: (code, page, offset, a, b, c).
OK, MISSING = 0, 1
CLOSED = 2  # the transaction, cursor or environment is closed
NOT_BYTES = 3  # a key or value that is not a bytes object: make one and call again
EMPTY_KEY = 4  # MDB_BAD_VALSIZE
INCOMPATIBLE = 5  # MDB_INCOMPATIBLE: no duplicates in this database
UNPOSITIONED = 6  # EINVAL
DAMAGED = 7  # page, a = what nodes.check_page found
MISPLACED = 8  # page, a = its level, b = levels of the tree, c = bytes of a LEAF2 item
BAD_RUN = 9  # the overflow run at page, a = bytes of the value, b, c = transaction and pages where it is referred to
SHORT = 10  # offset, a = bytes wanted, b = bytes there
FAILED = 11  # offset, a = bytes wanted, b = errno
OVERTAKEN = 12  # a writer committed twice: the snapshot is not to be trusted any more
NOTED = 13  # the object that tells of an error has been made

_BRANCH, _LEAF, _LEAF2, _OVERFLOW = 0x01, 0x02, 0x20, 0x04
_BIGDATA, _SUBDATA, _DUPDATA = 0x01, 0x02, 0x04
_DUPFIXED, _INTEGERKEY = 0x10, 0x08
_FIRST_PAGE = 2
_EMPTY_PAGE = -1

_EINTR, _EINVAL, _ENOSYS, _EOPNOTSUPP = 4, 22, 38, 95
_RWF_NOWAIT = 8
_WILLNEED = 3
#: Reads of up to this many bytes are tried with the interpreter's lock held (some 5 us of copying).
_SHORT_READ = 32 << 10
#: Values with at most this many bytes between them are read by one call, of at most so many bytes and vectors.
_GAP_BYTES = 16 << 10
_RUN_BYTES = 4 << 20
_VECTORS = 1024
#: A page in the cache survives so many turns of the clock without use.
_LIVES_LEAF, _LIVES_BRANCH = 1, 8
#: Leaves that a scan asks for ahead.
_LEAVES_AHEAD = 64

_intp, _uintp, _intc = types.intp, types.uintp, types.intc
_preadv = types.ExternalFunction("preadv", _intp(_intc, _uintp, _intc, types.int64))
_preadv2 = types.ExternalFunction("preadv2", _intp(_intc, _uintp, _intc, types.int64, _intc))
_pread = types.ExternalFunction("pread", _intp(_intc, _uintp, _uintp, types.int64))
_fadvise = types.ExternalFunction("posix_fadvise", _intc(_intc, types.int64, types.int64, _intc))
_memcmp = types.ExternalFunction("memcmp", _intc(_uintp, _uintp, _uintp))
_memcpy = types.ExternalFunction("memcpy", _uintp(_uintp, _uintp, _uintp))
_errno_location = types.ExternalFunction("__errno_location", types.CPointer(_intc)())
_save_thread = types.ExternalFunction("PyEval_SaveThread", _uintp())
_restore_thread = types.ExternalFunction("PyEval_RestoreThread", types.void(_uintp))
_incref = types.ExternalFunction("Py_IncRef", types.void(_uintp))
_decref = types.ExternalFunction("Py_DecRef", types.void(_uintp))
_clear = types.ExternalFunction("PyErr_Clear", types.void())
_bytes_size = types.ExternalFunction("PyBytes_Size", _intp(_uintp))
_bytes_at = types.ExternalFunction("PyBytes_AsString", _uintp(_uintp))
_bytes_new = types.ExternalFunction("PyBytes_FromStringAndSize", _uintp(_uintp, _intp))
_bytearray_new = types.ExternalFunction("PyByteArray_FromStringAndSize", _uintp(_uintp, _intp))
_bool_new = types.ExternalFunction("PyBool_FromLong", _uintp(types.long_))
_int_new = types.ExternalFunction("PyLong_FromSsize_t", _uintp(_intp))
_list_new = types.ExternalFunction("PyList_New", _uintp(_intp))
_list_append = types.ExternalFunction("PyList_Append", _intc(_uintp, _uintp))
_list_size = types.ExternalFunction("PyList_Size", _intp(_uintp))
_list_item = types.ExternalFunction("PyList_GetItem", _uintp(_uintp, _intp))
_tuple_new = types.ExternalFunction("PyTuple_New", _uintp(_intp))
_tuple_size = types.ExternalFunction("PyTuple_Size", _intp(_uintp))
_int_of = types.ExternalFunction("PyLong_AsSsize_t", _intp(_uintp))
_none_new = types.ExternalFunction("Py_BuildValue", _uintp(_uintp))
_call = types.ExternalFunction("PyObject_Vectorcall", _uintp(_uintp, _uintp, _uintp, _uintp))
_tuple_set = types.ExternalFunction("PyTuple_SetItem", _intc(_uintp, _intp, _uintp))


def _pointer_to(typing_context, address):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.intp), generate


_pointer: Any = intrinsic(_pointer_to)


def _scratch_of(typing_context):  # type: ignore[no-untyped-def]
    """Address of 256 bytes on the stack of the function that asks."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        place = cgutils.alloca_once(builder, ir.ArrayType(ir.IntType(64), 32))
        return builder.ptrtoint(place, ir.IntType(64))

    return types.intp(), generate


_scratch: Any = intrinsic(_scratch_of)


@inner
def _words(address, n):  # type: ignore[no-untyped-def]
    return carray(_pointer(address), (n,), np.int64)


@inner
def _bytes(address, n):  # type: ignore[no-untyped-def]
    return carray(_pointer(address), (n,), np.uint8)


@inner
def _pool(g):  # type: ignore[no-untyped-def]
    return _bytes(g[POOL], g[SLOTS] * g[PAGE_SIZE])


# -- errors ------------------------------------------------------------------------------------------------------------


@inner
def _fail(g, code, page, offset, a, b, c):  # type: ignore[no-untyped-def]
    """Noted in the store, and taken from there before the interpreter's lock is released again."""
    g[ERROR], g[ERROR + 1], g[ERROR + 2] = code, page, offset
    g[ERROR + 3], g[ERROR + 4], g[ERROR + 5] = a, b, c
    return code


@inner
def _error(g):  # type: ignore[no-untyped-def]
    """A new bytearray with the noted error."""
    return _bytearray_new(_uintp(g.ctypes.data + 8 * ERROR), _intp(8 * ERROR_WORDS))


@inner
def _plain_error(code):  # type: ignore[no-untyped-def]
    words = _words(_scratch(), ERROR_WORDS)
    words[:] = 0
    words[0] = code
    return _bytearray_new(_uintp(words.ctypes.data), _intp(8 * ERROR_WORDS))


# -- reading -----------------------------------------------------------------------------------------------------------


@inner
def _errno():  # type: ignore[no-untyped-def]
    return np.int64(carray(_errno_location(), 1)[0])


@inner
def _try_now(g, vectors, m, nbytes, offset):  # type: ignore[no-untyped-def]
    """Read if all of it is in the page cache, without waiting. vectors : (address, bytes) x m"""
    got = _preadv2(_intc(g[FD]), _uintp(vectors), _intc(m), types.int64(offset), _intc(_RWF_NOWAIT))
    if got < 0:
        errno = _errno()
        if errno in (_EOPNOTSUPP, _ENOSYS, _EINVAL):
            g[NOWAIT] = 0
    return got == nbytes


@inner
def _read_waiting(g, vectors, m, nbytes, offset, failure):  # type: ignore[no-untyped-def]
    """Read, whatever it takes; touches no Python object. failure : i64[3], (offset, bytes there, errno)"""
    fd = _intc(g[FD])
    got = _preadv(fd, _uintp(vectors), _intc(m), types.int64(offset))
    if got == nbytes:
        return True
    # Interrupted, cut short, or refused: piece by piece, to see which.
    pairs = _words(vectors, 2 * m)
    at = np.int64(offset)
    for i in range(m):
        done = np.int64(0)
        while done < pairs[2 * i + 1]:
            got = _pread(fd, _uintp(pairs[2 * i] + done), _uintp(pairs[2 * i + 1] - done), types.int64(at + done))
            if got > 0:
                done += got
                continue
            errno = _errno() if got < 0 else 0
            if errno != _EINTR:
                failure[0], failure[1], failure[2] = offset, at + done - offset, errno
                return False
        at += done
    return True


@inner
def _read(g, vectors, m, nbytes, offset):  # type: ignore[no-untyped-def]
    """Read with the interpreter's lock held, releasing it where that may take long. OK, SHORT or FAILED."""
    g[READS] += 1
    g[READ_BYTES] += nbytes
    if nbytes <= _SHORT_READ and g[NOWAIT] and _try_now(g, vectors, m, nbytes, offset):
        return OK
    failure = _words(_scratch(), 3)
    thread = _save_thread()
    done = _read_waiting(g, vectors, m, nbytes, offset, failure)
    _restore_thread(thread)
    if done:
        return OK
    return _read_failed(g, failure, nbytes)


@inner
def _read_failed(g, failure, nbytes):  # type: ignore[no-untyped-def]
    if failure[2]:
        return _fail(g, FAILED, failure[0] // g[PAGE_SIZE], failure[0], nbytes, failure[2], 0)
    return _fail(g, SHORT, failure[0] // g[PAGE_SIZE], failure[0], nbytes, failure[1], 0)


@inner
def _check_snapshot(g):  # type: ignore[no-untyped-def]
    """OK while no writer can have touched a page of our snapshot."""
    scratch = _scratch()
    nbytes = g[META_BYTES]
    # With the lock held if reads do not wait: nothing is as surely in the page cache as this page.
    got = _intp(-1)
    if g[NOWAIT]:
        got = _pread(_intc(g[FD]), _uintp(scratch + 16), _uintp(nbytes), types.int64(g[META_AT]))
    if got != nbytes:
        vectors = _words(scratch, 2)
        vectors[0], vectors[1] = scratch + 16, nbytes
        status = _read(g, scratch, 1, nbytes, g[META_AT])
        if status != OK:
            return status
    if _memcmp(_uintp(scratch + 16), _uintp(g[META]), _uintp(nbytes)) != 0:
        return _fail(g, OVERTAKEN, 0, g[META_AT], 0, 0, 0)
    return OK


# -- the cache of pages ------------------------------------------------------------------------------------------------


@inner
def _hash(pgno, mask):  # type: ignore[no-untyped-def]
    return ((pgno * 0x9E3779B1) >> 12) & mask


@inner
def _cached(g, pgno):  # type: ignore[no-untyped-def]
    """Slot of a page, or -1."""
    mask = g[MASK]
    table, page_of = _words(g[TABLE], mask + 1), _words(g[PAGE_OF], g[SLOTS])
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
    mask = g[MASK]
    table, page_of = _words(g[TABLE], mask + 1), _words(g[PAGE_OF], g[SLOTS])
    i = _hash(page_of[slot], mask)
    while table[i] != slot + 1:
        i = (i + 1) & mask
    page_of[slot] = _EMPTY_PAGE
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
    slot = _cached(g, pgno)
    if slot >= 0:
        return slot
    page_of, lives = _words(g[PAGE_OF], g[SLOTS]), _bytes(g[LIVES], g[SLOTS])
    while True:
        slot = g[HAND]
        g[HAND] = slot + 1 if slot + 1 < g[SLOTS] else 0
        if page_of[slot] == _EMPTY_PAGE:
            break
        if lives[slot] == 0:
            _forget(g, slot)
            break
        lives[slot] -= 1
    mask = g[MASK]
    table = _words(g[TABLE], mask + 1)
    i = _hash(pgno, mask)
    while table[i] != 0:
        i = (i + 1) & mask
    table[i] = slot + 1
    page_of[slot] = pgno
    copy_bytes(_pool(g), slot * g[PAGE_SIZE], page, 0, g[PAGE_SIZE])
    return slot


@inner
def _page(g, pgno, rules):  # type: ignore[no-untyped-def]
    """Where branch or leaf page `pgno` starts in the pool, checked; read if need be. -1: an error is noted.

    rules : what the pages of its tree must obey (RULES or DUP_RULES of the handle)
    What an earlier call returned is void after this one.
    """
    slot = _cached(g, pgno)
    if slot < 0:
        size = g[PAGE_SIZE]
        if pgno < _FIRST_PAGE or pgno > g[LAST_PGNO]:
            _fail(g, DAMAGED, pgno, pgno * size, 0, 0, 0)
            return np.int64(-1)
        if (pgno + 1) * size > g[FILE_BYTES]:
            _fail(g, SHORT, pgno, pgno * size, size, max(g[FILE_BYTES] - pgno * size, 0), 0)
            return np.int64(-1)
        page = np.empty(size, np.uint8)
        scratch = _scratch()
        vectors = _words(scratch, 2)
        vectors[0], vectors[1] = page.ctypes.data, size
        if _read(g, scratch, 1, size, pgno * size) != OK or _check_snapshot(g) != OK:
            return np.int64(-1)
        found = check_page(page, 0, pgno, rules, g)
        if found != SOUND:
            _fail(g, DAMAGED, pgno, pgno * size, found, 0, 0)
            return np.int64(-1)
        slot = _keep(g, pgno, page)
    o = slot * g[PAGE_SIZE]
    branch = _pool(g)[o + g[HEADER] - (5 if g[BIG] else 6)] & _BRANCH
    _bytes(g[LIVES], g[SLOTS])[slot] = _LIVES_BRANCH if branch else _LIVES_LEAF
    return o


@inner
def _page_at(g, pgno, level, depth, pad, rules):  # type: ignore[no-untyped-def]
    """Like `_page`, and it is of the kind that belongs at this level (0 = root) of a tree of `depth` levels.

    pad : bytes of the items of LEAF2 leaves, 0 for leaves of nodes
    """
    o = _page(g, pgno, rules)
    if o < 0:
        return o
    pool = _pool(g)
    flags = u16(pool, o + g[HEADER] - 6, g[BIG])
    if level < depth - 1:
        fits = flags == _BRANCH
    elif pad:
        fits = flags == _LEAF | _LEAF2 and u16(pool, o + g[HEADER] - 8, g[BIG]) == pad
    else:
        fits = flags == _LEAF
    if not fits:
        _fail(g, MISPLACED, pgno, pgno * g[PAGE_SIZE], level, depth, pad)
        return np.int64(-1)
    return o


# -- down a tree -------------------------------------------------------------------------------------------------------


@inner
def _leaf_for(g, handle, key):  # type: ignore[no-untyped-def]
    """Where the leaf that `key` belongs to starts in the pool; -1: an error is noted."""
    pgno, depth, way, rules = handle[ROOT], handle[DEPTH], handle[KEY_WAY], handle[RULES]
    for level in range(depth - 1):
        o = _page_at(g, pgno, level, depth, 0, rules)
        if o < 0:
            return o
        pool = _pool(g)
        pgno = child(pool, o, search_branch(pool, o, key, way, g), g)
    return _page_at(g, pgno, depth - 1, depth, 0, rules)


@inner
def _down(g, pgno, level, depth, pad, rules, last, pages, items):  # type: ignore[no-untyped-def]
    """From page `pgno` at `level` down to the first or last item below. pages, items : i64[32], the way, filled in."""
    while True:
        o = _page_at(g, pgno, level, depth, pad, rules)
        if o < 0:
            return g[ERROR]
        pool = _pool(g)
        i = count(pool, o, g) - 1 if last else 0
        pages[level], items[level] = pgno, i
        if level == depth - 1:
            return OK
        pgno = child(pool, o, i, g)
        level += 1


@inner
def _down_to(g, root, depth, pad, rules, key, way, integer, pages, items):  # type: ignore[no-untyped-def]
    """To the first item >= key. Returns (status, whether it is equal); MISSING: all are less."""
    pgno = root
    for level in range(depth):
        o = _page_at(g, pgno, level, depth, pad, rules)
        if o < 0:
            return g[ERROR], False
        pool = _pool(g)
        pages[level] = pgno
        if level < depth - 1:
            i = search_branch(pool, o, key, way, g)
            items[level] = i
            pgno = child(pool, o, i, g)
            continue
        if integer and key_span(pool, o, 0, g)[1] != len(key):
            return MISSING, False
        i, equal = search_leaf(pool, o, key, way, g)
        items[level] = i
        if i == count(pool, o, g):
            items[level] = i - 1
            return _turn(g, depth, pad, rules, 1, pages, items, _words(_scratch(), 0)), False
        return OK, equal
    return MISSING, False


@inner
def _turn(g, depth, pad, rules, step, pages, items, ahead):  # type: ignore[no-untyped-def]
    """To the neighbouring leaf's nearest item; MISSING, and nothing changed, if there is none.

    ahead : i64[3] of a scanning cursor (C_SCAN, C_AHEAD_PAGE, C_AHEAD_I), else of length 0
    """
    level = depth - 2
    while level >= 0:
        o = _page_at(g, pages[level], level, depth, pad, rules)
        if o < 0:
            return g[ERROR]
        pool = _pool(g)
        i = items[level] + step
        n = count(pool, o, g)
        if 0 <= i < n:
            if len(ahead) and ahead[0] and level == depth - 2:
                _ask_ahead(g, pool, o, pages[level], i, n, step, ahead)
            items[level] = i
            return _down(g, child(pool, o, i, g), level + 1, depth, pad, rules, step < 0, pages, items)
        level -= 1
    return MISSING


@inner
def _ask_ahead(g, pool, o, pgno, i, n, step, ahead):  # type: ignore[no-untyped-def]
    """Have the kernel read the next leaves below this branch page: many at once, while we look at the first."""
    if ahead[1] == pgno and (ahead[2] - i) * step > 0:
        return
    j = i
    asked = 0
    size = g[PAGE_SIZE]
    while 0 <= j < n and asked < _LEAVES_AHEAD:
        below = child(pool, o, j, g)
        if _cached(g, below) < 0:
            # Neighbouring pages are asked for by one call.
            first = last = below
            while 0 <= j + step < n and child(pool, o, j + step, g) == last + step and asked < _LEAVES_AHEAD:
                last += step
                j += step
                asked += 1
            _fadvise(
                _intc(g[FD]), types.int64(min(first, last) * size), types.int64((abs(last - first) + 1) * size),
                _intc(_WILLNEED),
            )  # fmt: skip
        asked += 1
        j += step
    ahead[1], ahead[2] = pgno, j


# -- values ------------------------------------------------------------------------------------------------------------


@inner
def _data_at(pool, at, g):  # type: ignore[no-untyped-def]
    """Where the data of the leaf node at `at` starts in the pool."""
    k = u16(pool, at + 6, g[BIG])
    return at + 8 + k + (k & 1 if g[VERSION] == 3 else 0)


@inner
def _run_of(g, at, nbytes, pgno):  # type: ignore[no-untyped-def]
    """First page of the overflow run whose place stands at pool[at], inside the file; -1: an error is noted."""
    run = check_run(_pool(g), at, nbytes, g)
    if run < 0:
        _fail(g, DAMAGED, pgno, pgno * g[PAGE_SIZE], 0, 0, 0)
        return np.int64(-1)
    start = run * g[PAGE_SIZE]
    if start + g[HEADER] + nbytes > g[FILE_BYTES]:
        _fail(g, SHORT, run, start, g[HEADER] + nbytes, max(g[FILE_BYTES] - start, 0), 0)
        return np.int64(-1)
    return run


@inner
def _stamp_of(g, at):  # type: ignore[no-untyped-def]
    """(transaction, pages) of the overflow run whose place stands at pool[at]; zeros where formats have none."""
    if g[VERSION] != 3:
        return np.int64(0), np.int64(0)
    pool = _pool(g)
    return word(pool, at + g[WORD], g), word(pool, at + 2 * g[WORD], g)


@inner
def _right_header(g, header, at, run, nbytes, txnid, pages):  # type: ignore[no-untyped-def]
    """Does an overflow run for `nbytes`, with this stamp, begin with these bytes?"""
    h = at + g[HEADER]
    if word(header, at, g) != run or u16(header, h - 6, g[BIG]) != _OVERFLOW:
        return False
    if u32(header, h - 4, g[BIG]) * g[PAGE_SIZE] < g[HEADER] + nbytes:
        return False
    return g[VERSION] != 3 or (word(header, at + g[WORD], g) == txnid and u32(header, h - 4, g[BIG]) == pages)


@inner
def _long_value(g, run, nbytes, txnid, pages):  # type: ignore[no-untyped-def]
    """A bytes object with the value of an overflow run: one read, straight into it. 0: an error is noted or raised."""
    value = _bytes_new(_uintp(0), _intp(nbytes))
    if value == 0:
        g[ERROR] = OK
        return value
    scratch = _scratch()
    vectors = _words(scratch, 4)
    vectors[0], vectors[1] = scratch + 32, g[HEADER]
    vectors[2], vectors[3] = _intp(_bytes_at(value)), nbytes
    status = _read(g, scratch, 2, g[HEADER] + nbytes, run * g[PAGE_SIZE])
    if status == OK:
        status = _check_snapshot(g)
    if status == OK and not _right_header(g, _bytes(scratch + 32, 32), 0, run, nbytes, txnid, pages):
        status = _fail(g, BAD_RUN, run, run * g[PAGE_SIZE], nbytes, txnid, pages)
    if status != OK:
        _decref(value)
        return _uintp(0)
    return value


@inner
def _value(g, at, pgno):  # type: ignore[no-untyped-def]
    """The value of the leaf node at pool[at], as a bytes object; 0: an error is noted or raised."""
    pool = _pool(g)
    nbytes, flags = u32(pool, at, g[BIG]), u16(pool, at + 4, g[BIG])
    data = _data_at(pool, at, g)
    if flags & _BIGDATA:
        run = _run_of(g, data, nbytes, pgno)
        if run < 0:
            return _uintp(0)
        txnid, pages = _stamp_of(g, data)
        return _long_value(g, run, nbytes, txnid, pages)
    return _bytes_new(_uintp(pool.ctypes.data + data), _intp(nbytes))


@inner
def _failed(g):  # type: ignore[no-untyped-def]
    """What to return after a 0: the noted error, or 0 again where Python has raised one (out of memory)."""
    return _error(g) if g[ERROR] != OK else _uintp(0)


# -- duplicates --------------------------------------------------------------------------------------------------------


@inner
def _enter(g, handle, c, last):  # type: ignore[no-untyped-def]
    """The cursor has come to another item: go to its first or last duplicate."""
    c[C_DUPS] = NO_DUPS
    pgno = c[C_PAGES + handle[DEPTH] - 1]
    at = _node_of(g, handle, c)
    if at < 0:
        return g[ERROR]
    pool = _pool(g)
    flags = u16(pool, at + 4, g[BIG])
    if not flags & _DUPDATA:
        return OK
    if not handle[DUPSORT]:
        return _fail(g, DAMAGED, pgno, pgno * g[PAGE_SIZE], 0, 0, 0)
    data = _data_at(pool, at, g)
    if not flags & _SUBDATA:
        c[C_DUPS], c[C_SUB_I] = SUB_PAGE, count(pool, data, g) - 1 if last else 0
        return OK
    wide = g[WORD]
    tree_flags = u16(pool, data + 4, g[BIG])
    depth = u16(pool, data + 6, g[BIG])
    entries, root = word(pool, data + 8 + 3 * wide, g), word(pool, data + 8 + 4 * wide, g)
    sound = tree_flags == 0 or tree_flags == _DUPFIXED or tree_flags == _DUPFIXED | _INTEGERKEY
    if not sound or not 1 <= depth <= _LEVELS or entries < 1 or root < _FIRST_PAGE or root > g[LAST_PGNO]:
        return _fail(g, DAMAGED, pgno, pgno * g[PAGE_SIZE], 0, 0, 0)
    pad = u32(pool, data, g[BIG]) if tree_flags & _DUPFIXED else 0
    if tree_flags & _DUPFIXED and pad == 0:
        return _fail(g, DAMAGED, pgno, pgno * g[PAGE_SIZE], 0, 0, 0)
    c[C_DUPS], c[C_DUP_ROOT], c[C_DUP_DEPTH], c[C_DUP_PAD], c[C_DUP_ENTRIES] = DUP_TREE, root, depth, pad, entries
    return _down(g, root, 0, depth, pad, handle[DUP_RULES], last, _dup_pages(c), _dup_items(c))


@inner
def _dup_pages(c):  # type: ignore[no-untyped-def]
    return c[C_DUP_PAGES : C_DUP_PAGES + _LEVELS]


@inner
def _dup_items(c):  # type: ignore[no-untyped-def]
    return c[C_DUP_ITEMS : C_DUP_ITEMS + _LEVELS]


@inner
def _sub_page(g, handle, c):  # type: ignore[no-untyped-def]
    """Where the sub-page starts in the pool; -1: an error is noted."""
    at = _node_of(g, handle, c)
    if at < 0:
        return at
    pool = _pool(g)
    if u16(pool, at + 4, g[BIG]) != _DUPDATA:
        _moved(g)
        return np.int64(-1)
    return _data_at(pool, at, g)


@inner
def _moved(g):  # type: ignore[no-untyped-def]
    """The cursor's numbers contradict its page: two threads move it at once."""
    return _fail(g, UNPOSITIONED, 0, 0, 0, 0, 0)


@inner
def _node_of(g, handle, c):  # type: ignore[no-untyped-def]
    """Where the node of the cursor's key starts in the pool; -1: an error is noted."""
    level = handle[DEPTH] - 1
    o = _page_at(g, c[C_PAGES + level], level, handle[DEPTH], 0, handle[RULES])
    if o < 0:
        return o
    pool = _pool(g)
    i = c[C_ITEMS + level]
    if not 0 <= i < count(pool, o, g):
        _moved(g)
        return np.int64(-1)
    return node_at(pool, o, i, g)


@inner
def _step_dup(g, handle, c, step):  # type: ignore[no-untyped-def]
    """To the next or previous duplicate; MISSING, and nothing changed, if there is none."""
    if c[C_DUPS] == SUB_PAGE:
        o = _sub_page(g, handle, c)
        if o < 0:
            return g[ERROR]
        i = c[C_SUB_I] + step
        if not 0 <= i < count(_pool(g), o, g):
            return MISSING
        c[C_SUB_I] = i
        return OK
    level = c[C_DUP_DEPTH] - 1
    o = _page_at(g, c[C_DUP_PAGES + level], level, c[C_DUP_DEPTH], c[C_DUP_PAD], handle[DUP_RULES])
    if o < 0:
        return g[ERROR]
    i = c[C_DUP_ITEMS + level] + step
    if 0 <= i < count(_pool(g), o, g):
        c[C_DUP_ITEMS + level] = i
        return OK
    rules = handle[DUP_RULES]
    return _turn(g, c[C_DUP_DEPTH], c[C_DUP_PAD], rules, step, _dup_pages(c), _dup_items(c), c[0:0])


@inner
def _end_dup(g, handle, c, last):  # type: ignore[no-untyped-def]
    """To the first or last duplicate of the key where the cursor stands."""
    if c[C_DUPS] == SUB_PAGE:
        o = _sub_page(g, handle, c)
        if o < 0:
            return g[ERROR]
        c[C_SUB_I] = count(_pool(g), o, g) - 1 if last else 0
        return OK
    rules = handle[DUP_RULES]
    return _down(g, c[C_DUP_ROOT], 0, c[C_DUP_DEPTH], c[C_DUP_PAD], rules, last, _dup_pages(c), _dup_items(c))


@inner
def _find_dup(g, handle, c, value, exact):  # type: ignore[no-untyped-def]
    """To the duplicate `value`, or (not exact) to the first that is >= it."""
    way, integer = handle[DUP_WAY], handle[DUP_INTEGER]
    if c[C_DUPS] == NO_DUPS:
        at = _node_of(g, handle, c)
        if at < 0:
            return g[ERROR]
        pool = _pool(g)
        nbytes = u32(pool, at, g[BIG])
        if u16(pool, at + 4, g[BIG]) != 0:
            # A value of a DUPSORT database is short: it has no pages of its own, and is no database.
            pgno = c[C_PAGES + handle[DEPTH] - 1]
            return _fail(g, DAMAGED, pgno, pgno * g[PAGE_SIZE], 0, 0, 0)
        if integer and nbytes != len(value):
            return MISSING
        order = compare(pool, _data_at(pool, at, g), nbytes, value, 0, len(value), way)
        return OK if order == 0 or (order > 0 and not exact) else MISSING
    if len(value) == 0:
        return _fail(g, EMPTY_KEY, 0, 0, 0, 0, 0)
    if c[C_DUPS] == SUB_PAGE:
        o = _sub_page(g, handle, c)
        if o < 0:
            return g[ERROR]
        pool = _pool(g)
        if integer and key_span(pool, o, 0, g)[1] != len(value):
            return MISSING
        i, equal = search_leaf(pool, o, value, way, g)
        if i == count(pool, o, g) or (exact and not equal):
            return MISSING
        c[C_SUB_I] = i
        return OK
    root, depth, pad, rules = c[C_DUP_ROOT], c[C_DUP_DEPTH], c[C_DUP_PAD], handle[DUP_RULES]
    status, equal = _down_to(g, root, depth, pad, rules, value, way, integer, _dup_pages(c), _dup_items(c))
    return MISSING if status == OK and exact and not equal else status


# -- moves of a cursor -------------------------------------------------------------------------------------------------


@inner
def _step(g, handle, c, step):  # type: ignore[no-untyped-def]
    """To the next or previous key; its first or last duplicate. MISSING, and nothing changed, if there is none."""
    depth = handle[DEPTH]
    level = depth - 1
    o = _page_at(g, c[C_PAGES + level], level, depth, 0, handle[RULES])
    if o < 0:
        return g[ERROR]
    i = c[C_ITEMS + level] + step
    if 0 <= i < count(_pool(g), o, g):
        c[C_ITEMS + level] = i
    else:
        pages, items = c[C_PAGES : C_PAGES + _LEVELS], c[C_ITEMS : C_ITEMS + _LEVELS]
        status = _turn(g, depth, 0, handle[RULES], step, pages, items, c[C_SCAN : C_SCAN + 3])
        if status != OK:
            return status
    return _enter(g, handle, c, step < 0)


@inner
def _go(g, handle, c, op):  # type: ignore[no-untyped-def]
    """One of the moves without a key. The rules are LMDB's."""
    if op in (FIRST_DUP, LAST_DUP):
        if not c[C_SET]:
            return _fail(g, UNPOSITIONED, 0, 0, 0, 0, 0)
        if not handle[DUPSORT]:
            return _fail(g, INCOMPATIBLE, 0, 0, 0, 0, 0)
        c[C_END] = 0
        return OK if c[C_DUPS] == NO_DUPS else _end_dup(g, handle, c, op == LAST_DUP)
    step = 1 if op in (NEXT, NEXT_DUP, NEXT_NODUP, FIRST) else -1
    if op in (FIRST, LAST) or not c[C_SET]:
        c[C_SET] = c[C_END] = 0
        if handle[ROOT] < 0:
            return MISSING
        pages, items = c[C_PAGES : C_PAGES + _LEVELS], c[C_ITEMS : C_ITEMS + _LEVELS]
        if c[C_SCAN] and handle[DEPTH] > 1:
            c[C_AHEAD_PAGE] = 0
        status = _down(g, handle[ROOT], 0, handle[DEPTH], 0, handle[RULES], step < 0, pages, items)
        if status == OK:
            status = _enter(g, handle, c, step < 0)
        c[C_SET] = status == OK
        return status
    if c[C_END] and step > 0:
        return MISSING
    if handle[DUPSORT] and op != NEXT_NODUP and op != PREV_NODUP:
        only_dup = op in (NEXT_DUP, PREV_DUP)
        if c[C_DUPS] != NO_DUPS:
            status = _step_dup(g, handle, c, step)
            if status == OK:
                c[C_END] = 0
            if only_dup or status != MISSING:
                return status
        elif only_dup:
            return MISSING
    if step < 0:
        c[C_END] = 0
    status = _step(g, handle, c, step)
    if status == MISSING and step > 0:
        c[C_END] = 1
    return status


@inner
def _seek(g, handle, c, op, key, value):  # type: ignore[no-untyped-def]
    """One of the moves to a key. A miss leaves the cursor nowhere."""
    with_value = op in (SET_KEY_DUP, SET_RANGE_DUP)
    if with_value and not handle[DUPSORT]:
        return _fail(g, INCOMPATIBLE, 0, 0, 0, 0, 0)
    if len(key) == 0:
        return _fail(g, EMPTY_KEY, 0, 0, 0, 0, 0)
    c[C_SET] = c[C_END] = 0
    c[C_AHEAD_PAGE] = 0
    if handle[ROOT] < 0:
        return MISSING
    pages, items = c[C_PAGES : C_PAGES + _LEVELS], c[C_ITEMS : C_ITEMS + _LEVELS]
    root, depth, rules, way, integer = handle[ROOT], handle[DEPTH], handle[RULES], handle[KEY_WAY], handle[KEY_INTEGER]
    status, equal = _down_to(g, root, depth, 0, rules, key, way, integer, pages, items)
    if status == OK and not equal and op != SET_RANGE:
        status = MISSING
    if status == OK:
        status = _enter(g, handle, c, False)
    if status == OK and with_value:
        status = _find_dup(g, handle, c, value, op == SET_KEY_DUP)
    c[C_SET] = status == OK
    return status


@inner
def _key_of(g, handle, c):  # type: ignore[no-untyped-def]
    """The key where the cursor stands, as a bytes object; 0: an error is noted or raised."""
    at = _node_of(g, handle, c)
    if at < 0:
        return _uintp(0)
    pool = _pool(g)
    return _bytes_new(_uintp(pool.ctypes.data + at + 8), _intp(u16(pool, at + 6, g[BIG])))


@inner
def _value_of(g, handle, c, job):  # type: ignore[no-untyped-def]
    """The value where the cursor stands, as a bytes object; 0: an error is noted or raised.

    job : i64[JOB_WORDS]: a long value is not read, but noted there; of length 0: it is read
    """
    if c[C_DUPS] == DUP_TREE:
        inner = c[C_DUP_DEPTH] - 1
        o = _page_at(g, c[C_DUP_PAGES + inner], inner, c[C_DUP_DEPTH], c[C_DUP_PAD], handle[DUP_RULES])
        item = c[C_DUP_ITEMS + inner]
    elif c[C_DUPS] == SUB_PAGE:
        o = _sub_page(g, handle, c)
        item = c[C_SUB_I]
    else:
        pgno = c[C_PAGES + handle[DEPTH] - 1]
        at = _node_of(g, handle, c)
        if at < 0:
            return _uintp(0)
        pool = _pool(g)
        if not len(job):
            return _value(g, at, pgno)
        return _node_value(g, pool, at, pgno, job)
    if o < 0:
        return _uintp(0)
    pool = _pool(g)
    if not 0 <= item < count(pool, o, g):
        _moved(g)
        return _uintp(0)
    start, nbytes = key_span(pool, o, item, g)
    return _bytes_new(_uintp(pool.ctypes.data + start), _intp(nbytes))


# -- many values -------------------------------------------------------------------------------------------------------


@inner
def _plan_run(g, jobs, first, headers, junk, vectors):  # type: ignore[no-untyped-def]
    """Vectors for the values from `first` on that one call reads. Returns (the one after, vectors, bytes)."""
    size, header = g[PAGE_SIZE], g[HEADER]
    start = jobs[first, 0] * size
    end = start
    i, m = first, 0
    while i < len(jobs):
        place, nbytes = jobs[i, 0] * size, jobs[i, 1]
        gap = place - end
        if i > first and (
            gap < 0 or gap > _GAP_BYTES or m + 3 > _VECTORS or place + header + nbytes - start > _RUN_BYTES
        ):
            break
        if gap > 0:
            vectors[2 * m], vectors[2 * m + 1] = junk, gap
            m += 1
        vectors[2 * m], vectors[2 * m + 1] = headers + 32 * i, header
        vectors[2 * m + 2], vectors[2 * m + 3] = jobs[i, 2], nbytes
        m += 2
        end = place + header + nbytes
        i += 1
    return i, m, end - start


@inner
def _fill_values(g, jobs, failure):  # type: ignore[no-untyped-def]
    """Read values to where they belong, neighbours by one call. Needs no lock, touches no Python object.

    jobs : i64[m, JOB_WORDS], ascending by page
    failure : i64[4] = (offset, bytes there, errno, bytes wanted), or of a BAD_RUN its job

    What is in the page cache is read first. Then the kernel is asked for all the rest at once, so that the storage has
    many reads to work on, and the rest is read. Returns OK, SHORT, FAILED or BAD_RUN.
    """
    n = len(jobs)
    size = g[PAGE_SIZE]
    headers = np.empty(32 * n, np.uint8)
    junk = np.empty(_GAP_BYTES, np.uint8)
    vectors = np.empty(2 * _VECTORS, np.int64)
    late = np.empty(n, np.int64)
    m_late = 0
    headers_at, junk_at, vectors_at = headers.ctypes.data, junk.ctypes.data, vectors.ctypes.data
    first = 0
    while first < n:
        after, m, nbytes = _plan_run(g, jobs, first, headers_at, junk_at, vectors)
        if not (g[NOWAIT] and _try_now(g, vectors_at, m, nbytes, jobs[first, 0] * size)):
            late[m_late] = first
            m_late += 1
        first = after
    if m_late > 1:
        for i in range(m_late):
            after, m, nbytes = _plan_run(g, jobs, late[i], headers_at, junk_at, vectors)
            start = jobs[late[i], 0] * size
            _fadvise(_intc(g[FD]), types.int64(start), types.int64(nbytes), _intc(_WILLNEED))
    for i in range(m_late):
        after, m, nbytes = _plan_run(g, jobs, late[i], headers_at, junk_at, vectors)
        if not _read_waiting(g, vectors_at, m, nbytes, jobs[late[i], 0] * size, failure):
            failure[3] = nbytes
            return FAILED if failure[2] else SHORT
    g[WAITED] += m_late
    for i in range(n):
        if not _right_header(g, headers, 32 * i, jobs[i, 0], jobs[i, 1], jobs[i, 3], jobs[i, 4]):
            failure[0] = i
            return BAD_RUN
    return OK


@inner
def _sorted_jobs(jobs):  # type: ignore[no-untyped-def]
    """The jobs, ascending by page."""
    for i in range(1, len(jobs)):
        if jobs[i, 0] < jobs[i - 1, 0]:
            order = np.argsort(jobs[:, 0])
            ordered = np.empty_like(jobs)
            for k in range(len(jobs)):
                ordered[k] = jobs[order[k]]
            return ordered
    return jobs


@inner
def _read_values(g, jobs):  # type: ignore[no-untyped-def]
    """Fill the noted values, with the interpreter's lock held before and after. jobs : i64[m, JOB_WORDS]"""
    if len(jobs) == 0:
        return OK
    jobs = _sorted_jobs(jobs)
    failure = _words(_scratch(), 4)
    total = 0
    for i in range(len(jobs)):
        total += jobs[i, 1]
    g[READS] += 1
    g[READ_BYTES] += total
    thread = _save_thread()
    status = _fill_values(g, jobs, failure)
    _restore_thread(thread)
    return _values_read(g, jobs, status, failure)


@inner
def _values_read(g, jobs, status, failure):  # type: ignore[no-untyped-def]
    """The status of a reading of values, after the look at the snapshot."""
    if status in (FAILED, SHORT):
        return _read_failed(g, failure, failure[3])
    if _check_snapshot(g) != OK:
        return g[ERROR]
    if status == BAD_RUN:
        job = jobs[failure[0]]
        return _fail(g, BAD_RUN, job[0], job[0] * g[PAGE_SIZE], job[1], job[3], job[4])
    return OK


@inner
def _node_value(g, pool, at, pgno, job):  # type: ignore[no-untyped-def]
    """The value of the node at pool[at]; a long one is noted in `job`, see `_value_of`."""
    nbytes, flags = u32(pool, at, g[BIG]), u16(pool, at + 4, g[BIG])
    data = _data_at(pool, at, g)
    if not flags & _BIGDATA:
        return _bytes_new(_uintp(pool.ctypes.data + data), _intp(nbytes))
    run = _run_of(g, data, nbytes, pgno)
    if run < 0:
        return _uintp(0)
    value = _bytes_new(_uintp(0), _intp(nbytes))
    if value == 0:
        g[ERROR] = OK
    else:
        job[0], job[1], job[2] = run, nbytes, _intp(_bytes_at(value))
        job[3], job[4] = _stamp_of(g, data)
    return value


@inner
def _pair(g, key, value):  # type: ignore[no-untyped-def]
    """(key, value), which are given away; 0 if one of them is 0."""
    pair = _uintp(0)
    if key != 0 and value != 0:
        pair = _tuple_new(_intp(2))
        if pair == 0:
            g[ERROR] = OK
    if pair == 0:
        if key != 0:
            _decref(key)
        if value != 0:
            _decref(value)
        return pair
    _tuple_set(pair, _intp(0), key)
    _tuple_set(pair, _intp(1), value)
    return pair


@inner
def _node_item(g, pool, at, pgno, what, job):  # type: ignore[no-untyped-def]
    """Key, value or both of the node at pool[at]."""
    if what == VALUE:
        return _node_value(g, pool, at, pgno, job)
    key = _bytes_new(_uintp(pool.ctypes.data + at + 8), _intp(u16(pool, at + 6, g[BIG])))
    if what == KEY or key == 0:
        return key
    return _pair(g, key, _node_value(g, pool, at, pgno, job))


@inner
def _item(g, handle, c, what, job):  # type: ignore[no-untyped-def]
    """The key, the value or both where the cursor stands; 0: an error is noted or raised."""
    if what == KEY:
        return _key_of(g, handle, c)
    if what == VALUE:
        return _value_of(g, handle, c, job)
    key = _key_of(g, handle, c)
    if key == 0:
        return key
    return _pair(g, key, _value_of(g, handle, c, job))


# -- what Python calls -------------------------------------------------------------------------------------------------


@inner
def _alive(txn_at):  # type: ignore[no-untyped-def]
    """The store's words, or an empty array."""
    if txn_at:
        txn = _words(txn_at, TXN_WORDS)
        if txn[ALIVE]:
            g = _words(txn[STORE], STORE_WORDS)
            if g[OPEN]:
                g[ERROR] = OK
                return g
    return _words(_scratch(), 0)


@inner
def _argument(key):  # type: ignore[no-untyped-def]
    """(address, bytes) of a bytes object; bytes < 0 if it is none."""
    nbytes = _bytes_size(key)
    if nbytes < 0:
        _clear()
        return _intp(0), nbytes
    return _intp(_bytes_at(key)), nbytes


@inner
def _lookup(txn_at, handle_at, key):  # type: ignore[no-untyped-def]
    """(OK, the value (of the first duplicate) of a key), (MISSING, 0), (NOTED, what `_get` is to return) or
    (CLOSED, NOT_BYTES or EMPTY_KEY, 0).
    """
    nothing = _uintp(0)
    g = _alive(txn_at)
    if len(g) == 0:
        return CLOSED, nothing
    wanted_at, nbytes = _argument(key)
    if nbytes <= 0:
        return NOT_BYTES if nbytes < 0 else EMPTY_KEY, nothing
    wanted = _bytes(wanted_at, nbytes)
    handle = _words(handle_at if handle_at else _words(txn_at, TXN_WORDS)[MAIN], HANDLE_WORDS)
    if handle[ROOT] < 0:
        return MISSING, nothing
    status, o, i = _find_in_leaf(g, handle, wanted)
    if status == MISSING:
        return MISSING, nothing
    value = nothing
    if status == OK:
        pool = _pool(g)
        at = node_at(pool, o, i, g)
        pgno = word(pool, o, g)
        if u16(pool, at + 4, g[BIG]) & _DUPDATA:
            value = _first_dup(g, handle, pgno, i)
        else:
            value = _value(g, at, pgno)
    return (OK, value) if value else (NOTED, _failed(g))


@inner
def _get(txn_at, handle_at, key):  # type: ignore[no-untyped-def]
    """The value (of the first duplicate) of a key. `handle_at` 0: the transaction's default database.

    bytes, or False if there is none, or an error.
    """
    status, value = _lookup(txn_at, handle_at, key)
    if status == MISSING:
        return _bool_new(0)
    return value if status in (OK, NOTED) else _plain_error(status)


@inner
def _first_dup(g, handle, pgno, i):  # type: ignore[no-untyped-def]
    """The first duplicate of item i of a leaf; 0: an error is noted or raised."""
    c = np.empty(CURSOR_WORDS, np.int64)
    c[C_PAGES + handle[DEPTH] - 1], c[C_ITEMS + handle[DEPTH] - 1] = pgno, i
    status = _enter(g, handle, c, False)
    return _value_of(g, handle, c, c[0:0]) if status == OK else _uintp(0)


def get_method(self, given_at, given, names):  # type: ignore[no-untyped-def]
    """Transaction.get as a method in C's calling convention (METH_FASTCALL | METH_KEYWORDS), for the usual call with
    nothing but a key: no frame of the interpreter, no conversion of arguments. All others go to the Python method.
    """
    slots = _words(_intp(self + OBJECT_BYTES), 2)
    if given == 1 and names == 0:
        txn_at = _int_of(_uintp(slots[0]))
        if txn_at > 0:
            status, value = _lookup(txn_at, 0, _uintp(_words(_intp(given_at), 1)[0]))
            if status == OK:
                return value
            if status == NOTED and value != 0:
                _decref(value)  # it is made again, and raised
            elif status == NOTED:
                return value
            elif status == MISSING:
                scratch = _words(_scratch(), 1)
                scratch[0] = 0
                return _none_new(_uintp(scratch.ctypes.data))  # Py_BuildValue(""), which is None
    # One more argument than given: the object itself. More than these no call of it can have.
    arguments = _words(_scratch(), 32)
    arguments[0] = self
    many = given + (_tuple_size(names) if names != 0 else 0)
    if many > 31:  # let it complain about none
        return _call(_uintp(slots[1]), _uintp(arguments.ctypes.data), _uintp(1), _uintp(0))
    for i in range(many):
        arguments[1 + i] = _words(_intp(given_at), many)[i]
    return _call(_uintp(slots[1]), _uintp(arguments.ctypes.data), _uintp(given + 1), names)


@inner
def _move(cursor_at, op):  # type: ignore[no-untyped-def]
    """A move without a key: True, False or an error."""
    c = _words(cursor_at, CURSOR_WORDS)
    g = _alive(c[C_TXN])
    if len(g) == 0:
        return _plain_error(CLOSED)
    status = _go(g, _words(c[C_HANDLE], HANDLE_WORDS), c, op)
    c[C_VALID] = status == OK
    return _bool_new(status == OK) if status <= MISSING else _error(g)


@inner
def _find(cursor_at, op, key, value):  # type: ignore[no-untyped-def]
    """A move to a key: True, False or an error."""
    c = _words(cursor_at, CURSOR_WORDS)
    g = _alive(c[C_TXN])
    if len(g) == 0:
        return _plain_error(CLOSED)
    key_at, key_nbytes = _argument(key)
    value_at, value_nbytes = _argument(value)
    if key_nbytes < 0 or value_nbytes < 0:
        return _plain_error(NOT_BYTES)
    handle = _words(c[C_HANDLE], HANDLE_WORDS)
    if op == SET_RANGE and key_nbytes == 0:
        status = _go(g, handle, c, FIRST)
    else:
        status = _seek(g, handle, c, op, _bytes(key_at, key_nbytes), _bytes(value_at, value_nbytes))
    c[C_VALID] = status == OK
    return _bool_new(status == OK) if status <= MISSING else _error(g)


@inner
def _look(cursor_at, what):  # type: ignore[no-untyped-def]
    """The key, value or item where the cursor stands, or an error. The cursor must be valid."""
    c = _words(cursor_at, CURSOR_WORDS)
    g = _alive(c[C_TXN])
    if len(g) == 0:
        return _plain_error(CLOSED)
    found = _item(g, _words(c[C_HANDLE], HANDLE_WORDS), c, what, c[0:0])
    return found if found else _failed(g)


@inner
def _count(cursor_at):  # type: ignore[no-untyped-def]
    """Number of duplicates of the key where the cursor stands, or an error."""
    c = _words(cursor_at, CURSOR_WORDS)
    g = _alive(c[C_TXN])
    if len(g) == 0:
        return _plain_error(CLOSED)
    handle = _words(c[C_HANDLE], HANDLE_WORDS)
    if not handle[DUPSORT]:
        return _plain_error(INCOMPATIBLE)
    if not c[C_SET]:
        return _plain_error(UNPOSITIONED)
    many = np.int64(1)
    if c[C_DUPS] == DUP_TREE:
        many = c[C_DUP_ENTRIES]
    elif c[C_DUPS] == SUB_PAGE:
        o = _sub_page(g, handle, c)
        if o < 0:
            return _error(g)
        many = np.int64(count(_pool(g), o, g))
    # As in LMDB, whoever counts stands on the key again.
    c[C_END] = 0
    return _int_new(_intp(many))


@inner
def _collect(cursor_at, op, started, most, most_bytes, what):  # type: ignore[no-untyped-def]
    """The next items as a list, at most `most`, stopping after `most_bytes` of values; [] at the end. Or an error.

    started : 0 = the first is the one where the cursor stands; nothing comes if that is nowhere
    The cursor stands on the last item returned. After an error its place is undefined.
    """
    c = _words(cursor_at, CURSOR_WORDS)
    g = _alive(c[C_TXN])
    if len(g) == 0:
        return _plain_error(CLOSED)
    handle = _words(c[C_HANDLE], HANDLE_WORDS)
    found = _list_new(_intp(0))
    if found == 0:
        return found
    c[C_SCAN] = most > 1
    jobs = np.full((most if what & VALUE else 0, JOB_WORDS), -1, np.int64)
    no_job = c[0:0]
    n, m, total = 0, 0, 0
    status = OK
    level = handle[DEPTH] - 1
    step = 1 if op in (NEXT, NEXT_DUP, NEXT_NODUP) else -1
    pgno, o, items, at = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    pool = _pool(g)
    while n < most and total < most_bytes:
        if n == 0 and not c[C_VALID]:
            break
        if n > 0 or started:
            # Without duplicates, the items of one leaf are one step apart. Its page stays where it is, unless the
            # making of a tuple set off a garbage collection, and that a destructor that reads.
            i = c[C_ITEMS + level] + step
            if o and 0 <= i < items and _words(g[PAGE_OF], g[SLOTS])[o // g[PAGE_SIZE]] == pgno:
                c[C_ITEMS + level] = i
            else:
                o = np.int64(0)
                end = c[C_END]
                status = _go(g, handle, c, op)
                if status != OK:
                    if n > 0:
                        c[C_END] = end  # nobody has asked for what comes after the last item yet
                    break
        if not handle[DUPSORT]:
            if o == 0:
                pgno = c[C_PAGES + level]
                o = _page_at(g, pgno, level, handle[DEPTH], 0, handle[RULES])
                if o < 0:
                    status = CLOSED
                    break
                items = count(pool, o, g)
                if not 0 <= c[C_ITEMS + level] < items:
                    status = _moved(g)
                    break
                # The first page of the pool starts at 0, which here means "none": then each item takes the long way.
            at = node_at(pool, o, c[C_ITEMS + level], g)
            if u16(pool, at + 4, g[BIG]) & _DUPDATA:
                status = _fail(g, DAMAGED, pgno, pgno * g[PAGE_SIZE], 0, 0, 0)
                break
            thing = _node_item(g, pool, at, pgno, what, jobs[m] if what & VALUE else no_job)
        else:
            thing = _item(g, handle, c, what, jobs[m] if what & VALUE else no_job)
        if thing == 0:
            status = CLOSED
            break
        if what & VALUE and jobs[m, 1] >= 0:
            total += jobs[m, 1]
            m += 1
        refused = _list_append(found, thing)
        _decref(thing)
        if refused:
            g[ERROR] = OK
            status = CLOSED
            break
        n += 1
    c[C_SCAN] = 0
    if status <= MISSING:
        c[C_VALID] = n > 0
        status = _read_values(g, jobs[:m])
    if status > MISSING:
        c[C_VALID] = 0
        _decref(found)
        return _failed(g)
    return found


@inner
def _skip(cursor_at, op, steps):  # type: ignore[no-untyped-def]
    """Repeat a move that is known to succeed: True, or False or an error if it does not."""
    c = _words(cursor_at, CURSOR_WORDS)
    g = _alive(c[C_TXN])
    if len(g) == 0:
        return _plain_error(CLOSED)
    handle = _words(c[C_HANDLE], HANDLE_WORDS)
    status = OK
    for _ in range(steps):
        status = _go(g, handle, c, op)
        if status != OK:
            break
    c[C_VALID] = status == OK
    return _bool_new(status == OK) if status <= MISSING else _error(g)


@inner
def _is_newest(store_at):  # type: ignore[no-untyped-def]
    """Has nobody committed since the snapshot S was taken? S + 1 writes the other meta page. False also if unsure."""
    g = _words(store_at, STORE_WORDS)
    scratch = _scratch()
    nbytes = g[META_BYTES]
    got = _pread(_intc(g[FD]), _uintp(scratch), _uintp(nbytes), types.int64(g[OTHER_AT]))
    return _bool_new(got == nbytes and _memcmp(_uintp(scratch), _uintp(g[OTHER]), _uintp(nbytes)) == 0)


@inner
def _find_in_leaf(g, handle, key):  # type: ignore[no-untyped-def]
    """(OK, where the leaf starts in the pool, item), (MISSING, 0, 0) or (an error, 0, 0)."""
    nowhere = np.int64(0)
    o = _leaf_for(g, handle, key)
    if o < 0:
        return g[ERROR], nowhere, nowhere
    pool = _pool(g)
    if handle[KEY_INTEGER] and key_span(pool, o, 0, g)[1] != len(key):
        return np.int64(MISSING), nowhere, nowhere
    i, equal = search_leaf(pool, o, key, handle[KEY_WAY], g)
    return np.int64(OK if equal else MISSING), np.int64(o), np.int64(i)


@inner
def _find_many(cursor_at, keys, what, jobs_at):  # type: ignore[no-untyped-def]
    """[(key, value) or key, ...] of those of a list of keys that there are; long values are not read, but noted.

    jobs_at : address of i64[1 + JOB_WORDS * keys]: how many are noted, and they
    An error if something is wrong or a key is not a bytes object. The cursor stands on the last key, if it was found.
    """
    c = _words(cursor_at, CURSOR_WORDS)
    g = _alive(c[C_TXN])
    if len(g) == 0:
        return _plain_error(CLOSED)
    handle = _words(c[C_HANDLE], HANDLE_WORDS)
    n = _list_size(keys)
    found = _list_new(_intp(0))
    if found == 0:
        return found
    noted = _words(jobs_at, 1 + JOB_WORDS * n)
    noted[0] = m = 0
    nothing = c[0:0]
    empty = _bytes(jobs_at, 0)
    status = OK
    for i in range(n):
        if i >= _list_size(keys):
            break  # somebody shortened it while the lock was released
        key = _list_item(keys, _intp(i))
        _incref(key)
        key_at, nbytes = _argument(key)
        if nbytes < 0:
            status = _fail(g, NOT_BYTES, 0, 0, 0, 0, 0)
        elif i < n - 1 and not handle[DUPSORT] and nbytes > 0 and handle[ROOT] >= 0:
            # Only where the last key leads matters to the cursor.
            status, o, item = _find_in_leaf(g, handle, _bytes(key_at, nbytes))
        else:
            o, item = np.int64(-1), np.int64(0)
            status = _seek(g, handle, c, SET_KEY, _bytes(key_at, nbytes), empty)
            c[C_VALID] = status == OK
        _decref(key)
        if status == MISSING:
            continue
        if status != OK:
            break
        job = noted[1 + JOB_WORDS * m : 1 + JOB_WORDS * (m + 1)]
        job[1] = -1
        if o >= 0:
            pool = _pool(g)
            at = node_at(pool, o, item, g)
            pgno = word(pool, o, g)
            if u16(pool, at + 4, g[BIG]) & _DUPDATA:
                status = _fail(g, DAMAGED, pgno, pgno * g[PAGE_SIZE], 0, 0, 0)
                break
            thing = _node_item(g, pool, at, pgno, what, job)
        else:
            thing = _item(g, handle, c, what, job if what & VALUE else nothing)
        if thing == 0:
            status = CLOSED
            break
        if job[1] >= 0:
            m += 1
        refused = _list_append(found, thing)
        _decref(thing)
        if refused:
            g[ERROR] = OK
            status = CLOSED
            break
    if status > MISSING:
        c[C_VALID] = 0
        _decref(found)
        return _failed(g)
    noted[0] = m
    return found


@inner
def _after_values(store_at, jobs_at, m, status, failure_at):  # type: ignore[no-untyped-def]
    """None of other threads' readings of values (`fill`) found something wrong: True. Or an error."""
    g = _words(store_at, STORE_WORDS)
    jobs = _words(jobs_at, JOB_WORDS * m).reshape((m, JOB_WORDS))
    failure = _words(failure_at, 4)
    return _bool_new(1) if _values_read(g, jobs, status, failure) == OK else _error(g)


@kernel
def fill(store_at, jobs, failure):  # type: ignore[no-untyped-def]
    """`_fill_values` for Python's threads: runs without the interpreter's lock."""
    return _fill_values(_words(store_at, STORE_WORDS), jobs, failure)


class _ObjectType(types.Opaque):  # type: ignore[misc]
    """Any Python object, as it is: PyObject *."""

    def __init__(self) -> None:
        super().__init__(name="pario.PyObject")


_object = _ObjectType()
register_model(_ObjectType)(models.OpaqueModel)


@unbox(_ObjectType)
def _unbox_object(kind, thing, context):  # type: ignore[no-untyped-def]
    return NativeValue(thing)


@box(_ObjectType)
def _box_object(kind, thing, context):  # type: ignore[no-untyped-def]
    return thing


def _address_of(typing_context, thing):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.ptrtoint(arguments[0], ir.IntType(64))

    return types.uintp(thing), generate


def _object_at(typing_context, address):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return _object(types.uintp), generate


_take: Any = intrinsic(_address_of)
_give: Any = intrinsic(_object_at)


def get(txn_at, handle_at, key):  # type: ignore[no-untyped-def]
    return _give(_get(txn_at, handle_at, _take(key)))


def move(cursor_at, op):  # type: ignore[no-untyped-def]
    return _give(_move(cursor_at, op))


def find(cursor_at, op, key, value):  # type: ignore[no-untyped-def]
    return _give(_find(cursor_at, op, _take(key), _take(value)))


def look(cursor_at, what):  # type: ignore[no-untyped-def]
    return _give(_look(cursor_at, what))


def count_dups(cursor_at):  # type: ignore[no-untyped-def]
    return _give(_count(cursor_at))


def collect(cursor_at, op, started, most, most_bytes, what):  # type: ignore[no-untyped-def]
    return _give(_collect(cursor_at, op, started, most, most_bytes, what))


def skip(cursor_at, op, steps):  # type: ignore[no-untyped-def]
    return _give(_skip(cursor_at, op, steps))


def is_newest(store_at):  # type: ignore[no-untyped-def]
    return _give(_is_newest(store_at))


def find_many(cursor_at, keys, what, jobs_at):  # type: ignore[no-untyped-def]
    return _give(_find_many(cursor_at, _take(keys), what, jobs_at))


def after_values(store_at, jobs_at, m, status, failure_at):  # type: ignore[no-untyped-def]
    return _give(_after_values(store_at, jobs_at, m, status, failure_at))


_NATIVE: dict[str, tuple[Callable[..., Any], Any]] = {
    "get": (get, _object(_intp, _intp, _object)),
    "move": (move, _object(_intp, _intp)),
    "find": (find, _object(_intp, _intp, _object, _object)),
    "look": (look, _object(_intp, _intp)),
    "count": (count_dups, _object(_intp)),
    "collect": (collect, _object(_intp, _intp, _intp, _intp, _intp, _intp)),
    "skip": (skip, _object(_intp, _intp, _intp)),
    "is_newest": (is_newest, _object(_intp)),
    "find_many": (find_many, _object(_intp, _object, _intp, _intp)),
    "after_values": (after_values, _object(_intp, _intp, _intp, _intp, _intp)),
}

#: A build of Python without the interpreter's lock: one call at a time.
_one_at_a_time = threading.Lock() if not getattr(sys, "_is_gil_enabled", lambda: True)() else None


@cache
def native(name: str) -> Callable[..., Any]:
    """One of the functions above, compiled (or loaded from the node's disk) at the first request."""
    function, signature = _NATIVE[name]
    call = entry(function, signature)
    if _one_at_a_time is None:
        return call
    lock = _one_at_a_time

    @wraps(call)
    def locked(*given: Any) -> Any:
        with lock:
            return call(*given)

    return locked


class _Method(ctypes.Structure):
    """CPython's PyMethodDef."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


_METH_FASTCALL, _METH_KEYWORDS = 0x80, 0x02
#: Descriptions that CPython refers to for good.
_METHODS: list[_Method] = []


def method(kind: type, name: str, doc: str) -> Any:
    """A method of `kind` for `get_method` above; None where Python or the layout of its objects is not as expected."""
    if sys.implementation.name != "cpython" or _one_at_a_time is not None:
        return None
    function = c_function(get_method, _uintp(_uintp, _uintp, _intp, _uintp))
    held = _Method(name.encode(), function, _METH_FASTCALL | _METH_KEYWORDS, doc.encode())
    _METHODS.append(held)
    make = ctypes.pythonapi.PyDescr_NewMethod
    make.restype, make.argtypes = ctypes.py_object, (ctypes.py_object, ctypes.POINTER(_Method))
    return make(kind, ctypes.byref(held))


def slot_of(thing: Any, i: int) -> int:
    """Address of the object in the i-th slot of an object, as `get_method` finds it."""
    return ctypes.c_ssize_t.from_address(id(thing) + OBJECT_BYTES + i * ctypes.sizeof(ctypes.c_void_p)).value


def later(name: str, names: dict[str, Any], as_name: str) -> Callable[..., Any]:
    """A stand-in that puts the compiled function in its own place in `names` (a module's globals) at its first call."""

    def first(*arguments: Any) -> Any:
        names[as_name] = native(name)
        return names[as_name](*arguments)

    return first


def plain(key: Any) -> bytes:
    """A key or value as bytes; TypeError for what is none."""
    if isinstance(key, str):
        raise TypeError("Won't implicitly convert Unicode to bytes; use .encode()")
    if isinstance(key, bytes):
        return key
    return bytes(memoryview(key))


def code_of(noted: bytearray) -> int:
    """The status in an error."""
    return int.from_bytes(noted[:8], sys.byteorder, signed=True)
