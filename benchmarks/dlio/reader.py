"""`ParioReader`: pario under DLIO's own PyTorch DataLoader, one reader per worker process.

    reader:
      reader_classname: benchmarks.dlio.reader.ParioReader

The sampler of DLIO's DataLoader hands out one index at a time. With `sample_shuffle: off` or `seed` its order is known
in advance; then the reader fetches all records of the worker's next batch at once, so that several reads are in flight.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
from dlio_benchmark.common.enumerations import DatasetType, Shuffle
from dlio_benchmark.data_loader.torch_data_loader import dlio_sampler
from dlio_benchmark.reader.reader_handler import FormatReader

import pario

__all__ = ["ONE_AT_A_TIME", "ParioReader"]

#: Reads of one worker at once. Without a Loader nothing measures what the store can take.
INFLIGHT = 16
ONE_AT_A_TIME = "pario reads one sample at a time from now on"


class ParioReader(FormatReader):
    """Samples of LMDBs, one file each, as u8 arrays; those of `record_length` bytes as square images, like DLIO's own.

    Sample i of a file is its i-th record in the order of the keys.
    """

    def __init__(self, dataset_type: DatasetType, thread_index: int, epoch: int) -> None:
        super().__init__(dataset_type, thread_index)
        self._order = upcoming(self._args, dataset_type, thread_index)
        self._expected: int | None = None
        self._held: dict[int, np.ndarray] = {}

    def open(self, filename: str) -> pario.Reader:
        """Called in the worker process, which knows nothing of MPI."""
        return pario.Reader(filename, comm="self", options=pario.Options(inflight=INFLIGHT))

    def close(self, filename: str) -> None:
        self.open_file_map[filename].close()

    def get_sample(self, filename: str, sample_index: int) -> np.ndarray:
        return self._image(self._of(filename).read([sample_index])[0])

    def read_index(self, global_sample_idx: int, step: int) -> np.ndarray:
        self.step, self.image_idx = step, global_sample_idx
        if global_sample_idx not in self._held:
            self._fetch(self._batch_from(global_sample_idx))
        image = self._image(self._held.pop(global_sample_idx))
        self.preprocess()
        return image

    def next(self) -> Iterator[np.ndarray]:
        """The batches of `data_loader_sampler: iterative`."""
        samples = [(file, index) for _, file, index in self.file_map[self.thread_index]]
        for first in range(0, len(samples), self.batch_size):
            images = [self.get_sample(file, index) for file, index in samples[first : first + self.batch_size]]
            for _ in images:
                self.preprocess()
            yield np.stack(images)

    def finalize(self) -> None:
        for filename, reader in self.open_file_map.items():
            if reader is not None:
                self.close(filename)
        self.open_file_map.clear()

    def is_index_based(self) -> bool:
        return True

    def is_iterator_based(self) -> bool:
        return True

    def _of(self, filename: str) -> pario.Reader:
        reader = self.open_file_map.get(filename)
        if reader is None:
            reader = self.open_file_map[filename] = self.open(filename)
        return reader

    def _image(self, record: np.ndarray) -> np.ndarray:
        side = self._args.dimension
        return record.reshape(side, side) if len(record) == side * side else record

    def _batch_from(self, wanted: int) -> list[int]:
        """The samples of the batch that begins with this one, if that is the one that the sampler's order has next."""
        batch = [] if self._order is None else next(self._order, [])
        if not batch or batch[0] != wanted:
            if self._order is not None:
                logging.warning("sample %d is not the next one of DLIO's sampler: %s", wanted, ONE_AT_A_TIME)
            self._order = None
            return [wanted]
        return batch

    def _fetch(self, samples: list[int]) -> None:
        """Read these samples into memory, those of one file together."""
        self._held.clear()
        by_file: dict[str, list[int]] = {}
        for sample in samples:
            by_file.setdefault(self.global_index_map[sample][0], []).append(sample)
        for filename, wanted in by_file.items():
            records = self._of(filename).read([self.global_index_map[sample][1] for sample in wanted])
            self._held.update(zip(wanted, records, strict=True))


def upcoming(args: Any, dataset_type: DatasetType, worker: int) -> Iterator[list[int]] | None:
    """The batches of indices that DLIO's DataLoader gives this worker, over all epochs; None: nobody knows.

    worker : its number; -1: there are no workers, this is the MPI process
    """
    if args.sample_shuffle is Shuffle.RANDOM:
        return None
    train = dataset_type is DatasetType.TRAIN
    samples = args.total_samples_train if train else args.total_samples_eval
    batch = args.batch_size if train else args.batch_size_eval
    sampler = dlio_sampler(args.my_rank, args.comm_size, samples, args.sample_shuffle, args.epochs, args.seed)
    return _batches(sampler, batch, max(worker, 0), max(args.read_threads, 1), args.epochs)


def _batches(sampler: Any, batch: int, worker: int, workers: int, epochs: int) -> Iterator[list[int]]:
    for _ in range(epochs):
        state = np.random.get_state()  # noqa: NPY002  the sampler seeds numpy's global generator
        indices = list(sampler)
        np.random.set_state(state)  # noqa: NPY002
        full = len(indices) // batch  # drop_last=True
        for number in range(worker, full, workers):
            yield indices[number * batch : (number + 1) * batch]
