"""From staging memory to the first tier, and from there to the slow one: the threads of a rank.

    the node's first rank                          every rank of the node
    makes the folder, reserves the file
    says "opened"
    writes what HDF5 needs                         writes its blocks, and notes their checksums
                                                   says "written"
    syncs, describes the node's file
    fast tier: commits by rename
    says "done": staging memory is free again

The slow tier's folder is one for all nodes. Every node's first rank copies its own file into it, and says so by the
description of the file there. Rank 0 waits for the descriptions of all nodes, writes the manifest with their checksums,
and renames the folder. One checkpoint is drained at a time, oldest first, by one writer per node.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import replace

import numpy as np

from pario.checkpoint import attempts, manifest, store
from pario.checkpoint.attempts import Attempt, Board, Tiers
from pario.checkpoint.finding import Write, carry_over, copy_blocks, in_folder, write_limited
from pario.checkpoint.store import Name, Writer
from pario.checkpoint.varying import Shape, Varying
from pario.comm.base import AnyWorld
from pario.errors import CheckpointError, MissingError, ReadError
from pario.threads import Call, Workers

_log = logging.getLogger("pario")

_POLL_S = (0.01, 0.5)
#: Threads of one rank that write: a block is checked while another one is written.
_WRITE = 2


class WriteThread:
    """Writes the attempts of one rank, one after another; `then` takes each that was written, on the node's first rank.

    All waiting is bounded. Nothing here calls MPI.
    """

    def __init__(
        self, world: AnyWorld, tiers: Tiers, board: Board, varying: Varying, then: Callable[[Attempt, bool], None],
        threads: Workers,
    ) -> None:  # fmt: skip
        self._world, self._tiers, self._board, self._varying, self._then = world, tiers, board, varying, then
        self._line, self._writers = threads.lane(1), threads.lane(_WRITE)
        self._moved = 0
        self._lock = threading.Lock()

    def submit(self, attempt: Attempt) -> None:
        self._line.put(lambda: self._run(attempt))

    def close(self, limit_s: float) -> bool:
        """Give up what is under way; returns whether the threads ended in time."""
        self._board.stopped = True
        return self._line.close(limit_s) & self._writers.close(limit_s)

    def _run(self, attempt: Attempt) -> None:
        straight = self._tiers.fast is None
        folder = ""
        try:
            shape = self._prepared(attempt)
            if self._world.is_leader:
                folder, straight = self._open(attempt, shape)
            else:
                self._board.wait(attempts.OPENED, attempt.number, "the node's first rank to make the file")
                straight = self._board.get(attempts.STRAIGHT) == attempt.number
                folder = self._attempt_folder(attempt, straight)
            self._write(attempt, folder, straight, shape)
        except Exception as e:
            what = f"the checkpoint of step {attempt.manifest.step} was not saved"
            error = store.failed(e, what, folder or self._tiers.slow)
            attempt.fail(error)
            self._board.fail(attempt.number, str(error))
            if self._world.is_leader and not straight:
                store.discard(folder or self._attempt_folder(attempt, False))
        if self._world.is_leader:
            if attempt.error is not None:
                self._board.put(attempts.CANCELLED, attempt.number)
            else:
                attempt.durable_at["fast"] = time.monotonic()
            self._board.put(attempts.DONE, attempt.number)
            attempt.straight = straight
            attempt.written.set()
            self._then(attempt, straight)
            return
        if attempt.error is None:
            try:
                self._board.wait(attempts.DONE, attempt.number, "the node's first rank to finish the file")
            except CheckpointError as e:
                attempt.fail(e)
        for event in (attempt.written, attempt.copied, attempt.committed, attempt.drained):
            event.set()

    def _prepared(self, attempt: Attempt) -> Shape:
        """Everything before the file can be made (varying.py). What comes back counts on the node's first rank."""
        board, varying, file, shape = self._board, self._varying, attempt.file, Shape()
        if not varying:
            if self._world.is_leader:
                varying.lay_out(file, shape)
            return shape

        def summed(number: int, at: int) -> None:
            varying.sum(number, attempt.staging[at : at + file.blocks[number][1]])
            self._move(file.blocks[number][1])

        def coded(number: int, at: int) -> None:
            nbytes = file.blocks[number][1]
            varying.code(number, attempt.staging[at : at + store.whole_pages(nbytes)], nbytes)
            self._move(nbytes)

        _all([self._writers.call(summed, *put) for put in file.puts])
        board.mine(attempts.SUMMED, attempt.number)
        if self._world.is_leader:
            folder = self._attempt_folder(attempt, self._tiers.fast is None)
            store.make_folder(folder)
            board.wait(attempts.SUMMED, attempt.number, "the node's ranks to look for what has changed", True)
            shape = varying.choose(file, folder)
            board.put(attempts.CHOSEN, attempt.number)
        board.wait(attempts.CHOSEN, attempt.number, "the node's first rank to look for what has changed")
        _all([self._writers.call(coded, *put) for put in file.puts])
        board.mine(attempts.CODED, attempt.number)
        if self._world.is_leader:
            board.wait(attempts.CODED, attempt.number, "the node's ranks to pack their blocks", True)
            varying.lay_out(file, shape)
        return shape

    def _attempt_folder(self, attempt: Attempt, straight: bool) -> str:
        if straight:
            return os.path.join(self._tiers.slow, f"{store.ATTEMPT}{attempt.name}")
        assert self._tiers.fast is not None
        name = attempt.name._replace(node=self._world.node, nodes=self._world.nodes)
        return os.path.join(self._tiers.fast.folder, f"{store.ATTEMPT}{name}")

    def _open(self, attempt: Attempt, shape: Shape) -> tuple[str, bool]:
        """Make the folder and the file; (folder, whether it lies on the slow tier)."""
        straight = self._tiers.fast is None
        folder = self._attempt_folder(attempt, straight)
        began = time.monotonic()
        while True:
            try:
                store.make_folder(folder)
                Writer(self._file(folder), shape.size, direct=False).close()
                break
            except OSError as e:
                with suppress(OSError):
                    os.unlink(self._file(folder))
                if straight or e.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                if not self._room_on_fast(attempt, shape.size, began):
                    straight = True
                    before, folder = folder, self._attempt_folder(attempt, True)
                    for other in shape.others:
                        store.make_folder(folder)
                        file = other.id, other.size
                        carry_over(self._world.node, file, in_folder(before), folder, self._write_slow)
                    store.discard(before)
        if straight:
            self._board.put(attempts.STRAIGHT, attempt.number)
        self._board.put(attempts.OPENED, attempt.number)
        return folder, straight

    def _room_on_fast(self, attempt: Attempt, size: int, began: float) -> bool:
        """The fast tier is full: True to try again, False to write straight to the slow one. Raises OSError."""
        fast = self._tiers.fast
        assert fast is not None
        # What came before the checkpoint that this one goes on from. That one stays until a newer one is drained.
        if fast.prune(all_of_them=True) or fast.give_up((attempt.manifest.parents or [])[1:]):
            return True
        said = f"the fast tier {fast.folder} has no room for {size:,} bytes of step {attempt.manifest.step}"
        if self._board.stopped:
            raise OSError(errno.ENOSPC, said)
        late = time.monotonic() - began >= self._tiers.limit_s
        if self._tiers.full == "slow" or late or self._board.get(attempts.DRAINED) >= attempt.number - 1:
            _log.warning("%s: this node writes straight to %s", said, self._tiers.slow)
            return False
        if time.monotonic() - began < 0.5:
            _log.warning("%s: it waits for earlier checkpoints to be drained", said)
        time.sleep(0.5)
        return True

    def _file(self, folder: str) -> str:
        return os.path.join(folder, manifest.part_name(self._world.node) + ".h5")

    def _write(self, attempt: Attempt, folder: str, straight: bool, shape: Shape) -> None:
        file, board = attempt.file, self._board
        write = self._write_slow if straight else Writer.write
        with Writer(self._file(folder)) as writer:
            rest = shape.rest if self._world.is_leader else []
            calls = [self._writers.call(writer.write, np.frombuffer(data, np.uint8), at) for at, data in rest]
            calls += [self._writers.call(self._put, attempt, writer, each, write) for each in file.puts]
            try:
                pieces = file.pieces_text if self._world.is_leader else ""  # meanwhile
            finally:
                _all(calls)
            board.mine(attempts.WRITTEN, attempt.number)
            if not self._world.is_leader:
                return
            board.wait(attempts.WRITTEN, attempt.number, "the node's ranks to write their parts", True)
            writer.sync()
        part = self._varying.described(attempt.manifest.step, attempt.manifest.id, file, shape)
        described = manifest.part_text(part, pieces)
        attempt.described = f"{store.sum_of(described):016x}"
        store.write_small(folder, manifest.part_name(part.node) + ".json", described, straight)
        final = os.path.join(os.path.dirname(folder), os.path.basename(folder)[len(store.ATTEMPT) :])
        self._varying.remember(file, part, shape, (folder, final))
        if not straight:
            assert self._tiers.fast is not None
            text = manifest.manifest_text(attempt.manifest, file.arrays_text)
            store.write_small(folder, manifest.MANIFEST, text, False)
            self._tiers.fast.begin(attempt.name)
            store.commit(folder, final)
            self._tiers.fast.prune()

    def _put(self, attempt: Attempt, writer: Writer, put: tuple[int, int], write: Write) -> None:
        (number, at), target = put, int(self._board.places[put[0]])
        nbytes = attempt.file.blocks[number][1]
        slot = attempt.staging[at : at + store.whole_pages(nbytes)]
        if not self._varying:
            self._varying.sum(number, slot[:nbytes])
            self._varying.code(number, slot, nbytes)
        if target != attempts.TAKEN:
            write(writer, slot[: self._varying.stored_bytes(number, nbytes)], target)
            self._varying.clean(number, attempt.file, slot)
        self._move(nbytes)

    def _write_slow(self, writer: Writer, data: np.ndarray, offset: int) -> None:
        write_limited(writer, data, offset, self._tiers.take, lambda: self._board.stopped)

    def _move(self, nbytes: int) -> None:
        """The others see that this rank goes on."""
        with self._lock:
            self._moved += nbytes
            self._board.mine(attempts.MOVED, self._moved)


