"""A plane and whoever talks to it over real sockets: jobs, strangers, liars, port scanners, other users."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from control_plane import LOCAL, SECRET, running, until, who

from pario.control import server as server_module
from pario.control.line import Line, TurnedAwayError, connected
from pario.control.plane import Plane
from pario.control.rules import JobRule, Limits, Rules
from pario.control.wire import Address, WireError, ask_proof
from pario.errors import OptionError, ParioError

RULES = Rules(
    (100e6, 1000.0),
    lease_s=0.6,
    cycle_s=0.02,
    jobs=(JobRule("a", guarantee=(30e6, 0.0)),),
    limits=Limits(connections=40, connections_per_user=8, jobs_per_user=4),
    secrets={"me": SECRET, "you": b"y" * 32},
)
MEMBER = "00" * 16


@pytest.fixture
def plane() -> Iterator[Plane]:
    with running(RULES) as one:
        yield one


def join(plane: Plane, job: str = "a", member: str = MEMBER, **more: Any) -> Line:
    words = {"do": "join", "member": member, "job": job, "name": job, "node": "n", "holds": None, **more}
    return Line(plane.address, who(job), words, 1 << 20)


def raw(plane: Plane) -> socket.socket:
    sock = socket.create_connection(plane.address.target, timeout=5)
    return sock


def closed(sock: socket.socket) -> bytes:
    """What comes before the end of the connection."""
    found = b""
    sock.settimeout(5)
    with contextlib.suppress(ConnectionResetError):
        while piece := sock.recv(1 << 16):
            found += piece
    sock.close()
    return found


def test_a_report_is_answered(plane: Plane) -> None:
    line = join(plane)
    assert line.first["grant"] == [30e6, 1000 / 16]
    assert line.first["lease"] == 0.6
    line.send({"at": 1.0, "used": [0, 0], "demand": [None, None]})
    grant = line.next()
    assert grant["grant"][0] == pytest.approx(100e6)
    assert grant["safe"] == pytest.approx([30e6, 50.0])
    line.send({"bye": 1})
    until(lambda: not plane.book.jobs)
    line.close()


def test_the_status_for_whoever_proves_who_it_is(plane: Plane) -> None:
    job = join(plane)
    line = connected(plane.address, who(), {"do": "status"}, 1 << 20)
    (found,) = line.first["status"]["jobs"]
    assert (found["user"], found["name"], found["members"]) == ("me", "a", 1)
    time.sleep(0.06)
    line.send({"ask": "status"})
    assert line.next()["status"]["capacity"] == [100e6, 1000.0]
    line.close()
    job.close()


# -- strangers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("user", "secret"), [("me", b"t" * 32), ("nobody", SECRET), ("you", SECRET)])
def test_a_wrong_token_is_refused_and_logged_once(
    plane: Plane, caplog: pytest.LogCaptureFixture, user: str, secret: bytes
) -> None:
    caplog.set_level(logging.WARNING)
    for _ in range(5):
        with pytest.raises(ParioError, match="refuses: no such user, or another token"):
            connected(plane.address, who(user=user, secret=secret), {"do": "status"}, 1 << 20)
    until(lambda: len(caplog.records) > 0)
    assert [record.message for record in caplog.records] == [
        "the control plane refused a connection from 127.0.0.1: no such user, or another token, or another address "
        "than this plane's (said once)"
    ]
    assert not plane.book.jobs


def test_a_relay_gains_nothing(plane: Plane) -> None:
    """Somebody who passes everything on, in both directions, from another address."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def relay() -> None:
            here, _ = server.accept()
            there = raw(plane)
            with here, there:
                while True:
                    for sock, other in ((here, there), (there, here)):
                        if select.select([sock], [], [], 0.01)[0]:
                            piece = sock.recv(1 << 16)
                            if not piece:
                                return
                            other.sendall(piece)

        threading.Thread(target=relay, daemon=True).start()
        with pytest.raises(ParioError, match="another address than this plane's"):
            connected(Address("127.0.0.1", server.getsockname()[1]), who(), {"do": "status"}, 1 << 20)


