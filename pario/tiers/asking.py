"""Asks the service of this node for a dataset (pario/dataset/host.py answers).

    FOLDER/pario-UID/service        where the services are, and the secret that proves who asks; readable by this user
                     service.lock   byte 0 is locked by the service while it lives, byte k by anyone who uses dataset k;
                                    and if its users start it (pario/commands/run_service.py), STARTS by the service
                                    since it was started, USE by them
"""

from __future__ import annotations

import json
import logging
import math
import os
import struct
import time
from contextlib import closing, suppress
from typing import Any, NamedTuple

import numpy as np

from pario.errors import OptionError, ParioError
from pario.kernels.private import PrivateDirectory
from pario.machine import boot, closing_fd
from pario.options import MiB
from pario.plan.placement import Placement
from pario.text import DAMAGED, read_json
from pario.tiers.disk_files import USE, is_used, lock_use, root_of
from pario.tiers.grid import Grid
from pario.tiers.peers import OPEN, Peers, Servers
from pario.wire.client import Address, Client

_log = logging.getLogger("pario")

#: when a service was waited for in vain, by directory
_missed: dict[str, float] = {}

#: One chunk is one read, which FUSE and many network file systems carry in one request (see options.READ_BYTES).
CHUNK_BYTES = MiB

#: names of the files
WHERE, LOCK = "service", "service.lock"
STARTS = 1 << 61

#: Seconds for a service that is about to start, and for one that opens a dataset on a slow store.
START_S = 10.0
_LOOK_S = 0.1
_OPEN_S = 60.0
#: A service that did not come is not waited for again within this many seconds.
_MISSED_S = 60.0
#: A dataset that nobody uses may go between the answer and the lock.
_TRIES = 3


def here(folder: str) -> str:
    """The folder on this node: its path may name variables, as $TMPDIR. Raises OptionError."""
    where = os.path.expandvars(folder)
    if "$" in where:
        raise OptionError(f"folder {folder!r} names a variable that is not set on this node")
    return where


def written(servers: Servers) -> bytes:
    """For the file that `read_servers` reads."""
    words = {"node": servers.node, "addresses": servers.addresses, "secret": servers.secret.hex()}
    return json.dumps(words).encode()


def read_servers(text: bytes) -> Servers:
    """Raises ValueError."""
    try:
        words = read_json(text)
        addresses = [Address(a, b, tuple(hosts), port) for a, b, hosts, port in words["addresses"]]
        servers = Servers(int(words["node"]), addresses, bytes.fromhex(words["secret"]))
        here = addresses[servers.node]
    except DAMAGED as e:
        raise ValueError(f"not written by a service: {e}") from e
    if here.machine != boot():
        raise ValueError("the service there is that of another machine, with which this one shares the folder")
    return servers


def packed(words: dict[str, Any], raw: bytes = b"") -> bytes:
    """A message of words, and of bytes that would be long as words."""
    head = json.dumps(words).encode()
    return struct.pack("<I", len(head)) + head + raw


def unpacked(message: bytes) -> tuple[dict[str, Any], bytes]:
    """Raises ValueError."""
    if len(message) < 4:
        raise ValueError("a message that is too short")
    end = 4 + int.from_bytes(message[:4], "little")
    words = read_json(message[4:end])
    if not isinstance(words, dict):
        raise ValueError("a message without words")
    return words, message[end:]


def good(body: bytes) -> tuple[dict[str, Any], bytes]:
    """What an answer says. Raises ParioError with what the service says where there is none, ValueError."""
    words, raw = unpacked(body)
    if words.get("problem"):
        raise ParioError(str(words["problem"]))
    return words, raw


class Told(NamedTuple):
    """What a service has said of a dataset.

    path : of its memory tier, or None
    budget : of that tier, in bytes
    owners, keeps : see `Placement` and `Stage`
    """

    servers: Servers
    path: str | None
    budget: int
    owners: np.ndarray
    keeps: np.ndarray


