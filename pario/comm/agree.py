"""Propagates an error of one rank to the others: either all ranks continue or all raise.

There are two ways, for two situations:

* `agree`, where all ranks meet anyway: one small reduction, and if any rank failed, all raise.
* `Alarm`, in mid-epoch, where ranks do not meet: every rank keeps one receive open on the private communicator and
  tests it now and then; a failing rank sends a note to all.

farewell.py deals with ranks that do not test, because they sit in a collective of the user.
"""

from __future__ import annotations

import atexit
import os
import time
from contextlib import suppress
from typing import Any

import numpy as np

from pario.comm.farewell import describe, is_known, spread
from pario.errors import DeadRankError, PeerError

#: Tag of alarm notes on the private communicator; nothing else there receives from any source.
TAG = 77

#: Bytes of an alarm note: below the eager limit of the MPI libraries we know, so that sending does not wait. The last
#: one says that the note is there: with MPICH 5 a receive from any source may never complete, although all of its bytes
#: have come (3 of 45 rounds, with five emulated nodes on a busy machine).
NOTE_BYTES, _COME = 2048, b"\1"

#: Seconds that a failing rank spends on sending its notes.
SEND_S = 2.0


def peer_error(rank: int, text: str, doing: str = "") -> PeerError:
    """The error of rank `rank` ("Kind: message"), as the other ranks raise it."""
    return PeerError(f"another rank failed{f' while {doing}' if doing else ''}: {text}", rank=rank)


def agree(world: Any, error: BaseException | None, doing: str) -> None:
    """World.agree: all ranks continue, or all raise. Collective."""
    first = world.allreduce_min(world.size if error is None else world.rank)
    if first == world.size:
        return
    text, its_doing = world.bcast((describe(error), doing) if error and world.rank == first else None, root=first)
    raise world.raised_by_all(error or peer_error(first, text, its_doing))


class Alarm:
    """Lets one rank tell all others, on any node, that it failed. All methods are local, construction and `close`
    too, and are called in the thread that constructed it.

    listens : False: nobody has a communicator yet
    """

    def __init__(self, world: Any, *, listens: bool = True) -> None:
        self._world = world
        self._raised = False
        self._request: Any = None  # of the receive; None: this rank no longer listens
        if world.size > 1 and listens:
            MPI = world.mpi
            self._comm = world.comm
            self._note = np.zeros(NOTE_BYTES, dtype=np.uint8)
            self._receive = self._comm.Irecv([self._note, MPI.BYTE], source=MPI.ANY_SOURCE, tag=TAG)
            self._request = self._receive
            _receiving.add(self)

    def check(self) -> None:
        """Raise PeerError if another rank raised the alarm."""
        if self._request is not None and (self._request.Test() or self._note[-1]):
            self._request = None
            rank, _, text = bytes(self._note[:-1]).rstrip(b"\0").decode(errors="replace").partition(" ")
            raise spread(self._world, peer_error(int(rank), text))

    def raise_all(self, error: BaseException) -> None:
        """Tell all other ranks about `error` and return; the caller raises it. Best effort: takes at most 2 s.

        Does not wait for ranks that no longer listen (ended, closed).
        """
        if is_known(error):
            return
        spread(self._world, error, known=False)
        if self._raised or self._request is None or self._world.mpi.Is_finalized():
            return  # before; a single rank, or another rank's alarm came first
        self._raised, self._world.settled = True, False
        words = f"{self._world.rank} {describe(error)}".encode(errors="replace")[: NOTE_BYTES - 1]
        note = np.frombuffer(words.ljust(NOTE_BYTES - 1, b"\0") + _COME, dtype=np.uint8)
        dead = error.rank if isinstance(error, DeadRankError) else None  # receives nothing any more
        sends = []
        for rank in range(self._world.size):
            if rank not in (self._world.rank, dead):
                with suppress(self._world.mpi.Exception):  # a dead rank must not keep the note from the others
                    sends.append(self._comm.Isend([note, self._world.mpi.BYTE], dest=rank, tag=TAG))
        _in_flight.append((note, sends))
        end = time.monotonic() + SEND_S
        while (sends := [send for send in sends if self._under_way(send)]) and time.monotonic() < end:
            time.sleep(1e-3)

    def _under_way(self, send: Any) -> bool:
        try:
            return not send.Test()
        except self._world.mpi.Exception:  # the receiver is gone: the error in the note matters, not this one
            return False

    def close(self, until: float | None = None) -> None:
        """Receive what has arrived, and stop listening. Idempotent.

        Afterwards the communicator can be freed, if no other rank can still send a note.

        until : `time.monotonic()` at which to give up on a note that its sender does not complete: the sender may be
            inside MPI_Finalize, where it serves nobody. Default: in 2 s
        """
        self._request = None
        if self in _receiving:
            _receiving.discard(self)
            MPI = self._world.mpi
            if not MPI.Is_finalized():
                until = time.monotonic() + SEND_S if until is None else until
                if self._receive:
                    self._receive.Cancel()  # local and immediate; has no effect if a note had already matched it
                    if not _ended(self._receive, self._note, until):
                        return
                while self._comm.Iprobe(source=MPI.ANY_SOURCE, tag=TAG):
                    note = np.zeros(NOTE_BYTES, dtype=np.uint8)
                    if not _ended(self._comm.Irecv([note, MPI.BYTE], source=MPI.ANY_SOURCE, tag=TAG), note, until):
                        return

    def leave(self) -> None:
        """Stop listening while others may still send notes: the receive stays open until the process ends."""
        self._request = None


#: buffers, and their requests, that MPI may still read or write
_in_flight: list[Any] = []


def _ended(receive: Any, note: np.ndarray, until: float) -> bool:
    """Whether the receive completed in time. If not, `note` is kept alive, since MPI may still write into it."""
    while not receive.Test():
        if time.monotonic() > until:
            _in_flight.append((note, [receive]))
            return False
        time.sleep(1e-3)
    return True


#: alarms with an open receive, or with unreceived notes in their communicator
_receiving: set[Alarm] = set()

_process = os.getpid()


@atexit.register
def _close_all() -> None:
    """Close all: MPI libraries complain at exit about open receives and unreceived messages."""
    if os.getpid() == _process:  # not in a forked child
        until = time.monotonic() + SEND_S  # for all together
        for alarm in list(_receiving):
            with suppress(Exception):
                alarm.close(until)
