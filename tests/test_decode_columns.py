"""The form in which kernels get their arrays."""

from __future__ import annotations

import numpy as np
import pytest

from pario.decode.base import columns, flat
from pario.records import Records


@pytest.mark.parametrize("writeable", [False, True])
def test_one_form_for_all_records(writeable: bool) -> None:
    """Another one would let each kernel compile a second time, which takes seconds."""
    data = np.arange(16, dtype=np.uint8)
    data.flags.writeable = writeable
    table = np.array([(0, 4), (4, 12)], dtype=[("starts", np.int64), ("nbytes", np.int64)])  # strided, as in a window
    made = columns(Records(np.arange(2), data, table["starts"], table["nbytes"]))
    assert np.shares_memory(made[0], data)
    assert data.flags.writeable == writeable
    assert [array.flags.writeable for array in made] == [False, True, True, True]
    assert all(array.flags.c_contiguous for array in made)
    assert [made[1].tolist(), made[2].tolist(), len(made[3])] == [[0, 4], [4, 12], 2]


def test_memory_with_gaps_is_refused() -> None:
    array = np.zeros((4, 6), np.float32)
    assert np.shares_memory(flat(array), array)
    assert flat(array).shape == (96,)
    with pytest.raises(ValueError, match="C-contiguous"):
        flat(array[:, ::2])
