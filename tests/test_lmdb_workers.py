"""A file that was cut off, under four worker processes: an exception that tells the place, and nobody dies."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import lmdb as real
import pytest
from required import framework

import pario.lmdb as ours

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")

N = 60
WORKERS = 4
FORMATS = ["format 1", "format 3"]
#: Starting four processes anew takes a while: once.
METHODS = pytest.mark.parametrize(
    ("cut", "method"),
    [(0, "fork"), (1, "fork"), (0, "spawn")],
    indirect=["cut"],
    ids=["format 1-fork", "format 3-fork", "format 1-spawn"],
)


class Records:
    """A Dataset that keeps its environment."""

    def __init__(self, lmdb: Any, path: str) -> None:
        self.env = lmdb.open(path, readonly=True, lock=False, readahead=False, meminit=False)

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> bytes:
        with self.env.begin() as txn:
            value: bytes = txn.get(b"%08d" % index)
            return value


def lengths(dataset: Records, first: int) -> tuple[int, dict[int, int], list[ours.Error]]:
    """In a worker: (its pid, bytes of every record that can be read, the errors of the others), starting anywhere."""
    found: dict[int, int] = {}
    errors = []
    for i in range(first, first + N):
        try:
            found[i % N] = len(dataset[i % N])
        except ours.Error as e:
            errors.append(e)
    return os.getpid(), found, errors


def one(dataset: Records, index: int) -> bytes:
    return dataset[index]


@pytest.fixture(scope="module", params=[0, 1], ids=FORMATS)
def cut(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, int]:
    """(folder, a record whose pages are beyond the end of the file)"""
    whole, folder = (tmp_path_factory.mktemp("cut") / name for name in ("whole", "cut"))
    with real.open(str(whole), map_size=1 << 26, lib_version=request.param) as env, env.begin(write=True) as txn:
        for i in range(N):
            txn.put(b"%08d" % i, bytes([i]) * 30_000)
    folder.mkdir()
    shutil.copyfile(whole / "data.mdb", folder / "data.mdb")
    # The tree's pages lie among the values of its first records.
    os.truncate(folder / "data.mdb", (folder / "data.mdb").stat().st_size * 2 // 3)
    return str(folder), N - 1


def check(error: ours.Error, folder: str) -> None:
    """It names the file and the place, which is beyond the end of what there is."""
    place = os.path.join(folder, "data.mdb")
    assert isinstance(error, ours.CorruptedError)
    assert isinstance(error, real.CorruptedError)
    assert error.path == place
    assert error.page is not None
    assert error.offset == error.page * 4096
    assert os.path.getsize(place) < error.offset + 30_000
    for text in (place, f"page {error.page}", f"offset {error.offset}", "beyond the end of the file"):
        assert text in str(error)


def test_in_one_process(cut: tuple[str, int]) -> None:
    folder, lost = cut
    dataset = Records(ours, folder)
    _, found, errors = lengths(dataset, 0)
    assert len(found) >= N // 2
    assert set(found.values()) == {30_000}
    assert len(errors) == N - len(found) > 0
    for error in errors:
        check(error, folder)
    with pytest.raises(real.Error):
        dataset[lost]
    check(pickle.loads(pickle.dumps(errors[0])), folder)


@METHODS
def test_under_four_workers(cut: tuple[str, int], method: str) -> None:
    folder, lost = cut
    dataset = Records(ours, folder)
    _, whole, _ = lengths(dataset, 0)
    with ProcessPoolExecutor(WORKERS, mp_context=multiprocessing.get_context(method)) as pool:
        # The error itself, raised in a worker, in our hands. A dead worker would be a BrokenProcessPool.
        for attempt in [pool.submit(one, dataset, lost) for _ in range(2 * WORKERS)]:
            with pytest.raises(ours.CorruptedError) as caught:
                attempt.result(timeout=60)
            check(caught.value, folder)
        for attempt in [pool.submit(lengths, dataset, 15 * i) for i in range(WORKERS)]:
            _, found, errors = attempt.result(timeout=60)
            assert found == whole
            assert len(errors) == N - len(whole)
            for error in errors:
                check(error, folder)
        workers = list(pool._processes.values())
        assert len(workers) == (WORKERS if method == "spawn" else len(workers))
        assert all(worker.is_alive() for worker in workers)
    assert [worker.exitcode for worker in workers] == [0] * len(workers)


def test_what_py_lmdb_does(cut: tuple[str, int], tmp_path: Path) -> None:
    """The bus error that pario is there to avoid; LMDB 1.0 looks at the file's size when it opens it."""
    folder, lost = cut
    lines = (
        "import sys, lmdb",
        "env = lmdb.open(sys.argv[1], readonly=True, lock=False)",
        f"print(len(env.begin().get(b'%08d' % {lost})))",
    )
    done = subprocess.run([sys.executable, "-c", "\n".join(lines), folder], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGBUS or "lmdb." in done.stderr, done
    assert done.returncode != 0


@pytest.mark.frameworks
@METHODS
def test_under_a_data_loader(cut: tuple[str, int], method: str) -> None:
    framework("torch")
    data = importlib.import_module("torch.utils.data")
    folder, _ = cut
    dataset = Records(ours, folder)
    loader = data.DataLoader(
        dataset, batch_size=4, num_workers=WORKERS, multiprocessing_context=method, collate_fn=sizes, timeout=100
    )
    with pytest.raises(ours.CorruptedError, match="beyond the end of the file") as caught:
        assert [set(batch) for batch in loader]
    # torch makes a new exception of the same class, with the worker's traceback as its text.
    place = re.search(r"path '(.*)', page (\d+), offset (\d+)\]", str(caught.value))
    assert place is not None
    assert place[1] == os.path.join(folder, "data.mdb")
    assert int(place[3]) == 4096 * int(place[2])
    if method == "spawn":
        return  # once more four processes: slow with torch
    sound = data.DataLoader(
        data.Subset(dataset, range(10)), num_workers=WORKERS, multiprocessing_context=method, collate_fn=sizes
    )
    assert [n for batch in sound for n in batch] == [30_000] * 10


def sizes(batch: list[bytes]) -> list[int]:
    return [len(record) for record in batch]
