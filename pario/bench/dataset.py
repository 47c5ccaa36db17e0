"""Measures epochs over one dataset, read as a training job would, for `python -m pario bench run PATH`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pario.errors import ParioError
from pario.fetch.posix import PosixFetcher
from pario.fetch.resolve import open_dataset, resolve
from pario.loader.loader import Loader
from pario.machine import closing_fd
from pario.stats.report import Report

#: names in Loader.stats() of the parts of the ranks' time: on reading ranks, and on all ranks
PHASES = ("locate", "turn", "read", "check", "share", "decode", "consumer")


@dataclass(frozen=True)
class Epoch:
    """One epoch of all ranks together. bytes : of the records' values"""

    seconds: float
    records: int
    bytes: int


class DatasetBench:
    """One dataset under one workload. Use it as a context manager; all methods are collective over all ranks.

    batch_size : records per rank and batch
    step_ms : sleep this long per batch, in place of a training step
    cold : ask the kernel to drop the file from this node's page cache first
    options : of `Loader`, by name: shuffle, decoder, recipe, select, ...

    Raises what Loader raises.
    """

    def __init__(
        self, path: str, batch_size: int, *, step_ms: float = 0.0, cold: bool = False, **options: Any
    ) -> None:
        self._path, self._step_s = path, step_ms / 1000
        if cold:
            _drop(path)
        self._cached_before = cached_share(path)
        self._started = time.perf_counter()
        self._first_batch = 0.0
        self._value_bytes = 0
        self._epochs: list[Epoch] = []
        #: as the result shows it
        self._how: dict[str, Any] = {"batch_size": batch_size, "shuffle": options.get("shuffle") or "none"}
        self._how["recipe"] = options.get("recipe", "auto")
        self._loader: Loader[Any] = Loader(path, batch_size, **options)

    def __enter__(self) -> DatasetBench:
        return self

    def __exit__(self, *error: Any) -> None:
        self._loader.__exit__(*error)

    @property
    def batches(self) -> int:
        """Batches per epoch of each rank."""
        return len(self._loader)

    def epoch(self, after_batch: Callable[[], object]) -> Epoch:
        """Read one epoch; the clock runs while `after_batch` is called."""
        world = self._loader.world
        begun = time.perf_counter()
        records = 0
        for batch in self._loader:
            if not self._first_batch:
                self._first_batch = time.perf_counter() - self._started
            records += len(batch.ids)
            after_batch()
            if self._step_s:
                time.sleep(self._step_s)
        took = world.allreduce_max(round((time.perf_counter() - begun) * 1e6)) / 1e6
        records = world.allreduce_sum(records)
        # Not earlier: without a saved index the first epoch locates the records.
        self._value_bytes = self._value_bytes or int(_extents(self._loader)["nbytes"].sum())
        epoch = Epoch(took, records, self._value_bytes)
        self._epochs.append(epoch)
        return epoch

    def report(self) -> Report:
        """Report on all ranks so far."""
        return self._loader.report(all_ranks=True)

    def result(self, report: Report) -> dict[str, Any]:
        """The measurements, for JSON. report : of the same epochs"""
        loader, world, total = self._loader, self._loader.world, report.total
        return {
            "path": str(Path(self._path).absolute()),
            "ranks": world.size,
            "nodes": world.nodes,
            "records": loader.records,
            "value_bytes": self._value_bytes,
            "page_bytes": page_bytes(_extents(loader), loader.index.page_size),
            **self._how,
            "decoder": repr(loader.decoder),
            "cached_before": self._cached_before,
            "open_seconds": max(rank.open for rank in report.ranks),
            "first_batch_seconds": world.allreduce_max(round(self._first_batch * 1e6)) / 1e6,
            "epochs": [vars(epoch) for epoch in self._epochs],
            "rank_seconds": {name: total[name] for name in PHASES},
            **{name: total[name] for name in ("bytes_read", "reads", "skipped")},
        }


def _extents(loader: Loader) -> np.ndarray:
    """EXTENT[n] of the records of an epoch."""
    chosen = loader.selection
    return loader.index.extents if chosen is None else loader.index.places(chosen.ids(np.arange(chosen.n)))


def page_bytes(extents: np.ndarray, page_size: int) -> int:
    """Bytes of all pages with a record's value: the least that a device must deliver for one epoch."""
    first = extents["offset"] // page_size
    last = (extents["offset"] + np.maximum(extents["nbytes"], 1) - 1) // page_size
    # A page with several records counts once; a value on several pages shares them with no other.
    return int((last - first).sum() + len(np.unique(first))) * page_size


def cached_share(path: str) -> float | None:
    """Fraction of the data file in this node's page cache; None if unknown."""
    with suppress(ParioError), closing(open_dataset(path, PosixFetcher)) as fetcher:  # the loader reports errors
        return fetcher.cached_share(0, max(1, fetcher.nbytes))
    return None


def _drop(path: str) -> None:
    """Ask the kernel to forget the file's pages on this node."""
    # The loader reports errors, `cached_share` what stayed.
    with suppress(OSError, ParioError), closing_fd(os.open(resolve(path), os.O_RDONLY)) as fd:
        os.fsync(fd)  # pages that wait to be written cannot be dropped
        for _ in range(5):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            if (cached_share(path) or 0.0) <= 0.001:
                return
            time.sleep(0.1)  # recently read pages stay in per-CPU lists for a moment
