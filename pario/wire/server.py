"""The server's side: one thread listens, and sleeps while nobody says anything.

A client that does not prove within a few seconds that it knows the secret is sent away. A stranger keeps nobody out: it
makes room for the next one. The protocol is in frames.py.
"""

from __future__ import annotations

import errno
import hmac
import logging
import math
import os
import secrets
import select
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MethodType
from typing import Any, Generic, NamedTuple, TypeVar

from pario.errors import ParioError
from pario.machine import boot
from pario.threads import Workers, in_child, start_thread
from pario.wire import frames
from pario.wire.client import Address
from pario.wire.frames import Link, Part, WireError, Word, peer_uid, send, tune
from pario.wire.local import Bell, user_names

_log = logging.getLogger("pario")

#: Seconds for a stranger to show that it knows the secret, and how many of them are heard at one time, and of this
#: user's own on this machine, whose ranks all come at once; a further one takes the place of the oldest.
_PROVE_S, MOST_STRANGERS, _MOST_OURS = 5.0, 64, 1024
BACKLOG = 1024  # may stand in line to connect, if the system allows that
#: Nobody knows this one: proofs are compared with it for users that do not exist, so that their names cannot be tried.
_NO_SECRET = secrets.token_bytes(32)
#: Seconds until a complaint is repeated; the most clients that each complaint, and all together, name meanwhile.
_AGAIN_S, _EACH, _ALL = 600.0, 16, 256
_QUICK, SLOW, PATIENT = range(3)  # sorts of requests, each of which has threads of its own
#: Frames of one connection that are taken in a turn, and connections that have one until others are looked after.
_FEW, _ROUND = 4, 64
_PATIENT_THREADS = 64  # such requests mostly wait for something that another one of them does


