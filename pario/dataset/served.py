"""A dataset through the service of each node (host.py): its ranks share the copies of all jobs that use the service.

FOLDER/pario-UID/service        where the services are, and the secret that proves who asks; readable by this user
                 service.lock   byte 0 is locked by the service while it lives, byte k by jobs that use dataset k
"""

from __future__ import annotations

import json
import logging
import os
import struct
import time
from typing import Any, NamedTuple

import numpy as np

from pario.comm.base import AnyWorld, together
from pario.comm.sockets import Address, Client
from pario.dataset.file import DataFile
from pario.dataset.staging import CHUNK_BYTES, Stage
from pario.dataset.tiers import here, identity_of, service_folder, share_memory
from pario.errors import ParioError
from pario.format.meta import Snapshot
from pario.kernels.private import PrivateDirectory
from pario.options import Options
from pario.plan.placement import Placement
from pario.records import EXTENT
from pario.stage.disk import lock_use, root_of
from pario.stage.grid import Grid
from pario.stage.peers import OPEN, Peers, Servers
from pario.stage.served import ServedTier

__all__ = ["LOCK", "WHERE", "look_at_service", "open_served", "packed", "read_servers", "unpacked", "written"]

_log = logging.getLogger("pario")

#: names of the files
WHERE, LOCK = "service", "service.lock"

#: Seconds for a service that is about to start, and for one that opens a dataset on a slow store.
_START_S, _LOOK_S = 10.0, 0.1
_OPEN_S = 60.0
#: A dataset that nobody uses may go between the answer and the lock.
_TRIES = 3


def written(servers: Servers) -> bytes:
    """For the file that `read_servers` reads."""
    words = {"node": servers.node, "addresses": servers.addresses, "secret": servers.secret.hex()}
    return json.dumps(words).encode()


def read_servers(text: bytes) -> Servers:
    """Raises ValueError."""
    try:
        words = json.loads(text)
        addresses = [Address(a, b, tuple(hosts), port) for a, b, hosts, port in words["addresses"]]
        return Servers(int(words["node"]), addresses, bytes.fromhex(words["secret"]))
    except (KeyError, TypeError) as e:
        raise ValueError(f"not written by a service: {e}") from e


def packed(words: dict[str, Any], raw: bytes = b"") -> bytes:
    """A message of words, and of bytes that would be long as words."""
    head = json.dumps(words).encode()
    return struct.pack("<I", len(head)) + head + raw


def unpacked(message: bytes) -> tuple[dict[str, Any], bytes]:
    """Raises ValueError."""
    if len(message) < 4:
        raise ValueError("a message that is too short")
    end = 4 + int.from_bytes(message[:4], "little")
    words = json.loads(message[4:end])
    if not isinstance(words, dict):
        raise ValueError("a message without words")
    return words, message[end:]


class _Told(NamedTuple):
    """What a service has said of a dataset.

    paths : of its memory tier's files, or None
    budget : of that tier, in bytes
    owners, keeps : see `Placement` and `Stage`
    """

    servers: Servers
    paths: tuple[str, str] | None
    budget: int
    owners: np.ndarray
    keeps: np.ndarray


def open_served(file: DataFile, world: AnyWorld, snapshot: Snapshot, options: Options) -> Stage | None:
    """Let `file` be read through the services that PARIO_SERVICE names; None, with a warning, if one of the nodes has
    none that can. Collective over `world`; all ranks raise, OptionError where it was noticed, if none can be meant."""
    with together(world, "looking for the service of the node"):
        folder = service_folder(options) if world.rank == 0 else ""
        identity = identity_of(file.pool.fetcher, snapshot) if folder else b""
    folder, identity, file_bytes = world.bcast((folder, identity, snapshot.file_bytes))
    if not folder:
        return None
    grid = Grid(file_bytes, CHUNK_BYTES)
    told: _Told | None = None
    lease = -1
    with together(world, "looking for the service of the node"):
        if world.is_leader:
            told, lease = _ask(here(folder), os.path.abspath(file.path), identity, grid)
    told = world.node_bcast(told)
    groups = set(world.allgather(told and told.servers.secret))
    if told is None or len(groups) > 1:
        if lease >= 0:
            os.close(lease)
        if world.rank == 0 and (told is not None or len(groups) > 1):
            _log.warning("the service of the nodes is not used: some have none, or one that was started separately")
        return None
    memory = share_memory(_attached(grid, told) if world.is_leader else None, ServedTier, grid, world)
    tiers = [memory] if memory is not None else []
    stage = Stage([*tiers], memory, None, snapshot, options, identity, grid, everywhere=True)
    placement = Placement(owners=told.owners, nodes=len(told.servers.addresses))
    peers = Peers(
        placement,
        told.servers,
        serves=False,
        identity=identity,
        grid=grid,
        kept=told.keeps,
        count=lambda nbytes: stage.count_peers(came=nbytes),
    )
    if memory is not None:
        memory.ask_by(lambda chunk: _brought(peers, chunk, grid), told.budget)
    file.read_through(stage.through)
    stage.share(placement, peers, told.keeps, np.zeros(grid.chunks, bool), lease if lease >= 0 else None)
    return stage


