"""A job and its plane: the plane is killed, stopped, started again; the job is forked, refused, left alone. In all of
it the job reads on."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from control_plane import LOCAL, SECRET, Process, Reader, Wire, heard, played, running, say, until, who

from pario.errors import OptionError
from pario.plane import agent as agent_module
from pario.plane import joining
from pario.plane import session as session_module
from pario.plane.agent import Agent
from pario.plane.rules import JobRule, Rules
from pario.plane.session import Session
from pario.plane.words import PlaneAddress
from pario.wire.frames import CLIENT, UNPROVEN, Link

RULES = Rules(
    (10e6, None),
    lease_s=0.6,
    cycle_s=0.02,
    jobs=(JobRule("a", guarantee=(3e6, 0.0)), JobRule("b", guarantee=(6e6, 0.0), safe=(1e6, None))),
    secrets={"me": SECRET},
)
#: the same for a plane that is a process
TEXT = """
lease_s = 0.6
cycle_s = 0.02
[store]
bytes_per_s = "10 MB"
[[user]]
name = "me"
token = "me.token"
[[job]]
name = "a"
bytes_per_s = "3 MB"
[[job]]
name = "b"
bytes_per_s = "6 MB"
safe_bytes_per_s = "1 MB"
"""
#: no read may take longer, whatever becomes of the plane
STALL_S = 1.0


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    made = Process(tmp_path, TEXT)
    yield made
    made.kill()


@pytest.fixture
def readers(process: Process) -> Iterator[list[Reader]]:
    """Jobs a and b, which read all they may."""
    made = [Reader(Agent(process.address, who(job))) for job in ("a", "b")]
    until(lambda: [round(each.agent.bucket.rates[0] or 0) for each in made] == [3_500_000, 6_500_000])
    yield made
    for each in made:
        each.close()
        assert each.longest <= STALL_S
    assert not [thread for thread in threading.enumerate() if thread.name == "pario-control"]


def rates(readers: list[Reader]) -> list[float | None]:
    return [each.agent.bucket.rates[0] for each in readers]


def test_two_jobs_read_what_they_are_granted(readers: list[Reader]) -> None:
    before, begin = [each.agent.bucket.used[0] for each in readers], time.monotonic()
    time.sleep(0.5)
    over = time.monotonic() - begin
    found = [(each.agent.bucket.used[0] - was) / over for each, was in zip(readers, before, strict=True)]
    assert found == pytest.approx([3.5e6, 6.5e6], rel=0.2)


def test_a_plane_that_is_killed(
    process: Process, readers: list[Reader], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_module, "_MOST_PAUSE_S", 0.3)
    process.kill()
    assert rates(readers) == pytest.approx([3.5e6, 6.5e6]), "a lease outlives the plane"
    assert until(lambda: rates(readers) == [3e6, 1e6], 2) <= RULES.lease_s + 0.2
    assert readers[1].rate() == pytest.approx(1e6, rel=0.3)
    messages = [record.message for record in caplog.records]
    assert messages.count("without the control plane this process reads at most 1 MB/s") == 1
    process.start()
    begin = time.monotonic()
    until(lambda: min(rates(readers)) >= 3e6 and rates(readers)[1] >= 6e6, 5)  # type: ignore[type-var, operator]
    until(lambda: rates(readers) == pytest.approx([3.5e6, 6.5e6]), 5)
    # The longest pause between two tries, and a lease in which the plane learns.
    assert time.monotonic() - begin <= agent_module._MOST_PAUSE_S + RULES.lease_s + 0.5


def test_a_plane_that_is_stopped_and_goes_on(process: Process, readers: list[Reader]) -> None:
    process.signal(signal.SIGSTOP)
    try:
        until(lambda: rates(readers) == [3e6, 1e6], 2)
        assert readers[0].rate() == pytest.approx(3e6, rel=0.3)
    finally:
        process.signal(signal.SIGCONT)
    until(lambda: rates(readers) == pytest.approx([3.5e6, 6.5e6]), 5)


def test_a_plane_that_is_started_again_at_once(process: Process, readers: list[Reader]) -> None:
    """Nobody notices: leases last longer than that."""
    assert "has ended" in process.end()
    process.start()
    until(lambda: all(each.agent.joined for each in readers))
    until(lambda: rates(readers) == pytest.approx([3.5e6, 6.5e6]), 5)


def test_a_plane_that_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No end of a connection, just silence; then everything that was sent meanwhile arrives."""
    monkeypatch.setattr(session_module, "_ANSWER_S", 0.3)
    monkeypatch.setattr(agent_module, "_MOST_PAUSE_S", 0.3)
    with contextlib.ExitStack() as stack:
        plane = stack.enter_context(running(RULES, PlaneAddress("", 0, str(tmp_path / "plane"))))
        wire = Wire(tmp_path / "wire", plane.address)
        stack.callback(wire.close)
        made = [Reader(Agent(wire.address, who(job, secret=None))) for job in ("a", "b")]
        until(lambda: rates(made) == pytest.approx([3.5e6, 6.5e6]))
        wire.cut.set()
        begin = time.monotonic()
        assert until(lambda: rates(made) == [3e6, 1e6], 2) <= RULES.lease_s + 0.4
        assert time.monotonic() - begin >= RULES.lease_s - 0.3
        wire.cut.clear()
        assert until(lambda: rates(made) == pytest.approx([3.5e6, 6.5e6]), 5) <= 2 * RULES.lease_s + 0.6
        for each in made:
            each.close()
            assert each.longest <= STALL_S


