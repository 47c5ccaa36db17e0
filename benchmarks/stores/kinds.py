"""The six stores on which control laws are compared: one name, one context that gives the folder and its switch.

disk        the bare disk, pages dropped before
NVMe-like   ext4 on a loop device in memory, 1 GB/s (blkio): it answers within a fraction of a millisecond
HDD-like    FUSE: one read at a time, 5 ms and 18 MB/s each
fast PFS    FUSE: 5 ms a read, 1.5 GB/s; the FUSE daemon itself gives less on few cores
slow PFS    FUSE: 20 ms a read, 200 MB/s
NFS-like    FUSE: 5 ms a read, 200 MB/s, read through the kernel's page cache, pages dropped before
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks import data
from benchmarks.stores.latency import LatencyStore, latency_store
from benchmarks.stores.throttled import Group, throttled_disk

__all__ = ["STORES", "Kind", "Opened", "opened"]


@dataclass(frozen=True)
class Kind:
    """read_s : seconds of a read; None: no FUSE
    bytes_per_s : bandwidth of all readers together; None: nobody caps it
    caps : what to expect at best, in bytes per second: it says how many records an epoch needs
    serial : one read at a time
    cached : through the page cache, whose pages are dropped before each run
    """

    read_s: float | None
    bytes_per_s: float | None
    caps: float
    serial: bool = False
    cached: bool = False


STORES = {
    "disk": Kind(None, None, 1.0e9, cached=True),
    "NVMe-like": Kind(None, 1e9, 1.0e9, cached=True),
    "HDD-like": Kind(0.005, 18e6, 12e6, serial=True),
    "fast PFS": Kind(0.005, 1.5e9, 4e8),
    "slow PFS": Kind(0.020, 200e6, 2e8),
    "NFS-like": Kind(0.005, 200e6, 1e8, cached=True),
}


@dataclass(frozen=True)
class Opened:
    """A store that is there now.

    folder : the dataset's
    file : whose pages are dropped before a run; None: no page cache
    group : in which its readers must run
    latency : the FUSE mount, which can be changed
    """

    folder: str
    file: str | None = None
    group: Group | None = None
    latency: LatencyStore | None = None


@contextmanager
def opened(name: str, held: data.DataSet) -> Iterator[Opened]:
    """The store with this dataset in it. Needs root, but for the disk; raises Unavailable."""
    kind = STORES[name]
    if kind.read_s is not None:
        mounted = latency_store(
            held.path, read_s=kind.read_s, bytes_per_s=kind.bytes_per_s, page_cache=kind.cached, threads=128
        )
        with mounted as store:
            store.change(serial=kind.serial)
            yield Opened(store.folder, f"{store.folder}/data.mdb" if kind.cached else None, latency=store)
    elif kind.bytes_per_s is not None:
        with (
            throttled_disk("/dev/shm", held.file_bytes + (64 << 20)) as disk,
            Group(disk.device, int(kind.bytes_per_s)) as group,
        ):
            folder = disk.copy(held.path)
            yield Opened(folder, os.path.join(folder, "data.mdb"), group)
    else:
        yield Opened(held.path, held.file)
