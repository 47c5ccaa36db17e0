"""The Loader on one process: content, order, remainder, resume, errors. The oracle is py-lmdb and what was written."""

import gc
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import lmdb
import numpy as np
import pytest

import pario
import pario.locate.walk
from pario.decode import Datum, Raw
from pario.errors import (
    ClosedError,
    DecodeError,
    EmptyError,
    HeldBatchesError,
    MissingError,
    OptionError,
    ParioError,
    SnapshotError,
    StateError,
)
from pario.fetch.file import FileFetcher
from pario.options import Recipe

pytestmark = pytest.mark.usefixtures("through_the_ring")

N = 1003


def record(i):
    """Bytes of record i: 1 to 9,000 of them, some in leaves, some on overflow pages."""
    rng = np.random.default_rng(i)
    return rng.integers(0, 256, int(rng.integers(1, 9000)), dtype=np.uint8).tobytes()


def write(path, records, commit_every=1000, **options):
    """An LMDB with these (key, value) pairs."""
    with lmdb.open(str(path), map_size=1 << 30, **options) as env:
        items = list(records)
        for first in range(0, len(items), commit_every):
            with env.begin(write=True) as txn:
                for key, value in items[first : first + commit_every]:
                    txn.put(key, value)
    return str(path)


def truth(path):
    with lmdb.open(path, readonly=True, lock=False) as env, env.begin() as txn:
        return [(bytes(k), bytes(v)) for k, v in txn.cursor()]


def values(batch):
    o = batch["offsets"]
    return [batch["data"][o[i] : o[i + 1]].tobytes() for i in range(len(batch.ids))]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    order = np.random.default_rng(1).permutation(N).tolist()  # key order is not file order
    return write(
        tmp_path_factory.mktemp("set") / "mixed.lmdb", ((b"%08d" % i, record(i)) for i in order), commit_every=100
    )


@pytest.fixture(scope="module")
def fixed(tmp_path_factory):
    """Every record the same size: i as 3 x 4 int16."""
    return write(
        tmp_path_factory.mktemp("set") / "fixed.lmdb",
        ((b"%05d" % i, np.full((3, 4), i, np.int16).tobytes()) for i in range(N)),
    )


