"""One node that reads from another one's memory tier, beside a bare sendfile and beside its own memory tier.

    python -m benchmarks.node_peers [--rounds 9] [--out FILE.json]

Two processes on this machine, connected by a Unix socket and by TCP over the loopback interface; 256 MiB in memory.
Exit status 1 if a bar is not met.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.measure import Row, Section, finish, interleave, parser_of
from benchmarks.sides import compare
from pario.fetch.base import Fetcher
from pario.plan.placement import Placement
from pario.records import EXTENT
from pario.tiers.grid import Grid
from pario.tiers.memory import MemoryTier
from pario.tiers.peers import Peers, Servers
from pario.tiers.service import Service
from pario.tiers.staged import StagedFetcher
from pario.wire.client import Address
from pario.wire.frames import tune as pario_tune

#: of files that are no LMDBs
SNAPSHOTS: list[Any] = [SimpleNamespace(page_size=0, stamp=b"")]

GRID = Grid(256 << 20, 1 << 20)
IDENTITY, SECRET = bytes(32), b"s" * 32
RECORD = 3083
#: of the receiver; chunks are received into it in turn
BUFFER_BYTES = 64 << 20
IDLE_S = 5.0


class NoStore(Fetcher):
    """Everything lies in the tier."""

    path, nbytes = "nothing", GRID.file_bytes
    files: Any = (SimpleNamespace(fileno=lambda: 0),)

    def pread(self, offset: int, nbytes: int) -> bytes:
        raise AssertionError

    def read(self, reads: np.ndarray, out: np.ndarray, starts: np.ndarray) -> None:
        raise AssertionError

    def close(self) -> None:
        return


def filled() -> MemoryTier:
    tier = MemoryTier.made(GRID, GRID.file_bytes)
    chunk = np.random.default_rng(0).integers(0, 256, GRID.chunk_bytes, dtype=np.uint8)
    for k in range(GRID.chunks):
        tier.put(k, chunk)
    return tier


def serve(pipe: Connection) -> None:
    """The other process: a service, and bare sockets that send the whole file at each byte they get."""
    tier = filled()
    staged = StagedFetcher(NoStore(), SNAPSHOTS, [tier], grid=tier.grid, read_bytes=1 << 20, count=lambda *_: None)
    service = Service({IDENTITY: staged}.get, SECRET, threads=8, clients=4)
    local = socket.socket(socket.AF_UNIX)
    local.bind("")  # the system finds a name
    local.listen()
    there = socket.create_server(("127.0.0.1", 0))
    pipe.send((service.address, local.getsockname(), there.getsockname()))
    for listener in (local, there):
        threading.Thread(target=_send_all, args=(listener, tier.fd), daemon=True).start()
    while pipe.recv() == "idle":
        begin = time.process_time()
        time.sleep(IDLE_S)
        pipe.send((time.process_time() - begin) / IDLE_S)


def _send_all(listener: socket.socket, fd: int) -> None:
    sock, _ = listener.accept()
    pario_tune(sock, 60.0)
    while sock.recv(1):
        offset = 0
        while offset < GRID.file_bytes:
            offset += os.sendfile(sock.fileno(), fd, offset, GRID.file_bytes - offset)


def timed(work: Callable[[], int]) -> float:
    """Bytes per second."""
    begin = time.perf_counter()
    nbytes = work()
    return nbytes / (time.perf_counter() - begin)


def bare(sock: socket.socket, out: np.ndarray) -> int:
    sock.send(b".")
    view, got = memoryview(out), 0
    while got < GRID.file_bytes:
        at = got % BUFFER_BYTES
        got += sock.recv_into(view[at : at + min(GRID.chunk_bytes, GRID.file_bytes - got)], 0, socket.MSG_WAITALL)
    return got


def whole(peers: Peers, out: np.ndarray, threads: int) -> int:
    """All chunks, each by a call of its own, as tiers are filled."""

    def run(first: int) -> None:
        for k in range(first, GRID.chunks, threads):
            offset = k * GRID.chunk_bytes
            extent = np.array([(offset, GRID.chunk_bytes)], EXTENT)
            assert peers.read(extent, out, np.array([offset % BUFFER_BYTES])).all()

    running = [threading.Thread(target=run, args=(k,)) for k in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return GRID.file_bytes


def records(read: Callable[[np.ndarray, np.ndarray, np.ndarray], object], out: np.ndarray) -> int:
    """Random records of 3 KB, as many at once as fill a slot of the ring."""
    n, per = 40_000, 2_700
    random = np.random.default_rng(1)
    extents = np.empty(n, EXTENT)
    within = random.integers(0, GRID.chunk_bytes - RECORD, n)
    extents["offset"], extents["nbytes"] = random.integers(0, GRID.chunks, n) * GRID.chunk_bytes + within, RECORD
    for k in range(0, n, per):
        part = extents[k : k + per]
        read(part, out, np.arange(len(part)) * RECORD)
    return n * RECORD


def main() -> int:
    options = parser_of("node_peers", __doc__, 9, data=False).parse_args()
    rounds = 1 if options.smoke else options.rounds
    pipe, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    other = context.Process(target=serve, args=(theirs,), daemon=True)
    other.start()
    address, local, there = pipe.recv()
    out = np.zeros(BUFFER_BYTES, np.uint8)
    section = Section("peers", "Out of another process's memory tier", "in memory")
    own = filled()
    staged = StagedFetcher(NoStore(), SNAPSHOTS, [own], grid=own.grid, read_bytes=1 << 20, count=lambda *_: None)
    for name, where, bare_address in (
        ("Unix socket", address, local),
        ("TCP, loopback", Address("another machine", *address[1:]), there),
    ):
        sock = socket.socket(socket.AF_UNIX if isinstance(bare_address, bytes | str) else socket.AF_INET)
        sock.connect(bare_address)
        placement = Placement(owners=np.zeros((GRID.chunks, 1), np.int32), nodes=2)
        given: dict[str, Any] = {"serves": True, "identity": IDENTITY, "grid": GRID}
        peers = Peers(placement, Servers(1, [where, None], SECRET), **given)
        sides = {
            "bare": partial(timed, partial(bare, sock, out)),
            "whole": partial(timed, partial(whole, peers, out, 4)),
            "records": partial(timed, partial(records, peers.read, out)),
            "own": partial(timed, partial(records, staged.read, out)),
        }
        interleave(sides, 1)  # kernels, connections
        found = interleave(sides, rounds)
        case = f"whole chunks of 1 MiB, 4 threads, {name}"
        compare(section, case, found["whole"], found["bare"], 0.8 if name[0] == "U" else None, "a bare sendfile")
        case = f"records of 3 KB at random, {name}"
        compare(section, case, found["records"], found["own"], 0.5, "the own memory tier")
        peers.close()
        sock.close()
    pipe.send("idle")
    busy = pipe.recv()
    section.add(Row.of("idle service, of one core", [busy], "<=", 0.01))
    pipe.send("end")
    return finish("node_peers", options, [section])


if __name__ == "__main__":
    sys.exit(main())
