"""A plane and whoever talks to it over real sockets: jobs, strangers, liars, port scanners, other users."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from control_plane import LOCAL, SECRET, heard, played, running, say, until, who

from pario.errors import OptionError, ParioError
from pario.plane import joining
from pario.plane.plane import Plane, listen
from pario.plane.rules import JobRule, Limits, Rules
from pario.plane.session import Session, connected
from pario.plane.words import PlaneAddress, packed
from pario.wire import frames
from pario.wire import server as server_module
from pario.wire.frames import TurnedAwayError, WireError, Word

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


def join(plane: Plane, job: str = "a", member: str = MEMBER, **more: Any) -> Session:
    words = {"do": "join", "member": member, "job": job, "name": job, "node": "n", **more}
    end = time.monotonic() + 10
    while True:
        try:
            return Session(plane.address, who(job), words, 1 << 20)
        except TimeoutError:  # on a busy machine an agent has to try again, too
            if time.monotonic() > end:
                raise


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
    assert line.first["grant"] == pytest.approx([100e6, 1000.0]), "nobody else is there"
    assert line.first["lease"] == 0.6
    line.send({"at": 1.0, "used": [0, 0], "demand": [None, None]})
    grant = line.answer()
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
    assert line.answer()["status"]["capacity"] == [100e6, 1000.0]
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
        "than this plane's (said once in 10 minutes)"
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
            connected(PlaneAddress("127.0.0.1", server.getsockname()[1]), who(), {"do": "status"}, 1 << 20)


def test_what_was_overheard_helps_nobody(plane: Plane) -> None:
    sock = raw(plane)
    greeting = frames.exactly(sock, 40, time.monotonic() + 5)
    name = f"127.0.0.1:{plane.address.port}".encode()
    agreed = frames.agreed_on(b"\2me", name, greeting[8:], b"1" * 32)
    hello = frames.GREETING + b"1" * 32 + b"\2me" + frames.proof(SECRET, frames.CLIENT, agreed)
    sock.sendall(hello)
    assert frames.exactly(sock, 32, time.monotonic() + 5) == frames.proof(SECRET, frames.SERVER, agreed)
    again = raw(plane)
    again.sendall(hello)
    assert b"no such user" in closed(again)
    sock.close()


@pytest.mark.parametrize("how", ["changed", "another kind", "no sum", "said again", "behind the greeting"])
def test_frames_that_somebody_on_the_way_has_made(plane: Plane, how: str) -> None:
    line = join(plane)
    report = packed({"at": 1.0, "used": [0, 0], "demand": [None, None]})
    line.put(Word.WORDS, report)
    frame = line._waiting
    if how == "said again":
        line.sock.sendall(2 * frame)
    elif how == "changed":
        line.sock.sendall(frame.replace(b"1.0", b"9.0"))
    elif how == "another kind":
        line.sock.sendall(frame[:4] + bytes([frame[4] ^ 1]) + frame[5:])
    elif how == "no sum":
        line.sock.sendall(frames.HEAD.pack(frames.MAGIC, Word.WORDS, len(report), 0) + report)
    else:
        line.close()
        sock = raw(plane)
        number = frames.exactly(sock, 40, time.monotonic() + 5)[8:]
        agreed = frames.agreed_on(b"\2me", f"127.0.0.1:{plane.address.port}".encode(), number, bytes(32))
        sock.sendall(frames.GREETING + bytes(32) + b"\2me" + frames.proof(SECRET, frames.CLIENT, agreed) + frame)
        assert b"changed on its way" in closed(sock)
        return
    assert b"changed on its way" in closed(line.sock)
    line.close()


def test_a_grant_that_somebody_on_the_way_has_made() -> None:
    """He passes on what he cannot change, and changes what he can."""
    with running(RULES) as plane:
        here, there = socket.socketpair()
        line = join(plane)
        line.send({"at": 1.0, "used": [0, 0], "demand": [None, None]})
        piece = line.sock.recv(1 << 16)
        assert b'"grant":[' in piece
        there.sendall(piece.replace(b'"grant":[', b'"grant":[9', 1))
        here.settimeout(5)
        real, line.sock = line.sock, here
        with pytest.raises(WireError, match="changed on its way"):
            line.answer()
        for each in (real, here, there):
            each.close()


def test_what_comes_together_with_the_first_answer_is_kept(tmp_path: Path) -> None:
    """On a Unix socket of our own, so that it is believed to be a plane."""
    path = str(tmp_path / "plane")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()

        def plane() -> None:
            sock, _ = server.accept()
            with sock:
                link = played(sock)
                heard(link)
                say(link, packed({"first": 1}), packed({"second": 2}), packed({"third": 3}))
                sock.recv(1)

        threading.Thread(target=plane, daemon=True).start()
        line = Session(PlaneAddress("", 0, path), who(secret=None), {"do": "join"}, 1 << 20)
        assert line.first == {"first": 1}
        assert line.answer() == {"second": 2}
        assert line.answer() == {"third": 3}
        line.close()


def test_a_plane_that_does_not_know_the_token() -> None:
    """An impostor, whose refusal or grant is worth nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def impostor() -> None:
            for answer in (frames.KNOWN, b"1" * 32):
                sock, _ = server.accept()
                with sock:
                    say(played(sock, answer), b'{"grant":[1,1],"safe":[1,1],"lease":9,"every":1}')
                    sock.recv(1)

        threading.Thread(target=impostor, daemon=True).start()
        address = PlaneAddress("127.0.0.1", server.getsockname()[1])
        with pytest.raises(ParioError, match="does not know the secret"):
            connected(address, who(), {"do": "join"}, 1 << 20)
        with pytest.raises(WireError, match="there is no secret to know it by"):
            Session(address, who(secret=None), {"do": "join"}, 1 << 20)


