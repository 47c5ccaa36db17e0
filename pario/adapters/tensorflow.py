"""A `tf.data.Dataset` out of a Loader: each iteration over it is an epoch, or the rest of one.

    with pario.Loader("train.lmdb", 64, pario.decode.Datum(), shuffle="global") as loader:
        for batch in pario.adapters.tensorflow.dataset(loader):      # dict of tensors
            step(batch["data"], batch["label"])
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from pario.adapters.by_batch import with_ids
from pario.loader.loader import Loader

__all__ = ["dataset"]


def dataset(loader: Loader, *, ids: str | None = None, signature: dict[str, Any] | None = None) -> Any:
    """A `tf.data.Dataset` of the loader's batches, dicts of tensors by name. Not collective; each iteration over it is,
    as a loop over the loader.

    ids : name under which the record ids, i64[b], come with the other tensors; None leaves them out
    signature : a `tf.TensorSpec` for each name, for decoders whose arrays have axes of changing length. None: the
        shapes and dtypes of the next batch (`loader.peek()`), the first axis of any length

    TensorFlow takes the batches in threads of its own, one at a time, and copies them. No batch is taken ahead of the
    script, so `loader.state_dict()` is the position of the script; with `.prefetch(k)` it is up to k + 1 batches ahead.
    """
    if signature is None:
        first = with_ids(loader.peek(), ids)
        signature = {
            name: tf.TensorSpec(shape=(None, *array.shape[1:]), dtype=tf.as_dtype(array.dtype), name=name)
            for name, array in first.items()
        }

    def epoch() -> Iterator[dict[str, np.ndarray]]:
        for batch in loader:
            yield with_ids(batch, ids)

    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    options.deterministic = True
    return tf.data.Dataset.from_generator(epoch, output_signature=signature).with_options(options)
