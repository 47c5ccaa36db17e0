"""A process that others connect to by the protocol of wire.py: what a plane and a node agent have in common.

One thread. Whoever does not prove within a few seconds that it knows its user's token is sent away, and a stranger
keeps nobody out: it makes room for the next one.
"""

from __future__ import annotations

import errno
import hmac
import logging
import os
import pwd
import secrets
import select
import socket
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from pario.comm.sockets import NUMBER_BYTES, peer_uid
from pario.control.book import Member, RefusedError
from pario.control.line import Bell
from pario.control.rules import Rules
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
    text_of,
    unpacked,
)
from pario.errors import OptionError, ParioError

__all__ = ["Client", "Host", "Pipe", "Server"]

_log = logging.getLogger("pario")

#: Seconds for a stranger to prove itself, and how many of them are heard at one time.
_PROVE_S, _MOST_STRANGERS = 5.0, 64
_BACKLOG = 1024
#: What a client has not taken yet; one that leaves more is given up.
_MOST_WAITING = 256 << 10
_PIECE = 4 << 10
#: Seconds between two questions for the state on one connection, at least.
_ASK_S = 0.05
#: Refusals that are logged, each once.
_MOST_SAID = 256
#: Nobody knows this one: proofs with it are made for users that do not exist, so that their names cannot be tried out.
_NO_SECRET = secrets.token_bytes(32)


