"""Frames between processes without MPI, the proof that comes before them, and the sums that guard them.

    server --> greeting, 32 random bytes
    client --> greeting, 32 random bytes, length of the user's name in one byte, that name, HMAC(secret, "C", agreed)
    server --> HMAC(secret, "S", agreed); or KNOWN; or REFUSED, and a frame that says why
    then frames, in both directions

    agreed     the user's name, the server's name, the random bytes of both
    frame      24 bytes: magic, kind, number of bytes, sum; then the bytes

Both sides show that they know the secret without sending it, and what was overheard helps nobody: each connection has
new random bytes. The server's name is one that it drew, or the address of its end of the connection, which each side
asks of its own system: what was said to one server is worth nothing at another one. (HMAC: Krawczyk, Bellare, Canetti,
RFC 2104, with SHA-256.) After that, each frame has a keyed sum (`Seal`): nobody who does not know the secret can
change, repeat or leave out one. There is no encryption, as there is none for MPI's own messages.

On a Unix socket the system tells who is at the other end. A server that relies on that answers KNOWN to a user whose
secret it does not know; the sums then have a key that everybody knows, and show damage only.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import os
import secrets
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import xxhash

#: of this version of the protocol
GREETING = b"pario w3"
#: bytes of a random number, and of a HMAC; of a user's name, at most
NUMBER_BYTES = MAC_BYTES = 32
MOST_USER = 255
#: in the place of the server's HMAC: the system knows the client; the client is refused
KNOWN, REFUSED = b"\0" * MAC_BYTES, b"\xff" * MAC_BYTES
#: secret, and what is agreed on, of the sums of a connection without a proof
UNPROVEN = b"", b""
#: of the client and of the server: in their proofs, and in the keys of their sums
CLIENT, SERVER, _CLIENTS_SUMS, _SERVERS_SUMS = b"C", b"S", b"c", b"s"
HEAD = struct.Struct("<4sIQQ")
MAGIC = b"prw3"
_SEALED = struct.Struct("<QIQ16s")

#: The system takes at most this many pieces of memory in one call (IOV_MAX).
PIECES = 1024
#: One call receives at most this much, and of a long frame more.
_RECEIVED, _MOST_RECEIVED = 64 << 10, 1 << 20
#: What a Unix socket holds, if the system allows that. (A file of 256 MiB in memory, sendfile between two processes on
#: two cores: 1.4 to 2.1 GB/s by default, 3.6 to 4.2 with this much.)
_BUFFER_BYTES = 4 << 20
#: Short pieces of memory are sent as they are; from this size on sendfile saves more than its call costs.
SENDFILE_BYTES = 64 << 10


class WireError(OSError):
    """What came is nothing of this protocol, or not what was agreed."""


class TurnedAwayError(WireError):
    """The other side does not want us. The text says why."""


class Word(enum.IntEnum):
    """What a frame is, or what became of something that was asked for. (Kinds of requests are numbers of their own,
    below 128.)"""

    HERE = 1  #: its bytes follow
    LATER = 2  #: not yet: ask again
    ABSENT = 3  #: it is not here, and will not be
    WORDS = 128  #: an object in JSON
    REFUSED = 129  #: why the connection ends


class Part(NamedTuple):
    """A piece of a frame.

    view : u8[n], contiguous
    fd, offset : an open file that holds the same bytes; -1: none
    still() : whether the memory has held these bytes since the part was made; None: it always does
    """

    view: np.ndarray
    fd: int = -1
    offset: int = 0
    still: Callable[[], bool] | None = None


class Seal:
    """The sums of the frames that go one way on one connection: HMAC-SHA256 over a frame's number, kind and length,
    and xxh3 of its bytes with a seed that is as secret as the key. (HMAC of all bytes takes 12 times as long.)"""

    def __init__(self, key: bytes) -> None:
        self._seed, self._key, self._number = int.from_bytes(key[:8], "little"), key[8:], 0

    def begin(self) -> xxhash.xxh3_128:
        """To be updated with the bytes of the next frame."""
        return xxhash.xxh3_128(seed=self._seed)

    def of(self, data: bytes, kind: int) -> int:
        """The next frame's sum, of a frame in one piece."""
        return self.end(kind, len(data), xxhash.xxh3_128_digest(data, self._seed))

    def end(self, kind: int, nbytes: int, digest: bytes) -> int:
        """The next frame's sum."""
        said = _SEALED.pack(self._number, kind, nbytes, digest)
        self._number += 1
        return int.from_bytes(hmac.digest(self._key, said, hashlib.sha256)[:8], "little")


