"""pario's Loader over the unmodified LMDB, in its orders."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.peers.reading import MEAN, STD, Job, Reader, main


class Pario(Reader):
    name = "pario"

    @staticmethod
    def load(rank: int, ranks: int) -> None:
        import pario  # noqa: F401

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        import pario

        comm: Any = None
        if job.ranks > 1:
            from mpi4py import MPI

            comm = MPI.COMM_WORLD
        self._comm = comm
        shuffle: Any = "block" if job.variant == "block" else "global"
        tiers: dict[str, Any] = {"tiers": (pario.Tier("memory", "4 GiB"),)} if job.variant == "memory" else {}
        # The fast transform, which FFCV's decoder uses, too.
        decoder = pario.decode.Image(fast=True) if job.jpeg else pario.decode.Raw(shape=job.shape)
        if job.variant == "crop":
            decoder = pario.decode.Image(224, crop="random", flip=True, mean=MEAN, std=STD, fast=True)
        self._loader = pario.Loader(
            job.own("source"), job.batch, decoder, shuffle=shuffle, seed=job.seed, comm=comm,
            on_error="skip" if job.variant == "skip" else "raise", verify=job.variant == "verify",
            options=pario.Options(decode_threads=job.threads, **tiers),
        )  # fmt: skip

    def epoch(self, epoch: int) -> Iterator[np.ndarray]:
        for batch in self._loader:
            yield batch["data"]

    def agreed(self, mine: bool) -> bool:
        return mine if self._comm is None else self._comm.bcast(mine)

    def close(self) -> None:
        self._loader.close()


if __name__ == "__main__":
    main(Pario)
