"""Ranks without MPI: as much of what mpi4py offers as a World uses, over one connection of every rank to rank 0.

How they find each other: `join`. What they say is passed on by hub.py. As in MPI, calls return at once, and anyone who
waits for one asks `Test` now and then: no rank has a thread for this, but for rank 0's.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import secrets
import select
import socket
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np

from pario.comm.alive import roll_call
from pario.comm.hub import MEETING, MOST_BYTES, MOST_FRAME, NOTE, SEAT, Hub, Part, Say, part
from pario.comm.launcher import Announced, own_addresses
from pario.comm.messages import wait_politely
from pario.errors import DeadRankError, LauncherError, PeerError
from pario.machine import boot
from pario.threads import in_child
from pario.wire.client import Address, reached
from pario.wire.frames import Link

_log = logging.getLogger("pario")

#: Seconds for all ranks to come, and after which one says that it cannot reach rank 0.
_COME_S, _TELL_S = 600.0, 10.0
#: Seconds between two tries, and for a connection's own words.
_AGAIN_S, _CALL_S = 0.05, 5.0
#: Seconds from the end of another rank's script to the error of this one, if it waits for that, and for its last words.
_NEWS_S, _END_S = 1.0, 2.0
#: Bytes of a secret, at least.
_LEAST_SECRET = 16

_HINT = (
    "Where ranks of several machines share no home folder: PARIO_SECRET_FILE names a file that only you can read, the "
    "same on each machine, and PARIO_RENDEZVOUS=HOST:PORT a free port of rank 0's (docs/clusters.md#without-mpi)"
)


class Meeting:
    """A call that all ranks of a communicator make. finish(answer) : takes what they said; is_apart : they do not call
    the same"""

    def __init__(self, star: Star, finish: Callable[[bytes], None]) -> None:
        self._star, self._finish = star, finish
        self._answer: bytes | None = None
        self._done = self.is_apart = False
        self.sleep = star.sleep

    def came(self, answer: bytes) -> None:
        self._answer = answer

    def Test(self) -> bool:
        """Whether all have come. Raises PeerError if they do not call the same."""
        if not self._done:
            self._star.poll()
            if self.is_apart:
                raise PeerError(
                    "the ranks are at different places of their scripts: they wait for each other in different calls",
                    hint="Each rank must run the same loops, and make its calls of pario in the same order",
                )
            if self._answer is not None:
                self._finish(self._answer)
                self._done = True
        return self._done


class Listening:
    """Receives the next note with this tag on a communicator. source : rank of the job, or ANY_SOURCE"""

    def __init__(self, star: Star, where: tuple[bytes, int], source: int, into: Any) -> None:
        self._star, self._notes, self._source, self._into = star, star.notes[where], source, into
        self._done = False

    def has_come(self) -> tuple[int, bytes] | None:
        """(source, bytes)"""
        self._star.poll()
        return next((note for note in self._notes if self._source in (note[0], Star.ANY_SOURCE)), None)

    def Test(self) -> bool:
        if not self._done and (note := self.has_come()) is not None:
            self._notes.remove(note)
            if self._into is not None:
                _fill(self._into, note[1])
            self._done = True
        return self._done

    def sleep(self, pause: float) -> None:
        self._star.sleep(pause)

    def Cancel(self) -> None:
        self._done = True


class Ranks(tuple[int, ...]):
    """Some ranks of the job, in some order."""

    def Free(self) -> None: ...

    @staticmethod
    def Translate_ranks(mine: Ranks, ranks: Sequence[int], theirs: Ranks) -> list[int]:
        return [theirs.index(mine[rank]) for rank in ranks]

    @staticmethod
    def Compare(one: Ranks, other: Ranks) -> bool:
        return one == other


class StarComm:
    """A communicator: some ranks in some order, and what they say to each other and to nobody else."""

    def __init__(self, star: Star, name: bytes, ranks: Sequence[int]) -> None:
        self.library, self.name, self._ranks = star, name, Ranks(ranks)
        self.rank, self.size = ranks.index(star.rank), len(ranks)
        self._calls, self._notes, self._children = count(), count(1 << 63), count()

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size

    def Get_group(self) -> Ranks:
        return self._ranks

    def Set_errhandler(self, handler: object) -> None:
        """Errors are exceptions anyway."""

    def _child(self, ranks: Sequence[int], color: int) -> StarComm:
        said = self.name + f"{next(self._children)} {color}".encode()
        return type(self)(self.library, hashlib.blake2b(said, digest_size=8).digest(), ranks)

    def Dup(self) -> StarComm:
        return self._child(self._ranks, 0)

    def Split(self, color: int, key: int = 0) -> StarComm | None:
        everyones = np.empty((self.size, 2), np.int64)
        wait_politely(self.Iallgather(np.array([color, key], np.int64), everyones), self.library.check)
        order = sorted(range(self.size), key=lambda rank: (everyones[rank, 1], rank))
        child = self._child([self._ranks[rank] for rank in order if everyones[rank, 0] == color], color)
        return None if color == self.library.UNDEFINED else child

    def Split_type(self, kind: int, key: int = 0) -> StarComm:
        nodes = self.library.nodes
        found = self.Split(nodes.index(nodes[self.library.rank]), key)
        assert found is not None
        return found

    # -- what all ranks call -----------------------------------------------------------------------------------------

    def _meet(self, what: Part, root: int, mine: Any, finish: Callable[[bytes], None]) -> Meeting:
        key = MEETING.pack(self.name, next(self._calls))
        meeting = Meeting(self.library, finish)
        if self.size == 1:
            meeting.came(_bytes(mine))
        else:
            self.library.meet(key, meeting, Say.MEET, part(key, self.size, self.rank, what, root) + _bytes(mine))
        return meeting

    def Ibarrier(self) -> Meeting:
        return self._meet(Part.ALL_TO_ALL, 0, None, lambda answer: None)

    def Iallgather(self, mine: Any, into: Any) -> Meeting:
        return self._meet(Part.ALL_TO_ALL, 0, mine, lambda answer: _fill(into, answer))

    def Iallreduce(self, mine: np.ndarray, into: np.ndarray, op: Callable[..., Any]) -> Meeting:
        def finish(answer: bytes) -> None:
            into[:] = op(np.frombuffer(answer, mine.dtype).reshape(self.size, -1), axis=0)

        return self._meet(Part.ALL_TO_ALL, 0, mine, finish)

    def Iexscan(self, mine: np.ndarray, into: np.ndarray, op: Callable[..., Any]) -> Meeting:
        def finish(answer: bytes) -> None:
            if self.rank:
                into[:] = op(np.frombuffer(answer, mine.dtype).reshape(self.size, -1)[: self.rank], axis=0)

        return self._meet(Part.ALL_TO_ALL, 0, mine, finish)

    def Ibcast(self, data: Any, root: int) -> Meeting:
        is_root = self.rank == root
        finish = (lambda answer: None) if is_root else (lambda answer: _fill(data, answer))
        return self._meet(Part.ROOT_TO_ALL, root, data if is_root else None, finish)

    def Igatherv(self, mine: Any, into: Any, root: int) -> Meeting:
        finish = (lambda answer: _fill(into, answer)) if self.rank == root else (lambda answer: None)
        return self._meet(Part.ALL_TO_ROOT, root, mine, finish)

    # -- notes from one rank to another ------------------------------------------------------------------------------

    def Isend(self, data: Any, dest: int, tag: int = 0) -> Meeting:
        number = next(self._notes)
        key = MEETING.pack(self.name, number)
        note = Meeting(self.library, lambda answer: None)
        head = NOTE.pack(self.name, number, self.library.rank, self._ranks[dest], tag)
        self.library.meet(key, note, Say.NOTE, head + _bytes(data))
        return note

    def _listening(self, source: int, tag: int, into: Any = None) -> Listening:
        source = source if source == Star.ANY_SOURCE else self._ranks[source]
        return Listening(self.library, (self.name, tag), source, into)

    def Irecv(self, data: Any, source: int, tag: int = 0) -> Listening:
        return self._listening(source, tag, data)

    def Iprobe(self, source: int, tag: int = 0) -> bool:
        return self._listening(source, tag).has_come() is not None


def _array(data: Any) -> np.ndarray:
    """Of an array, or of one and its MPI type."""
    return data if isinstance(data, np.ndarray) else data[0]


def _bytes(data: Any) -> bytes:
    return b"" if data is None else _array(data).tobytes()


def _fill(into: Any, answer: bytes) -> None:
    _array(into).reshape(-1).view(np.uint8)[: len(answer)] = np.frombuffer(answer, np.uint8)


class Star:
    """This process's connection to all others of its job, in the place of the module mpi4py.MPI. Any thread.

    link : to the meeting place; hub : on rank 0, the meeting place
    nodes : the name of every rank's node; notes : by communicator and tag
    """

    Intracomm, Group, COMM_NULL, BYTE = StarComm, Ranks, None, None
    SUM, MAX, MIN, BAND = np.add.reduce, np.maximum.reduce, np.minimum.reduce, np.bitwise_and.reduce
    COMM_TYPE_SHARED, UNDEFINED, ANY_SOURCE, ERRORS_RETURN, IDENT = 0, -1, -1, 0, True
    Exception = OSError
    MOST_BYTES = MOST_BYTES

    def __init__(self, link: Link, rank: int, size: int, hub: Hub | None) -> None:
        self.rank, self.size, self._link, self._hub = rank, size, link, hub
        self.nodes: list[bytes] = []
        self.notes: defaultdict[tuple[bytes, int], list[tuple[int, bytes]]] = defaultdict(list)
        self.COMM_WORLD = StarComm(self, b"everyone", range(size))
        self.COMM_SELF = StarComm(self, b"%08d" % rank, [rank])
        self._meetings: dict[bytes, Meeting] = {}
        self._ended: dict[int, float] = {}  # since when this one knows it
        self._gone: int | None = None
        self._why, self._over = "", False
        self._lock = threading.RLock()
        in_child(self.forget)

    @property
    def lifeline(self) -> Star:
        """Tells who is gone (`alive.Watch`)."""
        return self

    @property
    def lost(self) -> int | None:
        """A rank whose connection was closed before its script had ended."""
        self.poll()
        return self._gone

    def Is_initialized(self) -> bool:
        return True

    def Is_finalized(self) -> bool:
        return self._over

    def meet(self, key: bytes, meeting: Meeting, kind: Say, body: bytes) -> None:
        with self._lock:
            self._meetings[key] = meeting
            self.say(kind, body)

    def say(self, kind: Say, body: bytes) -> None:
        with self._lock:
            if not self._over:
                self._link.put(kind, body)
            self.poll()

    def poll(self) -> bool:
        """Send and receive what can be sent and received now; whether all was sent that ever will be."""
        with self._lock:
            if self._over:
                return True
            try:
                self._link.flush()
                while self._has_come():
                    self._link.receive()
                    while (frame := self._link.next()) is not None:
                        self._take(*frame)
            except OSError as e:
                self._over, self._why = True, str(e)
                self._link.sock.close()
                if self._gone is None and 0 not in self._ended:
                    self._gone = 0
            return self._over or not self._link.waiting

    def _has_come(self, wait_s: float = 0.0) -> bool:
        poll = select.poll()
        poll.register(self._link.sock, select.POLLIN | (select.POLLOUT if wait_s and self._link.waiting else 0))
        return bool(poll.poll(1e3 * wait_s))

    def sleep(self, pause: float) -> None:
        """This long, or until something comes."""
        if pause and not self._over:
            with suppress(OSError, ValueError):  # another thread has found the connection closed
                self._has_come(pause)
        time.sleep(0)

    def _take(self, kind: int, body: bytes) -> None:
        if kind in (Say.MEET, Say.APART):
            meeting = self._meetings.pop(body[: MEETING.size])
            meeting.is_apart = kind == Say.APART
            meeting.came(body[MEETING.size :])
        elif kind == Say.NOTE:
            name, _, source, _, tag = NOTE.unpack_from(body)
            self.notes[name, tag].append((source, body[NOTE.size :]))
        elif kind == Say.HERE:
            self.nodes = body.split(b"\n")
        elif kind == Say.ENDS:
            self._ended[int.from_bytes(body, "little")] = time.monotonic()
        elif self._gone is None:
            self._gone = int.from_bytes(body, "little")

    def gone(self) -> int | None:
        """A rank whose connection was closed. Raises PeerError if the script of one is at its end."""
        self.poll()
        # Anyone who ends by an error has sent a note before, which says more: it is looked for first.
        if self._gone is None and self._ended and time.monotonic() > min(self._ended.values()) + _NEWS_S:
            raise PeerError(
                "the script of another rank is at its end, and this one still waits for it",
                rank=min(self._ended),
                hint="Each rank must run the same loops, and make its calls of pario in the same order",
            )
        return self._gone

    def check(self) -> None:
        """Raises DeadRankError or PeerError if this rank waits in vain."""
        gone = self.gone()
        if gone is not None:
            why = f" ({self._why})" if self._why else ""
            raise DeadRankError(f"another rank is gone: its connection was closed{why}", rank=gone)

    def Test(self) -> bool:
        """Whether all ranks have come: as a request, for `wait_politely`."""
        self.poll()
        return bool(self.nodes)

    def leave(self) -> None:
        """The end of the script."""
        if self._over:
            return
        self.say(Say.ENDS, b"")
        until = time.monotonic() + _END_S
        while not self.poll() and time.monotonic() < until:
            time.sleep(1e-3)
        if self._hub is not None:
            self._hub.leave()
        self.forget()

    def forget(self) -> None:
        """In a forked process: the connection is its parent's."""
        self._over, self._lock = True, threading.RLock()
        self._link.sock.close()


