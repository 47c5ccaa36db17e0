"""Batches out of the node's memory, or of what a rank reads itself. The oracle is what was written, through py-lmdb and
protobuf."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from datum_message import Message, datum

import pario
from benchmarks.cache import drop_file
from pario.decode import Datum, Raw
from pario.errors import CorruptedError, DecodeError, ReadError, SnapshotError
from pario.feed import fill
from pario.feed.choose import Way
from pario.feed.ring_reader import RingReader
from pario.feed.seat import Seat
from pario.feed.source import Context
from pario.fetch.checked import Checked
from pario.options import Options
from pario.plan.stream import Work
from pario.tiers.states import ChunkStates

LARGE, SMALL = (3, 80, 96), (3, 9, 11)
N = 150
SIZES = {"slot_bytes": 128 << 10, "block_bytes": 128 << 10, "mix_blocks": 4}

#: scratch: a tier that gets nothing; tier: the one by default; half: one that gets every other chunk only
FORMS = ["scratch", "tier", "half"]


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "scratch":
        request.getfixturevalue("nothing_copied")
    if request.param == "half":
        first_uses = fill._first_uses
        monkeypatch.setattr(fill, "_first_uses", lambda *a: (c[c % 2 == 1] for c in first_uses(*a)))
    return str(request.param)


def pixels(i: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(i).integers(0, 256, shape, np.uint8)


def label(i: int) -> int:
    return (0, 1, 127, 128, 70_000, -1)[i % 6]  # varints of one, two, three and ten bytes


def written(place: Path, value: Callable[[int], bytes], n: int = N) -> str:
    """Inserted in random order, in several commits."""
    with lmdb.open(str(place), map_size=1 << 28) as env:
        for part in np.array_split(np.random.default_rng(0).permutation(n), 5):
            with env.begin(write=True) as txn:
                for i in part.tolist():
                    txn.put(b"%06d" % i, value(i))
    return str(place)


@pytest.fixture(scope="module", params=[LARGE, SMALL], ids=["large", "small"])
def shape(request):
    return request.param


@pytest.fixture(scope="module")
def path(shape, tmp_path_factory):
    place = tmp_path_factory.mktemp("seat") / "x.lmdb"
    made = written(place, lambda i: datum(pixels(i, shape), label(i)))
    with pario.Reader(made):
        pass  # saves the index
    return made


def seated(form: str, path: str, batch_size: int, decoder=None, shuffle=False, **more) -> pario.Loader:
    options = Options(**{**SIZES, **more.pop("options", {})})
    more.setdefault("recipe", "ring" if form == "ring" else "auto")
    return pario.Loader(path, batch_size, decoder or Datum(), shuffle=shuffle, seed=3, options=options, **more)


def filled(loader: pario.Loader) -> None:
    """Wait until all that will come into the tier is there."""
    source = loader._life.source
    assert isinstance(source, Seat)
    if source._fill is not None:
        source._fill._leader.join(20)
        assert not source._fill._leader.is_alive()


def check_form(loader: pario.Loader, form: str) -> None:
    assert isinstance(loader._life.source, Seat)
    assert loader.stats()["staged"]
    assert form != "scratch" or not loader._life.reader.stage.memory.held().any()


@pytest.mark.parametrize("shuffle", [False, "global", "block"])
@pytest.mark.parametrize("batch_size", [pytest.param(1, marks=pytest.mark.full), 7, 400])
def test_every_record_once_and_right(form, path, shape, shuffle, batch_size) -> None:
    with seated(form, path, batch_size, shuffle=shuffle) as loader:
        for epoch in range(2):
            seen = []
            for batch in loader:
                assert batch.epoch == epoch
                assert batch["data"].shape == (len(batch.ids), *shape)
                for k, i in enumerate(batch.ids.tolist()):
                    assert np.array_equal(batch["data"][k], pixels(i, shape))
                    assert batch["label"][k] == label(i)
                seen += batch.ids.tolist()
            assert sorted(seen) == list(range(N))
            filled(loader)
        check_form(loader, form)
        stats = loader.stats()
    assert stats["records"] == 2 * N
    assert stats["node_bytes"] > 2 * N * np.prod(shape)
    if form == "scratch":
        # And some leaf pages, and for each batch a look whether the snapshot is still there.
        assert 0 < stats["reads"] <= 2 * N + 16 + stats["batches"]
        assert stats["bytes_read"] >= stats["node_bytes"]


def test_what_the_tier_has_is_read_no_more(path) -> None:
    with seated("tier", path, 7, shuffle="global") as loader:
        list(loader)
        filled(loader)
        before = loader.stats()
        assert sum(len(batch.ids) for batch in loader) == N
        after = loader.stats()
    assert (after["reads"], after["bytes_read"]) == (before["reads"], before["bytes_read"])


def test_nobody_waits_for_the_tier(path, nothing_copied) -> None:
    """Of a file of this node: an epoch comes to its end while nothing is filled."""
    with seated("tier", path, 7, shuffle="global") as loader:
        for _ in range(2):
            assert sorted(i for batch in loader for i in batch.ids.tolist()) == list(range(N))
        memory = loader._life.reader.stage.memory
        assert not memory.held().any()


@pytest.mark.parametrize("shuffle", [False, "global", "block"])
@pytest.mark.parametrize(
    "decoder",
    [
        Datum(dtype="float32", scale=0.5),
        Datum(crop=8, crop_mode="random", mirror="random"),
        Datum(mean=[1.0, 2.0, 3.0]),
    ],
)
def test_the_same_batches_as_through_the_ring(form, path, shuffle, decoder) -> None:
    def batches(way: str) -> list[tuple[list[int], bytes, bytes]]:
        with seated(way, path, 11, decoder, shuffle) as loader:
            return [(b.ids.tolist(), b["data"].tobytes(), b["label"].tobytes()) for _ in range(2) for b in loader]

    assert batches(form) == batches("ring")


@pytest.mark.parametrize("nbytes", [20_000, 64])
def test_raw_rows(form, tmp_path, nbytes) -> None:
    path = written(tmp_path / "x.lmdb", lambda i: pixels(i, (nbytes,)).tobytes())
    with pario.Reader(path):
        pass
    with seated(form, path, 16, Raw(">i2", (-1, 2)), "global") as loader:
        for batch in loader:
            for k, i in enumerate(batch.ids.tolist()):
                assert batch["data"][k].tobytes() == pixels(i, (nbytes,)).tobytes()
        check_form(loader, form)


def odd(i: int) -> bytes:
    """Records that a Datum may be, and some that it may not."""
    values = pixels(i, LARGE)
    message = Message.FromString(datum(values, label(i)))
    plain = message.SerializeToString()
    kind = i % 10
    if kind == 1:
        message.encoded = False  # said, though it is the default
    elif kind == 2:
        message.ClearField("label")
    elif kind == 3:  # the label first
        return Message(label=label(i)).SerializeToString() + datum(values, None)
    elif kind == 4:  # a second label behind: the last one counts
        return datum(values, 5) + Message(label=label(i)).SerializeToString()
    elif kind == 5:  # pixels again: the last ones count
        return datum(values[::-1].copy(), 5) + datum(values, label(i))
    elif kind == 6:
        return plain + b"\x7a\x03abc"  # a field of a later version
    elif kind == 7:
        return plain[:-3]  # cut off inside the label, or the pixels
    elif kind == 8:
        return datum(values[:, 1:], label(i))
    elif kind == 9:
        return plain + Message(channels=4).SerializeToString()  # another shape behind the pixels
    return message.SerializeToString()


def test_records_that_look_different(form, tmp_path) -> None:
    path = written(tmp_path / "x.lmdb", odd)
    with pario.Reader(path):
        pass

    def batches(way: str) -> list[tuple[list[int], bytes, bytes, int]]:
        with seated(way, path, 30, shuffle="global", on_error="skip") as loader:
            return [(b.ids.tolist(), b["data"].tobytes(), b["label"].tobytes(), b.skipped) for b in loader]

    found = batches(form)
    assert found == batches("ring")
    good = [i for ids, *_ in found for i in ids]
    assert len(good) + sum(skipped for *_, skipped in found) == N
    assert {i % 10 for i in good} >= {0, 1, 2, 3, 4, 5, 6}
    assert not {i % 10 for i in good} & {8, 9}
    with pytest.raises(DecodeError, match="record") as caught, seated(form, path, 30) as loader:
        list(loader)
    assert caught.value.record == 7
    assert caught.value.path == str(Path(path) / "data.mdb")


def test_other_writers_order_of_fields(form, tmp_path) -> None:
    """No record begins as protobuf's own writers begin it."""
    path = written(tmp_path / "x.lmdb", lambda i: Message(label=i).SerializeToString() + datum(pixels(i, LARGE), None))
    with seated(form, path, 10) as loader:
        for batch in loader:
            for k, i in enumerate(batch.ids.tolist()):
                assert np.array_equal(batch["data"][k], pixels(i, LARGE))
                assert batch["label"][k] == i


