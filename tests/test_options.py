"""What options there are, and what a script is told that still sets an older one."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import fields, replace

import pytest

from pario.errors import OptionError
from pario.options import GONE, Options


@pytest.mark.parametrize("name", GONE)
def test_an_option_that_is_gone_says_what_to_do(name: str) -> None:
    with pytest.raises(OptionError, match=f"Options has no '{name}'.*({GONE[name].split('(')[0]})"):
        Options(**{name: "auto"})
    assert name not in {field.name for field in fields(Options)}


def test_an_option_that_never_was() -> None:
    with pytest.raises(OptionError, match=r"Options has no 'slot_byte'.*help\(pario.Options\)"):
        Options(slot_byte=1)  # type: ignore[call-arg]


def test_options_are_an_ordinary_dataclass() -> None:
    mine = replace(Options(slots=4), once=True)
    assert (mine.slots, mine.once) == (4, True)
    assert pickle.loads(pickle.dumps(mine)) == copy.deepcopy(mine) == mine
    assert list(inspect.signature(Options).parameters) == [field.name for field in fields(Options)]
