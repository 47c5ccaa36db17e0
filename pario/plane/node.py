"""A node agent: one process per node, between the node's jobs and the plane.

To the processes it is a plane: they join, report and get grants in the same way. To the plane it is one connection that
speaks for all jobs of the node: one message with what each job uses and wants, one with what each gets. What a job
gets it divides over the job's processes as the plane would.

Leases form a chain. A process gets no longer lease than the agent has itself, so that anyone who dies, plane, agent or
both, no process keeps what was granted for longer than one lease. When the agent's own lease ends it grants the safe
rates that came with it. An agent that was started again learns from the plane, which knows its jobs until their leases
end; a plane that was started again learns from the agent what its jobs hold.
"""

from __future__ import annotations

import hashlib
import math
import os
import select
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from pario.errors import ParioError
from pario.plane.book import Book, RefusedError
from pario.plane.processes import Processes, Speaker
from pario.plane.rules import Rules
from pario.plane.session import Session, Who
from pario.plane.words import (
    MOST,
    Grant,
    PlaneAddress,
    Usage,
    amount_of,
    grants_of,
    times_of,
    unpacked,
    usage_message,
)
from pario.threads import start_thread
from pario.wire.client import machine_id
from pario.wire.frames import TurnedAwayError, Word

#: of what a plane says
_MOST_MESSAGE = 16 << 20
#: Seconds until the next try, and after a refusal.
_PAUSE_S, _REFUSED_S = 0.5, 10.0
#: Seconds that a process waits for its first grant: it gives up after one.
_ANSWER_S = 0.8
#: Bytes of a message that tells of a new job, and of its use, at most.
_JOIN_BYTES, _USE_BYTES = 2560, 128
#: Seconds between two reports, at least: a plane hears no more than a hundred messages per second.
_REPORT_S = 0.02
#: The shortest lease that the protocol knows.
_LEAST_LEASE_S = 0.1

Key = tuple[str, str]


class NodeBook(Book):
    """A book whose jobs get what a plane has granted. granted : by (user, job)"""

    def __init__(self, rules: Rules, now: float) -> None:
        super().__init__(rules, now)
        self.granted: dict[Key, Grant] = {}

    def share(self, now: float) -> None:
        """Divide what each job was granted; jobs of which the plane has not spoken yet have no limits."""
        self.settle(now)
        for key in self.granted.keys() - self.jobs.keys():
            del self.granted[key]
        if not self.jobs:
            return
        lay = self.layout()
        grants = [self.granted.get(key) for key in self.jobs]
        for which in (0, 1):
            shares, safe = (
                np.array([math.inf if each is None else _or_inf(getattr(each, name)[which]) for each in grants])
                for name in ("rates", "safe")
            )
            share = np.minimum(shares, MOST)
            foot = (share / 16 / lay.counts)[lay.group]
            wants, proven = self.table.claims(lay.rows, which, now)
            wants = np.minimum(np.minimum(wants, proven + foot), share[lay.group])
            self.divide(lay, which, shares, safe, wants)

    def introduced(self, key: Key, number: int, *, is_safe: bool) -> list[Any]:
        """What a plane is told of a job that it does not know. is_safe : it is granted safe rates only"""
        user, name = key
        job, grant = self.jobs[key], self.granted.get(key)
        if grant is not None:
            holds: Any = None if is_safe else grant.rates
        else:
            held = [member.hello.holds for member in job.members.values() if member.hello.holds is not None]
            holds = [None if None in each else sum(each) for each in zip(*held, strict=True)] if held else None
        holds = None if holds is None else [None if each is None else min(each, MOST) for each in holds]
        return [number, user, name, job.name, holds]

    def usage(self, numbers: list[int], now: float) -> Usage:
        """What the jobs use and want. numbers : theirs, in their order; a negative one: not this one

        Sums of what processes say may be too large for a message.
        """
        lay, table = self.layout(), self.table
        rows = lay.rows
        gone = np.array([job.gone for job in self.jobs.values()]).reshape(-1, 2)
        used = np.stack([lay.sums(table.total[rows, k]) for k in (0, 1)], axis=1) + gone
        alive = now < table.until[rows]
        demand = np.stack([lay.sums(np.where(alive, table.wants[rows, k], 0.0)) for k in (0, 1)], axis=1)
        demand = np.where(demand < MOST, demand, np.inf)
        found = Usage(np.array(numbers, np.int64), lay.counts, np.minimum(used, MOST), demand)
        return found.part(found.numbers >= 0)


