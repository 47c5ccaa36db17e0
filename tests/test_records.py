"""A batch is a mapping that frameworks may rebuild, and unpacks into its arrays."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from pario.records import Batch

X, Y, IDS = np.arange(6.0).reshape(2, 3), np.array([4, 5]), np.array([17, 3])


@pytest.fixture
def batch() -> Batch:
    return Batch({"data": X, "label": Y}, IDS, epoch=2, step=7, skipped=1)


def test_it_unpacks_into_its_arrays_in_their_order(batch: Batch) -> None:
    x, y = batch
    assert x is X
    assert y is Y
    assert [id(array) for array in batch] == [id(X), id(Y)]
    assert len(batch) == 2


def test_it_is_a_mapping_by_name(batch: Batch) -> None:
    assert isinstance(batch, Mapping)
    assert list(batch.keys()) == ["data", "label"]
    assert [name for name, _ in batch.items()] == ["data", "label"]
    assert dict(batch) == {**batch} == batch._arrays
    assert dict(batch)["data"] is X
    assert ("data" in batch, "x" in batch, 3 in batch) == (True, False, False)
    assert batch.get("x") is None
    assert (lambda data, label: data)(**batch) is X
    match batch:
        case {"label": found}:
            assert found is Y
        case _:
            pytest.fail("no mapping pattern matches it")


def test_a_loop_that_expects_names_is_told(batch: Batch) -> None:
    for name in batch:
        with pytest.raises(KeyError, match=r"batch\.keys\(\)"):
            batch[name]  # type: ignore[index]
    with pytest.raises(KeyError, match="'data', 'label'"):
        batch["lable"]


def rebuilt_by_accelerate(batch: Any) -> Any:
    return type(batch)({k: v + 1 for k, v in batch.items()})


def rebuilt_by_lightning(batch: Any) -> Any:
    return type(batch)(OrderedDict([(k, v + 1) for k, v in batch.items()]))


def rebuilt_out_of_pairs(batch: Any) -> Any:
    return type(batch)([(k, v + 1) for k, v in batch.items()])


@pytest.mark.parametrize("rebuilt", [rebuilt_by_accelerate, rebuilt_by_lightning, rebuilt_out_of_pairs])
def test_it_survives_being_rebuilt(batch: Batch, rebuilt: Any) -> None:
    found = rebuilt(batch)
    assert type(found) is Batch
    np.testing.assert_array_equal(found["data"], X + 1)
    _, y = found
    np.testing.assert_array_equal(y, Y + 1)
    assert repr(found) == "Batch(data: float64[2, 3], label: int64[2])"
    # It cannot know whose records these are, and does not say anything wrong about them.
    for name in ("ids", "epoch", "step", "skipped"):
        assert not hasattr(found, name)
    with pytest.raises(AttributeError, match="a framework built it anew"):
        _ = found.ids
    np.testing.assert_array_equal(rebuilt(found)["label"], Y + 2)


def test_what_a_rebuilt_batch_holds_may_be_anything() -> None:
    assert repr(Batch({"text": ["a"], "n": 3})) == "Batch(text: list, n: int)"


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda b: pickle.loads(pickle.dumps(b))])
def test_copies_keep_everything(batch: Batch, copied: Any) -> None:
    found = copied(batch)
    assert (found.epoch, found.step, found.skipped, found.ids.tolist()) == (2, 7, 1, [17, 3])
    np.testing.assert_array_equal(found["data"], X)
    assert not hasattr(copied(Batch({"data": X})), "ids")


def test_other_attributes_lead_to_the_items(batch: Batch) -> None:
    with pytest.raises(AttributeError, match=r"batch\['data'\]"):
        _ = batch.data  # type: ignore[attr-defined]