def copied(path: str, tmp_path: Path) -> tuple[str, np.ndarray]:
    """A copy with a side-car of its own, and where its values begin."""
    shutil.copytree(path, tmp_path / "x", ignore=shutil.ignore_patterns("*.index"))
    with pario.Reader(tmp_path / "x") as reader:
        return str(tmp_path / "x"), reader.index.extents["offset"].copy()


def test_damage_is_found_and_named(form, path, shape, tmp_path) -> None:
    if shape == SMALL:
        pytest.skip("values inside leaf pages have no header of their own")
    folder, offsets = copied(path, tmp_path)
    file = os.path.join(folder, "data.mdb")
    before = os.stat(file)
    with open(file, "r+b") as f:  # the page number in the header
        f.seek(int(offsets[77]) - 16)
        f.write(b"\xff")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    with seated(form, folder, 10) as loader:
        loop = iter(loader)
        filled(loader)  # in the memory, too, it is found
        with pytest.raises(CorruptedError, match="page header") as caught:
            list(loop)
    assert caught.value.record == 77
    assert caught.value.path == file


def test_a_file_that_is_cut_off(form, path, tmp_path) -> None:
    folder, offsets = copied(path, tmp_path)
    file = os.path.join(folder, "data.mdb")
    with seated(form, folder, 10) as loader:
        os.truncate(file, int(np.median(offsets)) + 7)
        with pytest.raises(ReadError, match="ended early") as caught:
            list(loader)
    assert caught.value.path == file


