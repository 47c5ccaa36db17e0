"""Requests between processes: what arrives is what was sent, and whoever does not know the secret gets nothing."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from bad_wire import Wire

from pario.comm.launcher import own_addresses
from pario.wire import frames
from pario.wire import server as server_module
from pario.wire.client import Address, Answer, Client, DamagedError
from pario.wire.frames import Part, TurnedAwayError
from pario.wire.server import SLOW, AnsweringServer, Guest, Reply

SECRET = b"s" * 32
DATA = np.random.default_rng(0).integers(0, 256, 3 << 20, dtype=np.uint8)


def echo(kind: int, body: bytes) -> Reply:
    return Reply(kind + 1, [Part(np.frombuffer(body, np.uint8))])


@pytest.fixture
def serve() -> Iterator[Callable[..., AnsweringServer]]:
    made: list[AnsweringServer] = []

    def start(answer: Callable[[int, memoryview], Reply] = echo, **more: int) -> AnsweringServer:
        limits = {"threads": 2, "most_bytes": 1 << 20, "most_links": 8, **more}
        made.append(AnsweringServer(SECRET, answer, limit_s=2.0, hosts=own_addresses(), **limits))  # type: ignore[arg-type]
        return made[-1]

    yield start
    for each in made:
        each.leave()


def ask(client: Client, kind: int, body: bytes) -> tuple[int, bytes]:
    def take(answer: Answer) -> tuple[int, bytes]:
        out = np.empty(answer.nbytes, np.uint8)
        answer.read([memoryview(out[: len(out) // 2]), memoryview(out[len(out) // 2 :])])
        return answer.kind, out.tobytes()

    return client.ask(kind, body, take)


Asked = Callable[[Client, int, bytes], "Future[tuple[int, bytes]]"]


@pytest.fixture
def asked() -> Iterator[Asked]:
    """Requests under way, by threads."""
    with ThreadPoolExecutor(2) as threads:
        yield partial(threads.submit, ask)


@pytest.fixture(params=["on this machine", "over the network"])
def reached(request: pytest.FixtureRequest) -> Callable[[Address], Address]:
    def there(address: Address) -> Address:
        if request.param == "on this machine":
            return address._replace(hosts=(), port=0)
        assert address.port, "this machine has no network interface"
        return address._replace(machine="another one")

    return there


def test_questions_and_answers(serve: Callable[..., AnsweringServer], reached: Callable[[Address], Address]) -> None:
    client = Client(reached(serve().address), SECRET, 5.0)
    for nbytes in (0, 1, 1000, 1 << 20):
        for kind in (1, 7):
            assert ask(client, kind, DATA[:nbytes].tobytes()) == (kind + 1, DATA[:nbytes].tobytes())
    client.close()
    with pytest.raises(OSError, match="closed"):
        client.call(1, b"")


def test_long_answers_in_pieces(
    serve: Callable[..., AnsweringServer], reached: Callable[[Address], Address], tmp_path: Path
) -> None:
    """Short pieces of memory, more of them than one system call takes, and a file."""
    DATA.tofile(tmp_path / "data")
    with open(tmp_path / "data", "rb") as file:
        pieces = [Part(DATA[k : k + 7]) for k in range(0, 21000, 7)]
        parts = [*pieces, Part(DATA[21000:], file.fileno(), 21000)]
        client = Client(reached(serve(lambda kind, _: Reply(kind, parts)).address), SECRET, 5.0)
        for _ in range(3):
            assert ask(client, 1, b"")[1] == DATA.tobytes()
    client.close()


def test_threads_have_requests_under_way_at_the_same_time(
    serve: Callable[..., AnsweringServer], asked: Asked
) -> None:
    both = threading.Barrier(2, timeout=10)

    def answer(kind: int, body: bytes) -> Reply:
        both.wait()
        return echo(kind, body)

    client = Client(serve(answer).address, SECRET, 5.0)
    first, second = asked(client, 1, b"a"), asked(client, 2, b"b")
    assert [first.result(10), second.result(10)] == [(2, b"a"), (3, b"b")]
    client.close()


def test_a_wrong_secret(serve: Callable[..., AnsweringServer], caplog: pytest.LogCaptureFixture) -> None:
    server = serve()
    for _ in range(3):
        with pytest.raises(TurnedAwayError, match="does not know the secret"):
            Client(server.address._replace(hosts=(), port=0), b"t" * 32, 5.0).call(1, b"")
    assert caplog.text.count("does not know the secret") == 1
    assert ask(Client(server.address, SECRET, 5.0), 1, b"x") == (2, b"x")


def test_a_server_that_does_not_know_the_secret() -> None:
    other = AnsweringServer(b"t" * 32, echo, threads=1, most_bytes=10, most_links=8, limit_s=2.0, hosts=())
    with pytest.raises(TurnedAwayError):
        Client(other.address, SECRET, 5.0).call(1, b"")
    other.leave()


def connect(server: AnsweringServer) -> socket.socket:
    there = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    there.settimeout(10)
    there.connect(f"\0{server.address.local}")
    return there


def is_closed(there: socket.socket) -> bool:
    try:
        while there.recv(4096):
            pass
    except ConnectionError:
        return True
    return True


def test_what_was_overheard_helps_nobody(serve: Callable[..., AnsweringServer]) -> None:
    server = serve()
    there = connect(server)
    end = time.monotonic() + 10
    theirs = frames.exactly(there, 40, end)[8:]
    agreed = frames.agreed_on(b"\0", server.address.local.encode(), theirs, bytes(32))
    proof = frames.GREETING + bytes(33) + frames.proof(SECRET, frames.CLIENT, agreed)
    there.sendall(proof)
    assert len(frames.exactly(there, 32, end)) == 32, "it is let in"
    again = connect(server)
    frames.exactly(again, 40, end)
    again.sendall(proof)
    assert frames.exactly(again, 32, end) == frames.REFUSED
    assert is_closed(again)


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n" * 10, b"\0" * 73, frames.GREETING + bytes(65)])
def test_strangers(serve: Callable[..., AnsweringServer], said: bytes) -> None:
    server = serve()
    there = connect(server)
    there.sendall(said)
    assert is_closed(there)
    assert ask(Client(server.address, SECRET, 5.0), 1, b"x") == (2, b"x")


def test_strangers_that_say_nothing(
    serve: Callable[..., AnsweringServer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "_PROVE_S", 0.3)
    for most in ("MOST_STRANGERS", "_MOST_OURS"):
        monkeypatch.setattr(server_module, most, 4)
    server = serve(most_links=6)
    silent = [connect(server) for _ in range(40)]
    assert ask(Client(server.address, SECRET, 5.0), 1, b"x") == (2, b"x"), "they keep nobody out"
    for each in silent:
        assert is_closed(each)
    assert "did not prove itself" in caplog.text
    assert "too many" in caplog.text


def test_a_flood_of_strangers_keeps_nobody_out(
    serve: Callable[..., AnsweringServer], caplog: pytest.LogCaptureFixture
) -> None:
    """Ten thousand connections, of which the last five hundred stay; meanwhile somebody asks, each time anew."""
    server = serve()
    local = server.address._replace(hosts=(), port=0)
    stay: list[socket.socket] = []
    for k in range(10_000):
        there = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        there.settimeout(10)
        there.connect(f"\0{local.local}")
        stay.append(there)
        if len(stay) > 500:
            stay.pop(0).close()
        if k % 1000 == 999:
            client = Client(local, SECRET, 5.0)
            assert ask(client, 1, b"x") == (2, b"x")
            client.close()
    assert len(server._strangers) <= 501
    assert len(caplog.records) <= 3
    for there in stay:
        there.close()


def test_too_many_who_know_the_secret(serve: Callable[..., AnsweringServer], asked: Asked) -> None:
    """Idle connections make room, and are made again; one that is served does not."""
    begun, go_on = threading.Semaphore(0), threading.Event()

    def answer(kind: int, body: bytes) -> Reply:
        if kind == 5:
            begun.release()
            go_on.wait(10)
        return echo(kind, body)

    server = serve(answer, most_links=2)
    clients = [Client(server.address, SECRET, 5.0) for _ in range(3)]
    for _ in range(2):
        for each in clients:
            assert ask(each, 1, b"x") == (2, b"x")
    assert len(server.links) == 2
    waits = [asked(each, 5, b"") for each in clients[:2]]
    assert all(begun.acquire(timeout=10) for _ in waits)
    with pytest.raises(OSError, match=r"closed|reset|pipe"):
        ask(clients[2], 1, b"x")
    go_on.set()
    assert [each.result(10) for each in waits] == [(6, b"")] * 2


def test_a_server_for_another_name(serve: Callable[..., AnsweringServer]) -> None:
    """Who can bind an address of a server that has gone cannot pass on what it is told to another server."""
    first, second = serve(), serve()
    there = second.address._replace(local=first.address.local, machine="another one")
    with pytest.raises(TurnedAwayError):
        Client(there, SECRET, 5.0).call(1, b"")


def test_what_changes_before_it_is_sent(serve: Callable[..., AnsweringServer]) -> None:
    parts = [Part(DATA[:1000]), Part(DATA[1000:2000], still=lambda: False)]
    with pytest.raises(DamagedError):
        ask(Client(serve(lambda kind, _: Reply(kind, parts)).address, SECRET, 5.0), 1, b"")


def test_slow_requests_do_not_keep_others_waiting(serve: Callable[..., AnsweringServer], asked: Asked) -> None:
    go_on = threading.Event()

    def answer(kind: int, body: bytes) -> Reply:
        if kind == 5:
            go_on.wait(10)
        return echo(kind, body)

    limits: Any = {"threads": 1, "most_bytes": 10, "most_links": 8, "limit_s": 2.0}
    server = AnsweringServer(SECRET, answer, hosts=(), sorts={5: SLOW}, **limits)
    client = Client(server.address, SECRET, 5.0)
    slow = asked(client, 5, b"a")
    assert ask(client, 1, b"b") == (2, b"b")
    go_on.set()
    assert slow.result(10) == (6, b"a")
    server.leave()


def test_a_request_that_has_waited_too_long_is_not_answered(asked: Asked, caplog: pytest.LogCaptureFixture) -> None:
    """Its client asks again."""
    caplog.set_level(logging.DEBUG)
    begun = threading.Event()
    answered: list[int] = []

    def answer(kind: int, body: bytes) -> Reply:
        begun.set()
        end = time.monotonic() + 10
        while kind == 0 and "has given up" not in caplog.text and time.monotonic() < end and len(server.links) < 2:
            time.sleep(0.01)
        time.sleep(0.5 if kind == 0 else 0.0)
        answered.append(kind)
        return echo(kind, body)

    server = AnsweringServer(SECRET, answer, threads=1, most_bytes=10, most_links=8, limit_s=0.3, hosts=())
    clients = [Client(server.address, SECRET, 5.0) for _ in range(2)]
    first = asked(clients[0], 0, b"")
    assert begun.wait(10)
    second = asked(clients[1], 1, b"")
    assert [first.result(10), second.result(10)] == [(1, b""), (2, b"")]
    assert answered == [0, 1]
    assert "the client has given up" in caplog.text
    server.leave()


def test_more_clients_at_once_than_stand_in_line(serve: Callable[..., AnsweringServer]) -> None:
    server = serve(most_links=1000)
    address = server.address._replace(hosts=(), port=0)
    clients = [Client(address, SECRET, 5.0) for _ in range(200)]
    right: list[bool] = []
    threads = [
        threading.Thread(target=lambda each=each: right.append(ask(each, 1, b"x") == (2, b"x")))  # type: ignore[misc]
        for each in clients
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert right == [True] * 200
    for each in clients:
        each.close()


def test_the_garbage_collector_may_close_a_client_at_any_time(serve: Callable[..., AnsweringServer]) -> None:
    client = Client(serve().address, SECRET, 5.0)
    ask(client, 1, b"x")
    with client._lock:  # as in the middle of `ask`
        client.close()
    with pytest.raises(OSError, match="closed"):
        client.call(1, b"")


@pytest.mark.parametrize("what", ["too long", "no message", "damaged", "a sum that needs no secret", "said again"])
def test_messages_that_are_none(serve: Callable[..., AnsweringServer], what: str) -> None:
    server = serve(most_bytes=1000)
    client = Client(server.address, SECRET, 5.0)
    assert ask(client, 1, b"x" * 1000) == (2, b"x" * 1000)
    (link,) = client._idle
    there = link.sock
    if what == "too long":
        there.sendall(frames.HEAD.pack(frames.MAGIC, 1, 1001, 0))
    elif what == "no message":
        there.sendall(frames.HEAD.pack(b"none", 1, 10, 0))
    elif what == "damaged":
        there.sendall(frames.HEAD.pack(frames.MAGIC, 1, 3, 12345) + b"abc")
    elif what == "a sum that needs no secret":
        there.sendall(frames.HEAD.pack(frames.MAGIC, 1, 3, xxhash.xxh3_64_intdigest(b"abc", seed=1)) + b"abc")
    else:
        message = frames.HEAD.pack(frames.MAGIC, 1, 3, link.mine.of(b"abc", 1)) + b"abc"
        there.sendall(message)
        assert frames.exactly(there, frames.HEAD.size + 3, time.monotonic() + 10).endswith(b"abc")
        there.sendall(message)
    assert is_closed(there)
    assert ask(client, 1, b"y") == (2, b"y"), "on a new connection"


def test_one_connection_does_not_end_the_others(
    serve: Callable[..., AnsweringServer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve()
    client = Client(server.address, SECRET, 5.0)
    ask(client, 1, b"x")
    with monkeypatch.context() as patch:

        def fails(self: object) -> bool:
            raise MemoryError("no memory")

        patch.setattr(Guest, "receive", fails)
        (link,) = client._idle
        link.sock.sendall(b"y")
        end = time.monotonic() + 10
        while "no memory" not in caplog.text:
            assert time.monotonic() < end
            time.sleep(0.01)
    assert ask(Client(server.address, SECRET, 5.0), 1, b"z") == (2, b"z")


def test_a_client_hears_the_end_when_the_system_sends_nothing(
    serve: Callable[..., AnsweringServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it waits for the rest, though its connection lives."""
    server = serve()
    client = Client(server.address, SECRET, 5.0)
    ask(client, 1, b"x")
    (link,) = client._idle

    def fails(self: object) -> int:
        raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))

    monkeypatch.setattr(Guest, "flush", fails)
    (there,) = server.links
    server._go_on(there)
    link.sock.settimeout(10.0)
    assert link.sock.recv(1) == b""


