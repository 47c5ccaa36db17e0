"""The data file of a dataset, or its data files: which ranks of a node open them, and when."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Sequence
from functools import cached_property, partial

from pario import machine
from pario.comm.base import AnyWorld
from pario.comm.launcher import rank_and_size
from pario.errors import ClosedError, FileError, SnapshotError
from pario.fetch.base import Fetcher, OneFile
from pario.fetch.file import FileFetcher
from pario.fetch.joined import JoinedFetcher, joined_name
from pario.fetch.limited import Gate, open_limited
from pario.fetch.pool import ReadPool
from pario.fetch.resolve import open_datasets
from pario.fetch.snapshot import identity_of
from pario.format.meta import Snapshot
from pario.options import Options
from pario.plane.joining import store_agent
from pario.stats.tracing import joined
from pario.tune.live_knobs import Knobs


class DataFile:
    """One data file, or several in one space of addresses (fetch/joined.py), the same for all ranks of a node.

    The node's leader, which reads for the node, opens it by its path (`open`), the others as the leader has it when
    they first ask for `pool`: on a shared file system every open goes to the metadata server, which all ranks share.

    given : paths, see `open_datasets`
    fetcher : how to read a file

    Attributes
    ----------
    path : the data file, or what stands for all of them in messages; known after `share`
    paths : the data files; counts : how many of them each path of `given` means
    fetchers : one for each of them, as far as they are open on this rank
    knobs : all knobs of this rank; knob : reads that it may have in flight, if it reads
    opened : the threads that read it, on a rank that has opened it so far; `pool` opens it
    recorder : of the trace, if there is one
    """

    path: str
    paths: tuple[str, ...] = ()
    counts: tuple[int, ...] = ()

    def __init__(self, given: Sequence[str], world: AnyWorld, options: Options, fetcher: type[FileFetcher]) -> None:
        self.given = tuple(given)
        self.fetchers: list[OneFile] = []
        self._world = world
        self._fetcher = fetcher
        # A process may have a world of its own beside others of its job.
        rank, size = (world.rank, world.size) if world.size > 1 else rank_and_size()
        self.recorder = joined(options.trace, rank, size, world.node)
        self._through: Callable[[Fetcher], Fetcher] = lambda store: store
        self._store: Fetcher | None = None  # what `_through` was given
        self.opened: ReadPool | None = None
        self._identified: tuple[tuple[Snapshot, ...], bytes] = (), b""
        self._closed = False
        self._opening = threading.Lock()
        self.knobs = Knobs(options, reads=world.is_leader)
        self.knob = self.knobs["inflight"]

    def open(self) -> None:
        """Open what the paths lead to, or lead to by now; on the leader of a node."""
        pool, self.opened = self.opened, None
        if pool is not None:
            pool.close()
            pool.fetcher.close()
        with store_agent() as gate:
            opened = open_datasets(self.given, lambda path: self._open(gate, path))
        self.counts = tuple(map(len, opened))
        self.fetchers = [fetcher for fetchers in opened for fetcher in fetchers]
        self.paths = tuple(fetcher.path for fetcher in self.fetchers)
        self.opened = ReadPool(_joined(self.fetchers, [fetcher.nbytes for fetcher in self.fetchers]), self.knob)

    def identity(self, snapshots: Sequence[Snapshot]) -> bytes:
        """`identity_of` the files in these states, as it was when that was asked for the first time."""
        if self._identified[0] != tuple(snapshots):
            self._identified = tuple(snapshots), identity_of(self.pool.fetcher, snapshots)
        return self._identified[1]

    def share(self, goes_on: bool) -> None:
        """Tell the ranks of this node which files their leader has opened. Collective over the node.

        goes_on : False: an error is known to this rank, so nothing need be opened
        """
        mine = None
        if goes_on and self.opened is not None:
            files = self.opened.fetcher.files
            fds = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in files]
            mine = self.paths, self.counts, [file.status() for file in files], fds
        found = self._world.node_bcast(mine)
        if goes_on and found is not None:
            self.paths, self.counts, self._statuses, self._leaders_files = found
            self.path = joined_name(self.paths)

    def read_through(self, tiers: Callable[[Fetcher], Fetcher]) -> None:
        """From now on the file is read with what `tiers` makes of its own fetcher."""
        with self._opening:
            self._through = tiers
            if self.opened is not None:
                self._store = self._store or self.opened.fetcher
                self.opened.fetcher = tiers(self._store)

    @cached_property
    def is_local(self) -> bool:
        """True if no other node sees the files, as far as the system tells, and if nobody limits their reads."""
        files = self.pool.fetcher.files
        shared = any(machine.file_system_of(file.path, file.status().st_dev).shared for file in files)
        return not shared and not self.pool.fetcher.limited

    @property
    def pool(self) -> ReadPool:
        pool = self.opened
        if pool is None:
            with self._opening:
                self.check_open()
                if self.opened is None:
                    self.opened = self._open_like_leader()
                pool = self.opened
            if self._closed:  # meanwhile: `close` waits for no store that keeps us from opening
                self.close()
            self.check_open()
            assert pool is not None  # only `close` takes it away
        return pool

    def check_open(self) -> None:
        """Raises ClosedError."""
        if self._closed:
            raise ClosedError("the reader is already closed", path=self.path)

    def close(self, limit_s: float = math.inf) -> None:
        """Not collective. With reads in flight after `limit_s` seconds, the file closes later."""
        self._closed = True
        pool, self.opened = self.opened, None
        if pool is not None and pool.close(limit_s):
            pool.fetcher.close()

    def _open(self, gate: Gate | None, path: str, via: str | None = None) -> OneFile:
        """A fetcher of one file. via : another name that leads to it"""
        make: Callable[[], OneFile] = partial(self._fetcher, path, via)
        if self.recorder is not None:
            from pario.fetch.traced import open_traced

            make = partial(open_traced, make, self.recorder)
        return open_limited(make, gate)

    def _open_like_leader(self) -> ReadPool:
        fetchers: list[OneFile] = []
        try:
            for path, status, leaders in zip(self.paths, self._statuses, self._leaders_files, strict=True):
                fetchers.append(self._open_one_like_leader(path, status, leaders))
        except BaseException:
            for fetcher in fetchers:
                fetcher.close()
            raise
        self.fetchers = fetchers
        # The leader's sizes: a file may have grown since.
        self._store = _joined(fetchers, [status.st_size for status in self._statuses])
        return ReadPool(self._through(self._store), self.knob)

    def _open_one_like_leader(self, path: str, status: os.stat_result, leaders_file: str) -> OneFile:
        """Open a file that this node's leader has open: through the leader's descriptor, because the path may lead to
        another file by now; by the path if the system forbids that."""
        for via in (leaders_file, None):
            try:
                with store_agent() as gate:
                    fetcher = self._open(gate, path, via)
            except FileError:
                if via is None:
                    raise
                continue
            if os.path.samestat(fetcher.status(), status):
                return fetcher
            fetcher.close()
        raise SnapshotError(
            "the file was replaced after another rank of this node had opened it",
            path=path,
            rank=self._world.rank,
            hint="Open the dataset again.",
        )


def _joined(fetchers: list[OneFile], sizes: list[int]) -> Fetcher:
    return fetchers[0] if len(fetchers) == 1 else JoinedFetcher(fetchers, sizes)
