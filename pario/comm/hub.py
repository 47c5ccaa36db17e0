"""Where ranks without MPI meet: a thread of rank 0 that passes on what they say.

Whatever ranks do together is one meeting: each sends its part, and when the last one has come all get an answer: every
part, that of one rank, or nothing. So nobody is further than one call ahead, and nothing piles up here. Besides that
there are notes, which go from one rank to another at once, and the news that a rank has ended, or is gone.
"""

from __future__ import annotations

import enum
import os
import struct
import time

from pario.wire.frames import WireError
from pario.wire.server import Guest, Server

#: Of what the ranks of a meeting say, and hear, at most this much.
MOST_BYTES = 1 << 20
#: A frame also holds a head, and 128 bytes of every rank where each says a number.
MOST_FRAME = MOST_BYTES + (1 << 20)

#: communicator, number of the call on it; then the number of ranks, this one's, who hears what, and the root
MEETING, _WHAT = struct.Struct("<8sQ"), struct.Struct("<IIBI")
#: communicator, and number of the note, which the answer has, too; from which rank of the job to which; its tag
NOTE = struct.Struct("<8sQIII")
#: rank, and number of ranks; then the name of the node
SEAT = struct.Struct("<II")

#: Seconds for the ranks to take the last words, when this process ends.
_FLUSH_S = 2.0


class Say(enum.IntEnum):
    """Kinds of frames."""

    HERE = 1  #: a rank has come; then, when all have: the names of their nodes
    MEET = 2  #: a part; the answer
    NOTE = 3
    APART = 4  #: the ranks of a meeting do not call the same
    ENDS = 5  #: a rank's script has ended
    GONE = 6  #: a rank's connection has ended without that


class Part(enum.IntEnum):
    """Who hears what in a meeting."""

    ALL_TO_ALL = 0
    ROOT_TO_ALL = 1
    ALL_TO_ROOT = 2


def part(key: bytes, size: int, rank: int, what: Part, root: int) -> bytes:
    """The head of a rank's part of a meeting."""
    return key + _WHAT.pack(size, rank, what, root)


class Seat(Guest):
    """The connection of a rank; -1: it has not said which."""

    rank = -1


class Hub(Server[Seat]):
    """The meeting place of `size` ranks; those of this machine and this user need no secret.

    name : by which it is known
    secret : of the ranks on other machines; None: there are none
    port : at which they connect; 0: any

    Raises OSError, ParioError.
    """

    guest = Seat
    trusts_system = True
    most_waiting = 64 << 20

    def __init__(self, name: str, size: int, secret: bytes | None, port: int = 0) -> None:
        super().__init__("the ranks' meeting place", most_links=size + 8, most_bytes=MOST_FRAME, name=name.encode())
        self._size, self._secret = size, secret
        self._seats: dict[int, Seat] = {}
        self._nodes: dict[int, bytes] = {}
        self._meetings: dict[bytes, dict[int, tuple[Seat, bytes, bytes]]] = {}
        self.port = self.open(name, None if secret is None else "", port, self.cancel)

    def secret_of(self, user: str) -> bytes | None:
        return self._secret

    def welcome(self, link: Seat) -> None:
        if link.uid not in (None, os.geteuid()):
            raise WireError("another user")

    def took(self, link: Seat, kind: int, body: bytes) -> bool:
        try:
            if kind == Say.HERE and link.rank < 0:
                rank, size = SEAT.unpack_from(body)
                self._come(link, rank, size, body[SEAT.size :])
            elif kind == Say.MEET and link.rank >= 0:
                self._meet(link, body)
            elif kind == Say.NOTE and link.rank >= 0:
                _, _, _, to, _ = NOTE.unpack_from(body)
                if to in self._seats:
                    self.put(self._seats[to], Say.NOTE, body)
                self.put(link, Say.MEET, body[: MEETING.size])  # a rank that hears of it now finds the note there
            elif kind == Say.ENDS and link.rank >= 0:
                self._tell(Say.ENDS, link.rank)
            else:
                raise WireError("what no rank says")
        except struct.error as e:
            raise WireError("what no rank says") from e
        return True

    def _come(self, link: Seat, rank: int, size: int, node: bytes) -> None:
        if size != self._size or rank >= size:
            raise WireError(f"it is rank {rank} of {size}, and this is a job of {self._size} ranks")
        if rank in self._nodes:
            raise WireError(f"rank {rank} is here already: this is another job, or another process of the rank")
        link.rank, self._seats[rank], self._nodes[rank] = rank, link, node
        if len(self._nodes) == size:
            everyones = b"\n".join(self._nodes[each] for each in range(size))
            for each in list(self._seats.values()):
                self.put(each, Say.HERE, everyones)
            while self._listeners:
                self.unwatch(self._listeners[-1].fileno())
                self._listeners.pop().close()

    def _meet(self, link: Seat, body: bytes) -> None:
        key, start = body[: MEETING.size], MEETING.size + _WHAT.size
        size, rank, what, root = _WHAT.unpack_from(body, MEETING.size)
        if size > self._size or rank >= size:
            raise WireError("what no rank says")
        here = self._meetings.setdefault(key, {})
        here[rank] = link, _WHAT.pack(size, 0, what, root), body[start:]
        if len(here) < size:
            return
        del self._meetings[key]
        if len({said for _, said, _ in here.values()}) > 1:
            for seat, *_ in here.values():
                self.put(seat, Say.APART, key)
            return
        parts = [here[each][2] for each in range(size)]
        answer = key + (parts[root] if what == Part.ROOT_TO_ALL else b"".join(parts))
        for each, (seat, *_) in here.items():
            self.put(seat, Say.MEET, key if what == Part.ALL_TO_ROOT and each != root else answer)

    def forget(self, link: Seat) -> None:
        if self._seats.get(link.rank) is link:
            self._tell(Say.GONE, link.rank)

    def _tell(self, kind: Say, rank: int) -> None:
        """All others of what became of a rank, once."""
        if self._seats.pop(rank, None) is not None:
            for each in list(self._seats.values()):
                self.put(each, kind, struct.pack("<I", rank))

    def leave(self) -> None:
        """The others hear all that was said, if they take it soon; then this process ends."""
        until = time.monotonic() + _FLUSH_S
        while (0 in self._seats or any(link.waiting for link in list(self.links))) and time.monotonic() < until:
            time.sleep(1e-3)
        self.cancel()
