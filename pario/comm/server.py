"""The server's side of requests between processes: one thread listens, and sleeps while nobody asks; others answer.

Whoever does not prove within a few seconds that it knows the secret is sent away, and a stranger keeps nobody out: it
makes room for the next one. The protocol is in sockets.py.
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
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import xxhash

from pario.comm.launcher import own_addresses
from pario.comm.sockets import (
    GREETING,
    HEAD,
    MAC_BYTES,
    MAGIC,
    NUMBER_BYTES,
    Address,
    Part,
    machine_id,
    proof,
    same_user,
    send,
    tune,
)
from pario.errors import ParioError
from pario.threads import Workers, start_thread

__all__ = ["PATIENT", "SLOW", "Reply", "Server"]

_log = logging.getLogger("pario")

#: Seconds for a stranger to show that it knows the secret.
_PROVE_S = 5.0
#: As many may stand in line to connect, if the system allows that.
_BACKLOG = 1024
#: sorts of requests, and names of the threads that answer them
_QUICK, SLOW, PATIENT = "serve", "slow", "open"
#: Patient requests mostly wait for something that another one of them does.
_PATIENT_THREADS = 64
#: Strangers at one time; a further one takes the place of the oldest.
_MOST_STRANGERS = 64


class Reply(NamedTuple):
    """kind : a number for the client; parts : sent one after another"""

    kind: int
    parts: Sequence[Part]


class Server:
    """Answers requests of clients that know the secret.

    secret : at least 16 bytes
    answer(kind, body) : called by any of `threads` threads of each sort; what it raises closes the connection
    most_bytes : of the body of a request
    most_links : connections at one time
    limit_s : a client that takes nothing for so long is given up, and a request that has waited so long is not answered
    sorts : SLOW for kinds of requests that may take long, PATIENT for those that may take longer than `limit_s`, and
        whose clients wait for that: each sort has threads of its own
    network : reachable from other machines, on the job's interface (launcher.own_addresses)

    Raises OSError, ParioError if the system refuses a socket or a thread.
    """

    def __init__(
        self,
        secret: bytes,
        answer: Callable[[int, memoryview], Reply],
        *,
        threads: int,
        most_bytes: int,
        most_links: int,
        limit_s: float,
        network: bool,
        sorts: Mapping[int, str] | None = None,
    ) -> None:
        self._secret, self._answer = secret, answer
        self._most_bytes, self._most_links, self._limit_s = most_bytes, most_links, limit_s
        # Guards the links and what was said. The garbage collector may call `close` in a thread that holds it.
        self._lock = threading.RLock()
        self._strangers: dict[_Link, float] = {}  # until when each may prove itself
        self._links: dict[_Link, None] = {}  # those that have, the one used last at the end
        self._said: set[str] = set()
        self._closed = self._over = False
        self._listeners: list[socket.socket] = []
        self._poll = select.epoll()  # any thread may change it while another one waits
        self._ready: dict[int, Callable[[], None]] = {}  # what to do if something comes, by descriptor
        self._bell, self._rope = socket.socketpair()
        most = {_QUICK: threads, SLOW: threads, PATIENT: max(threads, _PATIENT_THREADS)}
        self._workers = {name: Workers(f"pario-{name}", n) for name, n in most.items()}
        self._sorts = dict(sorts or {})
        try:
            self.address = self._listen(network)
            self._watch(self._bell, self._heard)
            for listener in self._listeners:
                listener.setblocking(False)
                self._watch(listener, partial(self._accept, listener))
            _servers.add(self)
            self._thread = start_thread("pario-listen", self._run)
        except BaseException:
            self.forget()
            raise

    def _listen(self, network: bool) -> Address:
        local = f"pario-{secrets.token_hex(16)}"
        here = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listeners.append(here)
        here.bind(f"\0{local}")
        here.listen(_BACKLOG)
        hosts = own_addresses() if network else []
        port = 0
        with suppress(OSError):  # without a network the processes of this machine can still connect
            if hosts:
                there = socket.create_server((hosts[0], 0), backlog=_BACKLOG)
                self._listeners.append(there)
                port = there.getsockname()[1]
        return Address(machine_id(), local, tuple(hosts), port)

    # -- the thread that listens ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._over:
            with self._lock:
                first = next(iter(self._strangers.values()), None)  # the oldest
            wait = None if first is None else max(0.0, first - time.monotonic())
            for fd, _ in self._poll.poll(wait):
                action = self._ready.get(fd)
                try:
                    if action is not None:
                        action()
                except Exception as e:  # one connection must not end all others
                    _log.warning("pario's server for other ranks: %r", e)
            if wait is not None:
                self._send_strangers_away()
        self.forget()

    def _heard(self) -> None:
        self._bell.recv(4096)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError as e:
            if e.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                self._say("refuses connections", os.strerror(e.errno or 0))
                if not self._drop_idle():
                    time.sleep(0.1)  # it stays ready to be accepted
            return
        sock.setblocking(False)
        link = _Link(sock)
        if not same_user(sock):
            sock.close()
            self._say("refused a connection", "another user")
            return
        with self._lock:
            if len(self._strangers) >= _MOST_STRANGERS:
                self._drop(next(iter(self._strangers)))
                self._say("refused a connection", "there are too many")
            self._strangers[link] = time.monotonic() + _PROVE_S
        try:
            sock.send(GREETING + link.number)  # as much fits into a new connection
        except OSError:
            self._drop(link)
        else:
            self._watch(link.sock, partial(self._more, link), once=True)

    def _watch(self, sock: socket.socket, action: Callable[[], None], *, once: bool = False) -> None:
        """Call `action` when something comes, once until `_watch_again`, or every time."""
        self._ready[sock.fileno()] = action
        self._poll.register(sock.fileno(), select.EPOLLIN | (select.EPOLLONESHOT if once else 0))

    def _watch_again(self, link: _Link) -> None:
        with suppress(ValueError, OSError):  # closed meanwhile
            self._poll.modify(link.sock.fileno(), select.EPOLLIN | select.EPOLLONESHOT)

    def _more(self, link: _Link) -> None:
        """Something came from this client."""
        try:
            if link.filled():
                if link.proven and self._took(link):
                    return
                if not link.proven:
                    self._let_in(link)
            self._watch_again(link)
        except _RefusedError as e:
            self._say("refused a connection", str(e))
            self._drop(link)
        except (OSError, ParioError):  # the end of the connection; no thread to answer it
            self._drop(link)

    def _let_in(self, link: _Link) -> None:
        """Raises _RefusedError, OSError."""
        link.check(self._secret, self.address.local)
        with self._lock:
            full = len(self._links) >= self._most_links
        if full and not self._drop_idle():
            raise _RefusedError("there are too many")
        link.welcome(self._secret, self.address.local, self._limit_s)
        with self._lock:
            self._strangers.pop(link, None)
            self._links[link] = None

    def _drop_idle(self) -> bool:
        """Close the connection that has been idle for longest; its client makes a new one if it needs it."""
        with self._lock:
            idle = next((link for link in self._links if not link.busy), None)
        if idle is not None:
            self._drop(idle)
        return idle is not None

    def _took(self, link: _Link) -> bool:
        """Hand a request to a thread, if all of it is there."""
        if link.body is None:
            _, _, nbytes, _ = link.head()
            if nbytes > self._most_bytes:
                raise _RefusedError(f"a request of {nbytes:,} bytes, of which {self._most_bytes:,} are allowed")
            link.expect_body(nbytes)
            if not link.filled():
                return False
        kind, body = link.request()
        link.busy = True
        with self._lock:
            self._links[link] = self._links.pop(link, None)
        sort = self._sorts.get(kind, _QUICK)
        limit_s = math.inf if sort == PATIENT else self._limit_s
        self._workers[sort].put(partial(self._serve, link, kind, body, time.monotonic() + limit_s))
        return True

    def _send_strangers_away(self) -> None:
        now = time.monotonic()
        with self._lock:
            late = [link for link, until in self._strangers.items() if until <= now]
        for link in late:
            self._drop(link)
            self._say("refused a connection", f"it did not prove itself within {_PROVE_S:g} s")

    # -- the threads that answer ---------------------------------------------------------------------------------------

    def _serve(self, link: _Link, kind: int, body: memoryview, until: float) -> None:
        try:
            if time.monotonic() > until:
                raise TimeoutError("the client has given up")
            reply = self._answer(kind, body)
            send(link.sock, reply.kind, reply.parts)
        except Exception as e:
            _log.debug("an answer failed: %s", e)
            self._drop(link)
            return
        link.expect_head()
        link.busy = False
        self._watch_again(link)

    def load(self) -> int:
        """Slow requests that are answered now, or wait for that."""
        return self._workers[SLOW].load

    def _drop(self, link: _Link) -> None:
        with self._lock:
            self._links.pop(link, None)
            self._strangers.pop(link, None)
        self._ready.pop(link.sock.fileno(), None)  # before the system gives its number to another one
        link.sock.close()

    def _say(self, what: str, why: str) -> None:
        with self._lock:
            new = why not in self._said and len(self._said) < 16
            self._said.add(why)
        if new:
            _log.warning("pario's server for other ranks %s: %s (said once)", what, why)

    def close(self, limit_s: float = 1.0) -> None:
        """Idempotent. Clients find their connections closed."""
        if self._closed:
            return
        self._closed = True
        with self._lock:
            for link in list(self._links):  # whoever answers there stops
                with suppress(OSError):
                    link.sock.shutdown(socket.SHUT_RDWR)
        for workers in self._workers.values():
            workers.end(limit_s)
        self._over = True
        with suppress(OSError):
            self._rope.send(b".")
        if self._thread is not threading.current_thread():
            self._thread.join(limit_s)

    def forget(self) -> None:
        """Close this process's descriptors; connections of the process that it was forked from go on."""
        self._closed = self._over = True
        for each in (
            *self._listeners,
            self._bell,
            self._rope,
            *(link.sock for link in [*self._links, *self._strangers]),
        ):
            each.close()
        self._poll.close()


