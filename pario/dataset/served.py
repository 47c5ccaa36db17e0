"""A dataset through the service of each node (host.py): its ranks share the copies of all jobs that use the service."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import Any

import numpy as np

from pario.comm.base import AnyWorld, together
from pario.dataset.file import DataFile
from pario.dataset.staging import Stage
from pario.dataset.tiers import service_folder, share_memory
from pario.errors import ParioError
from pario.fetch.snapshot import read_snapshot
from pario.format.meta import Snapshot
from pario.kernels.private import PrivateDirectory
from pario.machine import closing_fd
from pario.options import Options
from pario.records import EXTENT
from pario.tiers import asking
from pario.tiers.disk_files import is_used, root_of
from pario.tiers.grid import Grid
from pario.tiers.peers import Peers
from pario.tiers.served import ServedTier

_log = logging.getLogger("pario")


def open_served(
    file: DataFile, world: AnyWorld, snapshot: Snapshot, options: Options, *, waits: bool
) -> Stage | None:
    """Let `file` be read through the services that PARIO_SERVICE names; None, with a warning, if one of the nodes has
    none that can. Collective over `world`; all ranks raise, OptionError where it was noticed, if none can be meant.

    waits : for a service that is about to start
    """
    with together(world, "looking for the service of the node"):
        folder = service_folder(options) if world.rank == 0 else ""
        identity = file.identity([snapshot]) if folder else b""
    folder, identity, file_bytes = world.bcast((folder, identity, snapshot.file_bytes))
    if not folder:
        return None
    grid = Grid(file_bytes, asking.CHUNK_BYTES)
    told: asking.Told | None = None
    lease, memory = -1, None
    try:
        with together(world, "looking for the service of the node"):
            if world.is_leader:
                path = os.path.abspath(file.path)
                told, lease = asking.ask_service(asking.here(folder), path, identity, grid, waits=waits)
            # What the identity is of must be what the ranks read.
            if told is not None and read_snapshot(file.pool.fetcher, tars=True) != snapshot:
                _close(lease)
                told, lease = None, -1
        told = world.node_bcast(told)
        groups = set(world.allgather(told and told.servers.secret))
        if told is None or len(groups) > 1:
            if world.rank == 0 and len(groups) > 1:
                _log.warning("no node uses its service: some have none, or one that was started separately")
            _close(lease)
            return None
        memory = share_memory(_attached(grid, told) if world.is_leader else None, ServedTier, grid, world)
        tiers = [memory] if memory is not None else []
        stage = Stage([*tiers], memory, None, [snapshot], options, identity, grid, everywhere=True)
        peers = asking.peers_told(told, identity, grid, count=lambda nbytes: stage.count_peers(peer_bytes=nbytes))
        if memory is not None:
            memory.ask_by(lambda chunk: _brought(peers, chunk, grid), told.budget)
        file.read_through(stage.through)
        stage.share(peers.placement, peers, told.keeps, np.zeros(grid.chunks, bool), lease if lease >= 0 else None)
        stage.is_lost = lambda: not _serves(folder, told)
        return stage
    except BaseException:
        _close(lease)
        if memory is not None:
            memory.close()
        raise


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


def _serves(folder: str, told: asking.Told) -> bool:
    """Whether this node's service is still the one that has said this; one that has retired still serves."""
    try:
        directory = PrivateDirectory(root_of(asking.here(folder)))
        with closing_fd(directory.open_file(asking.LOCK, make=False)) as lock:
            lives = is_used(lock, byte=0)
        with suppress(FileNotFoundError):
            return lives and asking.read_servers(directory.read(asking.WHERE)).secret == told.servers.secret
        return lives
    except (OSError, ValueError, ParioError):
        return False


def _brought(peers: Peers, chunk: int, grid: Grid) -> bool:
    """Let the service bring a chunk; its first byte shows that it has done so."""
    first = np.array([(grid.span(chunk)[0], 1)], EXTENT)
    return bool(peers.read(first, np.empty(1, np.uint8), np.zeros(1, np.int64))[0])


def _attached(grid: Grid, told: asking.Told) -> ServedTier | None:
    try:
        return ServedTier.attached(grid, told.path) if told.path is not None else None
    except (OSError, ParioError) as e:  # in another container; what the service holds comes through its socket
        _log.warning("the memory of the node's service cannot be mapped: %s", e)
        return None


def look_at_service() -> list[dict[str, Any]]:
    """What PARIO_SERVICE means on this node, as `tiers.look_at_tiers` says it of tiers; empty if it is not set."""
    folder = service_folder(Options())
    if not folder:
        return []
    facts: dict[str, Any] = {"where": f"service in {folder}", "service": "", "problem": ""}
    try:
        servers = asking.find_servers(PrivateDirectory(root_of(asking.here(folder))), wait_s=0.0)
        facts["service"] = f"node {servers.node} of {len(servers.addresses)}"
    except (OSError, ParioError, ValueError) as e:
        facts["problem"] = str(e)
    return [facts]
