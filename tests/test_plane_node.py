"""Node agents: jobs behind one get what they would get without it, and no more; agent and plane are killed, stopped,
started again; nobody speaks for whom he may not."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from control_plane import LOCAL, SECRET, Reader, agent_running, heard, played, running, say, until, who

from pario.errors import ParioError
from pario.plane import agent as agent_module
from pario.plane import node as node_module
from pario.plane.agent import Agent
from pario.plane.book import Hello, Member, RefusedError
from pario.plane.node import NodeAgent, NodeBook
from pario.plane.plane import Plane
from pario.plane.rules import JobRule, Limits, Rules
from pario.plane.session import Session, Who, connected
from pario.plane.words import Grant, PlaneAddress, Report, unpacked, usage_message, usage_of
from pario.wire import frames
from pario.wire.frames import Link, TurnedAwayError, Word

YOURS = b"y" * 32
RULES = Rules(
    (10e6, None),
    lease_s=0.6,
    cycle_s=0.02,
    jobs=(JobRule("a", guarantee=(3e6, 0.0)), JobRule("b", guarantee=(6e6, 0.0), safe=(1e6, None))),
    secrets={"me": SECRET, "you": YOURS, "node": b"n" * 32},
    agents={"node": "*"},
)
#: of an agent that knows all users' tokens
USERS = Rules((None, None), secrets={"me": SECRET, "you": YOURS})
NODE = Who("node", b"n" * 32, "-", "-", "n1")
STALL_S = 1.0


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "_PAUSE_S", 0.05)
    monkeypatch.setattr(agent_module, "_MOST_PAUSE_S", 0.2)


@pytest.fixture
def plane() -> Iterator[Plane]:
    with running(RULES) as one:
        yield one


@pytest.fixture
def node(plane: Plane) -> Iterator[NodeAgent]:
    with agent_running(plane.address, NODE, USERS) as one:
        until(lambda: one.joined)
        yield one


def rates(*readers: Reader) -> list[float]:
    return [round((each.agent.bucket.rates[0] or 0) / 1e6, 2) for each in readers]


def status(server: NodeAgent | Plane) -> Any:
    """As `control status` gets it."""
    line = connected(server.address, who(), {"do": "status"}, 1 << 20)
    line.close()
    return line.first["status"]


def join(
    server: NodeAgent | Plane, job: str = "a", member: int = 1, as_whom: Who | None = None, **more: Any
) -> Session:
    words = {"do": "join", "member": f"{member:032x}", "job": job, "name": job, "node": "n", "holds": None, **more}
    return Session(server.address, as_whom or who(job), words, 1 << 20)


def test_jobs_of_a_node_get_what_they_would_get_without_it(plane: Plane, node: NodeAgent) -> None:
    """And a third job that has a connection of its own; two processes of one job divide what it gets."""
    a, b, other = Reader(Agent(node.address, who("a"))), Reader(Agent(node.address, who("b"))), []
    until(lambda: rates(a, b) == [3.5, 6.5])
    state = status(plane)
    assert [(each["node"], each["jobs"], each["processes"]) for each in state["agents"]] == [("n1", 2, 2)]
    until(lambda: len(plane.links) == 1)  # one connection for all
    other = [Reader(Agent(plane.address, who("c"))), Reader(Agent(node.address, who("c")))]
    until(lambda: rates(a, b) == [3.33, 6.33])
    until(lambda: sum(rates(*other)) == pytest.approx(0.33, abs=0.03))
    two = Reader(Agent(node.address, who("a")))
    until(lambda: sum(rates(a, two)) == pytest.approx(3.33, abs=0.1) and min(rates(a, two)) > 1)
    until(lambda: {job["job"]: job["members"] for job in status(plane)["jobs"]} == {"a": 2, "b": 1, "c": 2})
    assert status(node)["joined"]
    for each in (a, b, two, *other):
        each.close()
        assert each.longest <= STALL_S
    until(lambda: not plane.book.jobs)
    until(lambda: not node.book.jobs)


def test_what_a_job_uses_arrives_at_the_plane(plane: Plane, node: NodeAgent) -> None:
    reader = Reader(Agent(node.address, who("a")))
    until(lambda: rates(reader) == [10])
    until(lambda: status(plane)["jobs"][0]["used"][0] == pytest.approx(10e6, rel=0.3))
    reader.close()


# -- who may speak for whom --------------------------------------------------------------------------------------------


def test_a_user_needs_his_own_token_at_the_agent(plane: Plane, node: NodeAgent) -> None:
    with pytest.raises(TurnedAwayError, match="another token"):
        join(node, as_whom=who("a", user="me", secret=YOURS))
    with pytest.raises(TurnedAwayError, match="another token"):
        join(node, as_whom=NODE)
    assert not plane.book.jobs


def test_an_agent_speaks_for_its_own_user_only(plane: Plane) -> None:
    """Unless the rules say otherwise; its jobs are refused with the reason."""
    with agent_running(plane.address, who(), USERS) as node:
        until(lambda: node.joined)
        mine = join(node, "a")
        with pytest.raises(TurnedAwayError, match="the agent of node node0 may not speak for user you"):
            join(node, "a", 2, who("a", user="you", secret=YOURS))
        assert [(job.user, job.job) for job in plane.book.jobs.values()] == [("me", "a")]
        mine.close()


def test_an_agent_needs_a_token(plane: Plane, caplog: pytest.LogCaptureFixture) -> None:
    with agent_running(plane.address, NODE._replace(secret=b"x" * 32), USERS) as node:
        until(lambda: any("has no answer of the control plane" in record.message for record in caplog.records))
        assert not node.joined
    assert not plane._agents


def test_two_agents_of_one_node_keep_their_own_jobs(plane: Plane) -> None:
    """One is another user's: a number that one gives to a job means nothing to the other."""
    with (
        agent_running(plane.address, who(), USERS) as one,
        agent_running(plane.address, who("x", user="you", secret=YOURS), USERS) as two,
    ):
        mine, yours = join(one, "a"), join(two, "a", as_whom=who("a", user="you", secret=YOURS))
        assert sorted(plane.book.jobs) == [("me", "a"), ("you", "a")]
        mine.send({"bye": 1})
        until(lambda: sorted(plane.book.jobs) == [("you", "a")])
        mine.close()
        yours.close()


