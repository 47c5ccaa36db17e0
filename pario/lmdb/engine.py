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

    abi.py      the arrays that describe a file, a database, a transaction and a cursor
    capi.py     the interpreter's and the system's functions
    pages.py    reading, and the cache of pages
    moves.py    down a tree, and what a cursor does
    values.py   keys and values
    engine.py   what Python calls, one function per call
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
from numba import types
from numba.extending import NativeValue, box, intrinsic, models, register_model, unbox

from pario.format.layout import F_DUPDATA
from pario.kernels.jit import c_function, entry, inner, kernel
from pario.kernels.nodes import BIG, PAGE_SIZE, count, key_span, node_at, search_leaf, u16, word
from pario.lmdb.abi import (
    ALIVE,
    C_DUP_ENTRIES,
    C_DUPS,
    C_END,
    C_HANDLE,
    C_ITEMS,
    C_PAGES,
    C_SCAN,
    C_SET,
    C_TXN,
    C_VALID,
    CLOSED,
    CURSOR_WORDS,
    DAMAGED,
    DEPTH,
    DUP_TREE,
    DUPSORT,
    EMPTY_KEY,
    ERROR,
    FD,
    FIRST,
    HANDLE_WORDS,
    INCOMPATIBLE,
    JOB_WORDS,
    KEY_INTEGER,
    KEY_WAY,
    MAIN,
    META_BYTES,
    MISSING,
    NEXT,
    NEXT_DUP,
    NEXT_NODUP,
    NOT_BYTES,
    NOTED,
    OBJECT_BYTES,
    OK,
    OPEN,
    OTHER,
    OTHER_AT,
    PAGE_OF,
    ROOT,
    RULES,
    SET_KEY,
    SET_RANGE,
    SLOTS,
    STORE,
    STORE_WORDS,
    SUB_PAGE,
    TXN_WORDS,
    UNPOSITIONED,
    VALUE,
)
from pario.lmdb.capi import (
    as_bytes,
    as_words,
    bool_new,
    bytes_size,
    bytes_start,
    clear,
    decref,
    incref,
    int_new,
    int_of,
    intc,
    intp,
    list_append,
    list_item,
    list_new,
    list_size,
    memcmp,
    none_new,
    pages_of,
    pread,
    scratch_memory,
    tuple_size,
    uintp,
    vectorcall,
)
from pario.lmdb.moves import enter, go, leaf_for, moved, seek, sub_page
from pario.lmdb.pages import error, fail, page_at, plain_error
from pario.lmdb.values import failed, fill_values, item_of, node_item, read_values, value_at, value_of, values_read


@inner
def _alive(txn_at):  # type: ignore[no-untyped-def]
    """The store's words, or an empty array."""
    if txn_at:
        txn = as_words(txn_at, TXN_WORDS)
        if txn[ALIVE]:
            g = as_words(txn[STORE], STORE_WORDS)
            if g[OPEN]:
                g[ERROR] = OK
                return g
    return as_words(scratch_memory(), 0)


@inner
def _argument(key):  # type: ignore[no-untyped-def]
    """(address, bytes) of a bytes object; bytes < 0 if it is none."""
    nbytes = bytes_size(key)
    if nbytes < 0:
        clear()
        return intp(0), nbytes
    return intp(bytes_start(key)), nbytes


@inner
def _lookup(txn_at, handle_at, key):  # type: ignore[no-untyped-def]
    """(OK, the value (of the first duplicate) of a key), (MISSING, 0), (NOTED, what `_get` is to return) or
    (CLOSED, NOT_BYTES or EMPTY_KEY, 0).
    """
    nothing = uintp(0)
    g = _alive(txn_at)
    if len(g) == 0:
        return CLOSED, nothing
    wanted_at, nbytes = _argument(key)
    if nbytes <= 0:
        return NOT_BYTES if nbytes < 0 else EMPTY_KEY, nothing
    wanted = as_bytes(wanted_at, nbytes)
    handle = as_words(handle_at if handle_at else as_words(txn_at, TXN_WORDS)[MAIN], HANDLE_WORDS)
    if handle[ROOT] < 0:
        return MISSING, nothing
    status, o, i = _find_in_leaf(g, handle, wanted)
    if status == MISSING:
        return MISSING, nothing
    value = nothing
    if status == OK:
        pool = pages_of(g)
        at = node_at(pool, o, i, g)
        pgno = word(pool, o, g)
        if u16(pool, at + 4, g[BIG]) & F_DUPDATA:
            value = _first_dup(g, handle, pgno, i)
        else:
            value = value_at(g, at, pgno)
    return (OK, value) if value else (NOTED, failed(g))


