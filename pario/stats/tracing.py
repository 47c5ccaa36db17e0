"""The traces of this process: one recorder for each file that options name, and one for all loaders under `python -m
pario trace`. What no close has written is written when the script ends."""

from __future__ import annotations

import atexit
import os
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pario.stats.trace import Recorder

_recorders: dict[str, Recorder] = {}
#: of the whole process, for loaders whose options name none
_process: Recorder | None = None


def recorder_of(path: str | None) -> Recorder | None:
    """The recorder of a loader whose options name this file; None: it is not traced."""
    if path is None:
        return _process if _process is not None and _process.pid == os.getpid() else None
    path = os.path.abspath(os.path.expanduser(path))
    found = _recorders.get(path)
    if found is None:
        from pario.stats.trace import Recorder  # most jobs are not traced

        found = Recorder(path)
        if not _recorders:
            atexit.register(_write_all)
        _recorders[path] = found
    return found if found.pid == os.getpid() else None  # a forked child would replace its parent's file


def joined(path: str | None, rank: int, size: int, node: int) -> Recorder | None:
    """`recorder_of`, which knows now which rank of how many this process is."""
    recorder = recorder_of(path)
    if recorder is not None and recorder.join(rank, size, node):
        from pario.stats.trace_file import remove_part

        remove_part(recorder)
    return recorder


def begin_process_trace(path: str, rank: int, size: int) -> Recorder:
    """From now on every loader of this process is traced that names no other file. rank, size : of the process in its
    job"""
    global _process
    _process = joined(path, rank, size, 0)
    assert _process is not None  # this process has not been forked from one that was traced
    return _process


def _write_all() -> None:
    from pario.stats.trace_file import write_part

    for recorder in _recorders.values():
        if recorder.dirty and recorder.pid == os.getpid():
            with suppress(Exception):  # the script has ended, and nobody reads an error
                write_part(recorder)
