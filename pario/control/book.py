"""What a control plane knows of jobs and their processes, and what it grants them. Pure: the caller tells the time.

A job has members, the processes that read for it. Shares are computed for jobs, and a job's share is divided over its
members by what they use, so that a job gains nothing by having more of them.

What a member may say of its demand is bounded by what it used: at most twice that, and a small part of the store
besides, so that it doubles its rate with each report until it has what it wants, and a claim that is not used soon
takes nothing from anybody.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pario.control.bucket import Rates
from pario.control.rules import JobRule, Rules
from pario.control.share import fitted, fixed, max_min, weighted
from pario.control.wire import Grant, Report

__all__ = ["Book", "Hello", "Job", "Member", "RefusedError"]

#: Seconds over which a member's rate is the largest that was seen: jobs read in bursts.
_PEAK_S = 2.0
#: What a job may want beyond twice its use, and what it gets without having used anything: as a part of the store.
_FOOT = 1 / 16
#: A job without a guarantee goes on at this part of the store when it hears nothing from the plane.
_SAFE = 1 / 20
#: Seconds in which the claim of a new member is believed.
_NEW_S = 1.0
#: Nobody is granted less: bytes/s, operations/s.
_LEAST = (65536.0, 4.0)
#: Nobody uses more, whatever it says of its clock.
_MOST = 1e18
#: Reports of one member in one second, at most; what is above is not looked at.
_MOST_REPORTS = 100


class RefusedError(Exception):
    """Somebody cannot join. The text goes to it."""


@dataclass(frozen=True)
class Hello:
    """Who wants to join.

    member : random; the same one after a lost connection
    job : tells the jobs of a user apart; name : of the job; node : where the process runs
    holds : rates that an earlier connection or plane has granted and whose lease lasts; None: none
    """

    user: str
    member: bytes
    job: str
    name: str
    node: str
    holds: Rates | None = None


@dataclass(eq=False)
class Member:
    """One process. rates : its grant; until : the end of its lease; here : it is connected

    second, reports : when the present second began, and how many reports came in it
    wants, peak : f64[2] per second, its claim (inf: as much as it can get) and the most it has used of late
    """

    hello: Hello
    joined_at: float
    until: float
    here: bool = True
    wants: list[float] = field(default_factory=lambda: [math.inf, math.inf])
    peak: list[float] = field(default_factory=lambda: [0.0, 0.0])
    now: list[float] = field(default_factory=lambda: [0.0, 0.0])
    rates: list[float] = field(default_factory=lambda: [math.inf, math.inf])
    safe: list[float] = field(default_factory=lambda: [math.inf, math.inf])
    holds: Rates | None = None
    last: Report | None = None
    seen: deque[tuple[float, float, float]] = field(default_factory=deque)
    second: float = -math.inf
    reports: int = 0

    def use(self, report: Report, now: float) -> None:
        """Take a report."""
        last, self.last = self.last, report
        if last is not None and report.at > last.at:
            over = report.at - last.at
            gone = zip(report.used, last.used, strict=True)
            rates = [min(max(0.0, after - before) / over, _MOST) for after, before in gone]
            self.seen.append((now, rates[0], rates[1]))
            self.now = rates
        while self.seen and self.seen[0][0] < now - _PEAK_S:
            self.seen.popleft()
        nbytes = operations = 0.0
        for _, one, other in self.seen:
            nbytes = one if one > nbytes else nbytes
            operations = other if other > operations else operations
        self.peak = [nbytes, operations]
        self.wants = [math.inf if each is None else each for each in report.demand]

    def demand(self, which: int, capacity: float, foot: float, now: float) -> float:
        """What of its claim is believed. foot : what it may want without having used anything"""
        if now >= self.until:  # silent for a lease
            return 0.0
        if now < self.joined_at + _NEW_S:
            return min(self.wants[which], capacity)
        # A job that reads in bursts wants in a moment what it has just used.
        return min(max(self.wants[which], 1.25 * self.peak[which]), 2 * self.peak[which] + foot, capacity)


@dataclass(eq=False)
class Job:
    """Processes of one job. rates : f64[2], what they get together"""

    user: str
    job: str
    name: str
    rule: JobRule
    members: dict[bytes, Member] = field(default_factory=dict)
    rates: list[float] = field(default_factory=lambda: [math.inf, math.inf])

    def guarantee(self, which: int) -> float:
        return self.rule.guarantee[which]


class Book:
    """All jobs. Times are seconds on any clock that never goes back.

    now : the plane starts; for one lease it grants what members hold from another one

    members : their number; seen : how many jobs there have been
    """

    def __init__(self, rules: Rules, now: float) -> None:
        self.rules = rules
        self.jobs: dict[tuple[str, str], Job] = {}
        self.members = self.seen = 0
        self._learns_until = now + rules.lease_s

    def learns(self, now: float) -> bool:
        return now < self._learns_until

    def reload(self, rules: Rules) -> None:
        """From now on other rules."""
        self.rules = rules
        for job in self.jobs.values():
            job.rule = rules.rule_of(job.name, job.user)

    def join(self, hello: Hello, now: float) -> Member:
        """Raises RefusedError."""
        key = hello.user, hello.job
        job = self.jobs.get(key)
        if job is None:
            most = self.rules.limits.jobs_per_user
            if sum(user == hello.user for user, _ in self.jobs) >= most:
                raise RefusedError(f"user {hello.user} has {most} jobs already")
            job = Job(*key, hello.name, self.rules.rule_of(hello.name, hello.user))
        known = job.members.get(hello.member)
        if known is None and self.members >= self.rules.limits.connections:
            raise RefusedError("there are too many processes")
        until = now + self.rules.lease_s
        member = known if known is not None else Member(hello, now, until)
        member.here, member.until, member.last = True, until, None
        if known is None and self.learns(now):
            member.holds = hello.holds
        self.seen += key not in self.jobs
        self.jobs[key] = job
        job.members[hello.member] = member
        if known is None:
            self.members += 1
            self._begin(job, member)
        return member

    def _begin(self, job: Job, member: Member) -> None:
        """What a new member gets until shares are computed the next time: as if nobody had room for it."""
        for which, capacity in enumerate(self.rules.capacity):
            if capacity is not None:
                least = max(job.guarantee(which), capacity * _FOOT / len(self.jobs))
                member.rates[which] = max(least / len(job.members), _LEAST[which])
                member.safe[which] = max(self._safe(job, which, capacity) / len(job.members), _LEAST[which])

    def _safe(self, job: Job, which: int, capacity: float) -> float:
        safe = job.rule.safe[which]
        return max(job.guarantee(which), _SAFE * capacity) if safe is None else safe

    def report(self, member: Member, report: Report, now: float) -> bool:
        """Take a report; False if this member sends too many."""
        if now >= member.second + 1.0:
            member.second, member.reports = now, 0
        member.reports += 1
        if member.reports > _MOST_REPORTS:
            return False
        member.use(report, now)
        member.until = now + self.rules.lease_s
        return True

    def leave(self, member: Member, now: float, *, bye: bool) -> None:
        """It has gone; without a bye it may go on with what it was granted, until its lease ends."""
        member.here = False
        if bye:
            member.until = now
            self._forget(now)

    def _forget(self, now: float) -> None:
        for key, job in list(self.jobs.items()):
            for name, member in list(job.members.items()):
                if member.until <= now and not member.here:
                    del job.members[name]
                    self.members -= 1
            if not job.members:
                del self.jobs[key]

    # -- shares --------------------------------------------------------------------------------------------------------

    def share(self, now: float) -> None:
        """Compute what each member gets."""
        self._forget(now)
        jobs = list(self.jobs.values())
        if not jobs:
            return
        for which in (0, 1):
            capacity = self.rules.capacity[which]
            if capacity is None:
                self._only_most(jobs, which)
            else:
                self._share(jobs, which, capacity, now)

    def _only_most(self, jobs: list[Job], which: int) -> None:
        """Without a capacity only a rule's own limits hold."""
        for job in jobs:
            most = job.rule.most[which]
            job.rates[which] = math.inf if most is None else most
            for member in job.members.values():
                member.rates[which] = member.safe[which] = job.rates[which] / len(job.members)

    def _share(self, jobs: list[Job], which: int, capacity: float, now: float) -> None:
        held = self._held(jobs, which, capacity) if self.learns(now) else np.zeros(len(jobs))
        foot = capacity * _FOOT / len(jobs)
        own = capacity * _FOOT
        wanted = [
            [each.demand(which, capacity, own / len(job.members), now) for each in job.members.values()] for job in jobs
        ]
        most = np.array([math.inf if job.rule.most[which] is None else job.rule.most[which] for job in jobs], float)
        guarantees = np.minimum([job.guarantee(which) for job in jobs], most)
        demands = np.minimum([min(capacity, sum(each)) for each in wanted], most)
        free = held == 0
        left = max(0.0, capacity - float(held.sum()))
        shares = held.copy()
        shares[free] = self._by_policy(left, demands[free], guarantees[free])
        # A guarantee need not be claimed first; and whoever wants nothing now must be able to begin.
        shares = np.minimum(np.maximum(shares, np.maximum(fitted(guarantees, capacity), foot)), most)
        for job, share, wants in zip(jobs, shares.tolist(), wanted, strict=True):
            job.rates[which] = share
            self._divide(job, which, share, wants, capacity)

    def _by_policy(self, capacity: float, demands: np.ndarray, guarantees: np.ndarray) -> np.ndarray:
        if self.rules.policy == "static":
            return fixed(capacity, guarantees)
        if self.rules.policy == "proportional":
            return weighted(capacity, guarantees)
        return max_min(capacity, demands, guarantees)

    def _held(self, jobs: list[Job], which: int, capacity: float) -> np.ndarray:
        """f64[n], what the members of each job hold from another plane; no more than there is."""
        held = [sum((m.holds[which] or 0.0) for m in job.members.values() if m.holds is not None) for job in jobs]
        return fitted(np.array(held, float), capacity)

    def _divide(self, job: Job, which: int, share: float, wants: list[float], capacity: float) -> None:
        """A job's share over its members: by what they use, and an eighth evenly, so that each can begin to."""
        n = len(job.members)
        parts = [share]
        if n > 1:
            even = share / 8
            rest = max_min(share - even, np.maximum(0.0, np.array(wants) - even / n))
            parts = (even / n + rest).tolist()
        safe = self._safe(job, which, capacity)
        for member, part in zip(job.members.values(), parts, strict=True):
            member.rates[which] = max(part, _LEAST[which])
            member.safe[which] = max(safe * part / share, _LEAST[which])

    def grant(self, member: Member) -> Grant:
        """As it stands."""
        # Many members report less often: some 4,000 reports per second are a tenth of a core.
        every_s = min(max(self.rules.cycle_s, self.members / 4000), self.rules.lease_s / 3)
        return Grant(_or_none(member.rates), _or_none(member.safe), self.rules.lease_s, every_s)

    def state(self, now: float) -> list[dict[str, Any]]:
        """Per job: user, job, name, nodes, members, lost (members whose connection is), and per second guarantee,
        grant and used, each (bytes, operations) with None for no limit."""
        return [
            {
                "user": job.user,
                "job": job.job,
                "name": job.name,
                "nodes": len({member.hello.node for member in job.members.values()}),
                "members": len(job.members),
                "lost": sum(not member.here for member in job.members.values()),
                "guarantee": list(job.rule.guarantee),
                "grant": list(_or_none(job.rates)),
                "used": [
                    sum(member.now[which] for member in job.members.values() if now < member.until)
                    for which in (0, 1)
                ],
            }
            for job in self.jobs.values()
        ]


def _or_none(rates: list[float]) -> Rates:
    nbytes, operations = rates
    return None if nbytes == math.inf else nbytes, None if operations == math.inf else operations
