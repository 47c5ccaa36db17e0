"""The stores of a study as its conductor uses them: folders, commands and counters.

The bare disk always exists. The emulated stores (benchmarks/stores) are a throttled block device and a FUSE mount with
latency; they need root and FUSE, and raise `Unavailable` with what is missing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

from benchmarks.cache import Unavailable
from benchmarks.stores.latency import LatencyStore, latency_store
from benchmarks.stores.throttled import Group, device_of, throttled_disk
from benchmarks.study.cells import LOOPS
from benchmarks.study.sets import Held
from pario.options import RECIPES

__all__ = ["CAP", "IN_FLIGHT", "Counts", "Store", "open_store"]

#: bytes per second of both emulated stores, all readers together
CAP = 200_000_000
READ_S, METADATA_S = 0.020, 0.002
#: reads in flight at once on the store with latency, all nodes together, of recipes that do not find their number
IN_FLIGHT = 16

Counts = dict[str, int]


class Store:
    """One store while it is mounted.

    cap : bytes per second; None: no limit
    in_flight : reads in flight that all readers of a recipe but auto may have together; None: the default of each
    settle_s : seconds until every mount sees that files were added or removed
    """

    cap: int | None = None
    in_flight: int | None = None
    settle_s = 0.0

    def folder(self, held: Held, name: str) -> str:
        """The folder to open for a recipe or a loop: memory-mapped reading may need another mount than explicit reads.

        Raises Unavailable
        """
        return held.folder

    def command(self, words: Sequence[str]) -> Sequence[str]:
        """The same command, started so that its reads are counted and capped."""
        return words

    def reset(self) -> None:
        """Count from now on."""

    def counts(self) -> Counts | None:
        """Requests since `reset`: {"bytes", "operations", and, if known, "most": reads in flight at once}; None if the
        store does not count."""
        return None


@contextmanager
def open_store(name: str, sets: Mapping[str, Held], folder: str) -> Iterator[Store]:
    """The store with these sets on it; removed afterwards, whatever happens. Raises Unavailable.

    folder : holds the sets, and may get the image of a disk
    """
    if name == "disk":
        yield from _disk(folder)
    elif name == "throttled":
        yield from _throttled(sets, folder)
    else:
        yield from _latency(folder)


def _disk(folder: str) -> Iterator[Store]:
    with ExitStack() as stack:
        store = Store()
        with suppress(Unavailable):  # without root there are no counters
            store = _Counted(stack.enter_context(Group(device_of(folder)[0])))
        yield store


def _throttled(sets: Mapping[str, Held], folder: str) -> Iterator[Store]:
    need = sum(held.file_bytes for held in sets.values())
    with throttled_disk(folder, need + need // 8 + (64 << 20)) as disk:
        copies = {which: disk.copy(held.folder) for which, held in sets.items()}
        with Group(disk.device, CAP) as group:
            yield _Throttled(group, copies)


def _latency(folder: str) -> Iterator[Store]:
    late = partial(latency_store, folder, read_s=READ_S, metadata_s=METADATA_S, bytes_per_s=CAP)
    with ExitStack() as stack:

        def mount(page_cache: bool) -> LatencyStore:
            return stack.enter_context(late(page_cache=page_cache))

        yield _Late(folder, mount(page_cache=True), mount(page_cache=False), mount)


class _Counted(Store):
    """Reads of one device, by the processes of a control group."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._since: Counts = {}

    def command(self, words: Sequence[str]) -> Sequence[str]:
        return self._group.command(words)

    def reset(self) -> None:
        self._since = self._now()

    def counts(self) -> Counts | None:
        return {name: value - self._since.get(name, 0) for name, value in self._now().items()}

    def _now(self) -> Counts:
        return {"bytes": self._group.bytes_read(), "operations": self._group.reads()}


class _Throttled(_Counted):
    """copies : set -> its folder on the throttled disk"""

    cap = CAP

    def __init__(self, group: Group, copies: Mapping[str, str]) -> None:
        super().__init__(group)
        self._copies = copies

    def folder(self, held: Held, name: str) -> str:
        return self._copies[held.which]


class _Late(Store):
    """Several mounts of one folder: no file can be mapped on a mount where every read reaches the store, and a loop may
    want another read-ahead.

    mapped : through the page cache; explicit : for recipes that do not map the file
    mount : (page_cache) -> one more mount
    """

    cap = CAP
    in_flight = IN_FLIGHT
    settle_s = 1.2

    def __init__(
        self,
        source: str,
        mapped: LatencyStore,
        explicit: LatencyStore,
        mount: Callable[[bool], LatencyStore],
    ) -> None:
        self._source = source
        self._explicit, self._mount = explicit, mount
        self._mapped: dict[int | None, LatencyStore] = {None: mapped}  # by read-ahead

    def folder(self, held: Held, name: str) -> str:
        return os.path.join(self._mount_of(name).folder, os.path.relpath(held.folder, self._source))

    def reset(self) -> None:
        for mount in self._mounts:
            mount.reset()

    def counts(self) -> Counts | None:
        found = {"bytes": 0, "operations": 0, "most": 0}
        for mount in self._mounts:
            for path, of_path in mount.counts().items():
                if path.endswith("/data.mdb"):
                    found["bytes"] += of_path.get("bytes", 0)
                    found["operations"] += of_path.get("read", 0)
                    found["most"] = max(found["most"], of_path.get("most", 0))
        return found

    @property
    def _mounts(self) -> set[LatencyStore]:
        return {self._explicit, *self._mapped.values()}

    def _mount_of(self, name: str) -> LatencyStore:
        if name not in LOOPS:
            maps = RECIPES[name].source == "per_rank" or RECIPES[name].fetch == "mapped"
            return self._mapped[None] if maps else self._explicit
        ahead = LOOPS[name].read_ahead_bytes
        if ahead is not None and ahead not in self._mapped:
            store = self._mount(True)
            store.read_ahead(ahead)
            self._mapped[ahead] = store
        return self._mapped[ahead]
