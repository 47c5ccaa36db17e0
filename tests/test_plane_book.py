"""What a plane grants, on a clock that only the test moves: jobs that use what they get, that use less, that lie, that
die; and a plane that has just started."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest

from pario.plane.book import Book, Hello, Member, RefusedError
from pario.plane.rules import JobRule, Limits, Rules
from pario.plane.words import Report

CAPACITY = 100e6
#: PAIO's four jobs
GUARANTEES = {"a": 15e6, "b": 20e6, "c": 30e6, "d": 35e6}
RULES = Rules((CAPACITY, None), jobs=tuple(JobRule(name, guarantee=(rate, 0.0)) for name, rate in GUARANTEES.items()))
STEP_S = RULES.cycle_s


class World:
    """A plane and processes that do what they are granted."""

    def __init__(self, rules: Rules = RULES, now: float = 0.0) -> None:
        self.now = now
        self.book = Book(rules, now)
        self.used: dict[Member, float] = {}

    def join(self, job: str, number: int = 0, user: str = "me", **more: object) -> Member:
        hello = Hello(user, f"{job} {number}", job, job, f"node{number}", **more)  # type: ignore[arg-type]
        member = self.book.join(hello, self.now)
        self.used.setdefault(member, 0.0)
        self.book.share(self.now)
        return member

    def step(self, wants: dict[Member, float], claims: dict[Member, float | None] | None = None) -> None:
        """One cycle: each uses what it wants and may, and reports like an agent, or claims something else."""
        self.now += STEP_S
        for member, want in wants.items():
            rate = min(want, self.of(member).rates[0])
            self.used[member] += rate * STEP_S
            claim = None if want > self.of(member).rates[0] else 1.25 * rate
            if claims is not None and member in claims:
                claim = claims[member]
            self.book.report(member, Report(self.now, (self.used[member], 0.0), (claim, None)), self.now)
        self.book.share(self.now)

    def steps(self, seconds: float, wants: dict[Member, float], **more: dict[Member, float | None]) -> None:
        for _ in range(round(seconds / STEP_S)):
            self.step(wants, **more)

    def of(self, member: Member) -> SimpleNamespace:
        """What the table has of it."""
        table = self.book.table
        return SimpleNamespace(**{name: getattr(table, name)[member.row] for name in ("rates", "safe", "now")})

    def rates(self, *members: Member) -> list[float]:
        return [round(self.of(member).rates[0] / 1e6, 1) for member in members]


def test_guarantees_when_all_want_more() -> None:
    world = World()
    members = [world.join(name) for name in GUARANTEES]
    world.steps(3, dict.fromkeys(members, 1e9))
    assert world.rates(*members) == [15, 20, 30, 35]
    # and nobody is limited where the store is not
    assert all(math.isinf(world.of(member).rates[1]) for member in members)


def test_leftovers_are_given_on_and_taken_back() -> None:
    world = World()
    a, d = world.join("a"), world.join("d")
    world.steps(3, {a: 1e9, d: 1e9})
    assert world.rates(a, d) == [40, 60]
    world.steps(5, {a: 1e9, d: 1e6})  # d computes
    assert world.rates(a)[0] >= 90
    assert world.rates(d)[0] >= 35, "its guarantee waits for it"
    world.step({a: 1e9, d: 1e9})
    world.step({a: 1e9, d: 1e9})
    assert world.rates(d)[0] >= 35
    world.steps(2, {a: 1e9, d: 1e9})
    assert world.rates(a, d) == [40, 60]


def test_no_more_is_granted_than_there_is_to_jobs_that_use_it() -> None:
    world = World()
    members = [world.join(name) for name in ("a", "b", "x", "y")]
    for k in range(40):
        wants = {m: (1e9 if (k + j) % 3 else 5e6) for j, m in enumerate(members)}
        world.step(wants)
        if k > 8:
            using = [m for m in members if world.of(m).now[0] > 1e6]
            assert sum(world.of(m).rates[0] for m in using) <= CAPACITY * (1 + 35 / 100) + 1


@pytest.mark.parametrize("claim", [None, 1e9, 1e18])
def test_a_job_that_lies_takes_little(claim: float | None) -> None:
    """It claims all there is and uses nothing; then it uses what it claims, and gets its fair share and no more."""
    world = World()
    liar, honest = world.join("x"), world.join("y")
    world.steps(3, {liar: 0.0, honest: 1e9}, claims={liar: claim})
    assert world.rates(honest)[0] >= 100 * (1 - 1 / 16) - 0.1
    world.steps(3, {liar: 1e9, honest: 1e9}, claims={liar: 1e18})
    assert world.rates(liar, honest) == [50, 50]


def test_more_processes_gain_a_job_nothing() -> None:
    world = World()
    many = [world.join("x", k) for k in range(8)]
    one = world.join("y")
    world.steps(3, dict.fromkeys([*many, one], 1e9))
    assert world.rates(one) == [50]
    assert sum(world.of(member).rates[0] for member in many) == pytest.approx(50e6)


def test_a_job_divides_its_share_by_what_its_processes_use() -> None:
    world = World()
    reader, idle = world.join("a", 0), world.join("a", 1)
    other = world.join("d")
    world.steps(4, {reader: 1e9, idle: 0.0, other: 1e9})
    assert world.rates(other) == [60]
    assert world.of(reader).rates[0] >= 0.85 * 40e6
    assert world.of(idle).rates[0] >= 1e6, "it can begin at once"
    world.steps(2, {reader: 0.0, idle: 1e9, other: 1e9})
    assert world.of(idle).rates[0] >= 0.85 * 40e6 / 2
    world.steps(3, {reader: 0.0, idle: 1e9, other: 1e9})
    assert world.of(idle).rates[0] >= 0.85 * 40e6


def test_a_job_grows_to_the_whole_store_within_two_seconds() -> None:
    world = World()
    idle, one = world.join("y"), world.join("x")
    world.steps(5, {one: 0.0, idle: 0.0})
    world.steps(2, {one: 1e9, idle: 0.0})
    assert world.rates(one)[0] >= 90


# -- users who want more than their share ------------------------------------------------------------------------------

#: what a store gives to one whom a user is beside whose claims are all unproven
BESIDE_CLAIMS = 1 - 1 / 16


@pytest.mark.parametrize("how", ["new jobs", "new processes", "lost connections"])
@pytest.mark.parametrize("every_s", [STEP_S, 0.8, 1.5])
@pytest.mark.parametrize("hostile", [1, 8])
def test_jobs_that_leave_and_join_again_take_no_more_than_one_that_stays(
    hostile: int, every_s: float, how: str
) -> None:
    """They claim all there is, and use nothing. Without the bound an honest job had 61 of 100 beside one, 21 beside
    eight that joined every 0.8 s."""
    world = World(Rules((CAPACITY, None)))
    honest = world.join("y")
    world.steps(3, {honest: 1e9})
    theirs: list[Member] = []
    found, since = [], math.inf
    for k in range(60):
        if since >= every_s:
            since = 0.0
            for member in theirs:
                world.book.leave(member, world.now, bye=how != "lost connections")
            theirs = [
                world.join(f"{j} {k}" if how == "new jobs" else f"{j}", k, user="evil") for j in range(hostile)
            ]
        world.step({honest: 1e9, **dict.fromkeys(theirs, 0.0)}, dict.fromkeys(theirs))
        since += STEP_S
        found.append(world.of(honest).rates[0])
    assert sum(found) / len(found) >= 0.9 * BESIDE_CLAIMS * CAPACITY


def test_claims_of_one_user_share_one_foot_and_use_is_believed() -> None:
    """Thirty idle jobs and one that reads: the reader gets its half."""
    world = World(Rules((CAPACITY, None)))
    honest, reader = world.join("y"), world.join("x", user="you")
    idle = [world.join(f"z{k}", k, user="you") for k in range(30)]
    world.steps(6, {honest: 1e9, reader: 1e9, **dict.fromkeys(idle, 0.0)}, claims=dict.fromkeys(idle))
    assert world.of(honest).rates[0] >= 0.9 * CAPACITY * BESIDE_CLAIMS / 2
    assert world.of(reader).rates[0] >= 0.9 * CAPACITY * BESIDE_CLAIMS / 2


def test_a_job_that_follows_another_one_goes_on_at_once() -> None:
    """Its user has used as much a moment ago. Another user's first job grows to its share within a second."""
    world = World(Rules((CAPACITY, None)))
    other, first = world.join("y"), world.join("x", user="you")
    world.steps(4, {other: 1e9, first: 1e9})
    world.book.leave(first, world.now, bye=True)
    second = world.join("x", 1, user="you")
    world.step({other: 1e9, second: 1e9})
    assert world.of(second).rates[0] >= 40e6
    world.book.leave(second, world.now, bye=True)
    world.steps(12, {other: 1e9})
    late = world.join("x", 2, user="you")
    world.step({other: 1e9, late: 1e9})
    assert world.of(late).rates[0] <= CAPACITY / 8, "by then it is forgotten"
    world.steps(1, {other: 1e9, late: 1e9})
    assert world.of(late).rates[0] >= 40e6


