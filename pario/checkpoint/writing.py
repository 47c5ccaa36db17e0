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
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from pario.checkpoint.attempts import (
    CANCELLED,
    CHOSEN,
    CODED,
    DONE,
    DRAINED,
    DRAINING,
    LEADERS,
    MOVED,
    OPENED,
    STRAIGHT,
    SUMMED,
    TAKEN,
    WRITTEN,
    Attempt,
    Board,
    Places,
    Tiers,
)
from pario.checkpoint.finding import Folder, Write, carry_over, copy_blocks, write_limited
from pario.checkpoint.layout import NodeFile, cut_up
from pario.checkpoint.manifest import (
    MANIFEST,
    Part,
    branch_of,
    manifest_text,
    parents_of,
    part_name,
    part_text,
    read_part,
)
from pario.checkpoint.store import (
    ATTEMPT,
    Name,
    Writer,
    commit,
    discard,
    failed,
    listed,
    make_folder,
    read_small,
    sum_of,
    whole_pages,
    write_small,
)
from pario.checkpoint.varying import Shape, Varying
from pario.errors import CheckpointError, MissingError, ParioError, ReadError
from pario.threads import Workers

__all__ = ["DrainThread", "WriteThread"]

_log = logging.getLogger("pario")

_POLL_S = (0.01, 0.5)
#: Threads of one rank that write: a block is checked while another one is written.
_WRITE = 2