class Complaints:
    """What a server says of those who are not what they should be: each complaint now and then, and a flood of them
    never silences the others for good. Any thread.

    whose : of what the log lines begin with; clock() : seconds that never go back
    """

    def __init__(self, whose: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._whose, self._clock = whose, clock
        self._lock = threading.Lock()
        self._said: dict[tuple[str, str], float] = {}  # the oldest first

    def say(self, what: str, why: str) -> None:
        """what : happened, and to whom; why : the reason"""
        now = self._clock()
        with self._lock:
            while self._said and (oldest := next(iter(self._said.items())))[1] <= now - _AGAIN_S:
                del self._said[oldest[0]]
            many = len(self._said) >= _ALL or [who for who, _ in self._said].count(what) >= _EACH
            if many or (what, why) in self._said:
                return
            self._said[what, why] = now
        _log.warning("%s %s: %s (said once in %g minutes)", self._whose, what, why, _AGAIN_S / 60)


class Guest(Link):
    """A connection on the server's side.

    whom : for the log
    uid : of the other end, if the system knows it; user : whom it says to be, and with `proven` is
    over : it was dropped; heard_at : when a frame came last
    busy : a thread answers it
    """

    def __init__(self, sock: socket.socket, address: Any, most_bytes: int, now: float) -> None:
        super().__init__(sock, most_bytes)
        sock.setblocking(False)
        frames.enliven(sock)
        self.number = secrets.token_bytes(frames.NUMBER_BYTES)
        self.uid = peer_uid(sock)
        self.whom = f"a connection from {address[0]}" if self.uid is None else f"a connection of system user {self.uid}"
        self.user = ""
        self.proven = self.over = self.busy = False
        self.heard_at, self.watched = now, 0

    def hello(self) -> tuple[bytes, bytes, bytes] | None:
        """(random bytes, user's name with its length, proof) of the client's greeting, as soon as all of it has come.
        Raises WireError."""
        come, at = self._come, len(frames.GREETING) + frames.NUMBER_BYTES
        if come[: len(frames.GREETING)] != frames.GREETING[: len(come)]:
            raise WireError("it speaks something else")
        end = at + 1 + (come[at] if len(come) > at else frames.MOST_USER)
        if len(come) < end + frames.MAC_BYTES:
            return None
        self._come = come[end + frames.MAC_BYTES :]
        return come[len(frames.GREETING) : at], come[at:end], come[end : end + frames.MAC_BYTES]


G = TypeVar("G", bound=Guest)


class Server(ABC, Generic[G]):
    """Listens from the beginning; a thread hears what comes as long as it calls `hear`. Subclasses say what is done
    with it.

    whose : of what its log lines begin with
    most_links : of connections that have proven who they are
    most_bytes : of a frame
    name : by which clients know it; b"": by its address; clock() : seconds that never go back

    links : all connections, strangers too; say(what happened and to whom, why) : in the log
    """

    #: what a connection is
    guest: type[G]
    #: On a Unix socket, anyone who the system knows needs no proof. Otherwise only this user's processes may connect at
    #: all, and they must prove it.
    trusts_system = False
    #: requests of one connection are answered one after another, by threads
    _once = 0
    #: bytes that a client has not taken yet; one that leaves more is given up
    most_waiting = 256 << 10
    #: what a stranger is told
    unknown = "it does not know the secret"

    def __init__(
        self,
        whose: str,
        *,
        most_links: int,
        most_bytes: int,
        name: bytes = b"",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.most_links, self.most_bytes, self._server_name = most_links, most_bytes, name
        self._whose, self._clock = whose, clock
        self._listeners: list[socket.socket] = []
        self.say = Complaints(whose, clock).say
        self.links: dict[G, None] = {}
        self._strangers: dict[G, float] = {}  # until when each may prove itself
        self._behind: dict[G, None] = {}  # of whom more frames have come than were taken; the next one's turn first
        self._over = self._closed = False
        self._poll = select.epoll()  # any thread may change it while another one waits
        self._ready: dict[int, Callable[[int], None]] = {}  # what to do if something comes, by descriptor
        self._bell = Bell()
        self.watch(self._bell.fileno(), lambda what: self._bell.silence())
        in_child(MethodType(Server.close, self))  # the connections are its parent's

    def open(self, local: str, host: str | None, port: int, stop: Callable[[], None]) -> int:
        """Listen at a Unix socket of this name, and at this machine's address `host` if that is one; a thread hears,
        until `stop` ends it, which the end of the script calls. Raises OSError, ParioError, and is closed then.

        port : 0: one that is free
        Returns the port; 0 without a network: the processes of this machine can still connect.
        """
        try:
            self.listen_at(here := socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            here.bind(f"\0{local}")
            here.listen(BACKLOG)
            suppressed = () if port else (OSError,)  # others wait at a port that was named
            with suppress(*suppressed):
                if host is not None:
                    self.listen_at(there := socket.create_server((host, port), backlog=BACKLOG))
                    port = there.getsockname()[1]
            self._thread = start_thread("pario-listen", _hear, self, stop=stop)
        except BaseException:
            self.close()
            raise
        return port

    def listen_at(self, listener: socket.socket) -> None:
        """One more socket that listens; it is closed with the server."""
        self._listeners.append(listener)
        listener.setblocking(False)
        self.watch(listener.fileno(), partial(self._accept, listener))

    # -- what subclasses say -------------------------------------------------------------------------------------------

    @abstractmethod
    def secret_of(self, user: str) -> bytes | None:
        """None: there is no such user."""

    def welcome(self, link: G) -> None:
        """It has proven who it is. Raises WireError."""

    @abstractmethod
    def took(self, link: G, kind: int, body: bytes) -> bool:
        """A frame of one that has proven who it is. False: a thread answers it, and then calls `_go_on`. Raises
        WireError, which ends the connection and tells why."""

    def forget(self, link: G) -> None:
        """The connection of one that had proven who it is has ended."""

    # -- the thread that listens ---------------------------------------------------------------------------------------

    def hear(self, wait_s: float = 3600.0) -> None:
        """What has come, at least until something has or the time is over."""
        first = next(iter(self._strangers.values()), math.inf)  # the oldest
        wait_s = min(wait_s, max(0.0, first - self._clock()))
        # Few at a time: the system hands them out in turns.
        for fd, what in self._poll.poll(0.0 if self._behind else wait_s, _ROUND):
            if (action := self._ready.get(fd)) is not None:
                try:
                    action(what)
                except Exception as e:  # one connection must not end all others
                    _log.warning("%s: %r", self._whose, e)
        for link in list(self._behind)[:_ROUND]:
            self._serve(link, 0)
        for link in [link for link, until in self._strangers.items() if until <= self._clock()]:
            self.refuse(link, f"it did not prove itself within {_PROVE_S:g} s", tell=False)

    def cancel(self) -> None:
        """`hear` returns. From any thread, or from a signal's handler."""
        self._over = True
        self._bell.ring()

    def watch(self, fd: int, action: Callable[[int], None]) -> None:
        self._ready[fd] = action
        self._poll.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        del self._ready[fd]
        self._poll.unregister(fd)

    def _accept(self, listener: socket.socket, what: int) -> None:
        try:
            sock, address = listener.accept()
        except OSError as e:
            if e.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                self.say("refuses connections", os.strerror(e.errno or 0))
                if self._strangers:
                    self.drop(next(iter(self._strangers)))
                elif not self._drop_idle():
                    time.sleep(0.1)  # it stays ready to be accepted
            return
        link = self.guest(sock, address, self.most_bytes, self._clock())
        if not self.trusts_system and link.uid not in (None, os.geteuid()):
            sock.close()
            self.say(f"refused {link.whom}", "another user")
            return
        ours = link.uid == os.geteuid()
        alike = [each for each in self._strangers if (each.uid == os.geteuid()) == ours]
        if len(alike) >= (_MOST_OURS if ours else MOST_STRANGERS):
            self.refuse(alike[0], "there are too many", tell=False)
        self._strangers[link] = self._clock() + _PROVE_S
        self.links[link] = None
        self.watch(sock.fileno(), partial(self._serve, link))
        link.put_raw(frames.GREETING + link.number)
        self._go_on(link)

    def _serve(self, link: G, what: int) -> None:
        """Something came from this client, or it takes more, or it is behind."""
        try:
            if self._behind.pop(link, what) is not None and what & ~select.EPOLLOUT:
                link.receive()
                if not link.proven:
                    self._let_in(link)
            for _ in range(_FEW):
                if not link.proven or link.over or (frame := link.next()) is None:
                    break
                link.heard_at = self._clock()
                if not self.took(link, *frame):
                    return
            else:
                self._behind[link] = None
            if not link.over:
                self._go_on(link)
        except _StrangerError as e:
            self.refuse(link, str(e))
        except WireError as e:  # strangers hear nothing of what is wrong with what they say
            self.refuse(link, str(e), tell=link.proven)
        except (OSError, ParioError):  # the end of the connection; no thread to answer it
            self.drop(link)
        except Exception as e:  # one connection must not end all others
            _log.warning("%s closes the connection of %s: %r", self._whose, link.whom, e)
            self.drop(link)

    def _let_in(self, link: G) -> None:
        """If it has proven who it is. Raises WireError, OSError."""
        hello = link.hello()
        if hello is None:
            return
        number, said, theirs = hello
        name = self._server_name or frames.server_name(link.sock, mine=True)
        agreed = frames.agreed_on(said, name, link.number, number)
        user = said[1:].decode(errors="replace")
        if not user.isprintable():  # a terminal may obey it
            raise WireError("its user's name is none")
        secret = self.secret_of(user) or _NO_SECRET
        proven = hmac.compare_digest(theirs, frames.proof(secret, frames.CLIENT, agreed))
        if self.trusts_system and link.uid is not None:
            names = user_names(link.uid)
            if user not in names and link.uid != os.geteuid():
                raise _StrangerError(f"system user {link.uid} is not user {user}")
            user = names[0] if user in names or not proven else user  # one person has one name, and one share
        elif not proven:
            raise _StrangerError(self.unknown)
        if len(self.links) - len(self._strangers) >= self.most_links and not self._drop_idle():
            raise WireError("there are too many")
        link.use(*((secret, agreed) if proven else frames.UNPROVEN), mine=frames.SERVER)
        link.put_raw(frames.proof(secret, frames.SERVER, agreed) if proven else frames.KNOWN)
        link.user, link.proven, link.heard_at = user, True, self._clock()
        self._strangers.pop(link)
        self.welcome(link)

    def refuse(self, link: G, why: str, *, tell: bool = True) -> None:
        """Send it away. tell : it hears the reason"""
        self.say(f"refused {link.whom}", why)
        if tell:
            if not link.proven:
                link.use(*frames.UNPROVEN, mine=frames.SERVER)
                link.put_raw(frames.REFUSED)
            link.put(Word.REFUSED, why.encode(errors="replace"))
            with suppress(OSError):
                link.flush()
        self.drop(link)

    def put(self, link: G, kind: int, body: bytes) -> None:
        """Send a frame, now or when there is room."""
        link.put(kind, body)
        if link.waiting > self.most_waiting + len(body):
            self.drop(link)
            return
        self._go_on(link)

    def _go_on(self, link: G) -> None:
        """Send what it takes, and listen to it. Any thread, but one at a time."""
        try:
            left = link.flush()
        except OSError:  # it takes no more; what it said before that is still heard, and then its end
            left = 0
            with suppress(OSError):  # one that lives (the system has no memory) would wait for the rest
                link.sock.shutdown(socket.SHUT_WR)
        try:
            wanted = select.EPOLLIN | self._once | (select.EPOLLOUT if left else 0)
            if self._once or wanted != link.watched:
                link.watched = wanted
                self._poll.modify(link.sock.fileno(), wanted)
        except (OSError, ValueError):  # closed, by the other side or meanwhile by this one
            self.drop(link)

    def drop(self, link: G) -> None:
        """Idempotent. Any thread."""
        if self.links.pop(link, link) is link:  # only one thread finds it
            return
        link.over = True
        self._strangers.pop(link, None)
        self._behind.pop(link, None)
        self._ready.pop(link.sock.fileno(), None)  # before the system gives its number to another one
        if link.proven:
            self.forget(link)
        link.sock.close()

    def _drop_idle(self) -> bool:
        """Close a connection whose client makes a new one if it needs it."""
        return False

    def close(self) -> None:
        """Closes this process's descriptors."""
        self._over = self._closed = True
        for sock in (*self._listeners, *(link.sock for link in list(self.links))):
            sock.close()
        self._poll.close()
        self._bell.close()


class _StrangerError(WireError):
    """A stranger that may be told why it is refused."""


class Reply(NamedTuple):
    """kind : a number for the client; parts : sent one after another"""

    kind: int
    parts: Sequence[Part]


def _hear(server: Server[Any]) -> None:
    while not server._over:
        server.hear()
    server.close()


class AnsweringServer(Server[Guest]):
    """Answers requests of clients that know the secret, by threads. One thread of its own listens.

    secret : at least 16 bytes
    answer(kind, body) : called by any of `threads` threads of each sort; what it raises closes the connection
    most_bytes : of the body of a request
    most_links : connections at one time
    limit_s : seconds after which a client that takes nothing is given up, and a request that has waited is not answered
    sorts : SLOW for kinds of requests that may take long, PATIENT for those that may take longer than `limit_s`, and
        whose clients wait for that: each sort has threads of its own
    hosts : this machine's addresses in the network; empty: it serves this machine only

    workers : its threads, of which others may have lanes, too

    Raises OSError, ParioError if the system refuses a socket or a thread.
    """

    guest = Guest
    _once = select.EPOLLONESHOT

    def __init__(
        self,
        secret: bytes,
        answer: Callable[[int, bytes], Reply],
        *,
        threads: int,
        most_bytes: int,
        most_links: int,
        limit_s: float,
        hosts: Sequence[str],
        sorts: Mapping[int, int] | None = None,
    ) -> None:
        self._secret, self._answer, self._limit_s = secret, answer, limit_s
        self.workers = Workers("pario-serve", 0)  # what is patient waits for what is not
        self._lanes = [self.workers.lane(n) for n in (threads, threads, max(threads, _PATIENT_THREADS))]
        self._sorts = dict(sorts or {})
        local = f"pario-{secrets.token_hex(16)}"
        whose = "pario's server for other ranks"
        super().__init__(whose, most_links=most_links, most_bytes=most_bytes, name=local.encode())
        port = self.open(local, hosts[0] if hosts else None, 0, self.leave)
        self.address = Address(boot(), local, tuple(hosts), port)

    def secret_of(self, user: str) -> bytes | None:
        return None if user else self._secret

    def welcome(self, link: Guest) -> None:
        link.flush()
        tune(link.sock, self._limit_s)

    def took(self, link: Guest, kind: int, body: bytes) -> bool:
        link.busy = True
        sort = self._sorts.get(kind, _QUICK)
        limit_s = math.inf if sort == PATIENT else self._limit_s
        self._lanes[sort].put(partial(self._serve_one, link, kind, body, time.monotonic() + limit_s))
        return False

    def _serve_one(self, link: Guest, kind: int, body: bytes, until: float) -> None:
        """By one of the threads that answer."""
        try:
            if time.monotonic() > until:
                raise TimeoutError("the client has given up")
            reply = self._answer(kind, body)
            send(link, reply.kind, reply.parts)
        except Exception as e:
            _log.debug("an answer failed: %s", e)
            self.drop(link)
            return
        link.busy = False
        self._go_on(link)

    def load(self) -> int:
        """Slow requests that are answered now, or wait for that."""
        return self._lanes[SLOW].load

    def _drop_idle(self) -> bool:
        """That which has been idle for longest."""
        idle = [link for link in list(self.links) if link.proven and not link.busy]
        if idle:
            self.drop(min(idle, key=lambda link: link.heard_at))
        return bool(idle)

    def leave(self, limit_s: float = 1.0) -> None:
        """Idempotent. Clients find their connections closed."""
        if self._closed:
            return
        self._closed = True
        for link in list(self.links):  # anyone who answers there stops
            with suppress(OSError):
                link.sock.shutdown(socket.SHUT_RDWR)
        for lane in self._lanes:
            lane.close(limit_s)
        self.cancel()
        if self._thread is not threading.current_thread():
            self._thread.join(limit_s)


