"""Frames out of pieces, their sums, and greetings that somebody on the way has made."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from control_plane import played
from hypothesis import given
from hypothesis import strategies as st

from pario.wire import frames
from pario.wire.frames import Link, Seal, TurnedAwayError, WireError, Word, agreed_on, proof

SECRET = b"s" * 32


def pair(most_bytes: int = 100) -> tuple[Link, Link]:
    """Both ends of a connection."""
    one, other = (Link(sock, most_bytes) for sock in socket.socketpair())
    one.use(SECRET, b"agreed", mine=frames.CLIENT)
    other.use(SECRET, b"agreed", mine=frames.SERVER)
    for each in (one, other):
        each.sock.setblocking(False)
    return one, other


@pytest.fixture
def links() -> Iterator[tuple[Link, Link]]:
    made = pair()
    yield made
    for each in made:
        each.sock.close()


@given(st.lists(st.tuples(st.integers(0, 128), st.binary(max_size=40)), max_size=8), st.data())
def test_frames_come_as_they_were_sent(said: list[tuple[int, bytes]], data: st.DataObject) -> None:
    one, other = pair()
    for each in said:
        one.put(*each)
    stream, at, found = one._waiting, 0, []
    while at < len(stream):
        n = data.draw(st.integers(1, 30))
        one.sock.send(stream[at : at + n])
        other.receive()
        found += list(iter(other.next, None))
        at += n
    assert found == said
    for each in (one, other):
        each.sock.close()


def test_no_frame_is_longer_than_allowed(links: tuple[Link, Link]) -> None:
    one, other = links
    one.put(7, b"x" * 100)
    one.put(7, b"x" * 101)
    assert one.flush() == 0
    other.receive()
    assert other.next() == (7, b"x" * 100)
    other.receive()
    with pytest.raises(WireError, match="a frame of 101 bytes, of which 100 are allowed"):
        other.next()


def test_a_long_frame_is_not_put_together_in_small_pieces() -> None:
    one, other = pair(1 << 20)
    one.put(7, b"x" * (1 << 20))
    pieces = 0
    while other.next() is None:
        one.flush()
        other.receive()
        pieces += 1
    assert pieces < 64
    for each in (one, other):
        each.sock.close()


def test_the_other_side_says_why_it_ends(links: tuple[Link, Link]) -> None:
    one, other = links
    one.put(Word.REFUSED, b"too many")
    one.flush()
    other.receive()
    with pytest.raises(TurnedAwayError, match="too many"):
        other.next()


def test_the_end_of_a_connection(links: tuple[Link, Link]) -> None:
    one, other = links
    other.receive()
    assert other.next() is None
    one.sock.close()
    with pytest.raises(OSError, match="closed"):
        other.receive()


def test_sums_differ_in_all_that_they_bind() -> None:
    """Secret, user, server, the random bytes of both, who speaks, and how many frames came before."""
    base = (b"\2me", b"host:1", b"1" * 32, b"2" * 32)
    changed = [(b"\3you", *base[1:]), (base[0], b"host:2", *base[2:]), (*base[:2], b"3" * 32, base[3]),
               (*base[:3], b"3" * 32), (b"\2me"[:2], b"ehost:1", *base[2:])]  # fmt: skip
    keys = [proof(SECRET, b"c", agreed_on(*base)), proof(SECRET, b"s", agreed_on(*base))]
    keys += [proof(b"t" * 32, b"c", agreed_on(*base))]
    keys += [proof(SECRET, b"c", agreed_on(*each)) for each in changed[:-1]]
    seals = [Seal(key) for key in keys]
    assert len({seal.of(b"{}", 1) for seal in seals} | {seals[0].of(b"{}", 1)}) == len(seals) + 1
    # No user's name runs into the server's: its length stands in front.
    assert agreed_on(b"\1m", b"ex", *base[2:]) != agreed_on(b"\2me", b"x", *base[2:])


def test_a_sum_in_one_piece_and_in_several() -> None:
    one, other = Seal(SECRET), Seal(SECRET)
    total = other.begin()
    for piece in (b"a", b"", b"bc"):
        total.update(piece)
    assert one.of(b"abc", 5) == other.end(5, 3, total.digest())


@pytest.mark.parametrize("drips", [b"", frames.GREETING, frames.GREETING + bytes(32)])
def test_an_impostor_that_drips_holds_a_client_for_no_longer_than_allowed(drips: bytes) -> None:
    """The whole greeting has one limit, however its bytes come."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def impostor() -> None:
            sock, _ = server.accept()
            with sock:
                sock.sendall(drips)
                while not over.is_set():
                    sock.send(frames.GREETING[:1])
                    time.sleep(0.05)

        thread = threading.Thread(target=impostor, daemon=True)
        thread.start()
        with socket.create_connection(server.getsockname()) as sock:
            sock.settimeout(5)
            begin = time.monotonic()
            with pytest.raises(OSError):
                Link(sock, 100).greet("me", SECRET, begin + 0.5)
            assert time.monotonic() - begin < 1.0
            over.set()
        thread.join(5)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (frames.KNOWN, "does not know the secret"),
        (b"1" * 32, "does not know the secret"),
        (frames.REFUSED, "closed"),
    ],
)
def test_an_answer_without_a_proof_is_worth_nothing(answer: bytes, why: str) -> None:
    """Over TCP the system knows nobody, whatever the client trusts."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def impostor() -> None:
            sock, _ = server.accept()
            played(sock, answer)
            sock.close()

        thread = threading.Thread(target=impostor, daemon=True)
        thread.start()
        with socket.create_connection(server.getsockname()) as sock:
            sock.settimeout(5)
            with pytest.raises(OSError, match=why):
                Link(sock, 100).greet("me", SECRET, time.monotonic() + 5, trusts_system=True)
        thread.join(5)
