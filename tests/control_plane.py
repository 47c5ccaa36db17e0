"""Control planes for tests: in a thread, or as a process of their own."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pario.plane.agent import Agent
from pario.plane.plane import Plane
from pario.plane.rules import Rules
from pario.plane.session import Who
from pario.plane.words import PlaneAddress
from pario.wire import frames
from pario.wire.frames import Link, Word

SECRET = b"s" * 32
LOCAL = PlaneAddress("127.0.0.1", 0)


def who(job: str = "a", user: str = "me", secret: bytes | None = SECRET) -> Who:
    return Who(user, secret, job, job, "node0")


@contextlib.contextmanager
def running(rules: Rules, address: PlaneAddress = LOCAL, **more: object) -> Iterator[Plane]:
    plane = Plane(address, rules, **more)  # type: ignore[arg-type]
    thread = threading.Thread(target=plane.run, daemon=True)
    thread.start()
    try:
        yield plane
    finally:
        plane.cancel()
        thread.join(5)
        assert not thread.is_alive()


def until(true: Callable[[], object], limit_s: float = 5.0) -> float:
    """Seconds until it was true, without those that the machine did not give to this process."""
    begin, lost = time.monotonic(), 0.0
    while not true():
        before = time.monotonic()
        assert before - begin - lost < limit_s, f"not within {limit_s} s"
        time.sleep(0.002)
        lost += max(0.0, time.monotonic() - before - 0.01)
    return time.monotonic() - begin - lost


class Reader:
    """A thread that reads without pause through an agent. nbytes : of a read"""

    def __init__(self, agent: Agent, nbytes: int = 10_000) -> None:
        self.agent, self._nbytes = agent, nbytes
        agent.hold()
        self._over = False
        self.longest = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over:
            begin = time.monotonic()
            self.agent.take(self._nbytes, 1)
            self.longest = max(self.longest, time.monotonic() - begin)

    def rate(self, seconds: float = 0.4) -> float:
        """Bytes per second, from now on."""
        before, begin = self.agent.bucket.used[0], time.monotonic()
        time.sleep(seconds)
        return (self.agent.bucket.used[0] - before) / (time.monotonic() - begin)

    def close(self) -> None:
        self._over = True
        self._thread.join(5)
        self.agent.release()
        assert not self._thread.is_alive()


class Process:
    """A plane as `python -m pario plane serve` starts it, always at the same address."""

    def __init__(self, folder: Path, rules: str) -> None:
        self.folder = folder
        (folder / "me.token").write_bytes(SECRET)
        (folder / "me.token").chmod(0o600)
        (folder / "rules.toml").write_text(rules)
        self.at = "127.0.0.1:0"
        self.start()

    def start(self) -> None:
        told = self.folder / "address"
        told.unlink(missing_ok=True)
        words = ["control", "--rules", str(self.folder / "rules.toml"), "--at", self.at, "--tell", str(told)]
        self._child = subprocess.Popen(
            [sys.executable, "-m", "pario", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        )
        until(lambda: told.exists() or self._child.poll() is not None, 30)
        assert told.exists(), self._child.communicate()[0]
        self.at = told.read_text().strip()
        host, _, port = self.at.rpartition(":")
        self.address = PlaneAddress(host, int(port))

    def signal(self, number: signal.Signals) -> None:
        self._child.send_signal(number)

    def kill(self) -> None:
        self._child.kill()
        self._child.communicate(timeout=10)

    def end(self) -> str:
        """As its user ends it; what it said."""
        self.signal(signal.SIGTERM)
        said, _ = self._child.communicate(timeout=10)
        assert self._child.returncode == 0, said
        return said


def played(sock: socket.socket, answer: bytes = frames.KNOWN) -> Link:
    """A plane that the test plays: the greeting of a connection. answer : in the place of a proof"""
    link = Link(sock, 1 << 20)
    sock.settimeout(5)
    sock.sendall(frames.GREETING + bytes(32))
    hello = frames.exactly(sock, len(frames.GREETING) + 33, time.monotonic() + 5)
    frames.exactly(sock, hello[-1] + frames.MAC_BYTES, time.monotonic() + 5)
    link.use(*frames.UNPROVEN, mine=frames.SERVER)
    sock.sendall(answer)
    return link


def say(link: Link, *messages: bytes) -> None:
    """All at once."""
    for each in messages:
        link.put(Word.WORDS, each)
    while link.flush():
        pass


def heard(link: Link) -> bytes:
    """The next message."""
    while (frame := link.next()) is None:
        link.receive()
    return frame[1]


class Wire:
    """A network between two Unix sockets that can be cut: then nothing is lost and nothing comes, as if a switch died.

    Everybody who passes is the same system user, which both ends see.
    """

    def __init__(self, path: Path, to: PlaneAddress) -> None:
        self.address = PlaneAddress("", 0, str(path))
        self._to = to
        self.cut = threading.Event()
        self._over = False
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen()
        self._server.settimeout(0.01)
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while not self._over:
            with contextlib.suppress(OSError):
                here, _ = self._server.accept()
                self._threads.append(threading.Thread(target=self._pass, args=(here,), daemon=True))
                self._threads[-1].start()

    def _pass(self, here: socket.socket) -> None:
        with here, socket.socket(socket.AF_UNIX) as there, contextlib.suppress(OSError):
            there.connect(self._to.target)
            while not self._over:
                for sock, other in ((here, there), (there, here)):
                    if not self.cut.is_set() and select.select([sock], [], [], 0.002)[0]:
                        piece = sock.recv(1 << 16)
                        if not piece:
                            return
                        other.sendall(piece)
                if self.cut.is_set():
                    time.sleep(0.002)

    def close(self) -> None:
        self._over = True
        for thread in self._threads:
            thread.join(5)
        self._server.close()