@pytest.mark.parametrize("shuffle", [False, "global", "block"])
@pytest.mark.parametrize("fetch", ["posix", "direct"])
def test_every_record_once_and_every_byte_right(path, shuffle, fetch):
    expected = truth(path)
    options = pario.Options(slot_bytes=256 << 10, block_bytes=64 << 10, mix_blocks=4)
    recipe = Recipe(fetch=fetch)
    with pario.Loader(path, 32, shuffle=shuffle, seed=3, options=options, recipe=recipe) as loader:
        assert len(loader) == -(-N // 32)
        orders = []
        for epoch in range(3):
            seen = []
            for step, batch in enumerate(loader):
                assert (batch.epoch, batch.step) == (epoch, step)
                assert len(loader) == -(-N // 32)
                assert len(batch.ids) == (32 if step < N // 32 else N % 32)
                for i, value in zip(batch.ids.tolist(), values(batch), strict=True):
                    assert value == expected[i][1]
                seen += batch.ids.tolist()
            assert step + 1 == len(loader)
            assert sorted(seen) == list(range(N))
            orders.append(seen)
        assert loader.keys([0, 17, N - 1]) == [expected[i][0] for i in (0, 17, N - 1)]
    if shuffle:
        assert orders[0] != orders[1] != orders[2]
        assert orders[0] != sorted(orders[0])
    else:
        assert orders[0] == orders[1] == list(range(N))


@pytest.mark.parametrize("shuffle", [False, "global", "block"])
def test_order_is_a_function_of_seed_and_epoch(fixed, shuffle):
    def order(seed, epoch):
        with pario.Loader(fixed, 100, Raw("<i2", (3, 4)), shuffle=shuffle, seed=seed) as loader:
            loader.set_epoch(epoch)
            return np.concatenate([b.ids.copy() for b in loader]).tolist()

    assert order(1, 4) == order(1, 4)
    if shuffle:
        assert order(1, 4) != order(2, 4)
        assert order(1, 4) != order(1, 5)


def test_fixed_size_records_arrive_as_arrays(fixed):
    with pario.Loader(fixed, 64, Raw("<i2", (3, 4)), shuffle="global") as loader:
        for batch in loader:
            assert batch["data"].dtype == np.int16
            assert (batch["data"] == batch.ids[:, None, None]).all()


def test_drop_last(fixed):
    with pario.Loader(fixed, 100, shuffle="global", drop_last=True) as loader:
        assert len(loader) == 10
        assert [len(b.ids) for b in loader] == [100] * 10
    with pytest.raises(OptionError, match="drop_last leaves no batch"):
        pario.Loader(fixed, N + 1, drop_last=True)


def test_a_batch_larger_than_the_set(fixed):
    with pario.Loader(fixed, 5000, shuffle="block") as loader:
        (batch,) = list(loader)
        assert sorted(batch.ids.tolist()) == list(range(N))


def test_shuffle_true_means_global(fixed: str) -> None:
    given = {"batch_size": 100, "seed": 3}
    with pario.Loader(fixed, shuffle=True, **given) as loader, pario.Loader(fixed, shuffle="global", **given) as same:
        state = loader.state_dict()
        assert state == same.state_dict()
        assert [batch.ids.tolist() for batch in loader] == [batch.ids.tolist() for batch in same]


def test_the_types_name_what_is_accepted() -> None:
    """A type checker and an editor know the words; the same ones that the checks at run time know."""
    from pario import options
    from pario.decode import image as images

    def words(of: object, name: str) -> set[object]:
        hint = get_type_hints(of)[name]
        parts = get_args(hint) if get_origin(hint) is not Literal else (hint,)
        return {word for part in parts for word in (get_args(part) or (part,))}

    init = pario.Loader.__init__
    assert words(init, "shuffle") == {bool, "global", "block", type(None)}
    assert words(init, "on_error") == set(options.POLICIES)
    assert words(pario.decode.Image.__init__, "layout") == set(images.LAYOUTS)
    assert words(pario.decode.Image.__init__, "color") == set(images.COLORS)
    assert words(pario.decode.Image.__init__, "resize") == set(images.RESIZES)
    assert words(pario.decode.Datum.__init__, "color") == set(images.COLORS)
    assert words(pario.decode.Datum.__init__, "crop_mode") == {"center", "random"}
    assert words(pario.decode.Datum.__init__, "mirror") == {False, "random"}


@pytest.mark.parametrize("shuffle", [False, "global", "block"])
@pytest.mark.parametrize("drop_last", [False, True])
def test_resume_after_every_batch(fixed, shuffle, drop_last):
    def make():
        options = pario.Options(block_bytes=4 << 10, mix_blocks=4)
        return pario.Loader(fixed, 91, shuffle=shuffle, seed=5, drop_last=drop_last, options=options)

    whole, states = [], []
    with make() as loader:
        for _ in range(2):
            for batch in loader:
                whole.append((batch.epoch, batch.ids.tolist()))
                states.append(json.loads(json.dumps(loader.state_dict())))
    for done in range(len(states)):
        with make() as loader:
            loader.load_state_dict(states[done])
            rest = []
            while loader.epoch < 2:
                loop = [(b.epoch, b.ids.tolist()) for b in loader]
                assert loop  # also after the last batch of an epoch
                rest += loop
            assert rest == whole[done + 1 :], f"after batch {done}"


def test_resume_with_another_batch_size_goes_on_at_the_same_record(fixed):
    with pario.Loader(fixed, 50, shuffle="global", seed=2) as loader:
        order = np.concatenate([b.ids.copy() for b in loader]).tolist()
    with pario.Loader(fixed, 50, shuffle="global", seed=2) as loader:
        for step, _ in enumerate(loader):
            if step == 6:
                state = loader.state_dict()
                break
    with pario.Loader(fixed, 33, shuffle="global", seed=2) as loader:
        loader.load_state_dict(state)
        assert len(loader) == -(-(N - 350) // 33)
        assert np.concatenate([b.ids.copy() for b in loader]).tolist() == order[350:]


def test_a_foreign_state_is_refused(fixed, path):
    with pario.Loader(fixed, 50, shuffle="global", seed=2) as loader:
        state = loader.state_dict()
    with pario.Loader(fixed, 50, shuffle="global", seed=3) as loader, pytest.raises(StateError, match="seed"):
        loader.load_state_dict(state)
    with pario.Loader(path, 50, shuffle="global", seed=2) as loader, pytest.raises(StateError):
        loader.load_state_dict(state)
    with pario.Loader(fixed, 50, shuffle="global", seed=2) as loader, pytest.raises(StateError):
        loader.load_state_dict({"version": 99})


def test_leaving_a_loop_early_ends_its_epoch(fixed):
    with pario.Loader(fixed, 10, shuffle="global") as loader:
        for epoch in range(20):
            for batch in loader:
                assert batch.epoch == epoch
                if batch.step == epoch:
                    break
            assert len(loader) == -(-N // 10)
        assert len([b.ids for b in loader]) == len(loader)


def test_batches_stay_valid_while_they_are_held(fixed):
    with pario.Loader(fixed, 10, Raw("<i2", (3, 4)), shuffle="global") as loader:
        kept = list(loader)
        for batch in kept:
            assert (batch["data"] == batch.ids[:, None, None]).all()


def test_who_holds_too_much_is_told(path):
    options = pario.Options(held_bytes=1 << 20)
    with pytest.raises(HeldBatchesError, match="held_bytes"), pario.Loader(path, 32, options=options) as loader:
        list(loader)


def test_memory_does_not_grow(fixed):
    with pario.Loader(fixed, 10, Raw("<i2", (3, 4)), shuffle="block") as loader:
        for _ in loader:
            pass
        first = loader.stats()["batch_memory"]
        for _ in range(3):
            for _ in loader:
                pass
        assert loader.stats()["batch_memory"] == first


def test_plain_functions_decode(fixed):
    def decode(value):
        numbers = np.frombuffer(value, np.int16).reshape(3, 4)
        return {"sum": numbers.sum(), "row": numbers[0]}

    with pario.Loader(fixed, 37, decode, shuffle="global") as loader:
        for _ in range(2):
            seen = []
            for batch in loader:
                assert (batch["sum"] == 12 * batch.ids).all()
                assert batch["row"].shape == (len(batch.ids), 4)
                seen += batch.ids.tolist()
            assert sorted(seen) == list(range(N))
        for batch in loader:  # leave while the next batches are being prepared
            if batch.step == 3:
                break
        assert sum(len(b.ids) for b in loader) == N


def test_bad_records_raise_or_are_skipped(tmp_path):
    good = np.arange(6, dtype=np.uint8).tobytes()
    path = write(tmp_path / "x.lmdb", ((b"%03d" % i, good if i % 10 != 7 else b"bad") for i in range(100)))
    with pytest.raises(DecodeError) as caught, pario.Loader(path, 5, Raw("u1", (6,))) as loader:
        list(loader)
    assert (caught.value.record, caught.value.key) == (7, b"007")
    with pario.Loader(path, 5, Raw("u1", (6,)), on_error="skip") as loader:
        batches = list(loader)
        assert len(batches) == 20
        assert sum(b.skipped for b in batches) == loader.skipped == 10
        assert sorted(np.concatenate([b.ids for b in batches])) == [i for i in range(100) if i % 10 != 7]
        assert all((b["data"] == np.arange(6)).all() for b in batches)


def test_bad_records_are_substituted(tmp_path):
    """Their row holds the next good record of the batch; after the last one comes the first."""
    rows = np.arange(120, dtype=np.uint8).reshape(20, 6)
    bad = {3, 4, 9, 10, 11, 12}
    path = write(tmp_path / "x.lmdb", ((b"%03d" % i, bytes(i) if i in bad else rows[i].tobytes()) for i in range(20)))
    with pario.Loader(path, 5, Raw("u1", (6,)), on_error="substitute") as loader:
        batches = list(loader)
        assert [b.ids.tolist() for b in batches] == [
            [0, 1, 2, 0, 0],
            [5, 6, 7, 8, 5],
            [13, 13, 13, 13, 14],
            [15, 16, 17, 18, 19],
        ]
        assert all((b["data"] == rows[b.ids]).all() for b in batches)
        assert [b.skipped for b in batches] == [2, 1, 3, 0]
        stats = loader.stats()
        assert (loader.skipped, stats["records"]) == (6, 20)
        assert stats["bad"] == {"expected n bytes (uintn[n]), got n": 6}
    order = []
    for _ in range(2):
        with pario.Loader(path, 5, Raw("u1", (6,)), shuffle="global", seed=3, on_error="substitute") as loader:
            order.append([b.ids.tolist() for b in loader])
    assert order[0] == order[1]
    assert {len(ids) for ids in order[0]} == {5}


def test_nothing_can_take_the_row_of_a_bad_record(tmp_path):
    path = write(tmp_path / "x.lmdb", ((b"%03d" % i, b"good" if i < 5 else b"bad") for i in range(10)))
    with (
        pytest.raises(DecodeError, match="no record of the batch can take its row") as caught,
        pario.Loader(path, 5, Raw("u1", (4,)), on_error="substitute") as loader,
    ):
        list(loader)
    assert (caught.value.record, caught.value.key) == (5, b"005")


@pytest.mark.parametrize("policy", ["skip", "substitute"])
def test_no_more_bad_records_than_allowed(tmp_path, policy):
    path = write(tmp_path / "x.lmdb", ((b"%03d" % i, b"good" if i % 5 else b"bad" + b"?" * i) for i in range(1, 41)))
    options = pario.Options(max_bad=8)
    with pario.Loader(path, 5, Raw("u1", (4,)), on_error=policy, options=options) as loader:
        assert sum(b.skipped for b in loader) == 8
        with pytest.raises(DecodeError, match="more than max_bad=8 records: 9 x expected n bytes") as caught:
            list(loader)
    assert caught.value.record == 4
    for wrong in (-1, True, "8"):
        with pytest.raises(OptionError, match="max_bad must be"):
            pario.Options(max_bad=wrong)


def test_wrong_arguments(fixed, tmp_path):
    for arguments, message in [
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 2.5}, "batch_size"),
        ({"batch_size": True}, "batch_size"),
        ({"batch_size": 4, "shuffle": 1}, "shuffle"),
        ({"batch_size": 4, "shuffle": "random"}, "shuffle"),
        ({"batch_size": 4, "on_error": "ignore"}, "on_error"),
        ({"batch_size": 4, "seed": -1}, "seed"),
    ]:
        with pytest.raises(OptionError, match=message):
            pario.Loader(fixed, **arguments)
    with pytest.raises(MissingError):
        pario.Loader(tmp_path / "nowhere", 4)
    with pytest.raises(DecodeError, match="Datum"):
        pario.Loader(fixed, 4, Datum())
    lmdb.open(str(tmp_path / "empty.lmdb")).close()
    with pytest.raises(EmptyError):
        pario.Loader(tmp_path / "empty.lmdb", 4)


def test_use_after_close(fixed):
    loader = pario.Loader(fixed, 4)
    batches = iter(loader)
    next(batches)
    loader.close()
    loader.close()
    with pytest.raises(ClosedError):
        next(batches)
    with pytest.raises(ClosedError):
        iter(loader)
    with pytest.raises(ClosedError):
        loader.keys([0])


def test_a_writer_that_overtakes_us_is_noticed(tmp_path):
    """Three commits after our snapshot its pages may be overwritten: no batch may come from them."""
    path = write(tmp_path / "x.lmdb", ((b"%06d" % i, os.urandom(5000)) for i in range(2000)))
    expected = [v for _, v in truth(path)]
    options = pario.Options(slot_bytes=256 << 10, slots=2)
    with pario.Loader(path, 10, options=options) as loader:
        batches = iter(loader)
        for _ in range(3):
            batch = next(batches)
            assert values(batch) == [expected[i] for i in batch.ids]
        for k in range(4):
            write(path, [(b"%06d" % i, os.urandom(5000)) for i in range(k, 2000, 4)])
        with pytest.raises(SnapshotError) as caught:  # noqa: PT012
            for batch in batches:
                assert values(batch) == [expected[i] for i in batch.ids]
        assert caught.value.path.endswith("data.mdb")


def test_named_databases(tmp_path):
    path = str(tmp_path / "x.lmdb")
    with lmdb.open(path, max_dbs=2, map_size=1 << 24) as env:
        for name in (b"train", b"test"):
            db = env.open_db(name)
            with env.begin(write=True, db=db) as txn:
                for i in range(50):
                    txn.put(b"%d" % i, name * (i + 1))
    with pario.Loader(path, 7, db="test") as loader:
        got = [v for b in loader for v in values(b)]
    assert sorted(got, key=len) == [b"test" * (i + 1) for i in range(50)]
    with pytest.raises(pario.errors.DatabaseError, match="train"):
        pario.Loader(path, 7)


def test_reader_reads_any_records(path):
    expected = truth(path)
    with pario.Reader(path) as reader:
        assert len(reader) == N
        ids = [5, 1, 1, 900, N - 1]
        assert [bytes(r) for r in reader.read(ids)] == [expected[i][1] for i in ids]
        assert reader.keys(ids) == [expected[i][0] for i in ids]
        assert len(reader.read([])) == 0
        with pytest.raises(OptionError, match=r"0\.\.1002"):
            reader.read([N])


def test_a_replaced_file_is_reported_and_the_old_one_read_on(tmp_path, caplog):
    path = write(tmp_path / "x.lmdb", ((b"%03d" % i, bytes([i]) * 3000) for i in range(50)))
    other = write(tmp_path / "y.lmdb", ((b"%03d" % i, bytes([i]) * 2000) for i in range(50)))
    with pario.Loader(path, 50) as loader:
        os.replace(f"{other}/data.mdb", f"{path}/data.mdb")
        for _ in range(2):
            (batch,) = list(loader)
            assert values(batch) == [bytes([i]) * 3000 for i in range(50)]
    assert sum("was replaced" in r.message for r in caplog.records) == 1


def test_a_subclass_may_have_keywords_of_a_data_loader(path):
    class Mine(pario.Loader):
        def __init__(self, path, size, num_workers=0):
            super().__init__(path, size)
            self.workers = num_workers

    with Mine(path, 10, num_workers=3) as loader:
        assert loader.workers == 3
    with pytest.raises(OptionError, match="sampler= is an argument of a DataLoader"):
        Mine(path, 10, sampler=None)


def test_a_forgotten_loader_leaves_no_threads(fixed):
    before = set(threading.enumerate())
    for decoder in (None, len):
        loader = pario.Loader(fixed, 10, decoder, shuffle="global")
        next(iter(loader))
        assert set(threading.enumerate()) - before
        del loader
        end = time.monotonic() + 10
        while set(threading.enumerate()) - before and time.monotonic() < end:
            gc.collect()  # a thread that prepares a batch refers to the loader until it has it
            time.sleep(0.01)
        assert not set(threading.enumerate()) - before


def test_a_loop_that_is_left_stops_the_reading(path):
    options = pario.Options(slot_bytes=64 << 10, slots=2, inflight=4)
    with pario.Loader(path, 1, shuffle="global", options=options) as loader:
        for _ in range(30):  # what was under way when the loop was left must not meet what is read next
            for batch in loader:
                if batch.step == 2:
                    break
        read = loader.stats()["bytes_read"]
        assert read < 30 * 6 * 64 << 10, "little more than the slots of each of the loops"
        assert sorted(i for b in loader for i in b.ids.tolist()) == list(range(N))


@pytest.mark.parametrize("shuffle", [False, "global"])
@pytest.mark.parametrize("kind", ["rows", "function"])
def test_steps_larger_than_a_slot_are_read_in_pieces(tmp_path, shuffle, kind):
    """Records of 5 KB, 60 per step, slots of 64 KiB."""
    n = 500
    path = write(tmp_path / "x.lmdb", ((b"%05d" % i, np.full(2500, i, np.int16).tobytes()) for i in range(n)))
    decode = Raw("<i2", (2500,)) if kind == "rows" else lambda b: {"data": np.frombuffer(b, np.int16)}
    options = pario.Options(slot_bytes=64 << 10, slots=2)
    with pario.Loader(path, 60, decode, shuffle=shuffle, options=options) as loader:
        assert loader.stats()["slot_bytes"] < 200 << 10
        for _ in range(2):
            seen = []
            for batch in loader:
                assert batch["data"].shape == (len(batch.ids), 2500)
                assert (batch["data"] == batch.ids[:, None]).all()
                seen += batch.ids.tolist()
            assert sorted(seen) == list(range(n))
        for batch in loader:
            if batch.step == 1:
                break
        assert sum(len(b.ids) for b in loader) == n


def test_an_older_loop_cannot_go_on_behind_a_newer_one(fixed):
    with pario.Loader(fixed, 100) as loader:
        outer = iter(loader)
        next(outer)
        assert len([b.ids for b in loader]) == len(loader)
        with pytest.raises(ParioError, match="newer loop"):
            next(outer)
        loop = iter(loader)
        next(loop)
        loader.set_epoch(7)
        with pytest.raises(ParioError, match="set_epoch"):
            next(loop)
        done = iter(loader)
        assert len(list(done)) == len(loader)
        assert list(done) == []


def test_two_threads_cannot_share_a_loop(fixed):
    with pario.Loader(fixed, 1, slow, shuffle="global") as loader:
        loop = iter(loader)
        taken, errors = [], []

        def take():
            try:
                taken.extend(b.ids[0] for b in loop)
            except ParioError as e:
                errors.append(str(e))

        threads = [threading.Thread(target=take) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(taken) == len(set(taken))
        assert errors
        assert all("two threads" in e for e in errors)


def slow(value):
    time.sleep(1e-4)
    return len(value)


def test_a_decoder_may_serve_two_loaders(fixed, tmp_path):
    other = write(tmp_path / "x.lmdb", ((b"%03d" % i, bytes(17)) for i in range(9)))
    decoder = Raw("u1")
    with pario.Loader(fixed, 10, decoder) as one, pario.Loader(other, 10, decoder) as two:
        assert next(iter(one))["data"].shape == (10, 24)
        assert next(iter(two))["data"].shape == (9, 17)


def test_skipping_begins_with_the_first_record(tmp_path):
    path = write(tmp_path / "x.lmdb", ((b"%03d" % i, b"bad" if i < 3 else bytes(6)) for i in range(20)))
    with pario.Loader(path, 5, lambda b: np.frombuffer(b, "<i2"), on_error="skip") as loader:
        assert sum(len(b.ids) for b in loader) == 17
    with pytest.raises(DecodeError) as caught:
        pario.Loader(path, 5, lambda b: np.frombuffer(b, "<i2"))
    assert caught.value.record == 0


def test_a_state_of_another_set_of_the_same_layout_is_refused(tmp_path):
    states = []
    for content in (b"a", b"b"):
        path = write(tmp_path / f"{content.decode()}.lmdb", ((b"%03d" % i, content * 3000) for i in range(30)))
        with pario.Loader(path, 5) as loader:
            states.append(loader.state_dict())
            if content == b"b":
                with pytest.raises(StateError, match="fingerprint"):
                    loader.load_state_dict(states[0])


def test_a_forked_child_leaves_the_loader_alone(fixed):
    with pario.Loader(fixed, 10) as loader:
        batches = iter(loader)
        next(batches)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                iter(loader)
            except ClosedError as e:
                status = 0 if "process" in str(e) else 2
            finally:
                loader.close()
                loader._life.__del__()
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert sum(len(b.ids) for b in batches) == N - 10


def test_small_records_in_a_random_order_take_no_more_memory_than_twice_the_file(tmp_path):
    """Every group of them touches every page: with 6 slots, a page for each record, it was 15 times the file."""
    path = write(tmp_path / "x.lmdb", ((b"%06d" % i, b"%0100d" % i) for i in range(20_000)))
    file_bytes = os.path.getsize(f"{path}/data.mdb")
    options = pario.Options(slot_bytes=512 << 10, slots=6)
    with pario.Loader(path, 50, Raw("u1", 100), shuffle="global", options=options) as loader:
        rows = {int(bytes(row)): int(i) for batch in loader for i, row in zip(batch.ids, batch["data"], strict=True)}
        assert rows == {i: i for i in range(20_000)}
        stats = loader.stats()
        assert stats["slots"] * stats["slot_bytes"] <= 2.1 * file_bytes


def test_a_loop_keeps_its_loader_alive(fixed):
    assert sum(len(batch.ids) for batch in pario.Loader(fixed, 10)) == N


def test_what_cannot_be_done_says_so(fixed):
    with pario.Loader(fixed, 10) as loader:
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(loader)
        with pytest.raises(KeyError, match="it has 'data', 'offsets'"):
            next(iter(loader))["images"]
        with pytest.raises(OptionError, match="epoch"):
            loader.set_epoch("3")
    for arguments in ({"options": {}}, {"seed": 1 << 64}, {"shuffle": 0}, {"shuffle": np.array([1, 2])}):
        with pytest.raises(OptionError):
            pario.Loader(fixed, 4, **arguments)


def test_a_forgotten_shuffle_is_said_once(fixed):
    """By one rank, at the first epoch, to a script that never speaks of an order."""
    lines = {
        "pario.Loader(path, 100)": 1,
        'pario.Loader(path, 100, shuffle="global"), pario.Loader(path, 100)': 0,
        "pario.Loader(path, 100, shuffle=False)": 0,
    }
    for made, count in lines.items():
        code = (
            f"import pario; path = {fixed!r}; loaders = [{made}]; loaders[-1].peek(); print('begin', flush=True)\n"
            "for each in (*loaders, *loaders):\n    assert len(list(each)) == len(each)\n    each.set_epoch(3)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100
        )
        assert done.returncode == 0, done.stdout
        said = [line for line in done.stdout.splitlines() if "key order" in line]
        assert len(said) == count, done.stdout
        assert done.stdout.startswith("begin")


def test_habits_of_a_data_loader_are_answered(fixed):
    with pytest.raises(OptionError, match=r"num_workers= is an argument of a DataLoader.*decode_threads"):
        pario.Loader("nowhere.lmdb", 8, num_workers=4)
    with pytest.raises(TypeError, match="shufle"):  # what is nobody's stays Python's
        pario.Loader("nowhere.lmdb", 8, shufle=True)
    with pario.Loader(fixed, 8) as loader, pytest.raises(OptionError, match=r"loader\.peek\(\)"):
        loader[0]


def test_an_index_is_saved_for_the_file_it_was_made_from(tmp_path, monkeypatch):
    """Another file takes the place of the one being indexed: the side-car must not pass for its index."""
    path = write(tmp_path / "x.lmdb", ((b"%03d" % i, bytes([i]) * 3000) for i in range(50)))
    order = np.random.default_rng(0).permutation(50).tolist()
    other = write(tmp_path / "y.lmdb", ((b"%03d" % i, bytes([100 + i]) * 3000) for i in order))
    real = pario.locate.walk.build

    def build(*arguments, **more):
        os.replace(f"{other}/data.mdb", f"{path}/data.mdb")
        return real(*arguments, **more)

    monkeypatch.setattr("pario.locate.open.build", build)
    with pario.Loader(path, 50) as loader:
        assert values(next(iter(loader))) == [bytes([i]) * 3000 for i in range(50)]
    monkeypatch.undo()
    with pario.Loader(path, 50) as loader:
        assert values(next(iter(loader))) == [bytes([100 + i]) * 3000 for i in range(50)]


def test_a_feed_that_finds_its_threads_closed_says_so(path):
    """As when a loader is dropped while its feed hands over a group: no thread comes back, and nothing waits for it."""
    before = set(threading.enumerate())  # those of earlier tests may go on
    loader = pario.Loader(path, 32)
    loader._life.reader.file.pool.close()
    with pytest.raises(ClosedError, match="read threads have ended"):
        next(iter(loader))
    mine = set(threading.enumerate()) - before
    assert not [t for t in mine if t.name.startswith(("pario-read", "pario-fill"))]


def test_a_tilde_in_a_path(caffe_datum, monkeypatch) -> None:
    """Means the user's home: in the dataset's path and in that of the metrics."""
    folder = Path(caffe_datum.path)
    monkeypatch.setenv("HOME", str(folder.parent))
    metrics = folder.parent / "metrics.prom"
    options = pario.Options(metrics_file="~/metrics.prom")
    with pario.Loader(f"~/{folder.name}", 8, options=options, comm="self") as loader:
        assert sum(len(batch.ids) for batch in loader) == len(caffe_datum.truth)
    assert "pario_" in metrics.read_text()
    with pario.Reader(f"~/{folder.name}", comm="self") as reader:
        assert len(reader) == len(caffe_datum.truth)


def test_a_store_that_does_not_say_whether_the_file_was_replaced_keeps_no_epoch(fixed, monkeypatch):
    """The question goes to the store at the start of later epochs; a rank that waits for it would hear of no error."""
    back, asked = threading.Event(), []
    monkeypatch.setattr(FileFetcher, "is_replaced", lambda file: asked.append(file) or back.wait(20))
    with pario.Loader(fixed, 100) as loader:
        begin = time.monotonic()
        for _ in range(2):
            assert sum(len(batch.ids) for batch in loader) == N
        assert len(asked) == 1
        assert time.monotonic() - begin < 10
        back.set()