def test_two_agents_of_one_user_are_two(plane: Plane, tmp_path: Path) -> None:
    """With the same words: any port, a path of the same name in another folder. Started again it is the same one."""
    (tmp_path / "x").mkdir()
    addresses = [LOCAL, LOCAL, PlaneAddress("", 0, str(tmp_path / "a")), PlaneAddress("", 0, str(tmp_path / "x" / "a"))]
    nodes = [NodeAgent(address, plane.address, NODE, USERS) for address in addresses]
    assert len({node._member for node in nodes}) == 4
    nodes[2].close()
    again = NodeAgent(addresses[2], plane.address, NODE, USERS)
    assert again._member == nodes[2]._member
    again.close()
    (tmp_path / "x").rename(tmp_path / "away")
    (tmp_path / "x").mkdir()  # as another container sees it
    other = NodeAgent(addresses[3], plane.address, NODE, USERS)
    assert other._member != nodes[3]._member
    for node in (*nodes[:2], nodes[3], other):
        node.close()


def test_on_a_unix_socket_the_system_says_who_it_is(
    plane: Plane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = PlaneAddress("", 0, str(tmp_path / "agent"))
    with agent_running(plane.address, NODE, Rules((None, None)), address) as node:
        until(lambda: node.joined)
        join(node, as_whom=who("a", secret=None)).close()
        monkeypatch.setattr("pario.wire.server.peer_uid", lambda sock: 54321)
        with pytest.raises(TurnedAwayError, match="system user 54321 is not user me"):
            join(node, as_whom=who("a", secret=None))


def raw_agent(plane: Plane, member: str = "ab" * 16) -> Session:
    return Session(plane.address, NODE, {"do": "agent", "member": member, "node": "n1"}, 1 << 20)


USE = [0, 1, 0, 0, None, None]
BAD: dict[str, dict[str, Any]] = {
    "no time": {"use": []},
    "no numbers": {"at": 1, "use": [None] * 6},
    "too few": {"at": 1, "use": [1, 2, 3]},
    "text": {"at": 1, "use": ["a"] * 6},
    "nested": {"at": 1, "use": [[[1]], 2]},
    "a word": {"at": 1, "use": {"a": 1}},
    "negative": {"at": 1, "use": [0, 1, -1, 0, None, None]},
    "too large": {"at": 1, "use": [0, 1, 10**400, 0, None, None]},
    "no such number": {"at": 1, "use": [1 << 40, 1, 0, 0, None, None]},
    "half a number": {"at": 1, "use": [0.5, 1, 0, 0, None, None]},
    "join": {"at": 1, "join": [[0, "me"]]},
    "join twice": {"at": 1, "join": [[0, "me", "a", "a", None], [1, "me", "a", "a", None]]},
    "join far": {"at": 1, "join": [[1 << 40, "me", "a", "a", None]]},
    "join escapes": {"at": 1, "join": [[0, "me", "\x1b[2J", "a", None]]},
    "join no list": {"at": 1, "join": 7},
    "too long": {"at": 1, "more": "a" * (1 << 20)},
}


@pytest.mark.parametrize(
    "words",
    [pytest.param(each, marks=[pytest.mark.full] * (k % 4 > 0), id=name) for k, (name, each) in enumerate(BAD.items())],
)
def test_garbage_from_an_agent_ends_its_connection(plane: Plane, words: dict[str, Any]) -> None:
    line = raw_agent(plane)
    with contextlib.suppress(OSError):
        line.send(words)
    line.sock.settimeout(5)
    with contextlib.suppress(ConnectionResetError):
        while line.sock.recv(1 << 16):
            pass
    line.close()
    other = join(plane, "b")
    other.send({"at": 1.0, "used": [0, 0], "demand": [None, None]})
    assert "grant" in other.answer()
    other.close()


@pytest.mark.full
def test_an_agent_that_talks_without_pause(plane: Plane, caplog: pytest.LogCaptureFixture) -> None:
    line = raw_agent(plane)
    with contextlib.suppress(OSError):
        for k in range(300):
            line.send({"at": float(k), "use": []})
    until(lambda: any("too many messages" in record.message for record in caplog.records))
    line.close()


def test_use_of_jobs_that_are_not_there_changes_nothing(plane: Plane) -> None:
    line = raw_agent(plane)
    line.send({"at": 0.5, "join": [[3, "me", "a", "a", None]], "use": []})
    assert line.answer()["grants"][0] == 3
    line.send({"at": 1.0, "use": [3, 2, 5e6, 7.0, None, 1.0, 3, 1, 0, 0, 0, 0, 9, 1, 1e6, 0, None, None], "leave": [9]})
    until(lambda: [job["members"] for job in status(plane)["jobs"]] == [2])
    line.close()
    assert plane.book.members == 1


def test_limits_of_a_node() -> None:
    with (
        running(Rules((1e6, None), limits=Limits(node_jobs=2), secrets=RULES.secrets, agents=RULES.agents)) as plane,
        agent_running(plane.address, NODE, USERS) as node,
    ):
        until(lambda: node.joined)
        lines = [join(node, str(k), k) for k in range(2)]
        with pytest.raises(TurnedAwayError, match="there are 2 jobs on this node already"):
            join(node, "2", 2)
        lines[0].send({"bye": 1})
        until(lambda: len(node.book.jobs) == 1)
        lines += [join(node, "3", 3)]
        for line in lines:
            line.close()


def test_many_jobs_that_come_at_once_are_told_in_one_line(stepped: Stepped) -> None:
    node, now = stepped.node, stepped.now
    stepped.heard()
    for k in range(3):
        words = {"member": f"{k:032x}", "job": str(k), "name": "a", "node": "n", "holds": None}
        node.let_in(Mock(user="me", member=None, whom="somebody", answer={}), words, now[0])
        node._tell_plane()
    assert stepped.heard() == []
    now[0] += 0.02
    node._tell_plane()
    (said,) = stepped.heard()
    assert [entry[2] for entry in said["join"]] == ["0", "1", "2"]


def test_what_a_plane_does_not_take_at_once(stepped: Stepped) -> None:
    """It gets the rest as soon as it takes it, not with the next report."""
    node = stepped.node
    assert node._pipe is not None
    node._pipe.put(Word.WORDS, b"x" * (1 << 20))
    node._send()
    assert node._pipe.waiting
    for _ in range(1000):
        stepped.theirs.sock.recv(1 << 16)
        node.hear(0)
        if not node._pipe.waiting:
            break
    assert not node._pipe.waiting


def test_a_plane_that_takes_fewer_jobs_than_there_are(stepped: Stepped) -> None:
    """Those that it takes get numbers that it knows; and more again from a plane that takes more."""
    node = stepped.node
    for job in "bc":
        stepped.add(job)
    node.book.leave(stepped.member, 100.0, bye=True)
    stepped.report()
    node._lose("the test says so")
    stepped.connect(jobs=1)
    assert [entry[:3] for entry in stepped.report(0)["join"]] == [[0, "me", "b"]]
    assert not node._give_number(("me", "d"))
    node._lose("the test says so")
    stepped.connect(jobs=2)
    stepped.report(0)
    stepped.add("d")
    assert sorted(node._keys) == [0, 1]


def test_fewer_jobs_of_a_node_while_it_is_connected() -> None:
    """Rules that are read again: the one too many is turned away, the node goes on."""
    rules = replace(RULES, limits=Limits(node_jobs=2))
    read = [replace(RULES, limits=Limits(node_jobs=1))]
    with running(rules, read_rules=lambda: read[0]) as plane, agent_running(plane.address, NODE, USERS) as node:
        until(lambda: node.joined)
        lines = [join(node, str(k), k) for k in range(2)]
        plane.reload()
        with pytest.raises(TurnedAwayError, match="there are 1 jobs on this node already"):
            list(iter(lines[1].answer, None))
        until(lambda: sorted(node._keys.values()) == [("me", "0")] and list(node._known) == [0])
        until(lambda: plane._agents and not next(iter(plane._agents.values())).over)
        for line in lines:
            line.close()


@pytest.mark.full
def test_many_jobs_at_once(plane: Plane) -> None:
    """More than one line tells of: no job is lost, and each gets its own grant."""
    rules = Rules(
        (1e9, None), cycle_s=0.02, lease_s=2, secrets=RULES.secrets, agents=RULES.agents,
        jobs=(JobRule("7", guarantee=(5e8, 0)),), limits=Limits(node_jobs=64, jobs_per_user=100),
    )  # fmt: skip
    node_rules = Rules((None, None), secrets={"me": SECRET}, limits=Limits(node_jobs=64))
    with running(rules) as plane, agent_running(plane.address, NODE, node_rules) as node:
        until(lambda: node.joined)
        node._joins_per_line = 3
        lines = [join(node, str(k), k) for k in range(40)]
        assert len(plane.book.jobs) == 40
        node._lose("the test says so")  # everybody is told of again
        until(lambda: node._pipe is not None and len(node._known) == 40)
        until(lambda: node.book.granted["me", "7"].rates[0] == 5e8)
        assert plane.book.members == 40
        for line in lines:
            line.close()


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def behind(plane: Plane, tmp_path: Path) -> Iterator[tuple[int, list[Reader]]]:
    """A node agent in a process of its own, and jobs a and b behind it, which read all they may."""
    path = tmp_path / "agent"

    def start() -> int:
        child = os.fork()
        if not child:
            try:
                NodeAgent(PlaneAddress("", 0, str(path)), plane.address, NODE, Rules((None, None))).run()
            finally:
                os._exit(1)
        until(path.exists)
        return child

    child = start()
    made = [Reader(Agent(PlaneAddress("", 0, str(path)), who(job, secret=None))) for job in ("a", "b")]
    until(lambda: rates(*made) == [3.5, 6.5])
    children = [child]
    yield children, made  # type: ignore[misc]
    for each in made:
        each.close()
        assert each.longest <= STALL_S
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)


