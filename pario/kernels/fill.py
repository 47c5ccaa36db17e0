"""Copies chunks of files into memory that processes share, beside the interpreter.

One call of `fill_chunks` fills until everything is there: a thread of low priority that came back for each chunk would
take the interpreter's lock, and lose the core while it holds it.
"""

from __future__ import annotations

import os
import platform

import numpy as np
from llvmlite import ir
from numba import types

from pario.kernels.fence import full_fence
from pario.kernels.jit import ARRAY, emitted, inner, kernel
from pario.kernels.large import MONOTONIC, THREAD_CPU, enlarge, seconds, swap, usleep
from pario.kernels.reads import read_now, read_whole, system_call

#: What a fill and its threads tell each other: the place in the order that is taken next, and before which all may be
#: taken; no more will come; stop now; why a thread has ended early (errno, or one of those below) and with which chunk;
#: chunks that were written, their bytes, and reads that brought them; how many threads there are, and how many of them
#: have a core.
NEXT, LIMIT, CLOSED, STOP, STATUS, WHERE, DONE, BYTES, READS, THREADS, CORES = range(11)
WORDS = 16
#: Of the head of the chunks' states: microseconds from chunk to chunk if the ranks leave the fill its cores; memory is
#: being given back, and a fill takes no more of what it was promised.
CHUNK_US, STOPPED = 5, 6
#: Chunks that follow each other are read at once, up to this many bytes.
RUN_BYTES = 1 << 20
#: Values of STATUS: the snapshot's meta page has changed; the memory took no more; the file ended early.
SNAPSHOT, NO_MEMORY, SHORT = -1, -2, -3

#: Number of the system call futex, and 0 where it is unknown: those that wait look often enough by themselves.
FUTEX = {"x86_64": 202, "aarch64": 98, "ppc64le": 221, "riscv64": 98, "s390x": 238}.get(platform.machine(), 0)
_WAKE, _EVERYBODY = 1, 0x7FFFFFFF
#: Number of the system call statx, whose struct is the same everywhere; 0 where it is unknown. Of an open file, size
#: and time of the last change.
STATX = {"x86_64": 332, "aarch64": 291, "ppc64le": 383, "riscv64": 291, "s390x": 379}.get(platform.machine(), 0)
_EMPTY_PATH, _MASK = 0x1000, 0x240
_STATX_BYTES, _SIZE_AT, _TIME_AT = 256, 40, 112
#: Of the threads that take what others leave. (With SCHED_IDLE they also waited for ranks that do next to nothing, such
#: as one that looks at each chunk that has come: first epochs of 41,000 records of 3 KB from a cold disk on 1, 2, 4
#: ranks of 2 cores 97, 129, 172 ms, so 79, 106, 129; out of the page cache 51, 96, 136, so 51, 100, 128. Scripts that
#: keep both cores busy lose nothing: 2 ranks that compute for 2 ms a batch 275, so 276.)
_NICE = 19
_PAGE, _EFAULT = 4096, 14
#: Pauses in microseconds: while nothing may be taken, and the longest of a thread that has had its share.
_PAUSE_US, _LONGEST_US = 1000, 50_000

_long = types.int64
_pwrite = types.ExternalFunction("pwrite", types.intp(types.intc, types.uintp, types.uintp, types.int64))
_nice = types.ExternalFunction("setpriority", types.intc(types.intc, types.intc, types.intc))


@emitted(types.boolean, ARRAY, types.intp)
def _claim(builder, flags, at):  # type: ignore[no-untyped-def]
    """flags[at] = 1 if it is 0, as one step among threads; returns whether it was. flags : u8[n]"""
    none, one = (ir.Constant(ir.IntType(8), value) for value in (0, 1))
    return builder.extract_value(builder.cmpxchg(builder.gep(flags, [at]), none, one, "seq_cst", "seq_cst"), 1)


