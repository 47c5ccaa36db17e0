"""Jobs that share a service. The oracle is what was written, and what was read from the one store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

import pario
import pario.lmdb
from pario.cli import main
from pario.comm.solo import Solo
from pario.dataset import host as host_module
from pario.dataset.host import Host
from pario.errors import OptionError, ParioError, ReadError
from pario.fetch.file import FileFetcher
from pario.machine import boot
from pario.tiers import asking, service
from pario.tiers.asking import CHUNK_BYTES, LOCK, WHERE, packed, read_servers, unpacked, written
from pario.tiers.disk_files import is_used
from pario.tiers.peers import OPEN, ROOM, Servers
from pario.wire.client import Address, Client

N = 1500
MiB = 1 << 20


def value(i: int) -> bytes:
    return np.random.default_rng(i).bytes(100 + (i * 611) % 6000)


def make(where: Path, n: int = N) -> str:
    with lmdb.open(os.fspath(where), map_size=1 << 26) as env, env.begin(write=True) as txn:
        for i in np.random.default_rng(0).permutation(n).tolist():
            txn.put(b"%06d" % i, value(i))
    with pario.Reader(where):
        pass  # saves the index
    return os.fspath(where)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make(tmp_path_factory.mktemp("data") / "x.lmdb")


@pytest.fixture
def store_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all reads of data from here on."""
    seen: list[int] = []
    read = FileFetcher.read

    def counting(self: FileFetcher, reads: np.ndarray, out: np.ndarray, starts: np.ndarray) -> None:
        seen.extend(reads["nbytes"].tolist())
        read(self, reads, out, starts)

    monkeypatch.setattr(FileFetcher, "read", counting)
    return seen


Start = Callable[..., Host]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a service for this process's jobs."""
    monkeypatch.setattr(asking, "START_S", 0.3)
    monkeypatch.setattr(asking, "_missed", {})
    hosts: list[Host] = []

    def begin(*tiers: pario.Tier, name: str = "service") -> Host:
        folder = str(tmp_path / name)
        monkeypatch.setenv("PARIO_SERVICE", folder)
        hosts.append(Host(folder, pario.Options(tiers=tiers or (pario.Tier("memory"),)), Solo()))
        return hosts[-1]

    yield begin
    for host in hosts:
        host.close()


def check_epoch(loader: pario.Loader, n: int = N) -> None:
    seen = []
    for batch in loader:
        for i, (a, b) in zip(batch.ids.tolist(), pairwise(batch["offsets"].tolist()), strict=True):
            assert batch["data"][a:b].tobytes() == value(i)
            seen.append(i)
    assert sorted(seen) == list(range(n))


def options(**more: object) -> pario.Options:
    return pario.Options(slot_bytes=256 << 10, block_bytes=64 << 10, mix_blocks=4, **more)  # type: ignore[arg-type]


def look(path: str, **more: object) -> bytes:
    """A request for a dataset."""
    return packed({"path": path, "identity": "00" * 32, "file_bytes": 1 << 20, **more})


def job(path: str, shuffle: object = "global", epochs: int = 2, n: int = N) -> dict[str, object]:
    """What a job says of itself; it has checked its records."""
    with pario.Loader(path, 32, shuffle=shuffle, options=options()) as loader:
        for _ in range(epochs):
            check_epoch(loader, n)
        return loader.stats()


@pytest.mark.parametrize(
    ("shuffle", "where"),
    [
        *((False, "memory"), ("global", "memory"), ("block", "a part in memory")),
        *(("global", "a part in memory, the rest on disk"), ("block", "disk")),
    ],
)
def test_one_job_after_another_reads_the_store_once(
    path: str, tmp_path: Path, store_bytes: list[int], start: Start, shuffle: object, where: str
) -> None:
    tiers = [pario.Tier("memory", "2 MiB" if "part" in where else "auto")] if "memory" in where else []
    if "disk" in where:
        tiers.append(pario.Tier(str(tmp_path / "disk"), "1 GiB"))
    host = start(*tiers)
    size = os.path.getsize(os.path.join(path, "data.mdb"))
    stats = job(path, shuffle)
    assert stats["tiers"] == [] if where == "disk" else [t["name"] for t in stats["tiers"]] == ["service"]  # type: ignore[attr-defined]
    if where != "a part in memory":
        assert sum(n for n in store_bytes if n > 8192) <= 1.02 * size
        assert stats["store_bytes"] == 0
        assert [each["store_bytes"] for each in host.state()] == [pytest.approx(size, rel=0.02)]
    store_bytes.clear()
    for _ in range(2):
        job(path, shuffle)
    if where == "a part in memory":
        assert 0 < sum(store_bytes) < 4 * size
    else:
        # Of leaf pages drawn at random, for the index, neighbours are one read: of three pages now and then.
        assert sum(store_bytes) < CHUNK_BYTES