def peers_told(told: Told, identity: bytes, grid: Grid, **more: Any) -> Peers:
    """Whom a process asks that the service serves. more : of `Peers`"""
    placement = Placement(owners=told.owners, nodes=len(told.servers.addresses))
    return Peers(placement, told.servers, serves=False, identity=identity, grid=grid, kept=told.keeps, **more)


def ask_service(
    folder: str, path: str, identity: bytes, grid: Grid, *, waits: bool = True, **more: Any
) -> tuple[Told | None, int]:
    """What the service says, and the descriptor whose lock tells it that the dataset is in use. None: there is no
    service, or it cannot serve this dataset; a warning says why.

    folder : of the service on this node; path : of the data file
    waits : for a service that is about to start
    more : fill=True: the service is to bring the dataset, as this process will not ask for chunks, nor other nodes
    """
    asked = {"path": path, "identity": identity.hex(), "file_bytes": grid.file_bytes}
    lock = -1
    try:
        directory = PrivateDirectory(root_of(folder))
        servers = _await_servers(directory, waits=waits)
        address = servers.addresses[servers.node]
        assert address is not None  # `find_servers` has looked at it
        with closing(Client(address, servers.secret, _OPEN_S)) as client:
            lock = directory.open_file(LOCK)
            slot = -1
            for _ in range(_TRIES):
                found, _raw = good(client.call(OPEN, packed({**asked, "look": True}))[1])
                if found["slot"] != slot:
                    slot = int(found["slot"])
                    lock_use(lock, alone=False, byte=slot)
                words, raw = good(client.call(OPEN, packed({**asked, **more}))[1])
                if words["slot"] == slot:  # it was in use when this was said
                    return _told(servers, words, raw, grid), lock
            why = "it does not keep the dataset"
    except (OSError, ParioError, ValueError, KeyError, TypeError, IndexError) as e:
        why = str(e)
    if lock >= 0:
        os.close(lock)
    _log.warning("the service in %s is not used for %s: %s", folder, path, why)
    return None, -1


def _await_servers(directory: PrivateDirectory, *, waits: bool) -> Servers:
    """`find_servers`, which may be about to start; but nobody waits for them twice. Raises OSError, ValueError."""
    waited = _missed.get(directory.path, -math.inf) > time.monotonic() - _MISSED_S
    try:
        return find_servers(directory, START_S if waits and not waited else 0.0)
    except FileNotFoundError:
        _missed[directory.path] = time.monotonic()
        raise


def find_servers(directory: PrivateDirectory, wait_s: float) -> Servers:
    """Raises FileNotFoundError if there are none, OSError (UnsafeError), ValueError."""
    end = time.monotonic() + wait_s
    failed = False
    while True:
        with suppress(FileNotFoundError):
            with closing_fd(directory.open_file(LOCK, make=False)) as lock:
                lives = is_used(lock, byte=0)
                # Nobody starts it a second time.
                failed = not lives and is_used(lock, byte=USE) and not is_used(lock, byte=STARTS)
            if lives:  # and has removed what an earlier one has written
                return read_servers(directory.read(WHERE))
        if failed:
            raise FileNotFoundError("the service did not start, or has died")
        if time.monotonic() > end:
            raise FileNotFoundError("no service runs there" + f" (waited {wait_s:g} s)" * (wait_s > 0))
        time.sleep(_LOOK_S)


def _told(servers: Servers, words: dict[str, Any], raw: bytes, grid: Grid) -> Told:
    """Raises ValueError, KeyError, TypeError."""
    path, chunks, copies = words["path"], int(words["chunks"]), int(words["copies"])
    if chunks != grid.chunks:
        raise ValueError(f"it divides the file into {chunks} chunks, this job into {grid.chunks}")
    owners, keeps = np.empty((chunks, 0), np.int32), np.zeros(chunks, bool)
    if raw:
        owners = np.frombuffer(raw, np.int32, chunks * copies).reshape(chunks, copies)
        keeps = np.unpackbits(np.frombuffer(raw, np.uint8, offset=owners.nbytes), count=chunks).astype(bool)
    return Told(servers, path and str(path), int(words["budget"]), owners, keeps)