# -- leases ------------------------------------------------------------------------------------------------------------


def test_a_dead_jobs_share_is_given_on_when_its_lease_ends() -> None:
    world = World()
    a, d = world.join("a"), world.join("d")
    world.steps(3, {a: 1e9, d: 1e9})
    world.book.leave(d, world.now, bye=False)
    world.steps(RULES.lease_s - 1, {a: 1e9})
    assert world.rates(a) == [40], "it may still read: only the connection is gone"
    world.steps(3, {a: 1e9})
    assert world.rates(a) == [100]
    assert [job["name"] for job in world.book.state(world.now)] == ["a"]


def test_a_job_that_says_bye_gives_its_share_on_at_once() -> None:
    world = World()
    a, d = world.join("a"), world.join("d")
    world.steps(3, {a: 1e9, d: 1e9})
    world.book.leave(d, world.now, bye=True)
    world.steps(1, {a: 1e9})
    assert world.rates(a)[0] >= 80
    assert world.book.members == 1


def test_a_silent_job_wants_nothing_after_a_lease() -> None:
    world = World()
    x, y = world.join("x"), world.join("y")
    world.steps(3, {x: 1e9, y: 1e9})
    world.steps(RULES.lease_s + 2, {x: 1e9})
    assert world.rates(x)[0] >= 99


