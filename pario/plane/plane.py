"""The control plane: one thread that listens to the jobs of a cluster and tells them what they may ask of the store.

It keeps nothing on disk. The protocol is in wire/frames.py, what is said in words.py, what is granted in book.py.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import socket
import stat
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any

import numpy as np

from pario.errors import OptionError, ParioError
from pario.plane.book import Book, Hello, Member
from pario.plane.rules import Rules
from pario.plane.words import PlaneAddress, packed, report_of, text_of, unpacked
from pario.wire.frames import WireError, Word
from pario.wire.server import BACKLOG, MOST_STRANGERS, Guest, Server

_log = logging.getLogger("pario")

#: Messages of one connection in one second, at most.
_MOST_MESSAGES = 100
#: Seconds between two questions for the state on one connection, at least; how many of a user's connections ask.
_ASK_S, _MOST_ASK = 0.05, 16


class Speaker(Guest):
    """A connection of a process, or of somebody who wants to see the state.

    asks : for the state only, and when it may again: `asks_at`
    second, messages : when the present second began, and how many messages came in it
    member : of a process, while it is in the book; bye : it has said that it ends
    """

    asks = bye = False
    asks_at = second = -math.inf
    messages = 0
    member: Member | None = None

    def is_too_loud(self, now: float) -> bool:
        """Whether this message is one too many."""
        if now >= self.second + 1.0:
            self.second, self.messages = now, 0
        self.messages += 1
        return self.messages > _MOST_MESSAGES


class Plane(Server[Speaker]):
    """Listens from the beginning; `run` does the rest, in the caller's thread.

    address : port 0: one that is free
    read_rules() : reads the rules again (`reload`)
    clock() : seconds that never go back

    address : with the port
    book : of the processes
    cycle_s : how long computing and sending shares took the last time
    by_row : connections of processes, by their rows in the book's table
    Raises OptionError, ParioError.
    """

    guest = Speaker
    trusts_system = True
    unknown = "no such user, or another token, or another address than this plane's"

    def __init__(
        self,
        address: PlaneAddress,
        rules: Rules,
        *,
        read_rules: Callable[[], Rules] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        listener = listen(address)
        super().__init__("the control plane", most_links=0, most_bytes=0, clock=clock)
        self.listen_at(listener)
        self._go_by(rules)
        self._read_rules, self._reload = read_rules, False
        self.book = Book(rules, clock())
        self._started = clock()
        found = listener.getsockname()
        self.address = address if address.path else PlaneAddress(found[0], found[1])
        self._inode = os.stat(address.path).st_ino if address.path else 0
        self.cycle_s, self._next = 0.0, clock()
        self.by_row: dict[int, Speaker] = {}

    def state(self) -> dict[str, Any]:
        """For `plane status`: jobs (see `Book.state`), capacity, lease_s, uptime_s, connections, cycle_s."""
        now, rules = self._clock(), self.rules
        state = {"jobs": self.book.state(now), "capacity": list(rules.capacity), "lease_s": rules.lease_s}
        return {**state, "uptime_s": now - self._started, "connections": len(self.links), "cycle_s": self.cycle_s}

    def _go_by(self, rules: Rules) -> None:
        self.rules, self.most_bytes = rules, rules.limits.line_bytes
        # A few more than the book takes: they hear why they cannot join.
        self.most_links = rules.limits.connections + MOST_STRANGERS

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
        before = self.rules
        self._go_by(rules)
        self.book.reload(rules)
        _log.warning("the control plane has read its rules again")
        for link in list(self.links):
            if link.proven and link.uid is None and rules.secrets.get(link.user) != before.secrets.get(link.user):
                self.drop(link)

    # -- the loop ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until `cancel`. Then the connections are closed: jobs go on with what they hold, until their leases end."""
        with closing(self):
            while not self._over:
                if self._reload:
                    self._take_rules()
                begin = self._clock()
                if begin >= self._next:
                    self.cycle()
                    self.cycle_s = self._clock() - begin
                    self._drop_silent()
                    self._next = max(self._next + self.rules.cycle_s, self._clock())
                self.hear(max(0.0, self._next - self._clock()))
                if self._strangers:  # they answer at once: also if cycles take all the time, that need not cost one
                    self.hear(1e-3)

    def cycle(self) -> None:
        """Compute what everybody gets, and tell it to those who are to hear of it."""
        self.book.share(self._clock())
        for row in np.flatnonzero(self.book.table.due()).tolist():
            if (link := self.by_row.get(row)) is not None and link.member is not None:
                self.put(link, Word.WORDS, packed(self.book.grant(link.member).words()))

    def _drop_silent(self) -> None:
        silent = self._clock() - max(10.0, 2 * self.rules.lease_s)
        for link in [link for link in self.links if link.proven and link.heard_at < silent]:
            self.drop(link)

    def close(self) -> None:
        super().close()
        if self.address.path:
            with suppress(OSError):  # another one may have it by now
                if os.stat(self.address.path).st_ino == self._inode:
                    os.unlink(self.address.path)

    # -- who is connected ----------------------------------------------------------------------------------------------

    def _drop_idle(self) -> bool:
        """Anyone who has not joined keeps no job out: of the user who has most such connections the oldest one ends."""
        visitors = [link for link in self.links if link.proven and link.member is None]
        most = Counter(link.user for link in visitors).most_common(1)
        if most:
            self.drop(next(link for link in visitors if link.user == most[0][0]))
        return bool(most)

    def secret_of(self, user: str) -> bytes | None:
        return self.rules.secrets.get(user)

    def took(self, link: Speaker, kind: int, body: bytes) -> bool:
        now = self._clock()
        if link.is_too_loud(now):
            raise WireError("too many messages")
        words = unpacked(body)
        if link.asks or (link.member is None and words.get("do") == "status"):
            if link.waiting or now < link.asks_at:
                raise WireError("too many messages")
            link.asks, link.asks_at = True, now + _ASK_S
            asking = [each for each in self.links if each.asks and each.user == link.user]
            for each in asking[:-_MOST_ASK]:
                self.drop(each)
            self.put(link, Word.WORDS, packed({"status": self.state()}))
        elif link.member is None:
            self._join(link, words, now)
        elif "bye" in words:
            link.bye = True
            self.drop(link)
        else:
            self.book.report(link.member, report_of(words), now)
        return True

    def _join(self, link: Speaker, words: dict[str, Any], now: float) -> None:
        """Its first words. Raises WireError."""
        who = Hello(link.user, *(text_of(words, key) for key in ("member", "job", "name", "node")))
        member = self.book.join(who, now)
        earlier = self.by_row.get(member.row)
        if earlier is not None:  # its process has lost that connection
            earlier.member = None
            self.drop(earlier)
        link.member = member
        self.by_row[member.row] = link
        link.whom = f"user {link.user}, job {who.job}, {link.whom}"
        self._next = min(self._next, now + self.cycle_s)  # which answers; those who come take half of its time at most

    def forget(self, link: Speaker) -> None:
        member, link.member = link.member, None
        if member is not None:
            del self.by_row[member.row]
            self.book.leave(member, self._clock(), bye=link.bye)


def listen(address: PlaneAddress) -> socket.socket:
    """A socket that listens. Raises OptionError, ParioError."""
    if address.host in ("0.0.0.0", "*"):
        raise OptionError(
            "a control plane listens at one interface",
            hint="Name the one by which the nodes reach this one, as in --at ib0:7400.",
        )
    before = os.umask(0o111)  # the folder's mode says who may come, and the system who it is
    try:
        if address.path:
            _make_room(address.path)
        # A mode that came later would go to whatever is at that path by then.
        return socket.create_server(address.target, family=address.family, backlog=BACKLOG)
    except OSError as e:
        raise ParioError(
            f"cannot listen at {address}: {e.strerror or e}",
            hint="Another plane may run there; an address must be this node's own.",
        ) from e
    finally:
        os.umask(before)


def _make_room(path: str) -> None:
    """Remove the socket of a plane that has died. Raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        if probe.connect_ex(path) == errno.ECONNREFUSED and stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)
