"""HF datasets, map-style: rows of a mapped Arrow file by number, a batch per call."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.peers.reading import Job, Reader, Source, decode_into, main


class Hf(Reader):
    name = "hf"

    @staticmethod
    def write(source: Source, folder: Path) -> None:
        from datasets import Dataset, Features, Value

        rows = {"x": [source[i] for i in range(len(source))]}
        Dataset.from_dict(rows, features=Features({"x": Value("binary")})).save_to_disk(str(folder))

    @staticmethod
    def load(rank: int, ranks: int) -> None:
        import datasets

        datasets.disable_progress_bars()

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        from datasets import load_from_disk

        self._data = load_from_disk(job.own("hf"))
        self._threads = ThreadPoolExecutor(job.threads) if job.threads > 1 else None

    def epoch(self, epoch: int) -> Iterator[np.ndarray]:
        job = self.job
        numbers = job.mine(epoch)
        for start in range(0, len(numbers), job.batch):
            values = self._data[numbers[start : start + job.batch]]["x"]
            if not job.jpeg:
                yield np.frombuffer(b"".join(values), np.uint8).reshape(-1, *job.shape)
                continue
            out = np.empty((len(values), *job.shape), np.uint8)
            list((self._threads.map if self._threads else map)(decode_into, values, out))
            yield out

    def close(self) -> None:
        self._data = None
        if self._threads is not None:
            self._threads.shutdown()


if __name__ == "__main__":
    main(Hf)