class Host(ABC):
    """What a plane and a node agent do, each in its way."""

    @abstractmethod
    def every_s(self) -> float:
        """Seconds from cycle to cycle."""

    @abstractmethod
    def cycle(self) -> None:
        """Compute and tell what everybody gets."""

    @abstractmethod
    def let_in(self, client: Client, words: dict[str, Any], now: float) -> dict[str, Any] | None:
        """It has proven who it is. The answer; None: it will be told later. Raises WireError, RefusedError."""

    @abstractmethod
    def obey(self, client: Client, words: dict[str, Any], now: float) -> None:
        """A message of one that was let in. Raises WireError, RefusedError, OSError."""

    @abstractmethod
    def forget(self, client: Client) -> None:
        """The connection of one that was let in has ended."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """For `control status`."""


class Server(Host):
    """Listens from the beginning; `run` does the rest, in the caller's thread.

    address : port 0: one that is free
    rules : of it only limits and secrets are looked at
    name : what it calls itself in the log
    clock() : seconds that never go back

    address : with the port
    cycles, cycle_s : how often shares were computed and sent, and how long the last time took
    Raises OptionError, ParioError.
    """

    def __init__(self, address: Address, rules: Rules, name: str, clock: Callable[[], float]) -> None:
        self.rules, self._name, self._clock = rules, name, clock
        self._started = clock()
        self._strangers: dict[Client, float] = {}  # until when each may prove itself
        self._clients: dict[int, Client] = {}  # by descriptor, strangers too
        self._said: set[str] = set()
        self._over = False
        self.cycles, self.cycle_s = 0, 0.0
        self._listener = listen(address)
        found = self._listener.getsockname()
        self.address = address if address.path else Address(found[0], found[1])
        self._inode = os.stat(address.path).st_ino if address.path else 0
        self._bell = Bell()
        self._poll = select.epoll()
        self._heard: dict[int, Callable[[int], None]] = {}  # what is done with other descriptors
        self.watch(self._listener.fileno(), self._accept)
        self.watch(self._bell.fileno(), lambda what: self._bell.silence())

    # -- the loop ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until `stop`. Then the connections are closed: jobs go on with what they hold, until their leases end."""
        cycle = self._clock()
        try:
            while not self._over:
                begin = self._clock()
                if begin >= cycle:
                    self.cycle()
                    self.cycles += 1
                    self.cycle_s = self._clock() - begin
                    self._send_away()
                    cycle = max(cycle + self.every_s(), self._clock())
                self.hear(max(0.0, cycle - self._clock()))
        finally:
            self.close()

    def hear(self, wait_s: float) -> None:
        """What has come, at least until something has or the time is over."""
        clients = self._clients
        for fd, what in self._poll.poll(wait_s):
            if (client := clients.get(fd)) is not None:
                self._serve(client, what)
            elif (heard := self._heard.get(fd)) is not None:
                heard(what)

    def stop(self) -> None:
        """From any thread, or from a signal's handler."""
        self._over = True
        self._bell.ring()

    def watch(self, fd: int, heard: Callable[[int], None]) -> None:
        self._heard[fd] = heard
        self._poll.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        del self._heard[fd]
        self._poll.unregister(fd)

    # -- clients -------------------------------------------------------------------------------------------------------

    def _accept(self, what: int) -> None:
        try:
            sock, address = self._listener.accept()
        except OSError as e:
            if e.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                self.say("cannot take a connection", os.strerror(e.errno or 0))
                if self._strangers:
                    self.drop(next(iter(self._strangers)))
                else:
                    time.sleep(0.05)  # it stays ready to be accepted
            return
        limits = self.rules.limits
        client = Client(sock, address, limits.line_bytes, self._clock())
        if len(self._clients) >= limits.connections + _MOST_STRANGERS:
            sock.close()
            self.say("refused a connection", "there are too many")
            return
        if len(self._strangers) >= _MOST_STRANGERS:
            self.drop(next(iter(self._strangers)))
        self._strangers[client] = self._clock() + _PROVE_S
        self._clients[sock.fileno()] = client
        self._poll.register(sock.fileno(), select.EPOLLIN)
        self.put(client, packed({"pario-control": VERSION, "number": client.number.hex()}))

    def _serve(self, client: Client, what: int) -> None:
        try:
            if what & select.EPOLLOUT:
                self._flush(client)
            if what & ~select.EPOLLOUT:
                for line in client.read():
                    if client.proven:
                        self._obey(client, unpacked(line))
                    else:
                        self._let_in(client, unpacked(line))
                    if client.over:
                        break
        except _StrangerError as e:
            self.refuse(client, str(e))
        except (WireError, RefusedError) as e:  # strangers hear nothing of what is wrong with what they say
            self.refuse(client, str(e), say=client.proven)
        except OSError:  # the end of the connection
            self.drop(client)
        except Exception as e:  # one connection must not end all others
            _log.warning("the %s closes the connection of %s: %r", self._name, client.whom, e)
            self.drop(client)

    def refuse(self, client: Client, why: str, *, say: bool = True) -> None:
        """Send it away. say : tell it the reason"""
        self.say(f"refused {client.whom}", why)
        if say:
            self.put(client, packed({"refused": why}))
        self.drop(client)

    def _obey(self, client: Client, words: dict[str, Any]) -> None:
        """Raises WireError, RefusedError, OSError."""
        now = self._clock()
        if client.asks:
            if client.waiting or now < client.heard_at + _ASK_S:
                raise WireError("too many messages")
            client.heard_at = now
            self.put(client, packed({"status": self.state()}))
        else:
            client.heard_at = now
            self.obey(client, words, now)

    def _let_in(self, client: Client, words: dict[str, Any]) -> None:
        now = self._clock()
        user, number = text_of(words, "user"), read_number(words, "number")
        client.uid, client.user = peer_uid(client.sock), user
        said = words.get("proof", "")
        name = server_name(client.sock, mine=True)
        secret = self.rules.secrets.get(user, _NO_SECRET)
        given = bytes.fromhex(said) if isinstance(said, str) and _is_hex(said) else b""
        proven = hmac.compare_digest(given, ask_proof(secret, user, name, client.number, number))
        if client.uid is not None:
            if client.uid != os.geteuid() and user not in _names(client.uid):
                raise _StrangerError(f"system user {client.uid} is not user {user}")
        elif not proven:
            raise _StrangerError("no such user, or another token, or another address than this plane's")
        answer = answer_proof(secret, user, name, client.number, number).hex() if proven else ""
        client.proven, client.answer = True, {"proof": answer}
        self._strangers.pop(client, None)
        if words.get("do") == "status":
            client.asks = True
            self.answer(client, {"status": self.state()})
        elif (more := self.let_in(client, words, now)) is not None:
            self.answer(client, more)

    def answer(self, client: Client, words: dict[str, Any]) -> None:
        """The first one, which proves who we are."""
        self.put(client, packed({**client.answer, **words}))
        client.answer = {}

    def put(self, client: Client, line: bytes) -> None:
        """Send it, now or when there is room."""
        client.put(line)
        if client.waiting > _MOST_WAITING + len(line):
            self.drop(client)
        else:
            self._flush(client)

    def _flush(self, client: Client) -> None:
        if client.over:
            return
        try:
            left = client.send()
        except OSError:
            self.drop(client)
            return
        wanted = select.EPOLLIN | (select.EPOLLOUT if left else 0)
        if wanted != client.watched:
            client.watched = wanted
            self._poll.modify(client.sock.fileno(), wanted)

    def drop(self, client: Client) -> None:
        """Idempotent."""
        if client.over:
            return
        client.over = True
        self._strangers.pop(client, None)
        self._clients.pop(client.sock.fileno(), None)
        if client.proven and not client.asks:
            self.forget(client)
        client.sock.close()

    def _send_away(self) -> None:
        """Strangers that prove nothing, and clients that say nothing."""
        now = self._clock()
        for client, until in list(self._strangers.items()):
            if until <= now:
                self.say(f"refused {client.whom}", f"it did not prove itself within {_PROVE_S:g} s")
                self.drop(client)
        silent = now - max(10.0, 2 * self.rules.lease_s)
        for client in [each for each in self._clients.values() if each.proven and each.heard_at < silent]:
            self.drop(client)

    def say(self, what: str, why: str) -> None:
        """Each once: whoever tries a thousand times must not fill the log."""
        text = f"{what}: {why}"
        if text not in self._said and len(self._said) < _MOST_SAID:
            self._said.add(text)
            _log.warning("the %s %s (said once)", self._name, text)

    def close(self) -> None:
        for client in list(self._clients.values()):
            client.sock.close()
        self._poll.close()
        self._listener.close()
        self._bell.close()
        if self.address.path:
            with suppress(OSError):  # another one may have it by now
                if os.stat(self.address.path).st_ino == self._inode:
                    os.unlink(self.address.path)


