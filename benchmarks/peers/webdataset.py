"""WebDataset over 8 tars: shards in random order, and its shuffle buffer of 1,000 samples."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.peers.reading import Reader, Source, decode_into, main

SHARDS = 8


class Webdataset(Reader):
    name = "webdataset"

    @staticmethod
    def write(source: Source, folder: Path) -> None:
        import webdataset

        folder.mkdir(parents=True)
        kind = "jpg" if source.jpeg else "bin"
        for k in range(SHARDS):
            with webdataset.TarWriter(str(folder / f"{k:04d}.tar")) as writer:
                for i in range(len(source) * k // SHARDS, len(source) * (k + 1) // SHARDS):
                    writer.write({"__key__": f"{i:08d}", kind: source[i]})

    @staticmethod
    def load(rank: int, ranks: int) -> None:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
        import webdataset  # noqa: F401

    def epoch(self, epoch: int) -> Iterator[np.ndarray]:
        import webdataset

        job, kind = self.job, "jpg" if self.job.jpeg else "bin"

        def collate(samples: list[dict[str, bytes]]) -> np.ndarray:
            if not job.jpeg:
                return np.frombuffer(b"".join(one[kind] for one in samples), np.uint8).reshape(-1, *job.shape)
            out = np.empty((len(samples), *job.shape), np.uint8)
            for row, one in zip(out, samples, strict=True):
                decode_into(one[kind], row)
            return out

        data = webdataset.WebDataset(
            [job.own(f"webdataset/{k:04d}.tar") for k in range(SHARDS)], shardshuffle=SHARDS,
            nodesplitter=webdataset.split_by_node, seed=job.seed + epoch, empty_check=False,
        )  # fmt: skip
        return iter(data.shuffle(1000, seed=job.seed + epoch).batched(job.batch, collation_fn=collate, partial=True))


if __name__ == "__main__":
    main(Webdataset)