def proof(secret: bytes, who: bytes, agreed: bytes) -> bytes:
    return hmac.digest(secret, who + agreed, hashlib.sha256)


def agreed_on(user: bytes, name: bytes, server: bytes, client: bytes) -> bytes:
    """What both sides know of their connection.

    user : with its length in front, so that it does not run into what follows; name : of the server
    server, client : random bytes of both
    """
    return user + name + server + client


def server_name(sock: socket.socket, *, mine: bool) -> bytes:
    """The address of the server's end of a connection, as this end knows it. Raises OSError."""
    found = sock.getsockname() if mine else sock.getpeername()
    return (found if isinstance(found, str) else f"{found[0]}:{found[1]}").encode()


class Link:
    """One end of a connection. Nothing here waits, but for `greet`, and for a socket with a time limit of Python's.

    most_bytes : of a frame that comes
    mine, theirs : of what this end sends, and of what comes
    """

    mine: Seal
    theirs: Seal

    def __init__(self, sock: socket.socket, most_bytes: int) -> None:
        self.sock, self.most_bytes = sock, most_bytes
        self._come, self._waiting, self._missing = b"", b"", 0

    def greet(
        self, user: str, secret: bytes | None, until: float, *, name: bytes = b"", trusts_system: bool = False
    ) -> None:
        """The client's side of the greeting.

        until : by time.monotonic()
        name : of the server; b"": its address
        trusts_system : a server of this user, or of root, need not prove that it knows the secret
        Raises OSError, TurnedAwayError.
        """
        theirs = exactly(self.sock, len(GREETING) + NUMBER_BYTES, until)
        if not theirs.startswith(GREETING):
            raise WireError("it speaks something else")
        who, number = user.encode(errors="replace")[:MOST_USER], secrets.token_bytes(NUMBER_BYTES)
        who = bytes([len(who)]) + who
        agreed = agreed_on(who, name or server_name(self.sock, mine=False), theirs[len(GREETING) :], number)
        self.sock.sendall(GREETING + number + who + proof(secret or b"", CLIENT, agreed))
        answer = exactly(self.sock, MAC_BYTES, until)
        proven = secret is not None and hmac.compare_digest(answer, proof(secret, SERVER, agreed))
        self.use(*((secret, agreed) if proven and secret else UNPROVEN), mine=CLIENT)
        if answer == REFUSED:
            while self.next() is None:
                self._come += exactly(self.sock, self._missing or HEAD.size - len(self._come), until)
        if not proven and not (trusts_system and answer == KNOWN and peer_uid(self.sock) in (0, os.geteuid())):
            raise WireError("it does not know the secret" if secret else "there is no secret to know it by")

    def use(self, secret: bytes, agreed: bytes, *, mine: bytes) -> None:
        """The sums of this connection. mine : CLIENT or SERVER"""
        client, server = (Seal(proof(secret, who, agreed)) for who in (_CLIENTS_SUMS, _SERVERS_SUMS))
        self.mine, self.theirs = (client, server) if mine == CLIENT else (server, client)

    def receive(self) -> None:
        """What has come. Raises OSError at the end of the connection."""
        with suppress(BlockingIOError):
            want = min(max(self._missing, min(HEAD.size + self.most_bytes, _RECEIVED)), _MOST_RECEIVED)
            piece = self.sock.recv(want, socket.MSG_DONTWAIT)
            if not piece:
                raise OSError("it closed the connection")
            self._come += piece

    def next(self) -> tuple[int, bytes] | None:
        """(kind, bytes) of the next frame, if it has come. Raises WireError, TurnedAwayError."""
        come = self._come
        if len(come) < HEAD.size:
            return None
        magic, kind, nbytes, total = HEAD.unpack_from(come)
        if magic != MAGIC:
            raise WireError("a frame that is none")
        if nbytes > self.most_bytes:
            raise WireError(f"a frame of {nbytes:,} bytes, of which {self.most_bytes:,} are allowed")
        end = HEAD.size + nbytes
        self._missing = end - len(come)
        if self._missing > 0:
            return None
        self._come, self._missing = come[end:], 0
        body = come[HEAD.size : end]
        if self.theirs.of(body, kind) != total:
            raise WireError("a frame that was changed on its way, or made by somebody else")
        if kind == Word.REFUSED:
            raise TurnedAwayError(body.decode(errors="replace")[:200])
        return kind, body

    @property
    def waiting(self) -> int:
        """Bytes that the other side has not taken."""
        return len(self._waiting)

    def put(self, kind: int, body: bytes) -> None:
        """`flush` sends it."""
        self.put_raw(HEAD.pack(MAGIC, kind, len(body), self.mine.of(body, kind)) + body)

    def put_raw(self, data: bytes) -> None:
        self._waiting += data

    def flush(self) -> int:
        """Send what the other side takes; how many bytes are left. Raises OSError."""
        if self._waiting:
            waiting, self._waiting = self._waiting, b""  # lost at the end of the connection
            with suppress(BlockingIOError):
                waiting = waiting[self.sock.send(waiting, socket.MSG_DONTWAIT) :]
            self._waiting = waiting
        return len(self._waiting)


