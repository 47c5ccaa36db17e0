"""NVIDIA DALI on the CPU: its Caffe LMDB reader, with its usual shuffle buffer, over an LMDB of Datums."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.peers.judging import PIXELS
from benchmarks.peers.reading import Job, Reader, Source, main


def _varint(n: int) -> bytes:
    out = b""
    while n > 127:
        out += bytes([n & 127 | 128])
        n >>= 7
    return out + bytes([n])


def datum(value: bytes, jpeg: bool) -> bytes:
    """Caffe's message: channels, height, width, data, label, encoded."""
    channels, height, width = (3, PIXELS, PIXELS) if jpeg else (1, 1, len(value))
    head = b"".join(bytes([8 * k]) + _varint(n) for k, n in ((1, channels), (2, height), (3, width)))
    return head + b"\x22" + _varint(len(value)) + value + b"\x28\x00" + (b"\x38\x01" if jpeg else b"")


class Dali(Reader):
    name = "dali"

    @staticmethod
    def write(source: Source, folder: Path) -> None:
        import lmdb

        with lmdb.open(str(folder), map_size=1 << 40) as env:
            for start in range(0, len(source), 1000):
                with env.begin(write=True) as txn:
                    for i in range(start, min(start + 1000, len(source))):
                        txn.put(b"%08d" % i, datum(source[i], source.jpeg))

    @staticmethod
    def load(rank: int, ranks: int) -> None:
        import nvidia.dali.fn  # noqa: F401

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        from nvidia.dali import fn, pipeline_def

        @pipeline_def(batch_size=job.batch, num_threads=job.threads, device_id=None, seed=job.seed)
        def pipeline():  # type: ignore[no-untyped-def]
            data, _ = fn.readers.caffe(
                path=job.own("dali"), random_shuffle=True, name="reader", shard_id=job.rank, num_shards=job.ranks,
                pad_last_batch=True,
            )  # fmt: skip
            if job.jpeg:
                return fn.decoders.image(data, device="cpu", use_fast_idct=True, jpeg_fancy_upsampling=True)
            return data

        self._pipe = pipeline()
        self._pipe.build()
        self._records = job.n * (job.rank + 1) // job.ranks - job.n * job.rank // job.ranks

    def epoch(self, epoch: int) -> Iterator[np.ndarray]:
        left = self._records
        while left:
            (out,) = self._pipe.run()
            batch = np.asarray(out.as_tensor()).reshape(-1, *self.job.shape)[:left]
            left -= len(batch)
            yield batch

    def close(self) -> None:
        self._pipe = None


if __name__ == "__main__":
    main(Dali)
