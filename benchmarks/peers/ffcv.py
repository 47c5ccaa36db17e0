"""FFCV over a .beton: raw records as rows of bytes, pictures with the LMDB's own JPEG bytes. Order RANDOM, mapped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.judging import PIXELS
from benchmarks.peers.reading import MEAN, STD, Job, Reader, Source, main


class _Records:
    """What FFCV's writer wants; it gets each picture's file as it is in the LMDB instead of encoding anew."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.file = np.empty(0, np.uint8)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, i: int) -> tuple[np.ndarray]:
        self.file = np.frombuffer(self.source[i], np.uint8)
        if not self.source.jpeg:
            return (self.file,)
        return (np.empty((PIXELS, PIXELS, 3), np.uint8),)


class Ffcv(Reader):
    name = "ffcv"

    @staticmethod
    def load(rank: int, ranks: int) -> None:
        import ffcv.loader  # noqa: F401

    @staticmethod
    def write(source: Source, folder: Path) -> None:
        from ffcv.fields import NDArrayField, RGBImageField, rgb_image
        from ffcv.writer import DatasetWriter

        folder.mkdir(parents=True)
        records = _Records(source)
        rgb_image.encode_jpeg = lambda image, quality: records.file
        u8 = np.dtype(np.uint8)
        kind = RGBImageField("jpg") if source.jpeg else NDArrayField(u8, (source.record_bytes,))
        # One process, which is a fork: the open LMDB must be read in the child alone.
        writer = DatasetWriter(str(folder / "set.beton"), {"data": kind}, num_workers=1, page_size=8 << 20)
        writer.from_indexed_dataset(records)

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        from ffcv.fields.decoders import NDArrayDecoder, SimpleRGBImageDecoder
        from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
        from ffcv.loader import Loader, OrderOption
        from ffcv.transforms import NormalizeImage, RandomHorizontalFlip

        pipeline: list[Any] = [SimpleRGBImageDecoder() if job.jpeg else NDArrayDecoder()]
        if job.variant == "crop":
            mean, std = (255 * np.array(one) for one in (MEAN, STD))
            normalize = NormalizeImage(mean, std, np.float32)
            pipeline = [RandomResizedCropRGBImageDecoder((224, 224)), RandomHorizontalFlip(), normalize]
        self._loader = Loader(
            job.own("ffcv/set.beton"), job.batch, num_workers=job.threads, order=OrderOption.RANDOM, os_cache=True,
            indices=np.arange(job.rank, job.n, job.ranks), drop_last=False, seed=job.seed,
            pipelines={"data": pipeline},
        )  # fmt: skip

    def epoch(self, epoch: int) -> Iterator[Any]:
        for (data,) in self._loader:
            yield data

    def close(self) -> None:
        self._loader = None


if __name__ == "__main__":
    main(Ffcv)
