"""Who still lives: processes of this node by /proc, other nodes' by a connection that the kernel closes."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from pario.comm import alive
from pario.comm.alive import Watch, myself
from pario.comm.lifeline import Lifeline
from pario.errors import DeadRankError
from pario.wire.client import Address

#: the other end: connects, says so, and does what it is told
LEAF = """
import json, sys, time, os
from pario.comm.lifeline import Lifeline
from pario.wire.client import Address
where, secret = json.loads(sys.argv[1])
lifeline = Lifeline([0, 5])
lifeline.connect(Address(*where), bytes.fromhex(secret), 1)
print(int(lifeline._star is not None), flush=True)
"""


def until(call: Callable[[], object], wanted: object, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while call() != wanted:
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture
def hub() -> Iterator[tuple[Lifeline, Callable[..., subprocess.Popen]]]:
    """(lifeline of rank 0, leaf(code) -> its process)."""
    lifeline = Lifeline([0, 5])
    told = lifeline.listen()
    assert told is not None
    lifeline.connect(*told, 0)
    started = []

    def leaf(code: str, secret: bytes = told[1]) -> subprocess.Popen:
        words = [sys.executable, "-c", LEAF + code, json.dumps([told[0], secret.hex()])]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield lifeline, leaf
    for process in started:
        process.kill()
        process.communicate()
    assert lifeline._star is not None
    lifeline._star.leave()


def said(process: subprocess.Popen) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_killed_process_is_noticed(hub) -> None:
    lifeline, leaf = hub
    process = leaf("time.sleep(60)")
    assert said(process) == "1"
    assert lifeline.gone() is None
    time.sleep(0.3)
    assert lifeline.gone() is None
    process.send_signal(signal.SIGKILL)
    assert until(lifeline.gone, 5)
    assert lifeline.gone() == 5  # again and again
    with pytest.raises(DeadRankError, match=r"another node is gone.*\[rank 5\]"):
        Watch([myself()], [0], 0, lifeline).check()


def test_its_children_do_not_hide_that(hub) -> None:
    """A forked child has a copy of the connection."""
    lifeline, leaf = hub
    process = leaf("pid = os.fork()\nif pid: print(pid, flush=True)\ntime.sleep(60)")
    assert said(process) == "1"
    child = int(said(process))
    try:
        process.send_signal(signal.SIGKILL)
        assert until(lifeline.gone, 5)
    finally:
        os.kill(child, signal.SIGKILL)


def test_an_end_in_order_is_no_death(hub) -> None:
    lifeline, leaf = hub
    process = leaf("")
    assert said(process) == "1"
    process.wait(20)
    assert not until(lifeline.gone, 5, 0.5)
    assert lifeline.gone() is None


def test_all_nodes_hear_of_it(hub) -> None:
    """Of the death of rank 0, too."""
    lifeline, leaf = hub
    process = leaf("while lifeline.gone() is None: time.sleep(0.01)\nprint(lifeline.gone(), flush=True)")
    assert said(process) == "1"
    assert until(lambda: len(lifeline._hub._seats), 2)
    lifeline._hub.cancel()
    assert said(process) == "0"


def test_strangers_are_sent_away(hub) -> None:
    """Another machine's, who must know the secret; and they keep nobody from the door."""
    lifeline, leaf = hub
    far = "where[:2] = '', ''\nother = Lifeline([0, 5])\nother.connect(Address(*where), bytes.fromhex(secret), 1)\n"
    process = leaf(far + "print(int(other._star is not None), flush=True)\ntime.sleep(60)", secret=bytes(32))
    assert said(process) == "1", "of this machine and user"
    assert said(process) == "0"
    process.kill()
    assert until(lifeline.gone, 5)


def test_a_wrong_address_is_nobody() -> None:
    """Something else listens there and hangs up: rank 0 is not taken for dead."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        lifeline = Lifeline([0, 3])
        thread = threading.Thread(target=lambda: server.accept()[0].close())
        thread.start()
        lifeline.connect(Address("", "", ("127.0.0.1",), server.getsockname()[1]), bytes(32), 1)
        thread.join()
        assert lifeline.gone() is None


def test_too_many_nodes_leave_the_script_its_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20, 1000))
    assert Lifeline(range(11)).listen() is None
    lifeline = Lifeline(range(10))
    assert lifeline.listen() is not None
    assert lifeline._hub is not None
    lifeline._hub.cancel()


def test_neighbours() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        with open(f"/proc/{process.pid}/stat") as file:
            start = int(file.read().rpartition(")")[2].split()[19])
        me = myself()
        watch = Watch([me, [process.pid, start, me[2]]], [10, 11], 0)
        watch.check()
        Watch([me, [process.pid, start + 1, me[2] + 1]], [10, 11], 0).check()  # another namespace: not to be known
        with pytest.raises(DeadRankError):
            Watch([me, [process.pid, start + 1, me[2]]], [10, 11], 0).check()  # the number went to somebody else
    finally:
        process.kill()
        process.wait()
    with pytest.raises(DeadRankError, match=rf"process {process.pid}\) \[rank 11\]"):
        watch.check()
    watch.check(lambda node_rank: node_rank == 1)  # it had left


def test_neighbours_who_look_together_see_everybody(monkeypatch) -> None:
    """One look of one rank checks the start times of some of 100 neighbours, one look of all those of all."""
    asked = []
    monkeypatch.setattr(alive, "_started", lambda pid: asked.append(pid) or 7)
    monkeypatch.setattr(alive, "_exists", lambda pid: True)
    people = [[pid, 7, 1] for pid in range(1000, 1100)]
    for me in range(100):
        before = len(asked)
        Watch(people, range(100), me).check()
        assert len(asked) - before == alive.STATS_PER_LOOK
    assert set(asked) == set(range(1000, 1100))
