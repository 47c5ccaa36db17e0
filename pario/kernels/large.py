"""Large pages for memory that processes share, also where the system gives such memory small ones by itself."""

from __future__ import annotations

import numpy as np
from numba import types

from pario.kernels.fence import full_fence
from pario.kernels.jit import ARRAY, emitted, inner, kernel

#: Of most processors. Those that have others refuse, or do nothing.
LARGE_BYTES = 2 << 20
#: Of a large page: nobody has asked for it; wait, somebody is asking, or about to give it back; it is there, or was
#: before a part of it was given back; there is none.
UNKNOWN, WAIT, LARGE, SMALL = range(4)
_PAGE, _PAUSE_US = 4096, 20
_POPULATE_READ, _COLLAPSE = 22, 25  # of madvise(2): Linux 5.14 and 6.1

_madvise = types.ExternalFunction("madvise", types.intc(types.uintp, types.uintp, types.intc))
#: CPU seconds after which no more are asked for: this memory is not there at once. (Here one takes 0.2 ms, and 3 to 4
#: where the host of a virtual machine has taken it away; copying as much into small pages takes 0.8.)
_SLOW_S = 1e-3
THREAD_CPU, MONOTONIC = 3, 1  # clocks

_clock = types.ExternalFunction("clock_gettime", types.intc(types.intc, types.uintp))
usleep = types.ExternalFunction("usleep", types.intc(types.uint32))


@emitted(types.boolean, ARRAY, types.intp, types.int64, types.int64)
def swap(builder, words, at, expected, value):  # type: ignore[no-untyped-def]
    """words[at] = value if it is `expected`, as one step among threads; returns whether it was. words : i64[n]"""
    found = builder.cmpxchg(builder.gep(words, [at]), expected, value, "seq_cst", "seq_cst")
    return builder.extract_value(found, 1)


@inner
def seconds(clock, time):  # type: ignore[no-untyped-def]
    """Of this clock of the system's. time : i64[2], for its use"""
    _clock(types.intc(clock), types.uintp(time.ctypes.data))
    return time[0] + time[1] * 1e-9


@kernel
def enlarge(pages, large, offset, nbytes):  # type: ignore[no-untyped-def]
    """Whether pages[offset : offset + nbytes] now lies in large pages alone.

    pages : u8[n], shared memory that begins with a large page
    large : i64[k], what is known of each of its large pages; at first 0. Of any further one: it is small
    """
    every = True
    for block in range(offset // LARGE_BYTES, (offset + nbytes - 1) // LARGE_BYTES + 1):
        if block >= len(large):
            return False
        if swap(large, block, UNKNOWN, WAIT):
            begin = seconds(THREAD_CPU, np.zeros(2, np.int64))
            at = types.uintp(pages.ctypes.data + block * LARGE_BYTES)
            # The system makes no large page where there is none at all. (This and the copy: 7.1 GB/s, one thread, from
            # a buffer in the cache; without, 2.5; 16 large pages at once, 5.0; after the copy, 2.4.)
            refused = _madvise(at, types.uintp(_PAGE), types.intc(_POPULATE_READ)) != 0
            refused = refused or _madvise(at, types.uintp(LARGE_BYTES), types.intc(_COLLAPSE)) != 0
            if seconds(THREAD_CPU, np.zeros(2, np.int64)) - begin > _SLOW_S:
                for other in range(len(large)):
                    swap(large, other, UNKNOWN, SMALL)
            full_fence()
            large[block] = SMALL if refused else LARGE
        while large[block] == WAIT:  # a page that is being written to cannot be moved
            usleep(types.uint32(_PAUSE_US))
            full_fence()
        every = every and large[block] == LARGE
    return every
