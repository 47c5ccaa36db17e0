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
from pario.plane.share import fitted, max_min, max_min_each
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
    member: bytes
    job: str
    name: str
    node: str


@dataclass(eq=False)
class Member:
    """One process. row : its, in the table; here : it is connected"""

    hello: Hello
    row: int
    here: bool = True


@dataclass(eq=False)
class Job:
    """Members of one job. number : in the layout, -1 before it is in one"""

    user: str
    job: str
    name: str
    rule: JobRule
    members: dict[bytes, Member] = field(default_factory=dict)
    number: int = -1


class Layout(NamedTuple):
    """Jobs and members as arrays. n members of g jobs.

    rows : i64[n], of the table, job by job; group : i64[n], the job's number; counts : i64[g]
    users : names; user : i64[n], the number of the member's; recent : f64[u, 2], what each has used of late, per second
    guarantee, most, safe : f64[g, 2] of their rules; inf and nan: the rule says nothing
    rates : f64[g, 2], what each job got last
    """

    rows: np.ndarray
    group: np.ndarray
    counts: np.ndarray
    users: list[str]
    user: np.ndarray
    recent: np.ndarray
    guarantee: np.ndarray
    most: np.ndarray
    safe: np.ndarray
    rates: np.ndarray

    def sums(self, values: np.ndarray) -> np.ndarray:
        """f64[g] of f64[n]."""
        return np.bincount(self.group, values, len(self.counts))