class WriteThread:
    """Writes the attempts of one rank, one after another; `then` takes each that was written, on the node's first rank.

    All waiting is bounded. Nothing here calls MPI.
    """

    def __init__(
        self, places: Places, tiers: Tiers, board: Board, varying: Varying, then: Callable[[Attempt, bool], None],
        threads: Workers,
    ) -> None:  # fmt: skip
        self._places, self._tiers, self._board, self._varying, self._then = places, tiers, board, varying, then
        self._line, self._writers = threads.lane(1), threads.lane(_WRITE)
        self._stopped = False
        self._moved = 0
        self._lock = threading.Lock()

    def submit(self, attempt: Attempt) -> None:
        self._line.put(lambda: self._run(attempt))

    def end(self, limit_s: float) -> bool:
        """Give up what is under way; returns whether the threads ended in time."""
        self._stopped = True
        return self._line.end(limit_s) & self._writers.end(limit_s)

    def stopped(self) -> bool:
        return self._stopped

    @property
    def limit_s(self) -> float:
        return self._tiers.limit_s

    def _run(self, attempt: Attempt) -> None:
        straight = self._tiers.fast is None
        folder = ""
        try:
            try:
                shape = self._prepared(attempt)
                if self._places.leads:
                    folder, straight = self._open(attempt, shape)
                else:
                    self._board.wait(OPENED, attempt.number, self, "the first rank of the node to make the file")
                    straight = self._board.get(STRAIGHT) == attempt.number
                    folder = self._attempt_folder(attempt, straight)
                self._write(attempt, folder, straight, shape)
            except CheckpointError as e:
                raise e
            except Exception as e:
                what = f"the checkpoint of step {attempt.manifest.step} was not saved"
                raise failed(e, what, folder or self._tiers.slow) from e
        except CheckpointError as e:
            attempt.fail(e)
            self._board.fail(attempt.number, str(e))
            if self._places.leads and not straight:
                discard(folder or self._attempt_folder(attempt, False))
        if self._places.leads:
            if attempt.error is not None:
                self._board.put(CANCELLED, attempt.number)
            else:
                attempt.durable_at["fast"] = time.monotonic()
            self._board.put(DONE, attempt.number)
            attempt.straight = straight
            attempt.written.set()
            self._then(attempt, straight)
            return
        if attempt.error is None:
            try:
                self._board.wait(DONE, attempt.number, self, "the first rank of the node to finish the file")
            except CheckpointError as e:
                attempt.fail(e)
        attempt.written.set()
        attempt.copied.set()
        attempt.committed.set()
        attempt.drained.set()

    def _prepared(self, attempt: Attempt) -> Shape:
        """Everything before the file can be made (varying.py). What comes back counts on the node's first rank."""
        board, varying, file = self._board, self._varying, attempt.file
        if not varying:
            return Shape(file.size, file.rest)

        def summed(number: int, at: int) -> None:
            varying.sum(number, attempt.staging[at : at + file.blocks[number][1]])
            self._move(file.blocks[number][1])

        def coded(number: int, at: int) -> None:
            nbytes = file.blocks[number][1]
            varying.code(number, attempt.staging[at : at + whole_pages(nbytes)], nbytes)
            self._move(nbytes)

        _all([self._writers.call(summed, *put) for put in file.puts])
        board.mine(SUMMED, attempt.number)
        shape = Shape()
        if self._places.leads:
            folder = self._attempt_folder(attempt, self._tiers.fast is None)
            make_folder(folder)
            board.wait(LEADERS + SUMMED, attempt.number, self, "the ranks of the node to look for what has changed")
            shape = varying.choose(file, folder)
            board.put(CHOSEN, attempt.number)
        board.wait(CHOSEN, attempt.number, self, "the first rank of the node to look for what has changed")
        _all([self._writers.call(coded, *put) for put in file.puts])
        board.mine(CODED, attempt.number)
        if self._places.leads:
            board.wait(LEADERS + CODED, attempt.number, self, "the ranks of the node to pack their blocks")
            varying.lay_out(file, shape)
        return shape

    def _attempt_folder(self, attempt: Attempt, straight: bool) -> str:
        if straight:
            return os.path.join(self._tiers.slow, f"{ATTEMPT}{attempt.name}")
        assert self._tiers.fast is not None
        name = attempt.name._replace(node=self._places.node, nodes=self._places.nodes)
        return os.path.join(self._tiers.fast.folder, f"{ATTEMPT}{name}")

    def _open(self, attempt: Attempt, shape: Shape) -> tuple[str, bool]:
        """Make the folder and the file; (folder, whether it lies on the slow tier)."""
        straight = self._tiers.fast is None
        folder = self._attempt_folder(attempt, straight)
        began = time.monotonic()
        while True:
            try:
                make_folder(folder)
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
                        make_folder(folder)
                        carry_over(self._places.node, (other.id, other.size), Folder(before), folder, self._write_slow)
                    discard(before)
        if straight:
            self._board.put(STRAIGHT, attempt.number)
        self._board.put(OPENED, attempt.number)
        return folder, straight

    def _room_on_fast(self, attempt: Attempt, size: int, began: float) -> bool:
        """The fast tier is full: True to try again, False to write straight to the slow one. Raises OSError."""
        fast = self._tiers.fast
        assert fast is not None
        # What came before the checkpoint that this one goes on from. That one stays until a newer one is drained.
        if fast.prune(all_of_them=True) or fast.give_up((attempt.manifest.parents or [])[1:]):
            return True
        said = f"the fast tier {fast.folder} has no room for {size:,} bytes of step {attempt.manifest.step}"
        if self._stopped:
            raise OSError(errno.ENOSPC, said)
        waiting = self._board.get(DRAINED) < attempt.number - 1 and time.monotonic() - began < self._tiers.limit_s
        if self._tiers.full == "slow" or not waiting:
            _log.warning("%s: this node writes straight to %s", said, self._tiers.slow)
            return False
        if time.monotonic() - began < 0.5:
            _log.warning("%s: it waits for earlier checkpoints to be drained", said)
        time.sleep(0.5)
        return True

    def _file(self, folder: str) -> str:
        return os.path.join(folder, part_name(self._places.node) + ".h5")

    def _write(self, attempt: Attempt, folder: str, straight: bool, shape: Shape) -> None:
        file, board = attempt.file, self._board
        write = self._write_slow if straight else Writer.write
        put = self._put_varying if self._varying else self._put
        with Writer(self._file(folder)) as writer:
            rest = shape.rest if self._places.leads else []
            calls = [self._writers.call(writer.write, np.frombuffer(data, np.uint8), at) for at, data in rest]
            calls += [self._writers.call(put, attempt, writer, each, write) for each in file.puts]
            try:
                pieces = self._pieces(attempt.file) if self._places.leads else ""  # meanwhile
            finally:
                _all(calls)
            board.mine(WRITTEN, attempt.number)
            if not self._places.leads:
                return
            board.wait(LEADERS + WRITTEN, attempt.number, self, "the ranks of the node to write their parts")
            writer.sync()
        part = self._describe(attempt, shape)
        described = part_text(part, pieces)
        attempt.described = f"{sum_of(described):016x}"
        write_small(folder, part_name(part.node) + ".json", described, straight)
        final = os.path.join(os.path.dirname(folder), os.path.basename(folder)[len(ATTEMPT) :])
        if self._varying:
            self._varying.remember(file, part, shape, (folder, final))
        if not straight:
            assert self._tiers.fast is not None
            write_small(folder, MANIFEST, manifest_text(attempt.manifest, attempt.file.arrays_text), False)
            self._tiers.fast.begin(attempt.name)
            commit(folder, final)
            self._tiers.fast.prune()

    def _pieces(self, file: NodeFile) -> str:
        return file.compact_text if self._varying else file.pieces_text

    def _put(self, attempt: Attempt, writer: Writer, put: tuple[int, int], write: Write) -> None:
        number, at = put
        offset, nbytes = attempt.file.blocks[number]
        data = attempt.staging[at : at + nbytes]
        self._board.sums[number] = sum_of(data)
        write(writer, data, offset)
        self._move(nbytes)

    def _put_varying(self, attempt: Attempt, writer: Writer, put: tuple[int, int], write: Write) -> None:
        (number, at), target = put, int(self._board.places[put[0]])
        nbytes = attempt.file.blocks[number][1]
        slot = attempt.staging[at : at + whole_pages(nbytes)]
        if target != TAKEN:
            write(writer, slot[: self._varying.stored_bytes(number, nbytes)], target)
            self._varying.clean(number, attempt.file, slot)
        self._move(nbytes)

    def _write_slow(self, writer: Writer, data: np.ndarray, offset: int) -> None:
        write_limited(writer, data, offset, self._tiers.take, self.stopped)

    def _move(self, nbytes: int) -> None:
        """The others see that this rank goes on."""
        with self._lock:
            self._moved += nbytes
            self._board.mine(MOVED, self._moved)

    def _describe(self, attempt: Attempt, shape: Shape) -> Part:
        file, manifest = attempt.file, attempt.manifest
        if self._varying:
            return self._varying.described(manifest.step, manifest.id, file, shape)
        blocks = [(*block, int(total)) for block, total in zip(file.blocks, self._board.sums, strict=False)]
        blocks += [(offset, len(data), sum_of(data)) for offset, data in cut_up(file.rest)]
        blocks.sort()
        return Part(
            manifest.step, manifest.id, self._places.node, file.size, file.pieces,
            [(offset, nbytes) for offset, nbytes, _ in blocks], [total for _, _, total in blocks],
        )  # fmt: skip