def test_an_answer_that_fails(serve: Callable[..., AnsweringServer]) -> None:
    def answer(kind: int, body: bytes) -> Reply:
        if kind == 13:
            raise ValueError("no")
        return echo(kind, body)

    client = Client(serve(answer).address, SECRET, 5.0)
    with pytest.raises(OSError, match="closed"):
        ask(client, 13, b"")
    assert ask(client, 1, b"x") == (2, b"x")


@pytest.mark.parametrize("at", range(0, 200, 7))
def test_every_bit_that_is_damaged_is_noticed(serve: Callable[..., AnsweringServer], at: int) -> None:
    """Of the greeting, the proof, the head and the body."""
    client = Client(Wire(serve().address, {at}).address, SECRET, 1.0)
    body, into = DATA[:150].tobytes(), np.empty(150, np.uint8)
    try:
        kind, _ = client.call(1, body, into)
        right = kind == 2 and into.tobytes() == body
    except OSError:
        right = False
    assert not right or at >= 72 + 24 + 150, "behind the answer"


@pytest.mark.parametrize(("drips", "what"), [(0, "the greeting"), (72, "the head"), (96, "the answer")])
def test_one_that_sends_byte_by_byte_holds_nobody(
    serve: Callable[..., AnsweringServer], drips: int, what: str
) -> None:
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        ask(Client(Wire(serve().address, drips=drips).address, SECRET, 0.3), 1, bytes(200))
    assert time.monotonic() - begin < 5, what


