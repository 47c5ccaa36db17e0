"""Detects dead ranks without asking them: a rank that computes for an hour answers nobody.

On the same node /proc tells, by process number and start time.

Between nodes the kernel tells: the leader of every node keeps one TCP connection to rank 0's process, and the system
closes it when a process ends, in any way. So rank 0 learns that another node's leader is gone, and all leaders learn
that rank 0 is. The ranks of a node watch each other. A connection carries only a greeting, and one byte when a process
ends normally. TCP's keep-alive detects a node that loses its power, after a minute. If nodes cannot connect to each
other (a firewall), this part is missing, and only the launcher can detect the loss of a whole node.
"""

from __future__ import annotations

import atexit
import logging
import os
import resource
import secrets
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

from pario.comm.launcher import own_addresses
from pario.comm.sockets import exactly
from pario.errors import DeadRankError

__all__ = ["Lifeline", "Watch", "myself"]

_log = logging.getLogger("pario")

#: Processes whose start time one check reads (a file in /proc each); of the others it tests only the existence.
STATS_PER_LOOK = 8

#: Seconds for one attempt to connect and for a greeting; for all leaders; and the time that start-up itself waits.
CONNECT_S, ACCEPT_S, START_S = 2.0, 60.0, 0.25

_TOKEN_BYTES = 16
_GOODBYE = b"."


def myself() -> list[int]:
    """[process number, start time, process number namespace]; a start time of 0 means unknown."""
    pid = os.getpid()
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        namespace = 0
    return [pid, _started(pid) or 0, namespace]


class Watch:
    """The neighbours of one rank.

    people : `myself()` of every rank of the node, by node rank
    ranks : their ranks; me : this one's node rank
    lifeline : to other nodes
    """

    def __init__(
        self, people: Sequence[Sequence[int]], ranks: Sequence[int], me: int, lifeline: Lifeline | None = None
    ) -> None:
        # In another container the same process number may belong to a different process.
        self._others = [
            (node_rank, rank, pid, start)
            for node_rank, (rank, (pid, start, namespace)) in enumerate(zip(ranks, people, strict=True))
            if node_rank != me and start and namespace == people[me][2]
        ]
        # Ranks that check at the same time check different neighbours: together they cover all of them.
        self._turn = me * STATS_PER_LOOK
        self._lifeline = lifeline

    def check(self, left: Callable[[int], bool] | None = None) -> None:
        """Raises DeadRankError. Local, any thread.

        left : left(node rank) is true for those that are not missed any more
        """
        others = self._others
        self._turn += STATS_PER_LOOK
        for i, (node_rank, rank, pid, start) in enumerate(others):
            thorough = (i - self._turn) % len(others) < STATS_PER_LOOK
            if (_started(pid) == start if thorough else _exists(pid)) or (left is not None and left(node_rank)):
                continue
            raise DeadRankError(
                f"another rank of this node is gone (process {pid})",
                rank=rank,
                hint="The scheduler's log tells why; the usual reason is memory (oom-kill)",
            )
        far = self._lifeline.gone() if self._lifeline is not None else None
        if far is not None:
            raise DeadRankError(
                "a rank of another node is gone: its connection was closed",
                rank=far,
                hint="The scheduler's log tells why",
            )


