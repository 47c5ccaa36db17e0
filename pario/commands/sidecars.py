"""`index` and `checksum`: what is saved beside a dataset ahead of a job."""

from __future__ import annotations

import os
import time

import click

from pario.commands import arguments
from pario.commands.screen import counted, decimal_bytes, screen, seconds


@click.command()
@arguments.path
@arguments.db
@arguments.as_json
def index(path: str, db: str | None) -> int:
    """Build the index ahead of a job.

    The index says where each record lies. pario builds it from the LMDB's inner pages, without reading the records, and
    saves it beside the dataset, or in your cache directory if that place is not writable. The Loader builds a missing
    index by itself; for a dataset of terabytes you may prefer to build it once, on many ranks.

    \b
    Examples:
      python -m pario data index train.lmdb
      mpiexec -n 8 python -m pario data index train.lmdb
    """
    from pario.dataset.reader import Reader

    # Collective: the ranks divide the leaf pages.
    started = time.perf_counter()
    reader = Reader(path, db=db, progress=screen.progress("leaf pages", "page"))
    took = time.perf_counter() - started
    held = reader.index
    size = sum(map(os.path.getsize, held.files.paths))
    screen.say(f"{reader.path}: {counted(held.n, 'record')}, {decimal_bytes(size)}")
    built = held.bytes_read
    screen.tell(path=reader.path, records=held.n, bytes=size, bytes_read=built, index=held.sidecar or None)
    if built:
        share = f"{decimal_bytes(built)} read, {built / size:.2%} of the file"
        screen.say(f"index built in {seconds(took)} on {counted(reader.world.size, 'rank')}: {share}")
    else:
        screen.say(f"the saved index fits this file; loaded in {seconds(took)}")
    where = held.sidecar
    if where and len(held.files) > 1:
        screen.say(f"saved, one for each file: {where}, ...")
    elif where:
        screen.say(f"saved as {where} ({decimal_bytes(os.path.getsize(where))})")
    else:
        screen.say("not saved: neither beside the dataset nor in the cache directory could it be written")
    reader.close()
    return 0


@click.command()
@arguments.path
@arguments.db
@arguments.as_json
def checksum(path: str, db: str | None) -> int:
    """Save a checksum of every record's value.

    Reads all records, which the ranks divide, and saves the checksums beside the dataset, or in your cache directory if
    that place is not writable. `verify` and Loader(verify=True) then find any value that has changed since.

    \b
    Examples:
      python -m pario data checksum train.lmdb
      mpiexec -n 8 python -m pario data checksum train.lmdb
    """
    import numpy as np

    from pario.comm.base import together
    from pario.commands.dataset import pieces
    from pario.dataset.reader import Reader
    from pario.locate.sums import save_sums, sums_of
    from pario.plan.schedule import even_split

    # Collective: the ranks divide the records by their places in the file, since neighbours make long reads.
    started = time.perf_counter()
    reader = Reader(path, db=db, progress=screen.progress("leaf pages", "page"))
    world, index = reader.world, reader.index
    begin, stop = even_split(index.n, world.size, world.rank)
    ids = np.arange(begin, stop) if index.by_offset is None else np.array(index.by_offset[begin:stop])
    with together(world, "reading the records"):
        mine = np.empty(len(ids), np.uint64)
        for part in pieces(index.extents_of(ids)[1], "values"):
            mine[part] = sums_of(reader.read_stored(ids[part]))
    everyones_ids, everyones = world.gather_array(ids), world.gather_array(mine)
    where = ""
    with together(world, "saving the checksums"):
        if everyones_ids is not None and everyones is not None:  # rank 0
            sums = np.empty(index.n, np.uint64)
            sums[everyones_ids] = everyones
            (file,) = reader.file.pool.fetcher.files
            where = save_sums(index.database, file.status(), sums)
    screen.tell(path=reader.path, records=index.n, checksums=where or None, seconds=time.perf_counter() - started)
    took = seconds(time.perf_counter() - started)
    screen.say(f"{reader.path}: {counted(index.n, 'record')} read in {took} on {counted(world.size, 'rank')}")
    if where:
        screen.say(f"checksums saved as {where} ({decimal_bytes(os.path.getsize(where))})")
    reader.close()
    return 0
