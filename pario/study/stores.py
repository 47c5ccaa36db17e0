"""The stores of a study as its conductor sees them: where the data lies, how to start there, what the store counted.

The bare disk is always there. The emulated ones, a throttled block device and a FUSE mount with latency, are those of
benchmarks/ in a source checkout; they need root, FUSE, and raise `Unavailable` with what is missing.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pario.reader import RECIPES
from pario.study.cache import Unavailable
from pario.study.sets import Held

__all__ = ["CAP", "IN_FLIGHT", "Counts", "Place", "open_store"]

#: bytes per second of both emulated stores, all readers together
CAP = 200_000_000
READ_S, METADATA_S = 0.020, 0.002
#: reads under way at once on the store with latency, all nodes together
IN_FLIGHT = 16

Counts = dict[str, int]


@dataclass
class Place:
    """One store while it is there.

    where : (set, recipe) -> the folder to open; memory-mapped reading may need another mount than explicit reads
    counts : what reached the store since `reset`, {"bytes", "operations", and "most": reads under way at once, if
        the store can tell}; None: it does not count
    prefix : what starts a job so that it is counted and held to the cap
    cap : bytes per second, None without a limit
    in_flight : reads under way at once that all readers together may have; None: what each is used to
    settle_s : wait so long after files have come or gone, until everybody sees it
    """

    where: Callable[[Held, str], str]
    counts: Callable[[], Counts | None]
    reset: Callable[[], None]
    prefix: Callable[[Sequence[str]], Sequence[str]] | None = None
    cap: int | None = None
    in_flight: int | None = None
    settle_s: float = 0.0


@contextmanager
def open_store(name: str, sets: Mapping[str, Held], folder: str) -> Iterator[Place]:
    """The store with these sets on it; gone afterwards, whatever happens. Raises Unavailable.

    folder : where the sets lie, and where an image of a disk may be made
    """
    if name == "disk":
        yield from _disk(folder)
    elif name == "throttled":
        yield from _throttled(sets, folder)
    else:
        yield from _latency(sets, folder, cached=name == "latency-cached")


def _bench(name: str) -> Any:
    """A module of benchmarks/."""
    root = Path(__file__).resolve().parents[2]
    if (root / "benchmarks" / f"{name}.py").exists() and str(root) not in sys.path:
        sys.path.append(str(root))
    if importlib.util.find_spec("benchmarks") is None:
        raise Unavailable("the emulated stores are in benchmarks/ of a source checkout, and not in an installed pario")
    return importlib.import_module(f"benchmarks.{name}")


def _disk(folder: str) -> Iterator[Place]:
    with ExitStack() as stack:
        group = None
        with suppress(Unavailable):  # without root nobody counts at the device
            store = _bench("store")
            group = stack.enter_context(store.Group(store.device_of(folder)[0]))
        yield _counted(group, lambda held, recipe: held.folder)


def _throttled(sets: Mapping[str, Held], folder: str) -> Iterator[Place]:
    store = _bench("store")
    need = sum(held.file_bytes for held in sets.values())
    with store.throttled_disk(folder, need + need // 8 + (64 << 20)) as disk:
        copies = {which: disk.copy(held.folder) for which, held in sets.items()}
        with store.Group(disk.device, CAP) as group:
            yield _counted(group, lambda held, recipe: copies[held.which], cap=CAP)


def _counted(group: Any, where: Callable[[Held, str], str], cap: int | None = None) -> Place:
    if group is None:
        return Place(where, counts=lambda: None, reset=lambda: None, cap=cap)
    since: Counts = {}

    def now() -> Counts:
        return {"bytes": group.bytes_read(), "operations": group.reads()}

    def reset() -> None:
        since.update(now())

    return Place(
        where,
        counts=lambda: {name: value - since.get(name, 0) for name, value in now().items()},
        reset=reset,
        prefix=group.command,
        cap=cap,
    )


def _latency(sets: Mapping[str, Held], folder: str, cached: bool) -> Iterator[Place]:
    """Two mounts of the same folder: a file cannot be mapped where every read reaches the store."""
    room = _bench("latency_store")
    how = {"read_s": READ_S, "metadata_s": METADATA_S, "bytes_per_s": CAP}
    with (
        room.latency_store(folder, page_cache=True, **how) as mapped,
        room.latency_store(folder, page_cache=False, **how) as straight,
    ):

        def where(held: Held, recipe: str) -> str:
            through_cache = cached or RECIPES[recipe].per_rank or RECIPES[recipe].fetch == "mapped"
            return os.path.join((mapped if through_cache else straight).folder, os.path.relpath(held.folder, folder))

        def counts() -> Counts:
            found = {"bytes": 0, "operations": 0, "most": 0}
            for mount in (mapped, straight):
                for path, of_path in mount.counts().items():
                    if path.endswith("/data.mdb"):
                        found["bytes"] += of_path.get("bytes", 0)
                        found["operations"] += of_path.get("read", 0)
                        found["most"] = max(found["most"], of_path.get("most", 0))
            return found

        def reset() -> None:
            for mount in (mapped, straight):
                mount.reset()

        yield Place(where, counts, reset, cap=CAP, in_flight=IN_FLIGHT, settle_s=1.2)
