"""chdir into a folder of a view.

No answer to a notification can change a program's working directory: only the program itself can, with a path or a
descriptor. So the supervisor puts a descriptor of the folder into the program, lets the chdir return, stops the thread
before its next instruction (ptrace), has it call fchdir and close, and gives it its registers back.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import struct
import time
from contextlib import suppress

from pario.files.notify import Gone, Iovec, Listener, failed, libc
from pario.files.numbers import ARCHITECTURE, machine

_SEIZE, _INTERRUPT, _DETACH, _SYSCALL, _GET, _SET = 0x4206, 0x4207, 17, 24, 0x4204, 0x4205
#: PTRACE_O_TRACESYSGOOD: stops at system calls look different from SIGTRAP. PTRACE_O_EXITKILL: a program does not go on
#: with changed registers if the supervisor dies.
_OPTIONS = 1 | 1 << 20
_AT_CALL = signal.SIGTRAP | 0x80
_STATUS = 1  # NT_PRSTATUS
_WALL = 0x40000000  # waitpid: threads, too
#: Seconds until a thread that was woken must have stopped.
_PATIENCE_S = 30.0

#: words among the registers: a call's result and number, that of the interrupted call, first argument, next instruction
_RESULT, _NUMBER, _INTERRUPTED, _FIRST, _NEXT = (10, 10, 15, 14, 16) if ARCHITECTURE == "x86_64" else (0, 8, 0, 0, 32)

libc.ptrace.restype = ctypes.c_long
libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)


def _ptrace(request: int, thread: int, address: int = 0, data: int = 0) -> None:
    if libc.ptrace(request, thread, address, data) < 0:
        raise failed()


def change_folder(listener: Listener, call: tuple[int, ...], fd: int) -> None:
    """Answer a chdir so that the program works in the folder behind `fd` afterwards.

    Raises Gone, OSError: EACCES where the thread is traced by a debugger, or may not be traced. A thread that cannot be
    moved any more, because it does not stop, is killed with its process.
    """
    thread = call[1]
    theirs = listener.add(call[0], fd)
    try:
        _ptrace(_SEIZE, thread, 0, _OPTIONS)
    except OSError:
        # The descriptor stays; the program closes it when it ends or runs another one.
        raise failed(errno.EACCES) from None
    signals: list[int] = []
    try:
        _ptrace(_INTERRUPT, thread)
        listener.give(call[0], 0)  # fails where the stop has already interrupted the call: then it must not begin again
        _stopped(thread, signals, ask_again=False)
        _let_it_call(thread, theirs, signals)
    except OSError:
        # It was told that it works in the new folder: it must not go on in the old one.
        _tell(thread, signal.SIGKILL)
        raise Gone from None
    finally:
        with suppress(OSError):  # gone, or not stopped: then it ends with the supervisor's next look at it
            _ptrace(_DETACH, thread)
        for number in signals:
            _tell(thread, number)


def _let_it_call(thread: int, fd: int, signals: list[int]) -> None:
    numbers = machine()
    saved = _registers(thread)
    result = _call(thread, saved, numbers.fchdir, fd, signals)
    _call(thread, saved, numbers.close, fd, signals)
    saved[_RESULT] = result & 0xFFFFFFFFFFFFFFFF
    if ARCHITECTURE == "x86_64":
        saved[_INTERRUPTED] = 0xFFFFFFFFFFFFFFFF  # nothing to begin again
    _set_registers(thread, saved)


def _call(thread: int, saved: list[int], number: int, argument: int, signals: list[int]) -> int:
    """Let the stopped thread make one system call; returns its result."""
    numbers = machine()
    now = list(saved)
    now[_FIRST] = argument
    now[_NUMBER] = number
    now[_NEXT] -= numbers.trap_bytes
    if ARCHITECTURE == "x86_64":
        now[_INTERRUPTED] = 0xFFFFFFFFFFFFFFFF
    _set_registers(thread, now)
    for _ in ("enters", "leaves"):
        _ptrace(_SYSCALL, thread)
        _stopped(thread, signals)
    return _registers(thread)[_RESULT]


def _stopped(thread: int, signals: list[int], ask_again: bool = True) -> None:
    """Wait for a stop, at a call (ask_again) or where it was interrupted. Signals that come meanwhile are kept."""
    end = time.monotonic() + _PATIENCE_S
    pause = 0.0
    while True:
        # An exit is only looked at: the thread that waits for programs needs it.
        seen = os.waitid(os.P_PID, thread, os.WEXITED | os.WSTOPPED | os.WNOWAIT | os.WNOHANG | _WALL)
        if seen is not None and seen.si_code in (os.CLD_EXITED, os.CLD_KILLED, os.CLD_DUMPED):
            raise ProcessLookupError
        found, status = (0, 0) if seen is None else os.waitpid(thread, os.WNOHANG | _WALL)
        if not found:
            if time.monotonic() > end:
                raise OSError(errno.EIO, "a thread did not stop")
            time.sleep(pause)
            pause = min(pause + 1e-5, 1e-3)
            continue
        if not os.WIFSTOPPED(status):
            raise ProcessLookupError
        number, event = os.WSTOPSIG(status), status >> 16
        if number == _AT_CALL or (event and not ask_again):
            return
        if not event:
            signals.append(number)
        _ptrace(_SYSCALL, thread)


def _registers(thread: int) -> list[int]:
    room = ctypes.create_string_buffer(1024)
    where = Iovec(ctypes.addressof(room), len(room))
    _ptrace(_GET, thread, _STATUS, ctypes.addressof(where))
    return list(struct.unpack(f"{where.length // 8}Q", room.raw[: where.length]))


def _set_registers(thread: int, values: list[int]) -> None:
    room = ctypes.create_string_buffer(struct.pack(f"{len(values)}Q", *values))
    where = Iovec(ctypes.addressof(room), 8 * len(values))
    _ptrace(_SET, thread, _STATUS, ctypes.addressof(where))


def _tell(thread: int, number: int) -> None:
    """Send a signal again that came while the thread was held."""
    with suppress(OSError):
        os.kill(thread, number)
