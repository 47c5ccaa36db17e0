"""The control plane: one thread that listens to the jobs of a cluster and tells them what they may ask of the store.

It keeps nothing on disk. What is said is in words.py, who is connected in processes.py, what is granted in book.py.
Above a thousand processes node agents (node.py) speak for those of their nodes.
"""

from __future__ import annotations

import fnmatch
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from pario.errors import ParioError
from pario.plane.book import Book, Hello, Member, RefusedError
from pario.plane.processes import MEMBER_BYTES, Processes, Speaker
from pario.plane.rules import Rules
from pario.plane.words import (
    PlaneAddress,
    amount_of,
    grants_message,
    rates_of,
    read_number,
    text_of,
    usage_of,
)
from pario.wire.frames import WireError, Word

_log = logging.getLogger("pario")


class Plane(Processes):
    """See `Processes`.

    read_rules() : reads the rules again (`reload`)
    """

    def __init__(
        self,
        address: PlaneAddress,
        rules: Rules,
        *,
        read_rules: Callable[[], Rules] | None = None,
        tell: Callable[[dict[str, Any]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(address, rules, "control plane", clock, tell)
        self._read_rules = read_rules
        self.book = Book(rules, clock())
        self._agents: dict[tuple[str, bytes], Speaker] = {}
        self._of_user: Counter[str] = Counter()  # connections
        self._reload = False

    def every_s(self) -> float:
        return self.rules.cycle_s

    def hear(self, wait_s: float | None) -> None:
        """Besides: rules are read again."""
        if self._reload:
            self._take_rules()
        super().hear(wait_s)

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
        self.go_by(rules)
        self.book.reload(rules)
        _log.warning("the control plane has read its rules again")
        for link in list(self.links):
            user = link.user
            other = link.uid is None and rules.secrets.get(user) != before.secrets.get(user)
            # An agent hears at its next connection how many jobs it may have.
            other |= link.speaks is not None and rules.limits.node_jobs != before.limits.node_jobs
            if link.proven and (other or (link.speaks and rules.speaks_for(user) != before.speaks_for(user))):
                self.drop(link)

    def cycle(self) -> None:
        book, table = self.book, self.book.table
        book.lines = len(self.by_row) + len(self._agents)
        book.share(self._clock())
        due = table.due()
        self.tell_grants(due, self.rules.lease_s, book.every_s)
        for link in list(self._agents.values()):
            node: _Node = link.speaks
            mine = due[node.rows]
            if node.reported or mine.any():
                node.reported = False
                self._tell_agent(link, mine)

    def _tell_agent(self, link: Speaker, which: np.ndarray) -> None:
        """which : bool[k], of its jobs"""
        node: _Node = link.speaks
        more: dict[str, Any] = {"at": node.at}
        more |= {"refused": node.refused} if node.refused else {}
        node.refused = []
        grants = self.book.table.grants(node.rows[which])
        message = grants_message(node.numbers[which], grants, self.rules.lease_s, self.book.every_s, more)
        self.put(link, Word.WORDS, message)

    # -- clients -------------------------------------------------------------------------------------------------------

    def let_in(self, link: Speaker, words: dict[str, Any], now: float) -> dict[str, Any]:
        limits = self.rules.limits
        most = limits.per_user
        is_agent = words.get("do") == "agent"
        if is_agent:
            member, node = read_number(words, "member", MEMBER_BYTES), text_of(words, "node")
            earlier = self._agents.get((link.user, member))
            if earlier is not None:  # it has lost that connection
                self.drop(earlier)
        if self._of_user[link.user] >= most:
            raise RefusedError(f"user {link.user} has {most} connections already")
        if is_agent:
            link.speaks = _Node(member, node, limits.node_jobs)
            link.most_bytes = limits.node_line_bytes
            link.whom = f"the agent of node {node}, {link.whom}"
            self._agents[link.user, member] = link
            answer: dict[str, Any] = {"lease": self.rules.lease_s, "every": self.book.every_s}
            answer |= {"jobs": limits.node_jobs, "bytes": limits.node_line_bytes}
        else:
            answer = self.book.grant(self.join(link, words, now)).words()
        self._of_user[link.user] += 1
        link.counts = True
        return answer

    def obey(self, link: Speaker, words: dict[str, Any], now: float) -> None:
        if link.speaks is None:
            super().obey(link, words, now)
        else:
            self._hear_agent(link, words, now)

    def _hear_agent(self, link: Speaker, words: dict[str, Any], now: float) -> None:
        """Raises WireError."""
        node: _Node = link.speaks
        node.reported, node.at = True, amount_of(words, "at")
        came = []
        for number in _list_of(words, "leave"):
            member = node.members.pop(number, None) if type(number) is int else None
            if member is not None:
                self.book.leave(member, now, bye=True)
        for entry in _list_of(words, "join"):
            number, hello = node.hello(entry, link.user)
            user = hello.user
            try:
                if user != link.user and not fnmatch.fnmatchcase(user, self.rules.speaks_for(link.user)):
                    raise RefusedError(f"the agent of node {node.node} may not speak for user {user}")
                if any((each.hello.user, each.hello.job) == (user, hello.job) for each in node.members.values()):
                    raise WireError("a job that is there twice")
                node.members[number] = self.book.join(hello, now)
                came.append(number)
            except RefusedError as e:
                self.say(f"refused {link.whom}", str(e))
                node.refused.append([number, str(e)])
        if "join" in words or "leave" in words:
            node.arrange()
            self._tell_agent(link, np.isin(node.numbers, came))  # the first grants are waited for
        usage = usage_of(words, node.most)
        rows = node.row_of[usage.numbers]
        if (rows < 0).any() or len(np.unique(rows)) < len(rows):
            # of jobs that were refused, which it may not have heard yet
            _, first = np.unique(rows, return_index=True)
            first = first[rows[first] >= 0]
            rows, usage = rows[first], usage.part(first)
        if len(rows):
            self.book.report_many(link, rows, node.at, usage, now)

    def forget(self, link: Speaker) -> None:
        if link.counts:
            self._of_user[link.user] -= 1
        super().forget(link)
        if link.speaks is not None:
            del self._agents[link.user, link.speaks.member]
            for member in link.speaks.members.values():
                self.book.leave(member, self._clock(), bye=False)

    def state(self) -> dict[str, Any]:
        """agents: of each user, node, jobs, processes, heard_s (seconds since it was heard)."""
        now = self._clock()
        agents = [
            {
                "user": link.user,
                "node": link.speaks.node,
                "jobs": len(link.speaks.members),
                "processes": int(self.book.table.processes[link.speaks.rows].sum()),
                "heard_s": now - link.heard_at,
            }
            for link in self._agents.values()
        ]
        return {**super().state(), "agents": agents}


class _Node:
    """What the plane knows of a node agent. member : tells agents apart; members : by the numbers that it gave to jobs

    most : numbers are smaller
    row_of : i64[most], of each number, -1 without; numbers, rows : i64[k] of those that are there
    reported : it is to hear something; at : on its clock, of its last message
    refused : jobs that it has not been told of yet, [number, why]
    """

    def __init__(self, member: bytes, node: str, most: int) -> None:
        self.member, self.node, self.most = member, node, most
        self.members: dict[int, Member] = {}
        self.row_of = np.full(most, -1, np.int64)
        self.reported, self.at = False, 0.0
        self.refused: list[list[Any]] = []
        self.arrange()

    def hello(self, entry: Any, user: str) -> tuple[int, Hello]:
        """What an entry of "join" says, and its number. user : the agent's. Raises WireError."""
        if not isinstance(entry, list) or len(entry) != 5:
            raise WireError("an entry of join is none")
        words = dict(zip(("number", "user", "job", "name", "holds"), entry, strict=True))
        number = words["number"]
        if type(number) is not int or not 0 <= number < self.most or number in self.members:
            raise WireError(f"a job must have a number of its own below {self.most:,}")
        holds = rates_of(words, "holds") if words["holds"] is not None else None
        # No process has such a long one; the same agent, started again, continues these.
        member = b"agent" + user.encode() + b"\0" + self.member
        job, name = text_of(words, "job"), text_of(words, "name")
        return number, Hello(text_of(words, "user"), member, job, name, self.node, holds, by_agent=True)

    def arrange(self) -> None:
        """Somebody came or went."""
        self.numbers = np.array(list(self.members), np.int64)
        self.rows = np.array([member.row for member in self.members.values()], np.int64)
        self.row_of[:] = -1
        self.row_of[self.numbers] = self.rows


def _list_of(words: dict[str, Any], key: str) -> list[Any]:
    found = words.get(key, [])
    if not isinstance(found, list):
        raise WireError(f"{key} is no list")
    return found
