"""Grain's MapDataset over ArrayRecord, one record per group so that any of them can be read alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.reading import Job, Reader, Source, decode_into, main


class Grain(Reader):
    name = "grain"
    resumes = True

    @staticmethod
    def write(source: Source, folder: Path) -> None:
        from array_record.python.array_record_module import ArrayRecordWriter

        folder.mkdir(parents=True)
        writer = ArrayRecordWriter(str(folder / "set.arrayrecord"), "group_size:1,uncompressed")
        for i in range(len(source)):
            writer.write(source[i])
        writer.close()

    @staticmethod
    def load(rank: int, ranks: int, port: int) -> None:
        import sys

        from absl import flags
        from grain.python import MapDataset  # noqa: F401

        flags.FLAGS(sys.argv[:1])

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        import grain.python as grain

        def row(value: bytes) -> np.ndarray:
            if not job.jpeg:
                return np.frombuffer(value, np.uint8)
            out = np.empty(job.shape, np.uint8)
            decode_into(value, out)
            return out

        self._source = grain.ArrayRecordDataSource(job.own("grain/set.arrayrecord"))
        data = grain.MapDataset.source(self._source).seed(job.seed).shuffle()
        self._map = data, row
        self._state: Any = None
        self._iterator: Any = None

    def epoch(self, epoch: int) -> Iterator[Any]:
        import grain.python as grain

        job, (data, row) = self.job, self._map
        # A repeated MapDataset shuffles each epoch anew; one of its epochs is a slice.
        data = data.repeat(1 << 20)[epoch * job.n : (epoch + 1) * job.n]
        data = data[job.rank :: job.ranks].map(row).batch(job.batch, batch_fn=np.stack)
        options = grain.ReadOptions(num_threads=job.threads, prefetch_buffer_size=max(2, 2 * job.threads))
        self._iterator = iter(data.to_iter_dataset(options))
        if self._state is not None:
            self._iterator.set_state(self._state)
            self._state = None
        return self._iterator

    def state(self) -> Any:
        return self._iterator.get_state()

    def resume(self, state: Any) -> None:
        self._state = state

    def close(self) -> None:
        self._iterator = self._map = self._source = None


if __name__ == "__main__":
    main(Grain)
