"""The Loader with tiers, on one process. The oracle is what was written, and the bytes that left the store."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

import pario
from pario.comm.solo import Solo
from pario.dataset.tiers import tiers_by_default
from pario.errors import OptionError, ReadError
from pario.feed import seat
from pario.fetch.file import FileFetcher
from pario.fetch.posix import PosixFetcher
from pario.machine import FileSystem
from pario.options import read_tiers
from pario.tiers.memory import MemoryTier

N = 1500
MiB = 1 << 20


def value(i: int) -> bytes:
    return np.random.default_rng(i).bytes(100 + (i * 611) % 6000)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = str(tmp_path_factory.mktemp("tiers") / "x.lmdb")
    with lmdb.open(place, map_size=1 << 26) as env, env.begin(write=True) as txn:
        for i in np.random.default_rng(0).permutation(N).tolist():
            txn.put(b"%06d" % i, value(i))
    with pario.Reader(place):
        pass  # saves the index
    return place


@pytest.fixture
def store_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all reads of the file from here on, meta pages included."""
    seen: list[int] = []
    read, pread = FileFetcher.read, FileFetcher.pread

    def counting_read(self: FileFetcher, reads: np.ndarray, out: np.ndarray, starts: np.ndarray) -> None:
        seen.extend(reads["nbytes"].tolist())
        read(self, reads, out, starts)

    def counting_pread(self: FileFetcher, offset: int, nbytes: int) -> bytes:
        seen.append(nbytes)
        return pread(self, offset, nbytes)

    monkeypatch.setattr(FileFetcher, "read", counting_read)
    monkeypatch.setattr(FileFetcher, "pread", counting_pread)
    return seen


def options(*tiers: pario.Tier, **more: Any) -> pario.Options:
    return pario.Options(tiers=tiers, slot_bytes=256 << 10, block_bytes=64 << 10, mix_blocks=4, **more)


