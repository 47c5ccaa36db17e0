"""`ParioLoader`: pario.Loader as DLIO's data loader, collective over DLIO's ranks, shuffled over the whole dataset.

reader:
  data_loader_classname: benchmarks.dlio.loader.ParioLoader
  data_loader_sampler: index
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from dlio_benchmark.common.enumerations import DataLoaderType, DatasetType, Shuffle
from dlio_benchmark.data_loader.base_data_loader import BaseDataLoader
from dlio_benchmark.utils.utility import DLIOMPI

import pario

__all__ = ["ParioLoader"]

#: The LMDB, where DLIO's list of files cannot name it: newer versions of DLIO count files, not samples.
PATH, PATH_EVAL = "PARIO_LMDB", "PARIO_LMDB_EVAL"


class _Ahead(pario.decode.Raw):
    """Raw records, copied into batches by pario's threads while DLIO sleeps. DLIO counts every millisecond for which a
    step waits, so that a copy of 9 MB when the batch is taken shows. AU with steps of 38.8 ms, local disk, median of
    five runs in turn: 97.2 % (96.8 to 97.4); Raw itself (each rank filled its batches from the page cache) 96.5 % (95.8
    to 96.7). An earlier pilot, one run each: a Python function as decoder 91.8 % and 96.1 %.
    """

    parallel = True


class ParioLoader(BaseDataLoader):
    """Batches as u8 tensors [batch, side, side]; every rank gets the same number, and each sample once per epoch.

    `sample_shuffle: off` is the order of the keys; `seed` and `random` are uniform permutations of all samples, another
    one in each epoch. `read_threads` and `prefetch_size` say nothing here: pario finds its own.
    """

    def __init__(self, format_type: Any, dataset_type: DatasetType, epoch_number: int) -> None:
        super().__init__(format_type, dataset_type, epoch_number, DataLoaderType.CUSTOM)
        self._loader: pario.Loader | None = None
        self._epochs = 0

    def read(self) -> None:
        """Open the dataset. Collective over DLIO's communicator."""
        args = self._args
        if args.preprocess_time or args.preprocess_time_stdev:
            raise ValueError("preprocess_time is simulated by DLIO's readers; with ParioLoader it must be 0")
        train = self.dataset_type is DatasetType.TRAIN
        path = os.environ.get(PATH if train else PATH_EVAL) or (args.file_list_train if train else args.file_list_eval)
        self._loader = pario.Loader(
            path,
            self.batch_size,
            _Ahead(dtype="uint8", shape=(args.dimension, args.dimension)),
            shuffle=False if args.sample_shuffle is Shuffle.OFF else "global",
            seed=args.seed,
            comm=DLIOMPI.get_instance().comm(),
            drop_last=True,
        )

    def next(self) -> Iterator[torch.Tensor]:
        """The next epoch. DLIO leaves this loop at its last step."""
        assert self._loader is not None, "DLIO calls read() first"
        for batch in self._loader:
            yield torch.from_numpy(batch["data"])

    def finalize(self) -> None:
        """DLIO calls this after every epoch."""
        self._epochs += 1
        if self._loader is not None and self._epochs == self._args.epochs:
            self._loader.close()
