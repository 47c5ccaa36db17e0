"""How an error of one rank reaches the others: either every rank goes on or every rank raises.

Three ways, for three situations:

* `agree`: at places where all ranks meet anyway. One small reduction; if anybody failed, all raise.
* `Alarm`: in mid-epoch there is no meeting. Every rank keeps one receive open on the private communicator and looks at
  it now and then; the rank that fails sends a note to all.
* the last resort: the error leaves the script uncaught while other ranks sit in a collective of the user, where pario
  never gets to look. The interpreter would go into MPI_Finalize and wait there for ever. So an uncaught error that
  concerns several ranks ends in a farewell: if all ranks come to it within a few seconds, each ends normally with its
  traceback and exit status 1; if not, MPI_Abort ends the job. When a rank is dead there is no such meeting, only a
  pause in which its neighbours can print, and MPI_Abort, even if the script swallows the error: MPI_Finalize may hang
  when a process is missing.
"""

from __future__ import annotations

import atexit
import json
import sys
import time
import weakref
from contextlib import suppress
from types import TracebackType
from typing import Any

import numpy as np

from pario.errors import DeadRankError, PeerError

__all__ = ["Alarm", "agree", "describe", "guard", "peer_error", "spread"]

#: Tag of alarm notes on the private communicator; nothing else on it receives from any source.
TAG = 77

#: Bytes of an alarm note: below the eager limit of the MPI libraries we know, so that sending waits for nobody.
NOTE_BYTES = 2048

#: Seconds that a failing rank spends on sending its notes.
SEND_S = 2.0

#: Seconds that a rank whose error stayed uncaught gives the others to arrive at the same end. Ranks that wait inside
#: pario hear of an error within a second (Options.alive_seconds).
FAREWELL_S = 4.0

#: Seconds between an uncaught error about a dead rank and the end of the job: its neighbours print theirs.
DEAD_S = 2.0

#: Seconds between the last words and MPI_Abort: launchers drop what they have not yet passed on to the screen.
FORWARD_S = 0.2

#: Attribute of an error that concerns several ranks: index into `_farewells` (a number: the error still pickles).
_MARK = "_pario_farewell"

#: (MPI, communicator for the farewell; None where a rank is dead)
_farewells: list[tuple[Any, Any]] = []
_previous_hook: Any = None

#: what `guard` was given
_guarded: weakref.WeakSet[Any] = weakref.WeakSet()


