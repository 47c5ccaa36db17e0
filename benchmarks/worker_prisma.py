"""One side of PRISMA's experiment (benchmarks/prisma.py): epochs of records in random order, each followed by a sleep
in place of computing. Every byte is added up and compared with what was written. One JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

BATCH = 16
#: of torch.utils.data.DataLoader, its own default
AHEAD = 2


def key(i: int) -> bytes:
    return b"%08d" % i


class Extents:
    """The records by explicit reads, as a loader of files would."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._where = np.load(Path(path).parent / "extents.npy").tolist()
        self._fd = -1

    def __getitem__(self, i: int) -> bytes:
        if self._fd < 0:
            self._fd = os.open(os.path.join(self._path, "data.mdb"), os.O_RDONLY)
        offset, nbytes = self._where[i]
        return os.pread(self._fd, nbytes, offset)


class Values:
    """The records through `get` of an environment that each process opens when it first reads."""

    def __init__(self, path: str, ours: bool) -> None:
        self._path, self._ours = path, ours
        self._txn: Any = None

    def __getitem__(self, i: int) -> bytes:
        if self._txn is None:
            self._txn = opened(self._path, self._ours).begin()
        return self._txn.get(key(i))


def opened(path: str, ours: bool) -> Any:
    if ours:
        import pario.lmdb as lmdb
    else:
        import lmdb
    return lmdb.open(path, readonly=True, lock=False, readahead=False)


def order(records: int, epoch: int) -> np.ndarray:
    return np.random.default_rng(epoch).permutation(records)


Batches = Callable[[int], Iterator[tuple[np.ndarray, np.ndarray]]]


def plain(options: argparse.Namespace, close: contextlib.ExitStack) -> Batches:
    source = source_of(options.side, options.path)

    def epoch(number: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        ids = order(options.records, number)
        for at in range(0, len(ids), BATCH):
            some_ids = ids[at : at + BATCH]
            yield some_ids, np.stack([np.frombuffer(source[i], np.uint8) for i in some_ids.tolist()])

    return epoch


def loader(options: argparse.Namespace, close: contextlib.ExitStack) -> Batches:
    os.environ["PARIO_TIERS"] = ""  # no copy in the node's memory: every epoch comes from the store
    import pario

    width = int(np.load(Path(options.path).parent / "extents.npy")[0, 1])
    made = pario.Loader(options.path, BATCH, pario.decode.Raw(shape=width), shuffle="global", seed=1)
    close.enter_context(made)

    def epoch(number: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        left = options.records
        for batch in made:
            yield batch.ids, batch["data"]
            left -= len(batch.ids)
            if left <= 0:
                break

    epoch.depth = lambda: made.stats()["depth"]  # type: ignore[attr-defined]
    return epoch


def source_of(side: str, path: str) -> Any:
    return Extents(path) if side.endswith("pread") else Values(path, side.startswith("ours"))


class Ids:
    """A sampler: another order in each epoch."""

    def __init__(self, records: int) -> None:
        self.records, self.epoch = records, 0

    def __iter__(self) -> Iterator[int]:
        return iter(order(self.records, self.epoch).tolist())

    def __len__(self) -> int:
        return self.records


class Set:
    def __init__(self, source: Any, records: int) -> None:
        self._source, self._records = source, records

    def __len__(self) -> int:
        return self._records

    def __getitem__(self, i: int) -> Any:
        import torch

        return i, torch.frombuffer(bytearray(self._source[i]), dtype=torch.uint8)


def torch_loader(options: argparse.Namespace, close: contextlib.ExitStack) -> Batches:
    import torch

    torch.set_num_threads(1)
    ids = Ids(options.records)
    sampler: Any = ids
    env = None
    if options.side == "ours":
        from pario.adapters.sampling import prefetching

        env = close.enter_context(opened(options.path, True))
        sampler = prefetching(ids, env, key)
    made = torch.utils.data.DataLoader(
        Set(source_of(options.side, options.path), options.records),  # type: ignore[arg-type]
        batch_size=BATCH,
        sampler=sampler,
        num_workers=options.workers,
        persistent_workers=options.workers > 0,
        multiprocessing_context="fork" if options.workers else None,
    )

    def epoch(number: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        ids.epoch = number
        for some_ids, data in made:
            yield some_ids.numpy(), data.numpy()

    if env is not None:
        epoch.ahead = lambda: env._announced.ahead  # type: ignore[attr-defined]
        epoch.depth = lambda: env._announced.ahead._pool.inflight  # type: ignore[attr-defined]
    return epoch


def tensorflow(options: argparse.Namespace, close: contextlib.ExitStack) -> Batches:
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import tensorflow as tf

    source = source_of(options.side, options.path)
    source[0]  # opens, before many threads do

    def read(i: Any) -> Any:
        return np.frombuffer(source[int(i)], np.uint8)

    def epoch(number: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        made = tf.data.Dataset.from_tensor_slices(order(options.records, number))
        made = made.map(lambda i: (i, tf.numpy_function(read, [i], tf.uint8)), num_parallel_calls=tf.data.AUTOTUNE)
        made = made.map(lambda i, one: (i, tf.ensure_shape(one, [None]))).batch(BATCH).prefetch(tf.data.AUTOTUNE)
        for some_ids, data in made:
            yield some_ids.numpy(), data.numpy()

    return epoch


FRONTS = {"plain": plain, "loader": loader, "torch": torch_loader, "tf": tensorflow}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("--front", choices=list(FRONTS), required=True)
    parser.add_argument("--side", default="ours", help="ours, pread or lmdb")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--records", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--compute", type=float, required=True, help="seconds per record")
    options = parser.parse_args()

    sums = np.load(Path(options.path).parent / "sums.npy")
    with contextlib.ExitStack() as close:
        epochs = FRONTS[options.front](options, close)
        first = seconds = time.perf_counter()
        wrong = count = 0
        ends, depths = [], []
        for number in range(options.epochs):
            for ids, data in epochs(number):
                found = np.ascontiguousarray(data).view(np.uint64).sum(axis=1, dtype=np.uint64)
                wrong += int((found != sums[ids]).sum())
                count += len(ids)
                time.sleep(options.compute * len(ids))
                if hasattr(epochs, "depth"):
                    depths.append(epochs.depth())
            ends.append(time.perf_counter() - seconds)
            seconds = time.perf_counter()
        total = time.perf_counter() - first
        said: dict[str, Any] = {"seconds": total, "epochs": ends, "records": count, "wrong": wrong}
        if depths:
            said |= {"depth": sum(depths) / len(depths), "last_depth": depths[-1]}
        if hasattr(epochs, "ahead"):
            ahead = epochs.ahead()
            said |= {"most": ahead.most_reads, "counts": ahead.counts}
    print(json.dumps(said))


if __name__ == "__main__":
    main()