GARBAGE = {
    "nothing": b"",
    "http": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) * 2 + b"\n",
    "endless": b"a" * (1 << 20),
    "an object": b'{"user":"me"}\n',
    "half a greeting": frames.GREETING + bytes(20),
    "half a name": frames.GREETING + bytes(32) + b"\xffme",
    "no user": frames.GREETING + bytes(33 + 32),
    "no proof": frames.GREETING + bytes(32) + b"\2me",
    "a wrong proof": frames.GREETING + bytes(32) + b"\2me" + bytes(32),
    "escapes": frames.GREETING + bytes(32) + b"\4\x1b[2J" + bytes(32),
    "no text": frames.GREETING + bytes(32) + b"\2\xff\xfe" + bytes(32),
    "another version": b"pario w2" + bytes(100),
    "a frame": frames.HEAD.pack(frames.MAGIC, Word.WORDS, 1 << 40, 0) + bytes(100),
}
#: of one that knows the token
WRONG = {
    "no object": b"[1]",
    "deep": b"[" * 4000,
    "no JSON": b"a" * 4000,
    "huge number": b'{"do":"join","member":' + b"9" * 4000 + b"}",
    "not a number": b'{"do":NaN}',
    "no text": b'{"do":["join"],"member":"00"}',
    "escapes": b'{"do":"join","member":"' + b"00" * 16 + b'","job":"\\u001b[2J","name":"a","node":"n"}',
    "no member": b'{"do":"join","job":"a","name":"a","node":"n"}',
    "long member": b'{"do":"join","member":"' + b"0" * 200 + b'","job":"a","name":"a","node":"n"}',
    "surrogate": b'{"do":"join","member":"' + b"00" * 16 + b'","job":"\\ud800","name":"a","node":"n"}',
    "nothing": b"",
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
    assert "grant" in line.answer()
    line.close()


@pytest.mark.parametrize("said", WRONG.values(), ids=WRONG)
def test_first_words_that_are_none(plane: Plane, said: bytes) -> None:
    line = connected(plane.address, who(), {"do": "status"}, 1 << 20)
    line.close()
    with socket.create_connection(plane.address.target, timeout=5) as sock:
        link = frames.Link(sock, 1 << 20)
        link.greet("me", SECRET, time.monotonic() + 5)
        say(link, said)
        with pytest.raises(TurnedAwayError):
            heard(link)
    assert not plane.book.jobs


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
    assert len(plane._strangers) <= server_module.MOST_STRANGERS
    for sock in silent:
        sock.close()
    line.close()
    until(lambda: not plane.links)
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
    with pytest.raises(TurnedAwayError):
        list(iter(line.answer, None))
    assert "grant" in join(plane, member="01" * 16).first
    line.close()


def test_a_message_that_is_too_long(plane: Plane, caplog: pytest.LogCaptureFixture) -> None:
    line = join(plane)
    with contextlib.suppress(OSError):
        line.send({"at": 1.0, "used": [0, 0], "demand": [None, None], "more": "a" * 5000})
    with contextlib.suppress(OSError):
        closed(line.sock)
    until(lambda: any("of which 4,096 are allowed" in record.message for record in caplog.records))


def test_one_that_reports_without_pause(plane: Plane, caplog: pytest.LogCaptureFixture) -> None:
    line, good = join(plane), join(plane, "b", "01" * 16)
    with contextlib.suppress(OSError):
        for k in range(2000):
            line.send({"at": float(k), "used": [0, 0], "demand": [None, None]})
    until(lambda: any("too many messages" in record.message for record in caplog.records))
    good.send({"at": 1.0, "used": [0, 0], "demand": [None, None]})
    assert "grant" in good.answer()
    for each in (line, good):
        each.close()


def test_one_that_takes_nothing_is_given_up(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module.Server, "most_waiting", 1000)
    line = join(plane)
    client = next(iter(plane.by_row.values()))
    client.flush = lambda: client.waiting  # type: ignore[method-assign]  # as if the system took nothing
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
    with pytest.raises(TurnedAwayError, match="user me has 8 processes already"):
        join(plane, "0", "05" * 16)
    for line in lines:
        line.close()


def proven(plane: Plane) -> frames.Link:
    """A connection of "you" that says nothing."""
    link = frames.Link(raw(plane), 1 << 20)
    link.greet("you", b"y" * 32, time.monotonic() + 5)
    return link


@pytest.mark.parametrize("asks", [True, False])
def test_who_only_asks_or_says_nothing_keeps_no_job_out(plane: Plane, asks: bool) -> None:
    """There is room for 104 connections. Of the user who has most of those that have not joined the oldest goes."""
    mine = connected(plane.address, who(), {"do": "status"}, 1 << 20)
    links = [proven(plane) for _ in range(0 if asks else 150)]
    asking = [
        Session(plane.address, who(user="you", secret=b"y" * 32), {"do": "status"}, 1 << 20)
        for _ in range(150 if asks else 0)
    ]
    line = join(plane, "b")
    line.send({"at": 1.0, "used": [0, 0], "demand": [None, None]})
    assert line.answer()["grant"][0] == pytest.approx(100e6)
    time.sleep(0.06)
    mine.send({"ask": "status"})
    assert len(mine.answer()["status"]["jobs"]) == 1, "another user's connection stays"
    assert len(plane.links) <= (16 + 2 if asks else 104)
    for each in (*links, *asking):
        each.sock.close()
    line.close()
    mine.close()


def test_messages_of_all_are_taken_in_turns() -> None:
    """One sends fifty at once; whoever comes then, or says something, waits for four of them."""
    plane = Plane(LOCAL, RULES)
    made: list[Session] = []
    thread = threading.Thread(target=lambda: made.extend(join(plane, job, f"{k:032x}") for k, job in enumerate("ab")))
    thread.start()
    while thread.is_alive():
        plane.hear(0.01)
        plane.cycle()
    loud, quiet = made
    order: list[str] = []
    took = plane.took

    def noted(link: Any, *rest: Any) -> bool:
        order.append(link.member.hello.name)
        return took(link, *rest)

    plane.took = noted  # type: ignore[method-assign]
    report = packed({"at": 1.0, "used": [0, 0], "demand": [None, None]})
    say(loud, *[report] * 50)
    say(quiet, report)
    new = raw(plane)
    plane.hear(1.0)
    plane.hear(0.0)
    assert order.index("b") <= 8
    assert len(plane._strangers) == 1
    for _ in range(60):
        plane.hear(0.0)
    assert order.count("a") == 50
    for each in (new, loud, quiet):
        each.close()
    plane.close()


def test_a_connection_of_the_same_process_replaces_the_earlier_one(plane: Plane) -> None:
    first = join(plane)
    second = join(plane)
    closed(first.sock)
    second.send({"at": 1.0, "used": [0, 0], "demand": [None, None]})
    assert "grant" in second.answer()
    assert plane.book.members == 1
    second.close()


def test_nobody_takes_over_another_users_job(plane: Plane) -> None:
    mine = join(plane)
    words = {"do": "join", "member": MEMBER, "job": "a", "name": "a", "node": "n"}
    yours = Session(plane.address, who(user="you", secret=b"y" * 32), words, 1 << 20)
    assert len(plane.book.jobs) == 2
    mine.send({"at": 1.0, "used": [0, 0], "demand": [None, None]})
    assert "grant" in mine.answer()
    for line in (mine, yours):
        line.close()


# -- Unix sockets ------------------------------------------------------------------------------------------------------


def test_on_a_unix_socket_the_system_says_who_it_is(tmp_path: Path) -> None:
    address = PlaneAddress("", 0, str(tmp_path / "plane"))
    with running(RULES, address) as plane:
        line = Session(plane.address, who(user="anybody", secret=None), {"do": "status"}, 1 << 20)
        assert "status" in line.first
        assert [link.user for link in plane.links] == [joining.user_name()], "whatever it calls itself"
        line.close()
    assert not (tmp_path / "plane").exists()


def test_one_person_has_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's: by number she has no other jobs, limits or rules."""
    monkeypatch.setattr(server_module, "peer_uid", lambda sock: 54321)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: SimpleNamespace(pw_name="anna"))
    rules = replace(RULES, jobs=(JobRule(user="anna", most=(5e6, None)),))
    with running(rules, PlaneAddress("", 0, str(tmp_path / "plane"))) as plane:

        def joined(user: str, k: int) -> Session:
            words = {"do": "join", "member": f"{k:032x}", "job": f"{k}", "name": "a", "node": "n"}
            return Session(plane.address, who(user=user, secret=None), words, 1 << 20)

        lines = [joined("anna" if k % 2 else "54321", k) for k in range(4)]
        assert {user for user, _ in plane.book.jobs} == {"anna"}
        assert all(line.first["grant"][0] <= 5e6 for line in lines)
        with pytest.raises(TurnedAwayError, match="user anna has 4 jobs already"):
            joined("54321", 5)
        for line in lines:
            line.close()


