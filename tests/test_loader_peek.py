"""`peek` shows the next batch and changes nothing. The oracle is the loop itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

import pario
from pario.errors import ClosedError, DecodeError

N, SIZE, VALUES = 53, 8, 128


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Record i holds i; no index beside the file yet."""
    with lmdb.open(str(tmp_path / "set.lmdb"), map_size=1 << 22) as env, env.begin(write=True) as txn:
        for i in range(N):
            txn.put(b"%04d" % i, np.full(VALUES, i, np.int32).tobytes())
    return str(tmp_path / "set.lmdb")


def drawn(record: bytes, rng: np.random.Generator) -> dict[str, Any]:
    """The record's number, and a random one: augmentation."""
    return {"i": np.frombuffer(record, np.int32)[0], "u": rng.random()}


DRAWN = pario.decode.Function(drawn, rng=True)
SMALL = pario.Options(block_bytes=4096, mix_blocks=2)


def said(batch: pario.Batch) -> tuple[Any, ...]:
    arrays = {name: array.tolist() for name, array in batch.items()}
    return batch.epoch, batch.step, batch.ids.tolist(), batch.skipped, arrays


@pytest.mark.parametrize("shuffle", [False, "global", "block"])
def test_it_shows_the_next_batch_wherever_the_loop_is(path: str, shuffle: Any) -> None:
    given: dict[str, Any] = {"shuffle": shuffle, "seed": 3, "options": SMALL}
    with pario.Loader(path, SIZE, DRAWN, **given) as plain:
        expected = [said(batch) for _ in range(2) for batch in plain]
    with pario.Loader(path, SIZE, DRAWN, **given) as loader:
        shown = [said(loader.peek())]
        delivered = []
        for _ in range(2):
            for batch in loader:
                state, counted = loader.state_dict(), loader.stats()["records"]
                delivered.append(said(batch))
                shown.append(said(loader.peek()))
                assert (loader.state_dict(), loader.stats()["records"]) == (state, counted)
    assert delivered == expected
    assert [found for _, _, found, _, _ in expected[: len(expected) // 2]] != []
    assert shown[:-1] == expected
    assert shown[-1][:2] == (2, 0)


@pytest.mark.parametrize("shuffle", [False, "global", "block"])
def test_it_shows_the_selected_records(path: str, shuffle: Any) -> None:
    given: dict[str, Any] = {"shuffle": shuffle, "select": range(1, N, 3), "options": SMALL}
    with pario.Loader(path, SIZE, DRAWN, **given) as loader:
        shown = said(loader.peek())
        assert shown == said(next(iter(loader)))


def test_it_follows_set_epoch_and_a_loaded_state(path: str) -> None:
    with pario.Loader(path, SIZE, DRAWN, shuffle="global") as loader:
        loader.set_epoch(5)
        assert said(loader.peek())[:2] == (5, 0)
        batches = iter(loader)
        next(batches)
        state, expected = loader.state_dict(), said(next(batches))
        loader.load_state_dict(state)
        shown = said(loader.peek())
        assert shown[2:] == expected[2:]
        assert shown == said(next(iter(loader)))


def test_what_cannot_be_read_is_treated_as_in_the_loop(path: str) -> None:
    def odd(record: bytes) -> int:
        value = int(np.frombuffer(record, np.int32)[0])
        if value in (2, 5):
            raise ValueError("no")
        return value

    with pario.Loader(path, SIZE, odd, on_error="skip") as loader:
        batch = loader.peek()
        assert (batch.ids.tolist(), batch.skipped, loader.skipped) == ([0, 1, 3, 4, 6, 7], 2, 0)
    with pario.Loader(path, SIZE, odd) as loader:
        with pytest.raises(DecodeError, match="no"):
            loader.peek()
        loader.set_epoch(1)  # it still lives
    with pytest.raises(ClosedError):
        loader.peek()


@pytest.mark.parametrize("shuffle", [False, "global", "block"])
def test_it_shows_a_selection(path: str, shuffle: Any) -> None:
    with pario.Loader(path, SIZE, DRAWN, shuffle=shuffle, select=range(7, 50, 2), options=SMALL) as loader:
        shown = said(loader.peek())
        for batch in loader:
            assert said(batch) == shown
            shown = said(loader.peek())
