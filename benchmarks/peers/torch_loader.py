"""torch's DataLoader over a map-style dataset that reads py-lmdb, a batch per call (`__getitems__`).

One thread: no workers. Two threads: two workers, which stay for all epochs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.peers.bare_lmdb import filler
from benchmarks.peers.reading import Job, Reader, main


class Records:
    def __init__(self, job: Job) -> None:
        self.job = job
        self._txn: Any = None  # opened by each worker

    def __len__(self) -> int:
        return self.job.n

    def __getitems__(self, numbers: list[int]) -> np.ndarray:
        if self._txn is None:
            import lmdb

            self._env = lmdb.open(self.job.own("source"), readonly=True, lock=False, readahead=False)
            self._txn = self._env.begin(buffers=True)
            self._fill = filler(self.job, self._txn.get)
        out = np.empty((len(numbers), *self.job.shape), np.uint8)
        self._fill(np.asarray(numbers), out)
        return out

    def close(self) -> None:
        if self._txn is not None:
            self._txn.abort()
            self._env.close()


class Torch(Reader):
    name = "torch_loader"

    @staticmethod
    def load(rank: int, ranks: int, port: int) -> None:
        import torch.utils.data

        torch.set_num_threads(1)

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        import torch
        from torch.utils.data import DataLoader, DistributedSampler

        self._records = Records(job)
        self._sampler = DistributedSampler(
            self._records, num_replicas=job.ranks, rank=job.rank, shuffle=True, seed=job.seed
        )
        workers = job.threads if job.threads > 1 else 0
        self._loader = DataLoader(
            self._records, job.batch, sampler=self._sampler, num_workers=workers, collate_fn=torch.from_numpy,
            persistent_workers=workers > 0,
        )  # fmt: skip

    def epoch(self, epoch: int) -> Iterator[Any]:
        self._sampler.set_epoch(epoch)
        return iter(self._loader)

    def close(self) -> None:
        self._loader = None  # workers end
        self._records.close()


if __name__ == "__main__":
    main(Torch)
