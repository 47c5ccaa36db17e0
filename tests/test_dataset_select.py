"""`select=` on one process: which records, in which order, by which way, and what is no selection. The oracle is
py-lmdb's cursor, and Python's own comparisons of its keys."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

import pario
from pario.errors import DecodeError, OptionError, ParioError, StateError
from pario.locate.growing import GrowingIndex
from pario.options import RECIPES, Recipe

N = 307
SMALL = pario.Options(slot_bytes=64 << 10, slots=3, block_bytes=32 << 10, mix_blocks=4)
SHUFFLES = [False, "global", "block"]
#: the others run with `-m full`
QUICK = [pytest.param(False, marks=pytest.mark.full), pytest.param("global", marks=pytest.mark.full), "block"]
Pairs = list[tuple[bytes, bytes]]


def value(i: int) -> bytes:
    return np.random.default_rng(i).bytes(40 + i * 37 % 6000)


def key(i: int) -> bytes:
    return (b"cat-%04d.jpg" if i % 3 else b"dog-%04d.png") % i


def write(folder: Path, pairs: Iterable[tuple[bytes, bytes]], commit_every: int = 60, **flags: bool) -> str:
    pairs = list(pairs)
    with lmdb.open(os.fspath(folder), map_size=1 << 26, max_dbs=1, sync=False) as env:
        db = env.open_db(b"d", **flags) if flags else None
        for start in range(0, len(pairs), commit_every):
            with env.begin(write=True, db=db) as txn:
                for k, v in pairs[start : start + commit_every]:
                    txn.put(k, v)
    return os.fspath(folder)


def truth(path: str, db: bytes | None = None) -> Pairs:
    with lmdb.open(path, readonly=True, lock=False, max_dbs=1) as env:
        handle = env.open_db(db, create=False) if db else None
        with env.begin(db=handle) as txn:
            return [(bytes(k), bytes(v)) for k, v in txn.cursor()]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Neither inserted in key order nor all values of one kind: some in leaf pages, some on pages of their own."""
    order = np.random.default_rng(1).permutation(N).tolist()
    return write(tmp_path_factory.mktemp("select") / "x", [(key(i), value(i)) for i in order])


@pytest.fixture(scope="module")
def pairs(path: str) -> Pairs:
    return truth(path)


def read(loader: pario.Loader, pairs: Pairs) -> list[int]:
    """The ids of the next epoch, whose values are right."""
    seen = []
    for batch in loader:
        o = batch["offsets"]
        for row, i in enumerate(batch.ids.tolist()):
            assert batch["data"][o[row] : o[row + 1]].tobytes() == pairs[i][1]
        seen += batch.ids.tolist()
    return seen


KINDS: dict[str, tuple[Any, Callable[[int, bytes], Any]]] = {
    "list": ([250, 3, 4, 5, 77], lambda i, k: i in (3, 4, 5, 77, 250)),
    "array": (np.arange(N - 1, 0, -2, dtype=np.uint16), lambda i, k: i % 2 == 0 and i > 0),
    "set": ({8, 9}, lambda i, k: i in (8, 9)),
    "one": ((5,), lambda i, k: i == 5),
    "range": (range(40, 200), lambda i, k: 40 <= i < 200),
    "steps": (range(300, 10, -7), lambda i, k: i in range(300, 10, -7)),
    "slice": (slice(-60, None), lambda i, k: i >= N - 60),
    "slice beyond": (slice(290, 10**6), lambda i, k: i >= 290),
    "prefix": (b"dog-", lambda i, k: k.startswith(b"dog-")),
    "prefix of one": (b"cat-0001.jpg", lambda i, k: k == b"cat-0001.jpg"),
    "empty prefix": (b"", lambda i, k: True),
    "pattern": (re.compile(rb".*5\.(jpg|png)$"), lambda i, k: k[-5:-4] == b"5"),
    "function": (lambda k: k.endswith(b"png") or None, lambda i, k: k.endswith(b"png")),
    "all": ("all", lambda i, k: True),
    "none": (None, lambda i, k: True),
}


