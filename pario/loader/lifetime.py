"""How a loader ends: by `close` on all ranks, by an error on one of them, or because the script dropped it."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from pario.comm.base import AnyWorld
from pario.comm.farewell import describe, guard, is_known
from pario.comm.slots import Slots
from pario.comm.window import Ring
from pario.dataset.reader import Reader
from pario.errors import ClosedError
from pario.feed.decode_step import DecodeStep
from pario.feed.source import Source, Supply
from pario.fetch.pool import STOP_S
from pario.plan.budget import Costs
from pario.plan.stream import Work
from pario.threads import at_end

if TYPE_CHECKING:
    from pario.loader.tracing import LoaderTrace

#: Seconds for idle threads to end, where nobody can wait, so that files are closed now.
_DROP_S = 0.05
#: Seconds after which a Ctrl-C that came meanwhile comes again.
_AGAIN_S = 0.05


class Run(Protocol):
    """A running loop."""

    def close(self, limit_s: float = math.inf) -> None:
        """Prepare nothing more. Waits until nothing is in preparation, for at most `limit_s` seconds."""


class Lifetime:
    """Owns the parts of one loader. They are set one after another; a part that is still None needs no cleaning up.

    costs, ring, slots, decode, supply : set by the constructor, in this order
    source : source of the last loop; other ranks of the node may need it longer than this one
    run : the running loop of this rank
    trace : of what this rank does, if it is traced
    """

    def __init__(self, world: AnyWorld, reader: Reader) -> None:
        self.world = world
        self.reader = reader
        self.costs: Costs | None = None
        self.ring: Ring | None = None
        self.slots: Slots | None = None
        self.decode: DecodeStep | None = None
        self.supply: Supply | None = None
        self.source: Source | None = None
        self.run: Run | None = None
        self.trace: LoaderTrace | None = None
        self._pid = os.getpid()
        self._closed = False
        guard(world, self)
        at_end(self._quit)

    def watch(self) -> None:
        """From now on, a rank that waits in a collective call checks whether all others still live."""
        self.world.on_wait = _weakly(self.check)

    # -- while it lives ------------------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """True if it was closed or abandoned, or if this process is a fork of its process."""
        return self._closed or os.getpid() != self._pid

    def check_open(self) -> None:
        """Raises ClosedError, also in a process that was forked from the loader's."""
        if self._closed:
            raise ClosedError("the loader is already closed", path=self.reader.path)
        if os.getpid() != self._pid:
            raise ClosedError(
                f"this loader belongs to process {self._pid}, whose threads do not exist in this one",
                hint="Construct the Loader in the process that iterates over it; it needs no worker processes.",
            )

    def check(self) -> None:
        """Raises PeerError or DeadRankError if another rank failed or is gone. In the loader's thread."""
        self.check_node()
        self.world.alarm.check()

    def check_node(self) -> None:
        """The same for the ranks of this node only; calls no MPI. Any thread."""
        if self.source is not None:
            self.source.check()
        if self.ring is not None:
            self.ring.check()

    def leave(self, limit_s: float = math.inf) -> None:
        """This rank needs nothing more of the current epoch; others may. Waits at most `limit_s` seconds for batches in
        preparation."""
        run, self.run = self.run, None
        if run is not None:
            run.close(limit_s)
            assert self.source is not None  # set together with the run
            self.source.leave()

    def no_more(self, limit_s: float = math.inf) -> None:
        """No other epoch will begin: end what is read ahead for one. Waits at most `limit_s` seconds for it."""
        if self.supply is not None:
            self.supply.no_more(limit_s)

    def end_source(self, work: Work | None = None, way: str = "") -> None:
        """End the last epoch's source: no rank needs it any more. work, way : what comes next; None: nothing"""
        source, self.source = self.source, None
        if source is not None:
            source.close()
        if self.supply is not None:
            self.supply.settle(work, way)

    # -- its end -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Called when all ranks have left the last epoch. Collective, but does not wait for other ranks."""
        self.end_source()
        self.world.on_wait = None
        self._closed = True
        self._end_threads()
        self._let_go(limit_s=math.inf)
        self.world.close()

    def abandon(self, error: BaseException) -> None:
        """Tell the others, then drop what this rank holds. Waits for no other rank, and a few seconds at most for its
        own threads: one may be inside a read of a stalled store, or in a function of the user."""
        if self.over:
            return
        self._closed = True
        self.world.on_wait = None
        with contextlib.suppress(Exception):
            self.world.alarm.raise_all(error)
            # Of an error that the others know (they agreed on it, or it is theirs) the ring must not tell: it would
            # reach a rank that is still about to raise it as another one, and as one that it alone raises.
            if self.ring is not None and not is_known(error):
                self.ring.fail(self.world.rank, describe(error))
        if self.run is not None:
            self.run.close(STOP_S)
        ended = self._end_background(STOP_S)
        ended = self._end_threads(STOP_S) and ended
        self._let_go(limit_s=STOP_S if ended else 0)
        if self.trace is not None:
            self.trace.close()
        self.world.abandon(error)

    #: this and `_part` are what `comm.farewell.guard` wants
    _abandon = abandon

    def _part(self) -> None:
        """The script has ended: as if the loop were left early. Other ranks of the node still get their records."""
        if not self.over:
            self.no_more(STOP_S)
            self.leave(STOP_S)

    def __del__(self) -> None:
        # The script dropped a loader without close() or a `with` block, together with its loops: let its threads end.
        # The garbage collector may run this in any thread, so do not wait and do not call MPI: the next World of these
        # ranks takes the communicators.
        if self.over:
            return
        self._closed = True
        try:
            self._drop()
        except KeyboardInterrupt:  # nothing that is raised in here goes on: it comes again when this has returned
            self._drop()
            again = partial(signal.pthread_kill, threading.main_thread().ident or 0, signal.SIGINT)
            threading.Timer(_AGAIN_S, again).start()
        what = f"a Loader of {self.reader.path} was dropped without close(): use it in a `with` block"
        warnings.warn(what, ResourceWarning, stacklevel=2, source=self)

    def _drop(self) -> None:
        with contextlib.suppress(Exception):
            self._end_threads(0)
            if self.source is None or not self.source.outlive(self._let_go):
                self._end_background(0)
                self._let_go()

    def _quit(self) -> None:
        """The script has ended, and no rank needs this one any more."""
        if not self.over:
            self._closed = True
            self.leave(0)
            self._end_threads(0)
            self._end_background(0)
            self.reader.abandon(0)

    def _end_background(self, limit_s: float = math.inf) -> bool:
        source, self.source = self.source, None
        return source is None or source.close(limit_s)

    @property
    def _let_go(self) -> Callable[..., None]:
        """Closes what this rank holds, and does not refer to this."""
        return partial(_close, self.reader, self.ring, self.slots, self.costs)

    def _end_threads(self, limit_s: float = math.inf) -> bool:
        """Whether they ended in time."""
        ended = self.decode is None or self.decode.close(limit_s)
        return (self.supply is None or self.supply.close(limit_s if ended else 0)) and ended


def _close(reader: Reader, *shared: Ring | Slots | Costs | None, limit_s: float = _DROP_S) -> None:
    for each in shared:
        if each is not None:
            each.close()
    reader.abandon(limit_s)


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """The method, as long as its object lives: a writer's thread refers to the World, which must not refer to the
    Loader."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        alive = reference()
        if alive is not None:
            alive()

    return call