def test_a_connection_that_comes_back_is_the_same_member() -> None:
    world = World()
    a, d = world.join("a"), world.join("d")
    world.steps(3, {a: 1e9, d: 1e9})
    world.book.leave(d, world.now, bye=False)
    assert world.join("d") is d
    assert world.book.members == 2
    world.steps(3, {a: 1e9, d: 1e9})
    assert world.rates(a, d) == [40, 60]


# -- rules -------------------------------------------------------------------------------------------------------------


def test_safe_rates() -> None:
    rules = Rules(
        (CAPACITY, None),
        jobs=(JobRule("a", guarantee=(15e6, 0.0)), JobRule("b", guarantee=(15e6, 0.0), safe=(2e6, None))),
    )
    world = World(rules)
    a, b, x = world.join("a"), world.join("b"), world.join("x")
    before = [world.book.grant(member).safe[0] for member in (a, b, x)]
    world.steps(2, {a: 1e9, b: 1e9, x: 1e9})
    assert [world.book.grant(member).safe[0] for member in (a, b, x)] == pytest.approx([15e6, 2e6, 5e6])
    assert before == pytest.approx([15e6, 2e6, 5e6])
    two = world.join("a", 1)
    world.steps(4, {a: 1e9, two: 1e9, b: 1e9, x: 1e9})
    assert world.of(a).safe[0] + world.of(two).safe[0] == pytest.approx(15e6)


def test_the_most_that_a_rule_allows() -> None:
    world = World(Rules((CAPACITY, None), jobs=(JobRule("x", most=(10e6, 50.0)),)))
    x, y = world.join("x"), world.join("y")
    world.steps(3, {x: 1e9, y: 1e9})
    assert world.rates(x, y) == [10, 90]
    assert world.of(x).rates[1] == 50


def test_many_processes_get_no_more_than_a_rule_allows() -> None:
    """Nor than the store has: what a process gets at least is an even part of that."""
    rules = Rules((1e6, 1000.0), jobs=(JobRule("x", most=(None, 40.0), safe=(None, 20.0)),))
    world = World(rules)
    xs = [world.join("x", k) for k in range(64)]
    assert max(world.of(member).rates[1] for member in xs[1:]) <= 40 / 2
    y = world.join("y")
    for k in range(12):
        world.now += STEP_S
        for member in (*xs, y):
            used = 1e6 * k * STEP_S if member in (xs[0], y) else 0.0
            world.book.report(member, Report(world.now, (used, used), (None, None)), world.now)
        world.book.share(world.now)
    rates = [[world.of(member).rates[k] for member in xs] for k in (0, 1)]
    assert sum(rates[1]) == pytest.approx(40)
    assert sum(world.of(member).safe[1] for member in xs) == pytest.approx(20)
    assert min(rates[1]) == pytest.approx(40 / 64)
    assert sum(rates[0]) + world.of(y).rates[0] <= 1e6 * (1 + 1 / 16)
    assert min(rates[0]) > 0