def test_what_was_overheard_helps_nobody(plane: Plane) -> None:
    sock = raw(plane)
    greeting = json.loads(sock.makefile().readline())
    number = "11" * 32
    name = f"127.0.0.1:{plane.address.port}".encode()
    mac = ask_proof(SECRET, "me", name, bytes.fromhex(greeting["number"]), bytes.fromhex(number)).hex()
    hello = json.dumps({"user": "me", "number": number, "proof": mac, "do": "status"}).encode() + b"\n"
    sock.sendall(hello)
    assert b"status" in sock.recv(1 << 16)
    again = raw(plane)
    again.sendall(hello)
    assert b"refused" in closed(again)
    sock.close()


def test_a_plane_that_does_not_know_the_token() -> None:
    """An impostor, whose refusal or grant is worth nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def impostor() -> None:
            for _ in range(2):
                sock, _ = server.accept()
                with sock, sock.makefile("rb") as file:
                    sock.sendall(b'{"pario-control":1,"number":"' + b"00" * 32 + b'"}\n')
                    file.readline()
                    sock.sendall(b'{"proof":"' + b"00" * 32 + b'","grant":[1,1],"safe":[1,1],"lease":9,"every":1}\n')

        threading.Thread(target=impostor, daemon=True).start()
        address = Address("127.0.0.1", server.getsockname()[1])
        with pytest.raises(ParioError, match="does not know the token"):
            connected(address, who(), {"do": "join"}, 1 << 20)
        with pytest.raises(WireError, match="there is no token to know it by"):
            Line(address, who(secret=None), {"do": "join"}, 1 << 20)


GARBAGE = {
    "nothing": b"",
    "http": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) * 2 + b"\n",
    "no object": b"[1]\n",
    "deep": b"[" * 4000 + b"\n",
    "no line": b"a" * 5000,
    "endless": b"a" * (1 << 20),
    "huge number": b'{"user":"me","number":' + b"9" * 4000 + b"}\n",
    "not a number": b'{"user":NaN}\n',
    "no text": b'{"user":["me"],"number":"00"}\n',
    "escapes": b'{"user":"\\u001b[2J","number":"' + b"00" * 32 + b'"}\n',
    "no number": b'{"user":"me","number":"zz","proof":"zz"}\n',
    "proof no text": b'{"user":"me","number":"' + b"00" * 32 + b'","proof":7}\n',
    "proof no hex": b'{"user":"me","number":"' + b"00" * 32 + b'","proof":"xyz"}\n',
    "surrogate": b'{"user":"\\ud800","number":"' + b"00" * 32 + b'","proof":""}\n',
}


@pytest.mark.parametrize("said", GARBAGE.values(), ids=GARBAGE)
def test_strangers_are_sent_away_and_keep_nobody_out(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(server_module, "_PROVE_S", 0.2)
    sock = raw(plane)
    with contextlib.suppress(OSError):  # it may close before all is said
        sock.sendall(said)
    line = join(plane)
    assert b"grant" not in closed(sock)
    line.send({"at": 1.0, "used": [0, 0], "demand": [None, None]})
    assert "grant" in line.next()
    line.close()


def test_a_port_scan(plane: Plane, caplog: pytest.LogCaptureFixture) -> None:
    """Connections that end at once, by FIN and by RST, and more silent ones than there is room for."""
    caplog.set_level(logging.WARNING)
    for k in range(50):
        sock = raw(plane)
        if k % 2:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
    silent = [raw(plane) for _ in range(100)]
    line = join(plane)
    assert "grant" in line.first
    assert len(plane._strangers) <= server_module._MOST_STRANGERS
    for sock in silent:
        sock.close()
    line.close()
    until(lambda: not plane._clients)
    assert len(caplog.records) <= 3


# -- clients that know the token ---------------------------------------------------------------------------------------


BAD = {
    "no report": {},
    "negative": {"at": 1, "used": [-1, 0], "demand": [None, None]},
    "true": {"at": 1, "used": [True, 0], "demand": [None, None]},
    "too much": {"at": 1, "used": [1e19, 0], "demand": [None, None]},
    "whole number without end": {"at": 1, "used": [10**400, 0], "demand": [None, None]},
    "text": {"at": 1, "used": ["1", 0], "demand": [None, None]},
    "three": {"at": 1, "used": [1, 2, 3], "demand": [None, None]},
    "demand": {"at": 1, "used": [1, 2], "demand": [[], None]},
}


@pytest.mark.parametrize("words", BAD.values(), ids=BAD)
def test_a_report_that_is_none_ends_the_connection(plane: Plane, words: dict[str, Any]) -> None:
    line = join(plane)
    line.send(words)
    assert b'"refused":' in closed(line.sock)
    assert "grant" in join(plane, member="01" * 16).first
    line.close()


def test_a_line_that_is_too_long(plane: Plane, caplog: pytest.LogCaptureFixture) -> None:
    line = join(plane)
    with contextlib.suppress(OSError):
        line.send({"at": 1.0, "used": [0, 0], "demand": [None, None], "more": "a" * 5000})
    with contextlib.suppress(OSError):
        closed(line.sock)
    until(lambda: any("a line of more than 4,096 bytes" in record.message for record in caplog.records))


def test_one_that_reports_without_pause(plane: Plane, caplog: pytest.LogCaptureFixture) -> None:
    line, good = join(plane), join(plane, "b", "01" * 16)
    with contextlib.suppress(OSError):
        for k in range(2000):
            line.send({"at": float(k), "used": [0, 0], "demand": [None, None]})
    until(lambda: any("too many messages" in record.message for record in caplog.records))
    good.send({"at": 1.0, "used": [0, 0], "demand": [None, None]})
    assert "grant" in good.next()
    for each in (line, good):
        each.close()


def test_one_that_takes_nothing_is_given_up(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_MOST_WAITING", 1000)
    line = join(plane)
    client = next(iter(plane.by_row.values()))
    client.send = lambda: client.waiting  # type: ignore[method-assign]  # as if the system took nothing
    k = 0.0
    while not client.over:
        k += 1
        assert k < 2000
        with contextlib.suppress(OSError):
            line.send({"at": k, "used": [0, 0], "demand": [None, None]})
        time.sleep(0.012)
    assert len(plane.book.jobs) == 1, "until its lease ends"
    line.close()


def test_limits(plane: Plane) -> None:
    lines = [join(plane, str(k), f"{k:032x}") for k in range(4)]
    with pytest.raises(TurnedAwayError, match="user me has 4 jobs already"):
        join(plane, "5", "05" * 16)
    lines += [join(plane, "0", f"{k:032x}") for k in range(10, 14)]
    with pytest.raises(TurnedAwayError, match="user me has 8 connections already"):
        join(plane, "0", "05" * 16)
    for line in lines:
        line.close()


def test_a_connection_of_the_same_process_replaces_the_earlier_one(plane: Plane) -> None:
    first = join(plane)
    second = join(plane)
    assert closed(first.sock) == b""
    second.send({"at": 1.0, "used": [0, 0], "demand": [None, None]})
    assert "grant" in second.next()
    assert plane.book.members == 1
    second.close()


def test_nobody_takes_over_another_users_job(plane: Plane) -> None:
    mine = join(plane)
    words = {"do": "join", "member": MEMBER, "job": "a", "name": "a", "node": "n", "holds": None}
    yours = Line(plane.address, who(user="you", secret=b"y" * 32), words, 1 << 20)
    assert len(plane.book.jobs) == 2
    mine.send({"at": 1.0, "used": [0, 0], "demand": [None, None]})
    assert "grant" in mine.next()
    for line in (mine, yours):
        line.close()


# -- Unix sockets ------------------------------------------------------------------------------------------------------


def test_on_a_unix_socket_the_system_says_who_it_is(tmp_path: Path) -> None:
    address = Address("", 0, str(tmp_path / "plane"))
    with running(RULES, address) as plane:
        line = Line(plane.address, who(user="anybody", secret=None), {"do": "status"}, 1 << 20)
        assert "status" in line.first
        line.close()
    assert not (tmp_path / "plane").exists()


@pytest.mark.parametrize("user", ["me", "root"])
def test_on_a_unix_socket_nobody_is_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: str) -> None:
    """The connection is another system user's than the plane's."""
    monkeypatch.setattr(server_module, "peer_uid", lambda sock: 54321)
    address = Address("", 0, str(tmp_path / "plane"))
    with running(RULES, address) as plane:
        with pytest.raises(TurnedAwayError, match=f"system user 54321 is not user {user}"):
            Line(plane.address, who(user=user, secret=SECRET), {"do": "status"}, 1 << 20)
        Line(plane.address, who(user="54321", secret=None), {"do": "status"}, 1 << 20).close()


def test_a_dead_planes_socket_is_taken_over(tmp_path: Path) -> None:
    address = Address("", 0, str(tmp_path / "plane"))
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(address.path)
        dead.listen()
        with pytest.raises(ParioError, match="cannot listen"):
            Plane(address, RULES)
    with running(RULES, address), pytest.raises(ParioError, match="cannot listen"):
        Plane(address, RULES)
    (tmp_path / "plane").write_text("not a socket")
    with pytest.raises(ParioError, match="cannot listen"):
        Plane(address, RULES)
    assert (tmp_path / "plane").read_text() == "not a socket"


# -- where it listens, and its rules -----------------------------------------------------------------------------------


def test_it_listens_at_one_interface() -> None:
    with pytest.raises(OptionError, match="one interface"):
        Plane(Address("0.0.0.0", 0), RULES)
    with pytest.raises(ParioError, match=r"cannot listen at 192\.0\.2\.1:1"):
        Plane(Address("192.0.2.1", 1), RULES)
    with running(RULES) as plane, pytest.raises(ParioError, match="Another plane may run there"):
        Plane(plane.address, RULES)


def test_rules_are_read_again(caplog: pytest.LogCaptureFixture) -> None:
    told: list[Rules] = []

    def again() -> Rules:
        if not told:
            raise OptionError("they are wrong")
        return told[0]

    with running(RULES, read_rules=again) as plane:
        line = join(plane)
        other = Line(plane.address, who(user="you", secret=b"y" * 32), {"do": "status"}, 1 << 20)
        plane.reload()
        until(lambda: any("keeps its rules: they are wrong" in record.message for record in caplog.records))
        told.append(Rules((10e6, None), lease_s=0.6, cycle_s=0.02, secrets={"me": SECRET}))
        plane.reload()
        while line.next()["grant"] != [10e6, None]:
            pass
        assert closed(other.sock) == b"", "its user is gone"
        line.close()


def test_it_tells_its_state(tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []
    with running(RULES, tell=told.append) as plane:
        until(lambda: told)
        line = join(plane)
        until(lambda: plane.cycles > 3)
        line.close()
    assert told[0]["policy"] == "max-min"


def test_a_state_that_cannot_be_told_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def refused(state: dict[str, Any]) -> None:
        raise ParioError("the disk is full")

    with running(RULES, tell=refused) as plane:
        until(lambda: caplog.records)
        line = join(plane)
        assert "grant" in line.first
        line.close()
    assert caplog.records[0].message == "the control plane cannot tell its state: the disk is full (said once)"


def test_a_users_other_token_is_another_one() -> None:
    """After SIGHUP connections that the old one has opened end."""
    with running(RULES, read_rules=lambda: replace(RULES, secrets={"me": b"n" * 32})) as plane:
        line = join(plane)
        plane.reload()
        closed(line.sock)
        with pytest.raises(TurnedAwayError):
            join(plane)


def test_nothing_is_left_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with running(RULES, LOCAL) as plane:
            line = join(plane)
            line.close()
    assert len(os.listdir("/proc/self/fd")) <= before
