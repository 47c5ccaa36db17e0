"""The end of a script on which other ranks still depend: an uncaught error, sys.exit, or its last line.

The interpreter then enters MPI_Finalize and waits there for the other ranks, which may be waiting for this one. So this
rank first announces how it ends:

* By an uncaught error, or `sys.exit` with a status other than 0. Ranks inside pario, or entering it, are told and raise
  (agree.py). Ranks inside a collective of the user cannot be told. If all ranks arrive at their farewell within a few
  seconds, each ends normally, with its traceback and exit status 1; otherwise MPI_Abort ends the job. If a rank is
  dead, the ranks do not meet: after a pause in which its neighbours can print, MPI_Abort ends the job, even if the
  script swallows the error, because MPI_Finalize may hang when a process is missing.
* By its last line, or `sys.exit(0)`, with a Loader or Reader still open. This may be intended: the others write a
  checkpoint, or take the rest of an epoch that this rank left early. So this rank takes no more records, continues to
  read for its node, and says goodbye in place of its next collective; a rank that waits for it in another collective
  raises. When all have said goodbye or closed, it ends.

Python does not reveal its exit status at its end, so a function that notes the status replaces `sys.exit`.
`raise SystemExit(1)` outside a `with` block goes unnoticed, and counts as a normal end. If the script came to its last
line, it has caught what was noted.
"""

from __future__ import annotations

import atexit
import dis
import functools
import os
import sys
import threading
import time
import weakref
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Protocol

from pario.comm.launcher import hush_ucx, launched_rank
from pario.errors import DeadRankError, PeerError

#: Seconds that a rank with an uncaught error gives the others to arrive at the same end. Ranks that wait inside pario
#: learn of an error within a second (Options.alive_seconds).
FAREWELL_S = 4.0

#: Seconds between an uncaught error about a dead rank and the end of the job, in which its neighbours print theirs.
DEAD_S = 2.0

#: Seconds between the last output and MPI_Abort: launchers drop output that they have not yet forwarded.
FORWARD_S = 0.2

#: Attributes of an error that concerns several ranks: index into `_farewells` (a number, so that the error can still be
#: pickled), and whether the other ranks know of it by other means than this rank's alarm.
_MARK, _KNOWN = "_pario_farewell", "_pario_known"


class User(Protocol):
    """A Loader or Reader, which the ranks of a world use together."""

    def _abandon(self, error: BaseException) -> None:
        """Tell the other ranks about `error` and drop everything. Idempotent."""

    def _part(self) -> None:
        """The script has ended: take nothing more, but let the other ranks of the node continue."""


class _Guarded(NamedTuple):
    world: Any
    user: weakref.ref[User]


_guarded: list[_Guarded] = []

#: (MPI, communicator for the farewell; None if a rank is dead)
_farewells: list[tuple[Any, Any]] = []

#: The farewell of an error that ends the script without reaching the hook: a SystemExit.
_on_exit: tuple[Any, Any] | None = None

_previous_hook: Any = None
_process = 0
_script: FrameType  # the outermost frame of the main thread
_status: Any = None
_said = False


def describe(error: BaseException) -> str:
    """ "Kind: message", as it travels to other ranks."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as failure:  # a foreign error whose __str__ fails must not hide the error
        return f"{type(error).__name__} (its message failed: {type(failure).__name__})"


def spread(world: Any, error: Any, known: bool = True) -> Any:
    """Mark `error` as one that concerns all ranks of `world`: if uncaught, it ends the job. Returns it. No MPI call.

    known : the other ranks know of it: they agreed on it, or one of them raised it first
    """
    global _on_exit
    if world.size > 1:
        # A PeerError about another rank's DeadRankError repeats its name.
        dead = f"{DeadRankError.__name__}: " in describe(error)
        farewell = (world.mpi, None if dead else world.last_call)
        if farewell not in _farewells:
            _farewells.append(farewell)
        if dead or isinstance(error, SystemExit):
            _on_exit = farewell
        with suppress(AttributeError):
            setattr(error, _MARK, _farewells.index(farewell))
            setattr(error, _KNOWN, known)
        _install()
    return error


def is_known(error: BaseException) -> bool:
    """True if the other ranks know of it without this rank's alarm. Only its neighbours know of a dead rank."""
    return getattr(error, _KNOWN, False) and not isinstance(error, DeadRankError)


