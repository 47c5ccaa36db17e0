"""The part that must be fast: keys in, Python objects out, in one call each.

A call from Python to a compiled function costs 0.1 us, and so does every Python object that is made on the way. So the
functions in this file are compiled once and called with the interpreter's lock held: they search cached
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

    abi.py      the arrays that describe a file, a database, a transaction and a cursor
    capi.py     the interpreter's and the system's functions
    pages.py    reading, and the cache of pages
    moves.py    down a tree, and what a cursor does
    values.py   keys and values
    engine.py   what Python calls for one key or one move, a function each
    batches.py  ... and for many
    objects.py  Python's objects on the way in and out
    native.py   all of it as Python calls it
"""

from __future__ import annotations

import numpy as np
from numba import types

from pario.format.layout import F_DUPDATA
from pario.kernels import reads
from pario.kernels.calls import as_bytes
from pario.kernels.jit import inner
from pario.kernels.nodes import BIG, key_span, node_at, search_leaf, u16, word
from pario.lmdb import abi, capi
from pario.lmdb.capi import as_words, intc, intp, pages_of, uintp
from pario.lmdb.moves import go, leaf_for, seek
from pario.lmdb.pages import error, fail, plain_error
from pario.lmdb.values import failed, item_in_leaf, item_of, node_value


@inner
def alive(txn_at):  # type: ignore[no-untyped-def]
    """The store's words, or an empty array."""
    if txn_at:
        txn = as_words(txn_at, abi.TXN_WORDS)
        if txn[abi.ALIVE]:
            g = as_words(txn[abi.STORE], abi.STORE_WORDS)
            if g[abi.OPEN]:
                g[abi.ERROR] = abi.OK
                return g
    return as_words(capi.scratch_memory(), 0)


@inner
def opened(cursor_at):  # type: ignore[no-untyped-def]
    """The words of a cursor's store, an empty array if it is closed, of its database, and its own."""
    c = as_words(cursor_at, abi.CURSOR_WORDS)
    return alive(c[abi.C_TXN]), as_words(c[abi.C_HANDLE], abi.HANDLE_WORDS), c


@inner
def argument(key):  # type: ignore[no-untyped-def]
    """(address, bytes) of a bytes object; bytes < 0 if it is none."""
    nbytes = capi.bytes_size(key)
    if nbytes < 0:
        capi.clear()
        return intp(0), nbytes
    return intp(capi.bytes_start(key)), nbytes


@inner
def _lookup(txn_at, handle_at, key):  # type: ignore[no-untyped-def]
    """(OK, the value (of the first duplicate) of a key), (MISSING, 0), (NOTED, what `get` is to return) or
    (CLOSED or NOT_BYTES, 0).
    """
    nothing = uintp(0)
    g = alive(txn_at)
    if len(g) == 0:
        return abi.CLOSED, nothing
    wanted_at, nbytes = argument(key)
    if nbytes < 0:
        return abi.NOT_BYTES, nothing
    handle = as_words(handle_at if handle_at else as_words(txn_at, abi.TXN_WORDS)[abi.MAIN], abi.HANDLE_WORDS)
    status, o, i = find_in_leaf(g, handle, as_bytes(wanted_at, nbytes))
    if status == abi.MISSING:
        return abi.MISSING, nothing
    value = nothing
    if status == abi.OK:
        pool = pages_of(g)
        at = node_at(pool, o, i, g)
        with_dups = u16(pool, at + 4, g[BIG]) & F_DUPDATA
        value = item_in_leaf(g, handle, o, i, abi.VALUE, 0) if with_dups else node_value(g, at, word(pool, o, g), 0)
    return (abi.OK, value) if value != 0 else (abi.NOTED, failed(g))


def get(txn_at, handle_at, key):  # type: ignore[no-untyped-def]
    """The value (of the first duplicate) of a key. `handle_at` 0: the transaction's default database.

    bytes, or False if there is none, or an error.
    """
    status, value = _lookup(txn_at, handle_at, key)
    if status == abi.MISSING:
        return capi.bool_new(0)
    return value if status in (abi.OK, abi.NOTED) else plain_error(status)


