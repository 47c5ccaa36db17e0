"""Waits for a word of shared memory to change, between threads and processes, without using the processor.

A futex is an int32 in memory and two system calls: `wait` sleeps while the word has an expected value, `wake_all` wakes
all that sleep on it. The kernel compares the word after it has queued the waiter, and looks for waiters behind a
full memory barrier, so a store followed by `wake_all` is never missed:

    waiter                                  waker
    while word != wanted:                   fence(); word = wanted
        wait(address, word, timeout_s)      wake_all(address)

There is no flag "somebody waits" beside the words: storing the word and then reading the flag would need a full barrier
in between (every processor delays stores behind later loads), and would save a call of less than a microsecond.

We use the SHARED form (without FUTEX_PRIVATE_FLAG): the word lies in memory that several processes map at different
addresses. On systems other than 64-bit Linux, waiting means sleeping with back-off.

Memory order. A word announces other data: it must be visible before the word (`fence()` before the store) and must
be read after it (`fence()` after the load). On x86-64 and s390x stores stay in order among themselves, and so do loads,
and the interpreter's calls keep the compiler from moving anything: `fence` does nothing there. On other processors
(aarch64, ppc64le, riscv64) it is a full barrier from a Numba kernel, which is compiled on those machines only. Single
aligned int32 and int64 accesses through a memoryview are one instruction, hence never torn.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import sys
import time
from collections.abc import Callable

_FUTEX_WAIT = 0
_FUTEX_WAKE = 1
_EVERYBODY = 0x7FFFFFFF

#: number of the futex system call, where `long` and time stamps have 64 bits
_NUMBERS = {"x86_64": 202, "aarch64": 98, "ppc64le": 221, "riscv64": 98, "s390x": 238}

#: processors that keep both stores and loads in program order
_ORDERED = {"x86_64", "s390x"}

#: without a futex: pauses grow from the first to the second, in seconds
_PAUSES_S = (2e-5, 1e-3)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


def _number() -> int | None:
    if not sys.platform.startswith("linux") or ctypes.sizeof(ctypes.c_long) != 8:
        return None
    return _NUMBERS.get(platform.machine())


_NR = _number()

if _NR is not None:
    # CDLL releases the GIL during the call; use_errno keeps errno per thread.
    _syscall = ctypes.CDLL(None, use_errno=True).syscall
    _syscall.restype = ctypes.c_long
    _nr, _wait_op, _wake_op = ctypes.c_long(_NR), ctypes.c_int(_FUTEX_WAIT), ctypes.c_int(_FUTEX_WAKE)
    _all = ctypes.c_int(_EVERYBODY)


def _wait_futex(address: int, expected: int, timeout_s: float) -> bool:
    timeout = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
    done = _syscall(
        _nr, ctypes.c_void_p(address), _wait_op, ctypes.c_uint32(expected & 0xFFFFFFFF), ctypes.byref(timeout), None
    )
    if done == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EAGAIN, errno.EINTR):  # already changed; or a signal, which Python handles now
        return True
    if number == errno.ETIMEDOUT:
        return False
    return _wait_sleeping(address, expected, timeout_s)  # ENOSYS: a sandbox without futexes


def _wait_sleeping(address: int, expected: int, timeout_s: float) -> bool:
    word = ctypes.c_int32.from_address(address)
    end = time.monotonic() + timeout_s
    pause, longest = _PAUSES_S
    while word.value == expected:
        left = end - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(pause * 1.5, longest)
    return True


def _wake_futex(address: int) -> int:
    return max(0, int(_syscall(_nr, ctypes.c_void_p(address), _wake_op, _all)))


def _numba_fence() -> None:
    global fence
    from pario.kernels.fence import full_fence

    fence = full_fence
    full_fence()


#: wait(address, value, seconds): sleep while the int32 there has this value, at most for these seconds. True: woken, or
#: the value differs, or a signal came, or spuriously: test the word again. False: the seconds have passed.
wait: Callable[[int, int, float], bool] = _wait_sleeping if _NR is None else _wait_futex
#: Wake all threads and processes that sleep on the int32 at this address; returns their number, 0 if it is unknown.
wake_all: Callable[[int], int] = (lambda address: 0) if _NR is None else _wake_futex
#: Orders earlier reads and writes before later ones (see above).
fence: Callable[[], None] = (lambda: None) if platform.machine() in _ORDERED else _numba_fence