def guard(world: Any, user: User) -> None:
    """From now on, until `world` is freed, the other ranks learn how this rank's script ends.

    `user._abandon(error)` tells them about any uncaught error, not only pario's: a script that uses `user` outside a
    `with` block must not leave them waiting.
    """
    if world.mpi is not None:
        _guarded[:] = [each for each in _guarded if not each.world.is_freed]
        _guarded.append(_Guarded(world, weakref.ref(user)))
    if world.size > 1:
        _install()


def dropped() -> list[Any]:
    """The worlds that nobody freed, and whose users are gone: no message is sent in them any more from here."""
    return [each.world for each in list(_guarded) if each.user() is None and not each.world.is_freed]


def _install() -> None:
    global _previous_hook, _process, _script
    if _previous_hook is None:
        _previous_hook, sys.excepthook = sys.excepthook, _hook
        sys.exit = _noted(sys.exit)
        _process = os.getpid()
        _script = sys._current_frames()[threading.main_thread().ident or 0]
        while _script.f_back is not None:
            _script = _script.f_back
        atexit.register(_end)


def _noted(leave: Any) -> Any:
    """sys.exit, which notes the status."""

    @functools.wraps(leave)
    def exit(status: Any = None, /) -> Any:
        global _on_exit, _status
        if threading.current_thread() is threading.main_thread():
            _status = status
            if not status and _on_exit is not None and _on_exit[1] is not None:
                _on_exit = None  # the script has caught the SystemExit that it was for
        leave(status)

    return exit


def _hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    # Ctrl-C reaches all ranks. (Another rank's error has its kind in its text alone; a user's own error is not meant.)
    of_another = isinstance(error, PeerError) and "KeyboardInterrupt: " in str(error)
    if traceback is not None and (of_another or isinstance(error, KeyboardInterrupt)):
        at = f"{traceback.tb_frame.f_code.co_filename}, line {traceback.tb_lineno}"
        sys.stderr.write(f"pario: rank {launched_rank() or 0} was interrupted in {at}\n")
    else:
        _previous_hook(kind, error, traceback)
    _end_with(error)


def _end_with(error: BaseException) -> None:
    """Tell the ranks of every world that is still open here, and say farewell."""
    hush_ucx()
    if not is_known(error):
        for world, user in list(_guarded):
            with suppress(Exception):
                alive = user()
                if alive is not None:
                    alive._abandon(error)
                world.abandon(error)  # a user that was dropped without close() told nobody
    mark = _marked(error)
    if mark is not None:
        _farewell(*_farewells[mark])


def _end() -> None:
    """The script has ended, and MPI_Finalize comes next."""
    if os.getpid() != _process:  # a forked child
        return
    if _farewells:  # also for an error that the script has caught
        hush_ucx()
    if _said:  # an uncaught error
        return
    here = [each for each in _guarded if not each.world.is_freed and not each.world.mpi.Is_finalized()]
    returned = dis.opname[_script.f_code.co_code[_script.f_lasti]].startswith("RETURN")
    if here and _status not in (None, 0) and not returned:
        _end_with(SystemExit(_status))
    elif here:
        try:
            _part(here)
        except BaseException as error:
            _hook(type(error), error, error.__traceback__)
    elif _on_exit is not None and (_on_exit[1] is None or not returned):
        _farewell(*_on_exit)


def _part(here: list[_Guarded]) -> None:
    """Say goodbye in all worlds at once (other ranks may end them in another order) and wait for the others'
    goodbyes."""
    users = [user for each in here if (user := each.user()) is not None]  # they continue to read meanwhile
    for user in users:
        user._part()
    waits = [world.goodbye() for world, _ in here]
    alone = [world for (world, _), wait in zip(here, waits, strict=True) if not wait()]
    if alone:  # another rank needed this one, and knows now that it is gone
        _farewell(alone[0].mpi, alone[0].last_call, abort=False)


def _marked(error: BaseException | None) -> int | None:
    """The mark of the error, or of one of its causes (`raise RuntimeError(...)` in an except block)."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        mark = getattr(error, _MARK, None)
        if isinstance(mark, int) and mark < len(_farewells):  # an unpickled error may come from another process
            return mark
        error = error.__cause__ or error.__context__
    return None


def _farewell(MPI: Any, comm: Any, abort: bool = True) -> None:
    """Meet the other ranks on `comm` for the last time. If they do not come, end the whole job, if `abort`."""
    global _said
    _said = True
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
    if abort and hasattr(MPI, "Finalize"):  # which would wait for ranks that do not come
        sys.stderr.write("pario: not all ranks can end with this error, so MPI_Abort ends the whole job.\n")
        sys.stderr.flush()
        time.sleep(FORWARD_S)
        MPI.COMM_WORLD.Abort(1)
