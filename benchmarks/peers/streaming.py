"""MosaicML Streaming over MDS shards of 64 MB, shuffled by its usual py1e."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.reading import Job, Reader, Source, decode_into, main, meet


class Streaming(Reader):
    name = "streaming"
    resumes = True

    @staticmethod
    def write(source: Source, folder: Path) -> None:
        from streaming import MDSWriter

        with MDSWriter(out=str(folder), columns={"x": "bytes"}, size_limit=64 << 20) as writer:
            for i in range(len(source)):
                writer.write({"x": source[i]})

    @staticmethod
    def load(rank: int, ranks: int, port: int) -> None:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
        import streaming.base.util

        meet(rank, ranks, port)
        streaming.base.util.clean_stale_shared_memory()  # has a barrier

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        import torch
        from streaming import StreamingDataLoader, StreamingDataset

        def collate(values: list[dict[str, bytes]]) -> Any:
            """A tensor: of an array, the loader's state counts the bytes of a row as its samples."""
            if not job.jpeg:
                out = np.frombuffer(bytearray().join(one["x"] for one in values), np.uint8).reshape(-1, *job.shape)
            else:
                out = np.empty((len(values), *job.shape), np.uint8)
                for row, one in zip(out, values, strict=True):
                    decode_into(one["x"], row)
            return torch.from_numpy(out)

        self._data = StreamingDataset(
            local=job.own("streaming"), shuffle=True, batch_size=job.batch, shuffle_seed=job.seed
        )
        workers = job.threads if job.threads > 1 else 0
        self._loader = StreamingDataLoader(
            self._data, batch_size=job.batch, num_workers=workers, collate_fn=collate, persistent_workers=workers > 0
        )

    def epoch(self, epoch: int) -> Iterator[Any]:
        return iter(self._loader)

    def state(self) -> Any:
        return self._loader.state_dict()

    def resume(self, state: Any) -> None:
        self._loader.load_state_dict(state)

    def close(self) -> None:
        self._loader = self._data = None
        import gc

        import streaming.base.util

        gc.collect()
        streaming.base.util.clean_stale_shared_memory()


if __name__ == "__main__":
    main(Streaming)