@inner
def _claimed(coming, states, chunk):  # type: ignore[no-untyped-def]
    """Whether this thread is now the one that brings the chunk. Else it is there, or its bytes are about to go and
    would take the copy along, or an older fill, which nobody waited for, is just at it."""
    if not _claim(coming, chunk):
        return False
    if states[chunk] & 3:
        coming[chunk] = 0
        return False
    return True


@inner
def _add(words, at, n):  # type: ignore[no-untyped-def]
    while not swap(words, at, words[at], words[at] + n):
        pass


@inner
def _take(order, words, most):  # type: ignore[no-untyped-def]
    """The next place in the order, and how many of up to `most` chunks from there on follow each other; -1: there is
    nothing more to take."""
    while True:
        full_fence()
        if words[STOP] != 0 or words[STATUS] != 0:
            return np.int64(-1), 0
        closed = words[CLOSED]
        full_fence()
        at = words[NEXT]
        limit = min(words[LIMIT], at + most)
        full_fence()  # the order was written before
        if at < limit:
            n = 1
            while at + n < limit and order[at + n] == order[at] + n:
                n += 1
            if swap(words, NEXT, at, at + n):
                return at, n
        elif closed != 0:
            return np.int64(-1), 0
        else:
            usleep(types.uint32(_PAUSE_US))


