"""`stage`: copy a dataset to a disk of every node ahead of the job."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future

import numpy as np

from pario.commands.screen import counted, decimal_bytes, screen, seconds
from pario.dataset.reader import Reader
from pario.errors import OptionError
from pario.options import Options, Tier

__all__ = ["stage"]


def stage(path: str, db: str | None, folder: str, quota: str, force: bool) -> int:
    """Collective over all ranks. The ranks of a node divide its chunks."""
    started = time.perf_counter()
    options = Options(tiers=(Tier(folder, quota, force),))
    with Reader(path, db=db, options=options, progress=screen.progress("leaf pages", "page")) as reader:
        reader.use_tiers()
        world, found = reader.world, reader.stage
        if world.allreduce_max(found is None):  # the rank where it is so has logged why
            raise world.raised_by_all(OptionError(f"{folder} cannot be used on every node", path=reader.path))
        assert found is not None
        chunks = found.used(reader.index, reader.checked)
        (disk,) = found.tiers
        before = disk.held()[chunks]
        world.barrier()  # nobody begins before all have looked
        screen.running = True
        _bring(reader, chunks[~before][world.node_rank :: world.node_size])
        world.barrier()
        screen.running = False
        held = int(disk.held()[chunks].sum()) if world.is_leader else 0
        share = world.allreduce_sum(held) / max(1, len(chunks) * world.nodes)
        from_store = world.allreduce_sum(found.store_bytes)
        screen.say(
            f"{reader.path}: {share:.1%} of {decimal_bytes(len(chunks) * disk.grid.chunk_bytes)} lie in {folder} on "
            f"{counted(world.nodes, 'node')} ({before.mean():.1%} did before)"
        )
        screen.say(f"{decimal_bytes(from_store)} read from the store in {seconds(time.perf_counter() - started)}")
        if share < 1:
            screen.say("the rest has no room: a larger --quota, or a disk with more free space, takes more")
        screen.say(f'use it with:  export PARIO_TIERS="{folder}:{quota}"')
    return 0


def _bring(reader: Reader, chunks: np.ndarray) -> None:
    """Raises ReadError, SnapshotError."""
    assert reader.stage is not None
    pool = reader.file.pool  # opens the file on this rank
    fetcher = reader.stage.fetcher
    assert fetcher is not None
    (disk,) = reader.stage.tiers
    bar = screen.bar(len(chunks) * disk.grid.chunk_bytes, "staging", "B")
    under_way: deque[Future[None]] = deque()
    for chunk in chunks.tolist():
        if disk.is_full:
            break
        under_way.append(pool.call(fetcher.bring, chunk))
        if len(under_way) >= 2 * pool.inflight:
            under_way.popleft().result()
            bar.update(disk.grid.chunk_bytes)
    for future in under_way:
        future.result()
    screen.end_bar()
