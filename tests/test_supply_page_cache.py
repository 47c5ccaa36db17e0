"""Own rows: batches straight out of the page cache. The oracle is what was written, through py-lmdb and protobuf."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import lmdb
import numpy as np
import pytest
from datum_message import Message, datum
from pairwise import pairwise

import pario
from pario.bench.cache import drop_file
from pario.decode import Datum, Raw
from pario.errors import CorruptedError, DecodeError, ReadError
from pario.fetch.posix import PosixFetcher
from pario.options import Options
from pario.supply.choose import decodes_batches, page_cache_way
from pario.supply.page_cache import PageCacheSource

LARGE, SMALL = (3, 80, 96), (3, 9, 11)  # rows that are read straight into the batch; rows that are decoded
N = 150
OWN = {"own_rows": "always", "slot_bytes": 128 << 10, "block_bytes": 128 << 10, "mix_blocks": 4}


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


@pytest.fixture(scope="module", params=[LARGE, SMALL], ids=["straight", "decoded"])
def shape(request):
    return request.param


@pytest.fixture(scope="module")
def path(shape, tmp_path_factory):
    place = tmp_path_factory.mktemp("own") / "x.lmdb"
    return written(place, lambda i: datum(pixels(i, shape), label(i)))


def own(path: str, batch_size: int, decoder=None, shuffle=False, **more) -> pario.Loader:
    options = Options(**{**OWN, **more.pop("options", {})})
    return pario.Loader(path, batch_size, decoder or Datum(), shuffle=shuffle, seed=3, options=options, **more)


@pytest.mark.parametrize("shuffle", [False, "global", "block"])
@pytest.mark.parametrize("batch_size", [1, 7, 400])
def test_every_record_once_and_right(path, shape, shuffle, batch_size) -> None:
    with own(path, batch_size, shuffle=shuffle) as loader:
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
        stats = loader.stats()
    assert stats["own"]
    assert stats["reader"]
    assert stats["records"] == 2 * N
    assert 0 < stats["reads"] <= 2 * N + 16  # and some leaf pages
    assert stats["bytes_read"] >= stats["node_bytes"] > 2 * N * np.prod(shape)


@pytest.mark.parametrize("shuffle", [False, "global", "block"])
@pytest.mark.parametrize(
    "decoder",
    [
        Datum(dtype="float32", scale=0.5),
        Datum(crop=8, crop_mode="random", mirror="random"),
        Datum(mean=[1.0, 2.0, 3.0]),
    ],
)
def test_the_same_batches_as_through_the_ring(path, shuffle, decoder) -> None:
    def batches(way: str) -> list[tuple[list[int], bytes, bytes]]:
        with own(path, 11, decoder, shuffle, options={"own_rows": way}) as loader:
            found = [(b.ids.tolist(), b["data"].tobytes(), b["label"].tobytes()) for b in loader]
            assert loader.stats()["own"] == (way == "always")
            return found

    assert batches("always") == batches("never")


@pytest.mark.parametrize("nbytes", [20_000, 64])
def test_raw_rows(tmp_path, nbytes) -> None:
    path = written(tmp_path / "x.lmdb", lambda i: pixels(i, (nbytes,)).tobytes())
    with own(path, 16, Raw(">i2", (-1, 2)), "global") as loader:
        for batch in loader:
            for k, i in enumerate(batch.ids.tolist()):
                assert batch["data"][k].tobytes() == pixels(i, (nbytes,)).tobytes()
        assert loader.stats()["own"]


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


def test_records_that_look_different(tmp_path) -> None:
    path = written(tmp_path / "x.lmdb", odd)

    def batches(way: str) -> list[tuple[list[int], bytes, bytes, int]]:
        with own(path, 30, shuffle="global", on_error="skip", options={"own_rows": way}) as loader:
            return [(b.ids.tolist(), b["data"].tobytes(), b["label"].tobytes(), b.skipped) for b in loader]

    found = batches("always")
    assert found == batches("never")
    good = [i for ids, *_ in found for i in ids]
    assert len(good) + sum(skipped for *_, skipped in found) == N
    assert {i % 10 for i in good} >= {0, 1, 2, 3, 4, 5, 6}
    assert not {i % 10 for i in good} & {8, 9}
    with pytest.raises(DecodeError, match="record") as caught, own(path, 30) as loader:
        list(loader)
    assert caught.value.record == 7
    assert caught.value.path == str(Path(path) / "data.mdb")


def test_other_writers_order_of_fields(tmp_path) -> None:
    """No record begins as protobuf's own writers begin it: read straight once, decoded from then on."""
    path = written(tmp_path / "x.lmdb", lambda i: Message(label=i).SerializeToString() + datum(pixels(i, LARGE), None))
    with own(path, 10) as loader:
        for batch in loader:
            for k, i in enumerate(batch.ids.tolist()):
                assert np.array_equal(batch["data"][k], pixels(i, LARGE))
                assert batch["label"][k] == i
        assert loader.stats()["reads"] < 2 * N


