"""Copies of each node's part of a checkpoint on another node's fast tier, so that the loss of a node loses nothing.

The nodes stand in a ring: node k keeps a copy of what node k - 1 has written. When its own part of a checkpoint is
committed on its fast tier, its first rank asks the node before it for the description of that node's part, reserves the
room, fetches block by block, checks each, and commits the copy by the rule of every checkpoint. Anyone who keeps a copy
asks for it, because it alone knows what it has room for; nobody is sent what it has not asked for.

    DESCRIBE   step, id                         HERE: u64, bytes of the manifest; the manifest; the part's description
                                                LATER: not written yet; ABSENT: it will not be on the fast tier
    READ       and number of a file of the      HERE: the bytes
               part, offset, number of bytes

The messages, and the proof that both sides belong to the job, are those of wire/frames.py.

The scheme is the "partner" level of SCR: Moody, Bronevetsky, Mohror, de Supinski, Design, Modeling, and Evaluation of a
Scalable Multi-level Checkpointing System, SC 2010.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import struct
import threading
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass

import numpy as np

from pario.checkpoint.attempts import COPYING, Attempt, Board, Tiers
from pario.checkpoint.finding import carry_over, copy_blocks
from pario.checkpoint.manifest import MANIFEST, Part, part_name, read_manifest, read_part
from pario.checkpoint.store import ATTEMPT, Name, Reader, Writer, commit, discard, make_folder, read_small, write_small
from pario.comm.base import AnyWorld, together
from pario.comm.launcher import own_addresses
from pario.comm.memory import private_bytes
from pario.errors import CheckpointError, CorruptedError, MissingError, OptionError
from pario.threads import Workers
from pario.wire import frames
from pario.wire.client import Client
from pario.wire.frames import Word
from pario.wire.server import AnsweringServer, Reply

_log = logging.getLogger("pario")

DESCRIBE, READ = 1, 2
_WHICH = struct.Struct("<Q16s")
_BYTES = struct.Struct("<IQQ")
_LENGTH = struct.Struct("<Q")
#: Bytes of one READ; most blocks have fewer.
_PIECE = 8 << 20
_THREADS = 2
#: Connections: those that are under way, and those that are made anew.
_LINKS = 16
#: Checkpoints that the next node may still ask for.
_OFFERS = 64
_POLL_S = (0.01, 0.5)
_END_S = 1.0


def open_partner(world: AnyWorld, tiers: Tiers, board: Board, threads: Workers) -> Partner | None:
    """That of this node's first rank; None on the others, and if there is one node only. Collective.

    Raises OptionError if nodes have their fast tier in common, OSError or ParioError on the rank where a socket is
    refused, PeerError on the others.
    """
    if world.nodes == 1:
        if world.rank == 0:
            _log.warning("partner=True copies nothing: this job has only one node")
        return None
    assert tiers.fast is not None
    _check_apart(world, tiers.fast.folder)
    secret = world.bcast(secrets.token_bytes(32))
    offers: Offers | None = None
    try:
        with together(world, "opening connections for partner copies"):
            if world.is_leader:
                offers = Offers(world, tiers.fast.folder, secret, tiers.limit_s)
        addresses = world.allgather((world.node, offers.server.address) if offers is not None else None)
    except BaseException:
        if offers is not None:
            offers.server.leave(_END_S)
        raise
    if offers is None:
        return None
    before = (world.node - 1) % world.nodes
    address = dict(each for each in addresses if each is not None)[before]
    return Partner(world, tiers, board, offers, Client(address, secret, tiers.limit_s), threads)


def _check_apart(world: AnyWorld, fast: str) -> None:
    """Whether each node has a fast folder of its own, as partner copies need it. Collective; raises on all ranks."""
    mark = world.bcast(f"{ATTEMPT}step-{secrets.token_hex(8)}-")  # `_sweep_folder` deletes what a kill leaves
    mine = os.path.join(fast, f"{mark}{world.node}")
    try:
        with together(world, "comparing the nodes' fast tiers"):
            if world.is_leader:
                os.mkdir(mine)
        with together(world, "comparing the nodes' fast tiers"):
            seen = sum(name.startswith(mark) for name in os.listdir(fast)) if world.is_leader else 1
            if seen > 1:
                raise OptionError(
                    f"partner=True needs a fast tier of each node's own, and {seen} nodes have this one in common",
                    path=fast,
                    hint="Name a folder on the nodes' disks or in their memory, or leave partner out",
                )
    finally:
        if world.is_leader:
            with suppress(OSError):
                os.rmdir(mine)


class Offers:
    """What this node has written, for the one that keeps copies of it. Raises OSError, ParioError."""

    def __init__(self, world: AnyWorld, folder: str, secret: bytes, limit_s: float) -> None:
        self._world, self._folder = world, folder
        self._lock = threading.Lock()
        # Of each checkpoint (`_which`), oldest first: its folder, and its files, none before they were described; None:
        # not on the fast tier.
        self._there: dict[bytes, tuple[str, list[tuple[str, int]]] | None] = {}
        self._local = threading.local()
        self.server = AnsweringServer(
            secret, self._answer, threads=_THREADS, most_bytes=_WHICH.size + _BYTES.size, most_links=_LINKS,
            limit_s=limit_s, hosts=own_addresses(),
        )  # fmt: skip

    def put(self, name: Name, there: bool) -> None:
        """there : this node's part is on its fast tier; otherwise it will never be"""
        mine = name._replace(node=self._world.node, nodes=self._world.nodes)
        with self._lock:
            self._there[_which(name)] = (os.path.join(self._folder, str(mine)), []) if there else None
            while len(self._there) > _OFFERS:
                del self._there[next(iter(self._there))]

    def _answer(self, kind: int, body: bytes) -> Reply:
        """Raises ValueError if the request is none."""
        which, more = body[: _WHICH.size], body[_WHICH.size :]
        if kind == DESCRIBE and len(body) == _WHICH.size:
            return self._describe(which)
        if kind == READ and len(more) == _BYTES.size:
            return self._read(which, *_BYTES.unpack(more))
        raise ValueError(f"a request of kind {kind} with {len(body)} bytes")

    def _describe(self, which: bytes) -> Reply:
        found = self._there.get(which)
        if found is None:
            return Reply(Word.ABSENT if which in self._there else Word.LATER, [])
        folder, _ = found
        name = os.path.join(folder, part_name(self._world.node) + ".json")
        try:
            manifest, described = read_small(os.path.join(folder, MANIFEST)), read_small(name)
        except MissingError:  # drained and deleted
            return Reply(Word.ABSENT, [])
        files = read_part(described, name).files
        with self._lock:
            if which in self._there:
                self._there[which] = folder, files
        texts = _LENGTH.pack(len(manifest)), manifest, described
        return Reply(Word.HERE, [frames.Part(np.frombuffer(text, np.uint8)) for text in texts])

    def _read(self, which: bytes, number: int, offset: int, nbytes: int) -> Reply:
        folder, files = self._there.get(which) or ("", [])
        if number >= len(files) or nbytes > _PIECE or offset + nbytes > files[number][1]:
            raise ValueError(f"{nbytes} bytes at {offset} of file {number} were asked for, which are not there")
        if not hasattr(self._local, "memory"):
            self._local.memory = private_bytes(_PIECE)
        data = self._local.memory[:nbytes]
        name, size = files[number]
        with Reader(os.path.join(folder, name), size) as reader:
            reader.read(data, offset)
        return Reply(Word.HERE, [frames.Part(data)])  # this thread sends it before it reads again