def test_a_dead_agent_is_a_lost_plane_to_its_jobs(plane: Plane, behind: Any, tmp_path: Path) -> None:
    """Safe rates when the lease ends; what they had is given on within a lease; a new agent continues."""
    (child,), readers = behind
    alone = Reader(Agent(plane.address, who("c")))
    os.kill(child, signal.SIGKILL)
    waited_s = until(lambda: rates(*readers) == [3, 1], 2)
    assert waited_s <= RULES.lease_s + 0.3
    assert waited_s + until(lambda: rates(alone) == [10], 2) <= 2 * RULES.lease_s
    with agent_running(plane.address, NODE, Rules((None, None)), PlaneAddress("", 0, str(tmp_path / "agent"))):
        assert until(lambda: rates(*readers)[0] >= 3 and rates(*readers)[1] >= 6, 5) <= RULES.lease_s + 0.5
        alone.close()
        until(lambda: rates(*readers) == [3.5, 6.5], 5)


@pytest.mark.full
def test_an_agent_that_is_stopped_and_goes_on(plane: Plane, behind: Any) -> None:
    (child,), readers = behind
    os.kill(child, signal.SIGSTOP)
    try:
        until(lambda: rates(*readers) == [3, 1], 2)
    finally:
        os.kill(child, signal.SIGCONT)
    until(lambda: rates(*readers) == [3.5, 6.5], 5)


