"""The fastest of DLIO's own readers, returning what it reads.

As shipped it reads a sample, throws it away and returns one fixed image. Then a batch costs a copy of memory that is in
the processor's cache, and nobody can check what was delivered. This one returns the sample itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from dlio_benchmark.common.enumerations import DataLoaderType
from dlio_benchmark.data_loader.base_data_loader import BaseDataLoader
from dlio_benchmark.reader.indexed_binary_reader import IndexedBinaryReader

__all__ = ["Indexed", "NoLoading"]


class Indexed(IndexedBinaryReader):
    def read_index(self: Any, image_idx: int, step: int) -> np.ndarray:
        """FormatReader's, with the sample as its result."""
        self.step, self.image_idx = step, image_idx
        filename, sample_index = self.global_index_map[image_idx]
        if self.open_file_map.get(filename) is None:
            self.open_file_map[filename] = self.open(filename)
        image = self.get_sample(filename, sample_index)
        self.preprocess()
        return image

    def get_sample(self, filename: str, sample_index: int) -> np.ndarray:
        file = self.open_file_map[filename]
        file.seek(self.file_map_ibr[filename][0][sample_index])
        image = np.empty(self.file_map_ibr[filename][1][sample_index], np.uint8)
        file.readinto(image)
        return image.reshape(self._args.dimension, self._args.dimension)


class NoLoading(BaseDataLoader):
    """The same batch again and again: what remains is the time that DLIO itself takes between two steps."""

    def __init__(self, format_type: Any, dataset_type: Any, epoch_number: int) -> None:
        super().__init__(format_type, dataset_type, epoch_number, DataLoaderType.CUSTOM)

    def read(self) -> None:
        side = self._args.dimension
        self._batch = torch.zeros((self.batch_size, side, side), dtype=torch.uint8)

    def next(self) -> Iterator[torch.Tensor]:
        while True:
            yield self._batch

    def finalize(self) -> None:
        pass