def test_a_job_that_is_killed_with_its_tokens() -> None:
    """Its share is given on within one lease."""
    with running(RULES) as plane:
        b = Reader(Agent(plane.address, who("b")))
        child = os.fork()
        if not child:
            Reader(Agent(plane.address, who("a")))
            time.sleep(60)
        try:
            until(lambda: len(plane.book.jobs) == 2)
            until(lambda: b.agent.bucket.rates[0] == pytest.approx(6.5e6))
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert until(lambda: b.agent.bucket.rates[0] == pytest.approx(10e6)) <= RULES.lease_s + 0.3
        b.close()


def test_without_a_plane_nothing_is_limited(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    agent = Agent(PlaneAddress("127.0.0.1", port), who())
    agent.hold()
    begin = time.monotonic()
    for _ in range(1000):
        agent.take(1 << 30, 1000)
    assert time.monotonic() - begin < 1.0
    until(lambda: caplog.records)
    agent.release()
    assert [record.message for record in caplog.records] == [
        f"the control plane at 127.0.0.1:{port} does not answer: [Errno 111] Connection refused"
    ]


def test_a_plane_that_says_nothing_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes connections, as a process that was stopped does."""
    monkeypatch.setattr(session_module, "_ANSWER_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        reader = Reader(Agent(PlaneAddress("127.0.0.1", server.getsockname()[1]), who()), 1 << 30)
        server.accept()
        time.sleep(0.2)
        reader.close()
        assert reader.longest < STALL_S


def test_a_refusal_is_logged_once_and_stops_nobody(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_module, "_REFUSED_S", 0.02)
    with running(RULES) as plane:
        reader = Reader(Agent(plane.address, who(secret=b"t" * 32)), 1 << 30)
        time.sleep(0.3)
        reader.close()
    refused = [record for record in caplog.records if "refuses this job" in record.message]
    assert len(refused) == 1
    assert refused[0].levelno == logging.ERROR
    assert reader.longest < STALL_S


@pytest.mark.parametrize(
    "words",
    [
        b'{"grant":[0,null],"safe":[1,1],"lease":1,"every":0.1}',
        b'{"grant":[1,null],"safe":[1,1],"lease":1e9,"every":0.1}',
        b'{"grant":[1,null],"safe":[1,1],"lease":1,"every":0}',
        b'{"grant":[1],"safe":[1,1],"lease":1,"every":0.1}',
        b'{"grant":["1",null],"safe":[1,1],"lease":1,"every":0.1}',
        b"{}",
    ],
)
def test_a_grant_that_is_none(tmp_path: Path, words: bytes) -> None:
    """On a Unix socket of our own, so that the plane is believed to be one."""
    path = str(tmp_path / "plane")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()

        def plane() -> None:
            sock, _ = server.accept()
            with sock:
                link = played(sock)
                heard(link)
                say(link, words)
                while sock.recv(1 << 16):
                    pass

        thread = threading.Thread(target=plane, daemon=True)
        thread.start()
        agent = Agent(PlaneAddress("", 0, path), who(secret=None))
        agent.hold()
        agent.take(1, 1)
        thread.join(5)
        assert not thread.is_alive(), "the agent closes the connection"
        assert agent.bucket.rates == (None, None)
        agent.release()


def test_small_demands_are_told_as_they_are() -> None:
    """A job that reads 0.5 of 10 MB/s leaves the rest to the other one."""
    with running(RULES) as plane:
        a = Reader(Agent(plane.address, who("a")))
        idle = Agent(plane.address, who("b"))
        idle.hold()
        idle.take(1, 1)
        until(lambda: a.agent.bucket.rates[0] == pytest.approx(10e6, rel=0.02))
        until(lambda: (idle.bucket.rates[0] or 0) >= 6e6)  # it may begin at once
        a.close()
        idle.release()
        until(lambda: not plane.book.jobs)


def test_a_forked_process_is_another_member() -> None:
    with running(RULES) as plane:
        agent = Agent(plane.address, who())
        agent.hold()
        agent.take(1, 1)
        until(lambda: agent.joined)
        child = os.fork()
        if not child:
            try:
                agent.take(1, 1)
                until(lambda: agent.joined)
                os._exit(0)
            finally:
                os._exit(1)
        until(lambda: plane.book.members == 2)
        assert os.waitpid(child, 0)[1] == 0
        assert len(plane.book.jobs) == 1
        time.sleep(0.1)
        assert agent.joined
        agent.release()


def test_closing_lets_everybody_go_on() -> None:
    with running(RULES) as plane:
        reader = Reader(Agent(plane.address, who()), 1000)
        until(lambda: reader.agent.joined)
        reader.agent.bucket.set_rates((1.0, None))
        time.sleep(0.05)
        reader.close()
        until(lambda: not plane.book.jobs)


def test_a_system_without_threads(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refused(*arguments: object, **more: object) -> None:
        raise OptionError("no more threads")

    monkeypatch.setattr(agent_module, "start_thread", refused)
    agent = Agent(LOCAL, who())
    agent.hold()
    agent.take(1 << 40, 1)
    agent.take(1 << 40, 1)
    assert [record.message for record in caplog.records] == ["this process reads without limits: no more threads"]
    agent.release()


# -- who a process is --------------------------------------------------------------------------------------------------


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    for name in list(os.environ):
        if name.startswith(("PARIO_", "SLURM", "PMI", "OMPI", "PBS", "LSB", "FLUX", "XDG")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(joining, "_agents", {})
    monkeypatch.setattr(joining, "_warned", set())
    return monkeypatch


def token(path: Path, mode: int = 0o600) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(SECRET)
    path.chmod(mode)


def test_without_the_variable_there_is_no_agent(environment: pytest.MonkeyPatch) -> None:
    with joining.store_agent() as agent:
        assert agent is None


def test_a_wrong_address_is_an_error(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("PARIO_CONTROL", "head")
    with pytest.raises(OptionError, match="PARIO_CONTROL: 'head' is no address"), joining.store_agent():
        pass


@pytest.mark.parametrize("mode", [None, 0o644])
def test_without_a_token_nothing_is_limited(
    environment: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int | None
) -> None:
    environment.setenv("PARIO_CONTROL", "head:7400")
    if mode is not None:
        token(tmp_path / ".config" / "pario" / "control.token", mode)
    for _ in range(2):
        with joining.store_agent() as agent:
            assert agent is None
    assert len(caplog.records) == 1
    assert "this process cannot join the control plane at head:7400: " in caplog.records[0].message


@pytest.mark.parametrize("with_token", [True, False])
def test_a_job_that_cannot_join_reads_at_the_rate_that_is_configured(
    environment: pytest.MonkeyPatch, tmp_path: Path, with_token: bool
) -> None:
    """There is no plane, or no token to join it with."""
    environment.setenv("PARIO_CONTROL", "127.0.0.1:1")
    environment.setenv("PARIO_CONTROL_SAFE", "50 MiB")
    if with_token:
        token(tmp_path / ".config" / "pario" / "control.token")
    with joining.store_agent() as agent:
        assert agent is not None
        agent.take(1, 1)
        time.sleep(0.05)
        assert agent.bucket.rates == (50 << 20, None)
        assert not agent.joined
    environment.setenv("PARIO_CONTROL_SAFE", "fast")
    with pytest.raises(OptionError, match="PARIO_CONTROL_SAFE must be a number"), joining.store_agent():
        pass


def test_one_agent_of_a_process(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment.setenv("PARIO_CONTROL", "127.0.0.1:1")
    environment.setenv("PARIO_CONTROL_TOKEN", str(tmp_path / "mine"))
    token(tmp_path / "mine")
    with joining.store_agent() as first, joining.store_agent() as second:
        assert first is second is not None
    with joining.store_agent() as third:
        assert third is not first, "the first one has ended"


def test_what_a_process_says_of_itself(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    token(tmp_path / ".config" / "pario" / "control.token")
    environment.setenv("SLURMD_NODENAME", "node7")
    for variables, job, name in [
        ({}, f"node7.{os.getpid()}", "pario"),
        ({"PMI_SIZE": "4"}, f"node7.{os.getppid()}", "pario"),
        ({"SLURM_JOB_ID": "12", "SLURM_JOB_NAME": "tr\x1bain"}, "12", "tr?ain"),
        ({"SLURM_STEP_ID": "3"}, "12.3", "tr?ain"),
        ({"PARIO_JOB": "mine"}, "mine 12", "mine"),
    ]:
        for key, value in variables.items():
            environment.setenv(key, value)
        found = joining.who(PlaneAddress("127.0.0.1", 1))
        assert (found.job, found.name, found.node, found.secret) == (job, name, "node7", SECRET)


def test_a_plane_that_takes_a_few_bytes_now_and_then_holds_nobody() -> None:
    here, there = socket.socketpair()
    over = threading.Event()

    def drips() -> None:
        while not over.wait(0.05):
            there.recv(16 << 10)

    session = Session.__new__(Session)
    Link.__init__(session, here, 1 << 20)
    session.use(*UNPROVEN, mine=CLIENT)
    here.settimeout(1.0)
    thread = threading.Thread(target=drips)
    thread.start()
    try:
        began = time.monotonic()
        with pytest.raises(TimeoutError, match="too slowly"):
            session.send({"job": "a" * (64 << 20)})
        assert time.monotonic() - began < 10
    finally:
        over.set()
        thread.join()
        here.close()
        there.close()
