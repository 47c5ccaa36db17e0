"""The control plane's cycle: a thousand jobs with a connection each (a part of benchmarks/control.py).

One process has all connections, the plane is another one. All report at once, four times a second. The processor time
of the plane per cycle holds all that it does for that: reports read, shares computed, grants sent. Beside it the time
from the first report to the last grant of a plane that computes as often as it can; the clients' side, in Python too,
is part of it.
"""

from __future__ import annotations

import select
import time
from pathlib import Path
from typing import Any

from benchmarks.control_plane import SECRET, USER, plane, processor_s
from pario.plane.session import Session, Who
from pario.plane.words import PlaneAddress

PERIOD_S = 0.25
_RULES = """lease_s = 10
cycle_s = {}
[store]
bytes_per_s = 1e9
operations_per_s = 1e5
[limits]
connections = {}
connections_per_user = {}
jobs_per_user = {}
[[job]]
name = "1*"
bytes_per_s = 2e5
"""


def _join(address: PlaneAddress, clients: int) -> list[Session]:
    words = {"do": "join", "node": "node"}
    return [
        Session(
            address,
            Who(USER, SECRET, str(k), str(k), "node"),
            {**words, "member": f"{k:032x}", "job": str(k), "name": str(k)},
            1 << 16,
        )
        for k in range(clients)
    ]


def _tell(line: Session, k: int, number: int) -> None:
    """Every third one wants more than it gets, each time another one."""
    used = [1e6 * number * PERIOD_S, 10.0 * number * PERIOD_S]
    demand = [None if (k + number) % 3 == 0 else 1.25e6, 12.5]
    line.send({"at": number * PERIOD_S + 1e-3, "used": used, "demand": demand})


def cycle(folder: Path, clients: int, rounds: int) -> dict[str, Any]:
    """{"processor_s": of the plane per cycle, "core": its share of a core, "answered_s": [seconds of each round]}"""
    found: dict[str, Any] = {"rounds": rounds}
    limits = 4 * clients, 2 * clients, 2 * clients
    with plane(folder, _RULES.format(PERIOD_S, *limits)) as (address, pid):
        lines = _join(address, clients)
        _round(lines, 0)
        before, begin = processor_s(pid), time.monotonic()
        for k in range(1, rounds + 1):
            _round(lines, k)
            time.sleep(max(0.0, begin + PERIOD_S * k - time.monotonic()))
        found["core"] = (processor_s(pid) - before) / (time.monotonic() - begin)
        found["processor_s"] = found["core"] * PERIOD_S
        for line in lines:
            line.close()
    with plane(folder, _RULES.format(0.01, *limits)) as (address, _):
        lines = _join(address, clients)
        found["answered_s"] = [_round(lines, k) for k in range(rounds)][1:]
        for line in lines:
            line.close()
    return found


def _round(lines: list[Session], number: int) -> float:
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
        _tell(line, k, number)
    left = set(by_fd)
    while left:
        for fd, _ in poll.poll(5, len(lines)):
            if by_fd[fd].come():
                left.discard(fd)
                poll.unregister(fd)
        if time.monotonic() > begin + 10:
            raise RuntimeError(f"{len(left)} connections got no grants within 10 s")
    poll.close()
    return time.monotonic() - begin
