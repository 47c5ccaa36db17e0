"""What a control plane knows of jobs and their processes, and what it grants them. Pure: the caller tells the time.

A job has members: the processes that read for it. Shares are computed for jobs, and a job's share is divided over its
members by what they use, so that a job gains nothing by having more of them.

What a member may say of its demand is bounded by what it used: at most twice that. All that the members of one user
claim beyond may be what that user has used of late, and a small part of the store. So a member doubles its rate with
each report until it has what it wants, a job that follows another one of its user goes on at once, and claims that
nobody uses take next to nothing from others, however many jobs make them and however often these come anew.

Reports are put aside and taken all at once, when shares are computed (table.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from pario.plane.bucket import Rates
from pario.plane.rules import JobRule, Rules
from pario.plane.share import fitted, max_min
from pario.plane.table import Table
from pario.plane.words import Grant, Report
from pario.wire.frames import WireError

#: What the jobs of a user may want beyond twice their use, and what all jobs get that have used nothing: as a part of
#: the store.
_FOOT = 1 / 16
#: Seconds until half of what a user has used is forgotten.
_HALF_S = 1.0
#: A job without a guarantee goes on at this part of the store when it hears nothing from the plane.
_SAFE = 1 / 20
#: No job is granted less (bytes/s, operations/s), nor a process of one that has as much for each; unless its rule or an
#: even part of the store is less.
_LEAST = (65536.0, 4.0)


class RefusedError(WireError):
    """Somebody cannot join. The text goes to it."""


@dataclass(frozen=True)
class Hello:
    """Who wants to join.

    member : random; the same one after a lost connection
    job : tells the jobs of a user apart; name : of the job; node : where the process runs
    """

    user: str
    member: str
    job: str
    name: str
    node: str


@dataclass(eq=False)
class Member:
    """One process. row : its, in the table"""

    hello: Hello
    row: int


@dataclass(eq=False)
class Job:
    """Members of one job."""

    user: str
    job: str
    name: str
    rule: JobRule
    members: dict[str, Member] = field(default_factory=dict)


class Layout(NamedTuple):
    """Jobs and members as arrays. n members of g jobs.

    rows : i64[n], of the table, job by job; group : i64[n], the job's number; counts : i64[g]
    users : names; user : i64[n], the number of the member's
    guarantee, most, safe : f64[g, 2] of their rules; inf and nan: the rule says nothing
    """

    rows: np.ndarray
    group: np.ndarray
    counts: np.ndarray
    users: list[str]
    user: np.ndarray
    guarantee: np.ndarray
    most: np.ndarray
    safe: np.ndarray

    def sums(self, values: np.ndarray) -> np.ndarray:
        """f64[g, ...] of f64[n, ...]."""
        return np.asarray(np.add.reduceat(values, np.cumsum(self.counts) - self.counts))


class Book:
    """All jobs. Times are seconds on any clock that never goes back.

    seen : how many jobs there have been
    """

    def __init__(self, rules: Rules, now: float) -> None:
        self.rules = rules
        self.table = Table()
        self.jobs: dict[tuple[str, str], Job] = {}
        self.seen = 0
        self._gone: dict[Member, Job] = {}  # whose connections have ended
        self._layout: Layout | None = None
        self._recent: dict[str, np.ndarray] = {}  # user -> f64[2], what he has used of late, per second
        self._shared_at = now
        self._aside: dict[int, tuple[float, ...]] = {}  # reports, by row

    @property
    def members(self) -> int:
        """Their number."""
        return len(self.table)

    def reload(self, rules: Rules) -> None:
        """From now on other rules."""
        self.rules, self._layout = rules, None
        for job in self.jobs.values():
            job.rule = rules.rule_of(job.name, job.user)

    # -- who comes, reports and goes -----------------------------------------------------------------------------------

    def join(self, hello: Hello, now: float) -> Member:
        """Its grant stands when shares are computed the next time. Raises RefusedError."""
        self.settle(now)
        limits, key = self.rules.limits, (hello.user, hello.job)
        theirs = [each for each in self.jobs.values() if each.user == hello.user]
        job = self.jobs.get(key)
        if job is None:
            if len(theirs) >= limits.jobs_per_user:
                raise RefusedError(f"user {hello.user} has {limits.jobs_per_user} jobs already")
            job = Job(*key, hello.name, self.rules.rule_of(hello.name, hello.user))
        member = job.members.get(hello.member)
        if member is None:
            # Those who have gone count until their leases end: a connection is soon made anew.
            most = limits.per_user
            if sum(len(each.members) for each in theirs) >= most:
                raise RefusedError(f"user {hello.user} has {most} processes already, with those that have just ended")
            if self.members >= limits.connections:
                raise RefusedError("there are too many processes")
            self.seen += key not in self.jobs
            self.jobs[key] = job
            member = job.members[hello.member] = Member(hello, self.table.add())
            self._layout = None
        self._gone.pop(member, None)
        self.table.begin(member.row, now + self.rules.lease_s)
        return member

    def report(self, member: Member, report: Report, now: float) -> None:
        """Take a report."""
        if member.row in self._aside:
            self.settle(now)
        wants = [math.inf if each is None else each for each in report.demand]
        self._aside[member.row] = (member.row, now, report.at, *report.used, *wants)

    def settle(self, now: float) -> None:
        """Take the reports that were put aside; forget whose leases have ended."""
        if self._aside:
            found, self._aside = np.array(list(self._aside.values())), {}
            rows, then = found[:, 0].astype(np.int64), found[:, 1]
            self.table.until[rows] = then + self.rules.lease_s
            self.table.use(rows, then, found[:, 2], found[:, 3:5], found[:, 5:7])
        for member, job in [each for each in self._gone.items() if self.table.until[each[0].row] <= now]:
            del self._gone[member], job.members[member.hello.member]
            self.table.remove(member.row)
            if not job.members:
                del self.jobs[job.user, job.job]
            self._layout = None

    def leave(self, member: Member, now: float, *, bye: bool) -> None:
        """It has gone; without a bye it may go on with what it was granted, until its lease ends."""
        self._gone[member] = self.jobs[member.hello.user, member.hello.job]
        if bye:
            self._aside.pop(member.row, None)
            self.table.until[member.row] = now

    # -- shares --------------------------------------------------------------------------------------------------------

    def layout(self) -> Layout:
        """Of all that are there."""
        if self._layout is None:
            jobs = list(self.jobs.values())
            counts = np.array([len(job.members) for job in jobs], np.int64)
            group = np.repeat(np.arange(len(jobs)), counts)
            users, user = np.unique([job.user for job in jobs], return_inverse=True)
            guarantee, most, safe = (
                np.array([getattr(job.rule, name) for job in jobs], float) for name in ("guarantee", "most", "safe")
            )
            self._layout = Layout(
                np.array([member.row for job in jobs for member in job.members.values()], np.int64),
                group,
                counts,
                users.tolist(),
                user[group],
                guarantee,
                np.nan_to_num(most, nan=math.inf),
                safe,
            )
        return self._layout

    def share(self, now: float) -> None:
        """Compute what each member gets."""
        self.settle(now)
        if not self.jobs:
            return
        lay = self.layout()
        kept = 0.5 ** ((now - self._shared_at) / _HALF_S)
        self._shared_at = now
        self._recent = {user: kept * pair for user, pair in self._recent.items() if pair.max() > 1}
        recent = np.array([self._recent.get(user, (0.0, 0.0)) for user in lay.users])
        for which, capacity in enumerate(self.rules.capacity):
            if capacity is None:  # only a rule's own limits hold
                part = (lay.most[:, which] / lay.counts)[lay.group]
                self.table.rates[lay.rows, which] = self.table.safe[lay.rows, which] = part
            else:
                self._share(lay, which, capacity, recent[:, which], now)
        self._recent.update(zip(lay.users, recent, strict=True))

    def _share(self, lay: Layout, which: int, capacity: float, recent: np.ndarray, now: float) -> None:
        """recent : f64[u], of each user, which is brought up to date"""
        n, counts, group = len(lay.counts), lay.counts, lay.group
        own, least, most = capacity * _FOOT, _LEAST[which], lay.most[:, which]
        wants, proven = self.table.claims(lay.rows, which, now)
        used = np.bincount(lay.user, proven / 2, len(recent))
        np.maximum(recent, used, out=recent)
        beyond = own + recent - used  # of each user, evenly for those who claim something beyond
        believed = proven + (beyond / np.maximum(1, np.bincount(lay.user, wants > proven, len(used))))[lay.user]
        wants = np.minimum(np.minimum(wants, believed), capacity)
        guarantees = fitted(np.minimum(lay.guarantee[:, which], most), capacity)
        demands = np.minimum(np.minimum(capacity, lay.sums(wants)), most)
        shares = max_min(np.array([capacity]), demands, np.zeros(n, np.int64), guarantees)
        # A guarantee need not be claimed first; and anyone who wants nothing now must be able to begin.
        begin = max(own, min(least * n, capacity)) / n
        shares = np.minimum(np.maximum(shares, np.maximum(guarantees, begin)), most)
        # Each job's share over its members: by what they use, and an eighth evenly, so that each can begin to; more
        # than that where an eighth is next to nothing. Together they never get more than the share.
        each = np.maximum(shares / 8 / counts, np.minimum(least, shares / counts))
        left, unmet = np.maximum(0.0, shares - each * counts), np.maximum(0.0, wants - each[group])
        parts = each[group] + max_min(left, unmet, group)
        self.table.rates[lay.rows, which] = parts
        safe = lay.safe[:, which]
        safe = np.where(np.isnan(safe), np.maximum(lay.guarantee[:, which], _SAFE * capacity), safe)
        each = np.minimum(least, safe / counts)
        self.table.safe[lay.rows, which] = each[group] + (safe - each * counts)[group] * parts / shares[group]

    # -- what there is to tell -----------------------------------------------------------------------------------------

    @property
    def every_s(self) -> float:
        """How often a connection is to report: some 4,000 reports per second are a tenth of a core."""
        return min(max(self.rules.cycle_s, (self.members - len(self._gone)) / 4000), self.rules.lease_s / 3)

    def grant(self, member: Member) -> Grant:
        """As it stands."""
        rates, safe = (_or_none(each[member.row].tolist()) for each in (self.table.rates, self.table.safe))
        return Grant(rates, safe, self.rules.lease_s, self.every_s)

    def state(self, now: float) -> list[dict[str, Any]]:
        """Per job: user, job, name, nodes, members (processes), lost (those whose connection is), and per second
        guarantee, grant and used, each (bytes, operations) with None for no limit."""
        self.settle(now)
        if not self.jobs:
            return []
        lay, table = self.layout(), self.table
        used = lay.sums(np.where(now < table.until[lay.rows, None], table.now[lay.rows], 0.0)).tolist()
        rates = lay.sums(table.rates[lay.rows]).tolist()
        return [
            {
                "user": job.user,
                "job": job.job,
                "name": job.name,
                "nodes": len({member.hello.node for member in job.members.values()}),
                "members": len(job.members),
                "lost": sum(member in self._gone for member in job.members.values()),
                "guarantee": list(job.rule.guarantee),
                "grant": list(_or_none(rates[k])),
                "used": used[k],
            }
            for k, job in enumerate(self.jobs.values())
        ]


def _or_none(rates: list[float]) -> Rates:
    nbytes, operations = rates
    return None if nbytes == math.inf else nbytes, None if operations == math.inf else operations