def describe(error: BaseException) -> str:
    """ "Kind: message", as it travels to other ranks."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as failure:  # a foreign error whose __str__ fails must not hide that there was one
        return f"{type(error).__name__} (its message failed: {type(failure).__name__})"


def peer_error(rank: int, text: str, doing: str = "") -> PeerError:
    """The error of rank `rank` ("Kind: message"), as the other ranks raise it."""
    return PeerError(f"another rank failed{f' while {doing}' if doing else ''}: {text}", rank=rank)


def agree(world: Any, error: BaseException | None, doing: str) -> None:
    """World.agree: all ranks go on, or all raise. Collective."""
    first = world.allreduce_min(world.size if error is None else world.rank)
    if first == world.size:
        return
    text, its_doing = world.bcast((describe(error), doing) if error and world.rank == first else None, root=first)
    if error is None:
        error = peer_error(first, text, its_doing)
    raise spread(world, error)


class Alarm:
    """One rank tells all others, on any node, that it failed. Made collectively; all methods but close() are local.

    Every method is called in the thread that made it.
    """

    def __init__(self, world: Any) -> None:
        self._world = world
        self._raised = False
        self._request: Any = None
        self._note = np.zeros(NOTE_BYTES, dtype=np.uint8)
        if world.size > 1:
            MPI = world.mpi
            self._request = world.comm.Irecv([self._note, MPI.BYTE], source=MPI.ANY_SOURCE, tag=TAG)
            self._test = self._request.Test
            _receiving[id(self._note)] = (world.mpi, self._request, self._note)

    def check(self) -> None:
        """Raise PeerError if another rank raised the alarm."""
        if self._request is not None and self._test():
            self._request = None
            del _receiving[id(self._note)]
            note = json.loads(bytes(self._note).rstrip(b"\0"))
            raise spread(self._world, peer_error(note["rank"], note["text"]))

    def raise_all(self, error: BaseException) -> None:
        """Tell all other ranks about `error` and return; the caller raises it. Best effort: waits 2 s at most.

        Ranks that do not look any more (ended, closed) are not waited for.
        """
        if getattr(error, _MARK, None) is not None and not isinstance(error, DeadRankError):
            return  # agreed upon, or another rank's: everybody knows. Of a dead rank only its node does.
        spread(self._world, error)
        if self._raised:
            return
        self._raised = True
        if self._request is None or self._world.mpi.Is_finalized():
            return  # alone, or told by another rank's alarm
        room = NOTE_BYTES
        text = describe(error)
        while True:  # cut by characters: never in the middle of one
            note = json.dumps({"rank": self._world.rank, "text": text[:room]}).encode()
            if len(note) <= NOTE_BYTES:
                break
            room = room * 3 // 4
        data = np.zeros(NOTE_BYTES, dtype=np.uint8)
        data[: len(note)] = np.frombuffer(note, dtype=np.uint8)
        dead = error.rank if isinstance(error, DeadRankError) else None  # reads nothing any more
        sends = []
        for rank in range(self._world.size):
            if rank not in (self._world.rank, dead):
                with suppress(self._world.mpi.Exception):  # who is gone must not keep the note from the others
                    sends.append(self._world.comm.Isend([data, self._world.mpi.BYTE], dest=rank, tag=TAG))
        _in_flight.append((data, sends))
        end = time.monotonic() + SEND_S
        while (sends := [send for send in sends if self._under_way(send)]) and time.monotonic() < end:
            time.sleep(1e-3)

    def _under_way(self, send: Any) -> bool:
        try:
            return not send.Test()
        except self._world.mpi.Exception:  # to a rank that is gone: the error that is told counts, and not this one
            return False

    def close(self) -> None:
        """Stop listening; idempotent, waits for nobody. The communicator may be freed then: no note is on its way."""
        request, self._request = self._request, None
        if request is not None:
            _close(*_receiving.pop(id(self._note))[:2])

    def leave(self) -> None:
        """Stop listening while others may still send notes: the receive stays open until the process ends."""
        self._request = None


#: what an MPI send may still read
_in_flight: list[Any] = []

#: open receives, by the id of the memory that they may still write to: (MPI, request, memory)
_receiving: dict[int, tuple[Any, Any, Any]] = {}


def _close(MPI: Any, request: Any) -> None:
    if not MPI.Is_finalized():
        request.Cancel()  # of a receive: local, done at once
        request.Wait()


@atexit.register
def _close_all() -> None:
    """MPI libraries complain at their end about a receive that nobody closed."""
    while _receiving:
        _close(*_receiving.popitem()[1][:2])


def spread(world: Any, error: Any) -> Any:
    """Note that `error` concerns all ranks of `world`: uncaught, it ends the job. Returns the error. No MPI call."""
    world.failed = True
    if world.size > 1:
        # A PeerError that tells of another rank's DeadRankError repeats its name.
        dead = f"{DeadRankError.__name__}: " in describe(error)
        farewell = (world.mpi, None if dead else world.last_call)
        if dead and farewell not in _farewells:
            atexit.register(_farewell, *farewell)
        if farewell not in _farewells:
            _farewells.append(farewell)
        with suppress(AttributeError):
            setattr(error, _MARK, _farewells.index(farewell))
        _install_hook()
    return error


def guard(world: Any, user: Any) -> None:
    """From now on an uncaught error of any kind, not pario's alone, reaches the other ranks by `user._abandon(error)`.

    For as long as `user` lives: a script that keeps it outside of a `with` block must not leave the others waiting.
    """
    if world.size > 1:
        _guarded.add(user)
        _install_hook()


def _install_hook() -> None:
    global _previous_hook
    if _previous_hook is None:
        _previous_hook, sys.excepthook = sys.excepthook, _hook


def _hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    _previous_hook(kind, error, traceback)
    if _marked(error) is None:
        for user in list(_guarded):
            with suppress(Exception):
                user._abandon(error)
    mark = _marked(error)
    if mark is not None:
        _farewell(*_farewells[mark])


def _marked(error: BaseException | None) -> int | None:
    """The mark of the error, or of one of those it came from (`raise RuntimeError(...)` in an except block)."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        mark = getattr(error, _MARK, None)
        if isinstance(mark, int) and mark < len(_farewells):  # an unpickled error may come from another process
            return mark
        error = error.__cause__ or error.__context__
    return None


def _farewell(MPI: Any, comm: Any) -> None:
    if not MPI.Is_initialized() or MPI.Is_finalized():
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    if comm is None:
        time.sleep(DEAD_S)
    else:
        request = comm.Ibarrier()
        end = time.monotonic() + FAREWELL_S
        while time.monotonic() < end:
            if request.Test():
                return
            time.sleep(1e-3)
    sys.stderr.write("pario: not all ranks can end with this error, so MPI_Abort ends the whole job.\n")
    sys.stderr.flush()
    time.sleep(FORWARD_S)
    MPI.COMM_WORLD.Abort(1)
