"""The job's side of the control plane: a token bucket, and a thread that asks the plane how fast it may fill.

A process is never stopped. Until the plane has answered for the first time it reads at the rate that its user has
configured, or without a limit. While a lease lasts its grant holds, whatever becomes of the plane; from then on the
safe rate holds that came with the lease, until the plane answers again.
"""

from __future__ import annotations

import logging
import random
import secrets
import select
import threading
import time
from contextlib import closing, suppress

from pario.errors import ParioError
from pario.plane.bucket import BURST_S, BYTES, UNLIMITED, Bucket, Rates, rates_words
from pario.plane.session import Session, Who
from pario.plane.words import Grant, PlaneAddress, grant_of
from pario.threads import in_child, start_thread
from pario.wire.frames import TurnedAwayError
from pario.wire.local import Bell

_log = logging.getLogger("pario")

#: Seconds until the next try; twice as long each time, up to the second number. After a refusal: the third.
_PAUSE_S, _MOST_PAUSE_S, _REFUSED_S = 0.1, 2.0, 30.0
#: Held up for more than this part of the time, a process wants more than it gets; else it wants what it uses, and room
#: to notice that it could use more.
_HELD_UP, _ROOM = 0.05, 1.25
#: of what a plane says
_MOST_MESSAGE = 64 << 10
#: A read of the store is divided into calls of about this many seconds' worth, and at least this many bytes.
_GRAIN_S, _GRAIN_BYTES = BURST_S / 2, 256 << 10