class Lifeline:
    """The connections between rank 0 and the leaders of the other nodes, set up by a background thread."""

    def __init__(self) -> None:
        self._links: dict[int, socket.socket] = {}
        self._lock = threading.Lock()
        self._gone: int | None = None
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        _all.add(self)

    def listen(self, peers: int) -> tuple[list[str], int, bytes] | None:
        """Rank 0's side: (addresses, port, token) for `peers` leaders; None without a network, or with too many
        leaders."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files != resource.RLIM_INFINITY and peers > files // 2:  # the other half is for the script
            _log.debug("no connections between nodes: %d of them, and at most %d open files", peers, files)
            return None
        try:
            listener = socket.create_server(("", 0), backlog=peers)
        except OSError as e:
            _log.debug("no connections between nodes: %s", e)
            return None
        self._listener = listener
        token = secrets.token_bytes(_TOKEN_BYTES)
        address = [*own_addresses(), socket.gethostname()], listener.getsockname()[1], token
        if not self._start(lambda: self._accept(listener, peers, token)):
            listener.close()
            return None
        return address

    def connect(self, address: tuple[list[str], int, bytes] | None, rank: int) -> None:
        """The side of the leader with this `rank`; `address` is the result of rank 0's `listen`."""
        if address is not None:
            self._start(lambda: self._connect(*address, rank))

    def settle(self) -> None:
        """Wait a moment for the connections; slower ones are completed later."""
        if self._thread is not None:
            self._thread.join(START_S)

    def gone(self) -> int | None:
        """A rank whose connection was closed without a goodbye, or None."""
        with self._lock:
            for rank, link in list(self._links.items()):
                try:
                    said = link.recv(1)
                except BlockingIOError:
                    continue
                except OSError:
                    said = b""
                link.close()
                del self._links[rank]
                if not said:
                    self._gone = rank
            return self._gone

    def forget(self) -> None:
        """Close this process's copies in a forked child; otherwise the parent's end would go unnoticed."""
        for each in (self._listener, *self._links.values()):
            if each is not None:
                each.close()
        self._links = {}
        self._lock = threading.Lock()  # a thread of the parent may have held it

    def goodbye(self) -> None:
        with self._lock:  # the thread may still be accepting connections
            for link in self._links.values():
                with suppress(OSError):
                    link.send(_GOODBYE)

    def _start(self, target: Callable[[], None]) -> bool:
        """False: the system grants no thread. There are no connections then, as behind a firewall."""
        thread = threading.Thread(target=target, name="pario-lifeline", daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as e:
            _log.debug("no connections between nodes: %s", e)
            return False
        self._thread = thread
        return True

    def _accept(self, listener: socket.socket, peers: int, token: bytes) -> None:
        listener.settimeout(ACCEPT_S)
        with listener:
            while peers:
                try:
                    link, _ = listener.accept()
                except OSError:
                    _log.debug("%d nodes have no connection to rank 0", peers)
                    return
                with suppress(OSError):
                    link.settimeout(CONNECT_S)
                    said = exactly(link, _TOKEN_BYTES + 4)
                    if secrets.compare_digest(said[:_TOKEN_BYTES], token):
                        link.sendall(token)
                        self._keep(link, int.from_bytes(said[_TOKEN_BYTES:], "little"))
                        peers -= 1
                        continue
                link.close()

    def _connect(self, addresses: list[str], port: int, token: bytes, rank: int) -> None:
        if socket.gethostname() in addresses:  # emulated nodes
            addresses = ["127.0.0.1"]
        for address in addresses:
            with suppress(OSError):
                link = socket.create_connection((address, port), CONNECT_S)
                with suppress(OSError):
                    link.sendall(token + rank.to_bytes(4, "little"))
                    if exactly(link, _TOKEN_BYTES) == token:
                        self._keep(link, 0)
                        return
                link.close()
        _log.debug("no connection to rank 0 at %s, port %d", " or ".join(addresses), port)

    def _keep(self, link: socket.socket, rank: int) -> None:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):  # seconds, seconds, times
            if hasattr(socket, name):
                link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        link.setblocking(False)
        with self._lock:
            self._links[rank] = link


_all: weakref.WeakSet[Lifeline] = weakref.WeakSet()


@atexit.register
def _goodbye() -> None:
    for lifeline in list(_all):
        lifeline.goodbye()


def _forked() -> None:
    for lifeline in list(_all):
        lifeline.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _started(pid: int) -> int | None:
    """Start time of a live process in clock ticks since boot; None: gone, a zombie, or unknown."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    # "pid (name) state ppid ...": the name may contain blanks and parentheses; field 22 is the start time.
    fields = text[text.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X", b"x") else int(fields[19])
