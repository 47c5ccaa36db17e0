"""The drop-in through a service of the node. The oracle is what was written, and a file that is overwritten where the
copy has it: whoever read the file would see that."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import lmdb
import numpy as np
import pytest
from tiers import brought

import pario
import pario.lmdb
from pario.comm.solo import Solo
from pario.dataset.host import Host
from pario.tiers import asking

N = 400


def value(i: int) -> bytes:
    """Short ones lie in the leaves, long ones on pages of their own."""
    return np.random.default_rng(i).bytes(100 + (i * 611) % 20000)


def make(where: Path) -> str:
    with lmdb.open(os.fspath(where), map_size=1 << 26) as env, env.begin(write=True) as txn:
        for i in range(N):
            txn.put(b"%06d" % i, value(i))
    return os.fspath(where)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return make(tmp_path / "x.lmdb")


Serve = Callable[..., Host]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Starts the service for this process."""
    hosts: list[Host] = []

    def start(quota: object = "auto") -> Host:
        monkeypatch.setenv("PARIO_SERVICE", str(tmp_path / "service"))
        tiers = (pario.Tier("memory", quota),)  # type: ignore[arg-type]
        hosts.append(Host(str(tmp_path / "service"), pario.Options(tiers=tiers), Solo()))
        return hosts[-1]

    yield start
    for host in hosts:
        host.close()


def wait_until_whole(host: Host) -> None:
    end = time.monotonic() + 20
    while not all(each["held_bytes"] >= each["file_bytes"] for each in host.state()):
        assert time.monotonic() < end
        time.sleep(0.01)


def overwrite(path: str) -> None:
    """All bytes but those of the meta pages."""
    file = Path(path, "data.mdb")
    with open(file, "r+b") as data:
        data.seek(8192)
        data.write(b"\xee" * (file.stat().st_size - 8192))


def read_all(path: str) -> bool:
    """By keys, many at once, and by a cursor."""
    with pario.lmdb.open(path, readonly=True, lock=False) as env, env.begin() as txn:
        return reads_right(txn)


def reads_right(txn: pario.lmdb.Transaction) -> bool:
    order = np.random.default_rng(0).permutation(N).tolist()
    right = all(txn.get(b"%06d" % i) == value(i) for i in order)
    many = dict(txn.cursor().getmulti([b"%06d" % i for i in order]))
    items = list(txn.cursor())
    return right and all(many[b"%06d" % i] == value(i) == items[i][1] for i in range(N)) and len(items) == N


def test_what_the_service_has_is_not_read_from_the_file(path: str, serve: Serve) -> None:
    host = serve()
    with pario.lmdb.open(path, readonly=True, lock=False) as env, env.begin() as txn:
        wait_until_whole(host)
        overwrite(path)
        assert reads_right(txn)
    monkey = pario.lmdb.open(path, readonly=True, lock=False)  # another state of the file, which is damaged
    with monkey, pytest.raises(pario.lmdb.Error), monkey.begin() as txn:
        txn.get(b"%06d" % 7)


def test_before_the_service_has_anything(path: str, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    host = serve()
    monkeypatch.setattr(host, "_fill", lambda dataset: None)
    assert read_all(path)
    assert [each["held_bytes"] for each in host.state()] == [0]


def test_a_part_of_the_file(path: str, serve: Serve) -> None:
    host = serve("2 MiB")
    assert read_all(path)
    assert [each["held_bytes"] for each in host.state()] == [2 << 20]
    assert read_all(path)


def test_memory_that_is_given_back_while_it_is_read(path: str, serve: Serve) -> None:
    """Chunks come and go: what was copied from one that went is read again from the file."""
    host = serve()
    over = threading.Event()
    wrong = []
    with pario.lmdb.open(path, readonly=True, lock=False) as env, env.begin() as txn:
        wait_until_whole(host)
        (dataset,) = host._open_now()
        memory, fetcher = dataset.stage.memory, dataset.stage.fetcher
        assert memory is not None
        assert fetcher is not None

        def come_and_go() -> None:
            for k in range(400):
                chunk = k % memory.grid.chunks
                memory.give_back(chunk)
                brought(fetcher, chunk)
            over.set()

        thread = threading.Thread(target=come_and_go)
        thread.start()
        while not over.is_set():
            wrong += [i for i in range(0, N, 7) if txn.get(b"%06d" % i) != value(i)]
        thread.join()
        assert not wrong


def test_the_service_ends(path: str, serve: Serve) -> None:
    host = serve()
    with pario.lmdb.open(path, readonly=True, lock=False) as env, env.begin() as txn:
        wait_until_whole(host)
        assert reads_right(txn)
        host.close()
        assert reads_right(txn)


def test_new_commits_are_seen(path: str, serve: Serve) -> None:
    host = serve()
    with pario.lmdb.open(path, readonly=True, lock=False) as env:
        wait_until_whole(host)
        with lmdb.open(path, map_size=1 << 26) as writer, writer.begin(write=True) as txn:
            txn.put(b"%06d" % 3, b"new")
        with env.begin() as txn:
            assert txn.get(b"%06d" % 3) == b"new"
            assert txn.get(b"%06d" % 4) == value(4)


def test_no_service(
    path: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(asking, "START_S", 0.1)
    monkeypatch.setenv("PARIO_SERVICE", str(tmp_path / "nowhere"))
    assert read_all(path)
    assert "no service runs there" in caplog.text


def in_another_process(pickled: bytes) -> bool:
    with pickle.loads(pickled) as env, env.begin() as txn:
        return reads_right(txn)


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_workers(path: str, serve: Serve, how: str) -> None:
    """As those of a DataLoader: with an environment of their parent, or pickled."""
    global _env
    host = serve()
    with pario.lmdb.open(path, readonly=True, lock=False) as env:
        wait_until_whole(host)
        if how == "fork":
            _env = env
            overwrite(path)
        with ProcessPoolExecutor(2, mp_context=get_context(how)) as pool:
            if how == "fork":
                assert all(pool.map(of_the_parent, range(4), timeout=60))
            else:
                assert all(pool.map(in_another_process, [pickle.dumps(env)] * 4, timeout=60))


_env: pario.lmdb.Environment


def of_the_parent(_: int) -> bool:
    with _env.begin() as txn:
        return reads_right(txn)
