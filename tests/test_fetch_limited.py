"""What the store is asked for behind a gate: all of it is counted, and nothing comes past it. The oracle counts the
calls of the fetcher below."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from control_plane import SECRET, running, until

import pario
from pario.errors import FileError
from pario.fetch.direct import DirectFetcher
from pario.fetch.file import FileFetcher
from pario.fetch.limited import open_limited
from pario.fetch.posix import PosixFetcher
from pario.options import Recipe
from pario.plane import joining
from pario.plane.agent import Agent
from pario.plane.bucket import BURST_S
from pario.plane.plane import Plane
from pario.plane.rules import Rules
from pario.records import EXTENT

SIZE = 1 << 20
N = 400


class Gate:
    """Notes what is taken."""

    def __init__(self, grain_bytes: int = 1 << 62) -> None:
        self.grain_bytes = grain_bytes
        self.taken: list[tuple[int, int]] = []
        self.held = 0

    def take(self, nbytes: int, operations: int) -> None:
        assert type(nbytes) is int
        self.taken.append((nbytes, operations))

    def hold(self) -> bool:
        self.held += 1
        return True

    def release(self) -> None:
        self.held -= 1


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "f"
    file.write_bytes(np.random.default_rng(0).bytes(SIZE))
    return str(file)


def extents(*pairs: tuple[int, int]) -> np.ndarray:
    return np.array(list(pairs), EXTENT)


def test_without_a_gate_it_is_the_fetcher_itself(path: str) -> None:
    one = open_limited(lambda: PosixFetcher(path), None)
    assert type(one) is PosixFetcher
    one.close()


def test_what_is_counted(path: str) -> None:
    gate = Gate()
    one = open_limited(lambda: PosixFetcher(path), gate)
    assert gate.taken == [(0, 1)], "the open"
    one.pread(0, 100)
    out = np.empty(1000, np.uint8)
    one.read(extents((0, 10), (500, 20), (900, 30)), out, np.array([0, 10, 30]))
    assert not one.is_replaced()
    assert gate.taken[1:] == [(100, 1), (60, 3), (0, 1)]
    one.close()
    one.close()
    assert gate.held == 0


def test_what_is_not_there_costs_three_looks(tmp_path: Path) -> None:
    gate = Gate()
    with pytest.raises(FileError):
        open_limited(lambda: PosixFetcher(str(tmp_path / "none")), gate)
    assert sum(operations for _, operations in gate.taken) == 3
    assert gate.held == 0


@pytest.mark.parametrize("grain", [1, 100, 1000, 5000, 1 << 30])
def test_long_jobs_are_divided(path: str, grain: int) -> None:
    rng = np.random.default_rng(grain)
    sizes = rng.integers(1, 400, 60)
    reads = extents(*zip(rng.integers(0, SIZE - 400, 60).tolist(), sizes.tolist(), strict=True))
    starts = np.cumsum(sizes) - sizes
    gate = Gate(grain)
    one = open_limited(lambda: PosixFetcher(path), gate)
    out = np.empty(int(sizes.sum()), np.uint8)
    one.read(reads, out, starts)
    content = np.fromfile(path, np.uint8)
    wanted = np.concatenate([content[a : a + n] for a, n in reads.tolist()])
    assert np.array_equal(out, wanted)
    taken = gate.taken[1:]
    assert np.sum(taken, axis=0).tolist() == [len(out), 60]
    assert all(nbytes <= grain + 400 for nbytes, _ in taken)
    assert len(taken) <= len(out) // grain + 1
    one.close()


def test_nothing_is_read_past_the_gate(path: str) -> None:
    one = open_limited(lambda: PosixFetcher(path), Gate())
    assert one.limited
    assert not one.read_now(extents((0, 100)), np.empty(100, np.uint8), np.zeros(1, np.int64)).any()
    one.close()


def test_a_dropped_fetcher_lets_the_gate_go(path: str) -> None:
    gate = Gate()
    one = open_limited(lambda: DirectFetcher(path), gate)
    assert gate.held == 1
    del one
    assert gate.held == 0


# -- jobs --------------------------------------------------------------------------------------------------------------


def value(i: int) -> bytes:
    return np.random.default_rng(i).bytes(100 + (i * 611) % 6000)


def check_epoch(loader: pario.Loader) -> None:
    seen = []
    for batch in loader:
        for i, (a, b) in zip(batch.ids.tolist(), pairwise(batch["offsets"].tolist()), strict=True):
            assert batch["data"][a:b].tobytes() == value(i)
            seen.append(i)
    assert sorted(seen) == list(range(N))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("limited") / "x.lmdb")
    with lmdb.open(folder, map_size=1 << 26) as env, env.begin(write=True) as txn:
        for i in range(N):
            txn.put(b"%06d" % i, value(i))
    return folder


@pytest.fixture
def plane(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Plane]:
    """Jobs of this process are to join it."""
    (tmp_path / "token").write_bytes(SECRET)
    (tmp_path / "token").chmod(0o600)
    user = joining.user_name()
    rules = Rules((1e9, 1e5), lease_s=2.0, cycle_s=0.02, secrets={user: SECRET})
    with running(rules) as made:
        monkeypatch.setenv("PARIO_CONTROL", str(made.address))
        monkeypatch.setenv("PARIO_CONTROL_TOKEN", str(tmp_path / "token"))
        yield made


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> list[Agent]:
    """All that are made."""
    made: list[Agent] = []
    init = Agent.__init__

    def noted(self: Agent, *arguments: object) -> None:
        made.append(self)
        init(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Agent, "__init__", noted)
    return made


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """[bytes, operations] that the files below are asked for."""
    seen = [0, 0]
    init, read, pread = FileFetcher.__init__, FileFetcher.read, FileFetcher.pread

    def counting_init(self: FileFetcher, *arguments: object) -> None:
        seen[1] += 1
        init(self, *arguments)  # type: ignore[arg-type]

    def counting_read(self: FileFetcher, reads: np.ndarray, out: np.ndarray, starts: np.ndarray) -> None:
        seen[0] += int(reads["nbytes"].sum())
        seen[1] += len(reads)
        read(self, reads, out, starts)

    def counting_pread(self: FileFetcher, offset: int, nbytes: int) -> bytes:
        seen[0] += nbytes
        seen[1] += 1
        return pread(self, offset, nbytes)

    monkeypatch.setattr(FileFetcher, "__init__", counting_init)
    monkeypatch.setattr(FileFetcher, "read", counting_read)
    monkeypatch.setattr(FileFetcher, "pread", counting_pread)
    return seen


@pytest.mark.parametrize("tiers", [None, (pario.Tier("memory", "8MiB"),)], ids=["store", "memory"])
@pytest.mark.parametrize("shuffle", [False, "global", "block"])
@pytest.mark.parametrize("fetch", [None, "direct"])
def test_all_that_a_loader_asks_for_is_counted(
    plane: Plane, agents: list[Agent], store: list[int], dataset: str, shuffle: bool | str, fetch: Any, tiers: object
) -> None:
    # Nothing is to be under way when it is counted.
    options = pario.Options(tiers=tiers, once=True)  # type: ignore[arg-type]
    with pario.Loader(dataset, 16, shuffle=shuffle, options=options, recipe=Recipe(fetch=fetch)) as loader:
        for _ in range(2):
            check_epoch(loader)
        (agent,) = agents
        counted = list(agent.bucket.used)
    assert store[0] > 1_200_000, "the records"
    if tiers is not None:
        assert store[0] < 2_400_000, "the second epoch does not ask the store"
    assert counted[0] == store[0]
    # Besides what the files see there are looks for a saved index, and whether the path leads elsewhere by now.
    assert store[1] + 4 <= counted[1] <= store[1] + 12
    assert not agent.hold(), "it has ended"


def test_a_job_is_held_to_its_rate(plane: Plane, agents: list[Agent], dataset: str) -> None:
    """Through the threads of a Reader: 1.2 MB at 4 MB/s."""
    plane.book.reload(replace(plane.book.rules, capacity=(4e6, None)))
    with pario.Reader(dataset) as reader:
        (agent,) = agents
        until(lambda: agent.bucket.rates[0] == pytest.approx(4e6))
        before, begin = agent.bucket.used[0], time.monotonic()
        records = reader.read(np.arange(N))
        reader.read([0])
        seconds, used = time.monotonic() - begin, agent.bucket.used[0] - before
    assert bytes(records[7]) == value(7)
    assert used > 1_200_000
    # The last reads are let in as soon as those before them are paid for.
    assert seconds >= (used - 4e6 * BURST_S - 3 * (256 << 10)) / 4e6
    assert seconds < 2.0


def test_the_report_names_the_plane(plane: Plane, agents: list[Agent], dataset: str) -> None:
    options = pario.Options(tiers=(), slot_bytes=256 << 10, slots=3)
    with pario.Loader(dataset, 16, options=options) as loader:
        for _batch in loader:
            pass
        before = loader.report()
        plane.book.reload(replace(plane.book.rules, capacity=(4e6, None)))
        until(lambda: agents[0].bucket.rates[0] == pytest.approx(4e6))
        for _ in range(4):  # what was read ahead is a small part of that
            for _batch in loader:
                pass
        report = loader.report().since(before)
    assert report.sentence.startswith("the control plane's limit was the slow part: it let "), report


def test_several_loaders_of_a_process_are_one_member(plane: Plane, dataset: str) -> None:
    with pario.Loader(dataset, 16) as one, pario.Loader(dataset, 16) as other:
        next(iter(one))
        next(iter(other))
        until(lambda: plane.book.members)
        assert plane.book.members == 1


def test_nothing_is_left_open(plane: Plane, dataset: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pario.Reader(dataset) as reader:
            assert bytes(reader.read([3])[0]) == value(3)
    until(lambda: len(os.listdir("/proc/self/fd")) <= before)  # the plane's ends, too
