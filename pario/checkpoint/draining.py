"""From the fast tier to the slow one, and the commit of the whole: what the first rank of each node does in the
background.

Every node copies its own file into one folder of the slow store and says so by its description there. Rank 0 waits for
the descriptions of all nodes, writes the manifest with their checksums, and renames the folder. One checkpoint is
drained at a time, oldest first, by one writer per node.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from dataclasses import replace

import numpy as np

from pario.checkpoint.board import DRAINED, DRAINING, Board
from pario.checkpoint.carrying import Folder, carry_over, copy_blocks
from pario.checkpoint.manifest import MANIFEST, arrays_text, manifest_text, part_name, read_part, sum_of
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
    write_small,
)
from pario.checkpoint.tree import Spec
from pario.checkpoint.writing import Attempt, Places, Tiers, write_limited
from pario.errors import CheckpointError, MissingError, ParioError, ReadError
from pario.threads import Workers

__all__ = ["DrainThread"]

_log = logging.getLogger("pario")
_POLL_S = (0.01, 0.5)


class DrainThread:
    """Of the first rank of a node."""

    def __init__(self, places: Places, tiers: Tiers, board: Board) -> None:
        self._places, self._tiers, self._board = places, tiers, board
        self._line = Workers("pario-checkpoint-drain", 1)
        self._stopped = False
        self._moved = 0
        self._arrays: tuple[list[Spec] | None, str] = None, ""  # the text of the last structure

    def submit(self, attempt: Attempt, straight: bool) -> None:
        """straight : the node's file lies on the slow tier already"""
        self._line.put(lambda: self._run(attempt, straight))

    def end(self, limit_s: float) -> bool:
        self._stopped = True
        return self._line.end(limit_s)

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
            discard(folder)
        elif attempt.error is not None:  # rank 0 is not to wait for this node
            with suppress(OSError):
                make_folder(folder)
                write_small(folder, f"failed-{self._places.node:05d}", str(attempt.error).encode(errors="replace"))
        if self._tiers.fast is not None:
            self._tiers.fast.end(attempt.name)
        attempt.committed.set()
        if attempt.error is None and self._places.first:
            prune(self._tiers.slow, self._tiers.keep, attempt.name)
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
        manifest = attempt.manifest
        if self._arrays[0] is not manifest.specs:
            self._arrays = manifest.specs, arrays_text(manifest.specs)
        sums = [self._await_node(folder, node) for node in range(self._places.nodes)]
        write_small(folder, MANIFEST, manifest_text(replace(manifest, parts=sums), self._arrays[1]), False)
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


def prune(slow: str, keep: int | None, just: Name) -> None:
    """Delete all but the `keep` newest and the one just committed. Best effort."""
    if keep is None:
        return
    try:
        whole = [name for name in listed(slow) if not name.nodes]
    except ReadError as e:
        _log.warning("old checkpoints stay: %s", e)
        return
    for name in whole[: -max(1, keep)]:
        if name != just:
            discard(os.path.join(slow, str(name)))
