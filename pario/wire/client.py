"""Asks a server, by as many connections as threads use at the same time: a connection carries one request at a time."""

from __future__ import annotations

import math
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import closing, suppress
from typing import Any, NamedTuple

import numpy as np

from pario.machine import boot
from pario.threads import in_child
from pario.wire.frames import HEAD, MAGIC, PIECES, Link, Part, WireError, Word, advance, exactly, peer_uid, send, tune

#: A whole answer is at most this long.
_MOST_ANSWER = 1 << 30
#: Seconds for a connection and its greeting; and the least rate of an answer, in bytes/s.
_CONNECT_S, _LEAST_RATE = 2.0, 1 << 20


class Address(NamedTuple):
    """Where a server can be reached.

    machine : tells machines apart
    local : name of its Unix socket in the abstract namespace, for processes of the same machine
    hosts, port : TCP; port 0 without a network
    """

    machine: str
    local: str
    hosts: tuple[str, ...]
    port: int


class Client:
    """Connections to one server, as many as threads use at the same time. Any thread.

    limit_s : seconds for an answer to begin, and for its bytes beside what they take at `_LEAST_RATE`
    """

    def __init__(self, address: Address, secret: bytes, limit_s: float) -> None:
        self._address, self._secret, self._limit_s = address, secret, limit_s
        self._closed = False
        self._renew()
        in_child(self.forget)

    def _renew(self) -> None:
        self._lock = threading.RLock()  # the garbage collector may call `close` in a thread that holds it
        self._idle: list[Link] = []
        self._used: set[Link] = set()

    def ask(self, kind: int, body: bytes) -> Request:
        """Send a request. Raises OSError."""
        link = self._quiet() or reached(self._address, self._secret, self._limit_s)
        with self._lock:
            self._used.add(link)
        request = Request(self, link, self._limit_s)
        try:
            if self._closed:
                raise OSError("the connections to another node are closed")
            send(link, kind, (Part(np.frombuffer(body, np.uint8)),))
        except BaseException:
            request.close()
            raise
        return request

    def call(self, kind: int, body: bytes, into: Any = None) -> tuple[int, Any]:
        """Send a request and take the whole answer, its kind and its bytes. Raises OSError.

        into : u8[n], where it lies, if it has just that number of bytes
        """
        with closing(self.ask(kind, body)) as request:
            kind, nbytes = request.head()
            answer = bytearray(min(nbytes, _MOST_ANSWER)) if into is None else into
            request.read([memoryview(answer)])
            if not request.is_right():
                raise WireError("an answer was damaged on its way")
        return kind, answer

    def _quiet(self) -> Link | None:
        """An idle connection that the server has not closed."""
        with suppress(IndexError):
            while True:
                link = self._idle.pop()
                if _is_quiet(link.sock):
                    return link
                link.sock.close()
        return None

    def finished(self, link: Link, *, good: bool) -> None:
        """`Request` calls this."""
        with self._lock:
            self._used.discard(link)
            if good and not self._closed:
                self._idle.append(link)
                return
        _end(link.sock)

    @property
    def idle(self) -> int:
        """Connections that nobody uses."""
        return len(self._idle)

    def close_idle(self) -> None:
        """They are made again when they are needed."""
        with self._lock:
            idle, self._idle = self._idle, []
        for link in idle:
            _end(link.sock)

    def forget(self) -> None:
        """In a process that was forked: the connections belong to its parent."""
        for link in (*self._idle, *self._used):
            link.sock.close()
        self._renew()

    def close(self) -> None:
        """Requests under way fail. Idempotent."""
        with self._lock:
            self._closed = True
            for link in self._used:
                with suppress(OSError):
                    link.sock.shutdown(socket.SHUT_RDWR)
        self.close_idle()


class Request:
    """One request under way. `head`, then `read` until all bytes are there, then `is_right`; at last, or at any time,
    `close`. All but `close` may raise OSError, after which only `close` may be called."""

    def __init__(self, client: Client, link: Link, limit_s: float) -> None:
        self._client, self._link, self._limit_s = client, link, limit_s
        self._kind = self._nbytes = self._sum = self._left = 0
        self._found, self._until = link.theirs.begin(), math.inf
        self._over = False

    def head(self) -> tuple[int, int]:
        """(kind, number of bytes) of the answer."""
        head = exactly(self._link.sock, HEAD.size, time.monotonic() + self._limit_s)
        magic, self._kind, self._nbytes, self._sum = HEAD.unpack(head)
        if magic != MAGIC or self._kind == Word.REFUSED:
            raise WireError("another node's answer is none")
        self._left, self._until = self._nbytes, time.monotonic() + self._limit_s + self._nbytes / _LEAST_RATE
        return self._kind, self._nbytes

    def read(self, views: Sequence[memoryview]) -> None:
        """Fill this memory with the next bytes of the answer."""
        self._left -= sum(map(len, views))
        if self._left < 0:
            raise WireError("another node's answer is too short")
        rest = deque(view for view in views if len(view))
        while rest:
            pieces = [rest[k] for k in range(min(len(rest), PIECES))]
            try:
                got = self._link.sock.recvmsg_into(pieces, 0, socket.MSG_WAITALL)[0]
            except BlockingIOError as e:
                raise TimeoutError("nothing came for too long") from e
            if not got:
                raise OSError("another node closed the connection")
            advance(rest, got)
            if rest and time.monotonic() > self._until:
                raise TimeoutError("an answer takes too long")
        for view in views:
            self._found.update(view)

    def is_right(self) -> bool:
        """The end of the answer: whether its bytes have the sum that they had at the server."""
        found = self._link.theirs.end(self._kind, self._nbytes, self._found.digest())
        right = self._left == 0 and found == self._sum
        self._over = True
        self._client.finished(self._link, good=right)
        return right

    def close(self) -> None:
        """Want no more of it. Idempotent, also after `is_right`."""
        if not self._over:
            self._over = True
            self._client.finished(self._link, good=False)


def reached(
    where: Address, secret: bytes | None, limit_s: float, *, most_bytes: int = 1 << 10, trusts_system: bool = False
) -> Link:
    """A connection, after the greeting (`Link.greet`), whose calls wait for at most `limit_s`. Raises OSError.

    most_bytes : of a frame that comes
    """
    ways: list[Any] = [f"\0{where.local}"] if where.machine == boot() else []
    ways += [(host, where.port) for host in where.hosts if where.port]
    error: OSError = OSError("another node has no address")
    for address in ways:
        family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
        link, until = Link(socket.socket(family, socket.SOCK_STREAM), most_bytes), time.monotonic() + _CONNECT_S
        try:
            tune(link.sock, _CONNECT_S)  # also for a Unix socket at which too many stand in line
            link.sock.connect(address)
            if peer_uid(link.sock) not in (None, os.geteuid()):
                raise OSError("another user's process has the address of another node")
            link.greet("", secret, until, name=where.local.encode(), trusts_system=trusts_system)
            tune(link.sock, limit_s)
            return link
        except OSError as e:  # another container of this machine; a network that does not lead there
            link.sock.close()
            error = TimeoutError("there is no connection in time") if isinstance(e, BlockingIOError) else e
        except BaseException:
            link.sock.close()
            raise
    raise error


def _end(sock: socket.socket) -> None:
    """Also for processes that were forked meanwhile."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def _is_quiet(sock: socket.socket) -> bool:
    """True if nothing waits to be read, not even the end of the connection."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return not poll.poll(0)
