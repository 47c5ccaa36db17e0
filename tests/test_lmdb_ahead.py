"""Announced records. The oracle for what a record is: how it was made. The oracle for where `get` found it: the file's
values are wiped after they were brought, so only those in memory are still right."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import get_context, spawn
from pathlib import Path

import lmdb
import numpy as np
import pytest
from test_lmdb_served import serve  # noqa: F401

import pario.lmdb
from pario import machine
from pario.dataset.host import Host
from pario.lmdb import native, stock, told
from pario.lmdb.ahead import Ahead
from pario.lmdb.stock import Pages
from pario.lmdb.store import DataFile
from pario.lmdb.told import ToldMemory

native.compile_now()

N = 200
HEADER = 16


def value(i: int) -> bytes:
    return np.random.default_rng(i).bytes(3000 + (i * 611) % 20000)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("ahead") / "x.lmdb")
    with lmdb.open(folder, map_size=1 << 26, max_dbs=1) as env:
        other = env.open_db(b"other")
        with env.begin(write=True) as txn:
            for i in np.random.default_rng(0).permutation(N).tolist():
                txn.put(b"%06d" % i, value(i), db=other if i % 2 else None)
    return folder


@pytest.fixture(scope="module", autouse=True)
def compiled(path: str) -> None:
    """What threads call, before somebody waits for them: compiling takes longer than that."""
    with pario.lmdb.open(path, readonly=True, lock=False) as env:
        txn = env.begin()
        assert txn.get(key(2)) == value(2)
        assert len(txn.cursor().getmulti([key(2), key(4)])) == 2


@pytest.fixture
def own(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A copy that a test may wipe; its values do not count as cached."""
    monkeypatch.setattr(DataFile, "cached_share", lambda *_: None)
    shutil.copytree(path, tmp_path / "own")
    return str(tmp_path / "own")


@pytest.fixture
def env(own: str) -> Iterator[pario.lmdb.Environment]:
    with pario.lmdb.open(own, readonly=True, lock=False) as opened:
        yield opened


def key(i: int) -> bytes:
    return b"%06d" % i


_STARTED = ["spawn", "forkserver"]
EVEN = list(range(0, N, 2))


def runs(path: str, ids: list[int]) -> list[tuple[int, int]]:
    content = Path(path, "data.mdb").read_bytes()
    return [(content.index(value(i)) - HEADER, HEADER + len(value(i))) for i in ids]


def wipe(path: str, ids: list[int]) -> None:
    """As a failing disk would, so that the file still counts as the same."""
    data = os.path.join(path, "data.mdb")
    status = os.stat(data)
    with open(data, "r+b") as file:
        for offset, nbytes in runs(path, ids):
            file.seek(offset)
            file.write(bytes(nbytes))
    os.utime(data, ns=(status.st_atime_ns, status.st_mtime_ns))


