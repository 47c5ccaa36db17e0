"""Requests and answers between processes without MPI, so that background threads may send and answer them.

    server --> greeting, 32 random bytes
    client --> greeting, 32 random bytes, HMAC(secret, "client", server's name, both)
    server --> HMAC(secret, "server", server's name, both)
    client --> request --> server --> answer --> client, any number of times

Both sides show that they know the secret without sending it, and what was overheard helps nobody: each connection has
new random bytes. (HMAC: Krawczyk, Bellare, Canetti, RFC 2104, with SHA-256.) After that, each message has a checksum
against damage; there is no encryption, as there is none for MPI's own messages.

    message    24 bytes: magic, kind, number of bytes, xxh3 of the bytes with the kind as seed; then the bytes

A connection carries one request at a time, so a client opens as many as its threads need. On one machine a Unix socket
connects them. The server's side is in server.py.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import xxhash

__all__ = [
    "SENDFILE_BYTES",
    "Address",
    "Client",
    "Part",
    "Request",
    "exactly",
    "machine_id",
    "peer_uid",
    "proof",
    "same_user",
    "send",
]
__all__ += ["tune"]

#: of this version of the protocol
GREETING = b"pario p1"
#: bytes of a random number, and of a HMAC
NUMBER_BYTES = MAC_BYTES = 32
HEAD = struct.Struct("<4sIQQ")
MAGIC = b"prs1"

#: A whole answer is at most so long.
_MOST_ANSWER = 1 << 30
#: Seconds for a connection.
_CONNECT_S = 2.0
#: The system takes at most so many pieces of memory in one call (IOV_MAX).
_PIECES = 1024
#: What a Unix socket holds, if the system allows that. (A file of 256 MiB in memory, sendfile between two processes on
#: two cores: 1.4 to 2.1 GB/s by default, 3.6 to 4.2 with so much.)
_BUFFER_BYTES = 4 << 20
#: Short pieces of memory are sent as they are; from this size on sendfile saves more than its call costs.
SENDFILE_BYTES = 64 << 10


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


class Part(NamedTuple):
    """A piece of an answer.

    view : u8[n], contiguous
    fd, offset : an open file that holds the same bytes; -1: none
    still() : whether the memory has held these bytes since the part was made; None: it always does
    """

    view: np.ndarray
    fd: int = -1
    offset: int = 0
    still: Callable[[], bool] | None = None


class Client:
    """Connections to one server, as many as threads use at the same time. Any thread.

    limit_s : seconds without any byte after which the server is given up
    """

    def __init__(self, address: Address, secret: bytes, limit_s: float) -> None:
        self._address, self._secret, self._limit_s = address, secret, limit_s
        self._lock = threading.RLock()  # the garbage collector may call `close` in a thread that holds it
        self._idle: list[socket.socket] = []
        self._used: set[socket.socket] = set()
        self._pid = os.getpid()
        self._closed = False

    def ask(self, kind: int, body: bytes) -> Request:
        """Send a request. Raises OSError."""
        self._after_fork()
        sock = None
        while sock is None:
            with self._lock:
                if self._closed:
                    raise OSError("the connections to another node are closed")
                if not self._idle:
                    break
                sock = self._idle.pop()
            if not _is_quiet(sock):  # the server has closed it
                sock.close()
                sock = None
        if sock is None:
            sock = self._connect()
        with self._lock:
            self._used.add(sock)
            closed = self._closed
        request = Request(self, sock)
        try:
            if closed:
                raise OSError("the connections to another node are closed")
            send(sock, kind, (Part(np.frombuffer(body, np.uint8)),))
        except BaseException:
            request.drop()
            raise
        return request

    def call(self, kind: int, body: bytes) -> bytes:
        """Send a request and take the whole answer. Raises OSError."""
        request = self.ask(kind, body)
        try:
            _, nbytes = request.head()
            answer = bytearray(min(nbytes, _MOST_ANSWER))
            request.read([memoryview(answer)])
            if not request.is_right():
                raise OSError("an answer was damaged on its way")
        finally:
            request.drop()
        return bytes(answer)

    def _connect(self) -> socket.socket:
        where = self._address
        error: OSError = OSError("another node has no address")
        if where.machine == machine_id():
            try:
                return self._greeted(socket.AF_UNIX, f"\0{where.local}")
            except OSError as e:  # another container of this machine
                error = e
        for host in where.hosts if where.port else ():
            try:
                return self._greeted(socket.AF_INET, (host, where.port))
            except OSError as e:
                error = e
        raise error

    def _greeted(self, family: int, address: str | tuple[str, int]) -> socket.socket:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(_CONNECT_S)
            _connect(sock, address)
            if not same_user(sock):
                raise OSError("another user's process has the address of another node")
            theirs = exactly(sock, len(GREETING) + NUMBER_BYTES)
            if not theirs.startswith(GREETING):
                raise OSError("another node speaks something else")
            number, mine = theirs[len(GREETING) :], secrets.token_bytes(NUMBER_BYTES)
            name = self._address.local.encode()
            sock.sendall(GREETING + mine + proof(self._secret, b"client" + name, number, mine))
            if not hmac.compare_digest(exactly(sock, MAC_BYTES), proof(self._secret, b"server" + name, number, mine)):
                raise OSError("another node does not know the secret")
            tune(sock, self._limit_s)
        except BaseException:
            sock.close()
            raise
        return sock

    def finished(self, sock: socket.socket, *, good: bool) -> None:
        """`Request` calls this."""
        with self._lock:
            self._used.discard(sock)
            if good and not self._closed:
                self._idle.append(sock)
                return
        _end(sock)

    @property
    def idle(self) -> int:
        """Connections that nobody uses."""
        return len(self._idle)

    def close_idle(self) -> None:
        """They are made again when they are needed."""
        with self._lock:
            idle, self._idle = self._idle, []
        for sock in idle:
            _end(sock)

    def _after_fork(self) -> None:
        """The connections belong to the process that made them."""
        if self._pid != os.getpid():
            self._pid, self._lock = os.getpid(), threading.RLock()
            for sock in (*self._idle, *self._used):
                sock.close()
            self._idle, self._used = [], set()

    def close(self) -> None:
        """Requests under way fail. Idempotent."""
        with self._lock:
            self._closed = True
            for sock in self._used:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        self.close_idle()


class Request:
    """One request under way. `head`, then `read` until all bytes are there, then `is_right`; or `drop`. All but `drop`
    may raise OSError, after which only `drop` may be called."""

    def __init__(self, client: Client, sock: socket.socket) -> None:
        self._client, self._sock = client, sock
        self._sum, self._found, self._left = 0, xxhash.xxh3_64(), 0
        self._over = False

    def head(self) -> tuple[int, int]:
        """(kind, number of bytes) of the answer."""
        magic, kind, self._left, self._sum = HEAD.unpack(exactly(self._sock, HEAD.size))
        if magic != MAGIC:
            raise OSError("another node's answer is none")
        self._found = xxhash.xxh3_64(seed=kind)
        return kind, self._left

    def read(self, views: Sequence[memoryview]) -> None:
        """Fill this memory with the next bytes of the answer."""
        self._left -= sum(map(len, views))
        if self._left < 0:
            raise OSError("another node's answer is too short")
        rest = deque(view for view in views if len(view))
        while rest:
            pieces = [rest[k] for k in range(min(len(rest), _PIECES))]
            try:
                got = self._sock.recvmsg_into(pieces, 0, socket.MSG_WAITALL)[0]
            except BlockingIOError as e:
                raise TimeoutError("nothing came for too long") from e
            if not got:
                raise OSError("another node closed the connection")
            _advance(rest, got)
        for view in views:
            self._found.update(view)

    def is_right(self) -> bool:
        """The end of the answer: whether its bytes have the sum that they had at the server."""
        right = self._left == 0 and self._found.intdigest() == self._sum
        self._over = True
        self._client.finished(self._sock, good=right)
        return right

    def drop(self) -> None:
        """Want no more of it. Idempotent, also after `is_right`."""
        if not self._over:
            self._over = True
            self._client.finished(self._sock, good=False)


def _connect(sock: socket.socket, address: str | tuple[str, int]) -> None:
    """Raises OSError."""
    end = time.monotonic() + _CONNECT_S
    while True:
        try:
            sock.connect(address)
            return
        except BlockingIOError:  # a Unix socket at which too many stand in line
            if time.monotonic() > end:
                raise
            time.sleep(0.005)


def same_user(sock: socket.socket) -> bool:
    """False if the system knows that another user is at the other end."""
    return peer_uid(sock) in (None, os.geteuid())


def peer_uid(sock: socket.socket) -> int | None:
    """Who is at the other end; None if the system does not know it."""
    if sock.family != socket.AF_UNIX:
        return None
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)


def _end(sock: socket.socket) -> None:
    """Also for processes that were forked meanwhile."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def exactly(sock: socket.socket, nbytes: int) -> bytes:
    """The next bytes. Raises OSError."""
    said = b""
    while len(said) < nbytes:
        try:
            part = sock.recv(nbytes - len(said), socket.MSG_WAITALL)
        except BlockingIOError as e:
            raise TimeoutError("nothing came for too long") from e
        if not part:
            raise OSError("closed")
        said += part
    return said