# -- how the ranks find each other -----------------------------------------------------------------------------------

_star: Star | None = None
_joining = threading.Lock()


def running() -> Star | None:
    """This process's connection to the other ranks of its job, if it has one."""
    return _star


def join(job: Announced, doing: str) -> Star:
    """Meet all ranks of the job; the first call makes the connections. Collective over the job.

    doing : what for, for the message of a rank that waits for others
    Raises LauncherError if not all come, DeadRankError.
    """
    global _star
    with _joining:
        if _star is None:
            wait = SimpleNamespace(job_ranks=range(job.size), on_late=None)  # for `roll_call`
            with roll_call(wait, doing):
                _star = _met(job, wait)
            atexit.register(_star.leave)
        return _star


def _met(job: Announced, wait: SimpleNamespace) -> Star:
    """The connection, when all have come."""
    user = f"{os.geteuid()} {job.name}".encode()
    name = f"pario-ranks-{hashlib.blake2b(user, digest_size=16).hexdigest()}"
    until, late = time.monotonic() + _COME_S, time.monotonic() + _TELL_S
    told = os.path.join(job.folder, name)
    hub: Hub | None = None
    star: Star | None = None
    try:
        while star is None:
            try:
                if job.rank == 0 and hub is None:
                    hub = _opened(job, name, told)
                star = Star(_reached(job, name, told), job.rank, job.size, hub)
            except (OSError, ValueError, KeyError) as e:  # not yet
                said = f"rank {job.rank} of {job.size} has not reached rank 0: {e}"
                if time.monotonic() > until:
                    raise LauncherError(f"{said} ({job.where})", hint=_HINT) from e
                if time.monotonic() > late:
                    late = until
                    _log.warning("%s. It tries again. %s", said, _HINT)
                wait.on_late()
                time.sleep(_AGAIN_S)
        star.say(Say.HERE, SEAT.pack(job.rank, job.size) + f"{_machine()} {job.node}".encode())

        def look() -> None:
            wait.on_late()
            star.check()
            if time.monotonic() > until:
                raise LauncherError(f"not all of the {job.size} ranks have come in {_COME_S:g} s ({job.where})")

        wait_politely(star, look)
        return star
    except BaseException:
        if star is not None:
            star.leave()
        elif hub is not None:
            hub.cancel()
        raise
    finally:
        if hub is not None and not job.near and not job.secret:
            with suppress(OSError):
                os.unlink(told)