def write_twice(folder: str) -> None:
    """What overwrites a reader's snapshot."""
    with lmdb.open(folder, map_size=1 << 28) as env:
        for k in range(3):
            with env.begin(write=True) as txn:
                txn.put(b"%06d" % k, b"new")


def test_a_writer_is_noticed(form, path, tmp_path) -> None:
    """Once pages may have been written over, no record comes from the file any more; the node's memory has the state
    that the loader began with."""
    folder, _ = copied(path, tmp_path)
    with seated(form, folder, 10, options={"held_bytes": 64 << 20}) as loader:
        assert sum(len(batch.ids) for batch in loader) == N
        filled(loader)
        write_twice(folder)
        if form == "tier":
            for batch in loader:
                assert [int(n) for n in batch["label"]] == [label(i) for i in batch.ids.tolist()]
        elif form == "scratch" or loader._life.reader.stage.memory.held().sum() == 0:
            with pytest.raises(SnapshotError):
                list(loader)


def test_a_writer_stops_the_fill(path, tmp_path, monkeypatch) -> None:
    """What the fill has copied after the write is not taken for a part of the snapshot."""
    folder, _ = copied(path, tmp_path)
    with seated("tier", folder, 10) as loader:
        write_twice(folder)
        with pytest.raises(SnapshotError):
            list(loader)
        assert not loader._life.reader.stage.memory.held().any()