def _brought(peers: Peers, chunk: int, grid: Grid) -> bool:
    """Let the service bring a chunk; its first byte shows that it has done so."""
    first = np.array([(grid.span(chunk)[0], 1)], EXTENT)
    return bool(peers.read(first, np.empty(1, np.uint8), np.zeros(1, np.int64))[0])


def _attached(grid: Grid, told: _Told) -> ServedTier | None:
    try:
        return ServedTier.attached(grid, told.paths) if told.paths is not None else None
    except (OSError, ParioError) as e:  # in another container; what the service holds comes through its socket
        _log.warning("the memory of the node's service cannot be mapped: %s", e)
        return None


def _ask(folder: str, path: str, identity: bytes, grid: Grid) -> tuple[_Told | None, int]:
    """What the service says, and the descriptor whose lock tells it that the dataset is in use. None: there is no
    service, or it cannot serve this dataset; a warning says why."""
    lock = -1
    why = "it does not keep the dataset"
    try:
        directory = PrivateDirectory(root_of(folder))
        servers = _find(directory, _START_S)
        address = servers.addresses[servers.node]
        assert address is not None  # it has written the file
        client = Client(address, servers.secret, _OPEN_S)
        try:
            lock = directory.open_file(LOCK)
            slots: set[int] = set()
            for _ in range(_TRIES):
                words, raw = unpacked(client.call(OPEN, packed({"path": path, "identity": identity.hex()})))
                if words.get("problem"):
                    why = words["problem"]
                    break
                if words["slot"] in slots:  # it was in use when this was said
                    return _told(servers, words, raw, grid), lock
                slots.add(words["slot"])
                lock_use(lock, alone=False, byte=words["slot"])
        finally:
            client.close()
    except (OSError, ParioError, ValueError, KeyError) as e:
        why = str(e)
    if lock >= 0:
        os.close(lock)
    _log.warning("the service in %s is not used for %s: %s", folder, path, why)
    return None, -1


def look_at_service() -> list[dict[str, Any]]:
    """What PARIO_SERVICE means on this node, as `tiers.look_at_tiers` says it of tiers; empty if it is not set."""
    folder = service_folder(Options())
    if not folder:
        return []
    facts: dict[str, Any] = {"where": f"service in {folder}", "service": "", "problem": ""}
    try:
        servers = _find(PrivateDirectory(root_of(here(folder))), wait_s=0.0)
        facts["service"] = f"node {servers.node} of {len(servers.addresses)}"
    except (OSError, ParioError, ValueError) as e:
        facts["problem"] = str(e)
    return [facts]


def _find(directory: PrivateDirectory, wait_s: float) -> Servers:
    """Raises OSError (UnsafeError), ValueError."""
    end = time.monotonic() + wait_s
    while True:
        try:
            text = directory.read(WHERE)
            lock = directory.open_file(LOCK)
            try:
                if not lock_use(lock, alone=True, byte=0):
                    return read_servers(text)
            finally:
                os.close(lock)
        except FileNotFoundError:
            pass
        if time.monotonic() > end:
            raise FileNotFoundError("no service runs there" + f" (waited {wait_s:g} s)" * (wait_s > 0))
        time.sleep(_LOOK_S)


def _told(servers: Servers, words: dict[str, Any], raw: bytes, grid: Grid) -> _Told:
    """Raises ValueError."""
    paths, copies = words["paths"], int(words["copies"])
    owners = np.frombuffer(raw, np.int32, grid.chunks * copies).reshape(grid.chunks, copies)
    keeps = np.unpackbits(np.frombuffer(raw, np.uint8, offset=owners.nbytes), count=grid.chunks).astype(bool)
    return _Told(servers, paths and (paths[0], paths[1]), int(words["budget"]), owners, keeps)
