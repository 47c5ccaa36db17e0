"""Memory of batches: used again when nobody refers to it, and never before."""

import gc

import numpy as np
import pytest

from pario.buffers import BatchBuffers, Buffers
from pario.errors import HeldBatchesError

SHAPES = {"data": ((100, 3, 10), np.dtype(np.uint8)), "label": ((100,), np.dtype(np.int64))}


def test_shapes_dtypes_alignment():
    arrays = BatchBuffers(1 << 20).take(SHAPES | {"none": ((0, 7), np.dtype(np.float32))})
    assert {name: (a.shape, a.dtype) for name, a in arrays.items()} == SHAPES | {"none": ((0, 7), np.dtype(np.float32))}
    assert all(a.ctypes.data % 64 == 0 for a in arrays.values())
    assert all(a.flags.c_contiguous and a.flags.writeable for a in arrays.values())


def test_arrays_may_begin_beyond_a_cache_line() -> None:
    arrays = BatchBuffers(1 << 20, 16).take(SHAPES)
    assert [a.ctypes.data % 64 for a in arrays.values()] == [16, 16]
    data, label = (a.ctypes.data for a in arrays.values())
    assert label >= data + 3000


@pytest.mark.parametrize("keep", [lambda a: a["label"], lambda a: a["data"][5:7], lambda a: a["data"][::2].T[1:]])
def test_memory_is_not_used_again_while_a_view_lives(keep):
    buffers = BatchBuffers(1 << 20)
    arrays = buffers.take(SHAPES)
    place = arrays["data"].ctypes.data
    arrays["data"][:] = 1
    arrays["label"][:] = 1
    view = keep(arrays)
    del arrays
    for _ in range(5):
        other = buffers.take(SHAPES)
        assert other["data"].ctypes.data != place
        other["data"][:] = 2
        other["label"][:] = 2
        assert (view == 1).all()
    del view, other
    gc.collect()
    assert place in {buffers.take(SHAPES)["data"].ctypes.data for _ in range(1)} | {
        a["data"].ctypes.data for a in [buffers.take(SHAPES) for _ in range(3)]
    }


def test_a_steady_loop_needs_a_steady_amount():
    buffers = BatchBuffers(1 << 30)
    previous = None
    for _ in range(50):
        arrays = buffers.take(SHAPES)
        previous = arrays  # noqa: F841  (the usual training loop holds one batch while it asks for the next)
    assert buffers.allocated_bytes <= 2 * 8192  # two batches, rounded up to pages


def test_who_keeps_everything_gets_a_clear_error():
    buffers = BatchBuffers(100_000)
    kept = []
    for _ in range(100_000 // 8192):
        kept.append(buffers.take(SHAPES))
    with pytest.raises(HeldBatchesError, match="still referred to"):
        buffers.take(SHAPES)
    kept.clear()
    buffers.take(SHAPES)


def test_one_batch_may_be_larger_than_the_limit():
    buffers = BatchBuffers(10)
    assert buffers.take(SHAPES)["data"].shape == (100, 3, 10)


def test_sizes_that_vary_stay_bounded():
    buffers = BatchBuffers(1 << 20)
    rng = np.random.default_rng(0)
    for size in rng.integers(1, 200_000, 500).tolist():
        buffers.take({"data": ((size,), np.dtype(np.uint8))})
    assert buffers.allocated_bytes <= 1 << 20


def test_arrays_come_in_the_order_that_was_asked_for() -> None:
    shapes = {"a": ((2,), np.dtype("f4")), "b": ((2,), np.dtype(object)), "c": ((2,), np.dtype("u1"))}
    assert list(BatchBuffers(1 << 20).take(shapes)) == ["a", "b", "c"]


def test_memory_comes_back_and_begins_at_a_page() -> None:
    buffers = Buffers(1 << 20)
    one, long = buffers.take(10), buffers.take((4 << 20) + 1)
    assert len(long) > 4 << 20
    assert one.ctypes.data % 4096 == long.ctypes.data % 4096 == 0
    buffers.give(one)
    assert buffers.take(10) is one
    assert buffers.take(10) is not one