def test_an_agent_that_is_started_again_at_once(plane: Plane, tmp_path: Path) -> None:
    """Nobody notices; the plane goes on with the same members."""
    address = PlaneAddress("", 0, str(tmp_path / "agent"))
    with agent_running(plane.address, NODE, Rules((None, None)), address):
        reader = Reader(Agent(address, who("b", secret=None)))
        until(lambda: rates(reader) == [10])
        rows = [member.row for job in plane.book.jobs.values() for member in job.members.values()]
    with agent_running(plane.address, NODE, Rules((None, None)), address) as node:
        until(lambda: node.joined and reader.agent.joined and status(plane)["agents"])
        until(lambda: rates(reader) == [10])
        assert [member.row for job in plane.book.jobs.values() for member in job.members.values()] == rows
        reader.close()


def test_a_dead_plane_is_felt_behind_an_agent_as_without_one(caplog: pytest.LogCaptureFixture) -> None:
    """Jobs keep what they have for one lease, then safe rates; a new plane learns what they hold."""
    with contextlib.ExitStack() as stack:
        with running(RULES) as plane:
            node = stack.enter_context(agent_running(plane.address, NODE, USERS))
            until(lambda: node.joined)
            readers = [Reader(Agent(node.address, who(job))) for job in ("a", "b")]
            until(lambda: rates(*readers) == [3.5, 6.5])
        begin = time.monotonic()
        assert rates(*readers) == [3.5, 6.5]
        until(lambda: rates(*readers) == [3, 1], 2)
        assert time.monotonic() - begin <= RULES.lease_s + 0.3
        until(lambda: not node.joined)
        assert all(each.agent.joined for each in readers), "the agent is there"
        assert not status(node)["joined"]
        with pytest.raises((OSError, TimeoutError)):  # as without a plane: the job goes on by itself
            join(node, "new")
        with running(RULES, plane.address):
            assert until(lambda: rates(*readers) == [3.5, 6.5], 5) <= RULES.lease_s + 0.5
            for each in readers:
                each.close()
                assert each.longest <= STALL_S
    assert sum("does not hear of the control plane" in record.message for record in caplog.records) == 1


