"""The control plane's cycle: a thousand jobs with a connection each, and ten thousand behind node agents (a part of
benchmarks/control.py).

One process has all connections, the plane is another one. All report at once, four times a second. The processor time
of the plane per cycle holds all that it does for that: reports read, shares computed, grants sent. Beside it the time
from the first report to the last grant of a plane that computes as often as it can; the clients' side, in Python too,
is part of it.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.control_plane import SECRET, USER, plane, processor_s
from pario.plane.session import Session, Who
from pario.plane.words import PlaneAddress, Usage, usage_message

PERIOD_S = 0.25
#: jobs that one line tells of
_JOINS = 50
_RULES = 'lease_s = 10\ncycle_s = {}\n[store]\n{}\n[limits]\n{}\n[[job]]\nname = "1*"\nbytes_per_s = 2e5\n'


@dataclass(frozen=True)
class Load:
    """Who reports.

    store, limits : of the rules
    join : opens the connections
    tell : (connection, its number, number of the round): its report
    granted : reads what has come on a connection; whether all its jobs have grants
    """

    store: str
    limits: str
    join: Callable[[PlaneAddress], list[Session]]
    tell: Callable[[Session, int, int], None]
    granted: Callable[[Session], bool]


def clients(count: int) -> Load:
    """Every third one wants more than it gets, each time another one."""

    def join(address: PlaneAddress) -> list[Session]:
        words = {"do": "join", "node": "node", "holds": None}
        return [
            Session(
                address,
                Who(USER, SECRET, str(k), str(k), "node"),
                {**words, "member": f"{k:032x}", "job": str(k), "name": str(k)},
                1 << 16,
            )
            for k in range(count)
        ]

    def tell(line: Session, k: int, number: int) -> None:
        used = [1e6 * number * PERIOD_S, 10.0 * number * PERIOD_S]
        demand = [None if (k + number) % 3 == 0 else 1.25e6, 12.5]
        line.send({"at": number * PERIOD_S + 1e-3, "used": used, "demand": demand})

    limits = f"connections = {4 * count}\nconnections_per_user = {2 * count}\njobs_per_user = {2 * count}"
    return Load("bytes_per_s = 1e9\noperations_per_s = 1e5", limits, join, tell, lambda line: bool(line.come()))


def agents(nodes: int, jobs: int) -> Load:
    """The same of node agents. jobs : of each, whose reports are made up"""

    def join(address: PlaneAddress) -> list[Session]:
        lines = []
        nothing = Usage(*(np.zeros((0, *shape)) for shape in ((), (), (2,), (2,))))
        for node in range(nodes):
            words = {"do": "agent", "member": f"{node:032x}", "node": f"node{node}"}
            line = Session(address, Who(USER, SECRET, "-", "-", f"node{node}"), words, 16 << 20)
            for first in range(0, jobs, _JOINS):
                names = [f"{node * jobs + k}" for k in range(first, min(first + _JOINS, jobs))]
                joins = [[first + k, USER, name, name, None] for k, name in enumerate(names)]
                line.say(usage_message(0.0, nothing, {"join": joins}))
                while not line.come():
                    pass
            lines.append(line)
        return lines

    def tell(line: Session, node: int, number: int) -> None:
        which, seconds = np.arange(jobs), number * PERIOD_S
        demand = np.tile([1.25e6, 12.5], (jobs, 1))
        demand[(which + node + number) % 3 == 0, 0] = np.inf
        used = np.tile([1e6 * seconds, 10.0 * seconds], (jobs, 1))
        line.say(usage_message(seconds + 1e-3, Usage(which, np.ones(jobs, np.int64), used, demand), {}))

    def granted(line: Session) -> bool:
        return any(len(words["grants"]) == 5 * jobs for words in line.come())

    limits = f"connections = {4 * nodes}\njobs_per_user = {2 * nodes * jobs}"
    return Load("bytes_per_s = 10e9\noperations_per_s = 1e6", limits, join, tell, granted)


def cycle(folder: Path, load: Load, rounds: int) -> dict[str, Any]:
    """{"processor_s": of the plane per cycle, "core": its share of a core, "answered_s": [seconds of each round]}"""
    found: dict[str, Any] = {"rounds": rounds}
    with plane(folder, _RULES.format(PERIOD_S, load.store, load.limits)) as (address, pid):
        lines = load.join(address)
        _round(load, lines, 0)
        before, begin = processor_s(pid), time.monotonic()
        for k in range(1, rounds + 1):
            _round(load, lines, k)
            time.sleep(max(0.0, begin + PERIOD_S * k - time.monotonic()))
        found["core"] = (processor_s(pid) - before) / (time.monotonic() - begin)
        found["processor_s"] = found["core"] * PERIOD_S
        for line in lines:
            line.close()
    with plane(folder, _RULES.format(0.01, load.store, load.limits)) as (address, _):
        lines = load.join(address)
        found["answered_s"] = [_round(load, lines, k) for k in range(rounds)][1:]
        for line in lines:
            line.close()
    return found


def _round(load: Load, lines: list[Session], number: int) -> float:
    """All report; seconds until all have their grants."""
    poll = select.epoll()
    by_fd = {line.sock.fileno(): line for line in lines}
    for fd in by_fd:
        poll.register(fd, select.EPOLLIN)
    while came := poll.poll(0, len(lines)):  # since the last round
        for fd, _ in came:
            by_fd[fd].come()
    begin = time.monotonic()
    for k, line in enumerate(lines):
        load.tell(line, k, number)
    left = set(by_fd)
    while left:
        for fd, _ in poll.poll(5, len(lines)):
            if load.granted(by_fd[fd]):
                left.discard(fd)
                poll.unregister(fd)
        if time.monotonic() > begin + 10:
            raise RuntimeError(f"{len(left)} connections got no grants within 10 s")
    poll.close()
    return time.monotonic() - begin