def check_epoch(loader: pario.Loader) -> None:
    seen = []
    for batch in loader:
        for i, (a, b) in zip(batch.ids.tolist(), pairwise(batch["offsets"].tolist()), strict=True):
            assert batch["data"][a:b].tobytes() == value(i)
            seen.append(i)
    assert sorted(seen) == list(range(N))


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """All files lie on a file system that other nodes see, whose page cache the kernel does not tell about."""
    lustre = FileSystem("lustre", "parallel", "/", "", False)
    monkeypatch.setattr(pario.machine, "file_system_of", lambda path, device: lustre)
    monkeypatch.setattr(PosixFetcher, "cached_share", lambda *_: None)
    monkeypatch.delenv("PARIO_TIERS", raising=False)


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("shuffle", [False, "global", "block"])
def test_a_shared_file_is_kept_in_memory_by_default(path: str, store_bytes: list[int], shuffle: Any) -> None:
    with pario.Loader(path, 32, shuffle=shuffle) as loader:
        check_epoch(loader)
        assert [tier["name"] for tier in loader.stats()["tiers"]] == ["memory"]
        store_bytes.clear()
        check_epoch(loader)
        assert store_bytes == []


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("why", ["options", "environment", "recipe", "too large"])
def test_none_by_default(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    caplog.set_level("INFO", "pario")
    if why == "environment":
        monkeypatch.setenv("PARIO_TIERS", "")
    elif why == "too large":
        monkeypatch.setattr("pario.dataset.tiers.automatic_bytes", lambda: MiB)
    options = pario.Options(tiers=() if why == "options" else None)
    with pario.Loader(path, 32, options=options, recipe="prov" if why == "recipe" else "auto") as loader:
        check_epoch(loader)
        assert "tiers" not in loader.stats()
    assert ("PARIO_TIERS" in caplog.text) == (why == "too large")


@pytest.mark.parametrize("recipe", ["ring", "lmm"])
def test_study_recipes_have_none_by_default(path: str, recipe: str) -> None:
    with pario.Loader(path, 32, recipe=recipe) as loader:
        check_epoch(loader)
        assert "tiers" not in loader.stats()


@pytest.mark.parametrize("shuffle", [False, "global", "block"])
def test_a_local_file_is_kept_in_memory_by_default(path: str, shuffle: Any) -> None:
    """Behind the ranks, which do not wait for it; then nothing is read any more."""
    with pario.Loader(path, 32, shuffle=shuffle) as loader:
        check_epoch(loader)
        assert [tier["name"] for tier in loader.stats()["tiers"]] == ["memory"]
        source: Any = loader._life.source
        source._fill._leader.join(20)
        before = loader.stats()
        check_epoch(loader)
        after = loader.stats()
        assert after["bytes_read"] == before["bytes_read"]
        # The copies are not counted as reads of the ranks, nor is the file a store.
        assert after["store_bytes"] == before["store_bytes"]


def test_what_an_epoch_drops_is_brought_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In key order none needs the last records: the memory was never whole, and each epoch began a filling."""
    with lmdb.open(str(tmp_path / "x"), map_size=1 << 26) as env, env.begin(write=True) as txn:
        for i in range(150):
            txn.put(b"%06d" % i, np.random.default_rng(i).bytes(64 << 10))
    begun: list[bool] = []
    begin = seat.begin_fill
    monkeypatch.setattr(seat, "begin_fill", lambda *a: (begun.append((made := begin(*a)) is not None), made)[1])
    with pario.Loader(str(tmp_path / "x"), 100, drop_last=True) as loader:
        while not begun or (begun[-1] and len(begun) < 1000):
            time.sleep(0.01)  # the filling of an epoch that has ended is cancelled
            assert [batch.ids.tolist() for batch in loader] == [list(range(100))]
    assert (begun[0], begun[-1]) == (True, False)


@pytest.mark.parametrize("kind", ["memory by default", "disk"])
def test_a_file_that_is_mostly_a_hole(tmp_path: Path, kind: str) -> None:
    """As long as its map, as Caffe and writemap=True leave it: its pages count."""
    place = str(tmp_path / "x.lmdb")
    with lmdb.open(place, map_size=1 << 38, writemap=True) as env, env.begin(write=True) as txn:
        for i in range(50):
            txn.put(b"%06d" % i, value(i))
    assert os.path.getsize(f"{place}/data.mdb") == 1 << 38
    disk = pario.Options(tiers=(pario.Tier(str(tmp_path / "disk"), "1 GiB"),))
    options = disk if kind == "disk" else pario.Options()
    with pario.Loader(place, 7, shuffle="global", options=options) as loader:
        stage = loader._life.reader.stage
        assert stage is not None
        assert stage.grid.file_bytes < 2 * MiB
        for _ in range(2):
            got = {}
            for batch in loader:
                values = np.split(batch["data"], batch["offsets"][1:-1])
                got |= {int(i): each.tobytes() for i, each in zip(batch.ids, values, strict=True)}
            assert got == {i: value(i) for i in range(50)}


def test_a_local_file_that_is_too_large_has_no_tier_and_says_nothing(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pario")
    monkeypatch.setattr("pario.dataset.tiers.automatic_bytes", lambda: MiB)
    with pario.Loader(path, 32) as loader:
        check_epoch(loader)
        assert "tiers" not in loader.stats()
        assert len(loader._life.slots.data), "through the ring"
    assert "PARIO_TIERS" not in caplog.text


class _Nodes(Solo):
    """This process is the first of two nodes; `other` is what the second one tells."""

    other: Any = None

    def allgather(self, obj: Any) -> list[Any]:
        return [obj, None, self.other]


@pytest.mark.parametrize("is_local", [False, True])
@pytest.mark.parametrize(
    ("other", "peers", "kept"),
    [
        ((False, 5 * MiB), True, True),  # 2 MiB here and 5 there hold 6 MiB
        ((False, 5 * MiB), False, False),
        ((False, 3 * MiB), True, False),
        ((True, 5 * MiB), True, True),  # for the other node it is a file of its own
    ],
)
def test_by_default_if_all_nodes_together_have_room(
    path: str, monkeypatch: pytest.MonkeyPatch, other: Any, peers: bool, kept: bool, is_local: bool
) -> None:
    """What is on each node alone must fit each of them."""
    monkeypatch.setattr(pario.machine, "memory", lambda **_: (64 * MiB, 8 * MiB))
    monkeypatch.setattr("pario.dataset.file.DataFile.is_local", is_local)
    world = _Nodes()
    world.other = other
    local = is_local and other[0]
    with pario.Reader(path, comm="self") as reader:
        wanted = tiers_by_default(reader.file, 6 * MiB, pario.Options(peers=peers), world)
        assert wanted == ((pario.Tier("memory", "auto"),) if kept and not local else (), local)
        if local:
            wanted = tiers_by_default(reader.file, 2 * MiB, pario.Options(peers=peers), world)
            assert wanted == ((pario.Tier("memory", "auto"),), True)


@pytest.mark.usefixtures("shared")
def test_a_long_wait_is_explained(path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "pario")
    monkeypatch.setattr("pario.feed.seat._SAY_S", 0.0)
    monkeypatch.setattr("pario.tiers.states._LOOK_S", 0.01)
    slow = FileFetcher.read

    def read(self: FileFetcher, *what: Any) -> None:
        time.sleep(0.1)
        slow(self, *what)

    monkeypatch.setattr(FileFetcher, "read", read)
    with pario.Loader(path, 32, shuffle="global") as loader:
        check_epoch(loader)
    assert caplog.text.count("the next batch needs more") == 1


@pytest.mark.parametrize("shuffle", [False, "global", "block"])
@pytest.mark.parametrize("where", ["memory", "disk", "both", "a part in memory", "a part in memory, the rest on disk"])
def test_later_epochs_ask_the_store_for_nothing(
    path: str, tmp_path: Path, store_bytes: list[int], shuffle: Any, where: str
) -> None:
    tiers = []
    if "memory" in where or where == "both":
        tiers.append(pario.Tier("memory", "2 MiB" if "part" in where else "auto"))
    if "disk" in where or where == "both":
        tiers.append(pario.Tier(str(tmp_path), "1 GiB"))
    size = os.path.getsize(os.path.join(path, "data.mdb"))
    with pario.Loader(path, 32, shuffle=shuffle, options=options(*tiers)) as loader:
        check_epoch(loader)
        # Within the bar of 1.02 of the file, and the meta pages, which are read after each read of a chunk.
        # (What finds no room there is also read ahead of the next epoch, as much as the ring holds.)
        ahead = loader.stats()["slots"] * loader.stats()["slot_bytes"] if where == "a part in memory" else 0
        assert sum(n for n in store_bytes if n > 8192) <= 1.02 * size + ahead
        store_bytes.clear()
        for _ in range(2):
            check_epoch(loader)
        if where == "a part in memory":  # 2 MiB of each epoch, besides the looks at the meta page
            assert 0 < sum(n for n in store_bytes if n != 4248) <= 2 * (size - MiB) + ahead
        else:
            assert store_bytes == []
        stats = loader.stats()
        assert [tier["name"] for tier in stats["tiers"]] == [tier.where for tier in tiers]
        assert stats["store_bytes"] >= MiB


def test_a_job_finds_what_the_last_one_left_on_the_disk(path: str, tmp_path: Path, store_bytes: list[int]) -> None:
    for _ in range(2):
        store_bytes.clear()
        with pario.Loader(path, 32, shuffle="global", options=options(pario.Tier(str(tmp_path)))) as loader:
            check_epoch(loader)
    assert all(n <= 8192 for n in store_bytes), "what is not the data itself: meta pages, and a sample of leaf pages"
    assert len(store_bytes) < 64


def test_a_changed_file_is_another_dataset(tmp_path: Path) -> None:
    place, folder = str(tmp_path / "x.lmdb"), pario.Tier(str(tmp_path / "tier"))
    for state in (b"before", b"after"):
        with lmdb.open(place, map_size=1 << 26) as env, env.begin(write=True) as txn:
            for i in range(100):
                txn.put(b"%06d" % i, state * 100)
        for _ in range(2):
            with pario.Loader(place, 10, options=options(folder)) as loader:
                for batch in loader:
                    assert batch["data"].tobytes() == state * 100 * 10


@pytest.mark.usefixtures("grows")
def test_without_a_saved_index(path: str, tmp_path: Path, store_bytes: list[int]) -> None:
    copy = tmp_path / "x.lmdb"
    copy.mkdir()
    copy.joinpath("data.mdb").write_bytes(Path(path, "data.mdb").read_bytes())
    with pario.Loader(copy, 32, options=options(pario.Tier("memory"))) as loader:
        check_epoch(loader)
        check_epoch(loader)
        store_bytes.clear()
        check_epoch(loader)
        assert store_bytes == []


@pytest.mark.parametrize("shuffle", [False, "global"])
def test_small_records_without_a_saved_index_leave_the_store_once(
    tmp_path: Path, store_bytes: list[int], shuffle: Any
) -> None:
    """Their leaf pages are the file: what the walk reads is what an epoch needs."""
    path, n = str(tmp_path / "x.lmdb"), 30_000
    with lmdb.open(path, map_size=1 << 26) as env, env.begin(write=True) as txn:
        for i in range(n):
            txn.put(b"%06d" % i, b"%0100d" % i)
    with pario.Loader(path, 500, shuffle=shuffle, options=options(pario.Tier("memory")), save_index=False) as loader:
        for _ in range(2):
            seen = {}
            for batch in loader:
                seen.update(zip(batch.ids.tolist(), batch["data"].reshape(-1, 100), strict=True))
            assert len(seen) == n
            assert all(row.tobytes() == b"%0100d" % i for i, row in seen.items())
    assert sum(store_bytes) <= 1.02 * Path(path, "data.mdb").stat().st_size + 64 * 4096  # meta pages, and some probes


def test_memory_that_is_given_back_is_read_again(path: str) -> None:
    """While an epoch runs, too; a hole reads as zeros."""
    with pario.Loader(path, 32, shuffle="global", options=options(pario.Tier("memory"))) as loader:
        check_epoch(loader)
        stage = loader._life.reader.stage
        assert stage is not None
        memory = stage.memory
        assert memory is not None
        seen = []
        for batch in loader:
            memory.give_back(len(seen) % memory.grid.chunks)
            for i, (a, b) in zip(batch.ids.tolist(), pairwise(batch["offsets"].tolist()), strict=True):
                assert batch["data"][a:b].tobytes() == value(i)
                seen.append(i)
        assert sorted(seen) == list(range(N))
        check_epoch(loader)
        assert memory.held()[stage.used(loader.index, loader._life.reader.checked)].all(), "it is filled again"


def test_given_back_while_it_is_decoded(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memories: list[MemoryTier] = []

    def decoder(record: np.ndarray) -> dict[str, Any]:
        for memory in memories:
            for chunk in range(memory.grid.chunks):
                memory.give_back(chunk)
        return {"sum": sum(bytes(record))}

    with pario.Loader(path, 32, decoder, options=options(pario.Tier("memory"), decode_threads=1)) as loader:
        stage = loader._life.reader.stage
        assert stage is not None
        assert stage.memory is not None
        memories.append(stage.memory)
        wrong = 0
        for batch in loader:
            for i, total in zip(batch.ids.tolist(), batch["sum"].tolist(), strict=True):
                wrong += total != sum(value(i))
        assert wrong == 0


def test_an_error_of_the_store_reaches_the_loop(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pario.Loader(path, 32, shuffle="global", options=options(pario.Tier("memory"))) as loader:

        def refuse(*_: object) -> None:
            raise ReadError("broken store", path=path)

        monkeypatch.setattr(FileFetcher, "read", refuse)
        with pytest.raises(ReadError, match="broken store"):
            list(loader)


def test_an_epoch_that_is_left_early(path: str) -> None:
    with pario.Loader(path, 32, shuffle="global", options=options(pario.Tier("memory"))) as loader:
        for _ in range(3):
            next(iter(loader))
        check_epoch(loader)


def test_the_state_of_a_loader_with_tiers(path: str) -> None:
    with pario.Loader(path, 32, shuffle="block", options=options(pario.Tier("memory"))) as loader:
        begun = iter(loader)
        ids = [next(begun).ids for _ in range(7)]
        state = loader.state_dict()
    with pario.Loader(path, 32, shuffle="block", options=options()) as loader:
        loader.load_state_dict(state)
        rest = [batch.ids for batch in loader]
    assert sorted(np.concatenate(ids + rest).tolist()) == list(range(N))


# -- which tiers ---------------------------------------------------------------------------------------------------


def test_the_environment_names_tiers(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARIO_TIERS", f"memory:8MiB,{tmp_path}:64MiB")
    small = pario.Options(slot_bytes=256 << 10)
    with pario.Loader(path, 32, options=small) as loader:
        check_epoch(loader)
        assert [tier["name"] for tier in loader.stats()["tiers"]] == ["memory", str(tmp_path)]
    with pario.Loader(path, 32, options=pario.Options(tiers=())) as loader:
        assert "tiers" not in loader.stats(), "the options win"
    monkeypatch.setenv("PARIO_TIERS", "memory:much")
    with pytest.raises(OptionError, match=r"PARIO_TIERS='memory:much'.*no size: 'much'"):
        pario.Loader(path, 32, options=small)


@pytest.mark.parametrize(
    ("text", "quota"),
    [("64 GiB", 64 << 30), ("400GB", 400 * 10**9), ("1.5kB", 1500), ("2K", 2000), ("12", 12), ("auto", "auto")],
)
def test_sizes(text: str, quota: int | str) -> None:
    assert pario.Tier("memory", text).quota_bytes == (None if quota == "auto" else quota)


@pytest.mark.parametrize("quota", ["", "-1", "0", "many", 0, -5, 1.5, None, True, "1 QB", "1e9"])
def test_what_is_no_size(quota: Any) -> None:
    with pytest.raises(OptionError, match="no size"):
        pario.Tier("/x", quota)


def test_names_of_tiers() -> None:
    assert read_tiers("memory, /a/b:1GiB ,/c") == (
        pario.Tier("memory"),
        pario.Tier("/a/b", "1GiB"),
        pario.Tier("/c"),
    )
    assert read_tiers("") == ()
    assert pario.Tier("~/x").where == os.path.expanduser("~/x")
    for wrong in (5, "", None):
        with pytest.raises(OptionError, match="folder"):
            pario.Tier(wrong)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"pario\.Tier"):
        pario.Options(tiers=("memory",))  # type: ignore[arg-type]


def test_tiers_that_cannot_be_meant(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*tiers: pario.Tier) -> pytest.ExceptionInfo[OptionError]:
        with pytest.raises(OptionError) as caught:
            pario.Loader(path, 32, options=options(*tiers))
        return caught

    assert refused(pario.Tier("memory", "512 KiB")).match("does not hold one chunk")
    assert refused(pario.Tier(str(tmp_path), 1000)).match("does not hold one chunk")
    assert refused(pario.Tier(str(tmp_path / "a")), pario.Tier(str(tmp_path / "b"))).match(
        "two tiers are on one device"
    )
    assert refused(pario.Tier("memory"), pario.Tier("memory")).match("at most one of memory")
    assert refused(pario.Tier(str(tmp_path)), pario.Tier("memory")).match("from the nearest on")
    monkeypatch.setattr("pario.machine._KINDS", {**pario.machine._KINDS, "ext4": "network", "overlay": "network"})
    if pario.machine.file_system(str(tmp_path)).shared:
        assert refused(pario.Tier(str(tmp_path))).match("other nodes share")
        with pario.Loader(path, 32, options=options(pario.Tier(str(tmp_path), force=True))) as loader:
            check_epoch(loader)


def test_a_tier_that_its_storage_refuses(path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pario.Loader(path, 32, options=options(pario.Tier(str(tmp_path / "file" / "x")))) as loader:
        check_epoch(loader)
        assert "tiers" not in loader.stats()
    assert "is left out" in caplog.text


def test_too_little_memory_for_an_automatic_tier(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pario.dataset.tiers.automatic_bytes", lambda: 0)
    with pario.Loader(path, 32, options=options(pario.Tier("memory"))) as loader:
        check_epoch(loader)
        assert "tiers" not in loader.stats()
    assert "no memory tier" in caplog.text


def test_nothing_is_left(path: str) -> None:
    def memories() -> int:
        """Bytes in memory tiers, but for a page of states each; garbage may still refer to their files."""
        total = 0
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if "memfd:pario-data" in os.readlink(f"/proc/self/fd/{name}"):
                    total += max(0, 512 * os.stat(f"/proc/self/fd/{name}").st_blocks - mmap.PAGESIZE)
        return total

    gc.collect()
    before = memories()  # of other tests
    with pario.Loader(path, 32, options=options(pario.Tier("memory"))) as loader:
        check_epoch(loader)
        assert memories() > before + 1e6
    assert memories() == before
    with pytest.raises(OptionError, match="drop_last"):
        pario.Loader(path, N + 1, drop_last=True, options=options(pario.Tier("memory")))
    assert memories() == before