def test_no_process_has_a_longer_lease_than_its_agent(plane: Plane) -> None:
    """So that it is not granted for two leases what a dead plane had granted, if its agent dies a little later."""
    now = [100.0]
    node = NodeAgent(LOCAL, plane.address, NODE, USERS, clock=lambda: now[0])
    node._take({"at": 0.0, "grants": [], "lease": 2.0, "every": 0.25})
    assert node._lease_s(100.0) == 2.0
    assert node._lease_s(101.5) == 0.5
    now[0] = 102.0
    node._go_on_safely()
    assert node._lease_s(102.0) == USERS.lease_s, "of safe rates, which need no plane"
    node.close()


class Stepped:
    """An agent of a plane that the test plays, with one job, on a clock that only the test moves. now : one number"""

    def __init__(self, rules: Rules = USERS) -> None:
        self.now = [100.0]
        self.node = NodeAgent(LOCAL, LOCAL, NODE, rules, clock=lambda: self.now[0])
        self.member = self.add("a")
        self.connect()

    def add(self, job: str) -> Member:
        """Its process is not connected."""
        member = self.node.book.join(Hello("me", job.encode() * 16, job, job, "n"), self.now[0])
        assert self.node._give_number(("me", job))
        return member

    def connect(self, **more: float) -> None:
        session, self.theirs = (Link(sock, 1 << 20) for sock in socket.socketpair())
        for link, side in ((session, frames.CLIENT), (self.theirs, frames.SERVER)):
            link.use(b"", b"", mine=side)
        session.first = {"lease": 2.0, "every": 0.25, "jobs": 4, "bytes": 20000, **more}  # type: ignore[attr-defined]
        self.node._take_session(session)
        self.node._tell_plane()

    def heard(self) -> list[Any]:
        """What has come from the agent."""
        self.theirs.sock.setblocking(False)
        self.theirs.receive()
        return [unpacked(body) for _, body in iter(self.theirs.next, None)]

    def report(self, which: int = -1) -> Any:
        """Of the lines that the agent has sent; it reports now."""
        self.node._report(self.now[0])
        return self.heard()[which]

    def close(self) -> None:
        self.node.close()
        self.theirs.sock.close()