def _machine() -> str:
    """The same for processes that can hand memory to each other: of one machine, and of one network there."""
    with suppress(OSError):
        return f"{boot()} {os.stat('/proc/self/ns/net').st_ino}"
    return boot()


def _opened(job: Announced, name: str, told: str) -> Hub:
    """The meeting place; if there are other machines, they are told where it is. Raises OSError."""
    if job.near:
        return Hub(name, job.size, None)
    secret = _private(job.secret) if job.secret else secrets.token_bytes(2 * _LEAST_SECRET)
    hub = Hub(name, job.size, secret, job.port)
    if not job.secret:
        words = {"hosts": [*own_addresses(), socket.gethostname()], "port": hub.port, "secret": secret.hex()}
        try:
            os.makedirs(job.folder, 0o700, exist_ok=True)
            fd, path = tempfile.mkstemp(dir=job.folder, prefix=name)  # nobody else may read it
            with open(fd, "w") as file:
                json.dump(words, file)
            os.replace(path, told)
        except OSError as e:  # perhaps there is no other machine
            _log.debug("other machines do not learn where rank 0 is: %s", e)
    return hub


def _reached(job: Announced, name: str, told: str) -> Link:
    """A connection to rank 0. Raises OSError; ValueError, KeyError of a file that is none."""
    with suppress(OSError):  # on its machine the system tells whose process it is
        where = Address(boot(), name, (), 0)
        return reached(where, None, _CALL_S, most_bytes=MOST_FRAME, trusts_system=True)
    if job.near:
        raise OSError("nobody listens on this machine")
    words = {} if job.secret else json.loads(_private(told))
    secret = _private(job.secret) if job.secret else bytes.fromhex(words["secret"])
    hosts = (job.host,) if job.host else tuple(words["hosts"])
    return reached(Address("", name, hosts, job.port or words["port"]), secret, _CALL_S, most_bytes=MOST_FRAME)


def _private(path: str) -> bytes:
    """What the file holds. Raises OSError, and LauncherError if others may read it, or it holds too little."""
    with open(path, "rb") as file:
        found = os.fstat(file.fileno())
        said = file.read(1 << 16).strip()
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o077 or len(said) < _LEAST_SECRET:
        what = f"{path} must belong to this user, who alone may read it (chmod 600), and hold {_LEAST_SECRET} bytes"
        raise LauncherError(f"{what} or more", hint="head -c 32 /dev/urandom | base64 > FILE")
    return said
