"""The process that compiles, so that no reader waits: one per node and user, started when a function is missing.

A thread would not do. A fork while it is inside the compiler would leave the child with the compiler's locks taken for
ever; the interpreter could exit while it runs; and it would hold the interpreter's lock for much of the time.

* A locked file beside the compiled functions says that somebody compiles. The process inherits the lock, and the
  system releases it when the process ends, however that happens.
* The process ends with all those that may wait for it, killed ones too: it holds the reading end of a pipe whose other
  end they have.
* It is nobody's child: programs that wait for any of their own children do not meet it.

Where none can be started, or nothing can be kept on disk, each function is compiled at its first call.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import llvmlite
import numba
import numpy as np

from pario.kernels.jit import lock_now
from pario.lmdb import plain

__all__ = ["Compiling"]

#: Seconds between two looks at whether all is compiled.
_PAUSE_S = 0.1
#: Seconds that a reader waits for the interpreter of that process to start. Usually it takes 0.05.
_START_S = 10.0
_LOCK = "lmdb.lock"

#: The process: a child of a child that has ended. Isolated (-I): what it imports is what is imported here.
_PROGRAM = """
import os, sys
if os.fork():
    os._exit(0)
os.setsid()
sys.path += sys.argv[1:]
from pario.lmdb.compiling import work
from pario.lmdb.native import compile_all
work(compile_all)
"""


class Compiling:
    """Knows whether all functions are compiled, and sees to it that they will be.

    done : the compiled functions are called from now on; it changes with plain.LOCK held
    """

    def __init__(self) -> None:
        # Under `python -b` plain Python warns where it compares what it made with 0.
        self.done = bool(sys.flags.bytes_warning) or not sys.executable
        self._started = False
        self._next_look = 0.0

    def look(self, all_cached: Callable[[], bool]) -> bool:
        """`done`; looks at the disk from time to time, and starts the process that compiles if there is none."""
        if time.monotonic() < self._next_look:
            return self.done
        with plain.LOCK:
            if not self.done and not plain.busy() and time.monotonic() >= self._next_look:
                self.done = self._look(all_cached)
                self._next_look = time.monotonic() + _PAUSE_S
        return self.done

    def _look(self, all_cached: Callable[[], bool]) -> bool:
        try:
            lock = lock_now(_LOCK)
        except BlockingIOError:
            return False
        except OSError:  # nothing can be kept
            return True
        try:
            if self._started or all_cached():  # nobody tries twice
                return True
            self._started = True
            _start(lock)
        except (OSError, subprocess.TimeoutExpired):
            return True
        finally:
            os.close(lock)
        return False


def _start(lock: int) -> None:
    """Start the process that compiles; it inherits the lock. Raises OSError or TimeoutExpired."""
    packages = (Path(__file__).parents[1], *(Path(str(one.__file__)).parent for one in (numba, llvmlite, np)))
    folders = dict.fromkeys(os.fspath(package.absolute().parent) for package in packages)
    until, ours = os.pipe()
    try:
        subprocess.run(
            [sys.executable, "-I", "-c", _PROGRAM, *folders],
            stdin=until,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[lock],
            check=False,
            timeout=_START_S,
        )
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(until)
    # `ours` stays open until this process ends, and every child that a fork gives a copy.


def work(compile_all: Callable[[], None]) -> None:
    """The work of that process."""
    threading.Thread(target=_end_with_others, daemon=True).start()
    compile_all()


def _end_with_others() -> None:
    os.read(0, 1)
    os._exit(0)