@pytest.fixture
def stepped() -> Iterator[Stepped]:
    one = Stepped()
    yield one
    one.close()


def test_a_lease_counts_from_the_line_that_is_answered(stepped: Stepped) -> None:
    """And a plane that says nothing for a lease is lost."""
    now, node = stepped.now, stepped.node
    line = {"at": 0.0, "grants": [0, 5.0, None, 1.0, None], "lease": 2.0, "every": 0.25}
    now[0] = 101.0
    node._take(line)
    assert node._lease_s(101.0) == 1.0
    now[0] = 101.9
    assert node.every_s() == pytest.approx(0.1), "a cycle when the lease ends"
    now[0] = 102.0
    node.cycle()
    assert node.book.granted["me", "a"].rates[0] == 1.0, "its lease has ended"
    node._take(line)
    assert not node.joined, "it has been on the way for a lease"
    assert node.book.granted["me", "a"].rates[0] == 1.0
    node._take({**line, "at": 1e9})
    assert node._until == 104.0, "no line is of the future"
    now[0] = 103.9
    node.cycle()  # which reports, as the earlier ones do
    assert node._pipe is not None
    now[0] = 104.0
    node.cycle()
    assert node._pipe is None


def test_a_refused_job_is_told_of_again(stepped: Stepped) -> None:
    """Its process may have been away when the refusal came."""
    line = {"at": 0.0, "grants": [], "lease": 2.0, "every": 0.25}
    stepped.now[0] = 100.25
    assert "join" not in stepped.report()
    stepped.node._take({**line, "refused": [[0, "no"], [0, "no"], [7, "no"]]})
    assert stepped.report()["join"] == [[0, "me", "a", "a", None]]


def test_what_is_said_of_an_earlier_job_is_not_meant_for_the_next_one(stepped: Stepped) -> None:
    now, node = stepped.now, stepped.node
    line = {"at": 0.0, "grants": [0, 5.0, None, 1.0, None], "lease": 2.0, "every": 0.25}
    node.book.leave(stepped.member, now[0], bye=True)
    stepped.add("b")
    node._take(line)
    assert not node.book.granted, "the plane has not been told of it yet"
    now[0] = 100.25
    said = stepped.report()
    assert (said["at"], said["leave"], said["join"]) == (0.25, [0], [[0, "me", "b", "b", None]])
    node._take({**line, "refused": [[0, "no"]]})
    assert not node.book.granted
    assert list(node._known) == [0]
    node._take({**line, "at": 0.25})
    assert node.book.granted["me", "b"].rates == (5.0, None)


def test_a_plane_says_what_it_answers(plane: Plane) -> None:
    line = raw_agent(plane)
    line.send({"at": 0.5, "join": [[3, "me", "a", "a", None]], "use": []})
    assert line.answer()["at"] == 0.5
    line.send({"at": 1.25, "use": []})
    until(lambda: line.answer()["at"] == 1.25)
    line.close()