def test_a_chunk_that_is_given_back_while_it_is_decoded(path, shape) -> None:
    with seated("tier", path, 10, shuffle="global") as loader:
        assert sum(len(batch.ids) for batch in loader) == N
        filled(loader)
        work = Work(loader._supply.context.stream, loader._progress._shape, 1, 0)
        source: Any = loader._supply.source(work, Way.SEAT)
        memory = loader._life.reader.stage.memory
        for step in range(work.schedule.steps):
            (piece,) = source.pieces(step)
            records = source.take(piece, lambda: None)
            first = records.data[records.starts[0] :][: records.nbytes[0]].tobytes()
            if not step:
                memory.give_back(int(records.starts[0]) // memory.grid.chunk_bytes)
                assert not source.release(piece)
                records = source.take(piece, lambda: None)
                assert records.data[records.starts[0] :][: records.nbytes[0]].tobytes() == first
            assert source.release(piece)
        source.leave()
        assert source.close(10)


@pytest.mark.parametrize("shuffle", [False, "global", "block"])
def test_many_small_steps(tmp_path: Path, shuffle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are planned in several groups, and prepared up to eight at once, also across two groups."""
    count, epochs = 40_000, {}
    path = written(tmp_path / "x.lmdb", lambda i: i.to_bytes(8, "little"), count)
    for at_once_s in (0.0, 60.0):
        monkeypatch.setattr("pario.loader.epoch.AT_ONCE_S", at_once_s)
        with seated("tier", path, 100, Raw("i8"), shuffle=shuffle) as loader:
            list(loader)
            filled(loader)
            batches = [(batch.ids.tolist(), batch["data"].reshape(-1).tolist()) for batch in loader]
        assert all(ids == values for ids, values in batches)
        assert sorted(i for ids, _ in batches for i in ids) == list(range(count))
        epochs[at_once_s] = batches
    assert epochs[0.0] == epochs[60.0]


@pytest.mark.parametrize("batch_size", [8, pario.Budget(tokens=20, cost=np.arange(N) % 7 + 1)], ids=["even", "uneven"])
@pytest.mark.parametrize("shuffle", [False, "global", "block"])
def test_steps_that_are_prepared_at_once_are_the_same(form, path, shuffle, batch_size) -> None:
    with seated(form, path, batch_size, shuffle=shuffle) as loader:
        work = Work(loader._supply.context.stream, loader._progress._shape, 1, 0)
        source: Any = loader._supply.source(work, Way.SEAT)
        assert source.most_steps == 8 or shape == LARGE
        rng, step, steps = np.random.default_rng(0), 0, work.schedule.steps
        while step < steps:
            count = min(int(rng.integers(1, 6)), steps - step)
            several = source.prepare(step, lambda: None, count)
            assert len(several) == count
            for k, parts in enumerate(several):
                (alone,) = source.prepare(step + k, lambda: None)
                assert parts.ids.tolist() == alone.ids.tolist()
                assert parts.arrays.keys() == alone.arrays.keys()
                for name, array in parts.arrays.items():
                    np.testing.assert_array_equal(array, alone.arrays[name])
                assert parts.arrays["label"].tolist() == [label(i) for i in parts.ids.tolist()]
            step += count
        source.leave()
        assert source.close(10)


@pytest.mark.parametrize("shuffle", [False, "global", "block"])
def test_resume_and_leave_early(form, path, shuffle) -> None:
    with seated(form, path, 8, shuffle=shuffle) as loader:
        whole = [batch.ids.tolist() for batch in loader]
        for batch in loader:  # epoch 1, left
            if batch.step == 2:
                break
        loader.set_epoch(0)
        for batch in loader:
            if batch.step == 4:
                state = loader.state_dict()
                break
    with seated(form, path, 8, shuffle=shuffle) as loader:
        loader.load_state_dict(state)
        assert [batch.ids.tolist() for batch in loader] == whole[5:]
    with seated(form, path, 8, shuffle=shuffle, drop_last=True) as loader:
        assert [batch.ids.tolist() for batch in loader] == whole[: N // 8]


def test_memory_is_used_again(form, path, shape) -> None:
    """The knobs decide how many batches are ahead; 133 would be held if none came back."""
    each = -(-8 * int(np.prod(shape)) // 4096) * 4096
    with seated(form, path, 8, shuffle="global") as loader:
        for _ in range(7):
            for _batch in loader:
                time.sleep(2e-4)  # long enough for other threads to be of use
        assert loader.stats()["batch_memory"] <= 32 * each


def test_large_batches_are_not_prepared_ahead(form, path, shape) -> None:
    """The caller's batch and the next one fit into the memory; more would not."""
    held = max(1 << 20, int(2.6 * 50 * np.prod(shape)))
    with seated(form, path, 50, options={"held_bytes": held}) as loader:
        assert sum(len(batch.ids) for batch in loader) == N


@pytest.mark.parametrize("way", ["ring", *FORMS[:2]])
def test_what_the_caller_may_hold_is_the_same_without_the_ring(path, shape, way) -> None:
    batch_bytes = 50 * int(np.prod(shape))
    if shape == SMALL:
        pytest.skip("less than the least memory")
    with seated(way, path, 50, options={"held_bytes": int(4.8 * batch_bytes)}) as loader:
        kept = []
        for _ in range(3):
            for batch in loader:
                kept = [*kept[-2:], batch]


def in_order(place: Path, value: Callable[[int], bytes], n: int) -> str:
    with lmdb.open(str(place), map_size=1 << 28) as env:
        for first in range(0, n, 100):
            with env.begin(write=True) as txn:
                for i in range(first, min(first + 100, n)):
                    txn.put(b"%06d" % i, value(i), append=True)
    return str(place)


def sized(i: int) -> bytes:
    """In a leaf page, on one page, on many."""
    many = (40, 3000, 90_000, 1900)[i % 4] + i
    return pixels(i, (many,)).tobytes()


@pytest.fixture(scope="module")
def ascending(tmp_path_factory) -> str:
    made = in_order(tmp_path_factory.mktemp("seat") / "ordered.lmdb", sized, 400)
    with pario.Reader(made):
        pass
    return made


@pytest.mark.parametrize("batch_size", [7, 400])
def test_records_of_all_sizes_from_a_cold_file(form, ascending, batch_size) -> None:
    with seated(form, ascending, batch_size, Raw(), options={"slots": 2, "slot_bytes": 1 << 20}) as loader:
        for _ in range(2):
            drop_file(f"{ascending}/data.mdb")
            seen = []
            for batch in loader:
                data, offsets = batch["data"], batch["offsets"]
                assert offsets[0] == 0
                assert offsets[-1] == len(data)
                for k, i in enumerate(batch.ids.tolist()):
                    assert data[offsets[k] : offsets[k + 1]].tobytes() == sized(i)
                    seen.append(i)
            assert seen == list(range(400))
            filled(loader)
        check_form(loader, form)


def test_many_threads_read_at_once(form, tmp_path, monkeypatch) -> None:
    folder = in_order(tmp_path / "x.lmdb", lambda i: pixels(i, (1500,)).tobytes(), 400)
    monkeypatch.setattr("pario.machine.fair_threads", lambda *_: 8)
    with pario.Reader(folder):
        pass
    with seated(form, folder, 5, Raw("u1", 1500), options={"inflight": 8}) as loader:
        for _ in range(2):
            for batch in loader:
                assert loader.keys(batch.ids) == [b"%06d" % i for i in batch.ids]
                assert [row.tobytes() for row in batch["data"]] == [pixels(i, (1500,)).tobytes() for i in batch.ids]
                time.sleep(5e-4)
            filled(loader)
        check_form(loader, form)


@pytest.mark.parametrize("decoder", [Datum(dtype="float32"), Datum()], ids=["in units", "straight"])
def test_what_cannot_be_decoded_is_left_out_and_nothing_else(form, tmp_path, decoder) -> None:
    """A batch of 1.5 MB is decoded in two units where it is read into scratch memory."""
    odd = {5, 37, 61, 62}

    def value(i: int) -> bytes:
        return b"no datum" if i in odd else datum(np.full(LARGE, i % 251, np.uint8), i)

    path = written(tmp_path / "x.lmdb", value)
    with pario.Reader(path):
        pass
    with seated(form, path, 64, decoder, on_error="skip") as loader:
        seen = []
        for batch in loader:
            assert (batch["data"] == (batch.ids % 251)[:, None, None, None]).all()
            assert (batch["label"] == batch.ids).all()
            assert batch.skipped == len(odd & set(range(batch.step * 64, batch.step * 64 + 64)))
            seen += batch.ids.tolist()
        check_form(loader, form)
    assert seen == sorted(set(range(N)) - odd)


@pytest.mark.usefixtures("grows")
def test_a_first_epoch_from_a_local_disk_leaves_the_index_behind(form, ascending, tmp_path) -> None:
    folder = tmp_path / "x.lmdb"
    shutil.copytree(ascending, folder, ignore=shutil.ignore_patterns("*.index"))
    with seated(form, str(folder), 32, Raw()) as loader:
        assert not loader.index.sizes_known
        list(loader)
        assert loader.stats()["guessed"] == 0
    with pario.Reader(folder) as after, pario.Reader(ascending) as oracle:
        assert after.index.sidecar == f"{folder}/data.mdb.pario.index"
        np.testing.assert_array_equal(after.index.extents, oracle.index.extents)
        assert after.keys(range(400)) == [b"%06d" % i for i in range(400)]


def test_other_threads_work_while_the_caller_is_away(form, path, monkeypatch) -> None:
    """And not for a caller that asks at once: it would only wait for them."""
    threads = []
    prepare = Seat.prepare
    note = threading.get_ident
    monkeypatch.setattr(Seat, "prepare", lambda *a, **k: (threads.append(note()), prepare(*a, **k))[1])
    monkeypatch.setattr("pario.machine.fair_threads", lambda *_: 2)
    monkeypatch.setattr("pario.loader.epoch.LONG_S", 60.0)
    with seated(form, path, 15, options={"inflight": 2}) as loader:
        for _ in loader:
            pass
        me = threading.get_ident()
        assert threads.count(me) > 0.6 * len(threads)
        threads.clear()
        for _ in loader:
            time.sleep(0.02)
        assert 1 <= threads.count(me) < 0.3 * len(threads)


def test_the_ring_takes_no_memory_before_it_is_wanted(form, path, monkeypatch) -> None:
    with seated(form, path, 8) as loader:
        first = [batch.ids.tolist() for batch in loader]
        assert not len(loader._life.slots.data)
        monkeypatch.setattr("pario.feed.automatic.choose", lambda _: Way.RING)
        assert [batch.ids.tolist() for batch in loader] == first
        assert len(loader._life.slots.data)


@pytest.mark.usefixtures("grows")
def test_nothing_is_prepared_for_one_more_epoch_like_the_last(tmp_path: Path, monkeypatch: Any) -> None:
    place = in_order(tmp_path / "x.lmdb", sized, 400)
    with seated("tier", place, 8, Raw()) as loader:
        supply, ways = loader._supply, []

        def epoch() -> None:
            ways.append((supply.propose(), supply.is_prepared))
            assert sorted(np.concatenate([batch.ids for batch in loader]).tolist()) == list(range(400))

        assert not loader.index.is_complete  # the first epoch finds the records
        for _ in range(3):
            epoch()
        monkeypatch.setattr("pario.feed.automatic.choose", lambda _: Way.RING)
        epoch()
        monkeypatch.undo()
        epoch()
        epoch()
    assert ways == [("ring", False), ("seat", False), ("seat", True), ("ring", True), ("seat", False), ("seat", True)]


def test_a_group_is_planned_once(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where steps take records of two groups, and several threads are at neighbouring steps."""
    own_records, planned = Context.own_records, []

    def counted(context: Context, schedule: Any, order: Any, group: int) -> Any:
        planned.append(group)
        return own_records(context, schedule, order, group)

    with seated("tier", path, 7, shuffle="block") as loader:
        iter(loader)
        seat: Any = loader._life.source
        monkeypatch.setattr(Context, "own_records", counted)
        for step in range(1, len(loader)):
            seat._places(step, 1)
            seat._places(step - 1, 1)
    assert planned
    assert len(planned) == len(set(planned))


def test_chunks_of_other_records_make_room(tmp_path: Path) -> None:
    place = in_order(tmp_path / "x.lmdb", sized, 400)
    with seated("tier", place, 4, Raw(), select=range(8)) as loader:
        memory = loader._life.reader.stage.memory
        last = memory.grid.chunks - 1
        offset, nbytes = memory.grid.span(last)
        assert last
        assert memory.put(last, np.fromfile(f"{place}/data.mdb", np.uint8, nbytes, offset=offset))
        list(loader)
        filled(loader)
        assert memory.has(0)
        assert not memory.has(last)


def test_the_ring_reads_while_the_tier_has_no_room(path: str) -> None:
    """And nobody waits for what will not come."""
    with seated("tier", path, 7) as loader:
        list(loader)
        filled(loader)
        memory = loader._life.reader.stage.memory
        wanted, memory.wanted = memory.wanted, 0  # the pressure lasts
        memory.shrink(memory.grid.chunk_bytes)
        memory.budget = int(memory.held().sum()) * memory.grid.chunk_bytes
        memory.states.expect(memory.grid.chunks)  # as a fill does that was told to stop
        assert sorted(np.concatenate([batch.ids for batch in loader]).tolist()) == list(range(N))
        assert isinstance(loader._life.source, RingReader)
        memory.wanted = memory.budget = wanted
        list(loader)
        filled(loader)
        assert memory.held().all()


def test_an_error_of_the_fill_is_the_loops(path: str) -> None:
    with seated("tier", path, 7) as loader:
        loop = iter(loader)
        next(loop)
        filled(loader)
        loader._life.source._fill.error = ReadError("the disk is gone", path=path)
        with pytest.raises(ReadError, match="the disk is gone"):
            next(loop)
    with seated("tier", path, 7) as loader:  # or of the next loop, if it comes behind the last batch
        list(loader)
        filled(loader)
        loader._life.source._fill.error = ReadError("the disk is gone", path=path)
        with pytest.raises(ReadError, match="the disk is gone"):
            iter(loader)


def thousands(tmp_path: Path) -> str:
    """600 records of 1,000 equal bytes, with an index."""
    place = in_order(tmp_path / "x.lmdb", lambda i: bytes([i % 251]) * 1000, 600)
    with pario.Reader(place):
        return place


def test_bytes_that_go_while_they_are_checked_are_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = thousands(tmp_path)
    with seated("tier", place, 8, Raw(np.uint8, (1000,))) as loader:
        list(loader)
        filled(loader)
        memory, in_copy, gone = loader._life.reader.stage.memory, Checked.in_copy, []

        def checked(*arguments: Any) -> None:
            if not gone:
                gone.append(1)
                memory.give_back(0)
                raise CorruptedError("zeroes in place of a page", path=place)
            in_copy(*arguments)

        monkeypatch.setattr(Checked, "in_copy", checked)
        for batch in loader:
            assert (batch["data"] == (batch.ids % 251)[:, None]).all()
        assert gone


def test_what_was_checked_while_a_chunk_went_is_checked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunk goes between the two looks of a rank, and comes back with other bytes than those that it checked."""
    place = thousands(tmp_path)
    with seated("tier", place, 8, Raw(np.uint8, (1000,))) as loader:
        list(loader)
        filled(loader)
        memory = loader._life.reader.stage.memory
        damaged = np.array(memory.view[: memory.grid.span(0)[1]])
        damaged[2 * 4096 :: 4096] ^= 0x55  # each page's own number
        given, in_copy, looks = ChunkStates.given, Checked.in_copy, []

        def meanwhile(states: ChunkStates) -> int:
            looks.append(1)
            if len(looks) == 2:
                memory.states.drop(0)
            return given.fget(states)  # type: ignore[attr-defined,no-any-return]

        def checked(*arguments: Any) -> None:
            in_copy(*arguments)
            if len(looks) == 2:
                memory.states.dropped(0)
                memory.held_bytes -= len(damaged)
                assert memory.put(0, damaged)

        monkeypatch.setattr(ChunkStates, "given", property(meanwhile))
        monkeypatch.setattr(Checked, "in_copy", checked)
        with pytest.raises(CorruptedError):
            next(iter(loader))
        assert len(looks) == 4