def _all(calls: list[Call]) -> None:
    """Wait for all; raises the first error."""
    wait(calls)
    for call in calls:
        call.result()


class DrainThread:
    """Of the first rank of a node."""

    def __init__(self, world: AnyWorld, tiers: Tiers, board: Board, threads: Workers) -> None:
        self._world, self._tiers, self._board, self._line = world, tiers, board, threads.lane(1)
        self._stopped = False
        self._moved = 0
        self._parents: dict[str, list[str]] = {}
        self._failed: list[str] = []  # folders, which another node may have made again

    def submit(self, attempt: Attempt, straight: bool) -> None:
        """straight : the node's file lies on the slow tier already"""
        self._line.put(lambda: self._run(attempt, straight))

    def close(self, limit_s: float) -> bool:
        self._stopped = True
        ended = self._line.close(limit_s)
        for folder in self._failed:
            store.discard(folder)
        return ended

    def _run(self, attempt: Attempt, straight: bool) -> None:
        folder = os.path.join(self._tiers.slow, f"{store.ATTEMPT}{attempt.name}")
        try:
            if attempt.error is None and not straight:
                self._copy(attempt, folder)
            if attempt.error is None and self._world.rank == 0:
                self._commit(attempt, folder)
                attempt.durable_at["slow"] = time.monotonic()
        except Exception as e:
            attempt.fail(store.failed(e, f"the checkpoint of step {attempt.manifest.step} was not drained", folder))
        if attempt.error is not None and self._world.rank == 0:
            self._failed.append(folder)
            store.discard(folder)
        elif attempt.error is not None:  # rank 0 is not to wait for this node
            with suppress(OSError):
                store.make_folder(folder)
                said = str(attempt.error).encode(errors="replace")
                store.write_small(folder, f"failed-{self._world.node:05d}", said)
        if self._tiers.fast is not None:
            self._tiers.fast.end(attempt.name)
        attempt.committed.set()
        if attempt.error is None and self._world.rank == 0:
            while self._failed:  # no node has anything left to do for those
                store.discard(self._failed.pop())
            self._parents[attempt.name.id] = attempt.manifest.parents or []
            prune(self._tiers.slow, self._tiers.keep, attempt.name, self._parents)
        self._board.put(attempts.DRAINED, attempt.number)
        attempt.drained.set()

    def _copy(self, attempt: Attempt, folder: str) -> None:
        """This node's file, checked on its way. Raises OSError, ParioError."""
        assert self._tiers.fast is not None
        name = attempt.name._replace(node=self._world.node, nodes=self._world.nodes)
        source = os.path.join(self._tiers.fast.folder, str(name))
        described = store.read_small(os.path.join(source, manifest.part_name(self._world.node) + ".json"))
        part = manifest.read_part(described, source)
        store.make_folder(folder)
        for file in part.others:
            carry_over(part.node, file, in_folder(source), folder, self._write)
        copy_blocks(part, in_folder(source), folder, self._write)
        store.write_small(folder, manifest.part_name(self._world.node) + ".json", described)

    def _write(self, writer: Writer, data: np.ndarray, offset: int) -> None:
        write_limited(writer, data, offset, self._take, lambda: self._stopped)

    def _take(self, nbytes: int) -> None:
        self._moved += 1
        self._board.put(attempts.DRAINING, self._moved)
        self._tiers.take(nbytes)

    def _commit(self, attempt: Attempt, folder: str) -> None:
        """Wait for all nodes, then commit. Raises OSError, ParioError."""
        sums = [attempt.described, *(self._await_node(folder, node) for node in range(1, self._world.nodes))]
        whole = replace(attempt.manifest, parts=sums)
        text = manifest.manifest_text(whole, attempt.file.arrays_text)
        store.write_small(folder, manifest.MANIFEST, text, False)
        store.commit(folder, os.path.join(self._tiers.slow, str(attempt.name)))

    def _await_node(self, folder: str, node: int) -> str:
        """Checksum of that node's description, when it is there."""
        path = os.path.join(folder, manifest.part_name(node) + ".json")
        pause, since, seen = _POLL_S[0], time.monotonic(), -1
        while True:
            with suppress(MissingError):
                return f"{store.sum_of(store.read_small(path)):016x}"
            with suppress(MissingError):
                said = store.read_small(os.path.join(folder, f"failed-{node:05d}"))
                raise CheckpointError(f"node {node} could not write its part: {said.decode(errors='replace')}")
            now = time.monotonic()
            with suppress(OSError):
                moved = os.stat(os.path.join(folder, manifest.part_name(node) + ".h5")).st_mtime_ns
                if moved != seen:
                    seen, since = moved, now
                    self._take(0)
            if self._stopped:
                raise CheckpointError(f"given up while it waited for node {node}'s part")
            if now - since > self._tiers.limit_s:
                raise CheckpointError(
                    f"node {node} has written nothing for {self._tiers.limit_s:.0f} s; the checkpoint is not committed",
                    path=folder,
                )
            time.sleep(pause)
            pause = min(2 * pause, _POLL_S[1])


def prune(slow: str, keep: int | None, just: Name, known: dict[str, list[str]]) -> None:
    """Of the branch of the one just committed, delete all but the `keep` newest. Best effort.

    known : parents, as `manifest.parents_of` reads them; what was read is noted there
    """
    if keep is None:
        return
    try:
        whole = [name for name in store.listed(slow) if not name.nodes]
    except ReadError as e:
        _log.warning("old checkpoints stay: %s", e)
        return
    known.update(manifest.parents_of(slow, whole, known))
    gone = manifest.branch_of(just.id, {name.id: known[name.id] for name in whole if name.id in known})[keep:]
    for name in whole:
        if name.id in gone:
            store.discard(os.path.join(slow, str(name)))
