"""The service of a node as a process of its own: it keeps copies of datasets for all jobs of this user on the node.

    job --> OPEN --> service of its node --> ASSIGN --> first service --> ROOM --> all services
                                                        computes once who keeps what
    job --> READ, BRING, KEEP --> the services, as in peers.py; what the own node keeps in memory it maps

A dataset stays as long as there is room. If another one needs its memory, the one that was used least recently goes,
unless a job on this node holds its lock or another node has asked for it within the last minute.

No two services wait for each other: OPEN and ASSIGN have threads of their own at each service (wire/server.py), and
anyone who answers ROOM asks nobody.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from pario import machine
from pario.comm.base import AnyWorld, together
from pario.comm.solo import Solo
from pario.dataset.file import DataFile
from pario.dataset.staging import Stage, kept_chunks, open_stage, placed
from pario.dataset.tiers import automatic_bytes, wanted_tiers
from pario.errors import OptionError, ParioError
from pario.fetch.pool import STOP_S
from pario.fetch.posix import PosixFetcher
from pario.fetch.snapshot import identity_of, read_snapshot
from pario.kernels.private import PrivateDirectory
from pario.options import Options, Tier
from pario.plan.placement import Placement
from pario.stats.rank import RankStats
from pario.tiers.asking import CHUNK_BYTES, LOCK, WHERE, good, here, packed, unpacked, written
from pario.tiers.disk_files import is_used, lock_use, root_of
from pario.tiers.fill import Filler
from pario.tiers.grid import Grid
from pario.tiers.peers import ASSIGN, OPEN, ROOM, Peers, Servers
from pario.tiers.service import Service
from pario.tiers.staged import StagedFetcher
from pario.wire.client import Client

_log = logging.getLogger("pario")

_MEMORY = "memory"
#: A dataset that another node has used within this many seconds is in use.
_USED_S = 60.0
#: Seconds for another service to open a dataset, and for the first one to hear that of all: one after another below the
#: minute that a job waits (asking.py).
_ROOM_S, _ASSIGN_S = 10.0, 30.0
#: This often the first service makes sure that all others have a dataset open.
_LOOK_S = 10.0
#: Processes that may ask one service: ranks of a large node, and one of each other node.
_CLIENTS = 256


@dataclass
class _Asked:
    """What a request is about. fill : see `asking.ask_service`"""

    path: str
    identity: bytes
    file_bytes: int
    fill: bool
    look: bool

    @classmethod
    def read(cls, body: bytes) -> _Asked:
        """Raises ValueError."""
        words, _ = unpacked(body)
        try:
            path, identity = os.fspath(words["path"]), bytes.fromhex(words["identity"])
            Grid(int(words["file_bytes"]), CHUNK_BYTES).checked()
            return cls(path, identity, int(words["file_bytes"]), bool(words.get("fill")), bool(words.get("look")))
        except (KeyError, TypeError, ParioError) as e:
            raise ValueError(f"a request without a dataset: {e}") from e


@dataclass
class _Dataset:
    """A dataset that is open here.

    slot : the byte of the lock file that jobs lock while they use it
    memory_bytes : of the memory that it was given when it was opened; what is given back under pressure stays with the
        system until the dataset goes
    used_at : when somebody asked for it, on the monotonic clock
    alone : the first service has not said who keeps what
    """

    path: str
    identity: bytes
    file: DataFile
    stage: Stage
    slot: int
    memory_bytes: int
    used_at: float
    alone: bool = True
    filler: Filler | None = None
    meeting: threading.Lock = field(default_factory=threading.Lock)

    def close(self) -> None:
        if self.filler is not None:
            self.filler.cancel(STOP_S)
        self.stage.part(STOP_S)
        self.file.close(STOP_S)
        self.stage.close()


class Host:
    """Serves the jobs on this node until `close`. Collective over `world`, on the first rank of each node.

    folder : on a disk of the node, where jobs find the service; it may name variables, as $TMPDIR
    options : tiers (None: PARIO_TIERS), inflight
    served_bytes : sent to other processes, when it is closed; what jobs of this node read in its memory is not counted
    number : of this node among the services; None on a rank that is not its node's first one: it serves nobody

    Raises OptionError, ParioError, OSError, on all ranks together.
    """

    def __init__(self, folder: str, options: Options, world: AnyWorld) -> None:
        self.number: int | None = None
        self.served_bytes = 0
        self._lock = threading.Lock()  # guards the two below; no thread holds it for long
        self._datasets: dict[bytes, Future[_Dataset]] = {}
        self._closed = self._told = False
        self._opening = threading.Lock()  # one dataset is opened, or closed for another one, at a time
        self._slots = secrets.randbelow(1 << 40)  # jobs of an earlier service may still hold locks
        self._placements: dict[bytes, np.ndarray] = {}
        self._looked: dict[bytes, float] = {}
        self._placing = threading.Lock()  # guards the two above
        self._service: Service | None = None
        self._clients: list[Client] = []
        self._lock_file = -1
        self._solo = Solo()
        try:
            self._begin(folder, options, world)
        except BaseException:
            self.close()
            raise

    def _begin(self, folder: str, options: Options, world: AnyWorld) -> None:
        with together(world, "starting the service"):
            if world.is_leader:
                self._start(folder, options)
        secret = world.bcast(secrets.token_bytes(32) if world.rank == 0 else None)
        with together(world, "starting the service"):
            if world.is_leader:
                answers = {OPEN: self._answer_open, ASSIGN: self._answer_assign, ROOM: self._answer_room}
                self._service = Service(
                    self._known,
                    secret,
                    threads=options.usual_inflight,
                    clients=_CLIENTS,
                    more={kind: partial(_answered, answer) for kind, answer in answers.items()},
                )
        mine = (world.node, self._service.address) if self._service is not None else None
        everybody = sorted(each for each in world.allgather(mine) if each is not None)
        with together(world, "starting the service"):
            if self._service is not None:
                self.number = world.node
                self._servers = Servers(world.node, [address for _, address in everybody], secret)
                self._clients = [Client(address, secret, _ROOM_S) for _, address in everybody]
                self._first = Client(everybody[0][1], secret, _ASSIGN_S)
                self._told = True
                self._directory.write(WHERE, written(self._servers))

    def _start(self, folder: str, options: Options) -> None:
        """Raises OptionError, ParioError, OSError."""
        self._tiers = wanted_tiers(options) or ()
        if not self._tiers:
            raise OptionError("a service needs tiers", hint='Pass --tiers "memory:auto", or set PARIO_TIERS.')
        memory = next((tier for tier in self._tiers if tier.where == _MEMORY), None)
        wanted = memory.quota_bytes if memory is not None else 0
        self.memory_bytes: int = automatic_bytes() if wanted is None else wanted
        self._options = replace(options, peers=True)
        self.folder = here(folder)
        found = machine.file_system(self.folder)
        if found.shared:
            raise OptionError(
                f"{self.folder} is on a file system that other nodes share ({found.type})",
                hint="Each node has its own service: name a folder on a disk of the node, as /tmp.",
            )
        self._directory = PrivateDirectory(root_of(self.folder))
        self._lock_file = self._directory.open_file(LOCK)
        if not lock_use(self._lock_file, alone=True, byte=0):
            raise ParioError("another service of yours runs there", path=self.folder)
        with suppress(FileNotFoundError):  # of one that died
            self._directory.remove(WHERE)

    # -- datasets ------------------------------------------------------------------------------------------------------

    def _known(self, identity: bytes) -> StagedFetcher | None:
        future = self._datasets.get(identity)
        if future is None or not future.done() or future.exception() is not None:
            return None
        dataset = future.result()
        dataset.used_at = time.monotonic()
        return dataset.stage.fetcher

    def _open_now(self) -> list[_Dataset]:
        with self._lock:
            futures = list(self._datasets.values())
        return [future.result() for future in futures if future.done() and future.exception() is None]

    def _opened(self, asked: _Asked) -> _Dataset:
        """Raises ParioError, OSError."""
        with self._lock:
            if self._closed:
                raise ParioError("the service ends", path=asked.path)
            future = self._datasets.get(asked.identity)
            mine: Future[_Dataset] | None = None
            if future is None:
                future = mine = self._datasets[asked.identity] = Future()
        if mine is not None:
            try:
                mine.set_result(self._open(asked))
            except BaseException as e:
                with self._lock:
                    self._datasets.pop(asked.identity, None)
                mine.set_exception(e)
        dataset = future.result()
        dataset.used_at = time.monotonic()
        return dataset

    def _open(self, asked: _Asked) -> _Dataset:
        options, path = self._options, asked.path
        file = DataFile([path], self._solo, options, PosixFetcher)
        try:
            file.open()
            file.share(True)
            fetcher = file.pool.fetcher
            snapshot = read_snapshot(fetcher, tars=True)
            identity = identity_of(fetcher, [snapshot])
            if len(file.paths) > 1 or identity != asked.identity or snapshot.file_bytes != asked.file_bytes:
                raise ParioError("the service's node sees another state of the file", path=path)
            with self._opening:
                given = replace(options, tiers=self._tiers_for(snapshot.file_bytes))
                stage = open_stage(file, self._solo, [snapshot], given, by_default=False, serves=True)
                if stage is None:
                    raise ParioError("no tier of the service has room for another dataset", path=path)
                budget = stage.memory.budget if stage.memory is not None else 0
                self._slots += 1
                return _Dataset(path, identity, file, stage, self._slots, budget, time.monotonic())
        except BaseException:
            file.close(STOP_S)
            raise

    def _tiers_for(self, file_bytes: int) -> tuple[Tier, ...]:
        """Those that have room left, of the size that is left."""
        wanted = min(file_bytes, self.memory_bytes)
        for dataset in sorted(self._open_now(), key=lambda dataset: dataset.used_at):
            if self._memory_left() >= wanted:
                break
            if dataset.memory_bytes and self._is_unused(dataset):
                _log.info("%s makes room for another dataset", dataset.path)
                with self._lock:
                    self._datasets.pop(dataset.identity, None)
                dataset.close()
        left = self._memory_left()
        memory = (Tier(_MEMORY, left),) if left >= CHUNK_BYTES else ()
        return (*memory, *(tier for tier in self._tiers if tier.where != _MEMORY))

    def _memory_left(self) -> int:
        return self.memory_bytes - sum(dataset.memory_bytes for dataset in self._open_now())

    def _is_unused(self, dataset: _Dataset) -> bool:
        if time.monotonic() < dataset.used_at + _USED_S:
            return False
        with suppress(OSError):
            return not is_used(self._lock_file, byte=dataset.slot)
        return False

    # -- answers -------------------------------------------------------------------------------------------------------

    def _answer_open(self, body: bytes) -> bytes:
        """Raises ValueError, ParioError, OSError."""
        asked = _Asked.read(body)
        dataset = self._opened(asked)
        if not asked.look:
            with dataset.meeting:
                self._meet(dataset, body)
                if asked.fill:
                    self._fill(dataset)
        stage = dataset.stage
        words: dict[str, Any] = {"slot": dataset.slot}
        if asked.look:
            return packed(words)
        assert stage.placement is not None
        assert stage.keeps is not None  # they have met
        owners = np.ascontiguousarray(stage.placement.owners)
        memory = stage.memory
        words |= {
            "path": memory.path if memory is not None else None,
            "budget": memory.budget if memory is not None else 0,
            "chunks": stage.grid.chunks,
            "copies": owners.shape[1],
        }
        return packed(words, b"" if asked.fill else owners.tobytes() + np.packbits(stage.keeps).tobytes())

    def _meet(self, dataset: _Dataset, body: bytes) -> None:
        """Find out which services keep which chunks; as long as the first of them does not say, this one is alone.

        body : of the request
        """
        assert self.number is not None
        stage, chunks, nodes = dataset.stage, dataset.stage.grid.chunks, len(self._clients)
        room = max(tier.room() for tier in stage.tiers)
        try:
            # Also if it is known: the first service sees to it that all others have the dataset open.
            owners = self._placed(dataset, body)
            if not dataset.alone:
                return
            dataset.alone = False
        except (OSError, ValueError, ParioError) as e:
            _log.warning("%s: the first service does not say who keeps what: %s", dataset.path, e)
            if stage.placement is not None:
                return
            rooms = [room if node == self.number else 0 for node in range(nodes)]
            owners = placed(dataset.identity, np.arange(chunks), rooms, []).owners
        placement = Placement(owners=owners, nodes=nodes)
        peers = Peers(placement, self._servers, serves=True, identity=dataset.identity, grid=stage.grid)
        keeps = kept_chunks(placement, self.number, np.arange(chunks), room)
        earlier = stage.peers
        stage.share(placement, peers, keeps, keeps)
        if earlier is not None:
            earlier.close()

    def _fill(self, dataset: _Dataset) -> None:
        """Bring what this node keeps in memory, for processes that do not ask for chunks. Raises ParioError."""
        stage = dataset.stage
        assert stage.fetcher is not None
        assert stage.keeps is not None  # it has met the other services
        chunks = np.flatnonzero(stage.keeps & ~stage.held())
        if stage.memory is None or not len(chunks) or not (dataset.filler is None or dataset.filler.is_over):
            return

        dataset.file.knob.at_least(self._options.usual_inflight)

        def failed(error: BaseException) -> None:
            _log.warning("%s was not brought as a whole: %s", dataset.path, error)

        dataset.filler = Filler(
            dataset.file.pool, stage.fetcher, stage.memory, iter(chunks.tolist()), stats=RankStats(), failed=failed
        )

    def _placed(self, dataset: _Dataset, body: bytes) -> np.ndarray:
        """i32[chunks, copies]: see `Placement`. Raises OSError, ValueError, ParioError."""
        words, raw = good(self._answer_assign(body) if self.number == 0 else self._first.call(ASSIGN, body)[1])
        chunks, copies = dataset.stage.grid.chunks, int(words.get("copies", 0))
        return np.frombuffer(raw, np.int32, chunks * copies).reshape(chunks, copies)

    def _answer_assign(self, body: bytes) -> bytes:
        """By the first service. Raises ValueError, ParioError, OSError."""
        asked = _Asked.read(body)
        with self._placing:
            owners = self._placements.get(asked.identity)
            if owners is None or time.monotonic() > self._looked[asked.identity] + _LOOK_S:
                found = self._ask_all(asked, body)
                if owners is None:
                    owners = self._placements[asked.identity] = found
                self._looked[asked.identity] = time.monotonic()
        return packed({"copies": owners.shape[1]}, owners.tobytes())

    def _ask_all(self, asked: _Asked, body: bytes) -> np.ndarray:
        """Let all services open the dataset; who would keep what if that were decided now. Raises OptionError."""
        grid = Grid(asked.file_bytes, CHUNK_BYTES)
        assert self._service is not None  # which has got the question
        room = self._service.room
        answers: list[Future[bytes]] = [
            room.call(self._answer_room, body)
            if node == self.number
            else room.call(lambda client=client: client.call(ROOM, body)[1])
            for node, client in enumerate(self._clients)
        ]
        rooms, held = [0] * len(answers), [b""] * len(answers)
        for node, future in enumerate(answers):
            try:
                words, bits = good(future.result())
                rooms[node] = int(words["room"])
                if len(bits) == -(-grid.chunks // 8):
                    held[node] = bits
            except (OSError, ValueError, KeyError, ParioError) as e:
                _log.warning("node %d keeps nothing of %s: %s", node, asked.path, e)
        return np.ascontiguousarray(placed(asked.identity, np.arange(grid.chunks), rooms, held).owners)

    def _answer_room(self, body: bytes) -> bytes:
        """Raises ValueError, ParioError, OSError."""
        stage = self._opened(_Asked.read(body)).stage
        return packed({"room": max(tier.room() for tier in stage.tiers)}, stage.held_bits(len(self._clients)))

    # -- the end -------------------------------------------------------------------------------------------------------

    def state(self) -> list[dict[str, Any]]:
        """What became of each dataset: path, file_bytes, store_bytes, held_bytes."""
        return [
            {
                "path": dataset.path,
                "file_bytes": dataset.stage.grid.file_bytes,
                "store_bytes": dataset.stage.store_bytes,
                "held_bytes": int(dataset.stage.held().sum()) * dataset.stage.grid.chunk_bytes,
            }
            for dataset in self._open_now()
        ]

    def retire(self) -> None:
        """Jobs that come from now on do not find it. Idempotent."""
        with self._lock:
            told, self._told = self._told, False
        if told:
            with suppress(OSError):
                self._directory.remove(WHERE)

    def close(self) -> None:
        """Jobs that go on read the store for what they cannot find elsewhere. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.retire()
        if self.number is not None:
            self._first.close()
        for client in self._clients:
            client.close()
        if self._service is not None:
            self._service.close()
            self.served_bytes = self._service.served_bytes
        for dataset in self._open_now():
            dataset.close()
        if self._lock_file >= 0:
            os.close(self._lock_file)


def _answered(answer: Callable[[bytes], bytes], body: bytes) -> bytes:
    """The answer, or what kept it away. Raises ValueError."""
    try:
        return answer(body)
    except (ParioError, OSError) as e:
        return packed({"problem": str(e)})