class Agent:
    """What stands before the store's reads of one process. Any thread.

    address : of the plane; who : this process; None: it cannot join
    rates : until the plane has answered

    joined : the plane has answered, and its last lease has not ended
    """

    def __init__(self, address: PlaneAddress, who: Who | None, rates: Rates = UNLIMITED) -> None:
        self._address, self._who = address, who
        self._users = 0
        self._said: set[str] = set()
        self._over = False
        self._renew(rates)
        in_child(self.forget)

    def _renew(self, rates: Rates) -> None:
        """As if nothing had been said; the thread starts with the first read."""
        self.bucket = Bucket(rates, held_up=self._held_up)
        self._lock = threading.RLock()  # the garbage collector may call `release` in a thread that holds it
        self._thread: threading.Thread | None = None
        self._member = secrets.token_bytes(16)
        self._born = time.monotonic()
        self._grant: Grant | None = None
        self._until = 0.0  # of the lease
        self._reported = 0.0
        self._used = [0, 0]
        self._is_hungry = False
        self._bell = Bell()

    # -- for readers of the store --------------------------------------------------------------------------------------

    def take(self, nbytes: int, operations: int) -> None:
        """Return when this may be asked of the store."""
        if self._thread is None:
            self._start()
        self.bucket.take(nbytes, operations)

    @property
    def grain_bytes(self) -> int:
        """Larger reads are better taken in parts, so that windows of a second see an even rate."""
        rate = self.bucket.rates[BYTES]
        return 1 << 62 if rate is None else max(_GRAIN_BYTES, int(rate * _GRAIN_S))

    @property
    def joined(self) -> bool:
        return self._grant is not None and time.monotonic() < self._until

    def hold(self) -> bool:
        """One more user, each of which calls `release` in the end; False if this has ended."""
        with self._lock:
            self._users += not self._over
            return not self._over

    def release(self) -> None:
        """With the last one the thread ends."""
        with self._lock:
            self._users -= 1
            last = self._users == 0
            self._over |= last
        if last:
            self.close()

    def close(self) -> None:
        """Anyone who waits goes on. Idempotent."""
        self._over = True
        self.bucket.close()
        self._bell.ring()
        thread = self._thread
        if thread is None or thread.ident is None:
            self._bell.close()
        elif thread is not threading.current_thread():
            thread.join(1.0)

    def _start(self) -> None:
        with self._lock:
            if self._thread is not None or self._over:
                return
            try:
                if self._who is None:
                    raise ParioError("it cannot join the control plane")
                self._thread = start_thread("pario-control", self._run, self._who, stop=self.close)
            except ParioError as e:
                self._thread = threading.Thread()  # never started: nobody tries again
                self._say(logging.WARNING, f"this process reads {_words(self.bucket.rates)}: {e}")

    def _held_up(self) -> None:
        """Somebody waits, and the plane has been told that nobody does."""
        if not self._is_hungry:
            self._is_hungry = True
            self._bell.ring()

    def forget(self) -> None:
        """In a process that was forked: the connection belongs to its parent."""
        self._bell.close()
        self._renew(self.bucket.rates)

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self, who: Who) -> None:
        pause_s = _PAUSE_S
        words = {"do": "join", "member": self._member.hex(), "job": who.job, "name": who.name, "node": who.node}
        while not self._over:
            now = time.monotonic()
            try:
                with closing(Session(self._address, who, words, _MOST_MESSAGE)) as session:
                    self._take(grant_of(session.first), now)
                    self._say(logging.INFO, f"the control plane at {self._address} has job {who.name!r} of {who.user}")
                    pause_s = _PAUSE_S
                    self._talk(session)
            except TurnedAwayError as e:
                self._say(logging.ERROR, f"the control plane at {self._address} refuses this job: {e}")
                pause_s = _REFUSED_S
            except OSError as e:
                why = str(e) or type(e).__name__
                self._say(logging.WARNING, f"the control plane at {self._address} does not answer: {why}")
            # All jobs lose a plane in the same moment; they must not come back in the same moment.
            self._rest(pause_s * random.uniform(0.5, 1.0))
            pause_s = max(pause_s, min(2 * pause_s, _MOST_PAUSE_S))
        self._bell.close()

    def _take(self, grant: Grant, asked_at: float) -> None:
        """The plane counts a lease from when it hears of us, which is not before `asked_at`."""
        self._grant, self._until = grant, asked_at + grant.lease_s
        if self.bucket.rates != grant.rates:
            self.bucket.set_rates(grant.rates)

    def _talk(self, session: Session) -> None:
        """Report and obey, until the connection or the lease ends. Raises OSError."""
        poll = select.poll()
        for each in (session.sock, self._bell):
            poll.register(each, select.POLLIN)
        self._report(session)
        while not self._over:
            assert self._grant is not None  # as we have joined
            now = time.monotonic()
            if now >= self._until:
                raise TimeoutError("it is silent")
            due = self._reported + self._grant.every_s
            if now >= due:
                self._report(session)
                continue
            for fd, _ in poll.poll(1e3 * (min(due, self._until) - now) + 1):
                if fd == self._bell.fileno():
                    self._bell.silence()
                    if not self._over and self._is_hungry:
                        self._report(session)
                    continue
                for words in session.come():
                    self._take(grant_of(words), self._reported)
        with suppress(OSError):
            session.send({"bye": 1})

    def _report(self, session: Session) -> None:
        now = time.monotonic()
        over, *held_up = self.bucket.hold_ups()
        used = list(self.bucket.used)
        demand = [
            None if waited > _HELD_UP * over else _ROOM * (new - old) / max(over, 1e-3)
            for waited, new, old in zip(held_up, used, self._used, strict=True)
        ]
        self._used, self._reported = used, now
        self._is_hungry = None in demand
        session.send({"at": now - self._born, "used": used, "demand": demand})

    def _rest(self, seconds: float) -> None:
        """Until the next try. The lease may end meanwhile."""
        end = time.monotonic() + seconds
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        while not self._over and (now := time.monotonic()) < end:
            if self._grant is not None and now >= self._until:
                self._go_on_safely(self._grant)
            until = end if self._grant is None else min(end, self._until)
            if poll.poll(1e3 * max(0.0, until - now) + 1):
                self._bell.silence()

    def _go_on_safely(self, grant: Grant) -> None:
        self._grant = None
        self.bucket.set_rates(grant.safe)
        self._say(logging.WARNING, f"without the control plane this process reads {_words(grant.safe)}")

    def _say(self, level: int, text: str) -> None:
        """Each once: a plane may be away for hours."""
        if text not in self._said and len(self._said) < 64:
            self._said.add(text)
            _log.log(level, "%s", text)


def _words(rates: Rates) -> str:
    return " and ".join(f"at most {each}" for each in rates_words(rates)) or "without limits"

