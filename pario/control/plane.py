"""The control plane: one thread that listens to the jobs of a cluster and tells them what they may ask of the store.

It keeps nothing on disk. Whoever does not prove within a few seconds that it knows its user's token is sent away, and a
stranger keeps nobody out: it makes room for the next one. The protocol is in wire.py, what is granted in book.py.
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
from collections.abc import Callable
from contextlib import suppress
from math import isclose
from typing import Any

from pario.comm.sockets import NUMBER_BYTES, peer_uid
from pario.control.book import Book, Hello, Member, RefusedError
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
    rates_of,
    read_number,
    report_of,
    server_name,
    text_of,
    unpacked,
)
from pario.errors import OptionError, ParioError

__all__ = ["Plane"]

_log = logging.getLogger("pario")

#: Seconds for a stranger to prove itself, and how many of them are heard at one time.
_PROVE_S, _MOST_STRANGERS = 5.0, 64
_BACKLOG = 1024
#: What a client has not taken yet; one that leaves more is given up.
_MOST_WAITING = 256 << 10
_PIECE = 4 << 10
#: A grant that changes by a smaller part is told with the next report only.
_SAME = 0.02
#: Seconds between two questions for the state on one connection, at least.
_ASK_S = 0.05
#: Refusals that are logged, each once.
_MOST_SAID = 256
#: Nobody knows this one: proofs with it are made for users that do not exist, so that their names cannot be tried out.
_NO_SECRET = secrets.token_bytes(32)


class Plane:
    """Listens from the beginning; `run` does the rest, in the caller's thread.

    address : port 0: one that is free
    read_rules() : reads the rules again (`reload`)
    tell(state) : called about once a second with `state()`
    clock() : seconds that never go back

    address : with the port
    cycles, cycle_s : how often shares were computed and sent, and how long the last time took
    Raises OptionError, ParioError.
    """

    def __init__(
        self,
        address: Address,
        rules: Rules,
        *,
        read_rules: Callable[[], Rules] | None = None,
        tell: Callable[[dict[str, Any]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._read_rules, self._tell = clock, read_rules, tell
        self.book = Book(rules, clock())
        self._started = clock()
        self._strangers: dict[_Client, float] = {}  # until when each may prove itself
        self._clients: dict[int, _Client] = {}  # by descriptor, strangers too
        self._members: dict[Member, _Client] = {}
        self._said: set[str] = set()
        self._over = self._reload = False
        self.cycles, self.cycle_s = 0, 0.0
        self._listener = listen(address)
        found = self._listener.getsockname()
        self.address = address if address.path else Address(found[0], found[1])
        self._inode = os.stat(address.path).st_ino if address.path else 0
        self._bell = Bell()
        self._poll = select.epoll()
        for each in (self._listener, self._bell):
            self._poll.register(each.fileno(), select.EPOLLIN)

    # -- the loop ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until `stop`. Then the connections are closed: jobs go on with what they hold, until their leases end."""
        cycle = told = self._clock()
        try:
            while not self._over:
                now = self._clock()
                if now >= cycle:
                    self._cycle()
                    self._send_away()
                    cycle = max(cycle + self.book.rules.cycle_s, self._clock())
                if now >= told:
                    told = now + 1.0
                    self._tell_state()
                if self._reload:
                    self._take_rules()
                self._hear(max(0.0, cycle - self._clock()))
        finally:
            self._close()

    def _tell_state(self) -> None:
        if self._tell is not None:
            try:
                self._tell(self.state())
            except ParioError as e:
                self._say("cannot tell its state", str(e))

    def _hear(self, wait_s: float) -> None:
        for fd, what in self._poll.poll(wait_s):
            if fd == self._listener.fileno():
                self._accept()
            elif fd == self._bell.fileno():
                self._bell.silence()
            elif (client := self._clients.get(fd)) is not None:
                self._serve(client, what)

    def stop(self) -> None:
        """From any thread, or from a signal's handler."""
        self._over = True
        self._bell.ring()

    def reload(self) -> None:
        """Read the rules again. From any thread, or from a signal's handler."""
        self._reload = True
        self._bell.ring()

    def _take_rules(self) -> None:
        self._reload = False
        if self._read_rules is None:
            return
        try:
            rules = self._read_rules()
        except ParioError as e:  # those that it has are better than none
            _log.error("the control plane keeps its rules: %s", e)
            return
        before = self.book.rules.secrets
        self.book.reload(rules)
        _log.warning("the control plane has read its rules again")
        for client in list(self._clients.values()):
            if client.uid is None and client.proven and rules.secrets.get(client.user) != before.get(client.user):
                self._drop(client)

    def _cycle(self) -> None:
        begin = self._clock()
        self.book.share(begin)
        for member, client in list(self._members.items()):
            if client.is_due(member):
                client.put(self.book.grant(member).line())
            if client.waiting > _MOST_WAITING:
                self._drop(client)
            else:
                self._flush(client)
        self.cycles += 1
        self.cycle_s = self._clock() - begin

    # -- clients -------------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
        except OSError as e:
            if e.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                self._say("cannot take a connection", os.strerror(e.errno or 0))
                if self._strangers:
                    self._drop(next(iter(self._strangers)))
                else:
                    time.sleep(0.05)  # it stays ready to be accepted
            return
        limits = self.book.rules.limits
        client = _Client(sock, address, limits.line_bytes, self._clock())
        if len(self._clients) >= limits.connections + _MOST_STRANGERS:
            sock.close()
            self._say("refused a connection", "there are too many")
            return
        if len(self._strangers) >= _MOST_STRANGERS:
            self._drop(next(iter(self._strangers)))
        self._strangers[client] = self._clock() + _PROVE_S
        self._clients[sock.fileno()] = client
        self._poll.register(sock.fileno(), select.EPOLLIN)
        client.put(packed({"pario-control": VERSION, "number": client.number.hex()}))
        self._flush(client)

    def _serve(self, client: _Client, what: int) -> None:
        try:
            if what & select.EPOLLOUT:
                self._flush(client)
            if what & ~select.EPOLLOUT:
                for line in client.read():
                    self._obey(client, unpacked(line))
                    if client.over:
                        break
        except _RefusedError as e:
            self._say(f"refused {client.whom}", str(e))
            client.put(packed({"refused": str(e)}))
            self._flush(client)
            self._drop(client)
        except (WireError, RefusedError) as e:
            self._say(f"refused {client.whom}", str(e))
            if client.proven:  # strangers hear nothing of what is wrong with what they say
                client.put(packed({"refused": str(e)}))
                self._flush(client)
            self._drop(client)
        except OSError:  # the end of the connection
            self._drop(client)
        except Exception as e:  # one connection must not end all others
            _log.warning("the control plane closes the connection of %s: %r", client.whom, e)
            self._drop(client)

    def _obey(self, client: _Client, words: dict[str, Any]) -> None:
        """Raises WireError, RefusedError, OSError."""
        now = self._clock()
        if not client.proven:
            self._let_in(client, words, now)
        elif client.member is None:
            if client.waiting or now < client.heard_at + _ASK_S:
                raise WireError("too many messages")
            client.heard_at = now
            client.put(packed({"status": self.state()}))
            self._flush(client)
        elif "bye" in words:
            self.book.leave(client.member, now, bye=True)
            self._drop(client)
        else:
            client.heard_at = now
            if not self.book.report(client.member, report_of(words), now):
                raise WireError("too many messages")
            client.reported = True

    def _let_in(self, client: _Client, words: dict[str, Any], now: float) -> None:
        user, number = text_of(words, "user"), read_number(words, "number")
        client.uid, client.user = peer_uid(client.sock), user
        said = words.get("proof", "")
        name = server_name(client.sock, mine=True)
        secret = self.book.rules.secrets.get(user, _NO_SECRET)
        given = bytes.fromhex(said) if isinstance(said, str) and _is_hex(said) else b""
        proven = hmac.compare_digest(given, ask_proof(secret, user, name, client.number, number))
        if client.uid is not None:
            if client.uid != os.geteuid() and user not in _names(client.uid):
                raise _RefusedError(f"system user {client.uid} is not user {user}")
        elif not proven:
            raise _RefusedError("no such user, or another token, or another address than this plane's")
        answer: dict[str, Any] = {
            "proof": answer_proof(secret, user, name, client.number, number).hex() if proven else ""
        }
        client.proven = True
        self._strangers.pop(client, None)
        if words.get("do") == "status":
            answer["status"] = self.state()
        else:
            self._join(client, words, now)
            assert client.member is not None
            answer |= self.book.grant(client.member).words()
        client.put(packed(answer))
        self._flush(client)

    def _join(self, client: _Client, words: dict[str, Any], now: float) -> None:
        """Raises WireError, RefusedError."""
        limits = self.book.rules.limits
        most = limits.connections_per_user or max(1, limits.connections // 2)
        if sum(other.user == client.user for other in self._members.values()) >= most:
            raise RefusedError(f"user {client.user} has {most} connections already")
        holds = rates_of(words, "holds") if words.get("holds") is not None else None
        member = read_number(words, "member", 16)
        job, name, node = (text_of(words, key) for key in ("job", "name", "node"))
        who = Hello(client.user, member, job, name, node, holds)
        client.member = self.book.join(who, now)
        earlier = self._members.get(client.member)
        if earlier is not None:  # its process has lost that connection
            earlier.member = None
            self._drop(earlier)
        self._members[client.member] = client
        client.whom = f"user {client.user}, job {who.job}, {client.whom}"

    def _flush(self, client: _Client) -> None:
        """Send what waits, as far as the system takes it."""
        if client.over:
            return
        try:
            left = client.send()
        except OSError:
            self._drop(client)
            return
        wanted = select.EPOLLIN | (select.EPOLLOUT if left else 0)
        if wanted != client.watched:
            client.watched = wanted
            self._poll.modify(client.sock.fileno(), wanted)

    def _drop(self, client: _Client) -> None:
        if client.over:
            return
        client.over = True
        self._strangers.pop(client, None)
        self._clients.pop(client.sock.fileno(), None)
        if client.member is not None:
            self._members.pop(client.member, None)
            if client.member.here:
                self.book.leave(client.member, self._clock(), bye=False)
        client.sock.close()

    def _send_away(self) -> None:
        """Strangers that prove nothing, and clients that say nothing."""
        now = self._clock()
        for client, until in list(self._strangers.items()):
            if until <= now:
                self._say(f"refused {client.whom}", f"it did not prove itself within {_PROVE_S:g} s")
                self._drop(client)
        silent = now - max(10.0, 2 * self.book.rules.lease_s)
        for client in [each for each in self._clients.values() if each.proven and each.heard_at < silent]:
            self._drop(client)

    def _say(self, what: str, why: str) -> None:
        """Each once: whoever tries a thousand times must not fill the log."""
        text = f"{what}: {why}"
        if text not in self._said and len(self._said) < _MOST_SAID:
            self._said.add(text)
            _log.warning("the control plane %s (said once)", text)

    def state(self) -> dict[str, Any]:
        """jobs (see `Book.state`), capacity, policy, lease_s, uptime_s, learning, connections, cycle_s."""
        now = self._clock()
        rules = self.book.rules
        return {
            "jobs": self.book.state(now),
            "capacity": list(rules.capacity),
            "policy": rules.policy,
            "lease_s": rules.lease_s,
            "uptime_s": now - self._started,
            "learning": self.book.learns(now),
            "connections": len(self._clients),
            "cycle_s": self.cycle_s,
        }

    def _close(self) -> None:
        for client in list(self._clients.values()):
            client.sock.close()
        self._poll.close()
        self._listener.close()
        self._bell.close()
        if self.address.path:
            with suppress(OSError):  # another plane may have it by now
                if os.stat(self.address.path).st_ino == self._inode:
                    os.unlink(self.address.path)


class _RefusedError(Exception):
    """A stranger that may be told why it is refused."""


class _Client:
    """A connection on the plane's side."""

    def __init__(self, sock: socket.socket, address: Any, line_bytes: int, now: float) -> None:
        self.sock = sock
        sock.setblocking(False)
        if sock.family == socket.AF_INET:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.number = secrets.token_bytes(NUMBER_BYTES)
        uid = peer_uid(sock)
        self.whom = f"a connection from {address[0]}" if uid is None else f"a connection of system user {uid}"
        self.uid: int | None = None
        self.user = ""
        self.proven = self.over = self.reported = False
        self.member: Member | None = None
        self.heard_at = now
        self.watched = int(select.EPOLLIN)
        self._lines = LineReader(line_bytes)
        self._waiting = b""
        self._sent: list[float] = []

    @property
    def waiting(self) -> int:
        """Bytes that it has not taken."""
        return len(self._waiting)

    def is_due(self, member: Member) -> bool:
        """Whether it is to hear of its grant: it has reported, or the grant is another one."""
        now = [*member.rates, *member.safe]
        if self.reported or not self._sent or not all(map(_is_same, self._sent, now)):
            self._sent, self.reported = now, False
            return True
        return False

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
            piece = self.sock.recv(_PIECE)
        except BlockingIOError:
            return []
        if not piece:
            raise OSError("closed")
        return list(self._lines.lines(piece))


def _is_same(before: float, now: float) -> bool:
    return isclose(before, now, rel_tol=_SAME)


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