class Book:
    """All jobs. Times are seconds on any clock that never goes back.

    members : their number; seen : how many jobs there have been; lines : how many connections report
    """

    def __init__(self, rules: Rules, now: float) -> None:
        self.rules = rules
        self.table = Table()
        self.jobs: dict[tuple[str, str], Job] = {}
        self.members = self.seen = self.lines = 0
        self._gone: set[tuple[Job, Member]] = set()  # who went without a bye
        self._layout: Layout | None = None
        self._rates = np.full((1, 2), math.inf)  # of the jobs of the last layout, and at last of new ones
        self._recent: dict[str, np.ndarray] = {}  # of its users
        self._shared_at = now
        self._aside: dict[int, tuple[float, ...]] = {}  # reports, by row

    def reload(self, rules: Rules) -> None:
        """From now on other rules."""
        self.rules = rules
        for job in self.jobs.values():
            job.rule = rules.rule_of(job.name, job.user)
        self._forget_layout()

    # -- who comes, reports and goes -----------------------------------------------------------------------------------

    def join(self, hello: Hello, now: float) -> Member:
        """Raises RefusedError."""
        limits, key = self.rules.limits, (hello.user, hello.job)
        theirs = [each for each in self.jobs.values() if each.user == hello.user]
        job = self.jobs.get(key)
        if job is None:
            if len(theirs) >= limits.jobs_per_user:
                raise RefusedError(f"user {hello.user} has {limits.jobs_per_user} jobs already")
            job = Job(*key, hello.name, self.rules.rule_of(hello.name, hello.user))
        member = job.members.get(hello.member)
        until = now + self.rules.lease_s
        if member is not None:
            self._settle()
            member.here = True
            self._gone.discard((job, member))
            self.table.until[member.row], self.table.at[member.row] = until, math.nan
            return member
        # Those who have gone count until their leases end: a connection is soon made anew.
        most = limits.per_user
        if sum(len(each.members) for each in theirs) >= most:
            raise RefusedError(f"user {hello.user} has {most} processes already, with those that have just ended")
        if self.members >= limits.connections:
            raise RefusedError("there are too many processes")
        member = Member(hello, self.table.add(until))
        if key not in self.jobs:
            self.jobs[key] = job
            self.seen += 1
        job.members[hello.member] = member
        self.members += 1
        self._forget_layout()
        self._begin(job, member)
        return member

    def _begin(self, job: Job, member: Member) -> None:
        """What a new member gets until shares are computed the next time: as if nobody had room for it."""
        n = len(job.members)
        for which, capacity in enumerate(self.rules.capacity):
            most = job.rule.most[which] or math.inf
            if capacity is None:
                self.table.rates[member.row, which] = self.table.safe[member.row, which] = most / n
            else:
                own = max(capacity * _FOOT, min(_LEAST[which] * len(self.jobs), capacity)) / len(self.jobs)
                guarantee = job.rule.guarantee[which]
                least = min(max(guarantee, own), most)
                safe = job.rule.safe[which] or max(guarantee, _SAFE * capacity)
                self.table.rates[member.row, which] = least / n
                self.table.safe[member.row, which] = safe / n

    def report(self, member: Member, report: Report, now: float) -> None:
        """Take a report."""
        if member.row in self._aside:
            self._settle()
        wants = [math.inf if each is None else each for each in report.demand]
        self._aside[member.row] = (member.row, now, report.at, *report.used, *wants)

    def settle(self, now: float) -> None:
        """Take the reports that were put aside; forget whose leases have ended."""
        self._settle()
        self._forget(now)

    def _settle(self) -> None:
        """Take what was put aside."""
        if self._aside:
            found, self._aside = np.array(list(self._aside.values())), {}
            rows, now = found[:, 0].astype(np.int64), found[:, 1]
            self.table.until[rows] = now + self.rules.lease_s
            self.table.use(rows, now, found[:, 2], found[:, 3:5], found[:, 5:7])

    def leave(self, member: Member, now: float, *, bye: bool) -> None:
        """It has gone; without a bye it may go on with what it was granted, until its lease ends."""
        self._settle()
        member.here = False
        job = self.jobs[member.hello.user, member.hello.job]
        self._gone.add((job, member))
        if bye:
            self.table.until[member.row] = now
            self._forget(now)

    def _forget(self, now: float) -> None:
        for job, member in [each for each in self._gone if self.table.until[each[1].row] <= now]:
            self._gone.discard((job, member))
            del job.members[member.hello.member]
            self.table.remove(member.row)
            self.members -= 1
            if not job.members:
                del self.jobs[job.user, job.job]
            self._forget_layout()

    # -- shares --------------------------------------------------------------------------------------------------------

    def _forget_layout(self) -> None:
        """Somebody came or went; the rates stay until the next shares."""
        if (lay := self._layout) is not None:
            self._rates = np.append(lay.rates, [[math.inf] * 2], axis=0)
            self._recent = {user: pair for user, pair in zip(lay.users, lay.recent, strict=True) if pair.max() > 1}
            self._layout = None

    def layout(self) -> Layout:
        """Of all that are there."""
        if self._layout is None:
            jobs = list(self.jobs.values())
            rates = self._rates[[job.number for job in jobs]]
            for number, job in enumerate(jobs):
                job.number = number
            counts = np.array([len(job.members) for job in jobs], np.int64)
            group = np.repeat(np.arange(len(jobs)), counts)
            users = list(dict.fromkeys([*(job.user for job in jobs), *self._recent]))
            numbers = {user: number for number, user in enumerate(users)}
            self._layout = Layout(
                np.array([member.row for job in jobs for member in job.members.values()], np.int64),
                group,
                counts,
                users,
                np.array([numbers[job.user] for job in jobs], np.int64)[group],
                np.array([self._recent.get(user, (0.0, 0.0)) for user in users]),
                _pairs([job.rule.guarantee for job in jobs], math.nan),
                _pairs([job.rule.most for job in jobs], math.inf),
                _pairs([job.rule.safe for job in jobs], math.nan),
                rates,
            )
        return self._layout

    def share(self, now: float) -> None:
        """Compute what each member gets."""
        self.settle(now)
        if not self.jobs:
            return
        lay = self.layout()
        lay.recent[:] *= 0.5 ** ((now - self._shared_at) / _HALF_S)
        self._shared_at = now
        for which in (0, 1):
            capacity = self.rules.capacity[which]
            if capacity is None:
                self._only_most(lay, which)
            else:
                self._share(lay, which, capacity, now)

    def _only_most(self, lay: Layout, which: int) -> None:
        """Without a capacity only a rule's own limits hold."""
        lay.rates[:, which] = lay.most[:, which]
        part = (lay.most[:, which] / lay.counts)[lay.group]
        self.table.rates[lay.rows, which] = self.table.safe[lay.rows, which] = part

    def _share(self, lay: Layout, which: int, capacity: float, now: float) -> None:
        n, n_users, rows = len(lay.counts), len(lay.users), lay.rows
        own = capacity * _FOOT
        most = lay.most[:, which]
        wants, proven = self.table.claims(rows, which, now)
        used = np.bincount(lay.user, proven / 2, n_users)
        lay.recent[:, which] = np.maximum(lay.recent[:, which], used)
        beyond = own + lay.recent[:, which] - used  # of each user, evenly for those who claim something beyond
        believed = proven + (beyond / np.maximum(1, np.bincount(lay.user, wants > proven, n_users)))[lay.user]
        wants = np.minimum(np.minimum(wants, believed), capacity)
        guarantees = np.minimum(lay.guarantee[:, which], most)
        demands = np.minimum(np.minimum(capacity, lay.sums(wants)), most)
        shares = max_min(capacity, demands, guarantees)
        # A guarantee need not be claimed first; and anyone who wants nothing now must be able to begin.
        begin = max(own, min(_LEAST[which] * n, capacity)) / n
        shares = np.minimum(np.maximum(shares, np.maximum(fitted(guarantees, capacity), begin)), most)
        safe = lay.safe[:, which]
        safe = np.where(np.isnan(safe), np.maximum(lay.guarantee[:, which], _SAFE * capacity), safe)
        self.divide(lay, which, shares, safe, wants)

    def divide(self, lay: Layout, which: int, shares: np.ndarray, safe: np.ndarray, wants: np.ndarray) -> None:
        """Each job's share over its members: by what they use, and an eighth evenly, so that each can begin to; more
        than that where an eighth is next to nothing. Together they never get more than the share.

        shares, safe : f64[g]; inf: no limit; wants : f64[n]
        """
        least = _LEAST[which]
        lay.rates[:, which] = shares
        parts = shares[lay.group]
        several = ((lay.counts > 1) & np.isfinite(shares))[lay.group]
        if several.any():
            each = np.maximum(shares / 8 / lay.counts, np.minimum(least, shares / lay.counts))
            even = each[lay.group][several]
            mine = lay.group[several]
            numbers, group = np.unique(mine, return_inverse=True)
            left = np.maximum(0.0, shares[numbers] - (each * lay.counts)[numbers])
            rest = max_min_each(left, np.maximum(0.0, wants[several] - even), group)
            parts[several] = even + rest
        with np.errstate(invalid="ignore"):
            part = parts / shares[lay.group]
        part = np.where(np.isfinite(part), part, (1 / lay.counts)[lay.group])
        self.table.rates[lay.rows, which] = parts
        each = np.minimum(least, safe / lay.counts)
        self.table.safe[lay.rows, which] = each[lay.group] + (safe - each * lay.counts)[lay.group] * part

    # -- what there is to tell -----------------------------------------------------------------------------------------

    @property
    def every_s(self) -> float:
        """How often a connection is to report: some 4,000 reports per second are a tenth of a core."""
        return min(max(self.rules.cycle_s, self.lines / 4000), self.rules.lease_s / 3)

    def grant(self, member: Member) -> Grant:
        """As it stands."""
        rates, safe = (_or_none(each[member.row].tolist()) for each in (self.table.rates, self.table.safe))
        return Grant(rates, safe, self.rules.lease_s, self.every_s)

    def state(self, now: float) -> list[dict[str, Any]]:
        """Per job: user, job, name, nodes, members (processes), lost (those whose connection is), and per second
        guarantee, grant and used, each (bytes, operations) with None for no limit."""
        if not self.jobs:
            return []
        self._settle()
        lay, table = self.layout(), self.table
        used = [lay.sums(np.where(now < table.until[lay.rows], table.now[lay.rows, k], 0.0)) for k in (0, 1)]
        rates, both = lay.rates.tolist(), np.array(used).T.tolist()
        return [
            {
                "user": job.user,
                "job": job.job,
                "name": job.name,
                "nodes": len({member.hello.node for member in job.members.values()}),
                "members": len(job.members),
                "lost": sum(not member.here for member in job.members.values()),
                "guarantee": list(job.rule.guarantee),
                "grant": list(_or_none(rates[k])),
                "used": both[k],
            }
            for k, job in enumerate(self.jobs.values())
        ]


def _pairs(values: list[Any], none: float) -> np.ndarray:
    """f64[g, 2]"""
    return np.array([[none if each is None else each for each in pair] for pair in values], float).reshape(-1, 2)


def _or_none(rates: list[float]) -> Rates:
    nbytes, operations = rates
    return None if nbytes == math.inf else nbytes, None if operations == math.inf else operations
