"""`peek` shows the next batch and changes nothing. The oracle is the loop itself."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

import pario
from pario.errors import ClosedError, DecodeError, OptionError

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


#: One size of batch, and one that makes epochs of different lengths.
SIZES = [SIZE, pario.Budget(tokens=11, cost=np.arange(N) % 7 + 1)]


def told(loader: pario.Loader) -> tuple[Any, ...]:
    return loader.epoch, len(loader), loader.batches, content(loader.peek())


def content(batch: pario.Batch) -> tuple[Any, ...]:
    """All but the number of the step, which begins at 0 in the rest of an epoch, too."""
    return said(batch)[2:]


@pytest.mark.parametrize("size", SIZES, ids=["records", "budget"])
def test_after_a_break_everything_tells_of_the_next_loop(path: str, size: Any) -> None:
    with pario.Loader(path, size, DRAWN, shuffle="global", comm="self") as loader:
        expected = [[content(batch) for batch in loader] for _ in range(4)]
        for epoch, after in enumerate((1, 3, 2)):
            loader.set_epoch(epoch)
            for step, _ in enumerate(loader, 1):
                whole = len(expected[epoch])
                assert told(loader) == (epoch, whole, whole, expected[epoch][step])  # while it runs
                if step == after:
                    state = loader.state_dict()
                    break
            whole = len(expected[epoch + 1])
            assert told(loader) == (epoch + 1, whole, whole, expected[epoch + 1][0])
            assert loader.state_dict() == state  # the place after the last batch that was taken: to go on there
            assert [content(batch) for batch in loader] == expected[epoch + 1]
            loader.load_state_dict(state)
            rest = expected[epoch][after:]
            assert told(loader) == (epoch, len(rest), len(expected[epoch]), rest[0])
            for batch in loader:  # of the rest of an epoch, too
                assert content(batch) == rest[0]
                break
            assert told(loader) == (epoch + 1, whole, whole, expected[epoch + 1][0])
    assert len({len(one) for one in expected}) == 1 if size == SIZE else len({len(one) for one in expected}) > 1


def test_a_loop_that_failed_or_was_dropped_is_left(path: str) -> None:
    with pario.Loader(path, SIZE, DRAWN, comm="self") as loader:
        for epoch in range(0, 6, 2):
            with suppress(ValueError):
                for _ in loader:
                    raise ValueError
            batches = iter(loader)
            assert loader.epoch == epoch + 1
            next(batches)
            assert (loader.epoch, loader.peek().step) == (epoch + 1, 1)
            del batches
            assert (loader.epoch, loader.peek().step) == (epoch + 2, 0)


@pytest.mark.parametrize("size", SIZES, ids=["records", "budget"])
@pytest.mark.parametrize("shuffle", [False, "global", "block"])
def test_an_epoch_begins_at_any_batch(path: str, shuffle: Any, size: Any) -> None:
    if shuffle == "block" and not isinstance(size, int):
        size = SIZE
    with pario.Loader(path, size, DRAWN, shuffle=shuffle, seed=3, options=SMALL, comm="self") as loader:
        expected = [[content(batch) for batch in loader] for _ in range(3)]
        for epoch, first in ((2, 1), (0, 3), (0, len(expected[0]) - 1), (1, 0)):
            loader.set_epoch(epoch, first)
            assert [content(batch) for batch in loader] == expected[epoch][first:]
            assert loader.epoch == epoch + 1
        for wrong in (-1, 1.0, True, len(expected[1])):
            with pytest.raises(OptionError, match="batch must be"):
                loader.set_epoch(1, wrong)