def _which(name: Name) -> bytes:
    return _WHICH.pack(name.step, name.id.encode())


class Partner:
    """Of the first rank of a node: copies what the node before it has written, one checkpoint after another, and lets
    the next node copy this one's. Nothing here calls MPI."""

    def __init__(
        self, world: AnyWorld, tiers: Tiers, board: Board, offers: Offers, client: Client, threads: Workers
    ) -> None:
        assert tiers.fast is not None
        self._world, self._tiers, self._fast, self._board = world, tiers, tiers.fast, board
        self._offers, self._client = offers, client
        self._node = (world.node - 1) % world.nodes  # whose parts are copied
        self._line = threads.lane(1)
        self._stopped = False
        self._moved = 0
        self._said: set[str] = set()

    def submit(self, attempt: Attempt, straight: bool) -> None:
        """When this node's part was written, or given up. straight : it lies on the slow tier"""
        self._offers.put(attempt.name, attempt.error is None and not straight)
        if straight or attempt.error is not None or not self._line.put(lambda: self._run(attempt)):
            attempt.uncopied = True
            attempt.copied.set()

    @property
    def idle(self) -> bool:
        """Nothing is copied, and nothing waits for it."""
        return not self._line.load

    def close(self, limit_s: float = _END_S) -> bool:
        """Give up what is under way; returns whether the thread ended in time. Idempotent."""
        self._stopped = True
        self._client.close()
        ended = self._line.close(limit_s)
        self._offers.server.leave(limit_s)
        return ended

    def _run(self, attempt: Attempt) -> None:
        name = attempt.name._replace(node=self._node, nodes=self._world.nodes, copy=True)
        try:
            stands = not (attempt.drained.is_set() and self._is_on_slow(name)) and self._copy(name)
        except Exception as e:
            stands = False
            if not self._stopped and not self._is_on_slow(name):
                self._say(name, e)
        attempt.uncopied = not stands
        attempt.copied.set()
        if attempt.drained.is_set():
            self._fast.prune()

    def _is_on_slow(self, name: Name) -> bool:
        """Then nobody needs a copy any more."""
        return os.path.isdir(os.path.join(self._tiers.slow, str(Name(name.step, name.id))))

    def _say(self, name: Name, error: Exception) -> None:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        why = f"the fast tier {self._fast.folder} has no room for it" if full else str(error)
        kind = "full" if full else type(error).__name__
        if kind not in self._said:
            self._said.add(kind)
            _log.warning(
                "node %d keeps no copy of node %d's part of step %d: %s. Until the slow store has that checkpoint, the "
                "loss of node %d would lose it (said once)", self._world.node, self._node, name.step, why, self._node,
            )  # fmt: skip

    def _copy(self, name: Name) -> bool:
        """Whether the copy stands; False: that node's part is not on its fast tier. Raises OSError, ParioError."""
        texts = self._described(name)
        if texts is None:
            return False
        manifest, described = texts
        where = f"node {self._node}'s description of step {name.step}"
        part, whole = read_part(described, where), read_manifest(manifest, where)
        if {(part.step, part.id, part.node, whole.nodes), (whole.step, whole.id, part.node, whole.nodes)} != {name[:4]}:
            raise CorruptedError("this describes another checkpoint", path=where)
        folder = os.path.join(self._fast.folder, f"{ATTEMPT}{name}")
        try:
            try:
                self._fetch(name, part, folder)
            except OSError as e:
                discard(folder)
                if e.errno not in (errno.ENOSPC, errno.EDQUOT) or not self._fast.prune(all_of_them=True):
                    raise
                self._fetch(name, part, folder)
            write_small(folder, part_name(part.node) + ".json", described)
            write_small(folder, MANIFEST, manifest, False)
            commit(folder, os.path.join(self._fast.folder, str(name)))
        except BaseException:
            discard(folder)
            raise
        return True

    def _described(self, name: Name) -> tuple[bytes, bytes] | None:
        """(manifest, description of the part); None: it is not there. Raises OSError, CheckpointError."""
        pause, began = _POLL_S[0], time.monotonic()
        while True:
            kind, answer = self._client.call(DESCRIBE, _which(name))
            if kind == Word.HERE:
                (length,) = _LENGTH.unpack_from(answer)
                end = _LENGTH.size + length
                return answer[_LENGTH.size : end], answer[end:]
            if kind == Word.ABSENT:
                return None
            if self._stopped or time.monotonic() - began > self._tiers.limit_s:
                raise CheckpointError(f"node {self._node} has not written its part within {self._tiers.limit_s:g} s")
            time.sleep(pause)
            pause = min(2 * pause, _POLL_S[1])

    def _fetch(self, name: Name, part: Part, folder: str) -> None:
        """The files of a part. Raises OSError, ParioError."""
        make_folder(folder)
        numbers = {file: number for number, (file, _) in enumerate(part.files)}

        def source(file: str, size: int) -> AbstractContextManager[_RemoteFile]:
            path = f"node {self._node}: {file} of step {name.step}"
            return nullcontext(_RemoteFile(path, self._client, _which(name), numbers[file]))

        for file in part.others:
            carry_over(part.node, file, source, folder, self._write, copies=True)
        copy_blocks(part, source, folder, self._write)

    def _write(self, writer: Writer, data: np.ndarray, offset: int) -> None:
        if self._stopped:
            raise CheckpointError("given up: the checkpointer was closed before the copy was made")
        writer.write(data, offset)
        self._moved += 1
        self._board.put(COPYING, self._moved)


@dataclass
class _RemoteFile:
    """number : of the file in the checkpoint's part"""

    path: str
    client: Client
    which: bytes
    number: int

    def read(self, block: np.ndarray, offset: int) -> None:
        """Raises OSError."""
        for begin in range(0, block.size, _PIECE):
            piece = block[begin : begin + _PIECE]
            try:
                self.client.call(READ, self.which + _BYTES.pack(self.number, offset + begin, piece.size), piece)
            except frames.WireError as e:
                raise OSError(f"{self.path}: {e}") from e