class _StrangerError(Exception):
    """A stranger that may be told why it is refused."""


class Pipe:
    """A socket that never waits. line_bytes : of a message, at most"""

    def __init__(self, sock: socket.socket, line_bytes: int) -> None:
        self.sock = sock
        sock.setblocking(False)
        if sock.family == socket.AF_INET:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._piece = _PIECE
        self.accept(line_bytes)
        self._waiting = b""

    def accept(self, line_bytes: int) -> None:
        """From now on lines of this length. Not while a part of one has come."""
        self._lines = LineReader(line_bytes)
        self._piece = min(max(_PIECE, line_bytes), 64 << 10)

    @property
    def waiting(self) -> int:
        """Bytes that it has not taken."""
        return len(self._waiting)

    def put(self, line: bytes) -> None:
        self._waiting += line

    def send(self) -> int:
        """How many bytes are left. Raises OSError."""
        if self._waiting:
            with suppress(BlockingIOError):
                sent = self.sock.send(self._waiting)
                self._waiting = self._waiting[sent:]
        return len(self._waiting)

    def read(self) -> list[bytes]:
        """What has come, as lines. Raises OSError at the end of the connection, WireError."""
        try:
            piece = self.sock.recv(self._piece)
        except BlockingIOError:
            return []
        if not piece:
            raise OSError("it closed the connection")
        return list(self._lines.lines(piece))


class Client(Pipe):
    """A connection on the server's side.

    uid : of a Unix socket; user : whom it says to be, and with `proven` is; asks : for the state only
    counts : among its user's connections
    member : of a process; speaks : of a node agent, what the server knows of it
    """

    def __init__(self, sock: socket.socket, address: Any, line_bytes: int, now: float) -> None:
        super().__init__(sock, line_bytes)
        self.number = secrets.token_bytes(NUMBER_BYTES)
        uid = peer_uid(sock)
        self.whom = f"a connection from {address[0]}" if uid is None else f"a connection of system user {uid}"
        self.uid: int | None = None
        self.user = ""
        self.proven = self.asks = self.counts = self.over = False
        self.answer: dict[str, Any] = {}
        self.member: Member | None = None
        self.speaks: Any = None
        self.heard_at = now
        self.watched = int(select.EPOLLIN)


def _is_hex(text: str) -> bool:
    with suppress(ValueError):
        bytes.fromhex(text)
        return True
    return False


def _names(uid: int) -> tuple[str, ...]:
    """What a user of this number may be called."""
    try:
        return pwd.getpwuid(uid).pw_name, str(uid)
    except KeyError:
        return (str(uid),)


def listen(address: Address) -> socket.socket:
    """A socket that listens. Raises OptionError, ParioError."""
    if address.host in ("0.0.0.0", "*"):
        raise OptionError(
            "a control plane listens at one interface",
            hint="Name the one by which the nodes reach this one, as in --at ib0:7400.",
        )
    listener = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        if address.path:
            _make_room(address.path)
            listener.bind(address.path)
            os.chmod(address.path, 0o666)  # the folder's mode says who may come, and the system who it is
        else:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address.target)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as e:
        listener.close()
        raise ParioError(
            f"cannot listen at {address}: {e.strerror or e}",
            hint="Another plane may run there; an address must be this node's own.",
        ) from e
    return listener


def _make_room(path: str) -> None:
    """Remove the socket of a plane that has died. Raises OSError if one lives, or if it is something else."""
    if os.path.lexists(path) and not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