@pytest.mark.parametrize("user", ["me", "root"])
def test_on_a_unix_socket_nobody_is_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: str) -> None:
    """The connection is another system user's than the plane's."""
    monkeypatch.setattr(server_module, "peer_uid", lambda sock: 54321)
    address = PlaneAddress("", 0, str(tmp_path / "plane"))
    with running(RULES, address) as plane:
        with pytest.raises(TurnedAwayError, match=f"system user 54321 is not user {user}"):
            Session(plane.address, who(user=user, secret=SECRET), {"do": "status"}, 1 << 20)
        Session(plane.address, who(user="54321", secret=None), {"do": "status"}, 1 << 20).close()


def test_a_dead_planes_socket_is_taken_over(tmp_path: Path) -> None:
    address = PlaneAddress("", 0, str(tmp_path / "plane"))
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


def test_a_socket_has_its_mode_from_the_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody may connect, and nothing that takes the socket's place gets a mode."""
    address, victim = PlaneAddress("", 0, str(tmp_path / "plane")), tmp_path / "victim"
    victim.touch(0o600)
    before = os.umask(0o077)

    class Slow(socket.socket):
        def bind(self, path: str) -> None:  # type: ignore[override]
            super().bind(path)
            modes.append(stat.S_IMODE(os.stat(path).st_mode))
            os.unlink(path)
            os.symlink(victim, path)

    modes: list[int] = []
    try:
        monkeypatch.setattr("pario.plane.plane.socket.socket", Slow)
        listen(address).close()
        assert os.umask(0o077) == 0o077
    finally:
        os.umask(before)
    assert modes == [0o666]
    assert stat.S_IMODE(victim.stat().st_mode) == 0o600


# -- where it listens, and its rules -----------------------------------------------------------------------------------


def test_it_listens_at_one_interface() -> None:
    with pytest.raises(OptionError, match="one interface"):
        Plane(PlaneAddress("0.0.0.0", 0), RULES)
    with pytest.raises(ParioError, match=r"cannot listen at 192\.0\.2\.1:1"):
        Plane(PlaneAddress("192.0.2.1", 1), RULES)
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
        other = Session(plane.address, who(user="you", secret=b"y" * 32), {"do": "status"}, 1 << 20)
        plane.reload()
        until(lambda: any("keeps its rules: they are wrong" in record.message for record in caplog.records))
        told.append(Rules((10e6, None), lease_s=0.6, cycle_s=0.02, secrets={"me": SECRET}))
        plane.reload()
        while line.answer()["grant"] != [10e6, None]:
            pass
        closed(other.sock)  # its user is gone
        line.close()


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