def peer_uid(sock: socket.socket) -> int | None:
    """Who is at the other end; None if the system does not know it."""
    if sock.family != socket.AF_UNIX:
        return None
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)


def exactly(sock: socket.socket, nbytes: int, until: float) -> bytes:
    """The next bytes, as `fill`."""
    said = bytearray(nbytes)
    fill(sock, [memoryview(said)], until)
    return bytes(said)


def fill(sock: socket.socket, views: Sequence[memoryview], until: float) -> None:
    """Fill this memory with the next bytes, all of it until then by time.monotonic(): one that sends now and then one
    byte must not hold anybody. Raises OSError."""
    rest = deque(view for view in views if len(view))
    while rest:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError("it takes too long")
        if sock.gettimeout() is not None:  # else the system ends each call (`tune`)
            sock.settimeout(left)
        try:
            got = sock.recvmsg_into([rest[k] for k in range(min(len(rest), PIECES))], 0, socket.MSG_WAITALL)[0]
        except BlockingIOError as e:
            raise TimeoutError("nothing came for too long") from e
        if not got:
            raise OSError("it closed the connection")
        advance(rest, got)


def send(link: Link, kind: int, parts: Sequence[Part]) -> None:
    """A frame of several parts, on a socket that waits (`tune`). Raises OSError."""
    total, nbytes = link.mine.begin(), 0
    for part in parts:
        total.update(memoryview(part.view))
        nbytes += len(part.view)
    # What changed before the sum was made gets a wrong one; what changes from here on does not have this one.
    unchanged = all(part.still is None or part.still() for part in parts)
    head = HEAD.pack(MAGIC, kind, nbytes, link.mine.end(kind, nbytes, total.digest()) ^ (not unchanged))
    views = deque([memoryview(head)])
    for part in parts:
        if part.fd >= 0 and len(part.view) >= SENDFILE_BYTES:
            _send_views(link.sock, views)
            _send_file(link.sock, part)
        elif len(part.view):
            views.append(memoryview(part.view))
    _send_views(link.sock, views)


def _send_views(sock: socket.socket, views: deque[memoryview]) -> None:
    while views:
        advance(views, sock.sendmsg([views[k] for k in range(min(len(views), PIECES))]))


def _send_file(sock: socket.socket, part: Part) -> None:
    offset, end = part.offset, part.offset + len(part.view)
    while offset < end:
        sent = os.sendfile(sock.fileno(), part.fd, offset, end - offset)
        if not sent:
            raise OSError("the file ended")
        offset += sent


def advance(views: deque[memoryview], nbytes: int) -> None:
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
    enliven(sock)


def enliven(sock: socket.socket) -> None:
    """Send at once, and notice within a minute that a machine is gone."""
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):  # seconds, seconds, times
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