class NodeAgent(Processes):
    """See `Processes`.

    plane : where it is; who : as whom the agent joins it
    rules : limits, and tokens of those who connect to the agent by TCP
    Raises OptionError, ParioError.
    """

    book: NodeBook

    def __init__(
        self,
        address: PlaneAddress,
        plane: PlaneAddress,
        who: Who,
        rules: Rules,
        *,
        tell: Callable[[dict[str, Any]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(address, rules, "node agent", clock, tell)
        self._plane, self._who = plane, who
        # The same after a start of its own: the plane then goes on with what it knows of the jobs.
        self._member = _member_of(who.node, self.address)
        self.book = NodeBook(rules, clock())
        self._numbers: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}
        self._free = list(range(rules.limits.node_jobs))
        self._known: dict[int, float] = {}  # of these this connection's plane has been told, and when: `at`
        self._left: list[int] = []  # these it is to forget
        self._waiting: dict[Speaker, float] = {}  # for their first grant, until then
        self._pipe: Session | None = None
        self._found: Session | Exception | None = None  # by the thread that connects
        self._connects = False
        self._try_at = -math.inf
        self._until = self._heard_at = -math.inf  # of the lease; when the plane was heard last
        self._is_safe = True
        self._reported_at, self._has_news = -math.inf, False
        self._every_s = 0.25
        self._most_jobs, self._joins_each = rules.limits.node_jobs, 1

    @property
    def joined(self) -> bool:
        """The plane has answered, and the lease has not ended."""
        return self._clock() < self._until

    def every_s(self) -> float:
        """The next cycle is no later than the end of the lease: nobody is granted more than safe rates from then on."""
        left = self._until - self._clock()
        return min(self._every_s, left) if left > 0 else self._every_s

    def cycle(self) -> None:
        now = self._clock()
        if self._pipe is not None and now >= self._heard_at + self.rules.lease_s:
            self._lose("it is silent")
        if now >= self._until:
            self._go_on_safely()
        self._hand_on(now)
        self._has_news = True
        if self._pipe is not None:
            self._tell_plane()
        elif not self._connects and now >= self._try_at:
            self._connects = True
            try:
                start_thread("pario-control-plane", self._connect, stop=None)
            except ParioError as e:
                self._found = e
        for link, until in list(self._waiting.items()):
            if now >= until:  # as if there were no plane: it goes on, and tries again
                self.drop(link)

    def hear(self, wait_s: float | None) -> None:
        """Besides: the plane. Who came meanwhile it is told of at once, all together."""
        if self._has_news and self._pipe is not None:
            left = max(0.0, self._reported_at + _REPORT_S - self._clock())
            wait_s = left if wait_s is None else min(wait_s, left)
        super().hear(wait_s)
        found, self._found = self._found, None
        if found is not None:
            self._connects = False
            self._take_session(found)
        self._tell_plane()

    # -- the plane -----------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """In a thread of its own: it may take seconds."""
        words = {"do": "agent", "member": self._member.hex(), "node": self._who.node}
        try:
            session = Session(self._plane, self._who, words, _MOST_MESSAGE)
        except TurnedAwayError as e:
            self._try_at = self._clock() + _REFUSED_S
            self._found = e
        except OSError as e:
            self._found = e
        else:
            self._found = session
            if self._over:
                session.close()
        self._bell.ring()

    def _take_session(self, found: Any) -> None:
        now = self._clock()
        self._try_at = max(self._try_at, now + _PAUSE_S)
        try:
            if isinstance(found, Exception):
                raise found
            lease_s, self._every_s = times_of(found.first)
            jobs, most_bytes = (amount_of(found.first, key) for key in ("jobs", "bytes"))
        except (OSError, ParioError) as e:
            self.say(f"has no answer of the control plane at {self._plane}", str(e) or type(e).__name__)
            return
        self._most_jobs = min(int(jobs), self.rules.limits.node_jobs)
        self._joins_each = max(1, int(most_bytes - _USE_BYTES * jobs) // _JOIN_BYTES)
        self.rules = replace(self.rules, lease_s=lease_s)
        self.book.reload(self.rules)
        self._pipe, self._heard_at = found, now
        found.sock.setblocking(False)
        self.watch(found.sock.fileno(), self._hear_plane)
        self._renumber()
        self._reported_at, self._has_news = -math.inf, True
        self._hear_plane(0)

    def _renumber(self) -> None:
        """For a plane that has heard of nothing yet, and may take fewer jobs than another one did."""
        self._release()
        self._known.clear()
        self._left = []
        chosen = sorted(self._numbers, key=self._numbers.__getitem__)
        for key in chosen[self._most_jobs :]:
            self._refuse_job(key, self._full())
        self._keys = dict(enumerate(chosen[: self._most_jobs]))
        self._numbers = {key: number for number, key in self._keys.items()}
        self._free = list(range(len(self._keys), self._most_jobs))

    def _lose(self, why: str) -> None:
        """The connection; what was granted holds until the lease ends."""
        assert self._pipe is not None
        self.say(f"has lost the control plane at {self._plane}", why)
        self.unwatch(self._pipe.sock.fileno())
        self._pipe.sock.close()
        self._pipe = None
        self._try_at = self._clock() + _PAUSE_S

    def _hear_plane(self, what: int) -> None:
        assert self._pipe is not None
        if what & select.EPOLLOUT:
            self._send()
        if self._pipe is None or what == select.EPOLLOUT:
            return
        try:
            self._pipe.receive()
            while (frame := self._pipe.next()) is not None:
                self._take(unpacked(frame[1]))
        except TurnedAwayError as e:
            self._lose(f"it refuses: {e}")
            return
        except OSError as e:
            self._lose(str(e))
            return
        self._hand_on(self._clock())

    def _take(self, words: dict[str, Any]) -> None:
        """Raises WireError."""
        refused = words.get("refused", [])
        grants = grants_of(words)
        lease_s, self._every_s = times_of(words)
        # The plane counts from when it heard the message that it answers, which is not before that was sent. Its answer
        # may have been on the way for long: what comes when a cut heals is no fresh lease.
        self._heard_at = now = self._clock()
        at = amount_of(words, "at")
        self._until = min(self._started + at, now) + lease_s
        if now < self._until:
            self._is_safe = False
            for number, grant in grants.items():
                key = self._spoken_of(number, at)
                if key is not None:
                    self.book.granted[key] = grant
        for entry in refused if isinstance(refused, list) else []:
            if isinstance(entry, list) and len(entry) == 2 and type(entry[0]) is int:
                key = self._spoken_of(entry[0], at)
                if key is not None:
                    self._refuse_job(key, str(entry[1])[:200])

    def _spoken_of(self, number: int, at: float) -> Key | None:
        """The job that a plane means which has heard the message of `at`; an earlier one may have had the number."""
        return self._keys[number] if self._known.get(number, math.inf) <= at else None

    def _refuse_job(self, key: Key, why: str) -> None:
        now = self._clock()
        # So that the plane is told again, and refuses again, while its process is not connected.
        self._known.pop(self._numbers[key], None)
        self.book.granted.pop(key, None)
        for link in list(self.by_row.values()):
            if link.member is not None and (link.member.hello.user, link.member.hello.job) == key:
                self.leave(link, now, bye=True)
                self.refuse(link, why)

    def _tell_plane(self) -> None:
        """If there is something to tell, and it is time to."""
        now = self._clock()
        if self._has_news and self._pipe is not None and now >= self._reported_at + _REPORT_S:
            self._report(now)

    def _report(self, now: float) -> None:
        """Tell the plane of the jobs that come and go, and what all of them use and want."""
        assert self._pipe is not None
        self._release()
        at = now - self._started
        new = [key for key, number in self._numbers.items() if number not in self._known]
        step = self._joins_each
        for first in range(0, max(1, len(new)), step):
            chosen = new[first : first + step]
            self._known.update((self._numbers[key], at) for key in chosen)
            more: dict[str, Any] = {"leave": self._left} if self._left else {}
            join = [self.book.introduced(key, self._numbers[key], is_safe=self._is_safe) for key in chosen]
            more |= {"join": join} if join else {}
            self._left = []
            is_last = first + step >= len(new)
            numbers = [
                number if is_last and (number := self._numbers.get(key, -1)) in self._known else -1
                for key in self.book.jobs
            ]
            self._pipe.put(Word.WORDS, usage_message(at, self.book.usage(numbers, now), more))
        self._reported_at, self._has_news = now, False
        self._send()

    def _send(self) -> None:
        """What it takes; the rest when there is room."""
        assert self._pipe is not None
        try:
            left = self._pipe.flush()
            if left > _MOST_MESSAGE:
                raise OSError("it takes nothing")
        except OSError as e:
            self._lose(str(e))
        else:
            self._poll.modify(self._pipe.sock.fileno(), select.EPOLLIN | (select.EPOLLOUT if left else 0))

    def _release(self) -> None:
        """The numbers of jobs that are gone. In a message a plane reads who left before it reads who came."""
        for key in [key for key in self._numbers if key not in self.book.jobs]:
            number = self._numbers.pop(key)
            del self._keys[number]
            self._free.append(number)
            if self._known.pop(number, None) is not None:
                self._left.append(number)

    def _go_on_safely(self) -> None:
        """Without a lease."""
        if not self._is_safe:
            self._is_safe = True
            granted = self.book.granted
            for key, grant in granted.items():
                granted[key] = grant._replace(rates=grant.safe)
            self.say("grants safe rates only", f"it does not hear of the control plane at {self._plane}")

    # -- processes -----------------------------------------------------------------------------------------------------

    def _lease_s(self, now: float) -> float:
        """That a process gets."""
        left = self.rules.lease_s if self._is_safe else self._until - now
        return round(max(_LEAST_LEASE_S, left), 3)

    def _hand_on(self, now: float) -> None:
        self.book.share(now)
        lease_s = self._lease_s(now)
        every_s = min(self._every_s, lease_s / 2)
        for link in list(self._waiting):
            member = link.member
            if member is not None and (member.hello.user, member.hello.job) in self.book.granted:
                del self._waiting[link]
                self.answer(link, self.book.grant(member)._replace(lease_s=lease_s, every_s=every_s).words())
        self.tell_grants(self.book.table.due(), lease_s, every_s)

    def let_in(self, link: Speaker, words: dict[str, Any], now: float) -> None:
        if words.get("do") == "agent":
            raise RefusedError("an agent of a node speaks for processes only")
        hello = self.join(link, words, now).hello
        key = hello.user, hello.job
        if key not in self._numbers and not self._give_number(key):
            self.leave(link, now, bye=True)
            raise RefusedError(self._full())
        self._waiting[link] = now + _ANSWER_S
        if key in self.book.granted:
            self._hand_on(now)
        else:
            self._has_news = True

    def _full(self) -> str:
        return f"there are {self._most_jobs} jobs on this node already"

    def _give_number(self, key: Key) -> bool:
        """If there is one."""
        self._release()
        if len(self._numbers) >= self._most_jobs:
            return False
        number = min(self._free)
        self._free.remove(number)
        self._numbers[key], self._keys[number] = number, key
        return True

    def forget(self, link: Speaker) -> None:
        self._waiting.pop(link, None)
        super().forget(link)

    def state(self) -> dict[str, Any]:
        """As a plane's, for the jobs of this node; agent_of: where its plane is; joined: it is connected."""
        mine = {"agent_of": str(self._plane), "joined": self.joined, "policy": "as the plane grants", "learning": False}
        return {**super().state(), **mine}

    def close(self) -> None:
        if self._pipe is not None:
            self.unwatch(self._pipe.sock.fileno())
            self._pipe.sock.close()
            self._pipe = None
        with suppress(OSError, AttributeError):
            self._found.sock.close()  # type: ignore[union-attr]
        super().close()


def _member_of(node: str, address: PlaneAddress) -> bytes:
    """Where an agent listens, whatever the node is called. Containers of one node may use the same path or port."""
    words = [node, str(address), machine_id()]
    with suppress(OSError):
        found = os.stat(os.path.dirname(address.path) if address.path else "/proc/self/ns/net")
        words += [str(found.st_dev), str(found.st_ino)]
    return hashlib.blake2b("\0".join(words).encode(), digest_size=16).digest()


def node_rules(who: Who) -> Rules:
    """Without a file: anyone who holds the same token as the agent."""
    secrets = {} if who.secret is None else {who.user: who.secret}
    return Rules((None, None), secrets=secrets)


def _or_inf(rate: float | None) -> float:
    return math.inf if rate is None else rate
