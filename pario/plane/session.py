"""A job's end of a connection to a control plane."""

from __future__ import annotations

import socket
import time
from typing import Any, NamedTuple

from pario.errors import ParioError
from pario.plane.words import PlaneAddress, packed, unpacked
from pario.threads import in_child
from pario.wire.frames import Link, TurnedAwayError, Word, enliven

#: Seconds for a connection, for the greeting, and for each answer.
_ANSWER_S = 1.0


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


class Session(Link):
    """A connection to a plane that has proven who it is. Everything here may raise OSError, TurnedAwayError.

    words : the first that are said; first : what the plane has answered
    """

    def __init__(self, address: PlaneAddress, who: Who, words: dict[str, Any], most_bytes: int) -> None:
        super().__init__(socket.socket(address.family, socket.SOCK_STREAM), most_bytes)
        try:
            self.sock.settimeout(_ANSWER_S)
            self.sock.connect(address.target)
            enliven(self.sock)
            self.greet(who.user, who.secret, time.monotonic() + _ANSWER_S, trusts_system=True)
            self.sock.settimeout(_ANSWER_S)
            self.send(words)
            self.first = self.answer()
            in_child(self.close)
        except BaseException:
            self.sock.close()
            raise

    def send(self, words: dict[str, Any]) -> None:
        self.put(Word.WORDS, packed(words))
        end = time.monotonic() + _ANSWER_S
        while self.flush():
            if time.monotonic() > end:
                raise TimeoutError("it takes what is said too slowly")

    def come(self) -> list[dict[str, Any]]:
        """What has come, once there is something to be read: at least a part of a message."""
        self.receive()
        return [unpacked(body) for _, body in iter(self.next, None)]

    def answer(self) -> dict[str, Any]:
        """The next message."""
        end = time.monotonic() + _ANSWER_S
        while (frame := self.next()) is None:
            self.receive()
            if time.monotonic() > end:
                raise TimeoutError("it does not answer")
        return unpacked(frame[1])

    def close(self) -> None:
        self.sock.close()


def connected(address: PlaneAddress, who: Who, words: dict[str, Any], most_bytes: int) -> Session:
    """A connection. Raises ParioError with the reason."""
    try:
        return Session(address, who, words, most_bytes)
    except TurnedAwayError as e:
        raise ParioError(f"the control plane at {address} refuses: {e}") from None
    except OSError as e:
        raise ParioError(f"no control plane at {address}: {e}") from None