def get_method(self, given_at, given, names):  # type: ignore[no-untyped-def]
    """Transaction.get as a method in C's calling convention (METH_FASTCALL | METH_KEYWORDS), for the usual call with
    nothing but a key: no frame of the interpreter, no conversion of arguments. All others go to the Python method.
    """
    slots = as_words(intp(self + abi.OBJECT_BYTES), 2)
    if given == 1 and names == 0:
        txn_at = capi.int_of(uintp(slots[0]))
        if txn_at > 0:
            status, value = _lookup(txn_at, 0, uintp(as_words(intp(given_at), 1)[0]))
            if status == abi.OK:
                return value
            if status == abi.NOTED and value != 0:
                capi.decref(value)  # it is made again, and raised
            elif status == abi.NOTED:
                return value
            elif status == abi.MISSING:
                scratch = as_words(capi.scratch_memory(), 1)
                scratch[0] = 0
                return capi.none_new(uintp(scratch.ctypes.data))  # Py_BuildValue(""), which is None
    # One more argument than given: the object itself. More than these no call of it can have.
    arguments = as_words(capi.scratch_memory(), 32)
    arguments[0] = self
    many = given + (capi.tuple_size(names) if names != 0 else 0)
    if many > 31:  # let it complain about none
        return capi.vectorcall(uintp(slots[1]), uintp(arguments.ctypes.data), uintp(1), uintp(0))
    for i in range(many):
        arguments[1 + i] = as_words(intp(given_at), many)[i]
    return capi.vectorcall(uintp(slots[1]), uintp(arguments.ctypes.data), uintp(given + 1), names)


def move(cursor_at, op):  # type: ignore[no-untyped-def]
    """A move without a key: True, False or an error."""
    g, handle, c = opened(cursor_at)
    if len(g) == 0:
        return plain_error(abi.CLOSED)
    status = go(g, handle, c, op)
    c[abi.C_VALID] = status == abi.OK
    return capi.bool_new(status == abi.OK) if status <= abi.MISSING else error(g)


def find(cursor_at, op, key, value):  # type: ignore[no-untyped-def]
    """A move to a key: True, False or an error."""
    g, handle, c = opened(cursor_at)
    if len(g) == 0:
        return plain_error(abi.CLOSED)
    key_at, key_nbytes = argument(key)
    value_at, value_nbytes = argument(value)
    if key_nbytes < 0 or value_nbytes < 0:
        return plain_error(abi.NOT_BYTES)
    if op == abi.SET_RANGE and key_nbytes == 0:
        status = go(g, handle, c, abi.FIRST)
    else:
        status = seek(g, handle, c, op, as_bytes(key_at, key_nbytes), as_bytes(value_at, value_nbytes))
    c[abi.C_VALID] = status == abi.OK
    return capi.bool_new(status == abi.OK) if status <= abi.MISSING else error(g)


def look(cursor_at, what):  # type: ignore[no-untyped-def]
    """The key, value or item where the cursor stands, or an error. The cursor must be valid."""
    g, handle, c = opened(cursor_at)
    if len(g) == 0:
        return plain_error(abi.CLOSED)
    found = item_of(g, handle, c, what, 0)
    return found if found != 0 else failed(g)


def is_newest(store_at):  # type: ignore[no-untyped-def]
    """Has nobody committed since the snapshot S was taken? S + 1 writes the other meta page. False also if unsure."""
    g = as_words(store_at, abi.STORE_WORDS)
    scratch = capi.scratch_memory()
    nbytes = g[abi.META_BYTES]
    got = reads.pread(intc(g[abi.FD]), uintp(scratch), uintp(nbytes), types.int64(g[abi.OTHER_AT]))
    return capi.bool_new(got == nbytes and capi.memcmp(uintp(scratch), uintp(g[abi.OTHER]), uintp(nbytes)) == 0)


@inner
def find_in_leaf(g, handle, key):  # type: ignore[no-untyped-def]
    """(OK, where the leaf starts in the pool, item), (MISSING, 0, 0) or (an error, 0, 0)."""
    nowhere = np.int64(0)
    if len(key) == 0:
        return np.int64(fail(g, abi.EMPTY_KEY, 0, 0, 0, 0, 0)), nowhere, nowhere
    if handle[abi.ROOT] < 0:
        return np.int64(abi.MISSING), nowhere, nowhere
    o = leaf_for(g, handle, key)
    if o < 0:
        return g[abi.ERROR], nowhere, nowhere
    pool = pages_of(g)
    if handle[abi.INTEGER] and key_span(pool, o, 0, g)[1] != len(key):
        return np.int64(abi.MISSING), nowhere, nowhere
    i, equal = search_leaf(pool, o, key, handle[abi.WAY], g)
    return np.int64(abi.OK if equal else abi.MISSING), np.int64(o), np.int64(i)