@inner
def _get(txn_at, handle_at, key):  # type: ignore[no-untyped-def]
    """The value (of the first duplicate) of a key. `handle_at` 0: the transaction's default database.

    bytes, or False if there is none, or an error.
    """
    status, value = _lookup(txn_at, handle_at, key)
    if status == MISSING:
        return bool_new(0)
    return value if status in (OK, NOTED) else plain_error(status)


@inner
def _first_dup(g, handle, pgno, i):  # type: ignore[no-untyped-def]
    """The first duplicate of item i of a leaf; 0: an error is noted or raised."""
    c = np.empty(CURSOR_WORDS, np.int64)
    c[C_PAGES + handle[DEPTH] - 1], c[C_ITEMS + handle[DEPTH] - 1] = pgno, i
    status = enter(g, handle, c, False)
    return value_of(g, handle, c, c[0:0]) if status == OK else uintp(0)


def get_method(self, given_at, given, names):  # type: ignore[no-untyped-def]
    """Transaction.get as a method in C's calling convention (METH_FASTCALL | METH_KEYWORDS), for the usual call with
    nothing but a key: no frame of the interpreter, no conversion of arguments. All others go to the Python method.
    """
    slots = as_words(intp(self + OBJECT_BYTES), 2)
    if given == 1 and names == 0:
        txn_at = int_of(uintp(slots[0]))
        if txn_at > 0:
            status, value = _lookup(txn_at, 0, uintp(as_words(intp(given_at), 1)[0]))
            if status == OK:
                return value
            if status == NOTED and value != 0:
                decref(value)  # it is made again, and raised
            elif status == NOTED:
                return value
            elif status == MISSING:
                scratch = as_words(scratch_memory(), 1)
                scratch[0] = 0
                return none_new(uintp(scratch.ctypes.data))  # Py_BuildValue(""), which is None
    # One more argument than given: the object itself. More than these no call of it can have.
    arguments = as_words(scratch_memory(), 32)
    arguments[0] = self
    many = given + (tuple_size(names) if names != 0 else 0)
    if many > 31:  # let it complain about none
        return vectorcall(uintp(slots[1]), uintp(arguments.ctypes.data), uintp(1), uintp(0))
    for i in range(many):
        arguments[1 + i] = as_words(intp(given_at), many)[i]
    return vectorcall(uintp(slots[1]), uintp(arguments.ctypes.data), uintp(given + 1), names)


@inner
def _move(cursor_at, op):  # type: ignore[no-untyped-def]
    """A move without a key: True, False or an error."""
    c = as_words(cursor_at, CURSOR_WORDS)
    g = _alive(c[C_TXN])
    if len(g) == 0:
        return plain_error(CLOSED)
    status = go(g, as_words(c[C_HANDLE], HANDLE_WORDS), c, op)
    c[C_VALID] = status == OK
    return bool_new(status == OK) if status <= MISSING else error(g)


@inner
def _find(cursor_at, op, key, value):  # type: ignore[no-untyped-def]
    """A move to a key: True, False or an error."""
    c = as_words(cursor_at, CURSOR_WORDS)
    g = _alive(c[C_TXN])
    if len(g) == 0:
        return plain_error(CLOSED)
    key_at, key_nbytes = _argument(key)
    value_at, value_nbytes = _argument(value)
    if key_nbytes < 0 or value_nbytes < 0:
        return plain_error(NOT_BYTES)
    handle = as_words(c[C_HANDLE], HANDLE_WORDS)
    if op == SET_RANGE and key_nbytes == 0:
        status = go(g, handle, c, FIRST)
    else:
        status = seek(g, handle, c, op, as_bytes(key_at, key_nbytes), as_bytes(value_at, value_nbytes))
    c[C_VALID] = status == OK
    return bool_new(status == OK) if status <= MISSING else error(g)


@inner
def _look(cursor_at, what):  # type: ignore[no-untyped-def]
    """The key, value or item where the cursor stands, or an error. The cursor must be valid."""
    c = as_words(cursor_at, CURSOR_WORDS)
    g = _alive(c[C_TXN])
    if len(g) == 0:
        return plain_error(CLOSED)
    found = item_of(g, as_words(c[C_HANDLE], HANDLE_WORDS), c, what, c[0:0])
    return found if found else failed(g)


