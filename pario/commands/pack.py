"""`pack` and `unpack`: compressed datasets, and back."""

from __future__ import annotations

import time
from typing import Any

from pario.comm.world import get_world
from pario.commands.screen import counted, decimal_bytes, screen, seconds
from pario.packing.pack import PackOptions, Summary, Talk, pack
from pario.packing.unpack import unpack

__all__ = ["run_pack", "run_unpack"]


def run_pack(sources: tuple[str, ...], dst: str, options: PackOptions) -> int:
    """Collective over all ranks."""
    started = time.perf_counter()
    world = get_world()
    made = pack(world, sources, dst, options, _talk())
    ratio = f", {made.raw_bytes / made.stored_bytes:.2f} times smaller" if made.raw_bytes > made.stored_bytes else ""
    _say(made, "packed" + (" and verified" if options.verify else ""), world.size, started)
    screen.say(f"{decimal_bytes(made.raw_bytes)} of values, {decimal_bytes(made.stored_bytes)} in the file{ratio}")
    world.free()
    return 0


def run_unpack(source: str, dst: str, in_folder: bool, force: bool, verify: bool) -> int:
    """Collective over all ranks."""
    started = time.perf_counter()
    world = get_world()
    made = unpack(world, source, dst, _talk(), in_folder=in_folder, force=force, verify=verify)
    _say(made, "unpacked", world.size, started)
    world.free()
    return 0


def _say(made: Summary, done: str, ranks: int, started: float) -> None:
    took = seconds(time.perf_counter() - started)
    screen.say(f"{made.file}: {counted(made.records, 'record')} {done} in {took} on {counted(ranks, 'rank')}")


def _talk() -> Talk:
    def progress(what: str, nbytes: int) -> Any:
        bar = screen.bar(nbytes, what, "B")

        def moved(done: int) -> None:
            bar.update(done)
            if bar.n >= nbytes:
                screen.end_bar()

        return moved

    return Talk(lambda text: screen.say(text, err=True), progress)