def test_damage_is_found_and_named(path, shape, tmp_path) -> None:
    if shape == SMALL:
        pytest.skip("values inside leaf pages have no header of their own")
    shutil.copytree(path, tmp_path / "x")
    file = tmp_path / "x" / "data.mdb"
    with own(str(tmp_path / "x"), 10) as loader:
        list(loader)
        offset = int(loader.index.extents["offset"][77])
        with open(file, "r+b") as f:  # the page number in the header
            f.seek(offset - 16)
            f.write(b"\xff")
        with pytest.raises(CorruptedError, match="page header") as caught:
            list(loader)
    assert caught.value.record == 77
    assert caught.value.path == str(file)


def test_a_file_that_is_cut_off(path, tmp_path) -> None:
    shutil.copytree(path, tmp_path / "x")
    file = tmp_path / "x" / "data.mdb"
    with own(str(tmp_path / "x"), 10) as loader:
        list(loader)
        os.truncate(file, int(np.median(loader.index.extents["offset"])) + 7)
        with pytest.raises(ReadError, match="ended early") as caught:
            list(loader)
    assert caught.value.path == str(file)


@pytest.mark.parametrize("shuffle", [False, "global", "block"])
def test_resume_and_leave_early(path, shuffle) -> None:
    with own(path, 8, shuffle=shuffle) as loader:
        whole = [batch.ids.tolist() for batch in loader]
        for batch in loader:  # epoch 1, left
            if batch.step == 2:
                break
        loader.set_epoch(0)
        for batch in loader:
            if batch.step == 4:
                state = loader.state_dict()
                break
    with own(path, 8, shuffle=shuffle) as loader:
        loader.load_state_dict(state)
        assert [batch.ids.tolist() for batch in loader] == whole[5:]
    with own(path, 8, shuffle=shuffle, drop_last=True) as loader:
        assert [batch.ids.tolist() for batch in loader] == whole[: N // 8]


def test_memory_stays(path) -> None:
    with own(path, 8, shuffle="global") as loader:
        for _ in range(2):
            for _batch in loader:
                time.sleep(5e-4)  # long enough for other threads to be of use
        first = loader.stats()["batch_memory"]
        for _ in range(5):
            for _batch in loader:
                pass
        assert loader.stats()["batch_memory"] <= first + first // 2  # threads may be as far ahead as never before


def test_large_batches_are_not_prepared_ahead(path, shape) -> None:
    """The caller's batch and the next one fit into the memory; more would not."""
    held = max(1 << 20, int(2.6 * 50 * np.prod(shape)))
    with own(path, 50, options={"held_bytes": held}) as loader:
        assert sum(len(batch.ids) for batch in loader) == N


@pytest.mark.parametrize("own_rows", ["always", "never"])
def test_what_the_caller_may_hold_is_the_same_without_the_ring(path, shape, own_rows) -> None:
    batch_bytes = 50 * int(np.prod(shape))
    if shape == SMALL:
        pytest.skip("less than the least memory")
    with own(path, 50, options={"own_rows": own_rows, "held_bytes": int(4.8 * batch_bytes)}) as loader:
        kept = []
        for _ in range(3):
            for batch in loader:
                kept = [*kept[-2:], batch]


def test_small_records_of_a_single_rank_keep_to_the_ring_in_random_order(tmp_path) -> None:
    path = written(tmp_path / "x.lmdb", lambda i: datum(pixels(i, SMALL), label(i)))
    with own(path, 16, shuffle="global", options={"own_rows": "auto"}) as loader:
        list(loader)
        assert not loader.stats()["own"]


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
    return in_order(tmp_path_factory.mktemp("own") / "ordered.lmdb", sized, 400)


def test_who_does_without_the_ring(ascending, path, shape, monkeypatch) -> None:
    """By what the disk's kernel does, the order, and the size of the records."""
    ahead, held = 0, 0.0
    monkeypatch.setattr(PosixFetcher, "read_ahead_bytes", property(lambda self: ahead))
    monkeypatch.setattr(PosixFetcher, "cached_share", lambda *_: held)
    with pario.Reader(ascending) as sorted_file, pario.Reader(path) as mixed_file:
        assert sorted_file.index.in_file_order
        assert not mixed_file.index.in_file_order

        def found(reader: pario.Reader, ranks: int, shuffle: bool | str) -> str:
            return page_cache_way(reader.file.pool.fetcher, reader.index, shuffle, ranks)

        assert found(sorted_file, 4, False) == ""  # no disk of this node
        ahead = 128 << 10  # a kernel as it comes
        assert found(sorted_file, 1, False) == "advised"
        assert found(mixed_file, 1, False) == ""
        assert found(mixed_file, 4, False) == ""  # small ones, in no order of the file
        assert found(sorted_file, 4, "global") == ""
        held = 1.0
        for reader in (sorted_file, mixed_file):
            reader.index.mean_bytes = 3000.0
            assert found(reader, 4, "global") == found(reader, 4, "block") == "cached"
        assert found(sorted_file, 4, False) == "cached"
        sorted_file.index.mean_bytes = 100.0  # inside leaf pages: a call for each is more than the ring costs
        assert found(sorted_file, 4, "global") == found(sorted_file, 4, "block") == ""
        assert found(sorted_file, 4, False) == "cached"
        fetcher = sorted_file.file.pool.fetcher
        sorted_file.index.mean_bytes = 1600.0  # unpacking takes longer than a call
        assert page_cache_way(fetcher, sorted_file.index, "global", 1, unpacks=True) == "cached"
        sorted_file.index.mean_bytes = 100.0
        assert page_cache_way(fetcher, sorted_file.index, "global", 1, unpacks=True) == ""
        held = 0.0
        sorted_file.index.mean_bytes = 100_000.0
        assert found(sorted_file, 1, "global") == "advised"
        assert found(sorted_file, 1, "block") == ""  # long reads of whole blocks are for the ring


@pytest.mark.parametrize(
    ("batch_size", "saved", "kind"), pairwise([7, 1, 400], [True, False], ["advised", "cached"])
)
def test_records_of_all_sizes_from_a_cold_file(ascending, tmp_path, monkeypatch, kind, saved, batch_size) -> None:
    folder = tmp_path / "x.lmdb"
    shutil.copytree(ascending, folder)
    with pario.Reader(folder, save_index=saved):
        pass
    asked = []
    advise = PosixFetcher.advise
    monkeypatch.setattr("pario.supply.choose.page_cache_way", lambda *_, **__: kind)
    monkeypatch.setattr(PosixFetcher, "advise", lambda *a: (asked.append(a[1].tolist()), advise(*a)))
    options = {"slots": 2, "slot_bytes": 1 << 20}
    with own(str(folder), batch_size, Raw(), options=options, save_index=saved) as loader:
        assert (loader.index.sizes_known) == saved
        for _ in range(2):
            drop_file(f"{folder}/data.mdb")
            seen = []
            for batch in loader:
                data, offsets = batch["data"], batch["offsets"]
                assert offsets[0] == 0
                assert offsets[-1] == len(data)
                for k, i in enumerate(batch.ids.tolist()):
                    assert data[offsets[k] : offsets[k + 1]].tobytes() == sized(i)
                    seen.append(i)
            assert seen == list(range(400))
        assert loader.stats()["own"]
        # Each record was asked for once per epoch, ahead of its reading.
        wanted = (loader.index.extents["offset"] - loader.index.header_bytes).tolist()
        assert list(chain.from_iterable(asked)) == (2 * wanted if kind == "advised" else [])


@pytest.mark.parametrize("kind", ["advised", "cached"])
def test_many_threads_find_places_and_read_at_once(tmp_path, monkeypatch, kind) -> None:
    """Those that wait for the places of their records leave the reading of leaf pages to others."""
    folder = in_order(tmp_path / "x.lmdb", lambda i: pixels(i, (1500,)).tobytes(), 400)
    monkeypatch.setattr("pario.supply.choose.page_cache_way", lambda *_, **__: kind)
    monkeypatch.setattr("pario.machine.fair_threads", lambda *_: 8)
    for inflight in (1, 8):
        options = {"slots": 2, "slot_bytes": 64 << 10, "inflight": inflight}
        with own(folder, 5, Raw("u1", 1500), options=options, save_index=False) as loader:
            assert not loader.index.sizes_known
            for batch in loader:
                assert loader.keys(batch.ids) == [b"%06d" % i for i in batch.ids]
                assert [row.tobytes() for row in batch["data"]] == [pixels(i, (1500,)).tobytes() for i in batch.ids]
                time.sleep(1e-3)
            assert loader.stats()["own"]


@pytest.mark.parametrize("decoder", [Datum(dtype="float32"), Datum()], ids=["in units", "straight"])
def test_what_cannot_be_decoded_is_left_out_and_nothing_else(tmp_path, decoder) -> None:
    """A batch of 1.5 MB is decoded in two units."""
    odd = {5, 37, 61, 62}

    def value(i: int) -> bytes:
        return b"no datum" if i in odd else datum(np.full(LARGE, i % 251, np.uint8), i)

    path = written(tmp_path / "x.lmdb", value)
    with own(path, 64, decoder, on_error="skip") as loader:
        seen = []
        for batch in loader:
            assert (batch["data"] == (batch.ids % 251)[:, None, None, None]).all()
            assert (batch["label"] == batch.ids).all()
            assert batch.skipped == len(odd & set(range(batch.step * 64, batch.step * 64 + 64)))
            seen += batch.ids.tolist()
        assert loader.stats()["own"]
    assert seen == sorted(set(range(N)) - odd)


def test_the_next_step_is_asked_for_before_this_one_is_read(ascending, monkeypatch) -> None:
    events: list[tuple[str, int]] = []
    advise, read = PosixFetcher.advise, PosixFetcher.read_split
    monkeypatch.setattr("pario.supply.choose.page_cache_way", lambda *_, **__: "advised")
    monkeypatch.setattr(PosixFetcher, "advise", lambda *a: (events.append(("ask", int(a[1].max()))), advise(*a)))
    monkeypatch.setattr(
        PosixFetcher, "read_split", lambda *a: (events.append(("read", int(a[1].max()))), read(*a))[1]
    )
    # A batch has more bytes than what may be asked for ahead.
    with own(ascending, 20, Raw(), options={"slots": 2, "slot_bytes": 64 << 10}) as loader:
        list(loader)
    asked = [offset for what, offset in events if what == "ask"]
    assert len(asked) == 20
    for k, (_, offset) in enumerate(event for event in events if event[0] == "read"):
        assert ("ask", asked[min(k + 1, 19)]) in events[: events.index(("read", offset))]


def test_a_first_epoch_from_a_local_disk_leaves_the_index_behind(ascending, tmp_path) -> None:
    folder = tmp_path / "x.lmdb"
    shutil.copytree(ascending, folder)
    with own(str(folder), 32, Raw()) as loader:
        assert not loader.index.sizes_known
        list(loader)
        assert loader.stats()["guessed"] == 0
    with pario.Reader(folder) as after, pario.Reader(ascending) as oracle:
        assert after.index.sidecar == f"{folder}/data.mdb.pario.h5"
        np.testing.assert_array_equal(after.index.extents, oracle.index.extents)
        assert after.keys(range(400)) == [b"%06d" % i for i in range(400)]


def test_other_threads_work_while_the_caller_is_away(path, monkeypatch) -> None:
    """And not for a caller that asks at once: it would only wait for them."""
    threads = []
    prepare = PageCacheSource.prepare
    note = threading.get_ident
    monkeypatch.setattr(PageCacheSource, "prepare", lambda *a, **k: (threads.append(note()), prepare(*a, **k))[1])
    monkeypatch.setattr("pario.machine.fair_threads", lambda *_: 2)
    with own(path, 15, options={"inflight": 2}) as loader:
        for _ in loader:
            pass
        me = threading.get_ident()
        assert threads.count(me) > 0.6 * len(threads)
        threads.clear()
        for _ in loader:
            time.sleep(0.02)
        assert 0 < threads.count(me) < 0.3 * len(threads)


def test_the_ring_takes_no_memory_before_it_is_wanted(path, monkeypatch) -> None:
    kind = "cached"
    monkeypatch.setattr("pario.supply.choose.page_cache_way", lambda *_, **__: kind)
    with own(path, 8, options={"own_rows": "auto"}) as loader:
        first = [batch.ids.tolist() for batch in loader]
        assert not len(loader._life.slots.data)
        kind = ""  # somebody else needed the memory
        assert [batch.ids.tolist() for batch in loader] == first
        assert len(loader._life.slots.data)
        assert not loader.stats()["own"]


def test_the_page_cache_decides(path, shape) -> None:
    if shape == SMALL:
        pytest.skip("a single rank's small records keep to the ring")
    file = Path(path) / "data.mdb"
    fetcher = PosixFetcher(str(file))
    file.read_bytes()
    share = fetcher.cached_share(np.arange(0, fetcher.nbytes, 4096))
    if share is None:
        pytest.skip("this file system has no RWF_NOWAIT")
    assert share == 1.0
    with own(path, 16, options={"own_rows": "auto"}) as loader:
        list(loader)
        assert loader.stats()["own"]
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        if fetcher.cached_share(np.arange(0, fetcher.nbytes, 4096), 0.9) == 1.0:
            pytest.skip("this file system keeps its files in memory")
        os.posix_fadvise(fetcher.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        seen = sorted(i for batch in loader for i in batch.ids.tolist())
        assert seen == list(range(N))
        assert not loader.stats()["own"]
        list(loader)  # that epoch has read it
        assert loader.stats()["own"]
    fetcher.close()


def test_decoders_that_suit() -> None:
    class Mine(Raw):
        def decode(self, records, out, draw):
            return super().decode(records, out, draw)

    assert decodes_batches(Raw("u1", 4))
    assert decodes_batches(Raw())  # packed: no rows, but the sizes tell everything
    assert not decodes_batches(Mine("u1", 4))  # its decode may do anything
    assert not decodes_batches(pario.decode.as_decoder(len))