@inner
def _copy(fd, direct, offset, nbytes, data, to, buffer):  # type: ignore[no-untyped-def]
    """From the page cache, or past it what is not there, to `to` in the tier: into large pages at once, else through
    `buffer`. Returns 0, an errno or one of the values of STATUS; and whether the page cache had it."""
    fd_to, pages, large = data
    straight = enlarge(pages, large, to, nbytes)
    # (Reads straight into small pages: 1.1 to 2.0 GB/s, and through a buffer 1.6 to 2.1; two threads, O_DIRECT.)
    address = pages.ctypes.data + to if straight else buffer.ctypes.data
    cached = read_now(fd, offset, nbytes, address)
    if not cached:
        got, errno = 0, 0
        if direct >= 0:
            errno, got = read_whole(direct, offset, -(-nbytes // _PAGE) * _PAGE, address)
        if got < nbytes:
            errno, got = read_whole(fd, offset, nbytes, address)
        if got < nbytes:
            if straight and errno == _EFAULT:  # a page that was given back meanwhile, and cannot be had again
                return NO_MEMORY, cached
            return errno if errno != 0 else SHORT, cached
    done = nbytes if straight else 0
    while done < nbytes:
        n = _pwrite(types.intc(fd_to), types.uintp(address + done), types.uintp(nbytes - done), types.int64(to + done))
        if n <= 0:
            return NO_MEMORY, cached
        done += n
    return 0, cached


@inner
def _is_ours(fd, at, stamp, nbytes, found):  # type: ignore[no-untyped-def]
    """Whether the snapshot's meta page, at this offset, still begins with its stamp, stamp[:nbytes]; -1: whether the
    file's size and time are those of the stamp. found : u8[...], as long as the stamp, and longer than struct statx"""
    if at < 0:
        found[-1] = 0  # the empty path
        path, to = _long(found.ctypes.data + len(found) - 1), _long(found.ctypes.data)
        if system_call(_long(STATX), _long(fd), path, _long(_EMPTY_PATH), _long(_MASK), to, _long(0)) != 0:
            return False
        size_at, time_at = _SIZE_AT, _TIME_AT - 8
    else:
        _, got = read_whole(fd, at, nbytes, found.ctypes.data)
        if got < nbytes:
            return False
        size_at = time_at = 0
    same = True
    for i in range(nbytes):  # NumPy's comparison takes as long to load as all of the rest
        same = same and found[i + (size_at if i < 8 else time_at)] == stamp[i]
    return same


@kernel
def has_status(fd, stamp):  # type: ignore[no-untyped-def]
    """Whether the system says that this open file has the size and time of the stamp (u8[20])."""
    return STATX != 0 and _is_ours(fd, -1, stamp, len(stamp), np.empty(_STATX_BYTES + 1, np.uint8))


@kernel
def fill_chunks(order, words, states, coming, head, files, stamps, chunk_bytes, data, buffer, share, least):  # type: ignore[no-untyped-def]
    """Copy the chunks order[:words[LIMIT]] that are not there, until words[CLOSED] and all are taken.

    order : i64[n]; words : i64[WORDS], shared by the threads of a fill
    states, coming, head : of the tier's `ChunkStates`
    files : i64[f, 6], of each file: its descriptor, one that bypasses the page cache or -1, the address at which it
        begins, its bytes, the offset of the snapshot's meta page or -1, the length of its stamp; no chunk lies in two
        files
    stamps : u8[f, k], what each of these meta pages begins with, or the file's size and time
    data : the tier's: its descriptor; u8[n], the same in memory; i64[k], its large pages (`enlarge`)
    buffer : u8[a chunk or RUN_BYTES, whichever is more], of this thread
    share : the most of a core that this thread takes; 0: what others leave of the cores, or `least` where a sandbox
        refuses that priority. It is taken here, beside the interpreter, whose lock such a thread would otherwise hold
        for seconds on a busy machine.
    """
    found, time = np.empty(max(stamps.shape[1], _STATX_BYTES + 1), np.uint8), np.zeros(2, np.int64)
    if share == 0 and _nice(types.intc(os.PRIO_PROCESS), types.intc(0), types.intc(_NICE)) != 0:
        share = least
    begin, spent = seconds(MONOTONIC, time), seconds(THREAD_CPU, time)
    most = max(1, RUN_BYTES // chunk_bytes)
    at, end = np.int64(0), np.int64(0)
    while True:
        if head[STOPPED] != 0:
            swap(words, STATUS, 0, NO_MEMORY)
        if at == end or words[STOP] != 0 or words[STATUS] != 0:
            at, n = _take(order, words, most)
            if at < 0:
                return
            end = at + n
        chunk = order[at]
        at += 1
        if not _claimed(coming, states, chunk):
            continue
        n = 1
        to = chunk * chunk_bytes
        f = 0
        while f + 1 < len(files) and files[f + 1, 2] <= to:
            f += 1
        fd, direct, base, size, meta = files[f, 0], files[f, 1], files[f, 2], files[f, 3], files[f, 4]
        while at < end and to + n * chunk_bytes < base + size:  # what follows it in this file
            if not _claimed(coming, states, chunk + n):
                break
            n, at = n + 1, at + 1
        cpu, wall = seconds(THREAD_CPU, time), seconds(MONOTONIC, time)
        status, cached = _copy(fd, direct, to - base, min(n * chunk_bytes, base + size - to), data, to, buffer)
        cost = (seconds(THREAD_CPU, time) - cpu) / words[CORES]
        if not cached:
            cost = max(cost, (seconds(MONOTONIC, time) - wall) / words[THREADS])
        cost *= 1e6 / n
        before = head[CHUNK_US]
        head[CHUNK_US] = max(1.0, cost if before == 0 else before + (cost - before) * 0.25)
        if status == 0 and not _is_ours(fd, meta, stamps[f], files[f, 5], found):
            status = SNAPSHOT
        if status != 0 and swap(words, STATUS, 0, status):
            words[WHERE] = chunk
        full_fence()
        for i in range(chunk, chunk + n):
            states[i] += status == 0
        full_fence()
        coming[chunk : chunk + n] = 0
        if status == 0:
            _add(words, DONE, n)
            _add(words, BYTES, min(n * chunk_bytes, files[-1, 2] + files[-1, 3] - to))
            _add(words, READS, 1)
        head[0] = (head[0] + 1) & 0x7FFFFFFF
        full_fence()
        if FUTEX:
            none = _long(0)
            system_call(_long(FUTEX), _long(head.ctypes.data), _long(_WAKE), _long(_EVERYBODY), none, none, none)
        if share > 0:
            used, passed = seconds(THREAD_CPU, time) - spent, seconds(MONOTONIC, time) - begin
            late = used / share - passed
            if late > 0:
                usleep(types.uint32(min(late * 1e6, _LONGEST_US)))
