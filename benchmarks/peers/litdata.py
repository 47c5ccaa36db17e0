"""LitData's streaming dataset over its own chunks of 64 MB, with its usual shuffle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.reading import Job, Reader, Source, decode_into, main, meet


class Litdata(Reader):
    name = "litdata"
    resumes = True

    @staticmethod
    def write(source: Source, folder: Path) -> None:
        from litdata.streaming.writer import BinaryWriter

        folder.mkdir(parents=True)
        writer = BinaryWriter(str(folder), chunk_bytes=64 << 20)
        for i in range(len(source)):
            writer[i] = source[i]
        writer.done()
        writer.merge()

    @staticmethod
    def load(rank: int, ranks: int, port: int) -> None:
        import litdata  # noqa: F401

        meet(rank, ranks, port)

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        from litdata import StreamingDataLoader, StreamingDataset

        shape = job.shape

        def collate(values: list[bytes]) -> np.ndarray:
            if not job.jpeg:
                return np.frombuffer(b"".join(values), np.uint8).reshape(-1, *shape)
            out = np.empty((len(values), *shape), np.uint8)
            for row, value in zip(out, values, strict=True):
                decode_into(value, row)
            return out

        data = StreamingDataset(job.own("litdata"), shuffle=True, drop_last=False, seed=job.seed)
        workers = job.threads if job.threads > 1 else 0
        self._loader = StreamingDataLoader(
            data, batch_size=job.batch, num_workers=workers, collate_fn=collate, persistent_workers=workers > 0
        )

    def epoch(self, epoch: int) -> Iterator[Any]:
        return iter(self._loader)

    def state(self) -> Any:
        return self._loader.state_dict()

    def resume(self, state: Any) -> None:
        self._loader.load_state_dict(state)

    def close(self) -> None:
        self._loader = None


if __name__ == "__main__":
    main(Litdata)