@pytest.mark.full
def test_a_plane_that_is_started_again_learns_what_jobs_hold() -> None:
    with contextlib.ExitStack() as stack:
        with running(RULES) as plane:
            node = stack.enter_context(agent_running(plane.address, NODE, USERS))
            until(lambda: node.joined)
            reader = Reader(Agent(node.address, who("c")))
            until(lambda: rates(reader) == [10])
        with running(RULES, plane.address) as plane:
            until(lambda: plane.book.jobs)
            assert node.joined
            end = time.monotonic() + 0.3
            while time.monotonic() < end:
                assert rates(reader) == [10], "for one lease, and then since it is alone"
                time.sleep(0.01)
            reader.close()


def test_a_job_that_is_killed_behind_an_agent(plane: Plane, node: NodeAgent) -> None:
    """Its share is given on within one lease."""
    b = Reader(Agent(node.address, who("b")))
    dead = join(node, "a")
    dead.send({"at": 1.0, "used": [0, 0], "demand": [None, None]})
    dead.send({"at": 1.3, "used": [3e6, 0], "demand": [None, None]})
    until(lambda: rates(b)[0] < 8)
    dead.close()
    assert until(lambda: rates(b) == [10]) <= RULES.lease_s + 0.4
    until(lambda: sorted(plane.book.jobs) == [("me", "b")])
    b.close()


@pytest.mark.full
def test_a_job_that_lies_behind_an_agent_takes_little(plane: Plane, node: NodeAgent) -> None:
    honest = Reader(Agent(plane.address, who("y")))
    liar = join(node, "x")
    until(lambda: liar.sock is not None and rates(honest)[0] > 4)
    end = time.monotonic() + 1.4
    at = 0.0
    while time.monotonic() < end:
        at += 0.05
        liar.send({"at": at, "used": [0, 0], "demand": [None, None]})
        liar.answer()
        time.sleep(0.02)
    assert rates(honest)[0] >= 10 * (1 - 1 / 16) - 0.2
    liar.close()
    honest.close()


@pytest.mark.parametrize(
    "said",
    [
        b'{"grants":[0,-1,1,1,1],"lease":1,"every":0.1}',
        *(
            pytest.param(each, marks=pytest.mark.full)
            for each in (
                b'{"grants":[0,0,0,0,0],"lease":1,"every":0.1}',
                b'{"grants":[0,1],"lease":1,"every":0.1}',
                b'{"grants":[0,1,1,1,1],"lease":1e9,"every":0.1}',
                b"{}",
                b"garbage",
            )
        ),
    ],
)
def test_a_plane_that_says_something_else(said: bytes, tmp_path: Path) -> None:
    """On a Unix socket of our own, so that it is believed to be one. The agent closes the connection and goes on."""
    path = str(tmp_path / "plane")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        closed = threading.Event()

        def plane() -> None:
            sock, _ = server.accept()
            with sock:
                link = played(sock)
                heard(link)
                words = {"lease": 1, "every": 0.1, "jobs": 4, "bytes": 20000}
                say(link, json.dumps(words).encode())
                heard(link)
                say(link, said)
                while sock.recv(1 << 16):
                    pass
                closed.set()

        thread = threading.Thread(target=plane, daemon=True)
        thread.start()
        with agent_running(PlaneAddress("", 0, path), NODE, USERS) as node:
            assert closed.wait(5)
            with pytest.raises(OSError):
                join(node)
        thread.join(5)


# -- the book of a node, on a clock that only the test moves -----------------------------------------------------------


