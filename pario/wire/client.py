"""Asks a server, by as many connections as threads use at the same time: a connection carries one request at a time."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import numpy as np

from pario.machine import boot
from pario.threads import in_child
from pario.wire.frames import HEAD, MAGIC, Link, Part, WireError, Word, exactly, fill, peer_uid, send, tune

#: A whole answer is at most this long.
_MOST_ANSWER = 1 << 30
#: Seconds for a connection and its greeting; and the least rate of an answer, in bytes/s.
_CONNECT_S, _LEAST_RATE = 2.0, 1 << 20

T = TypeVar("T")


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


class DamagedError(WireError):
    """An answer came, and its bytes are not those that were sent."""


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

    def ask(self, kind: int, body: bytes, take: Callable[[Answer], T]) -> T:
        """Send a request, and let `take` read the answer; a second time if the connection ends before that, as those do
        that the server has closed since. Raises OSError, DamagedError."""
        try:
            return self._ask(kind, body, take)
        except (DamagedError, TimeoutError):
            raise
        except OSError:
            self.close_idle()
        return self._ask(kind, body, take)

    def _ask(self, kind: int, body: bytes, take: Callable[[Answer], T]) -> T:
        try:
            link = self._idle.pop()
        except IndexError:
            link = reached(self._address, self._secret, self._limit_s)
        right = False
        with self._lock:
            self._used.add(link)
        try:
            if self._closed:
                raise OSError("the connections to another node are closed")
            send(link, kind, (Part(np.frombuffer(body, np.uint8)),))
            answer = Answer(link, self._limit_s)
            taken = take(answer)
            answer.end()
            right = True
            return taken
        finally:
            with self._lock:
                self._used.discard(link)
                if right and not self._closed:
                    self._idle.append(link)
                else:
                    _end(link.sock)

    def call(self, kind: int, body: bytes, into: Any = None) -> tuple[int, Any]:
        """Send a request and take the whole answer, its kind and its bytes. Raises OSError.

        into : u8[n], where it lies, if it has just that number of bytes
        """

        def take(answer: Answer) -> tuple[int, Any]:
            found = bytearray(min(answer.nbytes, _MOST_ANSWER)) if into is None else into
            answer.read([memoryview(found)])
            return answer.kind, found

        return self.ask(kind, body, take)

    @property
    def idle(self) -> int:
        """Connections that nobody uses."""
        return len(self._idle)

    def close_idle(self) -> None:
        """They are made again when they are needed."""
        with suppress(IndexError):
            while True:
                _end(self._idle.pop().sock)

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


class Answer:
    """What a server answers, when its head has come. Everything may raise OSError.

    kind, nbytes : of it
    """

    def __init__(self, link: Link, limit_s: float) -> None:
        head = exactly(link.sock, HEAD.size, time.monotonic() + limit_s)
        magic, self.kind, self.nbytes, self._sum = HEAD.unpack(head)
        if magic != MAGIC or self.kind == Word.REFUSED:
            raise WireError("another node's answer is none")
        self._link, self._left, self._found = link, self.nbytes, link.theirs.begin()
        self._until = time.monotonic() + limit_s + self.nbytes / _LEAST_RATE

    def read(self, views: Sequence[memoryview]) -> None:
        """Fill this memory with the next bytes."""
        self._left -= sum(map(len, views))
        if self._left < 0:
            raise WireError("another node's answer is too short")
        fill(self._link.sock, views, self._until)
        for view in views:
            self._found.update(view)

    def end(self) -> None:
        """Raises DamagedError if not all bytes were read, or if they have not the sum that they had at the server."""
        if self._left or self._link.theirs.end(self.kind, self.nbytes, self._found.digest()) != self._sum:
            raise DamagedError("an answer was damaged on its way")


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
        except BaseException as e:
            link.sock.close()
            if not isinstance(e, OSError):
                raise
            # Another container of this machine; a network that does not lead there.
            error = TimeoutError("there is no connection in time") if isinstance(e, BlockingIOError) else e
    raise error


def _end(sock: socket.socket) -> None:
    """Also for processes that were forked meanwhile."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