def test_many_jobs_get_no_more_than_the_store_has() -> None:
    world = World(Rules((None, 100.0), limits=Limits(jobs_per_user=64)))
    jobs = [world.join(str(k)) for k in range(50)]
    for k in range(12):
        world.now += STEP_S
        for member in jobs:
            world.book.report(member, Report(world.now, (0.0, 100.0 * k), (None, None)), world.now)
        world.book.share(world.now)
    assert [world.of(member).rates[1] for member in jobs] == pytest.approx([2.0] * 50)


def test_operations_are_shared_like_bytes() -> None:
    """One job opens ten thousand files; the other's guarantee of 300 operations/s holds."""
    rules = Rules((None, 1000.0), jobs=(JobRule("quiet", guarantee=(0.0, 300.0)),))
    world = World(rules)
    storm, quiet = world.join("storm"), world.join("quiet")
    used = {storm: 0.0, quiet: 0.0}
    for _ in range(20):
        world.now += STEP_S
        for member, want in ((storm, 1e5), (quiet, 250.0)):
            rate = min(want, world.of(member).rates[1])
            used[member] += rate * STEP_S
            claim = (None, None if want > rate else rate)
            world.book.report(member, Report(world.now, (0.0, used[member]), claim), world.now)
        world.book.share(world.now)
        assert world.of(quiet).rates[1] >= 300
    assert 650 <= world.of(storm).rates[1] <= 750
    assert math.isinf(world.of(quiet).rates[0])


def test_other_rules_while_jobs_run() -> None:
    world = World()
    a, d = world.join("a"), world.join("d")
    world.steps(3, {a: 1e9, d: 1e9})
    world.book.reload(Rules((50e6, None), jobs=(JobRule("a", guarantee=(40e6, 0.0)),)))
    world.steps(3, {a: 1e9, d: 1e9})
    assert world.rates(a, d) == [45, 5]


def test_limits() -> None:
    world = World(Rules((CAPACITY, None), limits=Limits(jobs_per_user=2, connections=3, connections_per_user=9)))
    world.join("x")
    world.join("y")
    with pytest.raises(RefusedError, match="user me has 2 jobs"):
        world.join("z")
    world.join("x", 1)
    with pytest.raises(RefusedError, match="too many processes"):
        world.join("x", 2)


def test_those_who_have_gone_count_until_their_leases_end() -> None:
    limits = Limits(connections=4, connections_per_user=2, jobs_per_user=3)
    book = Book(Rules((CAPACITY, None), limits=limits), 0.0)

    def hello(user: str, member: int) -> Hello:
        return Hello(user, str(member), "0", "0", "n")

    first = book.join(hello("me", 0), 0.0)
    book.join(hello("me", 1), 0.0)
    book.leave(first, 0.0, bye=False)
    with pytest.raises(RefusedError, match="user me has 2 processes already"):
        book.join(hello("me", 2), 0.0)
    for k in (3, 4):
        book.join(hello("you", k), 0.0)
    with pytest.raises(RefusedError, match="too many processes"):
        book.join(hello("they", 5), 0.0)
    book.settle(book.rules.lease_s)
    book.join(hello("me", 2), book.rules.lease_s)
    assert book.members == 4


@pytest.mark.parametrize("at", [0.0, -5.0, 1e-300])
def test_a_clock_that_does_not_move(at: float) -> None:
    """What a process says of its clock may be anything."""
    world = World()
    x, y = world.join("x"), world.join("y")
    for _ in range(3):
        world.book.report(x, Report(at, (1e18, 1e18), (None, None)), world.now)
        world.step({y: 1e9})
        assert all(math.isfinite(world.of(member).rates[0]) and world.of(member).rates[0] > 0 for member in (x, y))
    state = json.loads(json.dumps(world.book.state(world.now), allow_nan=False))
    assert len(state) == 2


def test_the_state_is_what_happened() -> None:
    world = World()
    a, other = world.join("a", 0), world.join("a", 1)
    world.steps(2, {a: 1e6, other: 1e6})
    (job,) = world.book.state(world.now)
    assert job["used"] == pytest.approx([2e6, 0.0])
    assert (job["user"], job["name"], job["nodes"], job["members"], job["lost"]) == ("me", "a", 2, 2, 0)
    assert job["guarantee"] == [15e6, 0.0]
    assert job["grant"][1] is None
