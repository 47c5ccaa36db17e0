"""`index`: build the side-car ahead of the job."""

from __future__ import annotations

import os
import time

from pario.commands.screen import counted, decimal_bytes, screen, seconds
from pario.dataset.reader import Reader

__all__ = ["index"]


def index(path: str, db: str | None) -> int:
    """Collective over all ranks, which divide the leaf pages."""
    started = time.perf_counter()
    reader = Reader(path, db=db, progress=screen.progress("leaf pages", "page"))
    took = time.perf_counter() - started
    held = reader.index
    size = sum(map(os.path.getsize, held.files.paths))
    ranks = counted(reader.world.size, "rank")
    screen.say(f"{reader.path}: {counted(held.n, 'record')}, {decimal_bytes(size)}")
    built = held.bytes_read
    if built:
        share = f"{decimal_bytes(built)} read, {built / size:.2%} of the file"
        screen.say(f"index built in {seconds(took)} on {ranks}: {share}")
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
