"""A job's end of a connection to a control plane (wire.py)."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import time
from contextlib import suppress
from typing import Any, NamedTuple

from pario.comm.sockets import NUMBER_BYTES, peer_uid
from pario.control.wire import (
    VERSION,
    Address,
    LineReader,
    WireError,
    answer_proof,
    ask_proof,
    packed,
    read_number,
    server_name,
    unpacked,
)
from pario.errors import ParioError

__all__ = ["Bell", "Line", "TurnedAwayError", "Who", "connected"]

#: Seconds for a connection, and for each answer while it is made.
_ANSWER_S = 1.0
_PIECE = 64 << 10


class Bell:
    """Wakes a thread that waits for sockets. Any thread may ring, and a signal's handler."""

    def __init__(self) -> None:
        self._here, self._rope = socket.socketpair()
        for each in (self._here, self._rope):
            each.setblocking(False)

    def fileno(self) -> int:
        """To be waited for."""
        return self._here.fileno()

    def ring(self) -> None:
        with suppress(OSError):  # full: it has rung already; closed: nobody waits
            self._rope.send(b".")

    def silence(self) -> None:
        with suppress(BlockingIOError):
            self._here.recv(4096)

    def close(self) -> None:
        self._here.close()
        self._rope.close()


class Who(NamedTuple):
    """Who speaks to a plane.

    user : as the rules know him; secret : of his token, or None
    job : tells the user's jobs apart; name : of the job; node : of this process
    """

    user: str
    secret: bytes | None
    job: str
    name: str
    node: str


class TurnedAwayError(Exception):
    """The plane does not want us. The text says why."""


class Line:
    """A connection to a plane that has proven who it is. Everything here may raise OSError and WireError, the
    constructor also TurnedAwayError.

    first : what the plane has answered
    """

    def __init__(self, address: Address, who: Who, words: dict[str, Any], most_bytes: int) -> None:
        self._reader = LineReader(most_bytes)
        self.sock = socket.socket(address.family, socket.SOCK_STREAM)
        try:
            self.sock.settimeout(_ANSWER_S)
            self.sock.connect(address.target)
            self.first = self._greet(who, words)
        except BaseException:
            self.sock.close()
            raise
        if address.family == socket.AF_INET:
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _greet(self, who: Who, words: dict[str, Any]) -> dict[str, Any]:
        greeting = self.next()
        if greeting.get("pario-control") != VERSION:
            raise WireError(f"it is no control plane of version {VERSION}")
        theirs, mine = read_number(greeting, "number"), secrets.token_bytes(NUMBER_BYTES)
        name = server_name(self.sock, mine=False)
        proof = "" if who.secret is None else ask_proof(who.secret, who.user, name, theirs, mine).hex()
        self.send({"user": who.user, "number": mine.hex(), "proof": proof, **words})
        answer = self.next()
        if "refused" in answer:
            raise TurnedAwayError(str(answer["refused"])[:200])
        uid = peer_uid(self.sock)
        if uid not in (0, os.geteuid()) or uid is None:
            if who.secret is None:
                raise WireError("it belongs to another user, and there is no token to know it by")
            expected = answer_proof(who.secret, who.user, name, theirs, mine)
            if not hmac.compare_digest(read_number(answer, "proof"), expected):
                raise WireError("it does not know the token")
        return answer

    def send(self, words: dict[str, Any]) -> None:
        self.sock.sendall(packed(words))

    def come(self) -> list[dict[str, Any]]:
        """What can be read now, at least a part of a line."""
        piece = self.sock.recv(_PIECE)
        if not piece:
            raise OSError("it closed the connection")
        return [unpacked(line) for line in self._reader.lines(piece)]

    def next(self) -> dict[str, Any]:
        """The next message, which the plane sends alone."""
        end = time.monotonic() + _ANSWER_S
        while True:
            found = self.come()
            if found:
                return found[0]
            if time.monotonic() > end:
                raise TimeoutError("it does not answer")

    def close(self) -> None:
        self.sock.close()


def connected(address: Address, who: Who, words: dict[str, Any], most_bytes: int) -> Line:
    """A connection. Raises ParioError with the reason."""
    try:
        return Line(address, who, words, most_bytes)
    except TurnedAwayError as e:
        raise ParioError(f"the control plane at {address} refuses: {e}") from None
    except (OSError, WireError) as e:
        raise ParioError(f"no control plane at {address}: {e}") from None