@pytest.mark.parametrize(
    ("kind", "shuffle"),
    [
        pytest.param(kind, shuffle, marks=() if (i + j) % 3 == 0 else pytest.mark.full)
        for i, kind in enumerate(KINDS)
        for j, shuffle in enumerate(SHUFFLES)
    ],
)
def test_what_is_picked_is_delivered_once(kind: str, shuffle: bool | str, path: str, pairs: Pairs) -> None:
    select, picks = KINDS[kind]
    right = [i for i, (k, _) in enumerate(pairs) if picks(i, k)]
    with pario.Loader(path, 16, shuffle=shuffle, seed=5, select=select, options=SMALL) as loader:
        assert loader.records == len(right)
        assert len(loader) == -(-len(right) // 16)
        epochs = [read(loader, pairs) for _ in range(2)]
        for seen in epochs:
            assert sorted(seen) == right
        if not shuffle:
            assert epochs[0] == right
        elif len(right) > 20:
            assert epochs[0] != epochs[1]


@pytest.mark.parametrize("shuffle", QUICK)
def test_all_records_have_the_order_that_they_have_without_a_selection(shuffle: bool | str, path: str) -> None:
    def order(select: Any) -> tuple[list[int], dict[str, Any]]:
        with pario.Loader(path, 16, shuffle=shuffle, seed=5, select=select, options=SMALL) as loader:
            return [i for batch in loader for i in batch.ids.tolist()], loader.state_dict()

    plain = order(None)
    assert "selection" not in plain[1]
    for select in (slice(None), lambda k: True):
        assert order(select) == plain


def ways() -> dict[str, dict[str, Any]]:
    small = {"slot_bytes": 64 << 10, "slots": 3, "block_bytes": 32 << 10, "mix_blocks": 4}
    return {
        "tier that gets nothing": {"options": pario.Options(**small)},
        "tier by default": {"options": pario.Options(**small)},
        "memory tier": {"options": pario.Options(**small, tiers=(pario.Tier("memory", "64 MiB"),))},
        "direct": {"options": pario.Options(**small, tiers=()), "recipe": Recipe("ring", fetch="direct")},
        **{name: {"options": pario.Options(**small), "recipe": name} for name in RECIPES if name != "auto"},
    }


@pytest.mark.parametrize(
    ("way", "shuffle"),
    [
        pytest.param(way, shuffle, marks=() if (i + j) % 3 == 0 else pytest.mark.full)
        for i, way in enumerate(ways())
        for j, shuffle in enumerate(SHUFFLES)
    ],
)
def test_every_way_of_reading(
    way: str, shuffle: bool | str, path: str, pairs: Pairs, request: pytest.FixtureRequest
) -> None:
    if "gets nothing" in way:
        request.getfixturevalue("nothing_copied")
    ids = sorted(np.random.default_rng(3).choice(N, 120, replace=False).tolist())
    with pario.Loader(path, 16, shuffle=shuffle, select=ids, **ways()[way]) as loader:
        for _ in range(2):
            assert sorted(read(loader, pairs)) == ids


def test_a_decoder_that_works_record_by_record(path: str, pairs: Pairs) -> None:
    with pario.Loader(path, 16, lambda v: np.int64(len(v)), shuffle="global", select=b"dog-") as loader:
        for batch in loader:
            (lengths,) = batch
            assert lengths.tolist() == [len(pairs[i][1]) for i in batch.ids.tolist()]


def test_blocks_are_neighbours_in_the_file_among_those_selected(path: str) -> None:
    options = pario.Options(block_bytes=32 << 10, mix_blocks=1)
    with pario.Loader(path, 1, shuffle="block", select=range(0, N, 3), options=options) as loader:
        block = loader.state_dict()["block_records"]
        offsets = loader.index.extents["offset"]
        in_file = sorted(range(0, N, 3), key=lambda i: offsets[i])
        number = {record: k // block for k, record in enumerate(in_file)}
        seen = [number[int(batch.ids[0])] for batch in loader]
        assert sum(a != b for a, b in pairwise(seen)) == len(set(seen)) - 1
        sizes = loader.index.extents["nbytes"][::3]
        assert block == max(1, round((32 << 10) / (sizes.mean() + loader.index.header_bytes)))


# -- what is read ------------------------------------------------------------------------------------------------------


def test_a_dense_selection_is_read_in_long_reads_and_a_sparse_one_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "x", [(b"%05d" % i, bytes(3000)) for i in range(1000)], commit_every=1000)
    options = pario.Options(tiers=(), once=True)

    def cost(select: Any) -> tuple[int, int]:
        with pario.Loader(path, 100, select=select, recipe="ring", options=options) as loader:
            before = loader.stats()
            assert sum(len(batch.ids) for batch in loader) == loader.records
            after = loader.stats()
            return after["reads"] - before["reads"], after["bytes_read"] - before["bytes_read"]

    with pario.Reader(path):
        pass
    whole, dense, span = cost("all"), cost(np.delete(np.arange(1000), np.arange(0, 1000, 20))), cost(range(500, 600))
    sparse = cost(range(0, 1000, 50))
    assert dense[0] <= 1.3 * whole[0]
    assert dense[1] <= whole[1]
    assert span[0] <= whole[0] / 3
    assert span[1] <= whole[1] / 8
    assert sparse[0] <= 20
    assert sparse[1] <= 20 * 4096


# -- meta records ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_meta(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("meta") / "x"
    samples = [(b"%08d" % i, bytes([i % 251]) * 1500) for i in range(100)]
    return write(folder, [*samples, (b"__keys__", bytes(50_000)), (b"__len__", b"100")], commit_every=200)


@pytest.mark.usefixtures("grows")
@pytest.mark.parametrize("save_index", [False, True])
@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_meta_records_are_left_out_with_a_line_that_says_so(
    shuffle: bool | str, save_index: bool, with_meta: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pario.Loader(with_meta, 10, shuffle=shuffle, save_index=save_index) as loader:
        assert len(loader) == 10
        for _ in range(2):
            assert sorted(read(loader, truth(with_meta))) == list(range(100))
        assert "records=100 of 102" in repr(loader)
    (line,) = (record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)
    assert "'__keys__', '__len__'" in line
    assert 'select="all"' in line
    caplog.clear()
    with pario.Loader(with_meta, 10, shuffle=shuffle, select="all") as loader:
        assert sorted(read(loader, truth(with_meta))) == list(range(102))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.usefixtures("grows")
def test_while_the_index_grows(with_meta: str) -> None:
    Path(f"{with_meta}/data.mdb.pario.index").unlink(missing_ok=True)
    options = pario.Options(slot_bytes=64 << 10, slots=3, tiers=())
    for recipe in ("ring", "auto"):
        with pario.Loader(with_meta, 7, save_index=False, recipe=recipe, options=options) as loader:
            assert isinstance(loader.index, GrowingIndex)
            for _ in range(2):
                assert read(loader, truth(with_meta)) == list(range(100))
    with pario.Loader(with_meta, 7, save_index=False, select="all", options=options) as loader:
        assert isinstance(loader.index, GrowingIndex)
        assert read(loader, truth(with_meta)) == list(range(102))
    with pario.Loader(with_meta, 7, save_index=False, select=range(5), options=options) as loader:
        assert loader.index.is_complete


def test_a_decoder_learns_from_the_first_record_that_is_selected(tmp_path: Path) -> None:
    samples = [(b"a%03d" % i, np.full((3, 4), i, np.int16).tobytes()) for i in range(30)]
    path = write(tmp_path / "x", [(b"__len__", b"a text"), *samples])
    with pario.Loader(path, 10, lambda v: {"x": np.frombuffer(v, np.int16)}) as loader:
        assert np.concatenate([batch["x"][:, 0] for batch in loader]).tolist() == list(range(30))
    with pario.Loader(path, 10, pario.decode.Raw("<i2", (3, 4)), select=b"a", on_error="skip") as loader:
        assert np.concatenate([batch["data"][:, 0, 0] for batch in loader]).tolist() == list(range(30))
        assert loader.skipped == 0
    with pytest.raises(DecodeError), pario.Loader(path, 10, pario.decode.Raw("<i2", (3, 4)), select="all") as loader:
        list(loader)


# -- states ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", QUICK)
def test_resuming(shuffle: bool | str, path: str, pairs: Pairs) -> None:
    given = {"shuffle": shuffle, "seed": 9, "options": SMALL}
    with pario.Loader(path, 16, select=b"cat", **given) as loader:
        whole = [read(loader, pairs) for _ in range(2)]
        steps = len(loader)
    ids = [i for i, (k, _) in enumerate(pairs) if k[:3] == b"cat"]
    for taken, batch_sizes in ((5, (16, 5)), (steps, (16,))):
        with pario.Loader(path, 16, select=b"cat", **given) as loader:
            loop = iter(loader)
            for _ in range(taken):
                next(loop)
            state = json.loads(json.dumps(loader.state_dict()))
        right = whole[0][taken * 16 :] or whole[1]
        for batch_size in batch_sizes:
            with pario.Loader(path, batch_size, select=ids, **given) as loader:
                loader.load_state_dict(state)
                rest = read(loader, pairs)
                assert sorted(rest) == sorted(right)
                assert rest == right or (batch_size == 5 and shuffle == "block")  # its steps are arranged


def test_a_state_of_another_selection_is_refused(path: str, with_meta: str) -> None:
    def state(where: str, select: Any) -> dict[str, Any]:
        with pario.Loader(where, 16, select=select) as loader:
            return loader.state_dict()

    def load(where: str, select: Any, saved: dict[str, Any]) -> None:
        with pario.Loader(where, 16, select=select) as loader:
            loader.load_state_dict(saved)

    with pytest.raises(StateError, match=r"selection is .*construct the Loader with the select of the state"):
        load(path, range(1, 51), state(path, range(50)))
    with pytest.raises(StateError, match="with the select of the state"):
        load(path, None, state(path, range(50)))
    with pytest.raises(StateError, match='select="all": the state is one of all records'):
        load(path, range(50), state(path, None))
    # Saved before there were selections, of a dataset with meta records.
    old = state(with_meta, "all")
    assert "selection" not in old
    load(with_meta, "all", old)
    with pytest.raises(StateError, match='select="all": the state is one of all records'):
        load(with_meta, None, old)
    load(with_meta, slice(100), state(with_meta, None))


def test_drop_last_counts_what_is_selected(path: str, pairs: Pairs) -> None:
    with pario.Loader(path, 16, select=range(50), drop_last=True, shuffle="global") as loader:
        assert (len(loader), len(read(loader, pairs))) == (3, 48)
    with pytest.raises(OptionError, match="drop_last leaves no batch: 15 records"):
        pario.Loader(path, 16, select=range(15), drop_last=True)


def test_skipped_records_are_counted_in_the_selection_only(path: str, pairs: Pairs) -> None:
    def even(v: bytes) -> int:
        if v in bad:
            raise ValueError("no sample")
        return len(v)

    bad = {pairs[i][1] for i in (3, 10, 100, 200)}
    with pario.Loader(path, 16, even, select=range(50), on_error="skip") as loader:
        assert [i for batch in loader for i in batch.ids.tolist()] == [i for i in range(50) if i not in (3, 10)]
        assert loader.skipped == 2
    with pario.Loader(path, 16, even, select=range(3, 5), on_error="skip") as loader:  # the first one selected is bad
        assert [batch.ids.tolist() for batch in loader] == [[4]]


# -- what is no selection ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("select", "message"),
    [
        ([], "select is empty"),
        (np.empty(0, np.int64), "select is empty"),
        ([1, 2, 2, 7, 7], "more than once: 2, 7"),
        ([-1, 4], "out of range: -1"),
        ([0, N], rf"out of range: {N}; the records have 0..{N - 1}"),
        (np.array([1, 1 << 63], np.uint64), "out of range"),
        (range(-3, 5), "out of range: -3"),
        (range(N + 1), f"out of range: {N}"),
        (range(5, 5), "picks none of the 307 records"),
        (slice(400, 500), "picks none"),
        (slice("a", 3), "select cannot be"),
        (np.zeros(N, bool), "booleans"),
        ([True, False], "booleans"),
        ([0.5, 1], "select cannot be"),
        ([[1, 2]], "select cannot be"),
        (7, "select cannot be"),
        ([1, [2]], "select cannot be"),
        (["a"], "select cannot be"),
        ("dog-", r"text, 'dog-'.*Keys are bytes"),
        (re.compile("dog"), "pattern for text"),
        (b"cow", "picks none"),
        (re.compile(rb"at-"), "picks none of the 307 records.*from the beginning"),
        (lambda k: False, "picks none"),
    ],
)
def test_what_is_none_is_said(select: Any, message: str, path: str) -> None:
    with pytest.raises(OptionError, match=f"(?s){message}"):
        pario.Loader(path, 16, select=select)


def test_an_error_of_the_users_function_is_the_users(path: str) -> None:
    def wrong(k: bytes) -> bool:
        raise ZeroDivisionError(k.decode())

    with pytest.raises(ZeroDivisionError, match="cat-0001"):
        pario.Loader(path, 16, select=wrong)


# -- other databases ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["reverse_key", "integerkey", "dupsort"])
def test_other_orders_of_keys(kind: str, tmp_path: Path) -> None:
    pairs = [(b"%02d-%d" % (i % 7, i), value(i)[:300]) for i in range(90)]
    if kind == "integerkey":
        pairs = [((1 << 40 | i << 8 | i % 3).to_bytes(8, "little"), v) for i, (_, v) in enumerate(pairs)]
    if kind == "dupsort":
        pairs = [(b"%02d" % (i % 7), v) for i, (_, v) in enumerate(pairs)]
    path = write(tmp_path / "x", pairs, **{kind: True})
    expected = truth(path, b"d")
    prefix = b"\x01" if kind == "integerkey" else b"03"
    right = [i for i, (k, _) in enumerate(expected) if k.startswith(prefix)]
    assert 5 < len(right) < 60
    for select in (prefix, re.compile(re.escape(prefix)), lambda k: k.startswith(prefix)):
        with pario.Loader(path, 8, db="d", select=select, shuffle="block") as loader:
            assert sorted(read(loader, expected)) == right


def test_a_table_of_ids_serves_as_runs_do(path: str, pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pario.plan.selection.FEW_RUNS", 2)
    monkeypatch.setattr("pario.dataset.select.FEW_RUNS", 2)
    ids = list(range(1, N, 2))
    for shuffle in SHUFFLES:
        with pario.Loader(path, 16, shuffle=shuffle, select=ids, options=SMALL) as loader:
            chosen = loader._supply.context.stream.chosen
            assert chosen is not None
            assert chosen._table is not None
            assert chosen.nbytes == 4 * len(ids) * (1 + (shuffle == "block"))
            assert sorted(read(loader, pairs)) == ids


def test_a_loader_keeps_no_list_of_the_users(path: str) -> None:
    with pario.Loader(path, 16, select=[1, 2, 3]) as loader:
        assert loader._arguments.select is None


def test_loading_does_not_hang_after_an_error(path: str) -> None:
    with pytest.raises(ParioError):
        pario.Loader(path, 16, select=b"nothing")
    with pario.Loader(path, 16, select=b"dog") as loader:
        assert len(list(loader)) == len(loader)


def test_a_closed_loader_holds_no_shared_ids(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pario.plan.selection.FEW_RUNS", 2)
    with pario.Loader(path, 16, shuffle="block", select=range(0, N, 2)) as loader:
        chosen = loader.selection
        assert chosen is not None
        assert chosen.nbytes > 0
        assert chosen.ids(np.arange(3)).tolist() == [0, 2, 4]
    assert chosen.nbytes == 0


# -- selections as sources that are drawn by weight --------------------------------------------------------------------

SOURCES: dict[str, tuple[list[Any], list[int]]] = {
    "two of a hundred": ([np.arange(3, N, 100), np.setdiff1d(np.arange(N), np.arange(3, N, 100))], [1, 1]),
    "prefixes": ([b"dog-", b"cat-"], [3, 1]),
    "not all": ([range(10, 30), [5, 99, 7], re.compile(rb"dog-02")], [1, 2, 4]),
    "of one": ([b"dog-"], [5]),
}


@pytest.mark.parametrize("shuffle", [False, "global"])
@pytest.mark.parametrize("kind", SOURCES)
def test_sources_have_their_shares_in_every_prefix(kind: str, shuffle: bool | str, path: str, pairs: Pairs) -> None:
    select, weights = SOURCES[kind]
    parts = []
    for each in select:
        with pario.Loader(path, 7, select=each) as loader:
            parts.append(sorted(read(loader, pairs)))
    given: dict[str, Any] = {"select": select, "weights": weights, "shuffle": shuffle, "seed": 4}
    with pario.Loader(path, 7, **given) as loader:
        epochs = [read(loader, pairs) for _ in range(3)]
        state = None
        for batch in loader:
            if batch.step == 2:
                state = loader.state_dict()
        with pario.Loader(path, 5, **given) as again:
            again.load_state_dict(state)
            rest = read(again, pairs)
        fourth = read(loader, pairs)
    n = sum(map(len, parts))
    assert [len(epoch) for epoch in epochs] == [n] * 3
    drawn = np.array(epochs)
    for part, weight in zip(parts, weights, strict=True):
        mine = np.isin(drawn, part)
        share = np.arange(1, n + 1) * weight / sum(weights)
        assert (np.abs(np.cumsum(mine, axis=1) - share) < 1 + 1e-9).all()
        # Through all epochs together each of its records comes equally often, or once more.
        counts = np.bincount(drawn[mine], minlength=N)[part]
        assert counts.max() - counts.min() <= 1
    assert np.isin(drawn, np.concatenate(parts)).all()
    with pario.Loader(path, 7, **given) as loader:
        loader.set_epoch(3)
        assert read(loader, pairs)[21:] == rest
        assert read(loader, pairs) == fourth


def test_what_are_no_sources(path: str) -> None:
    for select, weights, message in (
        ([b"dog-", b"cat-"], [1], "1 numbers for 2 selections"),
        ([b"dog-", range(N)], [1, 1], r"more than one source: \d"),
        ([b"dog-", b"cow-"], [1, 1], "picks none"),
        ([b"dog-", "x"], [1, 1], "select is a text"),
        ([3, 4], [1, 1], "2 numbers for 1 paths"),
    ):
        with pytest.raises(OptionError, match=message):
            pario.Loader(path, 4, select=select, weights=weights)
    fields = {"x": ("cat-%04d.jpg", None)}
    with pytest.raises(OptionError, match="without fields="):
        pario.Loader(path, 4, select=[[1], [2]], weights=[1, 1], fields=fields)
    with pario.Loader(path, 4, select=[[1, 3], [2]], weights=[1, 1], shuffle=False) as loader:
        next(iter(loader))
        state = loader.state_dict()
    other = pario.Loader(path, 4, select=[[1], [2, 3]], weights=[1, 1], shuffle=False)
    with other, pytest.raises(StateError, match="weights"):
        other.load_state_dict(state)
