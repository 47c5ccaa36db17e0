"""The service of a node as a process of its own: it keeps copies of datasets for all jobs of this user on the node.

    job --> OPEN --> service of its node --> ASSIGN --> first service --> ROOM --> all services
                                                       computes once who keeps what
    job --> READ, BRING, KEEP --> the services, as in peers.py; what the own node keeps in memory it maps

A dataset stays as long as there is room. If another one needs its memory, the one that was used least recently goes,
unless a job on this node holds its lock or another node has asked for it within the last minute.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pario.comm.base import AnyWorld, together
from pario.comm.sockets import Client
from pario.comm.solo import Solo
from pario.dataset.file import DataFile
from pario.dataset.staging import COPIES, Stage, kept_chunks, open_stage
from pario.dataset.tiers import automatic_bytes, wanted_tiers
from pario.errors import OptionError, ParioError
from pario.fetch.pool import STOP_S
from pario.fetch.resolve import FETCHERS
from pario.fetch.snapshot import read_snapshot
from pario.format.meta import Snapshot
from pario.kernels.private import PrivateDirectory
from pario.options import Options, Tier
from pario.plan.placement import Placement, assign
from pario.stage.asking import CHUNK_BYTES, LOCK, WHERE, here, identity_of, packed, unpacked, written
from pario.stage.disk import lock_use, root_of
from pario.stage.fill import Filler
from pario.stage.peers import ASSIGN, OPEN, ROOM, Peers, Servers
from pario.stage.service import Service
from pario.stage.staged import StagedFetcher
from pario.stats.rank import RankStats
from pario.threads import Workers

__all__ = ["Host"]

_log = logging.getLogger("pario")

_MEMORY = "memory"
#: A dataset that another node has used within so many seconds is in use.
_USED_S = 60.0
#: Seconds for another service to open a dataset.
_OPEN_S = 30.0
#: Processes that may ask one service: ranks of a large node, and one of each other node.
_CLIENTS = 256


@dataclass
class _Dataset:
    """A dataset that is open here.

    slot : the byte of the lock file that jobs lock while they use it
    used_at : when somebody asked for it, on the monotonic clock
    """

    path: str
    identity: bytes
    file: DataFile
    snapshot: Snapshot
    stage: Stage
    slot: int
    used_at: float
    filler: Filler | None = None
    meeting: threading.Lock = field(default_factory=threading.Lock)

    def close(self) -> None:
        if self.filler is not None:
            self.filler.stop(STOP_S)
        self.stage.part(STOP_S)
        self.file.close(STOP_S)
        self.stage.close()


class Host:
    """Serves the jobs on this node until `close`. Collective over `world`, on the first rank of each node.

    folder : on a disk of the node, where jobs find the service; it may name variables, as $TMPDIR
    options : tiers (None: PARIO_TIERS), copies, inflight, fetch
    served_bytes : sent to other processes; what jobs of this node read in its memory is not counted
    number : of this node among the services; None on a rank that is not its node's first one: it serves nobody

    Raises OptionError, ParioError, OSError, on all ranks together.
    """

    def __init__(self, folder: str, options: Options, world: AnyWorld) -> None:
        self.number: int | None = None
        self.served_bytes = 0
        self._lock = threading.RLock()  # guards what follows
        self._datasets: dict[bytes, _Dataset] = {}
        self._slots = 0
        self._placements: dict[bytes, np.ndarray] = {}
        self._placing = threading.Lock()
        self._askers = Workers("pario-room", 16)
        self._service: Service | None = None
        self._solo = Solo()
        with together(world, "starting the service"):
            if world.is_leader:
                self._start(folder, options)
        secret = world.bcast(secrets.token_bytes(32) if world.rank == 0 else None)
        with together(world, "starting the service"):
            if world.is_leader:
                more = {OPEN: self._answer_open, ASSIGN: self._answer_assign, ROOM: self._answer_room}
                self._service = Service(
                    self._known,
                    secret,
                    threads=options.inflight,
                    clients=_CLIENTS,
                    network=True,
                    count=self._count,
                    more=more,
                )
        mine = (world.node, self._service.address) if self._service is not None else None
        everybody = sorted(each for each in world.allgather(mine) if each is not None)
        if self._service is None:
            return
        self.number = world.node
        self._servers = Servers(world.node, [address for _, address in everybody], secret)
        self._clients = [Client(address, secret, _OPEN_S) for _, address in everybody]
        self._directory.write(WHERE, written(self._servers))

    def _start(self, folder: str, options: Options) -> None:
        """Raises OptionError, ParioError, OSError."""
        self._tiers = wanted_tiers(options)
        if not self._tiers:
            raise OptionError("a service needs tiers", hint='Pass --tiers "memory:auto", or set PARIO_TIERS.')
        memory = next((tier for tier in self._tiers if tier.where == _MEMORY), None)
        wanted = memory.quota_bytes if memory is not None else 0
        self.memory_bytes: int = automatic_bytes() if wanted is None else wanted
        self._options = replace(options, peers=True)
        self.folder = here(folder)
        self._directory = PrivateDirectory(root_of(self.folder))
        self._lock_file = self._directory.open_file(LOCK)
        if not lock_use(self._lock_file, alone=True, byte=0):
            os.close(self._lock_file)
            raise ParioError("another service of yours runs there", path=self.folder)

    # -- datasets ------------------------------------------------------------------------------------------------------

    def _known(self, identity: bytes) -> StagedFetcher | None:
        dataset = self._datasets.get(identity)
        if dataset is None:
            return None
        dataset.used_at = time.monotonic()
        return dataset.stage.fetcher

    def _opened(self, path: str, identity: bytes) -> _Dataset:
        """Raises ParioError, OSError."""
        with self._lock:
            dataset = self._datasets.get(identity)
            if dataset is None:
                dataset = self._datasets[identity] = self._open(path, identity)
            dataset.used_at = time.monotonic()
            return dataset

    def _open(self, path: str, identity: bytes) -> _Dataset:
        options = self._options
        file = DataFile(path, self._solo, options, FETCHERS[options.fetch])
        try:
            file.open()
            file.share(True)
            snapshot = read_snapshot(file.pool.fetcher)
            if identity_of(file.pool.fetcher, snapshot) != identity:
                raise ParioError("the service's node sees another state of the file", path=path)
            tiers = self._tiers_for(snapshot.file_bytes)
            stage = open_stage(file, self._solo, snapshot, replace(options, tiers=tiers)) if tiers else None
            if stage is None:
                raise ParioError("no tier of the service has room for another dataset", path=path)
        except BaseException:
            file.close(STOP_S)
            raise
        self._slots += 1
        return _Dataset(path, identity, file, snapshot, stage, self._slots, time.monotonic())

    def _tiers_for(self, file_bytes: int) -> tuple[Tier, ...]:
        """Those that have room left, of the size that is left."""
        left = self._memory_left()
        unused = sorted(self._datasets.values(), key=lambda dataset: dataset.used_at)
        for dataset in unused:
            if left >= file_bytes:
                break
            if self._is_unused(dataset):
                _log.info("%s makes room for another dataset", dataset.path)
                del self._datasets[dataset.identity]
                dataset.close()
                left = self._memory_left()
        memory = (Tier(_MEMORY, left),) if left >= CHUNK_BYTES else ()
        return (*memory, *(tier for tier in self._tiers if tier.where != _MEMORY))

    def _memory_left(self) -> int:
        tiers = (dataset.stage.memory for dataset in self._datasets.values())
        return self.memory_bytes - sum(tier.budget for tier in tiers if tier is not None)

    def _is_unused(self, dataset: _Dataset) -> bool:
        if time.monotonic() < dataset.used_at + _USED_S:
            return False
        with suppress(OSError):
            lock = self._directory.open_file(LOCK)  # closing it ends the lock
            try:
                return lock_use(lock, alone=True, byte=dataset.slot)
            finally:
                os.close(lock)
        return False

    # -- answers -------------------------------------------------------------------------------------------------------

    def _answer_open(self, body: bytes) -> bytes:
        """Raises ValueError."""
        path, identity = _asked(body)
        fill = unpacked(body)[0].get("fill")
        try:
            dataset = self._opened(path, identity)
            with dataset.meeting:
                if dataset.stage.placement is None:
                    self._meet(dataset)
                if fill and dataset.filler is None:
                    dataset.filler = self._filler(dataset)
        except (ParioError, OSError) as e:
            return packed({"problem": str(e)})
        stage = dataset.stage
        assert stage.placement is not None
        assert stage.keeps is not None  # set together
        owners = np.ascontiguousarray(stage.placement.owners)
        memory = stage.memory
        words = {
            "slot": dataset.slot,
            "paths": memory.paths if memory is not None else None,
            "budget": memory.budget if memory is not None else 0,
            "copies": owners.shape[1],
        }
        return packed(words, owners.tobytes() + np.packbits(stage.keeps).tobytes())

    def _meet(self, dataset: _Dataset) -> None:
        """Find out which services keep which chunks; this one alone if the first of them does not answer."""
        assert self.number is not None
        stage, chunks = dataset.stage, dataset.stage.grid.chunks
        room = max(tier.room() for tier in stage.tiers)
        try:
            owners = self._placed(dataset)
        except (OSError, ValueError, ParioError) as e:
            _log.warning("%s is kept by this node alone: %s", dataset.path, e)
            rooms = [room if node == self.number else 0 for node in range(len(self._clients))]
            owners = assign(_seed(dataset.identity), np.arange(chunks), rooms, 1).owners
        placement = Placement(owners=owners, nodes=len(self._clients))
        peers = Peers(placement, self._servers, serves=True, identity=dataset.identity, grid=stage.grid)
        more = room if self._options.copies == "auto" else 0
        keeps = kept_chunks(placement, self.number, np.arange(chunks), more)
        stage.share(placement, peers, keeps, keeps)

    def _filler(self, dataset: _Dataset) -> Filler | None:
        """Brings what this node keeps in memory, for processes that do not ask for chunks. Raises ParioError."""
        stage = dataset.stage
        assert stage.fetcher is not None
        assert stage.keeps is not None  # it has met the other services
        if stage.memory is None:
            return None

        def failed(error: BaseException) -> None:
            _log.warning("%s was not brought as a whole: %s", dataset.path, error)

        chunks = np.flatnonzero(stage.keeps)
        return Filler(
            stage.fetcher,
            stage.memory,
            iter(chunks.tolist()),
            chunks,
            threads=self._options.inflight,
            stats=RankStats(),
            failed=failed,
        )

    def _placed(self, dataset: _Dataset) -> np.ndarray:
        """i32[chunks, copies]: see `Placement`. Raises OSError, ValueError, ParioError."""
        asked = packed({"path": dataset.path, "identity": dataset.identity.hex()})
        answer = self._answer_assign(asked) if self.number == 0 else self._clients[0].call(ASSIGN, asked)
        words, raw = unpacked(answer)
        if words.get("problem"):
            raise ParioError(words["problem"])
        chunks, copies = dataset.stage.grid.chunks, int(words["copies"])
        return np.frombuffer(raw, np.int32, chunks * copies).reshape(chunks, copies)

    def _answer_assign(self, body: bytes) -> bytes:
        """By the first service. Raises ValueError."""
        path, identity = _asked(body)
        try:
            with self._placing:
                owners = self._placements.get(identity)
                if owners is None:
                    owners = self._placements[identity] = self._place_all(path, identity, body)
        except (ParioError, OSError) as e:
            return packed({"problem": str(e)})
        return packed({"copies": owners.shape[1]}, owners.tobytes())

    def _place_all(self, path: str, identity: bytes, asked: bytes) -> np.ndarray:
        """Raises ParioError, OSError."""
        grid = self._opened(path, identity).stage.grid
        answers: list[Future[bytes]] = [
            self._askers.call(self._answer_room, asked)
            if node == self.number
            else self._askers.call(client.call, ROOM, asked)
            for node, client in enumerate(self._clients)
        ]
        rooms, held = [0] * len(answers), np.zeros((len(answers), grid.chunks), bool)
        for node, future in enumerate(answers):
            try:
                words, raw = unpacked(future.result())
                if words.get("problem"):
                    raise ParioError(words["problem"])
                rooms[node] = int(words["room"])
                if raw:
                    held[node] = np.unpackbits(np.frombuffer(raw, np.uint8), count=grid.chunks)
            except (OSError, ValueError, KeyError, ParioError) as e:
                _log.warning("node %d keeps nothing of %s: %s", node, path, e)
        copies = COPIES if self._options.copies == "auto" else int(self._options.copies)
        return np.ascontiguousarray(assign(_seed(identity), np.arange(grid.chunks), rooms, copies, held=held).owners)

    def _answer_room(self, body: bytes) -> bytes:
        """Raises ValueError."""
        path, identity = _asked(body)
        try:
            stage = self._opened(path, identity).stage
        except (ParioError, OSError) as e:
            return packed({"problem": str(e)})
        return packed({"room": max(tier.room() for tier in stage.tiers)}, stage.held_bits())

    # -- the end -------------------------------------------------------------------------------------------------------

    def state(self) -> list[dict[str, Any]]:
        """What became of each dataset: path, store_bytes, held_bytes."""
        return [
            {
                "path": dataset.path,
                "file_bytes": dataset.stage.grid.file_bytes,
                "store_bytes": dataset.stage.store_bytes,
                "held_bytes": int(dataset.stage.held().sum()) * dataset.stage.grid.chunk_bytes,
            }
            for dataset in self._datasets.values()
        ]

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self.served_bytes += nbytes

    def close(self) -> None:
        """Jobs that go on read the store for what they cannot find elsewhere. Idempotent."""
        service, self._service = self._service, None
        if service is None:
            return
        with suppress(OSError):
            self._directory.remove(WHERE)
        for client in self._clients:
            client.close()
        service.close()
        self._askers.end(0, cancel=True)
        for dataset in self._datasets.values():
            dataset.close()
        self._datasets.clear()
        os.close(self._lock_file)


def _asked(body: bytes) -> tuple[str, bytes]:
    """(path, identity) of a request. Raises ValueError."""
    words, _ = unpacked(body)
    try:
        return os.fspath(words["path"]), bytes.fromhex(words["identity"])
    except (KeyError, TypeError) as e:
        raise ValueError("a request without a dataset") from e


def _seed(identity: bytes) -> int:
    return int.from_bytes(identity[:8], "little")
