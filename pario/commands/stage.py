"""`stage`: copy a dataset to a disk of every node ahead of the job."""

from __future__ import annotations

import os
import time
from collections import deque
from concurrent.futures import Future

import numpy as np

from pario.comm.base import AnyWorld
from pario.commands.screen import counted, decimal_bytes, screen, seconds
from pario.dataset.reader import Reader
from pario.errors import OptionError
from pario.options import Options, Tier
from pario.plan.placement import NOBODY

__all__ = ["stage"]


def stage(path: str, db: str | None, folder: str, quota: str, force: bool) -> int:
    """Collective over all ranks. On one node the ranks divide the chunks; on several the first rank of each brings what
    its node keeps."""
    started = time.perf_counter()
    if folder == "memory":
        raise OptionError("memory ends with this command: --to names a folder on a disk of the node")
    if not folder.startswith("$"):  # a variable of each node
        folder = os.path.abspath(os.path.expanduser(folder))
    options = Options(tiers=(Tier(folder, quota, force),))
    with Reader(path, db=db, options=options, progress=screen.progress("leaf pages", "page"), tiers=True) as reader:
        reader.use_tiers()
        world, found = reader.world, reader.stage
        if world.allreduce_max(found is None):  # the rank where it is so has logged why
            raise world.raised_by_all(OptionError(f"{folder} cannot be used on every node", path=reader.path))
        assert found is not None
        chunks = found.used(reader.index, reader.checked)
        (disk,) = found.tiers
        mine = chunks if found.keeps is None else chunks[found.keeps[chunks]]
        missing = mine[~disk.held()[mine]]
        before = _sum_of_nodes(world, len(mine) - len(missing)) - world.allreduce_sum(disk.counts.puts)  # by a walk
        world.barrier()  # nobody begins before all have looked
        screen.running = True
        if found.keeps is None:
            _bring(reader, missing[world.node_rank :: world.node_size])
        elif world.is_leader:
            _bring(reader, missing)
        world.barrier()
        screen.running = False
        wanted, held = _sum_of_nodes(world, len(mine)), _sum_of_nodes(world, int(disk.held()[mine].sum()))
        from_store = world.allreduce_sum(found.store_bytes)
        chunk_bytes = disk.grid.chunk_bytes
        screen.say(
            f"{reader.path}: {held / max(1, wanted):.1%} of {decimal_bytes(wanted * chunk_bytes)} lie in {folder} on "
            f"{counted(world.nodes, 'node')} ({before / max(1, wanted):.1%} did before)"
        )
        screen.say(f"{decimal_bytes(from_store)} read from the store in {seconds(time.perf_counter() - started)}")
        nowhere = 0 if found.placement is None else int((found.placement.owners[chunks] == NOBODY).all(axis=1).sum())
        failed = world.allreduce_sum(disk.counts.errors)
        if failed:
            screen.say(f"{counted(failed, 'write')} to {folder} failed: see the system log of the nodes")
        if nowhere or (held < wanted and not failed):
            rest = wanted - held + nowhere
            screen.say(
                f"{decimal_bytes(rest * chunk_bytes)} have no room: a larger --quota, or a disk with more free space, "
                "takes more"
            )
        screen.say(f'use it with:  export PARIO_TIERS="{folder}:{quota}"')
    return 0


def _sum_of_nodes(world: AnyWorld, value: int) -> int:
    """The sum of every node's value. Collective."""
    return world.allreduce_sum(value if world.is_leader else 0)


def _bring(reader: Reader, chunks: np.ndarray) -> None:
    """Raises ReadError, SnapshotError."""
    assert reader.stage is not None
    _ = reader.file.pool  # opens the file on this rank
    fetcher = reader.stage.fetcher
    assert fetcher is not None
    (disk,) = reader.stage.tiers
    bar = screen.bar(len(chunks) * disk.grid.chunk_bytes, "staging", "B")
    under_way: deque[Future[bool]] = deque()
    for chunk in chunks.tolist():
        if disk.is_full:
            break
        under_way.append(reader.file.call(fetcher.bring, chunk))
        if len(under_way) >= 2 * reader.options.usual_inflight:
            under_way.popleft().result()
            bar.update(disk.grid.chunk_bytes)
    for future in under_way:
        future.result()
    screen.end_bar()
