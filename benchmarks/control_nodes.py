"""The control plane's cycle with ten thousand jobs behind node agents (a part of benchmarks/control.py).

A hundred connections from one process to a plane that is another one, each a node agent's with a hundred jobs, whose
reports are made up. All report at once, four times a second.
"""

from __future__ import annotations

import select
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.control_plane import SECRET, USER, plane, processor_s
from pario.plane.session import Session, Who
from pario.plane.words import PlaneAddress, Usage, usage_message

#: seconds of a cycle
CYCLE_S = 0.100
NODES, JOBS = 100, 100
#: jobs that one line tells of
_JOINS = 50


def cycle(folder: Path, nodes: int, jobs: int, rounds: int) -> dict[str, Any]:
    """jobs : of each node; rounds : of reports of all nodes"""
    rules = (
        "lease_s = 10\ncycle_s = {}\n[store]\nbytes_per_s = 10e9\noperations_per_s = 1e6\n[limits]\n"
        f"connections = {4 * nodes}\njobs_per_user = {2 * nodes * jobs}\n"
        '[[job]]\nname = "1*"\nbytes_per_s = 2e5\n'
    )
    found: dict[str, Any] = {"nodes": nodes, "jobs": jobs, "rounds": rounds}
    with plane(folder, rules.format(0.25)) as (address, pid):
        lines = _join(address, nodes, jobs)
        said = [_reports(nodes, jobs, k) for k in range(rounds + 1)]
        _round(lines, said[0], jobs)
        before, begin = processor_s(pid), time.monotonic()
        for k in range(1, rounds + 1):
            _round(lines, said[k], jobs)
            time.sleep(max(0.0, begin + 0.25 * k - time.monotonic()))
        seconds = time.monotonic() - begin
        found["processor_s"] = (processor_s(pid) - before) / (seconds / 0.25)
        found["core"] = (processor_s(pid) - before) / seconds
        for line in lines:
            line.close()
    with plane(folder, rules.format(0.01)) as (address, _):
        lines = _join(address, nodes, jobs)
        found["answered_s"] = [_round(lines, said[k], jobs) for k in range(rounds)][1:]
        for line in lines:
            line.close()
    return found


def _join(address: PlaneAddress, nodes: int, jobs: int) -> list[Session]:
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


def _reports(nodes: int, jobs: int, number: int) -> list[bytes]:
    """Every third job wants more than it gets, each time another one."""
    which = np.arange(jobs)
    found = []
    for node in range(nodes):
        demand = np.tile([1.25e6, 12.5], (jobs, 1))
        demand[(which + node + number) % 3 == 0, 0] = np.inf
        used = np.tile([1e6 * number / 4, 10.0 * number / 4], (jobs, 1))
        found.append(usage_message(number / 4 + 1e-3, Usage(which, np.ones(jobs, np.int64), used, demand), {}))
    return found


def _round(lines: list[Session], said: list[bytes], jobs: int) -> float:
    """All report; seconds until all have the grants of all their jobs."""
    poll = select.epoll()
    by_fd = {line.sock.fileno(): line for line in lines}
    for line in lines:
        poll.register(line.sock.fileno(), select.EPOLLIN)
    for fd, _ in poll.poll(0, len(lines)):  # what has come since
        while select.select([fd], [], [], 0)[0]:
            by_fd[fd].come()
    begin = time.monotonic()
    for line, report in zip(lines, said, strict=True):
        line.say(report)
    left = set(by_fd)
    while left:
        for fd, _ in poll.poll(5, len(lines)):
            if any(len(words["grants"]) == 5 * jobs for words in by_fd[fd].come()):
                left.discard(fd)
                poll.unregister(fd)
        if time.monotonic() > begin + 10:
            raise RuntimeError(f"{len(left)} node agents got no grants within 10 s")
    poll.close()
    return time.monotonic() - begin