class _RefusedError(Exception):
    """A client that is not what it should be."""


class _Link:
    """A connection on the server's side: what is expected next, and what of it has come."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.number = secrets.token_bytes(NUMBER_BYTES)
        self.proven = self.busy = False
        self.body: memoryview | None = None
        self._head = b""
        self._expect(len(GREETING) + NUMBER_BYTES + MAC_BYTES)

    def _expect(self, nbytes: int) -> None:
        self._buffer, self._got = memoryview(bytearray(nbytes)), 0

    def filled(self) -> bool:
        """Take what has come; True if it is all that was expected. Raises OSError at the end of the connection."""
        while self._got < len(self._buffer):
            try:
                got = self.sock.recv_into(self._buffer[self._got :], 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            if not got:
                raise OSError("closed")
            self._got += got
        return True

    def check(self, secret: bytes, name: str) -> None:
        """Whether the client knows the secret, and means this server. Raises _RefusedError."""
        said = bytes(self._buffer)
        greeting, number, mac = said[: len(GREETING)], said[len(GREETING) : -MAC_BYTES], said[-MAC_BYTES:]
        if greeting != GREETING:
            raise _RefusedError("it speaks something else")
        if not hmac.compare_digest(mac, proof(secret, b"client" + name.encode(), self.number, number)):
            raise _RefusedError("it does not know the secret")
        self._theirs = number

    def welcome(self, secret: bytes, name: str, limit_s: float) -> None:
        """Raises OSError."""
        self.sock.send(proof(secret, b"server" + name.encode(), self.number, self._theirs))
        self.proven = True
        tune(self.sock, limit_s)
        self.expect_head()

    def expect_head(self) -> None:
        self.body = None
        self._expect(HEAD.size)

    def head(self) -> tuple[bytes, int, int, int]:
        """(magic, kind, bytes, sum) of the message. Raises _RefusedError."""
        self._head = bytes(self._buffer)
        head: tuple[bytes, int, int, int] = HEAD.unpack(self._head)
        if head[0] != MAGIC:
            raise _RefusedError("a message that is none")
        return head

    def expect_body(self, nbytes: int) -> None:
        self._expect(nbytes)
        self.body = self._buffer

    def request(self) -> tuple[int, memoryview]:
        """Raises _RefusedError."""
        _, kind, _, total = HEAD.unpack(self._head)
        assert self.body is not None
        if xxhash.xxh3_64_intdigest(self.body, seed=kind) != total:
            raise _RefusedError("a message was damaged on its way")
        return kind, self.body


_servers: weakref.WeakSet[Server] = weakref.WeakSet()


def _forked() -> None:
    for server in list(_servers):
        server.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
