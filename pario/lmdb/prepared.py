"""Pages and values that another process of the node, or a thread of this one, has brought because they were announced
(ahead.py, told.py). All of it compiled; see engine.py for the rules."""

from __future__ import annotations

import numpy as np
from numba import types

from pario.kernels.fence import full_fence
from pario.kernels.jit import inner
from pario.kernels.nodes import PAGE_SIZE
from pario.lmdb import told
from pario.lmdb.abi import TOLD_FD, TOLD_TABLE
from pario.lmdb.capi import add_at, as_words, intc, preadv, uintp, usleep

#: Microseconds between two looks at a value that is coming. (It takes the store hundreds at least: what comes sooner is
#: in the page cache, and is not brought.)
_NAP = 100


@inner
def prepared(g, offset):  # type: ignore[no-untyped-def]
    """Address of the slot of what begins here in the file; 0: it was not announced. Counts the asking."""
    late = as_words(g[TOLD_TABLE] + 8 * told.LATE_AT, told.LATE)
    number = add_at(g[TOLD_TABLE] + 8 * told.ASKED, 1) & (told.LATE - 1)
    late[number] = -1
    page = offset // g[PAGE_SIZE]
    if page * g[PAGE_SIZE] != offset:
        return np.int64(0)
    first = (page * 40503 + (page >> 14)) & (told.SLOTS - 1)
    for k in range(told.PROBES):
        at = g[TOLD_TABLE] + 8 * (told.HEAD + told.SLOT * ((first + k) & (told.SLOTS - 1)))
        slot = as_words(at, told.SLOT)
        if slot[told.PAGE] == page and slot[told.USE] & 3 != 0:
            return np.int64(at)
    late[number] = page
    return np.int64(0)


@inner
def is_here(slot_at):  # type: ignore[no-untyped-def]
    return as_words(slot_at, told.SLOT)[told.USE] & 3 == told.HERE


@inner
def from_prepared(g, slot_at, vectors, m, nbytes, offset):  # type: ignore[no-untyped-def]
    """Read it from there, after waiting for it if it is coming. False: the caller is to read the file, which the
    thread that was about to bring it is told. Touches no Python object."""
    slot, head = as_words(slot_at, told.SLOT), as_words(g[TOLD_TABLE], told.HEAD)
    page = offset // g[PAGE_SIZE]
    slept = np.int64(0)
    while True:
        use = slot[told.USE]
        full_fence()
        if use & 3 == 0 or slot[told.PAGE] != page or slot[told.NBYTES] < nbytes:
            return False
        if use & 3 == told.HERE:
            got = preadv(intc(g[TOLD_FD]), uintp(vectors), intc(m), types.int64(slot[told.AT]))
            full_fence()
            if got != nbytes or slot[told.USE] != use or not 0 <= slot_at - g[TOLD_TABLE] < 8 * told.WORDS:
                return False  # the last: the store has changed to another memory, and that file may be the new one's
            break
        if use & 3 != told.COMING or slept > head[told.PATIENCE]:
            break
        usleep(intc(_NAP))
        slept += _NAP
        full_fence()
    if slept > 0 or use & 3 != told.HERE:
        add_at(g[TOLD_TABLE] + 8 * told.MISSED, 1)
    add_at(slot_at + 8 * told.TAKEN, 1)
    return use & 3 == told.HERE