def until(what: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not what():
        assert time.monotonic() < end
        time.sleep(0.001)


def reader_of(env: pario.lmdb.Environment) -> Ahead:
    assert env._announced is not None
    assert env._announced.ahead is not None
    return env._announced.ahead


def brought(env: pario.lmdb.Environment, ids: list[int]) -> Ahead:
    """Announce, and wait until they are in memory."""
    env.will_read(())
    ahead = reader_of(env)
    before = ahead.counts["brought"]
    env.will_read(key(i) for i in ids)
    until(lambda: ahead.counts["brought"] == before + len(ids))
    return ahead


def held(ahead: Ahead) -> int:
    """Bytes of memory that the system has given."""
    return os.fstat(ahead.memory.data).st_blocks * 512


def test_what_was_announced_comes_out_of_memory_once(env: pario.lmdb.Environment, own: str) -> None:
    brought(env, [2, 4])
    wipe(own, [2, 4, 6])
    txn = env.begin()
    assert [txn.get(key(2)), txn.get(key(4))] == [value(2), value(4)]
    until(lambda: _raises(lambda: txn.get(key(2))))
    with pytest.raises(lmdb.Error):
        txn.get(key(6))


def _raises(call: Callable[[], object]) -> bool:
    """What was read is let go when the thread looks, at the latest when something else is announced."""
    try:
        call()
    except lmdb.Error:
        return True
    return False


def test_as_often_as_announced(env: pario.lmdb.Environment, own: str) -> None:
    ahead = brought(env, [2])
    env.will_read([key(2), key(2)])
    until(lambda: not ahead._turns and not ahead._groups and not ahead._looking)
    wipe(own, [2])
    for _ in range(3):
        assert env.begin().get(key(2)) == value(2)
    brought(env, [4])  # a look at what was read
    until(lambda: len(ahead._here) == 1)
    with pytest.raises(lmdb.Error):
        env.begin().get(key(2))


def test_several_at_once_and_cursors(env: pario.lmdb.Environment, own: str) -> None:
    brought(env, [2, 4, 6, 8, 10])
    wipe(own, [2, 4, 6, 8])
    txn = env.begin()
    assert dict(txn.cursor().getmulti([key(2), key(10), key(12), key(4)])) == {key(i): value(i) for i in (2, 4, 10, 12)}
    cursor = txn.cursor()
    assert cursor.set_key(key(6))
    assert cursor.value() == value(6)
    assert txn.get(key(8)) == value(8)


def test_values_are_read_in_the_order_of_the_keys(env: pario.lmdb.Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    order = np.random.default_rng(1).permutation(EVEN).tolist()
    read: list[int] = []
    submit = Ahead._read
    monkeypatch.setattr(Ahead, "_read", lambda self, one: (read.append(one.offset), submit(self, one))[1])
    env.will_read(key(i) for i in order)
    txn = env.begin()
    for i in order:
        assert txn.get(key(i)) == value(i)
    places = dict(zip([offset for offset, _ in runs(env.path(), EVEN)], EVEN, strict=True))
    turns = [order.index(places[offset]) for offset in read]
    assert turns == sorted(set(turns))


def test_epoch_after_epoch(env: pario.lmdb.Environment) -> None:
    txn = env.begin()
    for epoch in range(4):
        order = np.random.default_rng(epoch).permutation(EVEN).tolist()
        env.will_read(key(i) for i in order)
        for i in order:
            assert txn.get(key(i)) == value(i)
    ahead = reader_of(env)
    until(lambda: ahead._blocked or not (ahead._turns or ahead._coming))
    assert ahead.counts["refused"] == 0
    assert held(ahead) <= 4096 * len(ahead._pages) + sum(4096 + one.nbytes for one in ahead._here.values())
    assert len(ahead._here) <= ahead._stock.size


def test_another_order_than_announced(env: pario.lmdb.Environment) -> None:
    env.will_read(key(i) for i in EVEN)
    ahead = reader_of(env)
    until(lambda: ahead._blocked)
    txn = env.begin()

    def none_is_waited_for() -> bool:
        assert all(txn.get(key(i)) == value(i) for i in reversed(EVEN))
        return not ahead._turns

    until(none_is_waited_for)


def test_what_nobody_reads_makes_room(env: pario.lmdb.Environment, own: str) -> None:
    env.will_read(key(i) for i in EVEN[:50])  # by one who dies
    ahead = reader_of(env)
    until(lambda: ahead._blocked)
    first = set(ahead._here)
    env.will_read(key(i) for i in EVEN[50:])
    txn = env.begin()

    def have_gone() -> bool:
        assert all(txn.get(key(i)) == value(i) for i in EVEN[50:])
        return not first & set(ahead._here)

    until(have_gone)
    assert ahead.counts["forgotten"] >= len(first)


def test_within_its_budget(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = 30_000  # a few values
    monkeypatch.setattr(machine, "memory", lambda **_: (1 << 40, 4 * budget))
    most: list[int] = []
    read = Ahead._read
    monkeypatch.setattr(Ahead, "_read", lambda self, one: (read(self, one), most.append(self.held_bytes))[0])
    with pario.lmdb.open(own, readonly=True, lock=False) as env:
        env.will_read(key(i) for i in EVEN)
        until(lambda: reader_of(env)._blocked)
        txn = env.begin()
        for i in EVEN:
            assert txn.get(key(i)) == value(i)
    assert most
    assert max(most) <= budget


def test_a_read_that_hangs_is_not_waited_for(env: pario.lmdb.Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def stuck(*_: object) -> None:
        begun.set()
        assert goes_on.wait(20)

    monkeypatch.setattr(DataFile, "read", stuck)
    env.will_read([key(2)])
    assert begun.wait(20)
    assert env.begin().get(key(2)) == value(2)
    assert reader_of(env).memory.words[told.MISSED] == 1
    goes_on.set()


def test_a_failed_read_is_met_by_whoever_asks(env: pario.lmdb.Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise pario.ReadError("no", path="x")

    monkeypatch.setattr(DataFile, "read", refused)
    env.will_read([key(2)])
    ahead = reader_of(env)
    until(lambda: ahead.counts["refused"])
    assert env.begin().get(key(2)) == value(2)
    assert ahead.held_bytes == 0


@pytest.mark.parametrize("keys", [["text"], [b"000000", 7], [b""], [b"nothing"]])
def test_what_is_wrong_with_a_key_is_told_to_whoever_reads_it(env: pario.lmdb.Environment, keys: list[object]) -> None:
    env.will_read(keys)
    ahead = reader_of(env)
    env.will_read([bytearray(key(2)), memoryview(key(4))])
    until(lambda: {offset for offset, _ in runs(env.path(), [2, 4])} <= set(ahead._here))


def test_pages_that_nobody_takes_do_not_hold_up_look_ups(
    env: pario.lmdb.Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stock, "_MOST_PAGES", 1)
    env.will_read(key(i) for i in EVEN)
    ahead = reader_of(env)
    until(lambda: len(ahead._values) == len(EVEN))
    assert len(ahead._pages) == 1


def test_pages_with_records_do_until_they_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock, "_MOST_PAGES", 4)
    memory = ToldMemory.made()
    pages = Pages(memory)
    for page in range(4):
        assert pages.has_room()
        pages.keep(page, b"page", 0, True)
    assert not pages.has_room()
    memory.words[pages._pages[0][0] + told.TAKEN] += 1
    assert pages.has_room()
    pages.keep(4, b"page", 0, False)
    assert not pages.has_room()
    for page in (5, 6):
        pages.keep(page, b"page", 0, False)
    assert pages.has_room()


def test_a_refused_thread_keeps_no_later_key_back(env: pario.lmdb.Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise pario.ParioError("no thread")

    env.will_read(())
    ahead = reader_of(env)
    with monkeypatch.context() as patch:
        patch.setattr(ahead._lookers, "put", refused)
        with pytest.raises(pario.ParioError, match="no thread"):
            env.will_read([key(2)])
    env.will_read([key(4)])
    until(lambda: ahead.counts["brought"] == 2)


def test_keys_of_a_named_database(own: str) -> None:
    with pario.lmdb.open(own, readonly=True, lock=False, max_dbs=1) as env:
        db = env.open_db(b"other")
        env.will_read([key(1), key(3)], db)
        ahead = reader_of(env)
        until(lambda: ahead.counts["brought"] == 2)
        wipe(own, [1, 3])
        assert env.begin(db=db).get(key(1)) == value(1)


def test_what_is_in_the_page_cache_is_left_there(path: str) -> None:
    with pario.lmdb.open(path, readonly=True, lock=False) as env:
        env.will_read([key(2), key(4)])
        ahead = reader_of(env)
        until(lambda: sum(ahead.counts.values()) == 2)
        assert env.begin().get(key(2)) == value(2)


def test_a_new_state_of_the_file(env: pario.lmdb.Environment, own: str) -> None:
    brought(env, [2])
    with lmdb.open(own, map_size=1 << 26) as writer, writer.begin(write=True) as txn:
        txn.put(key(2), value(3))
    assert env.begin().get(key(2)) == value(3)
    brought(env, [2])
    assert env.begin().get(key(2)) == value(3)


def test_it_ends_with_the_environment(own: str) -> None:
    env = pario.lmdb.open(own, readonly=True, lock=False)
    ahead = brought(env, [2, 4])
    assert held(ahead) > 0
    env.close()
    with pytest.raises(lmdb.Error):
        env.will_read([b"000000"])
    assert held(ahead) == 0
    names = ("pario-announced", "pario-told", "pario-look")
    until(lambda: not any(t.name.startswith(names) for t in threading.enumerate()))


def _child(path: str, ids: list[int], answers: object, dies: bool) -> None:
    env = pario.lmdb.open(path, readonly=True, lock=False)
    with env.begin() as txn:
        answers.put([txn.get(key(i)) for i in ids])  # type: ignore[attr-defined]
    env.close()
    if dies:
        answers.close()  # type: ignore[attr-defined]
        answers.join_thread()  # type: ignore[attr-defined]
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("how", ["fork", *(pytest.param(how, marks=pytest.mark.full) for how in _STARTED)])
def test_workers_find_it_and_one_that_dies_takes_nothing_along(env: pario.lmdb.Environment, own: str, how: str) -> None:
    ahead = brought(env, [2, 4, 6, 8])
    wipe(own, [2, 4, 6, 8])
    context = get_context(how)
    for ids, dies in (([2, 4], True), ([6], False)):
        answers = context.Queue()
        child = context.Process(target=_child, args=(own, ids, answers, dies))
        child.start()
        assert answers.get(timeout=60) == [value(i) for i in ids]
        child.join(30)
        assert child.exitcode == (-signal.SIGKILL if dies else 0)
    assert env.begin().get(key(8)) == value(8)
    brought(env, [10])
    until(lambda: len(ahead._here) == 1)


def test_environments_that_were_open_before_hear_of_it(env: pario.lmdb.Environment, own: str) -> None:
    with pario.lmdb.open(own, readonly=True, lock=False) as other:
        other.begin()
        brought(env, [2])
        wipe(own, [2])
        assert other.begin().get(key(2)) == value(2)


def test_environments_of_one_file_bring_into_one_memory(own: str) -> None:
    with pario.lmdb.open(own, readonly=True, lock=False) as env:
        store = env.begin()._store
        for ids in ([2], [4]):
            with pario.lmdb.open(own, readonly=True, lock=False) as other:
                brought(other, ids)
                assert other.begin().get(key(ids[0])) == value(ids[0])
            env.begin()
        brought(env, [6, 8])
        other = pario.lmdb.open(own, readonly=True, lock=False)
        brought(other, [10])
        wipe(own, [6, 8, 10])
        assert other.begin().get(key(10)) == value(10)
        assert env.begin().get(key(6)) == value(6)
        other.close()
        assert env.begin().get(key(8)) == value(8)
        ahead = brought(env, [12])
        assert len(store._announced) == 1
    assert held(ahead) == 0


def test_a_store_that_changes_to_another_memory_in_the_middle_of_a_read(env: pario.lmdb.Environment) -> None:
    txn = env.begin()
    assert txn.get(key(2)) == value(2)
    (offset, nbytes), store = runs(env.path(), [2])[0], txn._store
    right = np.frombuffer(Path(env.path(), "data.mdb").read_bytes()[offset : offset + nbytes], np.uint8)
    wrong = right.copy()
    wrong[HEADER:] += 1
    before, after = ToldMemory.made(), ToldMemory.made()
    slot = before.add(offset // store.snapshot.page_size)
    before.words[slot + told.NBYTES], before.words[told.PATIENCE] = nbytes, 20_000_000
    before.use(slot, told.COMING)
    store.read_announced(before)
    found: list[object] = []
    reader = threading.Thread(target=lambda: found.append(txn.get(key(2))))
    reader.start()
    until(lambda: before.words[told.ASKED])  # then it waits for the value
    store.read_announced(after)
    after.put(after.add(0), wrong)
    before.put(slot, right)
    reader.join(20)
    assert found == [value(2)]


def test_a_table_that_may_be_cut_off_is_refused_and_closed_once(tmp_path: Path) -> None:
    paths = str(tmp_path / "data"), str(tmp_path / "table")
    for path in paths:
        Path(path).write_bytes(bytes(10))
    table = os.memfd_create("told", os.MFD_ALLOW_SEALING)
    for attempt in (paths, (paths[0], f"/proc/{os.getpid()}/fd/{table}")):
        files = os.open(attempt[0], os.O_RDWR), os.open(attempt[1], os.O_RDWR)
        with suppress(pario.ParioError, OSError):
            ToldMemory(files)
            pytest.fail("not refused")
        for fd in files:
            os.close(fd)  # still ours
        with suppress(pario.ParioError, OSError):
            ToldMemory.attached(attempt)
        assert paths[0] not in [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    os.close(table)


def test_a_child_need_not_find_pario_before_it_is_prepared(env: pario.lmdb.Environment) -> None:
    paths = brought(env, [2]).memory.paths
    code = (
        "import pickle, sys\n"
        "pickle.load(sys.stdin.buffer)\n"
        "assert 'pario' not in sys.modules\n"
        "from multiprocessing.process import BaseProcess\n"
        "print(list(BaseProcess._told_by_pario['announced'].values()))\n"
    )
    told_first = spawn.get_preparation_data("child")
    del told_first["authkey"]  # a secret, which is pickled for real children only
    data = pickle.dumps(told_first)
    child = subprocess.run([sys.executable, "-I", "-S", "-c", code], input=data, capture_output=True, check=True)
    assert child.stdout.decode().strip() == str([paths])


def test_the_interpreter_ends_while_a_thread_holds_the_lock(own: str) -> None:
    """A read that ends when the interpreter does: its thread never runs again, and what it holds is never released."""
    code = (
        "import gc, sys, threading, time\n"
        "import pario.lmdb\n"
        "gc.disable()\n"  # what is left over goes when the interpreter ends
        "def hold(lock, held):\n"
        "    with lock:\n"
        "        held.set()\n"
        "        time.sleep(60)\n"
        "def main():\n"
        "    env = pario.lmdb.open(sys.argv[1], readonly=True, lock=False)\n"
        "    env.will_read([b'000002'])\n"
        "    ahead, held = env._announced.ahead, threading.Event()\n"
        "    env.close()\n"
        "    for thread in threading.enumerate():\n"  # those that refer to it
        "        if thread.name.startswith('pario'):\n"
        "            thread.join(10)\n"
        "    threading.Thread(target=hold, args=(ahead._news, held), daemon=True).start()\n"
        "    held.wait()\n"
        "main()\n"
    )
    subprocess.run([sys.executable, "-c", code, own], check=True, timeout=30)


def _announces(env: pario.lmdb.Environment, answers: object) -> None:
    brought(env, [4])
    wipe(env.path(), [4])
    answers.put(env.begin().get(key(4)))  # type: ignore[attr-defined]


def test_a_forked_child_may_announce_itself(env: pario.lmdb.Environment) -> None:
    brought(env, [2])
    context = get_context("fork")
    answers = context.Queue()
    child = context.Process(target=_announces, args=(env, answers))
    child.start()
    assert answers.get(timeout=30) == value(4)
    child.join(30)
    assert child.exitcode == 0
    wipe(env.path(), [2])
    assert env.begin().get(key(2)) == value(2)


def test_the_service_brings_what_was_announced_first(
    path: str, serve: Callable[..., Host], monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    monkeypatch.setattr(Host, "_fill", lambda *_: None)  # which would bring all of it
    host = serve()
    with pario.lmdb.open(path, readonly=True, lock=False) as env:
        tier = env.begin()._store.copy
        assert tier is not None
        assert not tier.held().any()
        env.will_read([b"000010"])
        offset, nbytes = runs(path, [10])[0]
        wanted = tier.grid.chunks_at(np.array([offset]), np.array([nbytes])).tolist()
        end = time.monotonic() + 20
        while not tier.held()[wanted].all() and time.monotonic() < end:
            time.sleep(0.005)
        assert np.flatnonzero(tier.held()).tolist() == wanted
        with open(os.path.join(path, "data.mdb"), "rb") as file:
            file.seek(offset + HEADER)
            assert tier.view[offset + HEADER : offset + nbytes].tobytes() == file.read(nbytes - HEADER) == value(10)
    assert host.state()
