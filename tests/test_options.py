"""What options there are."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import fields, replace

import pytest

from pario.options import Options


def test_an_option_that_never_was() -> None:
    with pytest.raises(TypeError, match="slot_byte"):
        Options(slot_byte=1)  # type: ignore[call-arg]


def test_options_are_an_ordinary_dataclass() -> None:
    mine = replace(Options(slots=4), once=True)
    assert (mine.slots, mine.once) == (4, True)
    assert pickle.loads(pickle.dumps(mine)) == copy.deepcopy(mine) == mine
    assert list(inspect.signature(Options).parameters) == [field.name for field in fields(Options)]