def test_a_server_that_stops_in_the_middle(serve: Callable[..., AnsweringServer]) -> None:
    stopped = threading.Event()

    def answer(kind: int, body: bytes) -> Reply:
        stopped.wait(10)
        return echo(kind, body)

    server = serve(answer)
    client = Client(server.address, SECRET, 0.5)
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        ask(client, 1, b"x")
    assert time.monotonic() - begin >= 0.5
    threading.Timer(0.2, lambda: server.leave(0)).start()
    with pytest.raises(OSError, match=r"closed|reset|refused"):
        ask(Client(server.address, SECRET, 10.0), 1, b"x")
    stopped.set()


def test_an_idle_server_takes_no_time(serve: Callable[..., AnsweringServer]) -> None:
    server = serve()
    ask(Client(server.address, SECRET, 5.0), 1, b"x")
    begin = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - begin < 0.01 + 0.05  # of this process's other threads


def test_a_fork_keeps_no_connection_open(serve: Callable[..., AnsweringServer]) -> None:
    server = serve()
    client = Client(server.address, SECRET, 5.0)
    ask(client, 1, b"x")
    there = client._idle[0].sock
    end, go = os.pipe()
    begun, begin = os.pipe()
    pid = os.fork()
    if pid == 0:  # neither the parent's server nor its connections go on in here
        os.close(go)
        os.write(begin, b".")
        os.read(end, 1)
        os._exit(0)
    os.close(end)
    try:
        os.read(begun, 1)
        server.leave()
        assert is_closed(there)
        with pytest.raises(OSError, match=r"refused|No such"):
            connect(server)
    finally:
        os.close(go)
        os.waitpid(pid, 0)
        os.close(begun)
        os.close(begin)


def test_a_client_in_a_fork_has_connections_of_its_own(serve: Callable[..., AnsweringServer]) -> None:
    client = Client(serve().address, SECRET, 5.0)
    ask(client, 1, b"x")
    pid = os.fork()
    if pid == 0:
        right = False
        with contextlib.suppress(BaseException):
            right = all(ask(client, 1, b"child") == (2, b"child") for _ in range(50))
        os._exit(0 if right else 1)
    for _ in range(50):
        assert ask(client, 1, b"parent") == (2, b"parent")
    assert os.waitpid(pid, 0)[1] == 0


def test_the_interface_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARIO_INTERFACE", "lo")
    assert own_addresses() == ["127.0.0.1"]
    monkeypatch.setenv("PARIO_INTERFACE", "no such one")
    assert own_addresses() == []


def test_nothing_is_said_when_all_is_well(
    serve: Callable[..., AnsweringServer], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "pario"):
        server = serve()
        client = Client(server.address, SECRET, 5.0)
        ask(client, 1, b"x")
        client.close()
        server.leave()
    assert caplog.text == ""
