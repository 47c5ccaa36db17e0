"""How a loader ends: what the ring of its node hears of an error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pario.comm.solo import Solo
from pario.errors import DeadRankError, ParioError, PeerError
from pario.loader.lifetime import Lifetime


@pytest.mark.parametrize(
    ("error", "known", "told"),
    [
        (ParioError("of this rank alone"), False, True),
        (ParioError("agreed on"), True, False),
        (PeerError("of another rank", rank=1), True, False),
        (DeadRankError("its neighbours alone know", rank=1), True, True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_ring_tells_only_what_others_do_not_know(error: ParioError, known: bool, told: bool) -> None:
    """A rank that is about to raise an agreed error must not raise a PeerError about it, as if alone."""
    error._pario_known = known  # type: ignore[attr-defined]  # as `spread` notes it in a world of several ranks
    posted: list[Any] = []
    reader: Any = SimpleNamespace(abandon=lambda limit_s: None)
    life = Lifetime(Solo(), reader)
    life.ring = SimpleNamespace(fail=lambda *words: posted.append(words), close=lambda: None)  # type: ignore[assignment]
    life.abandon(error)
    assert bool(posted) == told