@inner
def _count(cursor_at):  # type: ignore[no-untyped-def]
    """Number of duplicates of the key where the cursor stands, or an error."""
    c = as_words(cursor_at, CURSOR_WORDS)
    g = _alive(c[C_TXN])
    if len(g) == 0:
        return plain_error(CLOSED)
    handle = as_words(c[C_HANDLE], HANDLE_WORDS)
    if not handle[DUPSORT]:
        return plain_error(INCOMPATIBLE)
    if not c[C_SET]:
        return plain_error(UNPOSITIONED)
    many = np.int64(1)
    if c[C_DUPS] == DUP_TREE:
        many = c[C_DUP_ENTRIES]
    elif c[C_DUPS] == SUB_PAGE:
        o = sub_page(g, handle, c)
        if o < 0:
            return error(g)
        many = np.int64(count(pages_of(g), o, g))
    # As in LMDB, whoever counts stands on the key again.
    c[C_END] = 0
    return int_new(intp(many))


@inner
def _collect(cursor_at, op, started, most, most_bytes, what):  # type: ignore[no-untyped-def]
    """The next items as a list, at most `most`, stopping after `most_bytes` of values; [] at the end. Or an error.

    started : 0 = the first is the one where the cursor stands; nothing comes if that is nowhere
    The cursor stands on the last item returned. After an error its place is undefined.
    """
    c = as_words(cursor_at, CURSOR_WORDS)
    g = _alive(c[C_TXN])
    if len(g) == 0:
        return plain_error(CLOSED)
    handle = as_words(c[C_HANDLE], HANDLE_WORDS)
    found = list_new(intp(0))
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
    pool = pages_of(g)
    while n < most and total < most_bytes:
        if n == 0 and not c[C_VALID]:
            break
        if n > 0 or started:
            # Without duplicates, the items of one leaf are one step apart. Its page stays where it is, unless the
            # making of a tuple set off a garbage collection, and that a destructor that reads.
            i = c[C_ITEMS + level] + step
            if o and 0 <= i < items and as_words(g[PAGE_OF], g[SLOTS])[o // g[PAGE_SIZE]] == pgno:
                c[C_ITEMS + level] = i
            else:
                o = np.int64(0)
                end = c[C_END]
                status = go(g, handle, c, op)
                if status != OK:
                    if n > 0:
                        c[C_END] = end  # nobody has asked for what comes after the last item yet
                    break
        if not handle[DUPSORT]:
            if o == 0:
                pgno = c[C_PAGES + level]
                o = page_at(g, pgno, level, handle[DEPTH], 0, handle[RULES])
                if o < 0:
                    status = CLOSED
                    break
                items = count(pool, o, g)
                if not 0 <= c[C_ITEMS + level] < items:
                    status = moved(g)
                    break
                # The first page of the pool starts at 0, which here means "none": then each item takes the long way.
            at = node_at(pool, o, c[C_ITEMS + level], g)
            if u16(pool, at + 4, g[BIG]) & F_DUPDATA:
                status = fail(g, DAMAGED, pgno, pgno * g[PAGE_SIZE], 0, 0, 0)
                break
            thing = node_item(g, pool, at, pgno, what, jobs[m] if what & VALUE else no_job)
        else:
            thing = item_of(g, handle, c, what, jobs[m] if what & VALUE else no_job)
        if thing == 0:
            status = CLOSED
            break
        if what & VALUE and jobs[m, 1] >= 0:
            total += jobs[m, 1]
            m += 1
        refused = list_append(found, thing)
        decref(thing)
        if refused:
            g[ERROR] = OK
            status = CLOSED
            break
        n += 1
    c[C_SCAN] = 0
    if status <= MISSING:
        c[C_VALID] = n > 0
        status = read_values(g, jobs[:m])
    if status > MISSING:
        c[C_VALID] = 0
        decref(found)
        return failed(g)
    return found


@inner
def _skip(cursor_at, op, steps):  # type: ignore[no-untyped-def]
    """Repeat a move that is known to succeed: True, or False or an error if it does not."""
    c = as_words(cursor_at, CURSOR_WORDS)
    g = _alive(c[C_TXN])
    if len(g) == 0:
        return plain_error(CLOSED)
    handle = as_words(c[C_HANDLE], HANDLE_WORDS)
    status = OK
    for _ in range(steps):
        status = go(g, handle, c, op)
        if status != OK:
            break
    c[C_VALID] = status == OK
    return bool_new(status == OK) if status <= MISSING else error(g)


@inner
def _is_newest(store_at):  # type: ignore[no-untyped-def]
    """Has nobody committed since the snapshot S was taken? S + 1 writes the other meta page. False also if unsure."""
    g = as_words(store_at, STORE_WORDS)
    scratch = scratch_memory()
    nbytes = g[META_BYTES]
    got = pread(intc(g[FD]), uintp(scratch), uintp(nbytes), types.int64(g[OTHER_AT]))
    return bool_new(got == nbytes and memcmp(uintp(scratch), uintp(g[OTHER]), uintp(nbytes)) == 0)


@inner
def _find_in_leaf(g, handle, key):  # type: ignore[no-untyped-def]
    """(OK, where the leaf starts in the pool, item), (MISSING, 0, 0) or (an error, 0, 0)."""
    nowhere = np.int64(0)
    o = leaf_for(g, handle, key)
    if o < 0:
        return g[ERROR], nowhere, nowhere
    pool = pages_of(g)
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
    c = as_words(cursor_at, CURSOR_WORDS)
    g = _alive(c[C_TXN])
    if len(g) == 0:
        return plain_error(CLOSED)
    handle = as_words(c[C_HANDLE], HANDLE_WORDS)
    n = list_size(keys)
    found = list_new(intp(0))
    if found == 0:
        return found
    noted = as_words(jobs_at, 1 + JOB_WORDS * n)
    noted[0] = m = 0
    nothing = c[0:0]
    empty = as_bytes(jobs_at, 0)
    status = OK
    for i in range(n):
        if i >= list_size(keys):
            break  # somebody shortened it while the lock was released
        key = list_item(keys, intp(i))
        incref(key)
        key_at, nbytes = _argument(key)
        if nbytes < 0:
            status = fail(g, NOT_BYTES, 0, 0, 0, 0, 0)
        elif i < n - 1 and not handle[DUPSORT] and nbytes > 0 and handle[ROOT] >= 0:
            # Only where the last key leads matters to the cursor.
            status, o, item = _find_in_leaf(g, handle, as_bytes(key_at, nbytes))
        else:
            o, item = np.int64(-1), np.int64(0)
            status = seek(g, handle, c, SET_KEY, as_bytes(key_at, nbytes), empty)
            c[C_VALID] = status == OK
        decref(key)
        if status == MISSING:
            continue
        if status != OK:
            break
        job = noted[1 + JOB_WORDS * m : 1 + JOB_WORDS * (m + 1)]
        job[1] = -1
        if o >= 0:
            pool = pages_of(g)
            at = node_at(pool, o, item, g)
            pgno = word(pool, o, g)
            if u16(pool, at + 4, g[BIG]) & F_DUPDATA:
                status = fail(g, DAMAGED, pgno, pgno * g[PAGE_SIZE], 0, 0, 0)
                break
            thing = node_item(g, pool, at, pgno, what, job)
        else:
            thing = item_of(g, handle, c, what, job if what & VALUE else nothing)
        if thing == 0:
            status = CLOSED
            break
        if job[1] >= 0:
            m += 1
        refused = list_append(found, thing)
        decref(thing)
        if refused:
            g[ERROR] = OK
            status = CLOSED
            break
    if status > MISSING:
        c[C_VALID] = 0
        decref(found)
        return failed(g)
    noted[0] = m
    return found


@inner
def _after_values(store_at, jobs_at, m, status, failure_at):  # type: ignore[no-untyped-def]
    """None of other threads' readings of values (`fill`) found something wrong: True. Or an error."""
    g = as_words(store_at, STORE_WORDS)
    jobs = as_words(jobs_at, JOB_WORDS * m).reshape((m, JOB_WORDS))
    failure = as_words(failure_at, 4)
    return bool_new(1) if values_read(g, jobs, status, failure) == OK else error(g)


@kernel
def fill(store_at, jobs, failure):  # type: ignore[no-untyped-def]
    """`fill_values` for Python's threads: runs without the interpreter's lock."""
    return fill_values(as_words(store_at, STORE_WORDS), jobs, failure)


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
    "get": (get, _object(intp, intp, _object)),
    "move": (move, _object(intp, intp)),
    "find": (find, _object(intp, intp, _object, _object)),
    "look": (look, _object(intp, intp)),
    "count": (count_dups, _object(intp)),
    "collect": (collect, _object(intp, intp, intp, intp, intp, intp)),
    "skip": (skip, _object(intp, intp, intp)),
    "is_newest": (is_newest, _object(intp)),
    "find_many": (find_many, _object(intp, _object, intp, intp)),
    "after_values": (after_values, _object(intp, intp, intp, intp, intp)),
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
    function = c_function(get_method, uintp(uintp, uintp, intp, uintp))
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
