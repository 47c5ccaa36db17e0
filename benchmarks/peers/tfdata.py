"""tf.data over 8 TFRecord files, a record's bytes as they are; a shuffle buffer of 10,000 records."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.peers.reading import Job, Reader, Source, main

SHARDS = 8
BUFFER = 10_000


class Tfdata(Reader):
    name = "tfdata"

    @staticmethod
    def write(source: Source, folder: Path) -> None:
        import tensorflow as tf

        folder.mkdir(parents=True)
        for k in range(SHARDS):
            with tf.io.TFRecordWriter(str(folder / f"{k:04d}.tfrecord")) as writer:
                for i in range(len(source) * k // SHARDS, len(source) * (k + 1) // SHARDS):
                    writer.write(source[i])

    @staticmethod
    def load(rank: int, ranks: int) -> None:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        import tensorflow  # noqa: F401

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        import tensorflow as tf

        def picture(value: Any) -> Any:
            image = tf.io.decode_jpeg(value, channels=3, dct_method="INTEGER_FAST")
            return tf.ensure_shape(image, job.shape)

        files = tf.data.Dataset.list_files(job.own("tfdata/*.tfrecord"), shuffle=True, seed=job.seed)
        if job.ranks > 1:
            files = tf.data.Dataset.list_files(job.own("tfdata/*.tfrecord"), shuffle=False).shard(job.ranks, job.rank)
        records = files.interleave(tf.data.TFRecordDataset, cycle_length=4, num_parallel_calls=job.threads)
        records = records.shuffle(BUFFER, seed=job.seed, reshuffle_each_iteration=True)
        if job.jpeg:
            batches = records.map(picture, num_parallel_calls=job.threads).batch(job.batch)
        else:
            raw = lambda values: tf.reshape(tf.io.decode_raw(values, tf.uint8), (-1, *job.shape))  # noqa: E731
            batches = records.batch(job.batch).map(raw, num_parallel_calls=job.threads)
        options = tf.data.Options()
        options.threading.private_threadpool_size = job.threads
        self._data = batches.prefetch(2).with_options(options)

    def epoch(self, epoch: int) -> Iterator[Any]:
        return self._data.as_numpy_iterator()

    def close(self) -> None:
        self._data = None


if __name__ == "__main__":
    main(Tfdata)