def test_two_jobs_at_the_same_time(path: str, store_bytes: list[int], start: Start) -> None:
    start()
    wrong: list[BaseException] = []

    def run(shuffle: object) -> None:
        try:
            job(path, shuffle)
        except BaseException as e:
            wrong.append(e)

    jobs = [threading.Thread(target=run, args=(shuffle,)) for shuffle in (False, "global", "block")]
    for each in jobs:
        each.start()
    for each in jobs:
        each.join(60)
    assert not wrong
    assert sum(n for n in store_bytes if n > 8192) <= 1.02 * os.path.getsize(os.path.join(path, "data.mdb"))


def test_without_a_service_a_job_warns_and_uses_its_own_tiers(
    path: str, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start().close()
    monkeypatch.setenv("PARIO_TIERS", "memory:auto")
    stats = job(path)
    assert [tier["name"] for tier in stats["tiers"]] == ["memory"]  # type: ignore[attr-defined]
    assert "no service runs there" in caplog.text


def test_tiers_of_its_own_let_a_job_do_without_the_service(path: str, tmp_path: Path, start: Start) -> None:
    host = start()
    with pario.Loader(path, 32, options=options(tiers=())) as loader:
        check_epoch(loader)
        assert "tiers" not in loader.stats()
    with pario.Loader(path, 32, options=options(tiers=(pario.Tier("memory"),))) as loader:
        check_epoch(loader)
        assert [tier["name"] for tier in loader.stats()["tiers"]] == ["memory"]
    assert main(["stage", path, "--to", str(tmp_path / "disk")]) == 0
    assert host.state() == []


def test_one_service_per_folder(start: Start) -> None:
    host = start()
    with pytest.raises(ParioError, match="another service of yours"):
        Host(host.folder, pario.Options(tiers=(pario.Tier("memory"),)), Solo())


def test_a_service_that_retires(path: str, start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever has found it goes on, and it leaves alone what another one writes there later."""
    host = start()
    with pario.Loader(path, 32, options=options()) as loader:
        check_epoch(loader)
        host.retire()
        check_epoch(loader)
        assert loader.stats()["store_bytes"] == 0
    job(path, epochs=1)
    assert "no service runs there" in caplog.text
    there = Path(host.folder) / f"pario-{os.geteuid()}" / WHERE
    assert not there.exists()
    there.write_bytes(b"of another one")
    host.close()
    assert there.exists()


def test_a_service_without_tiers(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="needs tiers"):
        Host(str(tmp_path), pario.Options(tiers=()), Solo())


def test_a_folder_that_others_may_write(
    path: str, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start()
    folder = tmp_path / "open"
    (folder / f"pario-{os.geteuid()}").mkdir(parents=True)
    (folder / f"pario-{os.geteuid()}").chmod(0o777)
    monkeypatch.setenv("PARIO_SERVICE", str(folder))
    job(path, epochs=1)
    assert "others may write" in caplog.text


def test_a_file_that_no_service_has_written(
    path: str, tmp_path: Path, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    host = start()
    (Path(host.folder) / f"pario-{os.geteuid()}" / WHERE).write_bytes(b'{"node": 0}')
    job(path, epochs=1)
    assert "not written by a service" in caplog.text


def test_another_dataset_takes_the_memory_of_one_that_nobody_uses(
    path: str, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = make(tmp_path / "y.lmdb")
    host = start(pario.Tier("memory", os.path.getsize(os.path.join(path, "data.mdb")) + MiB))

    def held() -> dict[str, int]:
        return {each["path"].split("/")[-2]: each["held_bytes"] for each in host.state()}

    job(path, epochs=1)
    job(second, epochs=1)  # the first one was used a moment ago
    assert held()["x.lmdb"] > 4 * MiB
    assert held().get("y.lmdb", 0) <= MiB
    monkeypatch.setattr(host_module, "_USED_S", 0.0)
    third = make(tmp_path / "z.lmdb")
    with pario.Loader(path, 32, options=options()) as loader:  # a job holds it
        job(third, epochs=1)
        assert "x.lmdb" in held()
        check_epoch(loader)
    fourth = make(tmp_path / "w.lmdb")
    job(fourth, epochs=1)
    assert "x.lmdb" not in held()
    assert held()["w.lmdb"] > 4 * MiB
    job(path, epochs=1)  # and comes back
    assert list(held()) == ["x.lmdb"]


def test_a_changed_file_is_another_dataset(tmp_path: Path, start: Start) -> None:
    path, host = make(tmp_path / "x.lmdb", 500), start()
    job(path, n=500)
    with lmdb.open(path, map_size=1 << 26) as env, env.begin(write=True) as txn:
        for i in range(500, 700):
            txn.put(b"%06d" % i, value(i))
    job(path, n=700)
    assert len(host.state()) == 2


def test_a_service_that_sees_another_file(path: str, start: Start) -> None:
    host = start()
    servers = read_servers((Path(host.folder) / f"pario-{os.geteuid()}" / WHERE).read_bytes())
    address = servers.addresses[0]
    assert address is not None
    client = Client(address, servers.secret, 10.0)
    file = os.path.join(path, "data.mdb")
    for body, problem in ((look(file), "another state of the file"), (look(file + "x"), "no such file")):
        found, _ = unpacked(client.call(OPEN, body)[1])
        assert problem in found["problem"]
    wrong = (look(file, identity=3), look(file, identity="zz"), look(file, file_bytes=-1), look(file, file_bytes="x"))
    for body in (b"", b"\xff" * 8, packed({}), *wrong):
        for kind in (OPEN, ROOM):
            with pytest.raises(OSError, match=r"closed|reset"):
                client.call(kind, body)
    client.close()
    job(path)
    assert len(host.state()) == 1


SERVE = [sys.executable, "-m", "pario", "tiers", "serve", "--tiers", "memory:auto"]


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """A service in a process of its own."""
    monkeypatch.setenv("PARIO_SERVICE", str(tmp_path / "service"))
    child = subprocess.Popen(SERVE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def test_the_command(path: str, process: subprocess.Popen[str], store_bytes: list[int]) -> None:
    size = os.path.getsize(os.path.join(path, "data.mdb"))
    for _ in range(2):
        job(path)  # waits until the service has started
    assert sum(store_bytes) < CHUNK_BYTES, "the service has read the file"
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "jobs find it by  export PARIO_SERVICE=" in said
    assert f"{size / 1e6:.1f} MB"[:3] in said.split("read from the store")[0].split(": ")[-1]


@pytest.mark.parametrize(
    ("when", "how"),
    [
        pytest.param("in the first epoch", signal.SIGSTOP, marks=pytest.mark.full),
        ("later", signal.SIGKILL),
        pytest.param("in the first epoch", signal.SIGKILL, marks=pytest.mark.full),
        pytest.param("in the first epoch", signal.SIGTERM, marks=pytest.mark.full),
        pytest.param("later", signal.SIGSTOP, marks=pytest.mark.full),
        pytest.param("later", signal.SIGTERM, marks=pytest.mark.full),
    ],
)
def test_a_service_that_dies(path: str, process: subprocess.Popen[str], how: signal.Signals, when: str) -> None:
    """Every record right, at most ten seconds lost; what was there stays, what was not comes from the store."""
    with pario.Loader(path, 32, shuffle="block", options=options()) as loader:
        if when == "later":
            check_epoch(loader)
        batches = iter(loader)
        next(batches)
        process.send_signal(how)
        begin = time.monotonic()
        for batch in batches:
            for i, (a, b) in zip(batch.ids.tolist(), pairwise(batch["offsets"].tolist()), strict=True):
                assert batch["data"][a:b].tobytes() == value(i)
        check_epoch(loader)
        assert time.monotonic() - begin < 10 + 2
        if when == "later" and how != signal.SIGTERM:  # with which it gives its memory back
            assert loader.stats()["store_bytes"] == 0


@pytest.mark.parametrize(("again", "kept_by"), [(False, "memory"), (True, "service")])
def test_after_its_service_has_gone_a_job_keeps_the_dataset_by_other_means(
    path: str, start: Start, again: bool, kept_by: str
) -> None:
    """From the next epoch on, in memory of its own or of a service that has come since."""
    host = start()
    with pario.Loader(path, 32, shuffle="global", options=options()) as loader:
        check_epoch(loader)
        assert [tier["name"] for tier in loader.stats()["tiers"]] == ["service"]
        host.close()
        for tier in loader._life.reader.stage.tiers:  # type: ignore[union-attr]  # what its end gives back
            assert not tier.held().any()
        if again:
            start()
        for _ in range(2):
            check_epoch(loader)
        assert [tier["name"] for tier in loader.stats()["tiers"]] == [kept_by]
        assert loader.stats()["tiers"][0]["held_bytes"] > 0


def test_nobody_waits_for_the_word_of_a_service_that_has_died(
    path: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says for ever that chunks are on their way, and brings none."""
    host = start()

    def promise(dataset: Any) -> None:
        dataset.stage.memory.announce(True)

    monkeypatch.setattr(host, "_fill", promise)
    with pario.lmdb.open(path, readonly=True, lock=False), pario.Loader(path, 32, options=options()) as loader:
        assert host._service is not None
        host._service.close()
        check_epoch(loader)
        assert loader.stats()["store_bytes"] > 0


def test_while_a_dataset_is_being_opened_others_are_served(
    path: str, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those who want to open it wait for longer than requests may be old."""
    monkeypatch.setattr(service, "LIMIT_S", 0.4)
    second, host = make(tmp_path / "y.lmdb"), start(pario.Tier("memory", "64 MiB"))
    job(path)
    open_now, go_on = Host._open, threading.Event()

    def slowly(self: Host, asked: Any) -> Any:
        go_on.wait(20)
        return open_now(self, asked)

    monkeypatch.setattr(Host, "_open", slowly)
    found: list[int] = []

    def reads() -> None:
        with pario.lmdb.open(second, readonly=True, lock=False) as env, env.begin() as txn:
            found.append(txn.get(b"%06d" % 3) == value(3))

    others = [threading.Thread(target=reads) for _ in range(20)]
    for each in others:
        each.start()
    for _ in range(2):
        assert job(path)["store_bytes"] == 0
    time.sleep(0.5)
    assert not found
    go_on.set()
    for each in others:
        each.join(30)
    assert found == [True] * 20
    assert len(host.state()) == 2
    assert asking._missed == {}


def test_what_could_not_be_brought_is_tried_again(path: str, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    host, read = start(), FileFetcher.read

    def refuse(*_: object) -> None:
        raise ReadError("no", path=path)

    monkeypatch.setattr(FileFetcher, "read", refuse)
    for held in (0, os.path.getsize(os.path.join(path, "data.mdb"))):
        with pario.lmdb.open(path, readonly=True, lock=False):
            (dataset,) = host._open_now()
            assert dataset.filler is not None
            end = time.monotonic() + 20
            while not dataset.filler.is_over:
                assert time.monotonic() < end
                time.sleep(0.01)
        assert host.state()[0]["held_bytes"] >= held
        assert held or host.state()[0]["held_bytes"] == 0
        monkeypatch.setattr(FileFetcher, "read", read)


def test_a_service_that_does_not_come_is_waited_for_once(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "START_S", 1.0)
    monkeypatch.setenv("PARIO_SERVICE", str(tmp_path / "nobody"))
    begin = time.monotonic()
    for _ in range(8):
        with pario.lmdb.open(path, readonly=True, lock=False):
            pass
    assert 1.0 <= time.monotonic() - begin < 4.0


def test_what_is_written_is_read() -> None:
    servers = Servers(1, [Address("m", "l", ("h",), 5), Address(boot(), "k", (), 0)], b"s" * 32)
    assert read_servers(written(servers)) == servers
    with pytest.raises(ValueError, match="another machine"):
        read_servers(written(servers._replace(node=0)))
    for text in (b"", b"[]", b"{}", b'{"node": 0, "addresses": [[1]], "secret": "00"}'):
        with pytest.raises(ValueError):
            read_servers(text)


@pytest.mark.full
def test_a_lease_ends_with_its_process(path: str, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    host = start()
    code = (
        "import sys, os, signal, pario; l = pario.Loader(sys.argv[1], 32); next(iter(l)); print(1, flush=True); input()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "1\n"
    lock = os.open(Path(host.folder) / f"pario-{os.geteuid()}" / LOCK, os.O_RDWR)
    (dataset,) = host._open_now()
    assert is_used(lock, byte=dataset.slot)
    child.kill()
    child.communicate()
    assert not is_used(lock, byte=dataset.slot)
    os.close(lock)
