"""A tf.data.Dataset out of a Loader, in one process. What it does on several ranks: test_frameworks.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from required import framework

import pario
from pario.errors import OptionError

pytestmark = pytest.mark.frameworks

N, BATCH = 53, 8


@pytest.fixture(scope="module", autouse=True)
def dataset() -> Any:
    framework("tensorflow")
    from pario.adapters.tensorflow import dataset

    return dataset


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Record i: i + 1 bytes of value i."""
    with lmdb.open(str(tmp_path / "set.lmdb"), map_size=1 << 22) as env, env.begin(write=True) as txn:
        for i in range(N):
            txn.put(b"%04d" % i, bytes([i]) * (i + 1))
    return str(tmp_path / "set.lmdb")


def pair(value: bytes) -> tuple[np.ndarray, int]:
    return np.full((2, 3), value[0], np.float32), value[0]


def test_batches_by_their_peeked_signature(dataset: Any, path: str) -> None:
    with pario.Loader(path, BATCH, pair, shuffle="global") as loader:
        made = dataset(loader, ids="ids")
        spec = made.element_spec
        assert list(spec) == ["data", "label", "ids"]
        assert spec["data"].shape.as_list() == [None, 2, 3]
        assert [spec[name].dtype.name for name in spec] == ["float32", "int64", "int64"]
        assert (loader.epoch, loader.state_dict()["position"]) == (0, 0)  # the look used nothing up
        kept, orders = [], []
        for epoch in range(2):
            for k, batch in enumerate(made):
                kept.append(batch)
                if k + 1 < len(loader):  # nothing is taken ahead
                    assert loader.state_dict()["position"] == (k + 1) * BATCH
            orders.append([i for batch in kept[-len(loader) :] for i in batch["ids"].numpy().tolist()])
            assert loader.epoch == epoch + 1
    for batch in kept:
        ids = batch["ids"].numpy()
        assert (batch["label"].numpy() == ids).all()
        assert (batch["data"].numpy() == ids[:, None, None]).all()
    with pario.Loader(path, BATCH, shuffle="global") as loader:
        expected = [[i for batch in loader for i in batch.ids.tolist()] for _ in range(2)]
    assert orders == expected


def test_packed_records_and_a_signature_of_ones_own(dataset: Any, path: str) -> None:
    import tensorflow as tf

    with pario.Loader(path, BATCH) as loader:
        total = sum(int(batch["data"].numpy().size) for batch in dataset(loader))
        assert total == N * (N + 1) // 2
        given = {"data": tf.TensorSpec((None,), tf.uint8), "offsets": tf.TensorSpec((None,), tf.int64)}
        made = dataset(loader, signature=given)
        assert made.element_spec == given
        assert next(iter(made))["offsets"].numpy().tolist()[:3] == [0, 1, 3]
        with pytest.raises(OptionError, match="data, offsets"):
            dataset(loader, ids="data")
