"""SPDL's pipeline of threads: a batch of record numbers in, a batch of records out of py-lmdb."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.peers.bare_lmdb import filler
from benchmarks.peers.reading import Job, Reader, main


class Spdl(Reader):
    name = "spdl"

    @staticmethod
    def load(rank: int, ranks: int, port: int) -> None:
        import spdl.pipeline  # noqa: F401

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        import lmdb

        self._env = lmdb.open(job.own("source"), readonly=True, lock=False, readahead=False)
        self._txn = self._env.begin(buffers=True)
        self._fill = filler(job, self._txn.get)

    def epoch(self, epoch: int) -> Iterator[np.ndarray]:
        from spdl.pipeline import PipelineBuilder

        job, numbers = self.job, self.job.mine(epoch)

        def batch(part: np.ndarray) -> np.ndarray:
            out = np.empty((len(part), *job.shape), np.uint8)
            self._fill(part, out)
            return out

        parts = [numbers[start : start + job.batch] for start in range(0, len(numbers), job.batch)]
        builder = PipelineBuilder().add_source(parts).pipe(batch, concurrency=job.threads, output_order="input")
        pipeline = builder.add_sink(2).build(num_threads=job.threads)
        with pipeline.auto_stop():
            yield from pipeline

    def close(self) -> None:
        self._txn.abort()
        self._env.close()


if __name__ == "__main__":
    main(Spdl)
