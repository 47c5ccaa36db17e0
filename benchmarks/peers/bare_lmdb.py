"""A loop over py-lmdb as tight as Python allows: views of the mapping, copied into one batch that is used again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from benchmarks.peers.reading import Job, Reader, decode_into, main

__all__ = ["filler"]


def filler(job: Job, get: Callable[[bytes], memoryview]) -> Callable[[np.ndarray, np.ndarray], None]:
    """fill(numbers, out): put these records into the rows of `out`."""

    def raw(numbers: np.ndarray, out: np.ndarray) -> None:
        flat, row, at = memoryview(out).cast("B"), job.shape[0], 0
        for i in numbers.tolist():
            flat[at : at + row] = get(b"%08d" % i)
            at += row

    def jpeg(numbers: np.ndarray, out: np.ndarray) -> None:
        for row, i in zip(out, numbers.tolist(), strict=True):
            decode_into(get(b"%08d" % i), row)

    return jpeg if job.jpeg else raw


class Bare(Reader):
    name = "bare_lmdb"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        import lmdb

        self._env = lmdb.open(job.own("source"), readonly=True, lock=False, readahead=False)
        self._txn = self._env.begin(buffers=True)
        self._fill = filler(job, self._txn.get)
        self._out = np.empty((job.batch, *job.shape), np.uint8)
        self._threads = ThreadPoolExecutor(job.threads) if job.threads > 1 else None

    def epoch(self, epoch: int) -> Iterator[np.ndarray]:
        numbers, batch = self.job.mine(epoch), self.job.batch
        for start in range(0, len(numbers), batch):
            part = numbers[start : start + batch]
            out = self._out[: len(part)]
            if self._threads is None:
                self._fill(part, out)
            else:
                k = self.job.threads
                list(self._threads.map(self._fill, np.array_split(part, k), np.array_split(out, k)))
            yield out

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()
        self._txn.abort()
        self._env.close()


if __name__ == "__main__":
    main(Bare)
