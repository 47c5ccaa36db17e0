"""What a job and the control plane say to each other: objects in JSON, each a frame (wire/frames.py).

    job   --> {"do": "join", "member", "job", "name", "node"}     or "do": "status"
    plane --> {"grant", "safe", "lease", "every"}
    job   --> {"at", "used", "demand"}             a report; {"bye": 1} at the end
    plane --> {"grant", "safe", "lease", "every"}  after a report, or because another job has come

"No limit" and "as much as I can get" as null. The greeting before that names the user, whose token is the secret; the
frame that refuses one who is connected says why.
"""

from __future__ import annotations

import json
import os
import socket
from typing import Any, NamedTuple

from pario.comm.launcher import interface_address
from pario.errors import OptionError
from pario.plane.bucket import Rates
from pario.wire.frames import WireError

#: No rate or counter is larger.
_MOST = 1e18
_MOST_TEXT = 128


class PlaneAddress(NamedTuple):
    """Where a plane listens.

    host, port : TCP; path : of a Unix socket, "" for TCP
    """

    host: str
    port: int
    path: str = ""

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"

    @property
    def family(self) -> int:
        return socket.AF_UNIX if self.path else socket.AF_INET

    @property
    def target(self) -> str | tuple[str, int]:
        """As the socket module takes it."""
        return self.path or (self.host, self.port)


class Report(NamedTuple):
    """What a process says of itself.

    at : seconds on its own clock; used : (bytes, operations) since it started
    demand : bytes/s and operations/s that it wants; None: as much as it can get
    """

    at: float
    used: tuple[float, float]
    demand: Rates


class Grant(NamedTuple):
    """What a process may ask of the store.

    rates : until the lease ends; safe : from then on
    lease_s : how long that is; every_s : how often the plane wants to hear of it
    """

    rates: Rates
    safe: Rates
    lease_s: float
    every_s: float

    def words(self) -> dict[str, Any]:
        return {"grant": self.rates, "safe": self.safe, "lease": self.lease_s, "every": self.every_s}


def read_address(text: str) -> PlaneAddress:
    """HOST:PORT, INTERFACE:PORT, or the path of a Unix socket, which has a slash in it. Raises OptionError."""
    if "/" in text:
        return PlaneAddress("", 0, os.path.abspath(os.path.expanduser(text)))
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise OptionError(
            f"{text!r} is no address of a control plane",
            hint="Write HOST:PORT, INTERFACE:PORT, or the path of a Unix socket (with a slash).",
        )
    return PlaneAddress(interface_address(host) or host, int(port))


def packed(words: dict[str, Any]) -> bytes:
    """A message."""
    return json.dumps(words, separators=(",", ":")).encode()


def unpacked(message: bytes) -> dict[str, Any]:
    """Raises WireError."""
    try:
        words = _decode(message.decode())
    except (ValueError, RecursionError):
        raise WireError("a message that is no JSON") from None
    if not isinstance(words, dict):
        raise WireError("a message that is no JSON object")
    return words


def _no_number(text: str) -> float:
    raise ValueError(text)


#: made once: each costs as much as decoding three reports
_decode = json.JSONDecoder(parse_constant=_no_number).decode


def text_of(words: dict[str, Any], key: str) -> str:
    """A short text without anything that a terminal would obey. Raises WireError."""
    found = words.get(key)
    if not isinstance(found, str) or not found or len(found) > _MOST_TEXT or not found.isprintable():
        raise WireError(f"{key} is missing, too long or no text")
    return found


def _rates(words: dict[str, Any], key: str) -> Rates:
    """Two numbers from 0 on, or null for one without a limit. Raises WireError."""
    found = words.get(key)
    if not isinstance(found, list) or len(found) != 2:
        raise WireError(f"{key} is missing or not two numbers")
    nbytes, operations = (None if each is None else _amount(each, key) for each in found)
    return nbytes, operations


def report_of(words: dict[str, Any]) -> Report:
    """Raises WireError."""
    nbytes, operations = (_amount(each, "used") for each in _rates(words, "used"))
    return Report(_amount(words.get("at"), "at"), (nbytes, operations), _rates(words, "demand"))


def grant_of(words: dict[str, Any]) -> Grant:
    """Raises WireError."""
    lease_s, every_s = (_amount(words.get(key), key) for key in ("lease", "every"))
    found = Grant(_rates(words, "grant"), _rates(words, "safe"), lease_s, every_s)
    if 0 in found.rates + found.safe:
        raise WireError("a rate of 0")
    if not 0.1 <= lease_s <= 1e5 or not 0.005 <= every_s <= lease_s:
        raise WireError(f"a lease of {lease_s:g} s, renewed every {every_s:g} s")
    return found


def _amount(value: Any, what: str) -> float:
    # Python reads whole numbers of any length, which need not fit into a float; true and false are numbers to it, too.
    if type(value) in (int, float) and 0 <= value <= _MOST:
        return float(value)
    raise WireError(f"{what} is no amount")