def _all(calls: list[Future[Any]]) -> None:
    """Wait for all; raises the first error."""
    errors = [call.exception() for call in calls]
    for error in errors:
        if error is not None:
            raise error


class DrainThread:
    """Of the first rank of a node."""

    def __init__(self, places: Places, tiers: Tiers, board: Board, threads: Workers) -> None:
        self._places, self._tiers, self._board, self._line = places, tiers, board, threads.lane(1)
        self._stopped = False
        self._moved = 0
        self._parents: dict[str, list[str]] = {}
        self._failed: list[str] = []  # folders, which another node may have made again

    def submit(self, attempt: Attempt, straight: bool) -> None:
        """straight : the node's file lies on the slow tier already"""
        self._line.put(lambda: self._run(attempt, straight))

    def end(self, limit_s: float) -> bool:
        self._stopped = True
        ended = self._line.end(limit_s)
        for folder in self._failed:
            discard(folder)
        return ended

    def stopped(self) -> bool:
        return self._stopped

    def _run(self, attempt: Attempt, straight: bool) -> None:
        folder = os.path.join(self._tiers.slow, f"{ATTEMPT}{attempt.name}")
        try:
            if attempt.error is None:
                try:
                    if not straight:
                        self._copy(attempt, folder)
                    if self._places.first:
                        self._commit(attempt, folder)
                        attempt.durable_at["slow"] = time.monotonic()
                except ParioError:
                    raise
                except Exception as e:
                    raise failed(e, f"the checkpoint of step {attempt.manifest.step} was not drained", folder) from e
        except ParioError as e:
            attempt.fail(e if isinstance(e, CheckpointError) else CheckpointError(str(e)))
        if attempt.error is not None and self._places.first:
            self._failed.append(folder)
            discard(folder)
        elif attempt.error is not None:  # rank 0 is not to wait for this node
            with suppress(OSError):
                make_folder(folder)
                write_small(folder, f"failed-{self._places.node:05d}", str(attempt.error).encode(errors="replace"))
        if self._tiers.fast is not None:
            self._tiers.fast.end(attempt.name)
        attempt.committed.set()
        if attempt.error is None and self._places.first:
            while self._failed:  # no node has anything left to do for those
                discard(self._failed.pop())
            self._parents[attempt.name.id] = attempt.manifest.parents or []
            prune(self._tiers.slow, self._tiers.keep, attempt.name, self._parents)
        self._board.put(DRAINED, attempt.number)
        attempt.drained.set()

    def _copy(self, attempt: Attempt, folder: str) -> None:
        """This node's file, checked on its way. Raises OSError, ParioError."""
        assert self._tiers.fast is not None
        name = attempt.name._replace(node=self._places.node, nodes=self._places.nodes)
        source = os.path.join(self._tiers.fast.folder, str(name))
        described = read_small(os.path.join(source, part_name(self._places.node) + ".json"))
        part = read_part(described, source)
        make_folder(folder)
        for file in part.others:
            carry_over(part.node, file, Folder(source), folder, self._write)
        copy_blocks(part, Folder(source), folder, self._write)
        write_small(folder, part_name(self._places.node) + ".json", described)

    def _write(self, writer: Writer, data: np.ndarray, offset: int) -> None:
        write_limited(writer, data, offset, self._take, self.stopped)

    def _take(self, nbytes: int) -> None:
        self._moved += 1
        self._board.put(DRAINING, self._moved)
        self._tiers.take(nbytes)

    def _commit(self, attempt: Attempt, folder: str) -> None:
        """Wait for all nodes, then commit. Raises OSError, ParioError."""
        sums = [attempt.described, *(self._await_node(folder, node) for node in range(1, self._places.nodes))]
        manifest = replace(attempt.manifest, parts=sums)
        write_small(folder, MANIFEST, manifest_text(manifest, attempt.file.arrays_text), False)
        commit(folder, os.path.join(self._tiers.slow, str(attempt.name)))

    def _await_node(self, folder: str, node: int) -> str:
        """Checksum of that node's description, when it is there."""
        path = os.path.join(folder, part_name(node) + ".json")
        pause, since, seen = _POLL_S[0], time.monotonic(), -1
        while True:
            with suppress(MissingError):
                return f"{sum_of(read_small(path)):016x}"
            with suppress(MissingError):
                said = read_small(os.path.join(folder, f"failed-{node:05d}"))
                raise CheckpointError(f"node {node} could not write its part: {said.decode(errors='replace')}")
            now = time.monotonic()
            with suppress(OSError):
                moved = os.stat(os.path.join(folder, part_name(node) + ".h5")).st_mtime_ns
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

    known : parents, as `parents_of` reads them; what was read is noted there
    """
    if keep is None:
        return
    try:
        whole = [name for name in listed(slow) if not name.nodes]
    except ReadError as e:
        _log.warning("old checkpoints stay: %s", e)
        return
    known.update(parents_of(slow, whole, known))
    gone = branch_of(just.id, {name.id: known[name.id] for name in whole if name.id in known})[keep:]
    for name in whole:
        if name.id in gone:
            discard(os.path.join(slow, str(name)))