def send(sock: socket.socket, kind: int, parts: Sequence[Part]) -> None:
    """Raises OSError."""
    total, nbytes = xxhash.xxh3_64(seed=kind), 0
    for part in parts:
        total.update(memoryview(part.view))
        nbytes += len(part.view)
    # What changed before the sum was made gets a wrong one; what changes from here on does not have this one.
    unchanged = all(part.still is None or part.still() for part in parts)
    views = deque([memoryview(HEAD.pack(MAGIC, kind, nbytes, total.intdigest() ^ (not unchanged)))])
    for part in parts:
        if part.fd >= 0 and len(part.view) >= SENDFILE_BYTES:
            _send_views(sock, views)
            _send_file(sock, part)
        elif len(part.view):
            views.append(memoryview(part.view))
    _send_views(sock, views)


def _send_views(sock: socket.socket, views: deque[memoryview]) -> None:
    while views:
        _advance(views, sock.sendmsg([views[k] for k in range(min(len(views), _PIECES))]))


def _send_file(sock: socket.socket, part: Part) -> None:
    offset, end = part.offset, part.offset + len(part.view)
    while offset < end:
        sent = os.sendfile(sock.fileno(), part.fd, offset, end - offset)
        if not sent:
            raise OSError("the file ended")
        offset += sent


def _is_quiet(sock: socket.socket) -> bool:
    """True if nothing waits to be read, not even the end of the connection."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return not poll.poll(0)


def _advance(views: deque[memoryview], nbytes: int) -> None:
    """Drop the first bytes."""
    while nbytes:
        if nbytes < len(views[0]):
            views[0] = views[0][nbytes:]
            return
        nbytes -= len(views.popleft())


def tune(sock: socket.socket, limit_s: float) -> None:
    """Let the system end calls that wait for longer. With Python's own time limits each call would be
    two, and would return with every packet."""
    sock.setblocking(True)
    limit = struct.pack("ll", int(limit_s), int(limit_s % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    if sock.family == socket.AF_UNIX:  # TCP finds the size by itself
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    if sock.family == socket.AF_INET:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def proof(secret: bytes, who: bytes, server: bytes, client: bytes) -> bytes:
    return hmac.digest(secret, who + server + client, hashlib.sha256)


def machine_id() -> str:
    """Tells machines, and starts of one machine, apart."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return socket.gethostname()