def test_a_book_of_a_node_divides_what_was_granted() -> None:
    book = NodeBook(USERS, 0.0)
    one, two = (book.join(Hello("me", bytes([k]) * 16, "a", "a", "n"), 0.0) for k in (1, 2))
    book.share(0.0)
    assert one.rates == [float("inf")] * 2, "nobody has granted anything"
    book.granted["me", "a"] = Grant((8e6, None), (2e6, 30.0), 1.0, 0.25)
    for k in range(1, 9):
        for member, rate in ((one, 6e6), (two, 1e6)):
            book.report(member, Report(k / 4, (rate * k / 4, 0.0), (None, None)), k / 4)
        book.share(k / 4)
    assert one.rates[0] + two.rates[0] == pytest.approx(8e6)
    assert one.rates[0] > 5e6
    assert one.rates[1] == float("inf")
    assert one.safe[0] + two.safe[0] == pytest.approx(2e6)
    usage = book.usage([5], 2.0)
    assert usage.numbers.tolist() == [5]
    assert usage.processes.tolist() == [2]
    assert usage.used[0, 0] == pytest.approx(7e6 * 1.75)
    book.leave(two, 2.0, bye=True)
    assert book.usage([5], 2.0).used[0, 0] == pytest.approx(7e6 * 1.75), "what was used does not become less"
    book.leave(one, 2.0, bye=True)
    book.share(2.0)
    assert not book.granted


def test_many_processes_get_no_more_than_the_plane_has_granted() -> None:
    book = NodeBook(USERS, 0.0)
    members = [book.join(Hello("me", bytes([k]) * 16, "a", "a", "n"), 0.0) for k in range(64)]
    book.granted["me", "a"] = Grant((1e5, 10.0), (1e4, 5.0), 1.0, 0.25)
    other = [book.join(Hello("me", bytes([k]) * 16, "b", "b", "n"), 0.0) for k in range(2)]
    book.share(0.0)
    assert all(rate == float("inf") for member in other for rate in (*member.rates, *member.safe))
    for k, (rate, safe) in enumerate([(1e5, 1e4), (10, 5)]):
        assert sum(member.rates[k] for member in members) == pytest.approx(rate)
        assert sum(member.safe[k] for member in members) == pytest.approx(safe)
        assert min(member.rates[k] for member in members) > 0


def test_no_process_makes_its_agent_say_what_a_plane_refuses() -> None:
    """Sums of amounts that are good each: claims, use, what the processes of a job hold."""
    book = NodeBook(USERS, 0.0)
    holds = (1e18, 1e18)
    members = [book.join(Hello("me", bytes([k]) * 16, "a", "a", "n", holds), 0.0) for k in (1, 2)]
    for k, used in enumerate((0.0, 1e18, 0.0, 1e18), 1):  # as if its counter began anew, again and again
        for member in members:
            book.report(member, Report(k / 4, (used, used), (1e18, 1e18)), k / 4)
        book.settle(k / 4)
    usage = usage_of(unpacked(usage_message(1.0, book.usage([0], 1.0), {})), 1)
    assert usage.used.tolist() == [[1e18, 1e18]]
    assert usage.demand.tolist() == [[float("inf")] * 2]
    assert book.introduced(("me", "a"), 0, is_safe=False) == [0, "me", "a", "a", [1e18, 1e18]]
    book.granted["me", "a"] = Grant((2e18, None), (1.0, 1.0), 1.0, 0.25)
    assert book.introduced(("me", "a"), 0, is_safe=False)[4] == [1e18, None]


def test_an_agent_limits_its_users_too() -> None:
    book = NodeBook(Rules((None, None), limits=Limits(connections_per_user=1)), 0.0)
    book.join(Hello("me", b"1" * 16, "a", "a", "n"), 0.0)
    with pytest.raises(RefusedError, match="user me has 1 processes"):
        book.join(Hello("me", b"2" * 16, "a", "a", "n"), 0.0)
    book.join(Hello("you", b"2" * 16, "a", "a", "n"), 0.0)


def test_a_plane_clips_what_an_agent_says(plane: Plane) -> None:
    line = raw_agent(plane)
    line.send({"at": 0.5, "join": [[3, "me", "a", "a", [1e300, 10**400]]], "use": []})
    assert line.answer()["grants"][0] == 3
    line.send({"at": 1.0, "use": [3, 2, 2e18, 1e300, 2e18, 1e300]})
    until(lambda: [job["members"] for job in status(plane)["jobs"]] == [2])
    assert plane._agents
    line.close()


def test_an_address_that_is_taken(plane: Plane, node: NodeAgent) -> None:
    with pytest.raises(ParioError, match="cannot listen"):
        NodeAgent(node.address, plane.address, NODE, USERS)
    assert LOCAL.port == 0
