"""FFCV in random order over a .beton of the LMDB's own JPEG bytes: an epoch for each line of its input.

Runs under the interpreter of an environment with FFCV, numpy, lmdb and mpi4py, as worker_ffcv.py does.
"""

from __future__ import annotations

import argparse
import os

import cv2
import lmdb
import numpy as np
from ffcv.fields import RGBImageField, rgb_image
from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder, SimpleRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import NormalizeImage, RandomHorizontalFlip
from ffcv.writer import DatasetWriter

from benchmarks.worker import Team, on_request, run

MEAN, STD = 255 * np.array((0.485, 0.456, 0.406)), 255 * np.array((0.229, 0.224, 0.225))


class Records:
    """What FFCV's writer wants: images by number. The writer gets each image's file as it is in the LMDB."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.env: lmdb.Environment | None = None  # opened by each of the writer's processes
        self.file = np.empty(0, np.uint8)
        with lmdb.open(path, readonly=True, lock=False) as env:
            self.n = env.stat()["entries"]
        rgb_image.encode_jpeg = lambda image, quality: self.file

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[np.ndarray]:
        if self.env is None:
            self.env = lmdb.open(self.path, readonly=True, lock=False)
        with self.env.begin() as txn:
            self.file = np.frombuffer(txn.get(b"%08d" % i), np.uint8)
        return (np.ascontiguousarray(cv2.imdecode(self.file, cv2.IMREAD_COLOR)[..., ::-1]),)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("path", help="the LMDB")
    parser.add_argument("--beton", required=True, help="made from it if missing")
    parser.add_argument("--work", required=True, choices=["plain", "crop"])
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    team = Team()
    records = Records(options.path)
    if team.rank == 0 and not os.path.exists(options.beton):
        writer = DatasetWriter(f"{options.beton}.part", {"data": RGBImageField("jpg")}, num_workers=1)
        writer.from_indexed_dataset(records)
        os.rename(f"{options.beton}.part", options.beton)
    team.barrier()
    pipeline = [SimpleRGBImageDecoder()]
    if options.work == "crop":
        normalize = NormalizeImage(MEAN, STD, np.float32)
        pipeline = [RandomResizedCropRGBImageDecoder((224, 224)), RandomHorizontalFlip(), normalize]
    loader = Loader(
        options.beton,
        options.batch,
        num_workers=options.threads,
        order=OrderOption.RANDOM,
        os_cache=True,
        indices=np.arange(team.rank, len(records), team.size),
        drop_last=False,
        pipelines={"data": pipeline},
    )

    def epoch() -> int:
        seen = 0
        for (data,) in loader:
            seen += len(data)
        return seen

    on_request(team, epoch)


if __name__ == "__main__":
    run(main)
