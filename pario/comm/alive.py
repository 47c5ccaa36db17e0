"""Detects dead ranks, and where the living are, without asking: a rank that computes for an hour answers nobody.

On the same node /proc tells, by process number and start time.

Between nodes the kernel tells: the leader of every node keeps one connection to rank 0's process (lifeline.py), and the
system closes it when a process ends, in any way; rank 0 tells the other leaders. The ranks of a node watch each other.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from pario.comm.launcher import job_name, launched_rank
from pario.errors import DeadRankError

_log = logging.getLogger("pario")

#: Processes whose start time one check reads (a file in /proc each); of the others it tests only the existence.
STATS_PER_LOOK = 8


def myself() -> list[int]:
    """[process number, start time, process number namespace]; a start time of 0 means unknown."""
    pid = os.getpid()
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        namespace = 0
    return [pid, _started(pid) or 0, namespace]


class Watch:
    """The neighbours of one rank.

    people : `myself()` of every rank of the node, by node rank
    ranks : their ranks; me : this one's node rank
    lifeline : to other nodes; None: there are none. Its gone() returns a rank, or None
    """

    def __init__(
        self, people: Sequence[Sequence[int]], ranks: Sequence[int], me: int, lifeline: Any = None
    ) -> None:
        # In another container the same process number may belong to a different process.
        self._others = [
            (node_rank, rank, pid, start)
            for node_rank, (rank, (pid, start, namespace)) in enumerate(zip(ranks, people, strict=True))
            if node_rank != me and start and namespace == people[me][2]
        ]
        # Ranks that check at the same time check different neighbours: together they cover all of them.
        self._turn = me * STATS_PER_LOOK
        self._lifeline = lifeline

    def check(self, left: Callable[[int], bool] | None = None) -> None:
        """Raises DeadRankError. Local, any thread.

        left : left(node rank) is true for those that are not missed any more
        """
        others = self._others
        self._turn += STATS_PER_LOOK
        for i, (node_rank, rank, pid, start) in enumerate(others):
            thorough = (i - self._turn) % len(others) < STATS_PER_LOOK
            if (_started(pid) == start if thorough else _exists(pid)) or (left is not None and left(node_rank)):
                continue
            raise DeadRankError(
                f"another rank of this node is gone (process {pid})",
                rank=rank,
                hint="The scheduler's log tells why; the usual reason is memory (oom-kill)",
            )
        far = self._lifeline.gone() if self._lifeline is not None else None
        if far is not None:
            raise DeadRankError(
                "a rank of another node is gone: its connection was closed",
                rank=far,
                hint="The scheduler's log tells why",
            )


# -- the living: where each rank is in its script. One that computes answers no message, so it writes this into a memory
# -- file, which the other ranks of its machine find in /proc

#: Seconds that a rank waits for the others before it says so; each later message comes after twice the time.
TELL_S = 10.0

#: Ranks that a message names: those that wait here are alike.
_MOST = 32

_FILE, _MOST_TEXT = "pario-whereabouts", 1000

#: (job, rank, the file's descriptor), once this process has met other ranks
_mine: tuple[str, int, int] | None = None


def tell(text: str) -> None:
    """This rank's place from now on: "is in epoch 0". Only after a roll call."""
    if _mine is not None:
        job, rank, fd = _mine
        os.pwrite(fd, f"{job}\0{rank}\0{text}\0".encode(), 0)


@contextmanager
def roll_call(world: Any, doing: str, check: Callable[[float], None] | None = None) -> Iterator[None]:
    """All ranks of `world` come to the block. If it takes long, the first that waits on a machine logs who waits where.

    doing : "the start of epoch 1", or "making a Loader"
    check : check(seconds waited) is called now and then, and may raise
    """
    global _mine
    if len(world.job_ranks) == 1:
        yield
        return
    _mine = job, rank, _ = _mine or (job_name()[0], launched_rank() or 0, os.memfd_create(_FILE))
    tell(f"waits {'at' if doing.startswith('the ') else 'before'} {doing}")
    began, after = time.monotonic(), TELL_S

    def look() -> None:
        nonlocal after
        waited = time.monotonic() - began
        if check is not None:
            check(waited)
        if waited > after:
            after = 2 * waited
            places = dict(_places(job))
            waiting = {each for each in world.job_ranks if places.get(each, "").startswith("waits ")}
            if rank == min(waiting, default=rank):
                said = [f"rank {each} {places.get(each, 'is not seen here')}" for each in world.job_ranks]
                said = [line for line in said if " waits " not in line][:_MOST] if len(said) > _MOST else said
                _log.warning("after %.0f s %s", waited, "; ".join(said))

    world.on_late = look
    try:
        yield
    finally:
        world.on_late = None
    tell(f"went on after {doing}")


def _places(job: str) -> Iterator[tuple[int, str]]:
    """(rank, where it is) of the ranks of this job on this machine."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError, ValueError):  # gone; no such text
            if os.stat(f"/proc/{pid}").st_uid != os.geteuid():  # root sees everybody's
                continue
            for fd in os.scandir(f"/proc/{pid}/fd"):
                if os.readlink(fd.path).startswith(f"/memfd:{_FILE}"):
                    with open(fd.path, errors="replace") as file:
                        theirs, rank, words, *_ = file.read(_MOST_TEXT).split("\0")
                    if theirs == job and words.isprintable():
                        yield int(rank), words


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _started(pid: int) -> int | None:
    """Start time of a live process in clock ticks since boot; None: gone, a zombie, or unknown."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    # "pid (name) state ppid ...": the name may contain blanks and parentheses; field 22 is the start time.
    fields = text[text.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X", b"x") else int(fields[19])
